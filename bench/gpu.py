"""The GPU's benchmarks: Treadle and its peers in turns, in one process, on a hot device.

    python bench/gpu.py gpt2_b32 gpt2_b4 gpt_6x384 mlp --json out.json
    python bench/gpu.py cnn resnet50 smollm2 --peers eager reduce-overhead --json out.json
    python bench/gpu.py --table --json out.json

All start from the same values; embeddings are drawn as GPT-2's are (σ = 0.02), so that losses are
of the size that training has. Each contender warms up, the device is heated for two seconds, then
contenders take turns; a turn ends when the device is done. The median of the turns counts. Clocks
and power are noted with every turn, because a hot card runs slower. Results are added to those that
the file has, so that a run may be cut in several; `--table` prints what it has.

PyTorch: convolutions with channels last, plans by timing (`cudnn.benchmark`), bfloat16 by autocast,
cuDNN's attention allowed; what `compile` compiles, `reduce-overhead` finds in its caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from gpu_jax import jax_step
from peers import BETAS, DECAY, EPSILON, RATE, TORCH

import treadle as td
from models import WORKLOADS, Workload, loss
from treadle import optim

HEAT, TURN, ROUNDS = 2.0, 0.5, 5  # seconds, seconds, turns of each
LOSSES = 0.02  # by how much first losses may differ
TOGETHER = 16  # steps in one launch of the smallest workload
PEERS = ("eager", "compile", "reduce-overhead", "jax")
WIDE = ("mlp",)  # trained in float32; the others in bfloat16
IMAGES = ("cnn", "resnet")


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
    return {n: v.astype(np.float32) if v.dtype.kind == "f" else v for n, v in found.items()}


def treadle_contender(name: str, work: Workload, values: dict[str, np.ndarray]) -> Contender:
    start = time.perf_counter()
    step = td.compile_step(
        work.make(), loss, optim.adamw(RATE, BETAS, EPSILON, DECAY), work.specs(),
        clip_norm=work.clip, device="cuda", precision="float32" if name in WIDE else "bfloat16",
    )  # fmt: skip
    step.load_params(values)
    last: list[Any] = [None]
    import torch

    batch = {n: torch.tensor(a, device="cuda") for n, a in work.batch().items()}
    torch.cuda.synchronize()
    if name == "mlp":

        def many() -> None:
            last[0] = step.run([batch] * TOGETHER)

        made = Contender("treadle", many, lambda: last[0].loss, TOGETHER)
    else:

        def one() -> None:
            last[0] = step(batch)

        made = Contender("treadle", one, lambda: last[0].loss)
    made.step()
    made.wait()
    losses = last[0].losses if name == "mlp" else [last[0].loss]
    made.notes["loss"] = float(losses[0])
    made.first = time.perf_counter() - start
    made.notes["memory GiB"] = step.report.peak_bytes / 2**30
    return made


def torch_contender(mode: str, name: str, work: Workload, values: dict[str, Any]) -> Contender:
    import torch
    import torch.nn.functional as F

    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    is_image = work.architecture in IMAGES
    layout = torch.channels_last if is_image else torch.contiguous_format
    model = TORCH[work.architecture](*work.sizes).cuda()
    found = model.load_state_dict({n: torch.tensor(v) for n, v in values.items()}, strict=False)
    assert not found.unexpected_keys, found
    model = model.to(memory_format=layout)
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, BETAS, EPSILON, weight_decay=DECAY, fused=True
    )
    data = work.batch()
    x = torch.tensor(data["x"], device="cuda")
    x = x.to(memory_format=layout) if is_image else x
    y = torch.tensor(data["y"], device="cuda").long().reshape(-1)
    narrow = torch.autocast("cuda", torch.bfloat16, enabled=name not in WIDE)

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
    import jax

    start = time.perf_counter()
    run, last = jax_step(work, values, name not in WIDE)
    made = Contender("jax", run, lambda: jax.block_until_ready(last))
    run()
    made.notes["loss"] = float(last[1])
    made.first = time.perf_counter() - start
    return made


def clocks() -> list[str]:
    query = "--query-gpu=clocks.sm,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().split(", ")


def compare(name: str, peers: Sequence[str]) -> dict[str, Any]:
    work = WORKLOADS[name]
    values = first_values(work)
    makers: list[Callable[[], Contender]] = [lambda: treadle_contender(name, work, values)]
    for peer in peers:
        if peer == "jax":
            makers.append(lambda: jax_contender(name, work, values))
        else:
            makers.append(lambda mode=peer: torch_contender(mode, name, work, values))
    contenders: list[Contender] = []
    left_out: list[str] = []
    for make in makers:
        try:
            contenders.append(make())
        except Exception as error:  # a peer that cannot run is said, not hidden
            left_out.append(f"{type(error).__name__}: {str(error)[:200]}")
            print(f"  left out: {left_out[-1]}", flush=True)
    agree(contenders)
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
    found = {"title": work.title, "rows": rows, "clocks": noted, "left out": left_out}
    show(found)
    return found


def agree(contenders: Sequence[Contender]) -> None:
    """First losses are of the same values and data: they differ by rounding alone."""
    losses = [c.notes["loss"] for c in contenders]
    if losses and max(losses) - min(losses) > LOSSES * max(losses):
        print(
            f"  first losses differ: {[(c.name, c.notes['loss']) for c in contenders]}", flush=True
        )


def show(found: dict[str, Any]) -> None:
    rows = found["rows"]
    best = min((r["ms"] for n, r in rows.items() if n != "treadle"), default=float("nan"))
    own = rows["treadle"]["ms"] if "treadle" in rows else float("nan")
    print(f"{found['title']}: {best / own:.3f} × the best peer", flush=True)
    for n, r in rows.items():
        rest = ", ".join(f"{k} {v:.4g}" for k, v in r.items() if k != "ms")
        print(f"  {n:<24}{r['ms']:9.4f} ms  {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", choices=sorted(WORKLOADS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="print what the file has")
    given = parser.parse_args()
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    for result in known.values() if given.table else ():
        show(result)
    for name in given.workloads:
        known[name] = compare(name, given.peers)
        release()
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))


def release() -> None:
    """Memory and compiled functions of one workload, before the next."""
    import gc

    gc.collect()
    if "torch" in sys.modules:
        import torch

        torch.compiler.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
