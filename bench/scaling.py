"""How data-parallel steps would scale: measured compute and link, simulated ranks.

    python bench/scaling.py                   # GPT 4 × 128: measure, and check with 2 ranks
    python bench/scaling.py --simulate        # GPT-2 on H200s from figures that were measured
    python bench/scaling.py --plot            # docs/images/scaling.svg from the results

A step of R ranks is simulated: each has one shard (the batch grows with R), an exchange begins when
its gradient is ready and the one before is over, the update is of 1/R of the state, and parameters
are gathered.

The check measures, with one thread, when each gradient of a shard is ready, the update, and α and β
of MPI between two ranks of this machine; it simulates two ranks and runs them. The simulation of
GPT-2 takes a step's time on one H200 as `bench/gpu.py` measured it, divides it by the arithmetic
and memory of the plan's kernels, and takes α and β of links from data sheets: nothing with
more than one rank was measured there. Figures go to bench/results/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "scaling.json"
PICTURE = ROOT / "docs" / "images" / "scaling.svg"
RANKS = [2**i for i in range(11)]
SIZES = [2**i for i in range(8, 24, 3)]  # bytes that a rank gives in an exchange


@dataclass(frozen=True)
class Link:
    """Seconds that a message takes at least, and bytes a second of each rank."""

    alpha: float
    beta: float

    def all_to_all(self, nbytes: float, ranks: int) -> float:
        """The faster of pairwise messages and of Bruck's log₂ R rounds of half the data."""
        if ranks == 1:
            return 0.0
        rounds = math.ceil(math.log2(ranks))
        pairwise = (ranks - 1) * self.alpha + nbytes * (ranks - 1) / ranks / self.beta
        bruck = rounds * (self.alpha + nbytes / 2 / self.beta)
        return min(pairwise, bruck)

    def all_gather(self, nbytes: float, ranks: int) -> float:
        """Recursive doubling; the bytes are those of the whole."""
        rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
        return rounds * self.alpha + nbytes * (ranks - 1) / ranks / self.beta


# Assumed: what data sheets say for a rank and a direction, of which 80 % arrive.
LINKS = {
    "NVLink 4 (450 GB/s)": Link(4e-6, 0.8 * 450e9),
    "InfiniBand NDR (50 GB/s)": Link(3e-6, 0.8 * 50e9),
    "25 GbE (3.1 GB/s)": Link(25e-6, 0.8 * 3.125e9),
}


@dataclass(frozen=True)
class Compute:
    """One rank's work: gradients by when they are ready, and what comes after."""

    buckets: list[tuple[float, int]]  # seconds since the step began, bytes
    shard: float  # seconds of forward and backward
    update: float  # seconds of sums, norms and the update of the whole state
    parameters: int  # bytes
    state: int  # bytes of the optimizer's
    rest: int  # bytes of activations and gradients


# One H200: GPT-2 124M, batch 32, bfloat16 products, as docs/cuda.md has it (bench/gpu.py).
DEVICE = {"workload": "gpt2_b32", "step": 56.8e-3, "peak": 11.55 * 2**30}
FLOPS, BYTES = 400e12, 3.5e12  # a second, to divide that time by kernels


def planned() -> Compute:
    """When gradients of GPT-2 are ready, by the plan of a step of fewer rows; nothing is run."""
    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim
    from treadle.kernel.plan import last_uses

    work = WORKLOADS["gpt2_b4"]
    step = td.compile_step(
        work.make(), loss, optim.adamw(1e-4), work.specs(), device="cpu",
        parallel=td.DataParallel(shards=1, transport="self"),
    )  # fmt: skip
    variants = step._programs.built(step._inputs)
    programs, plan = variants.programs, variants.programs.shard().plan
    each = {k.name: max(k.flops / FLOPS, k.nbytes / BYTES) for k in plan.kernels}
    params = sum(t.nbytes for t in programs.gradients.values())
    update = 7 * params / BYTES  # reads gradient, parameter and two states, writes three
    shard = DEVICE["step"] - update
    buckets = ready_at(programs, plan, each, shard, last_uses(plan))
    rest = int(DEVICE["peak"]) - 3 * params
    return Compute(buckets, shard, update, params, 2 * params, rest)


def ready_at(
    programs: Any, plan: Any, each: dict[str, float], shard: float, ends: dict[str, Any]
) -> list[tuple[float, int]]:
    """Seconds after which each gradient is ready, and its bytes; kernels share a shard's time."""
    spent = [_seconds(s, plan.kernels, each) for s in plan.steps]
    total = sum(spent) or 1.0
    return [
        (shard * sum(spent[: ends[programs.names.gradient(n)].step + 1]) / total, t.nbytes)
        for n, t in programs.gradients.items()
    ]


def simulated(compute: Compute, link: Link, ranks: int) -> dict[str, float]:
    """Seconds of a step, what was hidden, and bytes on a rank."""
    free, busy = 0.0, 0.0
    for ready, nbytes in sorted(compute.buckets):
        cost = link.all_to_all(nbytes, ranks)
        busy += cost
        free = max(free, ready) + cost
    exposed = max(0.0, free - compute.shard)
    numbers = 2 * link.all_gather(8 * ranks, ranks)  # losses, then sums of squares
    gathered = sum(link.all_gather(nbytes, ranks) for _, nbytes in compute.buckets)
    step = compute.shard + exposed + numbers + compute.update / ranks + gathered
    alone = compute.shard + compute.update
    memory = compute.parameters + compute.rest + compute.state / ranks
    hidden = 1 - exposed / busy if busy else 1.0
    return {"step": step, "efficiency": alone / step, "hidden": hidden, "memory": memory}


def measured_link(comm: Any) -> Link:
    """α and β of all-to-all, by least squares of relative errors over the least times."""
    import numpy as np

    times = []
    for size in SIZES:
        given, taken = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        best = math.inf
        for _ in range(40):
            comm.texts("")
            start = time.perf_counter()
            comm.wait([comm.all_to_all(given, taken)])
            best = min(best, time.perf_counter() - start)
        times.append(best)
    sent = np.array(SIZES) * (comm.size - 1) / comm.size
    rows = np.stack([np.ones(len(SIZES)), sent], 1) / np.array(times)[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(SIZES)), rcond=None)
    return Link(max(float(alpha), 1e-7), 1 / max(float(per_byte), 1e-13))


def measured_step(name: str, rounds: int) -> dict[str, Any]:
    """A rank's part: one shard, of a batch with as many as there are ranks."""
    import numpy as np

    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim
    from treadle.distributed.launched import open_communicator

    work, comm = WORKLOADS[name], open_communicator("auto", 600.0)
    batch = {k: np.concatenate([np.asarray(v)] * comm.size) for k, v in work.batch(0).items()}
    step = td.compile_step(
        work.make(), loss, optim.adamw(1e-4), batch, clip_norm=work.clip, device="cpu",
        parallel=td.DataParallel(shards=comm.size, timeout=600.0),
    )  # fmt: skip
    float(step(batch).loss)
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        comm.texts("")
        before = dict(step.report.exchange)
        start = time.perf_counter()
        float(step(batch).loss)
        spent = {k: v - before.get(k, 0.0) for k, v in step.report.exchange.items()}
        rows.append({"step": time.perf_counter() - start, **spent})
    best = {k: min(row[k] for row in rows) for k in rows[0]}
    found: dict[str, Any] = {"rank": comm.rank, "best": best}
    if comm.size > 1:
        return found | {"link": asdict(measured_link(comm))}
    return found | {"compute": asdict(compute_of(step, batch, best))}


def compute_of(step: Any, batch: Any, best: dict[str, float]) -> Compute:
    """When gradients are ready: the profile's times of kernels, scaled to a step's."""
    from treadle.kernel.plan import last_uses

    variants = step._programs.built(step._inputs)
    programs, plan = variants.programs, variants.programs.shard().plan
    each = {k.kernel.name: k.seconds / max(k.kernel.calls, 1) for k in step.profile(batch).kernels}
    shard = best["shards"]
    buckets = ready_at(programs, plan, each, shard, last_uses(plan))
    params = sum(nbytes for _, nbytes in buckets)
    held = sum(t.nbytes for n, t in step.session.types.items() if ":optimizer:" in n)
    update = best["step"] - shard
    return Compute(buckets, shard, update, params, held, plan.arena + 2 * params)


def _seconds(planned: Any, kernels: Any, each: dict[str, float]) -> float:
    if hasattr(planned, "calls"):
        return sum(each.get(kernels[c.entry].name, 0.0) for c in planned.calls)
    return planned.length * sum(_seconds(s, kernels, each) for s in planned.steps)


def launched(ranks: int, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", *arguments]
    if ranks > 1:
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), *command]
    environment = {**os.environ, "TREADLE_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(t for t in done.stdout.splitlines() if t.startswith("{")))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    arguments = [given.workload, "--rounds", str(given.rounds)]
    one, two = launched(1, arguments), launched(2, arguments)
    for _ in range(given.turns - 1):  # other programs disturb now one and now another
        again, more = launched(1, arguments), launched(2, arguments)
        one = min(one, again, key=lambda f: f["best"]["step"])
        two["best"] = min(two["best"], more["best"], key=lambda best: best["step"])
        if more["link"]["alpha"] < two["link"]["alpha"]:
            two["link"] = more["link"]
    compute, link = Compute(**one["compute"]), Link(**two["link"])
    expected = simulated(compute, link, 2)
    found: dict[str, Any] = {
        "workload": given.workload,
        "measured": {"one rank": one, "two ranks": two},
        "check": {"simulated": expected["step"], "measured": two["best"]["step"]},
    }
    return found


def simulate() -> dict[str, Any]:
    compute = planned()
    rows = {n: {str(r): simulated(compute, link, r) for r in RANKS} for n, link in LINKS.items()}
    return {
        "device": DEVICE,
        "assumed": {n: asdict(link) for n, link in LINKS.items()},
        "simulated": rows,
    }


def show(found: dict[str, Any]) -> None:
    link, check = found["measured"]["two ranks"]["link"], found["check"]
    print(f"measured link: α {1e6 * link['alpha']:.1f} µs, β {link['beta'] / 1e9:.2f} GB/s")
    times, ratio = [1e3 * check[k] for k in ("simulated", "measured")], check["simulated"]
    print(f"two ranks: simulated {times[0]:.2f} ms, measured {times[1]:.2f} ms: "
          f"{ratio / check['measured']:.2f}")  # fmt: skip
    for name, by_ranks in found.get("simulated", {}).items():
        parts = [f"{r}: {row['efficiency']:.0%}" for r, row in by_ranks.items()]
        print(f"  {name:<26}" + "  ".join(parts))


def plot(found: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, rows in found["simulated"].items():
        label = f"{name}, simulated"
        left.plot(RANKS, [rows[str(r)]["efficiency"] for r in RANKS], "--o", ms=3, label=label)
    rows = next(iter(found["simulated"].values()))
    right.plot(RANKS, [rows[str(r)]["memory"] / 2**30 for r in RANKS], "--o", ms=3, color="gray")
    left.set(xscale="log", xlabel="ranks", ylabel="efficiency, a shard on each", ylim=(0, 1.05))
    right.set(xscale="log", xlabel="ranks", ylabel="GiB on a rank, simulated", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(RANKS[::2], [str(r) for r in RANKS[::2]])
        axes.minorticks_off()
    left.legend(fontsize=7)
    PICTURE.parent.mkdir(exist_ok=True)
    check = found["check"]
    figure.suptitle(
        f"GPT-2 124M, 32 sequences a rank: simulated from one H200's measured step. Checked on two "
        f"CPU ranks:\nGPT 4 × 128 simulated {1e3 * check['simulated']:.0f} ms, measured "
        f"{1e3 * check['measured']:.0f} ms a step", fontsize=8,
    )  # fmt: skip
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt_nano")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--simulate", action="store_true", help="GPT-2 on H200s")
    parser.add_argument("--rank", action="store_true", help="be one rank")
    parser.add_argument("--plot", action="store_true", help="draw the results that there are")
    given = parser.parse_args()
    if given.rank:
        found = measured_step(given.workload, given.rounds)
        if found["rank"] == 0:
            print(json.dumps(found))
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not given.plot:
        found |= simulate() if given.simulate else measure(given)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    if given.plot:
        plot(found)


if __name__ == "__main__":
    main()
