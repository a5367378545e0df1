"""One workload and its contenders: started, compared, timed in turns, written down."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from turns import MOST_TRIES, QUIET, Patience, Ratio, Unable, Worker, take_turns, watched

PEERS = {"eager": "torch eager", "compile": "torch.compile", "jax": "JAX jit"}
TITLES = {"treadle": "Treadle", **PEERS}
TURN = 0.3  # seconds
LONG = 5.0  # seconds: a start that is not tried again
CLOSE = 1e-3  # losses of contenders differ by no more, relatively
CLOSE_NARROW = 0.03  # those of contenders in bfloat16


def warn(text: str) -> None:
    print(f"\033[1;31m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


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
        close: float = CLOSE,
    ):
        self.workload, self.names, self.options = workload, names, options
        self.environment, self.patience = environment, Patience(options.patience)
        self.peers = peers  # the module with the contenders
        self.close = close  # how far apart losses may be, relatively
        self.workers: list[Worker] = []
        self.task: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {n: {} for n in names}
        self.agree: bool | None = None  # None where nothing was compared
        self.disturbed, self.is_rough = 0, False

    def run(self, first_values: dict[str, np.ndarray], **task: str) -> dict[str, Any]:
        """All begin with the same values; what else the task has is for the contenders."""
        with tempfile.TemporaryDirectory() as path, self:
            folder = Path(path)
            self.prepare(folder, first_values, **task)
            for name in self.names:
                try:
                    self.workers.append(self._worker(name, folder / name))
                except Unable as error:
                    self.failed(name, error)
            return self.finish()

    def prepare(self, folder: Path, first_values: dict[str, np.ndarray], **task: str) -> None:
        values = folder / "values.npz"
        np.savez(values, **first_values)  # type: ignore[arg-type]
        self.task = {"workload": self.workload, "values": str(values), **task}

    def finish(self) -> dict[str, Any]:
        """Turns of those that are ready."""
        self._compare_values()
        if self.workers:
            self._take_turns(self.workers)
        return self._row()

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *reason: object) -> None:
        for worker in self.workers:
            worker.close()

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

    def failed(self, name: str, error: Unable) -> None:
        self.found[name] = {"error": str(error)}
        warn(f"{self.workload}: {error}")

    def _compare_values(self) -> None:
        """A benchmark of different mathematics is worthless."""
        every = {n: f["values"] for n, f in self.found.items() if "values" in f}
        if len(every) < 2:
            return
        stacked = np.array(list(every.values()))
        apart = np.ptp(stacked, axis=0) / np.maximum(1.0, np.abs(stacked).max(axis=0))
        self.agree = bool(apart.max() <= self.close)  # NaN does not agree
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


class Start:
    """A contender of an entry on its way to the first steps."""

    def __init__(self, of: Measurement, name: str, folder: Path):
        self.of, self.name = of, name
        environment = of.environment | caches(folder / name)
        self.worker = Worker(of.peers, name, environment)  # by the thread that stays: see serve

    def wait(self) -> None:
        """Build and take the first steps, or say why not."""
        limit = self.of.options.patience_compile
        try:
            answer = self.worker.ask("build", limit, task=self.of.task, memory=True)
        except Unable as error:
            self.worker.close()
            self.of.failed(self.name, error)
        else:
            self.of.found[self.name] |= answer


def started(
    contests: list[Measurement], prepare: Callable[[Measurement, Path], None]
) -> Iterator[Measurement]:
    """Contests whose contenders all start at once, each in its turn: everybody else stands still.

    `prepare` is given a contest and an empty folder of its own.
    """
    with ExitStack() as stack, ThreadPoolExecutor(sum(len(c.names) for c in contests)) as pool:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for each in contests:
            stack.enter_context(each)
            (folder / each.workload).mkdir()
        list(pool.map(lambda c: prepare(c, folder / c.workload), contests))
        starts = [Start(c, n, folder / c.workload) for c in contests for n in c.names]
        list(pool.map(Start.wait, starts))
        for each in contests:
            ready = [s for s in starts if s.of is each and "error" not in each.found[s.name]]
            each.workers += [s.worker for s in ready]
            with each:
                yield each


def number(value: float | None, digits: int) -> str:
    """Some digits, not in powers of ten."""
    if value is None:
        return "–"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:.{max(0, digits - whole)}f}"
