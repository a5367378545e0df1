"""Processes that plan a library's calls: what they are asked, what they answer, and when none is."""

from __future__ import annotations

import base64
import io
import os
import sys
from typing import Any

import pytest

import treadle as td
from test_cuda_repeatable import Backend, backend, call_of
from treadle.backends.cuda.backend import _workers_for
from treadle.runtime.cuda import plan_worker, workers
from treadle.runtime.cuda.conv import PlannedConvolutions
from treadle.runtime.cuda.workers import READY, Asked, PlanWorker

fixtures = [backend]
# Answers a line with its number of bytes, and ends after two.
ECHO = """
import base64, sys
print("ready", flush=True)
for _ in range(2):
    line = sys.stdin.readline()
    print(base64.b64encode(str(len(line)).encode()).decode(), flush=True)
"""


def test_a_worker_answers_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(call_of("conv", "bfloat16"), False, 2)
    worker = PlanWorker([sys.executable, "-c", ECHO])
    assert worker.is_ready()
    length = len(workers.to_json(asked)) + 1
    assert [worker.planned(asked) for _ in range(3)] == [b"%d" % length] * 2 + [None]
    worker.close().join()
    for script in ("print('no')", "import time; time.sleep(60)"):
        monkeypatch.setattr(workers, "PATIENCE", 0.5)
        broken = PlanWorker([sys.executable, "-c", script])
        assert not broken.is_ready()
        broken.close().join()


def served(*asked: Asked, kind: str) -> list[bytes]:
    """Lines that a worker writes."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as file:
        file.writelines(workers.to_json(a).encode() + b"\n" for a in asked)
    found = io.BytesIO()
    with os.fdopen(read, "rb", buffering=0) as given:
        plan_worker.serve(given, found, kind)
    return found.getvalue().splitlines(keepends=True)


def test_a_worker_builds_the_plan_with_a_number(backend: Backend) -> None:
    call = call_of("conv", "bfloat16")
    backend.refused = {3}
    lines = served(Asked(call, False, 2), Asked(call, False, 3), kind="conv")
    assert lines[0] == READY
    assert [base64.b64decode(line) for line in lines[1:]] == [b"2\n2", b""]
    assert backend.built == [0, 2], "one to begin with"


class Worker:
    """Of plans that are compiled it has some."""

    def __init__(self, backend: Backend, answers: list[bytes | None]):
        self.backend, self.answers = backend, answers

    def is_ready(self) -> bool:
        return True

    def planned(self, asked: Asked) -> bytes | None:
        return self.answers.pop()


@pytest.mark.parametrize("answer", [b"0\n0", b"", None])
def test_plans_of_workers_are_taken(
    backend: Backend, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one has no plan the next of the proposals is built; where it is gone, somebody else."""
    backend.compiled = {0}
    call, worker = call_of("conv", "bfloat16"), Worker(backend, [answer])
    monkeypatch.setattr("treadle.runtime.cuda.conv._time", lambda made, *_: float(made.number))
    given: Any = [worker]

    class Queue(list[Any]):
        """This process comes last."""

        put = list.append

        def get(self) -> Any:
            while len(self) < 2 and worker.answers:
                pass
            return self.pop()

    monkeypatch.setattr("treadle.runtime.cuda.conv.SimpleQueue", {PlanWorker | None: Queue})
    (made,) = PlannedConvolutions({3: call}, False, given).fastest(lambda entry: [0]).values()
    assert not worker.answers
    assert made.number == (1 if answer == b"" else 0)


def test_workers_are_begun_for_attention_and_many_grouped_convolutions() -> None:
    def attended(q):
        return td.attention(q, q, q)

    def images(x, *weights):
        for w in weights:
            x = td.conv(x, w, padding=1, groups=8)
        return x

    assert _workers_for(td.trace(attended, td.Spec((1, 2, 4, 8)))) == {"attention": 1, "conv": 0}
    sizes = [(8, 1, k, 3) for k in range(1, 10)]
    graph = td.trace(images, td.Spec((1, 8, 32, 32)), *map(td.Spec, sizes))
    assert _workers_for(graph) == {"attention": 0, "conv": 2}


def test_the_first_program_alone_has_a_worker_for_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(workers, "PlanWorker", commands.append)
    monkeypatch.setattr(workers, "default_threads", lambda: 8)
    monkeypatch.setattr(workers, "_once", {"attention"})
    monkeypatch.setattr(workers, "_begun", [])
    for _ in range(2):
        workers.begin_workers({"attention": 1, "conv": 2})
        workers.begin_workers({"attention": 1, "conv": 2})  # these wait already
        workers.begun_workers()
    assert [c[-1] for c in commands] == ["attention", "conv", "conv", "conv", "conv"]
    monkeypatch.setattr(workers, "default_threads", lambda: 2)
    workers.begin_workers({"attention": 1, "conv": 2})
    assert len(commands) == 5
    assert not workers._begun
