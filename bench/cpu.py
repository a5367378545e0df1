"""Whole training steps on the CPU, float32, AdamW: Treadle and its peers in turns.

usage: python bench/cpu.py [workload ...] [--rounds 7] [--threads 2] [--peers eager,compile,jax]
                           [--no-cold] [--no-memory] [--patience 60] [--clock process_time]
                           [--target v3] [--json FILE]

ms      median over the rounds; in each round every contender has a turn of about 0.3 s. Turns
        wait until other processes are done, for --patience seconds in all; a turn that was
        disturbed is taken again; rounds that stay disturbed are left out, unless they are the most
ratio   Treadle's time over a peer's, lower is faster: the median of the rounds' ratios, and its
        quartiles; the best peer is the one with the smallest ms
cold    seconds from building the model to the first step's result in a fresh process with empty
        caches; imports are not counted, what is imported on the way is
warm    the same with the caches that the cold start filled
memory  growth of the process in MiB from after the imports: the peak with building (warm, if cold
        starts are measured), and the peak of later steps
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from levels import add_target, restricted
from rich.console import Console
from rich.table import Table
from turns import (
    CLOCKS,
    MOST_TRIES,
    QUIET,
    Patience,
    Ratio,
    Unable,
    Worker,
    machine,
    take_turns,
    use_threads,
    watched,
)

from models import FOR_GPUS, WORKLOADS

PEERS = {"eager": "torch eager", "compile": "torch.compile", "jax": "JAX jit"}
TITLES = {"treadle": "Treadle", **PEERS}
TURN = 0.3  # seconds
LONG = 5.0  # seconds: a start that is not tried again
CLOSE = 1e-3  # losses of contenders differ by no more, relatively
console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def warn(text: str) -> None:
    console.print(text, style="bold red", markup=False)


def missing(peer: str) -> str | None:
    """Why a peer cannot run here."""
    package = "jax" if peer == "jax" else "torch"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if peer == "compile" and not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++"))):
        return "torch.compile needs a C++ compiler"
    return None


def caches(folder: Path) -> dict[str, str]:
    """Every contender keeps what it compiled in empty folders here."""
    variables = {
        "TREADLE_CACHE": folder / "treadle",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "JAX_COMPILATION_CACHE_DIR": folder / "jax",
    }
    folder.mkdir(parents=True)
    for path in variables.values():
        path.mkdir(mode=0o700)
    everything = {  # JAX keeps small programs, too
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {n: str(p) for n, p in variables.items()} | everything


class Measurement:
    """One workload, all contenders. What fails is written down and left out."""

    def __init__(
        self,
        workload: str,
        names: list[str],
        options: argparse.Namespace,
        environment: dict[str, str],
        peers: str = "peers",
    ):
        self.workload, self.names, self.options = workload, names, options
        self.environment, self.patience = environment, Patience(options.patience)
        self.peers = peers  # the module with the contenders
        self.task: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {n: {} for n in names}
        self.agree: bool | None = None  # None where nothing was compared
        self.disturbed, self.is_rough = 0, False

    def run(self, first_values: dict[str, np.ndarray], **task: str) -> dict[str, Any]:
        """All begin with the same values; what else the task has is for the contenders."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            values = folder / "values.npz"
            np.savez(values, **first_values)  # type: ignore[arg-type]
            self.task = {"workload": self.workload, "values": str(values), **task}
            workers = []
            for name in self.names:
                try:
                    workers.append(self._worker(name, folder / name))
                    stack.callback(workers[-1].close)
                except Unable as error:
                    self._failed(name, error)
            self._compare_values()
            if workers:
                self._take_turns(workers)
        return self._row()

    def _worker(self, name: str, folder: Path) -> Worker:
        """A contender that is ready for its turns; its first steps on the way."""
        found, environment = self.found[name], dict(self.environment)
        if self.options.cold:
            empty = [caches(folder / str(i)) for i in range(MOST_TRIES)]
            worker, answer = self._started(name, empty)
            worker.close()
            environment |= worker.environment
            found["first_cold_s"] = answer["first_s"]
            if self.options.memory:
                found["peak_cold_mib"] = answer["peak_mib"]
        worker, answer = self._started(name, [environment] * MOST_TRIES)
        first_s = answer.pop("first_s")
        found |= answer | ({"first_warm_s": first_s} if self.options.cold else {})
        return worker

    def _started(
        self, name: str, environments: list[dict[str, str]]
    ) -> tuple[Worker, dict[str, Any]]:
        """A worker that has built its step; a disturbed start is tried again if it is short."""
        tries = len(environments) if self.options.cold else 1
        for i, environment in enumerate(environments[:tries]):
            worker = Worker(self.peers, name, {**self.environment, **environment})
            try:
                memory = self.options.memory
                answer, others = watched(
                    worker, self.patience, "build", task=self.task, memory=memory
                )
            except Unable:
                worker.close()
                raise
            if i == tries - 1 or others <= QUIET or answer["first_s"] > LONG:
                break
            worker.close()
        return worker, answer

    def _take_turns(self, workers: list[Worker]) -> None:
        try:
            turns = take_turns(
                workers, self.options.rounds, TURN, self.patience, self.options.clock
            )
        except Unable as error:
            return warn(f"{self.workload}: {error}")
        for name, each in turns.ms.items():
            self.found[name] |= {"ms": statistics.median(each), "round_ms": each}
        self.disturbed, self.is_rough = turns.disturbed, turns.are_rough
        if turns.disturbed:
            warn(f"{self.workload}: {turns}")
        return None

    def _failed(self, name: str, error: Unable) -> None:
        self.found[name] = {"error": str(error)}
        warn(f"{self.workload}: {error}")

    def _compare_values(self) -> None:
        """A benchmark of different mathematics is worthless."""
        every = {n: f["values"] for n, f in self.found.items() if "values" in f}
        if len(every) < 2:
            return
        stacked = np.array(list(every.values()))
        apart = np.ptp(stacked, axis=0) / np.maximum(1.0, np.abs(stacked).max(axis=0))
        self.agree = bool(apart.max() <= CLOSE)  # NaN does not agree
        if not self.agree:
            shown = "; ".join(f"{n} {[round(v, 5) for v in vs]}" for n, vs in every.items())
            warn(f"{self.workload}: THE LOSSES DIFFER, IGNORE THIS ROW: {shown}")

    def _row(self) -> dict[str, Any]:
        timed = {n: f for n, f in self.found.items() if "ms" in f}
        row: dict[str, Any] = {"workload": self.workload, "agree": self.agree, "ratios": {}}
        row |= {"disturbed_rounds": self.disturbed, "is_rough": self.is_rough}
        peers = [n for n in timed if n != "treadle"]
        if "treadle" in timed and peers:
            ours = timed["treadle"]["round_ms"]
            ratios = {n: Ratio.of(ours, timed[n]["round_ms"]) for n in peers}
            row["best_peer"] = min(peers, key=lambda n: timed[n]["ms"])
            row["ratio"] = ratios[row["best_peer"]].median
            row["ratios"] = {n: asdict(r) for n, r in ratios.items()}
        return row | {"contenders": self.found}


def tables(rows: list[dict[str, Any]], names: list[str], options: argparse.Namespace) -> None:
    peers = [n for n in names if n != "treadle"]
    speed = Table(
        "workload", title="ms a step, and Treadle's time over the peer's (lower is faster)"
    )
    for name in names:
        speed.add_column(f"{TITLES[name]} ms", justify="right")
    for name in peers:
        speed.add_column(f"/ {TITLES[name]}", justify="right")
    speed.add_column("/ best peer", justify="right")
    for row in rows:
        cells = [number(row["contenders"][n].get("ms"), 4) for n in names]
        ratios = [str(Ratio(**row["ratios"][n])) if n in row["ratios"] else "–" for n in peers]
        best = f"{row['ratio']:.2f} ({row['best_peer']})" if "ratio" in row else "–"
        mark = " LOSSES DIFFER" if row["agree"] is False else " (rough)" if row["is_rough"] else ""
        speed.add_row(row["workload"] + mark, *cells, *ratios, best)
    console.print(speed)
    if options.cold:
        console.print(pairs(rows, names, "first step, s: cold / warm", "first_cold_s first_warm_s"))
    if options.memory:
        console.print(pairs(rows, names, "memory, MiB: peak / of steps", "peak_mib steps_mib"))


def pairs(rows: list[dict[str, Any]], names: list[str], title: str, keys: str) -> Table:
    table = Table("workload", title=title)
    for name in names:
        table.add_column(TITLES[name], justify="right")
    for row in rows:
        found = [row["contenders"][n] for n in names]
        cells = [" / ".join(number(f.get(key), 3) for key in keys.split()) for f in found]
        table.add_row(row["workload"], *cells)
    return table


def number(value: float | None, digits: int) -> str:
    """Some digits, not in powers of ten."""
    if value is None:
        return "–"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:.{max(0, digits - whole)}f}"


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all if none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default=",".join(PEERS), help="of those installed; may be empty")
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="no first steps")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        help="seconds a workload may wait for other processes (60)",
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="perf_counter",
        help="process_time, with --threads 1, is for a machine that others use",
    )
    add_target(parser)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or [n for n in WORKLOADS if n not in FOR_GPUS]
    options.peers = [p for p in options.peers.split(",") if p]
    for given, known in ((options.workloads, WORKLOADS), (options.peers, PEERS)):
        unknown = [g for g in given if g not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: use {', '.join(known)}")
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    variables = use_threads(options.threads) | restricted(options.target)
    reasons = {p: missing(p) for p in options.peers}
    for peer, reason in reasons.items():
        if reason:
            console.print(f"{TITLES[peer]} is left out: {reason}")
    names = ["treadle", *(p for p, reason in reasons.items() if reason is None)]
    head = machine() | {"threads": options.threads, "rounds": options.rounds}
    head["target"] = options.target
    console.print(f"{head['processor']}, {options.threads} threads, load {head['load']:.2f} before")
    rows: list[dict[str, Any]] = []
    for workload in options.workloads:
        first_values = WORKLOADS[workload].make().init(0)
        row = Measurement(workload, names, options, variables).run(first_values)
        rows.append(row)
        times = ", ".join(f"{n} {number(f.get('ms'), 4)}" for n, f in row["contenders"].items())
        console.print(f"{workload}: {times} ms")
        if options.json:  # after each, so that what was measured is kept
            text = json.dumps(head | {"workloads": rows}, indent=1)
            options.json.write_text(text, encoding="utf-8")
    tables(rows, names, options)


if __name__ == "__main__":
    main()
