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
    asked = Asked(call_of("conv", "bfloat16"), 2)
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


def served(*asked: Asked) -> list[bytes]:
    """Lines that a worker writes."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as file:
        file.writelines(workers.to_json(a).encode() + b"\n" for a in asked)
    found = io.BytesIO()
    with os.fdopen(read, "rb", buffering=0) as given:
        plan_worker.serve(given, found)
    return found.getvalue().splitlines(keepends=True)


def test_a_worker_builds_the_plan_with_a_number(backend: Backend) -> None:
    call = call_of("conv", "bfloat16")
    backend.refused = {3}
    lines = served(Asked(call, 2), Asked(call, 3))
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


def test_workers_are_begun_for_many_grouped_convolutions_alone() -> None:
    def attended(q):
        return td.attention(q, q, q)

    def images(x, *weights, groups=8):
        for w in weights:
            x = td.conv(x, w, padding=1, groups=groups)
        return x

    assert _workers_for(td.trace(attended, td.Spec((1, 2, 4, 8)))) == 0
    sizes = [(8, 1, k, 3) for k in range(1, 10)]
    image = td.Spec((1, 8, 32, 32))
    assert _workers_for(td.trace(images, image, *map(td.Spec, sizes))) == 2
    whole = [td.Spec((8, 8, k, 3)) for k in range(1, 10)]
    assert _workers_for(td.trace(lambda x, *ws: images(x, *ws, groups=1), image, *whole)) == 0


def test_workers_are_begun_once_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def started(command: list[str]) -> object:
        commands.append(command)
        return command

    monkeypatch.setattr(workers, "PlanWorker", started)
    monkeypatch.setattr(workers, "default_threads", lambda: 8)
    monkeypatch.setattr(workers, "_begun", [])
    for _ in range(2):
        workers.begin_workers(2)
        workers.begin_workers(2)  # these wait already
        assert len(workers.begun_workers()) == 2
    assert len(commands) == 4
    monkeypatch.setattr(workers, "default_threads", lambda: 2)
    workers.begin_workers(2)
    assert len(commands) == 4
    assert not workers.begun_workers()
