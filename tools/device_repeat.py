"""What gives the same bits in every call, after every compilation and in every process.

    python tools/device_repeat.py                # all programs, by default and deterministic=True
    python tools/device_repeat.py --only conv,attention

Each program is compiled twice in each of two processes, without a plan cache, and run three times
after each: as it is by default, and with `CompileOptions(deterministic=True)`. The table says how
far bits agree. Exits with 1 if anything differs with `deterministic=True`, or cannot be run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim

COMPILED, CALLS, PROCESSES = 2, 3, 2
Arrays = list[np.ndarray]
Program = tuple[Callable[..., Any], Arrays]  # a function and what it is called with
Bits = list[list[str]]  # a hash for each call, for each compilation

PROGRAMS: dict[str, Callable[[np.random.Generator], Program]] = {}
STEPS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Any], Any, str]]] = {}


def normal(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(getattr(td, dtype).numpy)


def total(function: Callable[..., Any], *which: int) -> Callable[..., Any]:
    """The gradient of a sum of squares."""
    return td.grad(lambda *given: (td.cast(function(*given), "float32") ** 2).mean(), which)


def _convolutions() -> None:
    # x, w, stride, padding, groups
    shapes = {
        "3x3": ((32, 64, 28, 28), (64, 64, 3, 3), 1, 1, 1),
        "3x3 stride 2": ((32, 64, 28, 28), (128, 64, 3, 3), 2, 1, 1),
        "7x7 of three channels": ((16, 3, 64, 64), (32, 3, 7, 7), 2, 3, 1),
        "1x1": ((32, 64, 14, 14), (128, 64, 1, 1), 1, 0, 1),
        "3x3 in groups": ((16, 32, 28, 28), (32, 8, 3, 3), 1, 1, 4),
        "3x3 of one image": ((1, 16, 112, 112), (16, 16, 3, 3), 1, 1, 1),
    }
    for dtype in ("float32", "bfloat16", "float16"):
        for name, (xs, ws, stride, padding, groups) in shapes.items():

            def function(x, w, stride=stride, padding=padding, groups=groups):
                return td.conv(x, w, stride=stride, padding=padding, groups=groups)

            def drawn(rng, xs=xs, ws=ws, dtype=dtype):
                return [normal(rng, dtype, *xs), normal(rng, dtype, *ws)]

            PROGRAMS[f"conv {name} {dtype}"] = lambda r, f=function, d=drawn: (f, d(r))
            for i, of in enumerate(("images", "weights")):
                PROGRAMS[f"conv {name} {dtype}, gradient of {of}"] = (
                    lambda r, f=function, d=drawn, i=i: (total(f, i), d(r))
                )


def _attention() -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        for causal in (False, True):

            def function(q, k, v, causal=causal):
                return td.attention(q, k, v, causal=causal)

            def drawn(rng, dtype=dtype):
                return [normal(rng, dtype, 4, 8, 512, 64) for _ in range(3)]

            name = f"attention {'causal ' if causal else ''}{dtype}"
            PROGRAMS[name] = lambda r, f=function, d=drawn: (f, d(r))
            PROGRAMS[f"{name}, gradient"] = lambda r, f=function, d=drawn: (total(f, 0, 1, 2), d(r))


def _products() -> None:
    sizes = {"512": (512, 512, 512), "deep": (64, 96, 65536), "wide": (4096, 256, 1024)}
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        for name, (m, n, k) in sizes.items():
            if dtype == "float64" and name == "wide":
                continue

            def drawn(rng, m=m, n=n, k=k, dtype=dtype):
                return [normal(rng, dtype, m, k), normal(rng, dtype, k, n)]

            PROGRAMS[f"matmul {name} {dtype}"] = lambda r, d=drawn: (lambda x, y: x @ y, d(r))
    PROGRAMS["matmul bfloat16, gradient"] = lambda r: (
        total(lambda x, y: x @ y, 0, 1),
        [normal(r, "bfloat16", 2048, 768), normal(r, "bfloat16", 768, 768)],
    )
    PROGRAMS["small products float32"] = lambda r: (
        lambda x, y: td.relu(x @ y).sum(0),
        [normal(r, "float32", 128, 784), normal(r, "float32", 784, 10)],
    )


def _indexed(rng: np.random.Generator, dtype: str) -> Arrays:
    """A table, and indices of which each comes many times."""
    return [normal(rng, dtype, 500, 256), rng.integers(0, 500, 16384).astype(np.int32)]


def _rest() -> None:
    for dtype in ("float32", "bfloat16"):
        of = {
            "embedding, gradient": lambda r, t: (
                total(lambda w, i: td.embedding(i, w), 0),
                _indexed(r, t),
            ),
            "scatter_add": lambda r, t: (
                lambda w, i, u: td.scatter_add(w, i, u),
                [*_indexed(r, t), normal(r, t, 16384, 256)],
            ),
            "cumsum": lambda r, t: (lambda x: td.cumsum(x, 1), [normal(r, t, 512, 2000)]),
            "sort": lambda r, t: (lambda x: td.sort(x, 1), [normal(r, t, 128, 1000)]),
            "topk": lambda r, t: (lambda x: td.topk(x, 8, 1), [normal(r, t, 128, 1000)]),
            "layer_norm, gradient": lambda r, t: (
                total(td.layer_norm, 0, 1, 2),
                [normal(r, t, 4096, 768), normal(r, t, 768), normal(r, t, 768)],
            ),
            "sums": lambda r, t: (
                lambda x: [x.sum(), x.sum(0), x.sum(1), td.logsumexp(x, 0), td.var(x, 1)],
                [normal(r, t, 4096, 1000)],
            ),
            "max_pool, gradient": lambda r, t: (
                total(lambda x: td.max_pool(x, 3, 2, 1), 0),
                [normal(r, t, 16, 32, 56, 56)],
            ),
            "cross_entropy, gradient": lambda r, t: (
                td.grad(lambda x, y: losses.cross_entropy(x, y)),
                [normal(r, t, 1024, 8192), r.integers(0, 8192, 1024).astype(np.int32)],
            ),
        }
        for name, make in of.items():
            PROGRAMS[f"{name} {dtype}"] = lambda r, make=make, dtype=dtype: make(r, dtype)


class Mixed(nn.Module):
    """Tokens, attention and the weights of a table: what a language model has."""

    def __init__(self) -> None:
        self.table = nn.Embedding(1000, 256)
        self.attention = nn.MultiHeadAttention(256, 4, batch_first=True)
        self.norm, self.out = nn.LayerNorm(256), nn.Linear(256, 1000)

    def forward(self, tokens: td.Tensor) -> td.Tensor:
        x = self.table(tokens)
        return self.out(self.norm(x + self.attention(x, causal=True)))


def _trained() -> None:
    rng = np.random.default_rng(5)
    images = {"x": normal(rng, "float32", 64, 3, 32, 32), "y": rng.integers(0, 9, 64)}
    tokens = {"x": rng.integers(0, 1000, (8, 256)), "y": rng.integers(0, 1000, (8, 256))}

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, 2, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * 64, 9),
        )  # fmt: skip

    def loss(m: Any, batch: Any) -> Any:
        found = m(batch["x"])
        return losses.cross_entropy(found.reshape(-1, found.shape[-1]), batch["y"].reshape(-1))

    for precision in ("float32", "bfloat16"):
        STEPS[f"conv net, six steps, {precision}"] = lambda p=precision: (
            network(), loss, images, p,
        )  # fmt: skip
        STEPS[f"language model, six steps, {precision}"] = lambda p=precision: (
            Mixed(), loss, tokens, p,
        )  # fmt: skip


for _family in (_convolutions, _attention, _products, _rest, _trained):
    _family()


def hashed(value: Any) -> str:
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, tuple | list):
            for p in part:
                add(p)
        else:
            found.update(np.ascontiguousarray(np.asarray(part)).tobytes())

    add(value)
    return found.hexdigest()[:16]


def bits_of_program(name: str, device: str, options: td.CompileOptions) -> Bits:
    function, given = PROGRAMS[name](np.random.default_rng(3))
    specs = [td.Spec(a.shape, str(a.dtype)) for a in given]
    found: Bits = []
    for _ in range(COMPILED):
        program = td.compile(function, *specs, device=device, options=options)
        found.append([hashed(program(*given)) for _ in range(CALLS)])
    return found


def bits_of_step(name: str, device: str, options: td.CompileOptions) -> Bits:
    found: Bits = []
    for _ in range(COMPILED):
        model, loss, batch, precision = STEPS[name]()
        batch = {n: a if a.dtype.kind == "f" else a.astype(np.int32) for n, a in batch.items()}
        specs = {n: td.Spec(a.shape, str(a.dtype)) for n, a in batch.items()}
        step = td.compile_step(
            model, loss, optim.adamw(1e-3), specs, device=device, precision=precision,
            options=options,
        )  # fmt: skip
        start, hashes = step.state_dict(), list[str]()
        for _ in range(CALLS):
            step.load_state_dict(start)
            told = [step(batch).loss for _ in range(6)]
            state = step.state_dict()
            hashes.append(hashed([told, [state[n] for n in sorted(state)]]))
        found.append(hashes)
    return found


def chosen(only: str) -> list[str]:
    every = [*PROGRAMS, *STEPS]
    wanted = [w for w in only.split(",") if w]
    return [n for n in every if not wanted or any(w in n for w in wanted)]


def work(device: str, only: str, is_deterministic: bool) -> None:
    """A line for each program: its bits, or what was raised."""
    options = td.CompileOptions(deterministic=is_deterministic)
    for name in chosen(only):
        try:
            bits_of = bits_of_program if name in PROGRAMS else bits_of_step
            print(json.dumps([name, bits_of(name, device, options)]), flush=True)
        except Exception as error:
            print(json.dumps([name, f"{type(error).__name__}: {str(error)[:200]}"]), flush=True)


def verdict(found: list[Bits | str | None]) -> str:
    """How far bits agree: of all processes, or where they first part."""
    for bits in found:
        if bits is None or isinstance(bits, str):
            return f"FAILED: {bits or 'the process ended'}"
    runs = [bits for bits in found if isinstance(bits, list)]
    if any(len(set(calls)) > 1 for bits in runs for calls in bits):
        return "differs from call to call"
    if any(len({calls[0] for calls in bits}) > 1 for bits in runs):
        return "differs after another compilation"
    if len({bits[0][0] for bits in runs}) > 1:
        return "differs in another process"
    return "the same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="parts of names")
    parser.add_argument("--worker", choices=["default", "deterministic"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["TREADLE_CACHE"] = "off"  # what a process chose must not reach the next
    if given.worker:
        work(given.device, given.only, given.worker == "deterministic")
        return
    line = [sys.executable, __file__, "--device", given.device, "--only", given.only, "--worker"]
    running = {
        mode: [
            subprocess.Popen([*line, mode], stdout=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        for mode in ("default", "deterministic")
    }
    told = {
        mode: [dict(map(json.loads, p.communicate()[0].splitlines())) for p in processes]
        for mode, processes in running.items()
    }
    found = {
        name: {mode: verdict([t.get(name) for t in some]) for mode, some in told.items()}
        for name in chosen(given.only)
    }
    for name, of in found.items():
        if set(of.values()) != {"the same"}:
            print(f"{name}: by default {of['default']}; deterministic: {of['deterministic']}")
    same = sum(of["default"] == "the same" for of in found.values())
    bad = [n for n, of in found.items() if of["deterministic"] != "the same"]
    failed = [n for n, of in found.items() if of["default"].startswith("FAILED")]
    print(f"{len(found)} programs on {given.device}: {same} give the same bits by default, "
          f"{len(found) - len(bad)} with deterministic=True; {len(failed)} failed")  # fmt: skip
    sys.exit(bool(bad or failed))


if __name__ == "__main__":
    main()
