"""Whether two steps run the same program, kernel for kernel; and programs that load in turn."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import treadle as td
from treadle.backends.registry import backend
from treadle.backends.scheduling import scheduled
from treadle.kernel.program import Call, Phase, Program, Step
from treadle.kernel.target import GPU, Target
from treadle.kernel.text import to_text


def digest(program: Program) -> str:
    """A hash of the calls and the texts of their kernels: neither names nor lines are part of it.

    Buffers are numbers in the order in which they are first touched; calls of a phase have none.
    """
    numbers: dict[str, int] = {}
    texts = {id(k): to_text(replace(k, name="kernel")) for k in program.distinct()}
    lines: list[str] = []

    def known(call: Call) -> tuple[str, list[int]]:
        """What tells a call of a phase from others before its own results have numbers."""
        return texts[id(call.kernel)], [numbers.get(a.buffer, -1) for a in call.arguments]

    def walk(steps: Sequence[Step]) -> None:
        for step in steps:
            if not isinstance(step, Phase):
                lines.append(f"repeat {step.length} {step.reverse}")
                walk(step.steps)
                lines.append("end")
                continue
            lines.append("phase")
            for call in sorted(step.calls, key=known):
                given = [
                    (numbers.setdefault(a.buffer, len(numbers)), a.row) for a in call.arguments
                ]
                lines.append(f"{texts[id(call.kernel)]} {given}")

    walk(program.steps)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def kernel_digest(program: Program) -> str:
    """A hash of the kernels and how often each is called, in any order, whatever the numbers in
    them: 1/√n and n^−½ may be two neighbours.
    """
    counts = Counter[str]()
    texts = {id(k): to_text(replace(k, name="kernel")) for k in program.distinct()}
    for call, times in program.counted_calls():
        counts[FLOAT.sub("#", texts[id(call.kernel)])] += times
    return hashlib.sha256(repr(sorted(counts.items())).encode()).hexdigest()


FLOAT = re.compile(r"-?\d+\.\d+(e[-+]?\d+)?|-?\d+e[-+]?\d+")


def likeness(one: dict[str, str], other: dict[str, str]) -> str:
    """How much alike two steps are, by their digests."""
    if one["program"] == other["program"]:
        return "same program"
    return "same kernels" if one["kernels"] == other["kernels"] else "others"


def digests(program: Program) -> dict[str, str]:
    return {"program": digest(program), "kernels": kernel_digest(program)}


def step_digests(step: td.TrainStep) -> dict[str, str]:
    """Those of a step which was compiled here, for the target that it was compiled for."""
    toolchain = backend(step.report.device).toolchain(td.CompileOptions())
    assert toolchain is not None
    return digests(scheduled(step.graph, td.CompileOptions(), toolchain.target))


def target_without_device(device: str) -> Target:
    """A GPU with cuBLASLt and cuDNN, whether there is one or not; or this processor."""
    full = replace(GPU, has_attention=True, has_conv=True)
    return full if device == "cuda" else backend(device).target


@functools.cache
def load_in_turn() -> None:
    """From now on one process of this machine loads at a time onto its GPU.

    Loading times algorithms of libraries against each other: what others run there meanwhile
    would choose for it.
    """
    from treadle.backends.cuda.backend import CudaToolchain

    load = CudaToolchain.load

    def in_turn(self: CudaToolchain, *given: Any) -> Any:
        with (Path(tempfile.gettempdir()) / "treadle-bench-gpu.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return load(self, *given)

    CudaToolchain.load = in_turn  # type: ignore[method-assign]
