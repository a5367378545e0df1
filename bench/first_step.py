"""Seconds from `compile_step` to the first loss, in a process that has done nothing else.

    TREADLE_CACHE=/some/empty/folder python bench/first_step.py gpt2_b32 --device cuda   # cold
    TREADLE_CACHE=/some/empty/folder python bench/first_step.py gpt2_b32 --device cuda   # from it

AdamW; bfloat16 on a GPU, but for the small MLP. Imports of Treadle are not counted, what is
imported on the way is.
"""

from __future__ import annotations

import argparse
import time

import treadle as td
from models import WORKLOADS, loss
from treadle import optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    work = WORKLOADS[given.workload]
    is_narrow = given.device == "cuda" and given.workload != "mlp"
    model, batch = work.make(), work.batch()
    start = time.perf_counter()
    step = td.compile_step(
        model, loss, optim.adamw(1e-3), work.specs(), clip_norm=work.clip,
        device=given.device, precision="bfloat16" if is_narrow else "float32",
    )  # fmt: skip
    first = float(step(batch).loss)
    seconds, hits = time.perf_counter() - start, step.report.cache_hits
    print(f"{work.title}: {seconds:.2f} s, loss {first:.4f}, plans from the cache: {hits}")


if __name__ == "__main__":
    main()
