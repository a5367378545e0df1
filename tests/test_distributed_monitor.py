"""The monitor of a job, with ranks that are only connections: what it says, and to whom."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.distributed import monitor as module

TOKEN = "a token"


def connected(port: int, rank: int, kind: str, token: str = TOKEN) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), 30)
    hello = {"token": token, "rank": rank, "kind": kind, "process": 2**22 + 1, "host": "moon"}
    send(link, **hello)
    return link


def send(link: socket.socket, **message: Any) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


class Rank:
    """A rank as the monitor sees it."""

    def __init__(self, port: int, rank: int, token: str = TOKEN):
        self.life, self.beats = (connected(port, rank, k, token) for k in ("life", "beat"))
        self.heard = self.life.makefile("r")

    def tell(self, **message: Any) -> None:
        send(self.life, **message)

    def beat(self, **message: Any) -> None:
        send(self.beats, **message)

    def hear(self) -> Any:
        line = self.heard.readline()
        return json.loads(line) if line else None

    def die(self) -> None:
        self.heard.close()
        for link in (self.life, self.beats):
            link.close()


class Job:
    """A monitor of two ranks."""

    def __init__(self, folder: Path):
        self.status = folder / "status"
        command = [sys.executable, "-I", "-S", str(Path(module.__file__))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        told = {"size": 2, "token": TOKEN, "host": "127.0.0.1", "status": str(self.status)}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.close()
        self.port = int(self.process.stdout.readline())
        self.ranks: list[Rank] = []

    def join(self, beat: bool = True) -> list[Rank]:
        self.ranks = [Rank(self.port, rank) for rank in range(2)]
        assert [rank.hear() for rank in self.ranks] == [{"joined": 0}, {"joined": 1}]
        for rank in self.ranks if beat else []:
            rank.beat(waits=3, place="train.py:7 in load")
        return self.ranks

    def said(self) -> str:
        assert self.process.stderr is not None
        self.process.wait(30)
        return self.process.stderr.read()

    def close(self) -> None:
        for rank in self.ranks:
            rank.die()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path)
    yield found
    found.close()


def test_ranks_that_leave_leave_nothing_to_say(job: Job) -> None:
    for rank in job.join():
        rank.tell(left=3)
        rank.die()
    assert job.said() == ""
    assert not job.status.exists()


def test_a_rank_that_dies_is_named_and_the_others_end(job: Job) -> None:
    first, second = job.join()
    second.die()
    assert first.hear() == {"end": 137}
    first.die()
    assert job.said().startswith("treadle: rank 1 of 2 has died (process 4194305 on moon; last ")
    assert json.loads(job.status.read_text())["rank"] == 1


def test_one_of_those_that_fail_tells_its_error(job: Job) -> None:
    first, second = job.join()
    first.tell(failed="DistributedError: rank 1 refused", code=1, echo=True)
    second.tell(failed="ValueError: row 7", code=3, echo=False)
    assert second.hear() == {"tells": True}
    assert first.hear() == {"tells": False}
    second.die()
    assert first.hear() == {"end": 3}
    first.die()
    assert job.said() == ""  # the rank has said it
    assert json.loads(job.status.read_text())["text"] == "ValueError: row 7"


def test_who_is_waited_for_is_named(job: Job) -> None:
    first, second = job.join()
    first.tell(late=4, seconds=9)
    assert second.hear() == {"end": 1}
    first.die()
    second.die()
    said = job.said()
    assert "rank 0 of 2 has waited 9 s for the others: rank 1 does not come" in said
    assert "last seen in train.py:7 in load" in said or "last seen in the start" in said


@pytest.mark.parametrize("order", ["left first", "wait first"])
def test_a_rank_that_ended_early_is_named(job: Job, order: str) -> None:
    first, second = job.join()
    told = [
        lambda: second.tell(left=3),
        lambda: first.beat(waits=4, place="train.py:9 in step", waits_for_left=True),
    ]
    for tell in told if order == "left first" else reversed(told):
        tell()
        time.sleep(0.05)  # most often read apart; it ends the same if they are read together
    assert first.hear() == {"end": 1}
    first.die()
    second.die()
    assert "rank 1 of 2 has ended (process 4194305 on moon), and rank 0 waits" in job.said()


def test_signs_of_life_may_be_heard_before_the_lifeline(job: Job) -> None:
    beats = connected(job.port, 0, "beat")
    send(beats, waits=1, place="early")
    time.sleep(0.05)
    first, second = job.join(beat=False)
    second.tell(left=3)
    send(beats, waits=4, place="train.py:9 in step", waits_for_left=True)
    assert first.hear() == {"end": 1}
    beats.close()
    first.die()
    second.die()
    assert "and rank 0 waits for it (in train.py:9 in step)" in job.said()


def test_signs_of_life_may_come_with_the_first_line(job: Job) -> None:
    first, second = job.join(beat=False)
    second.tell(left=3)
    hello = {"token": TOKEN, "rank": 0, "kind": "beat"}
    told = {"waits": 4, "place": "step", "waits_for_left": True}
    with socket.create_connection(("127.0.0.1", job.port), 10) as link:
        link.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in (hello, told)))
        assert first.hear() == {"end": 1}
    first.die()
    second.die()
    assert "and rank 0 waits for it (in step)" in job.said()


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"{}\n", b"x" * 70000 + b"\n"])
def test_whoever_does_not_know_the_token_is_nobody(job: Job, line: bytes) -> None:
    first, second = job.join()
    with socket.create_connection(("127.0.0.1", job.port), 10) as stranger:
        stranger.sendall(line)
    wrong = Rank(job.port, 0, "another token")
    assert wrong.hear() is None  # closed
    wrong.die()
    for rank in (first, second):
        rank.tell(left=3)
        rank.die()
    assert job.said() == ""
