"""Steps of a small GPT on real text in float32, bfloat16 and float8: losses side by side.

    python bench/float8_curves.py --plot docs/images/float8_curves.svg
    python bench/float8_curves.py --device cuda --steps 1000 --json curves.json

All start from the same values and see the same batches: bytes of Python's standard library. The
plot shows means over 20 steps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from loss_curves import batches

import treadle as td
from models import Workload, loss
from treadle import optim
from treadle.train.curves import Plot

PRECISIONS = ("float32", "bfloat16", "float8")
WORK = Workload(
    "GPT 4 layers, width 128, context 64, batch 16, bytes",
    "gpt", (256, 64, 128, 4, 4), (16, 64), (16, 64), 256, True, 1.0,
)  # fmt: skip
MEAN = 20  # steps


def losses_in(precision: str, device: str, steps: int) -> list[float]:
    rate = optim.warmup_cosine(2e-3, steps // 20, steps)
    step = td.compile_step(
        WORK.make(), loss, optim.adamw(rate), WORK.specs(),
        clip_norm=WORK.clip, device=device, precision=precision,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tables = {n: v for n, v in step.params.items() if n in ("wte.weight", "wpe.weight")}
    step.load_params({n: rng.normal(0, 0.02, v.shape) for n, v in tables.items()}, strict=False)
    return [float(v) for v in step.run(batches(WORK.x, steps)).losses]


def means(values: list[float]) -> np.ndarray:
    whole = len(values) // MEAN * MEAN
    return np.array(values[:whole]).reshape(-1, MEAN).mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    curves: dict[str, list[float]] = {}
    for precision in PRECISIONS:
        start = time.perf_counter()
        curves[precision] = losses_in(precision, given.device, given.steps)
        last = np.mean(curves[precision][-100:])
        seconds = time.perf_counter() - start
        print(f"{precision}: mean of the last 100 losses {last:.4f}, {seconds:.0f} s", flush=True)
    if given.json is not None:
        rounded = {n: [round(v, 4) for v in c] for n, c in curves.items()}
        given.json.write_text(json.dumps(rounded))
    if given.plot is not None:
        at = np.arange(len(means(curves["float32"]))) * MEAN + MEAN / 2
        Plot({n: (at, means(c)) for n, c in curves.items()}).save(given.plot)


if __name__ == "__main__":
    main()
