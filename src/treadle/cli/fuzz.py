"""`treadle fuzz`: random programs on a device against the oracle."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.base.terminal import Line, Terminal
from treadle.fuzz.campaign import (
    Finding,
    Plan,
    Tally,
    examine,
    read_corpus,
    run,
    write_corpus,
)
from treadle.fuzz.generate import families, generate
from treadle.fuzz.program import Program, to_json
from treadle.fuzz.source import definitions
from treadle.fuzz.worker import serve
from treadle.pipeline import choose_device
from treadle.runtime.cpu.processors import default_threads

SECONDS = 60.0  # where neither seconds nor cases are given
REFRESH = 0.2  # seconds between two drawings of the line


def run_fuzz(options: argparse.Namespace) -> int:
    """Run what the options ask for; 1 if anything was found."""
    if options.worker:
        return serve()
    device, only = choose_device(options.device), _families(options.only)
    folder = None if options.corpus is None else _corpus(Path(options.corpus))
    shown = Shown(is_json=options.json)
    if options.replay is not None:
        seed, index = options.replay
        _examined(f"{seed}:{index}", generate(seed, index, only, options.mode), device, shown)
        return shown.end()
    known = {} if folder is None else read_corpus(folder)
    for name, program in known.items():
        _examined(name, program, device, shown)
    seconds = options.seconds if options.minutes is None else options.minutes
    has_limit = seconds is not None or options.cases is not None
    plan = Plan(
        seed=int(time.time()) % 1_000_000 if options.seed is None else options.seed,
        seconds=seconds if has_limit else SECONDS,
        cases=options.cases,
        device=device,
        processes=options.processes or default_threads(),
        only=only,
        mode=options.mode,
    )
    shown.campaign(plan)
    if folder is not None:
        shown.write(folder, known)
    return shown.end()


def _corpus(folder: Path) -> Path:
    """A folder for findings, made before anything is looked for: an hour later is too late."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        cause = f"{folder} cannot be a folder of programs: {reason}"
        raise ArgumentError("fuzz", cause, "Name a folder, or one that can be made.") from error
    return folder


def _families(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in families()]
    if unknown:
        raise ArgumentError(
            "fuzz", f"there is no family {', '.join(unknown)}", f"Use {', '.join(families())}."
        )
    return names


def _examined(case: str, program: Program, device: str, shown: Shown) -> None:
    shown.say(f"{case}: {program.mode}\n\n{definitions(program)}\n")
    found = examine(case, program, device)
    if isinstance(found, Finding):
        shown.finding(found)
    else:
        shown.say(f"{case}: {found.kind} {found.text}".rstrip())


@dataclass(slots=True)
class Shown:
    """What the command prints, and what was found."""

    is_json: bool = False
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    terminal: Terminal = field(default_factory=Terminal)
    _drawn: float = 0.0

    def say(self, text: str) -> None:
        if not self.is_json:
            self.terminal.say(text)

    def finding(self, found: Finding) -> None:
        """What was found; a script where it was made small, and is not one that was shown."""
        is_known = any(f.program == found.program for f in self.findings)
        self.findings.append(found)
        self.say(found.about)
        if found.is_shrunk and not is_known:
            self.say(f"\n{found.script}")
        elif not found.is_shrunk:
            self.say(f"  treadle fuzz --replay {found.case} --device {found.device}")

    def campaign(self, plan: Plan) -> None:
        """Run it, with a line of progress on a terminal, and say what came of it."""
        line = Line(self.terminal) if self.terminal.is_live and not self.is_json else None

        def told(tally: Tally, found: Finding | None) -> None:
            if found is not None:
                self.finding(found)
            if line is not None and tally.seconds > self._drawn + REFRESH:
                self._drawn = tally.seconds
                line.draw(_progress(tally), _share(plan, tally), f"seed {plan.seed}")

        if line is not None:
            line.start()
        try:
            tally = run(plan, told)
        finally:
            if line is not None:
                line.stop(keep=False)
        self.facts = {
            "seed": plan.seed,
            "device": plan.device,
            "cases": tally.tried,
            "skipped": tally.skipped,
            "seconds": round(tally.seconds, 1),
        }
        self.say(f"seed {plan.seed} on {plan.device}: {_progress(tally)}")

    def write(self, folder: Path, known: dict[str, Program]) -> None:
        """New programs into the corpus."""
        for found in self.findings:
            if found.is_shrunk and found.program not in known.values():
                self.say(f"written: {write_corpus(folder, found.program)}")

    def end(self) -> int:
        if self.is_json:
            print(json.dumps({**self.facts, "findings": list(map(_row, self.findings))}, indent=1))
        return int(bool(self.findings))


def _progress(tally: Tally) -> str:
    rate = tally.tried / max(tally.seconds, 1e-9)
    return (
        f"{tally.tried} cases, {tally.skipped} skipped, {len(tally.findings)} found, "
        f"{rate:.1f} a second"
    )


def _share(plan: Plan, tally: Tally) -> float | None:
    """How much is done, by time or by cases."""
    if plan.cases is not None:
        return tally.tried / max(plan.cases, 1)
    return None if plan.seconds is None else tally.seconds / max(plan.seconds, 1e-9)


def _row(found: Finding) -> dict[str, Any]:
    return {
        "case": found.case,
        "kind": found.verdict.kind,
        "text": found.verdict.text,
        "is_shrunk": found.is_shrunk,
        "program": to_json(found.program),
        "script": found.script,
    }
