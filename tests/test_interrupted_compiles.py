"""Ctrl-C while a program is compiled: an exception, and nothing else is left of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import llvmlite
import numpy as np
import pytest

import treadle as td
from treadle.ir.op import RuleTable
from treadle.ir.ops.elementwise import ADD
from treadle.runtime.cpu import aside as module
from treadle.runtime.cpu import native
from treadle.runtime.cpu.aside import aside
from treadle.runtime.cpu.native import LibraryCall

COUNT = 16  # moments of a compile at which it is interrupted


def test_a_first_compile_may_be_interrupted_at_any_moment() -> None:
    script = Path(__file__).with_name("interrupted_compiles.py")
    done = subprocess.run(
        [sys.executable, str(script), str(COUNT)],
        env={**os.environ, "TREADLE_CACHE": "0"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= COUNT // 2, "the rest had compiled before their time"


def test_llvmlite_is_never_run_by_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt inside it frees memory twice, or leaves its lock with the main thread."""
    folder, found = str(Path(llvmlite.__file__).parent), list[str]()

    def note(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename.startswith(folder):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    monkeypatch.setenv("TREADLE_CACHE", "0")
    scale = float(np.random.default_rng().random())
    sys.settrace(note)
    try:
        program = td.compile(lambda x: (x * scale).sum(), td.Spec((5,)), device="cpu")
        program(np.ones(5, np.float32))
        del program
        gc.collect()
    finally:
        sys.settrace(None)
    assert not found


def test_what_is_made_aside_is_given_to_whoever_waits() -> None:
    assert aside(lambda _: threading.current_thread()) is not threading.main_thread()
    with pytest.raises(ValueError, match="mistake"):
        aside(lambda _: int("mistake"))
    inner: list[threading.Thread] = []
    aside(lambda _: aside(lambda _: inner.append(threading.current_thread())))
    assert inner[0] is not threading.main_thread()


def test_a_call_that_nobody_waits_for_is_told_and_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told, go = list[bool](), threading.Event()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    def work(is_wanted: Any) -> None:
        go.wait()
        told.append(is_wanted())

    with monkeypatch.context() as patch:
        patch.setattr(module, "Event", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            aside(work)
    go.set()
    for _ in range(1000):
        if told:
            break
        time.sleep(0.01)
    assert told == [False]


def test_code_that_is_not_needed_is_freed_aside() -> None:
    library = LibraryCall.from_text("define i64 @one() { ret i64 1 }")
    number, threads = library._number, list[threading.Thread]()
    assert number in native._engines
    weakref.finalize(native._engines[number], lambda: threads.append(threading.current_thread()))
    library.itself = library  # a cycle, which is collected
    del library
    gc.collect()
    aside(lambda _: None)
    assert number not in native._engines
    assert threads
    assert threads[0] is not threading.main_thread()


def test_a_module_that_is_imported_anew_gives_its_entries_again() -> None:
    table = RuleTable[int]("test")
    text = "table(op)(number)"
    first = {"__name__": "some.module", "table": table, "op": ADD, "number": 1}
    exec(text, first)
    exec(text, {**first, "number": 2})
    assert table[ADD] == 2
    with pytest.raises(AssertionError, match="given twice"):
        exec(text, {**first, "__name__": "another.module"})
    again = {**first}
    exec(text, again)
    with pytest.raises(AssertionError, match="given twice"):
        exec(text, again)
