"""Work that is done a moment later, or when it is needed."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from treadle.runtime import later
from treadle.runtime.later import Later


def test_work_is_done_in_order_when_it_is_needed() -> None:
    done: list[str] = []
    work = Later()
    for key in "ab":
        work.add(key, lambda key=key: done.append(key))
    work.finish("c")  # nobody has given that
    assert done == []
    work.finish("b")
    assert done == ["a", "b"]
    work.finish()
    assert done == ["a", "b"]


def test_a_thread_does_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "DELAY", 0.0)
    work = Later()
    for _ in range(2):  # a thread for each time
        done = threading.Event()
        work.add("a", done.set)
        assert done.wait(10)


def test_a_process_does_what_is_left_before_it_ends() -> None:
    text = "from treadle.runtime.later import Later; Later().add('a', lambda: print('done'))"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout == "done\n"
