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


def test_a_forked_process_leaves_it_to_its_parent() -> None:
    text = """
import os, threading
from treadle.runtime.later import Later
later, begun, go_on = Later(), threading.Event(), threading.Event()
later.add("a", lambda: (begun.set(), go_on.wait(60)))
threading.Thread(target=later.finish).start()
begun.wait(60)
child = os.fork()
if not child:
    later.finish("b")  # nobody holds its locks
    later.finish()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go_on.set()
"""
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == "7\n"


def test_a_process_does_what_is_left_before_it_ends() -> None:
    text = "from treadle.runtime.later import Later; Later().add('a', lambda: print('done'))"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout == "done\n"
