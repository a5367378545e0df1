"""Programs are judged in processes of their own, so that a crash or a hang is one more finding.

A worker reads requests and writes verdicts, a line of JSON each. What it was asked last is what
it died of.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.fuzz.generate import generate
from treadle.fuzz.judge import CRASH, HANG, Verdict, judge
from treadle.fuzz.program import Program, from_json, to_json

LONGEST = 180.0  # seconds for one program
CACHE_MB = "64"  # plans: the same program with other threads is compiled once


def serve() -> int:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is no reply
    for line in sys.stdin:
        request = json.loads(line)
        program = _program(request)
        verdict = judge(program, request["device"])
        told: dict[str, Any] = {
            "kind": verdict.kind,
            "text": verdict.text,
            "allowed": verdict.allowed,
        }
        replies.write(json.dumps(told) + "\n")
        replies.flush()
    return 0


def _program(request: Mapping[str, Any]) -> Program:
    if "program" in request:
        return from_json(request["program"])
    return generate(request["seed"], request["index"], request["only"], request["mode"])


class Worker:
    """A process that judges programs; a new one after it died. To be used in a `with`."""

    def __init__(self, device: str, folder: str, longest: float = LONGEST):
        self.device, self.longest = device, longest
        self._folder = folder  # for plans and for what the process says last
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def judge(self, program: Program) -> Verdict:
        return self._ask({"program": to_json(program)})

    def judge_case(
        self, seed: int, index: int, only: Sequence[str], mode: str | None = None
    ) -> Verdict:
        """The program of a seed and an index."""
        return self._ask({"seed": seed, "index": index, "only": list(only), "mode": mode})

    def _ask(self, request: Mapping[str, Any]) -> Verdict:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        hung = threading.Event()

        def stop() -> None:
            hung.set()
            process.kill()

        watch = threading.Timer(self.longest, stop)
        watch.start()
        try:
            process.stdin.write(json.dumps({**request, "device": self.device}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if line:
            return Verdict(**json.loads(line))
        self._stop()
        if hung.is_set():
            return Verdict(HANG, f"no answer in {self.longest:g} s")
        return Verdict(CRASH, f"{_ending(process.returncode)}: {self._last_words()}")

    @property
    def _errors(self) -> Path:
        return Path(self._folder) / f"errors-{id(self)}.txt"

    def _start(self) -> subprocess.Popen[str]:
        line = [sys.executable, "-X", "faulthandler", "-m", "treadle", "fuzz", "--worker"]
        cache = {"TREADLE_CACHE": f"{self._folder}/plans", "TREADLE_CACHE_MB": CACHE_MB}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **cache},
            )
        return self._process

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        telling = [line for line in lines if "rror" in line]
        return (telling or lines or [""])[-1][:300]

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # a request that was not read
                process.stdin.close()


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
