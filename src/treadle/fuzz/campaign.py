"""Many cases in several processes, until the time or the cases are used up."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from treadle.base.errors import LoadError
from treadle.fuzz.generate import generate
from treadle.fuzz.judge import REFUSED, SKIPPED, UNSTEADY, Verdict
from treadle.fuzz.program import Program, from_json, to_json
from treadle.fuzz.shrink import shrink
from treadle.fuzz.source import script
from treadle.fuzz.worker import Worker

MOST_SHRUNK = 5  # findings that are made small; the others are named, to be replayed


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. Without seconds and cases it does not end."""

    seed: int = 0
    seconds: float | None = None
    cases: int | None = None
    device: str = "cpu"
    processes: int = 1
    only: tuple[str, ...] = ()  # families
    mode: str | None = None  # forward, gradient or training; None for all
    first: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A program that is not right, as it was drawn or read, and made small."""

    case: str
    verdict: Verdict
    program: Program
    is_shrunk: bool
    device: str

    @property
    def about(self) -> str:
        return f"{self.case}: {self.verdict.kind}: {self.verdict.text}"

    @property
    def script(self) -> str:
        about = self.about.replace("\\", "\\\\").replace('"', "'")
        is_steady = self.verdict.kind != UNSTEADY
        return script(self.program, self.device, about, self.verdict.allowed, is_steady)


@dataclass(slots=True)
class Tally:
    """How far a campaign is."""

    tried: int = 0
    skipped: int = 0
    findings: list[Finding] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


Told = Callable[[Tally, Finding | None], None]


class Campaign:
    """Threads that each drive a worker; they share the indices and what was found."""

    def __init__(self, plan: Plan, told: Told):
        self.plan, self.told = plan, told
        self.tally = Tally()
        self._next, self._lock = plan.first, threading.Lock()
        self._failure: BaseException | None = None
        self._shrunk = 0

    def run(self) -> Tally:
        with tempfile.TemporaryDirectory(prefix="treadle-fuzz-") as folder:
            threads = [
                threading.Thread(target=self._work, args=(folder,))
                for _ in range(self.plan.processes)
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt as stopped:
                self._failure = stopped
                for thread in threads:  # they end with the case that they are at
                    thread.join()
        if self._failure is not None:
            raise self._failure
        return self.tally

    def _work(self, folder: str) -> None:
        try:
            with Worker(self.plan.device, folder) as worker:
                while (index := self._index()) is not None:
                    self._case(worker, index)
        except BaseException as error:
            self._failure = error

    def _index(self) -> int | None:
        """The next case; None when the time or the cases are used up, or something broke."""
        plan = self.plan
        with self._lock:
            is_late = plan.seconds is not None and self.tally.seconds > plan.seconds
            is_done = plan.cases is not None and self._next >= plan.first + plan.cases
            if is_late or is_done or self._failure is not None:
                return None
            self._next += 1
            return self._next - 1

    def _case(self, worker: Worker, index: int) -> None:
        plan = self.plan
        verdict = worker.judge_case(plan.seed, index, plan.only, plan.mode)
        finding = None
        if verdict.is_finding:
            program = generate(plan.seed, index, plan.only, plan.mode)
            finding = self._found(worker, f"{plan.seed}:{index}", program, verdict)
        with self._lock:
            self.tally.tried += 1
            self.tally.skipped += verdict.kind == SKIPPED
            if finding is not None:
                self.tally.findings.append(finding)
            self.told(self.tally, finding)

    def _found(self, worker: Worker, case: str, program: Program, verdict: Verdict) -> Finding:
        with self._lock:
            is_enough = self._shrunk >= MOST_SHRUNK
            self._shrunk += 1
        if is_enough:
            return Finding(case, verdict, program, False, self.plan.device)
        return made_small(worker, case, program, verdict)


def made_small(worker: Worker, case: str, program: Program, verdict: Verdict) -> Finding:
    """A finding with the smallest program that fails in the same way."""
    last = {"verdict": verdict}

    def fails(candidate: Program) -> bool:
        found = worker.judge(candidate)
        is_same = _manner(found) == _manner(verdict)
        if is_same:
            last["verdict"] = found
        return is_same

    small = shrink(program, fails)
    return Finding(case, last["verdict"], small, True, worker.device)


def _manner(verdict: Verdict) -> tuple[str, str]:
    """How a program fails; what is refused, by whom and with which error."""
    if verdict.kind != REFUSED:
        return verdict.kind, ""
    who, error, *_ = verdict.text.split(":")
    return verdict.kind, re.sub(r" with \d+ threads", "", who) + error


def run(plan: Plan, told: Told = lambda tally, finding: None) -> Tally:
    """Judge cases; `told` hears of each one, and of what was found."""
    return Campaign(plan, told).run()


def examine(case: str, program: Program, device: str) -> Finding | Verdict:
    """A program's verdict, or what was found, made small."""
    with (
        tempfile.TemporaryDirectory(prefix="treadle-fuzz-") as folder,
        Worker(device, folder) as worker,
    ):
        verdict = worker.judge(program)
        return made_small(worker, case, program, verdict) if verdict.is_finding else verdict


# The corpus: programs that once failed, a file each


def read_corpus(folder: Path) -> dict[str, Program]:
    """The programs of a folder by file name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.name] = from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            cause = f"{path} is no program: {error}"
            raise LoadError("fuzz", cause, "Remove it, or write it again.") from error
    return found


def write_corpus(folder: Path, program: Program) -> Path:
    """Add a program; its name says what it is made of."""
    text = json.dumps(to_json(program), indent=1) + "\n"
    forms = "-".join(step.form for step in program.steps[:3]) or "nothing"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{forms}-{digest}.json"
    path.write_text(text, encoding="utf-8")
    return path
