"""The file: its hashes, its signature, and everything that is checked of what it says."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from treadle_checker import reading
from treadle_checker.equality import check_related
from treadle_checker.gradient import check_gradient
from treadle_checker.graph import read_graph
from treadle_checker.kernel_checks import Claim, check_program
from treadle_checker.program import read_program
from treadle_checker.reading import NotEstablished, Rejected, Unreadable
from treadle_checker.values import Graph, Value

FORMAT, VERSION = "treadle certificate", 1
FIRST = "apply_precision"  # the stage that is given what was traced
RELATIONS = ("equal", "gradients", "updates", "part")
CLASSES, STATUSES = ("exact", "rounding"), ("proved", "tested", "assumption")
NOT_CLAIMED = (
    "rounding",
    "what LLVM or NVRTC make of kernels",
    "libraries, drivers and hardware",
    "what kernels do with NaN",
    "that optimizers are those of a paper: updates are read as they were traced",
)


@dataclass
class Report:
    """What was found: a certificate is accepted if nothing in it is wrong."""

    verdict: str = "accepted"  # or "rejected", "unreadable"
    reason: str = ""
    made_by: str = ""
    claims: list[Claim] = field(default_factory=list)
    signature: str = "none"

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 rejected, 2 unreadable, 3 accepted with parts that are not established."""
        codes = {"rejected": 1, "unreadable": 2}
        all_hold = all(c.is_established for c in self.claims)
        return codes.get(self.verdict, 0 if all_hold else 3)

    @property
    def record(self) -> dict[str, Any]:
        shown = [asdict(c) | {"is_established": c.is_established} for c in self.claims]
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "made_by": self.made_by,
            "signature": self.signature,
            "claims": shown,
            "not_claimed": list(NOT_CLAIMED),
        }

    def __str__(self) -> str:
        lines = [f"{self.verdict}" + (f": {self.reason}" if self.reason else "")]
        lines += [f"made by {self.made_by}; signature: {self.signature}"] if self.made_by else []
        held = [c for c in self.claims if c.is_established]
        for told, count in _grouped(held):
            lines.append(f"  established: {told}" + (f" ({count} times)" if count > 1 else ""))
        for c in self.claims:
            if not c.is_established:
                lines.append(f"  not established: {c.claim} [{c.scope}]: {c.reason}")
        if self.claims:
            lines.append(f"not claimed: {'; '.join(NOT_CLAIMED)}")
        return "\n".join(lines)


def _grouped(claims: list[Claim]) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    for c in claims:
        under = f", if {c.condition}" if c.condition else ""
        told = c.claim + under
        found[told] = found.get(told, 0) + 1
    return list(found.items())


def check_file(path: str, public_key: bytes | None = None, effort: int = 1) -> Report:
    """Everything that can be said of a file. It is read once, and never more than a limit."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Unreadable("it is not a file")
            data = file.read(reading.MOST_BYTES + 1)
    except OSError as error:
        return Report("unreadable", str(error.strerror))
    except Unreadable as error:
        return Report("unreadable", str(error))
    return check_bytes(data, public_key, effort)


def check_bytes(data: bytes, public_key: bytes | None = None, effort: int = 1) -> Report:
    """The same of bytes. Nothing that they say makes it raise."""
    report = Report()
    try:
        _Checking(data, report, effort).check(public_key)
    except Unreadable as error:
        report.verdict, report.reason = "unreadable", str(error)
    except (Rejected, NotEstablished) as error:
        report.verdict, report.reason = "rejected", str(error)
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        AssertionError,
    ) as error:
        # Something that no reader thought of: it is not accepted.
        report.verdict, report.reason = "rejected", f"it cannot be followed: {error!r}"[:300]
    except MemoryError:
        report.verdict, report.reason = "rejected", "it takes too much memory"
    return report


class _Checking:
    """One certificate."""

    def __init__(self, data: bytes, report: Report, effort: int):
        self.report, self.effort = report, effort
        document = reading.record(
            reading.parsed(data),
            "format", "version", "manifest", "digest", "records", "signature",
            what="it",
        )  # fmt: skip
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise Unreadable("its format or its version is not one that this checker knows")
        self.signature = document["signature"]
        self.text = reading.string(
            document["manifest"], reading.MOST_BYTES, "the manifest"
        ).encode()
        if reading.digest(self.text) != document["digest"]:
            raise Rejected("the manifest is not what its digest says")
        self.texts = document["records"]
        if type(self.texts) is not dict:
            raise Unreadable("its records are not an object")
        for name, text in self.texts.items():
            if (
                reading.digest(reading.string(text, reading.MOST_BYTES, "a record").encode())
                != name
            ):
                raise Rejected(f"the record {name[:12]} has another content than its name says")
        self.manifest = reading.record(
            reading.parsed(self.text),
            "treadle", "device", "precision", "passages", "programs", "gradient", "rules", "claims",
            what="the manifest",
        )  # fmt: skip
        self.graphs: dict[str, Graph] = {}
        self.reading: list[str] = []  # graphs whose bodies are being read
        self.used: set[str] = set()

    def check(self, public_key: bytes | None) -> None:
        made = [reading.string(self.manifest[n], 100) for n in ("treadle", "device", "precision")]
        self.report.made_by = f"treadle {made[0]} for {made[1]} in {made[2]}"
        self._check_signature(public_key)
        self._check_rules()
        reading.each(self.manifest["claims"], _own_claim, 10_000)
        passages = reading.each(self.manifest["passages"], self._passage, 1000)
        self._check_gradient(passages)
        programs = reading.each(self.manifest["programs"], self._program, 1000)
        if not passages:
            raise Rejected("it says nothing of how a graph was made")
        self._check_links(passages, programs)
        if self.texts.keys() - self.used:
            raise Rejected(f"{len(self.texts.keys() - self.used)} records are used by nothing")

    def record(self, name: object) -> Any:
        """What was stored under a hash."""
        found = self.texts.get(reading.string(name, 64, "a hash"))
        if found is None:
            raise Rejected(f"there is no record {name}")
        self.used.add(str(name))
        return reading.parsed(found.encode())

    def graph(self, name: object) -> Graph:
        known = reading.string(name, 64, "a hash")
        if known not in self.graphs:
            if len(self.reading) > 8:
                raise Unreadable("graphs in graphs of more than 8 levels")
            self.reading.append(known)
            self.graphs[known] = read_graph(self.record(known), self.graph, known)
            self.reading.pop()
        return self.graphs[known]

    def established(
        self, claim: str, scope: str, look: Callable[[], str], condition: str = ""
    ) -> None:
        """A claim, with what was looked at or why it is not established."""
        evidence = reason = ""
        try:
            evidence = look()
        except NotEstablished as found:
            reason = str(found) or "not known"
        self.report.claims.append(Claim(claim, scope, evidence, condition, reason))

    def _passage(self, given: object) -> tuple[str, str, str, str]:
        fields = ("stage", "relation", "before", "after", "pairs", "assumptions")
        found = reading.record(given, *fields, what="a stage")
        stage = reading.string(found["stage"], 100)
        relation = reading.one_of(found["relation"], {r: r for r in RELATIONS}, "a relation")
        before, after = self.graph(found["before"]), self.graph(found["after"])
        condition = ", ".join(
            reading.each(found["assumptions"], lambda a: reading.string(a, 200), 20)
        )
        pairs = self.pairs(found["pairs"], before, after)
        claim = {
            "equal": f"the graph after {stage} equals the one before over the reals",
            "gradients": f"{stage} leaves what was there as it is",
            "updates": f"{stage} reads the gradients as they are",
            "part": f"the program {stage!r} computes outputs of the graph as they are",
        }[relation]
        self.established(
            claim,
            stage,
            lambda: self._related(relation, before, after, pairs, condition),
            condition,
        )
        return stage, relation, found["before"], found["after"]

    def _related(
        self, relation: str, before: Graph, after: Graph, pairs: Any, condition: str
    ) -> str:
        try:
            found = check_related(relation, before, after, pairs)
        except Rejected as wrong:
            if condition:  # numbers that are near are taken for equal
                raise NotEstablished(str(wrong)) from wrong
            raise
        return (
            f"{found.congruent} values by their form, {found.compared} over the field in "
            f"{found.distinct} ways, at 16 elements or all of each"
        )

    def pairs(self, name: object, before: Graph, after: Graph) -> list[tuple[Value, Value]]:
        def value(graph: Graph, node: object, output: object) -> Value:
            at = reading.integer(node, 0, len(graph.nodes) - 1)
            return Value(at, reading.integer(output, 0, len(graph.nodes[at].types) - 1))

        rows = reading.each(self.record(name), lambda r: reading.row(r, 4, "a pair"))
        return [(value(before, *r[:2]), value(after, *r[2:])) for r in rows]

    def _check_gradient(self, passages: list[tuple[str, str, str, str]]) -> None:
        found = reading.record(
            self.manifest["gradient"], "loss", "both", "reason", what="a gradient"
        )
        reason = reading.string(found["reason"], 1000)
        if reason == "there is no gradient":
            if any(relation in ("gradients", "updates") for _, relation, _, _ in passages):
                raise Rejected("it is of a step with a gradient, and says that there is none")
            return

        def look() -> str:
            if reason:
                raise NotEstablished(reason)
            loss, both = self.graph(found["loss"]), self.graph(found["both"])
            whole = [
                self.graph(after) for _, relation, _, after in passages if relation == "gradients"
            ]
            if not any(_form(both) == _form(graph) for graph in whole):
                raise NotEstablished("the small instance is not of the same form as the step")
            return check_gradient(loss, both)

        claim = "the gradient equals forward mode exactly over F_p"
        self.established(claim, "a small instance of the loss", look)

    def _program(self, given: object) -> tuple[str, str]:
        found = reading.record(
            given, "name", "graph", "graphs", "pairs", "program", what="a program"
        )
        name, graph = reading.string(found["name"], 100), self.graph(found["graph"])
        if found["program"] == "":
            missing = Claim(
                "its kernels compute its graph", name, reason="it has no record of its kernels"
            )
            self.report.claims.append(missing)
            return name, found["graph"]
        if type(found["graphs"]) is not dict or "" not in found["graphs"]:
            raise Unreadable(
                "a program's graphs are not an object that has one by the name of nothing"
            )
        scopes = {reading.string(s, 1000): self.graph(g) for s, g in found["graphs"].items()}
        pairs = self.pairs(found["pairs"], graph, scopes[""])
        claim = "the graph that was scheduled equals the one before over the reals"
        self.established(claim, name, lambda: self._related("equal", graph, scopes[""], pairs, ""))
        program = read_program(self.record(found["program"]))
        self.report.claims += check_program(program, scopes, self.effort)
        if not self.effort:
            told = "kernels were not compared with the graph: effort 0"
            self.report.claims.append(Claim("its kernels compute its graph", name, reason=told))
        return name, found["graph"]

    def _check_links(
        self, passages: list[tuple[str, str, str, str]], programs: list[tuple[str, str]]
    ) -> None:
        """Every program's graph comes by stages from one that was traced."""
        came = {after: before for _, _, before, after in reversed(passages) if before != after}
        traced = {before for stage, _, before, _ in passages if stage == FIRST}
        for name, graph in programs:
            for _ in passages:
                graph = graph if graph in traced else came.get(graph, graph)
            if graph in came and graph not in traced:
                raise Rejected("stages go around in a circle")
            if graph not in {before for _, _, before, _ in passages}:
                raise Rejected(f"nothing says where the graph of the program {name!r} comes from")
            if graph not in traced:
                told = "another graph stands between: parameters of the optimizer are put into it"
                self.report.claims.append(Claim("it comes from what was traced", name, reason=told))

    def _check_rules(self) -> None:
        """Rules are named so that people can look them up; what they did is checked anyway."""
        for given in reading.items(self.manifest["rules"], 10_000):
            rule = reading.record(
                given, "name", "statement", "class", "status", "count", what="a rule"
            )
            name = reading.string(rule["name"], 200)
            reading.string(rule["statement"], 2000)
            reading.integer(rule["count"], 1)
            reading.one_of(rule["class"], {c: c for c in CLASSES}, "a rule's class")
            status = reading.one_of(rule["status"], {s: s for s in STATUSES}, "a rule's status")
            if status != "proved":
                reason = (
                    "" if status == "tested" else f"the compiler assumes it: {rule['statement']}"
                )
                self.report.claims.append(
                    Claim(f"the rule {name} holds for all sizes", "compiler", "tested", "", reason)
                )

    def _check_signature(self, public_key: bytes | None) -> None:
        if self.signature is None:
            if public_key is not None:
                raise Rejected("it is not signed")
            return
        found = reading.record(self.signature, "algorithm", "key", "value", what="a signature")
        if found["algorithm"] != "ed25519":
            raise Unreadable("its signature is of an unknown kind")
        try:
            key, value = (bytes.fromhex(reading.string(found[n], 200)) for n in ("key", "value"))
        except ValueError as error:
            raise Unreadable("its signature is not hexadecimal") from error
        if public_key is not None and key != public_key:
            raise Rejected("it is signed with another key")
        self.report.signature = _verified(self.text, key, value, public_key is not None)


def _form(graph: Graph) -> list[str]:
    """What an instance of other sizes has in common: the ops, in order."""
    return [n.op for n in graph.nodes]


def _own_claim(given: object) -> None:
    """What the compiler says of itself: of the right form, and not more than that."""
    fields = ("claim", "condition", "evidence", "scope")
    found = reading.record(given, *fields, "is_established", what="a claim")
    for name in fields:
        reading.string(found[name], 10_000)
    reading.boolean(found["is_established"])


def _verified(data: bytes, key: bytes, value: bytes, is_known: bool) -> str:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return "not checked: the package cryptography is not installed"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(value, data)
    except (InvalidSignature, ValueError) as error:
        raise Rejected("its signature is wrong") from error
    return (
        "by the key that was given"
        if is_known
        else f"by {key.hex()[:16]}…, a key that nobody vouches for"
    )
