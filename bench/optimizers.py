"""The update of every optimizer against the memory's ceiling: milliseconds, GB/s, passes.

usage: python bench/optimizers.py [optimizer ...] [--matrices 16] [--mixed] [--rounds 5]
                                  [--threads 2 | --processor-time] [--patience 20] [--json FILE]

Parameters are matrices of (1024, 1024) float32. The gradient of each is an array of the batch, so
that the step is its update, with the norm of the gradient that every step reports. SAM and Sophia
ask for gradients elsewhere: their loss is half the squared distance from the batch.

*must* are the bytes that one pass has to move, counted from the leaves of the program: everything
that is read once, and what is updated in place once more. *moves* is the same count over the
kernels as they are: the passes that they make. GB/s and the ceiling are of *must*.

The ceiling is a bare loop over as many arrays of the same sizes, in turns with the step: it adds
what is only read to everything that is updated, in place. A copy's rate is shown but not used: its
target is fetched before it is written, which no update in place does.

`--processor-time` is for a machine that is busy with other things: one thread, and the time that it
had a processor. Others still take their part of the memory's rate, from the bare loops too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ceilings
import numpy as np
from rich.console import Console
from rich.table import Table
from turns import (
    Contender,
    Patience,
    Ratio,
    Running,
    Turns,
    Unable,
    Worker,
    machine,
    take_turns,
    use_threads,
)

import treadle as td
from treadle import nn, optim
from treadle.kernel.plan import Plan, PlannedPhase, PlannedRepeat, PlannedStep
from treadle.step.programs import Watched

TURN = 0.3  # seconds
SIDE = 1024
PRODUCTS = 2  # matrices, where products take the time
LOOPS = {"read": 1, "copy": 2}  # how often they touch an array
LARGE = SIDE * SIDE  # bytes: a kernel that moves as many goes over parameters


@dataclass(frozen=True)
class Case:
    """An optimizer, and whether it asks for gradients elsewhere or multiplies matrices."""

    make: Callable[[], optim.Optimizer]
    is_curved: bool = False
    has_products: bool = False


CASES = {
    "sgd": Case(lambda: optim.sgd()),
    "sgd momentum": Case(lambda: optim.sgd(momentum=0.9)),
    "sgd nesterov": Case(lambda: optim.sgd(momentum=0.9, nesterov=True)),
    "adagrad": Case(lambda: optim.adagrad()),
    "rmsprop": Case(lambda: optim.rmsprop()),
    "rmsprop centered": Case(lambda: optim.rmsprop(momentum=0.9, centered=True)),
    "adadelta": Case(lambda: optim.adadelta()),
    "adam": Case(lambda: optim.adam()),
    "adamw": Case(lambda: optim.adamw()),
    "adamw amsgrad": Case(lambda: optim.adamw(amsgrad=True)),
    "nadam": Case(lambda: optim.nadam()),
    "radam": Case(lambda: optim.radam()),
    "adamax": Case(lambda: optim.adamax()),
    "adabelief": Case(lambda: optim.adabelief()),
    "laprop": Case(lambda: optim.laprop()),
    "lion": Case(lambda: optim.lion()),
    "schedule_free_adamw": Case(lambda: optim.schedule_free_adamw()),
    "prodigy": Case(lambda: optim.prodigy()),
    "adamp": Case(lambda: optim.adamp()),
    "lamb": Case(lambda: optim.lamb()),
    "lars": Case(lambda: optim.lars()),
    "sophia": Case(lambda: optim.sophia(), is_curved=True),
    "sam(adamw)": Case(lambda: optim.sam(optim.adamw()), is_curved=True),
    "lookahead(adamw)": Case(lambda: optim.lookahead(optim.adamw())),
    "ema(adamw)": Case(lambda: optim.ema(optim.adamw())),
    "swa(adamw)": Case(lambda: optim.swa(optim.adamw(), start=0)),
    "clip + adamw": Case(lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw())),
    "muon": Case(lambda: optim.muon(), has_products=True),
    "galore": Case(lambda: optim.galore(), has_products=True),
}


# --- the step ---------------------------------------------------------------------------------


class Weights(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.weights = [nn.Parameter(shape) for shape in shapes]


def first(w: Any, x: Any) -> Any:
    return w.reshape(-1)[0] * x.reshape(-1)[0]


# The dot product's gradient without the dot product: the parameters are the update's to read.
linear = td.custom_vjp(first, lambda ct, out, w, x: (ct * x, None))


def curved(w: Any, x: Any) -> Any:
    return ((w - x) ** 2).sum() / 2


def shapes_of(task: dict[str, Any]) -> list[tuple[int, ...]]:
    """Equal matrices; or some of several shapes, with vectors."""
    case, matrices = CASES[task["case"]], task["matrices"]
    if case.has_products:
        return [(SIDE, SIDE)] * PRODUCTS
    if not task["mixed"]:
        return [(SIDE, SIDE)] * matrices
    wide: list[tuple[int, ...]] = [(3 * SIDE, SIDE), (SIDE, 4 * SIDE)]
    square: list[tuple[int, ...]] = [(SIDE, SIDE)] * max(1, matrices - 7)
    return [*square, *wide, *[(SIDE,)] * 8]


def build(task: dict[str, Any]) -> td.TrainStep:
    case = CASES[task["case"]]
    shapes = shapes_of(task)
    term = curved if case.is_curved else linear

    def loss(model: Any, batch: Any) -> Any:
        terms = [term(w, x) for w, x in zip(model.weights, batch, strict=True)]
        return sum(terms[1:], terms[0])

    specs = [td.Spec(s) for s in shapes]
    return td.compile_step(Weights(shapes), loss, case.make(), specs, device="cpu")


def start(task: dict[str, Any]) -> Running:
    step = build(task)
    rng = np.random.default_rng(0)
    batch = [rng.standard_normal(s, np.float32) for s in shapes_of(task)]
    norm = [0.0]

    def run() -> None:
        norm[0] = step(batch).grad_norm

    return Running(run, lambda: None, lambda: norm[0])


CONTENDERS = {
    "step": Contender("step", ("treadle",), lambda task: lambda: start(task)),
    "bare": Contender("bare", (), ceilings.prepare_streams),
    "read": ceilings.CONTENDERS["read"],
    "copy": ceilings.CONTENDERS["copy"],
}


# --- what the program does --------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """A step's program in numbers. Passes are phases that go over parameters."""

    parameters: int  # bytes
    updated: int  # bytes that one pass reads and writes: each counts twice
    only_read: int
    only_written: int
    moved: int  # by the kernels as they are
    passes: int
    pass_kernels: int  # distinct kernels in them
    phases: int
    kernels: int

    @property
    def must(self) -> int:
        return 2 * self.updated + self.only_read + self.only_written

    @property
    def streams(self) -> dict[str, int]:
        """Arrays as large as the parameters that are about as many bytes."""
        updated = max(1, round(self.updated / self.parameters))
        read = round(self.only_read / self.parameters)
        return {"updated": updated, "read": read, "elements": self.parameters // 4}

    @property
    def streams_bytes(self) -> int:
        return (2 * self.streams["updated"] + self.streams["read"]) * self.parameters


def facts_of(step: td.TrainStep) -> Facts:
    """Looks inside: the loaded program, its leaves and its phases."""
    program: Any = step._programs.built(step._inputs).step(step._mode(), Watched())
    plan: Plan = program.plan
    updated = only_read = only_written = 0
    for name, _, type_ in plan.leaves:
        if name not in plan.updated:
            only_read += type_.nbytes
        elif name in program.graph.leaves:
            updated += type_.nbytes
        else:
            only_written += type_.nbytes
    phases = list(phases_in(plan.steps))
    is_large = [k.nbytes >= LARGE for k in plan.kernels]
    passes = [p for p, _ in phases if any(is_large[c.entry] for c in p.calls)]
    used = {c.entry for p in passes for c in p.calls if is_large[c.entry]}
    moved = sum(n * plan.kernels[c.entry].nbytes for p, n in phases for c in p.calls)
    parameters = sum(a.nbytes for a in step.params.values())
    counts = len(passes), len(used), sum(n for _, n in phases), len(plan.kernels)
    return Facts(parameters, updated, only_read, only_written, moved, *counts)


def phases_in(steps: Sequence[PlannedStep], times: int = 1) -> Iterator[tuple[PlannedPhase, int]]:
    """Every phase, and how often it runs."""
    for step in steps:
        if isinstance(step, PlannedRepeat):
            yield from phases_in(step.steps, times * step.length)
        else:
            yield step, times


# --- measuring --------------------------------------------------------------------------------


class Benchmark:
    """Workers that live through all optimizers."""

    def __init__(self, stack: ExitStack, environment: dict[str, str], console: Console, clock: str):
        self.console, self.clock = console, clock
        self.workers = {n: self._worker(stack, n, environment) for n in CONTENDERS}
        for name in LOOPS:
            self.workers[name].ask("build", task={}, memory=False)

    @staticmethod
    def _worker(stack: ExitStack, name: str, environment: dict[str, str]) -> Worker:
        worker = Worker("optimizers", name, environment)
        stack.callback(worker.close)
        return worker

    def bandwidth(self, rounds: int, patience: float) -> dict[str, Any]:
        """GB/s of the bare loops; what is read and written counts twice."""
        turns = self._turns(list(LOOPS), rounds, patience)
        moved = {n: count * ceilings.BYTES * ceilings.threads() / 1e6 for n, count in LOOPS.items()}
        for name in LOOPS:
            self.workers[name].close()  # their arrays are not needed any more
        return {
            "median": {n: moved[n] / statistics.median(turns.ms[n]) for n in LOOPS},
            "best": {n: moved[n] / turns.best[n] for n in LOOPS},
            "is_rough": turns.are_rough,
        }

    def _turns(self, names: Sequence[str], rounds: int, patience: float) -> Turns:
        chosen = [self.workers[n] for n in names]
        return take_turns(chosen, rounds, TURN, Patience(patience), self.clock)

    def measure(self, task: dict[str, Any], rounds: int, patience: float) -> dict[str, Any] | None:
        name = task["case"]
        facts = facts_of(build(task))
        try:
            self.workers["step"].ask("build", task=task, memory=False)
        except Unable as error:
            self.console.print(f"{name}: {error}", style="bold red", markup=False)
            return None
        self.workers["bare"].ask("build", task=facts.streams, memory=False)
        turns = self._turns(("step", "bare"), rounds, patience)
        if turns.disturbed:
            self.console.print(f"{name}: {turns}", style="bold red", markup=False)
        return row_of(name, facts, turns)


def row_of(name: str, facts: Facts, turns: Turns) -> dict[str, Any]:
    scale = facts.must / facts.streams_bytes
    limits = [scale * ms for ms in turns.ms["bare"]]
    best = turns.best["step"]
    ms = statistics.median(turns.ms["step"])
    return {
        "optimizer": name,
        **asdict(facts),
        "must": facts.must,
        "disturbed_rounds": turns.disturbed,
        "is_rough": turns.are_rough,
        "ms": ms,
        "gb_s": facts.must / ms / 1e6,
        "ceiling": asdict(Ratio.of(limits, turns.ms["step"])),
        "best_ms": best,
        "best_gb_s": facts.must / best / 1e6,
        "best_ceiling": scale * turns.best["bare"] / best,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="The step's update: time, bytes, and the part of the memory's ceiling")
    found.add_column("optimizer", no_wrap=True)
    heads = ("params MB", "must MB", "moves MB", "passes", "kernels", "phases", "ms", "GB/s")
    for head in (*heads, "of ceiling", "best ms", "GB/s", "of ceiling"):
        found.add_column(head, justify="right")
    for row in rows:
        sizes = [f"{row[k] / 1e6:.0f}" for k in ("parameters", "must", "moved")]
        kernels = f"{row['pass_kernels']} of {row['kernels']}"
        share = Ratio(**row["ceiling"])
        found.add_row(
            row["optimizer"] + (" (rough)" if row["is_rough"] else ""),
            *sizes,
            f"{row['passes']}",
            kernels,
            f"{row['phases']}",
            f"{row['ms']:.2f}",
            f"{row['gb_s']:.1f}",
            str(share),
            f"{row['best_ms']:.2f}",
            f"{row['best_gb_s']:.1f}",
            f"{row['best_ceiling']:.2f}",
        )
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("optimizers", nargs="*", help=f"of {', '.join(CASES)}; all if none")
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--mixed", action="store_true", help="matrices of several shapes, vectors")
    parser.add_argument("--rounds", type=int, default=5)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--threads", type=int, default=2)
    how.add_argument("--processor-time", action="store_true", help="of one thread")
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds an optimizer may wait for others (20)"
    )
    parser.add_argument("--json", type=Path)
    found = parser.parse_args()
    found.threads = 1 if found.processor_time else found.threads
    unknown = [n for n in found.optimizers if n not in CASES]
    if unknown or min(found.rounds, found.threads, found.matrices) < 1:
        parser.error(f"{', '.join(unknown) or 'numbers are at least 1'}: see --help")
    return found


def main() -> None:
    given = options()
    console = Console(width=None if os.isatty(1) else 170, highlight=False)
    environment = use_threads(given.threads)
    clock = "process_time" if given.processor_time else "perf_counter"
    head = machine() | {"threads": given.threads, "rounds": given.rounds, "clock": clock}
    with ExitStack() as stack:
        benchmark = Benchmark(stack, environment, console, clock)
        head["bandwidth_gb_s"] = benchmark.bandwidth(given.rounds, given.patience)
        rows = []
        for name in given.optimizers or CASES:
            task = {"case": name, "matrices": given.matrices, "mixed": given.mixed}
            row = benchmark.measure(task, given.rounds, given.patience)
            rows += [] if row is None else [row]
    load = f"load {head['load']:.2f} before"
    console.print(f"{head['processor']}, {given.threads} threads, {clock}, {load}")
    for which in ("median", "best"):
        rates = head["bandwidth_gb_s"][which]
        text = "memory GB/s, {0}: {read:.1f} read, {copy:.1f} copied"
        console.print(text.format(which, **rates))
    console.print(table(rows))
    if given.json:
        text = json.dumps(head | {"optimizers": rows}, indent=1)
        given.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
