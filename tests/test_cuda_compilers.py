"""NVRTC in processes of its own: what crashes there is compiled another way, or is a named error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import treadle as td
from cuda_backend import needs_compiler
from treadle.base.errors import DeviceError
from treadle.codegen.cuda.driver import render_program
from treadle.runtime.cuda import compiler
from treadle.runtime.cuda.compilers import Compilers
from treadle.schedule.schedule import GPU, schedule

# Ends where the text says so, unless an option is given; otherwise it answers with the options.
STAND_IN = """
import os, signal, sys
given, found = os.fdopen(0, "rb", buffering=0), os.fdopen(1, "wb")
while head := given.readline().split():
    text = given.read(int(head[0]))
    if text == b"crash" or (text == b"crash once" and len(head) == 4):
        os.kill(os.getpid(), signal.SIGKILL)
    answer = b" ".join(head[1:])
    found.write(b"%d %d\\n" % (text == b"refused", len(answer)) + answer)
    found.flush()
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compilers]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    found = Compilers([sys.executable, "-I", "-S", str(script)])
    monkeypatch.setattr(compiler, "compilers", lambda: found)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "NVRTC 0.0")
    yield found
    found.close()


def test_a_text_is_compiled_in_another_process(stand_in: Compilers) -> None:
    stand_in.begin(1)
    for contracts, more in ((True, b""), (False, b" -fmad=false")):
        found = compiler.compile_source("text", "sm_90a", contracts)
        assert found == b"-arch=sm_90a -std=c++17 -w" + more
    assert len(stand_in._idle) == 1, "one process answers both"
    with pytest.raises(AssertionError, match="refuses a kernel for sm_90a"):
        compiler.compile_source("refused", "sm_90a")


def test_a_text_that_crashes_the_compiler_is_optimised_less(stand_in: Compilers) -> None:
    found = compiler.compile_source("crash once", "sm_90a")
    assert found.endswith(b"--Ofast-compile=min")
    assert compiler.compile_source("text", "sm_90a"), "the next text has a process"


def test_a_compiler_that_crashes_always_is_a_named_error(stand_in: Compilers) -> None:
    with pytest.raises(DeviceError, match=r"NVRTC 0.0 crashes.*another version"):
        compiler.compile_source("crash", "sm_90a")


def crashing() -> Sequence[str]:
    """The gradient of a minimum over three permuted axes: NVRTC 13.5 crashes at its text."""

    def total(x: td.Tensor, w: td.Tensor) -> td.Tensor:
        return (x.permute(2, 0, 3, 1).min((0, 1, 3)) * w).sum()

    graph = td.trace(td.grad(total), td.Spec((12, 1, 7, 24)), td.Spec((24,)))
    return render_program(schedule(graph, target=GPU)).parts


@needs_compiler
def test_what_crashed_nvrtc_compiles() -> None:
    for text in crashing():
        assert compiler.is_cubin(compiler.compile_source(text, "sm_90a"))
