"""`step.certificate`: what a compile claims, with all that another program needs to check it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treadle.base.errors import SaveError
from treadle.base.version import __version__
from treadle.compile_report import CompileReport
from treadle.ir.composition import Composition
from treadle.kernel.evidence import Passage, Relation, Scheduled
from treadle.verify.certificate.graphs import Records
from treadle.verify.certificate.signing import signed
from treadle.verify.certificate.stored import unpacked
from treadle.verify.certificate.used import rules_used

FORMAT, VERSION = "treadle certificate", 7
FIRST = "apply_precision"  # the stage that is given what was traced
RELATIONS = {
    Relation.EQUAL: "the graph after {stage} equals the one before over the reals",
    Relation.GRADIENTS: "{stage} adds the gradients of the loss, and nothing else",
    Relation.UPDATES: "{stage} makes the step that was asked for",
    Relation.PART: "the program {stage!r} computes outputs of the graph as they are",
}
# What no certificate says anything of.
NOT_CLAIMED = (
    "rounding: numbers are exact elements of a field, or reals",
    "what LLVM or NVRTC make of the kernels, and the machine code itself",
    "libraries, drivers and hardware",
    "what kernels do with NaN",
    "first values of parameters and of the optimizer's state",
)


@dataclass(frozen=True, slots=True)
class Statement:
    """One claim: under which condition, on what evidence, and of how much it holds."""

    claim: str
    condition: str
    evidence: str
    scope: str
    is_established: bool = True

    def __str__(self) -> str:
        held = "" if self.is_established else "not established: "
        under = f", if {self.condition}" if self.condition else ""
        return f"{held}{self.claim}{under}\n    {self.scope}: {self.evidence}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The texts of graphs and programs by their hash, and a manifest that says what they are."""

    manifest: dict[str, Any]
    records: dict[str, str]
    claims: tuple[Statement, ...]

    @property
    def not_claimed(self) -> tuple[str, ...]:
        return NOT_CLAIMED

    def to_bytes(self, key: object = None) -> bytes:
        """The file, the same bytes for the same compile; signed if there is a key."""
        manifest = _text(self.manifest)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "manifest": manifest,
            "digest": hashlib.sha256(manifest.encode()).hexdigest(),
            "records": self.records,
            "signature": None if key is None else signed(manifest.encode(), key),
        }
        return (_text(document) + "\n").encode()

    def save(self, path: str | os.PathLike[str], key: object = None) -> None:
        """Write the file, aside first. `key` is an ed25519 private key: 32 bytes, or a PEM file."""
        data, target = self.to_bytes(key), Path(path)
        try:
            handle, aside = tempfile.mkstemp(dir=target.parent, prefix=".aside-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(aside, target)
            except BaseException:
                os.unlink(aside)
                raise
        except OSError as error:
            cause = f"{target} cannot be written: {error.strerror}"
            raise SaveError("certificate.save", cause) from error

    def summary(self) -> str:
        """The claims in words, and what is not claimed."""
        lines = [str(c) for c in self.claims]
        lines += ["not claimed:", *(f"    {told}" for told in NOT_CLAIMED)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def _text(record: object) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def certificate_of(report: CompileReport, level: str) -> Certificate:
    """The certificate of what has been compiled so far; `level` is how it was verified."""
    return _Writing(report, level).certificate()


class _Writing:
    """Evidence becomes records."""

    def __init__(self, report: CompileReport, level: str):
        self.report, self.level = report, level
        self.records = Records()

    def certificate(self) -> Certificate:
        evidence = self.report.evidence
        passages = [self._passage(p) for p in evidence.passages]
        programs = [self._program(p) for p in evidence.programs]
        traced = {p["before"] for p in passages if p["stage"] == FIRST}
        claims = tuple(self._claims(programs))
        manifest = {
            "treadle": __version__,
            "device": self.report.device,
            "precision": self.report.precision,
            "passages": _distinct(passages),
            "programs": _distinct(programs),
            "traced": sorted(traced),
            "rules": rules_used(self.report),
            "claims": [asdict(c) for c in claims],
        }
        return Certificate(manifest, self.records.texts, claims)

    def _passage(self, p: Passage) -> dict[str, Any]:
        return {
            "stage": p.stage,
            "relation": p.relation.value,
            "before": self.records.graph(p.before),
            "after": self.records.graph(p.after),
            "pairs": self.records.add([[*a, *b] for a, b in p.pairs]),
            "cotangents": self._cotangents(p),
            "frozen": list(p.frozen),
            "plan": "" if p.composition is None else self.records.add(self._plan(p.composition())),
            "assumptions": list(p.assumptions),
        }

    def _cotangents(self, p: Passage) -> str:
        has_gradients = p.relation is Relation.GRADIENTS
        return self.records.add([[*a, *b] for a, b in p.cotangents]) if has_gradients else ""

    def _plan(self, c: Composition) -> dict[str, Any]:
        update = {
            "name": c.name, "flags": dict(c.flags), "decayed": list(c.decayed),
            "rate": None if c.rate is None else self.records.graph(c.rate),
            "graph": None if c.graph is None else self.records.graph(c.graph),
        }  # fmt: skip
        return {
            "mode": c.mode, "prefix": c.prefix, "clips": c.clips, "accumulates": c.accumulates,
            "scales": c.scales, "update": update, "reason": c.reason,
        }  # fmt: skip

    def _program(self, p: Scheduled) -> dict[str, Any]:
        found = unpacked(p.record())
        record: dict[str, Any] = {"name": p.name, "graph": self.records.graph(p.graph)}
        if found is None:
            return {**record, "graphs": {}, "pairs": "", "program": ""}
        self.records.texts.update(found["records"])
        pairs = self.records.add(found["pairs"])
        return {**record, "graphs": found["graphs"], "pairs": pairs, "program": found["program"]}

    def _claims(self, programs: list[dict[str, Any]]) -> Iterator[Statement]:
        for p in self.report.evidence.passages:
            yield self._related(p)
        for program, facts in zip(programs, self.report.programs, strict=False):
            name, count = program["name"], f"{len(facts.kernels)} kernels"
            for claim in (
                "all accesses are in bounds, parallel writes and lanes are disjoint",
                "what is read was written in an earlier phase",
                "buffers that live at one time do not overlap",
            ):
                shown = "shown for all iterations when the program was made"
                yield Statement(claim, "", shown, f"{name}: {count}")
        if self.level == "full":
            for c in self.report.claims:
                if c.kind == "kernel":
                    yield _kernel(c)
        elif programs:
            claim = "every kernel computes its part of the graph"
            told = 'left to the checker, or to verify="full"'
            yield Statement(claim, "", told, f"{len(programs)} programs", False)

    def _related(self, p: Passage) -> Statement:
        claim = RELATIONS[p.relation].format(stage=p.stage)
        scope = f"{len(p.before.nodes)} nodes before, {len(p.after.nodes)} after"
        condition = ", ".join(p.assumptions)
        if self.level == "off":
            return Statement(claim, condition, 'not looked at: verify="off"', scope, False)
        if p.reason:
            return Statement(claim, condition, p.reason, scope, False)
        shown = "replayed: nodes over equal operands, others over a finite field at some elements"
        return Statement(claim, condition, shown, scope)


def _kernel(claim: Any) -> Statement:
    compared = sum(map(len, claim.compared.values()))
    told = claim.reason or f"{compared} elements compared, error at most 2^-20 each"
    where = claim.lines[0] if claim.lines else "no line"
    scope = f"kernel {claim.name} [{where}], some of its iterations at full size"
    return Statement("it computes its part of the graph", "", told, scope, claim.is_established)


def _distinct(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({_text(f): f for f in found}.values())
