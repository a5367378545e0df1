"""Progress: a bar on a terminal, plain lines elsewhere, nothing when asked."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

from treadle.base.errors import ArgumentError
from treadle.base.terminal import Line, Terminal
from treadle.train.loggers import scalars, shown
from treadle.train.run import Run
from treadle.train.trained import losses_of

PROGRESS = ("auto", "bar", "lines", "off")
PAUSE = 10.0  # seconds between lines
REFRESH = 0.1  # seconds between pictures of the bar
WINDOW = 20  # looks that the speed is measured over


class Display(Protocol):
    """What shows how training goes."""

    def start(self, run: Run, epochs: int | None, steps: int | None) -> None: ...

    def step(self, run: Run) -> None: ...

    def evaluated(self, run: Run) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self, run: Run) -> None: ...


def make_display(progress: str | bool) -> Display:
    """By name; True is "auto" and False is "off"."""
    kind = ("auto" if progress else "off") if isinstance(progress, bool) else progress
    if kind not in PROGRESS:
        raise ArgumentError("Trainer", f"progress = {progress!r}", f"Use one of {PROGRESS}.")
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "lines"
    return Quiet() if kind == "off" else Lines() if kind == "lines" else Bar()


class Quiet:
    """Shows nothing."""

    def start(self, run: Run, epochs: int | None, steps: int | None) -> None:
        pass

    def step(self, run: Run) -> None:
        pass

    def evaluated(self, run: Run) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self, run: Run) -> None:
        pass


class Look(NamedTuple):
    """What the meter saw at a time."""

    time: float
    away: float  # seconds of validations
    units: int
    steps: int


class Meter:
    """How far and how fast, in words."""

    def __init__(self, run: Run, epochs: int | None, steps: int | None):
        self.epochs, self.steps, self.units, self.unit = epochs, steps, 0, "samples"
        self._looks: deque[Look] = deque(maxlen=WINDOW)
        self._stepped_at = self._away = 0.0
        self._batches = run.batches

    def count(self, run: Run) -> float:
        """After a step: the time. The first may compile, so that the clock starts after it."""
        self._stepped_at = now = time.perf_counter()
        if not self._looks:
            self.look(run)
        return now

    def evaluated(self) -> None:
        """After a validation, whose time is not the steps'."""
        self._away += time.perf_counter() - self._stepped_at

    def _add(self, run: Run) -> None:
        """Units of the batches since the last look, as many in each as in the last one.

        Samples are rows of the first array; integers in rows (N, T) are tokens.
        """
        leaf = run.batch
        while isinstance(leaf, (dict, tuple, list)) and leaf:
            leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
        shape: tuple[int, ...] = tuple(getattr(leaf, "shape", ()))
        # By its name, which the tensors of other libraries have too: int64, torch.int64.
        dtype = str(getattr(leaf, "dtype", "")).rpartition(".")[2]
        is_tokens = len(shape) == 2 and dtype.startswith("int")
        self.unit = "tokens" if is_tokens else self.unit
        each = shape[0] * shape[1] if is_tokens else shape[0] if shape else 1
        self.units += each * (run.batches - self._batches)
        self._batches = run.batches

    def look(self, run: Run) -> None:
        self._add(run)
        self._looks.append(Look(time.perf_counter(), self._away, self.units, run.steps))

    def place(self, run: Run) -> str:
        epoch = min(run.epoch + 1, self.epochs) if self.epochs else run.epoch + 1
        of_epochs = f"/{self.epochs}" if self.epochs else ""
        of_steps = f"/{self.steps}" if self.steps else ""
        return f"epoch {epoch}{of_epochs}  step {run.steps}{of_steps}"

    def speed(self, run: Run) -> list[str]:
        """Units a second, memory, time left."""
        self.look(run)
        first, last = self._looks[0], self._looks[-1]
        seconds = max(last.time - first.time, 1e-9)
        busy = max(seconds - (last.away - first.away), 1e-9)
        units, steps = last.units - first.units, last.steps - first.steps
        parts = [f"{units / busy:,.0f} {self.unit}/s"] if units else []
        memory = memory_in_use()
        if memory:
            parts.append(f"{memory / 1e6:,.0f} MB")
        if self.steps and steps:
            left = (self.steps - last.steps) * seconds / steps
            parts.append(f"{clock(left)} left")
        return parts


def numbers(run: Run) -> list[str]:
    """Loss, metrics and the learning rate of the last step."""
    out = run.out
    values: dict[str, Any] = {} if out is None else {**losses_of(out), **out.metrics}
    rate = rate_of(run)
    if rate is not None:
        values["lr"] = rate
    return [f"{name} {shown(value)}" for name, value in values.items()]


def rate_of(run: Run) -> float | None:
    """The learning rate; None where groups have rates of their own."""
    try:
        return run.step.learning_rate
    except ArgumentError:
        return None


def clock(seconds: float) -> str:
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def memory_in_use() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _evaluated(run: Run) -> list[str]:
    return [f"{name} {shown(value)}" for name, value in scalars(run.evaluation).items()]


class Lines:
    """A line now and then, and one for each validation."""

    def start(self, run: Run, epochs: int | None, steps: int | None) -> None:
        self._meter = Meter(run, epochs, steps)
        self._next = time.perf_counter() + PAUSE
        self._printed_at = run.steps

    def step(self, run: Run) -> None:
        if self._meter.count(run) >= self._next:
            self._line(run, numbers(run))

    def evaluated(self, run: Run) -> None:
        self._meter.evaluated()
        self._line(run, [*numbers(run), *_evaluated(run)])

    def _line(self, run: Run, parts: list[str]) -> None:
        self.note("  ".join([self._meter.place(run), *parts, *self._meter.speed(run)]))
        self._next = time.perf_counter() + PAUSE
        self._printed_at = run.steps

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self, run: Run) -> None:
        if run.steps > self._printed_at:
            self._line(run, numbers(run))


class Bar:
    """A bar at the bottom of a terminal; validations are lines above it."""

    def start(self, run: Run, epochs: int | None, steps: int | None) -> None:
        self._meter = Meter(run, epochs, steps)
        self._next = 0.0
        self._line = Line(Terminal())
        self._line.start()

    def step(self, run: Run) -> None:
        if self._meter.count(run) >= self._next:
            self._draw(run)

    def _draw(self, run: Run) -> None:
        said = "  ".join([*numbers(run), *self._meter.speed(run)])
        share = run.steps / self._meter.steps if self._meter.steps else None
        self._line.draw(self._meter.place(run), share, said)
        self._next = time.perf_counter() + REFRESH

    def evaluated(self, run: Run) -> None:
        self._meter.evaluated()
        self.note("  ".join([self._meter.place(run), *numbers(run), *_evaluated(run)]))

    def note(self, text: str) -> None:
        self._line.say(text)

    def close(self, run: Run) -> None:
        self._draw(run)
        self._line.stop()
