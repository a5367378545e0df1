"""Where the seconds of a first step go: parts of it, by the functions that do them.

A part's time is that of the thread that compiles, without the parts inside it, so that parts add
up to the whole. What other threads do meanwhile is told by when it began and ended.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from treadle.compile_report import CompileReport

WAIT = "waits"  # for other threads: in the part around it
# Stages of the report by the part that they are shown as; others keep their names.
STAGES = {
    "apply_precision": "trace", "recognise": "graph", "differentiate": "graph",
    "append_updates": "graph", "optimize": "graph", "plan_buffers": "buffers",
}  # fmt: skip
# Functions that are parts, by module: on every device, and on a GPU.
EVERYWHERE = {
    ("treadle.step.compile", "choose_device"): "driver",
    ("treadle.step.compile", "begin_model"): "declare",
    ("treadle.step.train_step", "trace_init"): "trace",
    ("treadle.step.train_step", "trace_eval_params"): "trace",
    ("treadle.step.first_values", "FirstValues.write"): "values",
    ("treadle.step.train_step", "TrainStep._start"): "state",
    ("treadle.backends.compiled", "key_of"): "cache",
    ("concurrent.futures", "Future.result"): WAIT,
}
ON_GPU = {
    ("treadle.backends.cuda.backend", "has_dnn"): "cuDNN import",
    ("treadle.runtime.cuda.program", "LibraryCalls"): "begin plans",
    ("treadle.runtime.cuda.program", "CudaProgram._chosen_matmuls"): "matmuls",
    ("treadle.runtime.cuda.calls", "planned_attention"): "attention",
    ("treadle.runtime.cuda.conv", "PlannedConvolutions.fastest"): "convolutions",
    ("treadle.runtime.cuda.program", "chosen_batches"): "batches",
    ("treadle.runtime.cuda.program", "Code"): "code",
    ("treadle.runtime.cuda.launches", "captured"): "capture",
    ("cuda.bindings.driver", "cuInit"): "cuInit",
    ("cuda.bindings.driver", "cuDevicePrimaryCtxRetain"): "context",
    ("cuda.bindings.driver", "cuModuleLoadData"): "load modules",
    ("cuda.bindings.driver", "cuGraphInstantiate"): "instantiate",
    ("cuda.bindings.driver", "cuMemAlloc"): "allocate",
    ("cuda.bindings.driver", "cuMemcpyHtoD"): "copy to device",
}
# Work of other threads: from when the first began to when the last ended.
DRAWING = {("treadle.step.first_values", "FirstValues._draw"): "drawing"}
BESIDE_GPU = {
    ("treadle.runtime.cuda.compiler", "compile_source"): "NVRTC",
    ("treadle.runtime.cuda.conv", "PlannedConvolutions._begin"): "plans",
    ("treadle.runtime.cuda.ready", "_matmuls"): "cuBLASLt",
    ("treadle.runtime.cuda.ready", "has_dnn"): "cuDNN import",
    ("treadle.runtime.cuda.ready", "_dnn"): "cuDNN",
}


class Parts:
    """Seconds of the thread that compiles by part, and spans of others since the start."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.spans: dict[str, list[float]] = {}  # begin, end, seconds of all threads together
        self._inside = ["rest"]
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    def _switch(self) -> None:
        now = time.perf_counter()
        part = self._inside[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        self._switch()
        self._inside.append(f"{self._inside[-1]} {WAIT}" if name == WAIT else name)
        try:
            yield
        finally:
            self._switch()
            self._inside.pop()

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        begin = time.perf_counter() - self.start
        try:
            yield
        finally:
            end = time.perf_counter() - self.start
            with self._lock:
                first, last, every = self.spans.get(name, [begin, end, 0.0])
                self.spans[name] = [min(first, begin), max(last, end), every + end - begin]

    def finished(self) -> dict[str, Any]:
        self._switch()
        return {"all": self._last - self.start, "parts": self.seconds, "aside": self.spans}


def watched(device: str) -> Parts:
    """From now on parts are counted, in this process."""
    parts = Parts()
    of_stage = CompileReport.stage

    @contextmanager
    def stage(self: CompileReport, name: str) -> Iterator[None]:
        with parts.part(STAGES.get(name, name)), of_stage(self, name):
            yield

    CompileReport.stage = stage  # type: ignore[method-assign]
    is_gpu = device == "cuda"
    with parts.part("imports"):  # of what a compile for the device would import
        for (module, name), part in (EVERYWHERE | (ON_GPU if is_gpu else {})).items():
            _wrap(module, name, functools.partial(parts.part, part))
        for (module, name), part in (DRAWING | (BESIDE_GPU if is_gpu else {})).items():
            _wrap(module, name, functools.partial(parts.aside, part))
    return parts


def _wrap(module: str, name: str, around: Callable[[], Any]) -> None:
    """A function of a module, or a method of a class, inside a context."""
    *path, last = name.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for step in path:
            owner = getattr(owner, step)
        wrapped = getattr(owner, last)
    except (ImportError, AttributeError):  # a step without it has no such part
        return

    def call(*arguments: Any, **named: Any) -> Any:
        with around():
            return wrapped(*arguments, **named)

    setattr(owner, last, call)


def shown(found: dict[str, Any], least: float = 0.05) -> str:
    """Parts that take some time in the order in which they came, and spans of other threads."""
    parts = [f"{name} {s:.2f}" for name, s in found["parts"].items() if s >= least]
    beside = [
        f"{name} {begin:.1f}-{end:.1f} ({every:.1f})"
        for name, (begin, end, every) in found["aside"].items()
        if every >= least
    ]
    return ", ".join(parts) + (" | " + ", ".join(beside) if beside else "")
