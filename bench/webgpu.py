"""WebGPU beside PyTorch and the CUDA backend, in turns in one process, on a hot device.

    python bench/webgpu.py steps mlp cnn smollm2 --precision float32 --peers eager compile
    python bench/webgpu.py steps smollm2 --precision float16 --peers compile
    python bench/webgpu.py products --precision float32

`steps` trains workloads of bench/models.py. PyTorch's float32 is its own (`highest`), or with
`--tf32` rounded to TF32 inside products; beside float16 PyTorch computes in bfloat16 by autocast.
`products` multiplies square and training matrices on both of Treadle's backends, results read back
once at the end, and prints TFLOP/s. Methods are those of bench/gpu.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu
import numpy as np
from peers import BETAS, DECAY, EPSILON, RATE

import treadle as td
from models import WORKLOADS, Workload, loss
from treadle import nn, optim

PRODUCTS = [(1024, 1024, 1024), (4096, 4096, 4096), (8192, 576, 1536), (8192, 576, 49152)]


def contender(work: Workload, values: dict[str, np.ndarray], precision: str) -> gpu.Contender:
    start = time.perf_counter()
    step = td.compile_step(
        work.make(), loss, optim.adamw(RATE, BETAS, EPSILON, DECAY), work.specs(),
        clip_norm=work.clip, device="webgpu", precision=precision,
    )  # fmt: skip
    step.load_params(values)
    batch, last = work.batch(), [None]

    def one() -> None:
        last[0] = step(batch)

    made = gpu.Contender("webgpu", one, lambda: float(last[0].loss))
    made.step()
    made.notes["loss"] = made.wait()
    made.first = time.perf_counter() - start
    made.notes["memory GiB"] = step.report.peak_bytes / 2**30
    made.notes["launches"] = sum(k.calls for k in step.kernels)
    return made


def compare(name: str, precision: str, peers: list[str], profiles: bool) -> None:
    work = WORKLOADS[name]
    values = gpu.first_values(work)
    gpu.WIDE = tuple(WORKLOADS) if precision == "float32" else ()
    found = [contender(work, values, precision)]
    found += [gpu.torch_contender(mode, name, work, values) for mode in peers]
    gpu.agree(found)
    for c in found:
        c.turn(0.3)
    for _ in range(gpu.ROUNDS):
        for c in found:
            c.times.append(c.turn(gpu.TURN))
    own = statistics.median(found[0].times)
    print(f"{work.title}, {precision}", flush=True)
    for c in found:
        ms = statistics.median(c.times) * 1e3
        rest = ", ".join(f"{k} {v:.4g}" for k, v in c.notes.items())
        ratio = own * 1e3 / ms
        print(f"  {c.name:<16}{ms:9.3f} ms  webgpu/this {ratio:.2f}  first {c.first:.1f} s, {rest}")
    if profiles:
        profile(work, precision)


def profile(work: Workload, precision: str) -> None:
    step = td.compile_step(
        work.make(), loss, optim.adamw(RATE), work.specs(), device="webgpu", precision=precision
    )
    print(str(step.profile(work.batch()))[:6000], flush=True)


class Products(nn.Module):
    """x · wᵀ for several w, all of them parameters: nothing is copied to the device in between."""

    def __init__(self, m: int, k: int, n: int, count: int):
        self.x = nn.Linear(k, m, bias=False)
        self.w = nn.ModuleList(nn.Linear(k, n, bias=False) for _ in range(count))

    def forward(self, scale: Any, dtype: Any) -> Any:
        x = self.x.weight.astype(dtype)
        found = [(x @ w.weight.astype(dtype).T).astype(td.float32).max() for w in self.w]
        return sum(found[1:], found[0]) * scale


def rate(device: str, sizes: tuple[int, int, int], precision: str, rounds: int) -> float:
    """TFLOP/s, of several products in one program."""
    m, k, n = sizes
    count, dtype = 8, getattr(td, precision)
    forward = td.compile_forward(
        Products(m, k, n, count),
        lambda model, batch: model(batch["scale"], dtype),
        {"scale": td.Spec(())},
        device=device,
    )
    batch = {"scale": np.float32(1)}
    return timed(lambda: forward(batch), rounds, 2 * m * n * k * count)


def timed(run: Callable[[], Any], rounds: int, flops: int) -> float:
    found = []
    for i in range(rounds + 2):
        start = time.perf_counter()
        float(np.asarray(run()))
        if i > 1:
            found.append(time.perf_counter() - start)
    return flops / min(found) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "products"])
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--precision", default="float32", choices=["float32", "float16"])
    parser.add_argument("--peers", nargs="*", default=["eager", "compile"])
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs=3, type=int, action="append")
    parser.add_argument("--devices", nargs="*", default=["webgpu", "cuda"])
    given = parser.parse_args()
    if given.tf32:
        import torch

        torch.set_float32_matmul_precision("high")
    if given.what == "steps":
        for name in given.workloads:
            compare(name, given.precision, given.peers, given.profile)
            gpu.release()
        return
    for sizes in map(tuple, given.sizes or PRODUCTS):
        rates = {d: rate(d, sizes, given.precision, given.rounds) for d in given.devices}
        text = ", ".join(f"{d} {r:.2f}" for d, r in rates.items())
        print(f"{sizes} {given.precision}: {text} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
