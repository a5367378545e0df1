"""Library calls beside the oracle: steps with `verify="full"` on the GPU at hand.

    python bench/attestation.py mlp_wide:float32 gpt2_b4:bfloat16 gpt_6x384:bfloat16

For each workload of models.py, in the precision behind the colon: seconds from `compile_step` to
the compiled step, kernels that are established, library calls that were run on random inputs, the
one that deviates most beside what its contract allows, and what is not established.
"""

from __future__ import annotations

import argparse
import time

import treadle as td
from models import WORKLOADS, loss
from treadle import optim


def attested(name: str, precision: str) -> None:
    work, start = WORKLOADS[name], time.perf_counter()
    step = td.compile_step(
        work.make(), loss, optim.adamw(1e-3), work.specs(), clip_norm=work.clip,
        precision=precision, device="cuda", options=td.CompileOptions(verify="full"),
    )  # fmt: skip
    seconds, claims = time.perf_counter() - start, step.report.claims
    kernels = [c for c in claims if c.kind == "kernel"]
    calls = [c for c in claims if c.kind == "library"]
    held = sum(c.is_established for c in kernels)
    print(
        f"{name} {precision}: {seconds:.1f} s; kernels {held} of {len(kernels)}; calls {len(calls)}"
    )
    if calls:
        worst = max(calls, key=lambda c: c.measured["share of what is allowed"])
        print(f"  the most: {worst.spec} {worst.measured}")
    for claim in claims:
        if not claim.is_established:
            print(f"  left: {claim}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", metavar="NAME:PRECISION")
    for given in parser.parse_args().workloads:
        name, _, precision = given.partition(":")
        attested(name, precision or "float32")


if __name__ == "__main__":
    main()
