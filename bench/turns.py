"""Contenders that take turns, each in a process of its own.

One contender runs at a time; the others are stopped, so that nobody's idle threads (which spin, or
wake up now and then) are paid for by somebody else. A process of its own also gives every contender
a first step and a peak of memory of its own.

As a program (`turns.py MODULE NAME`) this file is the contender's process: it answers requests, one
line of JSON each. `Worker` is the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE = 0.01  # seconds between two looks at the clock, at least; short steps share a sample
FEWEST = 3  # samples in a turn
QUIET = 0.08  # the part of the machine that others may use during a turn
MOST_TRIES = 3  # at a turn that is disturbed
CHECKED = 3  # steps whose values are compared between contenders
# Processor time leaves out what others take of it, but counts threads that wait for each other.
CLOCKS = {"perf_counter": time.perf_counter, "process_time": time.process_time}


@dataclass(frozen=True)
class Running:
    """Something to repeat. `step` may return early; `wait` returns when all steps are done."""

    step: Callable[[], object]
    wait: Callable[[], object]
    value: Callable[[], float]  # of the last step, to compare contenders by
    device_mib: Callable[[], float] | None = None  # the most it held on a device of its own
    facts: Callable[[], dict[str, Any]] | None = None  # more to say of what is run


@dataclass(frozen=True)
class Contender:
    """`prepare(task)` is not timed and gives `start`, which is, together with the first step."""

    name: str
    modules: tuple[str, ...]  # imported before anything is timed
    prepare: Callable[[dict[str, Any]], Callable[[], Running]]


class Unable(Exception):  # noqa: N818
    """A contender could not do what it was asked."""


# --- the contender's process ------------------------------------------------------------------


class Served:
    """What a process can be asked to do."""

    def __init__(self, contender: Contender):
        for module in contender.modules:
            importlib.import_module(module)
        self._contender = contender
        self._running: Running | None = None
        self._steps = 1  # in a sample

    def build(self, task: dict[str, Any], memory: bool) -> dict[str, Any]:
        """From nothing to the first result, then a few steps more."""
        self._running, self._steps = None, 1
        start = self._contender.prepare(task)
        gc.collect()
        before = memory_of_process("VmRSS")
        begin, used = time.perf_counter(), sum(os.times()[:4])
        running = start()
        self._repeat(running, 1)
        first_s, used = time.perf_counter() - begin, sum(os.times()[:4]) - used
        values = [running.value()]
        for _ in range(CHECKED - 1):
            self._repeat(running, 1)
            values.append(running.value())
        self._running = running
        answer: dict[str, Any] = {"first_s": first_s, "first_processor_s": used, "values": values}
        answer |= running.facts() if running.facts is not None else {}
        return answer | (self._memory(running, before) if memory else {})

    def _memory(self, running: Running, before: float) -> dict[str, float]:
        """Growth in MiB: the peak with building, and the peak of steps after it."""
        if running.device_mib is not None:
            return {"steps_mib": running.device_mib()}
        found = {"peak_mib": memory_of_process("VmHWM") - before}
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
        except OSError:
            return found
        self._repeat(running, CHECKED)
        return found | {"steps_mib": memory_of_process("VmHWM") - before}

    def turn(self, seconds: float, clock: str = "perf_counter") -> dict[str, float]:
        """The median time of a step, in ms, over the samples that fit into some seconds."""
        running, now = self._running, CLOCKS[clock]
        assert running is not None
        self._repeat(running, self._steps)  # caches and threads wake up
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while len(samples) < FEWEST or time.perf_counter() < end:
            taken = self._repeat(running, self._steps, now)
            samples.append(taken / self._steps)
            if taken < SAMPLE / 2:  # not yet enough steps in a sample
                self._steps = max(self._steps + 1, int(SAMPLE / samples.pop()))
        best = min(samples) * 1e3
        return {"ms": statistics.median(samples) * 1e3, "best": best, "samples": len(samples)}

    @staticmethod
    def _repeat(
        running: Running, steps: int, now: Callable[[], float] = time.perf_counter
    ) -> float:
        begin = now()
        for _ in range(steps):
            running.step()
        running.wait()
        return now() - begin


def memory_of_process(key: str) -> float:
    """A figure of this process in MiB: VmRSS is what it holds, VmHWM the most it held."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise Unable(f"/proc/self/status has no {key}")


def serve(contender: Contender) -> None:
    """Answer requests until there are no more."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # go when the parent goes, even if stopped
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    served: Served | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            served = served or Served(contender)
            answer = getattr(served, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# --- the other end ----------------------------------------------------------------------------


class Worker:
    """A contender in its process, which stands still except while it is asked something."""

    def __init__(self, module: str, name: str, environment: Mapping[str, str]):
        self.name, self.environment = name, dict(environment)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, module, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            text=True,
        )
        self._stop()

    def ask(self, do: str, limit: float | None = None, **arguments: Any) -> dict[str, Any]:
        """The answer; `Unable` if there is none, or none within a limit of seconds."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            requests.write(json.dumps({"do": do, **arguments}) + "\n")
            requests.flush()
        is_late = threading.Event()
        timer = threading.Timer(limit or 0, self._end_late, [is_late])
        if limit is not None:
            timer.start()
        line = answers.readline()
        timer.cancel()
        if not line and is_late.is_set():
            raise Unable(f"{self.name} was not ready after {limit:g} s")
        if not line:
            raise Unable(f"{self.name} ended with {self._process.wait()}: {self._last_words()}")
        self._stop()
        answer = json.loads(line)
        if "error" in answer:
            raise Unable(f"{self.name}: {answer['error']}")
        return dict(answer)

    def _end_late(self, is_late: threading.Event) -> None:
        is_late.set()
        self._process.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].strip()

    def close(self) -> None:
        """End the process. A second time does nothing."""
        if not self._log.closed:
            self._process.kill()
            self._process.communicate()
            self._log.close()


@dataclass(frozen=True)
class Turns:
    """Each worker's ms in each round, of the quiet rounds if there are enough of them."""

    ms: dict[str, list[float]]
    disturbed: int  # rounds in which other processes were busy
    are_rough: bool  # disturbed rounds had to be used
    best: dict[str, float]  # each worker's fastest sample of all turns, in ms

    def __str__(self) -> str:
        what = "the figures are rough" if self.are_rough else "they are left out"
        return f"other processes were busy in {self.disturbed} rounds: {what}"


class Patience:
    """Seconds that may be spent on waiting until other processes are done."""

    def __init__(self, seconds: float):
        self.left = seconds

    def wait(self) -> None:
        """Until the machine is quiet. Nobody of ours may be running."""
        while self.left > 0:
            start, before = time.perf_counter(), processor_seconds()
            time.sleep(0.1)
            passed = time.perf_counter() - start
            if processor_seconds() - before <= QUIET * passed * len(os.sched_getaffinity(0)):
                return
            self.left -= passed


def take_turns(
    workers: list[Worker],
    rounds: int,
    seconds: float,
    patience: Patience,
    clock: str = "perf_counter",
) -> Turns:
    """Who begins changes from round to round. A disturbed turn is taken again, within reason.

    Processor time leaves others out anyway.
    """
    spare = rounds * len(workers) if clock == "perf_counter" else 0
    asked = {"seconds": seconds, "clock": clock}
    found: list[tuple[dict[str, float], float]] = []
    best = {w.name: math.inf for w in workers}
    for r in range(rounds):
        first = r % len(workers)
        ms: dict[str, float] = {}
        worst = 0.0
        for worker in workers[first:] + workers[:first]:
            tries = [watched(worker, patience, "turn", **asked)]
            while tries[-1][1] > QUIET and len(tries) < MOST_TRIES and spare:
                tries.append(watched(worker, patience, "turn", **asked))
                spare -= 1
            best[worker.name] = min(best[worker.name], *(a["best"] for a, _ in tries))
            answer, others = min(tries, key=lambda t: t[1])
            ms[worker.name] = answer["ms"]
            worst = max(worst, others)
        found.append((ms, worst))
    quiet = [ms for ms, worst in found if worst <= QUIET]
    are_rough = 2 * len(quiet) < rounds
    used = [ms for ms, _ in found] if are_rough else quiet
    columns = {w.name: [ms[w.name] for ms in used] for w in workers}
    return Turns(columns, rounds - len(quiet), are_rough, best)


def watched(
    worker: Worker, patience: Patience, do: str, **arguments: Any
) -> tuple[dict[str, Any], float]:
    """An answer, and the part of the machine that others used meanwhile."""
    patience.wait()
    start, busy, own = time.perf_counter(), processor_seconds(), processor_seconds(worker.pid)
    answer = worker.ask(do, **arguments)
    busy, own = processor_seconds() - busy, processor_seconds(worker.pid) - own
    passed = time.perf_counter() - start
    return answer, (busy - own) / (passed * len(os.sched_getaffinity(0)))


def processor_seconds(pid: int | None = None) -> float:
    """Seconds that the processors we may use were busy so far, with a process or with anything."""
    if pid is None:
        ours, ticks = {f"cpu{i}" for i in os.sched_getaffinity(0)}, 0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in ours:
                user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
                ticks += user + nice + system + irq + softirq + steal
    else:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def use_threads(threads: int) -> dict[str, str]:
    """Give this process and its children as many processors as threads; what to tell libraries.

    JAX counts the processors that it may use; the others are told.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        sys.exit(f"--threads {threads}: only {len(allowed)} processors may be used here")
    os.sched_setaffinity(0, allowed[:threads])
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TREADLE_THREADS")
    return dict.fromkeys(names, str(threads))


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, and its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(ours: list[float], theirs: list[float]) -> Ratio:
        each = [a / b for a, b in zip(ours, theirs, strict=True)]
        quartiles = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each
        return Ratio(statistics.median(each), quartiles[0], quartiles[-1])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def machine() -> dict[str, Any]:
    """Where figures come from."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "?")
    versions: dict[str, str] = {"python": sys.version.split()[0]}
    for package in ("treadle", "numpy", "llvmlite", "torch", "jax", "scipy-openblas32"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"processor": model, "load": os.getloadavg()[0], "versions": versions}


if __name__ == "__main__":
    module, name = sys.argv[1:3]
    serve(importlib.import_module(module).CONTENDERS[name])
