"""Callbacks that watch: gradients, distributions, and where the time goes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from treadle.base.errors import ArgumentError
from treadle.step.watching import Histogram
from treadle.train.callback import Callback
from treadle.train.run import Run


def _is_due(run: Run, every: int) -> bool:
    """Whether the step that is about to be completed is the every-th."""
    is_last = run.step.micro_step == run.step.recipe.accumulate - 1
    return is_last and (run.steps + 1) % every == 0


class GradientMonitor(Callback):
    """Logs the norm of each parameter's gradient as `grad_norm/NAME`, every so many steps."""

    def __init__(self, every: int = 100):
        if every < 1:
            raise ArgumentError("GradientMonitor", f"every = {every}", "At least 1.")
        self._every = every

    def on_step_start(self, run: Run) -> None:
        if _is_due(run, self._every):
            run.watch(grad_norms=True)

    def on_step_end(self, run: Run) -> None:
        assert run.out is not None
        if run.out.grad_norms and run.is_updated and run.steps % self._every == 0:
            run.log({f"grad_norm/{name}": norm for name, norm in run.out.grad_norms.items()})


class HistogramRecord(NamedTuple):
    """Histograms by parameter, after a step."""

    step: int
    gradients: dict[str, Histogram]
    parameters: dict[str, Histogram]


class Histograms(Callback):
    """Keeps histograms of gradients and parameters, every so many steps, as `records`."""

    def __init__(self, every: int = 500, bins: int = 64, most: int = 100):
        if min(every, bins, most) < 1:
            cause = f"every = {every}, bins = {bins}, most = {most}"
            raise ArgumentError("Histograms", cause, "Each is at least 1.")
        self._every, self._bins, self._most = every, bins, most
        self.records: list[HistogramRecord] = []

    def on_step_start(self, run: Run) -> None:
        if _is_due(run, self._every):
            run.watch(histograms=True)

    def on_step_end(self, run: Run) -> None:
        assert run.out is not None
        if run.out.histograms and run.is_updated and run.steps % self._every == 0:
            found = {n: Histogram.of(v, self._bins) for n, v in run.step.params.items()}
            self.records.append(HistogramRecord(run.steps, dict(run.out.histograms), found))
            del self.records[: -self._most]


class Profiler(Callback):
    """Where the time of training goes: data, the step, validations, checkpoints.

    `print(profiler)` shows it; `to_trace` writes the first events for a trace viewer. What
    callbacks do is counted where they do it.
    """

    def __init__(self, events: int = 2000):
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._most = events
        self._events: list[tuple[str, float, float]] = []  # phase, start, seconds
        self._phase: str | None = None
        self._since = self._start = time.perf_counter()

    def _enter(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            spent = now - self._since
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
            self.counts[self._phase] = self.counts.get(self._phase, 0) + 1
            if len(self._events) < self._most:
                self._events.append((self._phase, self._since - self._start, spent))
        self._phase, self._since = phase, now

    def on_fit_start(self, run: Run) -> None:
        self._enter("start")

    def on_epoch_start(self, run: Run) -> None:
        self._enter("data")

    def on_step_start(self, run: Run) -> None:
        self._enter("step")

    def on_step_end(self, run: Run) -> None:
        self._enter("data")

    def on_eval_start(self, run: Run) -> None:
        self._enter("validation")

    def on_eval_end(self, run: Run) -> None:
        self._enter("data")

    def on_save(self, run: Run) -> None:
        self._enter("checkpoint")  # until the next thing begins

    def on_fit_end(self, run: Run) -> None:
        self._enter(None)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._enter(None)

    def __str__(self) -> str:
        total = sum(self.seconds.values()) or 1.0
        lines = [f"{'phase':<12}{'times':>8}{'seconds':>10}{'ms each':>10}{'share':>8}"]
        for phase, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            count = self.counts[phase]
            each, share = 1e3 * seconds / count, seconds / total
            lines.append(f"{phase:<12}{count:>8}{seconds:>10.3f}{each:>10.3f}{share:>8.1%}")
        return "\n".join(lines)

    def to_trace(self, path: str | Path) -> None:
        """Events as JSON for Perfetto or a browser's trace viewer."""
        events = [
            {"name": n, "ph": "X", "ts": 1e6 * t, "dur": 1e6 * s, "pid": 0, "tid": 0}
            for n, t, s in self._events
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
