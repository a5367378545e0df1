"""The GPU's benchmarks: Treadle and its peers in turns, in one process, on a hot device.

    python bench/gpu.py gpt2_b32 gpt2_b4 gpt_6x384 mlp --json out.json

All start from the same values; embeddings are drawn as GPT-2's are (σ = 0.02), so that losses are
of the size that training has. Each contender warms up, the device is heated for two seconds, then
contenders take turns; a turn ends when the device is done. The median of the turns counts. Clocks
and power are noted with every turn, because a hot card runs slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from peers import BETAS, DECAY, EPSILON, JAX, RATE, TORCH, jax_adamw, jax_layout

import treadle as td
from models import WORKLOADS, Workload, loss
from treadle import optim

HEAT, TURN, ROUNDS = 2.0, 0.5, 5  # seconds, seconds, turns of each
TOGETHER = 16  # steps in one launch of the smallest workload
NARROW = ("gpt2_b32", "gpt2_b4", "gpt_6x384")  # trained in bfloat16


class Contender:
    """Something that trains: `step` may return early, `wait` when the device is done."""

    def __init__(self, name: str, step: Callable[[], Any], wait: Callable[[], Any], steps: int = 1):
        self.name, self.step, self.wait, self.steps = name, step, wait, steps
        self.times: list[float] = []
        self.first = 0.0
        self.notes: dict[str, Any] = {}

    def turn(self, seconds: float) -> float:
        """Seconds of a step, over about some seconds."""
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(4):
                self.step()
            self.wait()
            count += 4 * self.steps
        return (time.perf_counter() - start) / count


def first_values(work: Workload) -> dict[str, np.ndarray]:
    """The model's own, with tables as small as GPT-2's."""
    rng = np.random.default_rng(0)
    step = td.compile_forward(work.make(), lambda m, b: m(b["x"]), work.specs(), device="oracle")
    found = step.params
    for name, value in found.items():
        if name in ("wte.weight", "wpe.weight"):
            found[name] = rng.normal(0, 0.02, value.shape)
    return {n: v.astype(np.float32) for n, v in found.items()}


def treadle_contender(name: str, work: Workload, values: dict[str, np.ndarray]) -> Contender:
    start = time.perf_counter()
    step = td.compile_step(
        work.make(), loss, optim.adamw(RATE, BETAS, EPSILON, DECAY), work.specs(),
        clip_norm=work.clip, device="cuda", precision="bfloat16" if name in NARROW else "float32",
    )  # fmt: skip
    step.load_params(values)
    last: list[Any] = [None]
    batch: Any = work.batch()
    if name == "mlp":
        import torch

        arrays = {n: torch.tensor(a, device="cuda") for n, a in batch.items()}

        def many() -> None:
            last[0] = step.run([arrays] * TOGETHER)

        made = Contender("treadle", many, lambda: last[0].loss, TOGETHER)
    else:

        def one() -> None:
            last[0] = step(batch)

        made = Contender("treadle", one, lambda: last[0].loss)
    made.step()
    made.notes["loss"] = float(made.wait())
    made.first = time.perf_counter() - start
    made.notes["memory GiB"] = step.report.peak_bytes / 2**30
    return made


def torch_contender(mode: str, name: str, work: Workload, values: dict[str, Any]) -> Contender:
    import torch
    import torch.nn.functional as F

    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = TORCH[work.architecture](*work.sizes).cuda()
    model.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, BETAS, EPSILON, weight_decay=DECAY, fused=True
    )
    data = work.batch()
    x = torch.tensor(data["x"], device="cuda")
    y = torch.tensor(data["y"], device="cuda").long().reshape(-1)
    narrow = torch.autocast("cuda", torch.bfloat16, enabled=name in NARROW)

    def forward(x: Any, y: Any) -> Any:
        with narrow:
            return F.cross_entropy(model(x).reshape(-1, work.classes).float(), y)

    options = {"compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    of: Any = forward if mode == "eager" else torch.compile(forward, **options[mode])
    last: list[Any] = [None]

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        value = of(x, y)
        value.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        last[0] = value.detach()

    made = Contender(f"torch {mode}", run, torch.cuda.synchronize)
    run()
    made.notes["loss"] = float(last[0])
    made.first = time.perf_counter() - start
    for _ in range(4):
        run()
    torch.cuda.synchronize()
    made.notes["memory GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return made


def jax_contender(name: str, work: Workload, values: dict[str, Any]) -> Contender:
    """Only where everything is float32: its models are written so."""
    import jax
    import jax.numpy as jnp

    start = time.perf_counter()
    forward = JAX[work.architecture](*work.sizes)

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        z = forward(p, x)
        picked = jnp.take_along_axis(z, y[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(z, -1) - picked)

    def train(state: Any, x: Any, y: Any) -> Any:
        p, m, v, t = state
        value, g = jax.value_and_grad(loss_of)(p, x, y)
        return (*jax_adamw(p, g, m, v, t + 1), t + 1), value

    train = jax.jit(train, donate_argnums=0)
    p = {n: jnp.array(jax_layout(work.architecture, n, a)) for n, a in values.items()}
    zeros = [jax.tree.map(jnp.zeros_like, p) for _ in range(2)]
    data = work.batch()
    x, y = jnp.array(data["x"]), jnp.array(data["y"])
    last: list[Any] = [(p, *zeros, jnp.float32(0)), None]

    def run() -> None:
        last[:] = train(last[0], x, y)

    made = Contender("jax", run, lambda: jax.block_until_ready(last))
    run()
    made.notes["loss"] = float(last[1])
    made.first = time.perf_counter() - start
    return made


def clocks() -> list[str]:
    query = "--query-gpu=clocks.sm,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")


def compare(name: str) -> dict[str, Any]:
    work = WORKLOADS[name]
    values = first_values(work)
    makers: list[Callable[[], Contender]] = [lambda: treadle_contender(name, work, values)]
    for mode in ("eager", "compile", "reduce-overhead"):
        makers.append(lambda mode=mode: torch_contender(mode, name, work, values))
    if name not in NARROW:
        makers.append(lambda: jax_contender(name, work, values))
    contenders: list[Contender] = []
    for make in makers:
        try:
            contenders.append(make())
        except Exception as error:  # a peer that cannot run is said, not hidden
            print(f"  left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
    noted = []
    for c in contenders:
        c.turn(0.3)
    start = time.perf_counter()
    while time.perf_counter() - start < HEAT:
        contenders[0].turn(TURN)
    for _ in range(ROUNDS):
        for c in contenders:
            c.times.append(c.turn(TURN))
            noted.append([c.name, *clocks()])
    rows = {
        c.name: {
            "ms": statistics.median(c.times) * 1e3,
            "low": min(c.times) * 1e3,
            "high": max(c.times) * 1e3,
            "first step s": c.first,
            **c.notes,
        }
        for c in contenders
    }
    best = min((r["ms"] for n, r in rows.items() if n != "treadle"), default=float("nan"))
    print(f"{work.title}: {best / rows['treadle']['ms']:.3f} × the best peer", flush=True)
    for n, r in rows.items():
        rest = ", ".join(f"{k} {v:.4g}" for k, v in r.items() if k != "ms")
        print(f"  {n:<24}{r['ms']:9.4f} ms  {rest}", flush=True)
    return {"title": work.title, "rows": rows, "clocks": noted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {name: compare(name) for name in given.workloads}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
