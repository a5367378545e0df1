"""The file: its hashes, its signature, and everything that is checked of what it says."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from treadle_checker import randomness, reading
from treadle_checker.budget import Budget
from treadle_checker.chain import check_chain
from treadle_checker.equality import Outcome
from treadle_checker.graph import read_graph
from treadle_checker.kernel_checks import Claim, check_program
from treadle_checker.program import read_program
from treadle_checker.reading import NotEstablished, Rejected, Unreadable, need, record, several
from treadle_checker.relations import (
    Pairs,
    check_composed,
    check_derived,
    check_equal,
    with_gradients,
)
from treadle_checker.scopes import Scopes
from treadle_checker.types import Graph, Value
from treadle_checker.updates import composed, read_plan

FORMAT, VERSION = "treadle certificate", 7
NOT_CLAIMED = (
    "rounding",
    "what LLVM or NVRTC make of kernels",
    "libraries, drivers and hardware",
    "what kernels do with NaN",
    "first values of parameters and of the optimizer's state",
)
RELATIONS = {
    "equal": "the graph after {stage} equals the one before over the reals",
    "gradients": "{stage} adds the gradients of the loss, and nothing else",
    "updates": "{stage} makes the step of them: {told}",
    "part": "the program {stage!r} computes outputs of the graph as they are",
}


@dataclass
class Report:
    """What was found: a certificate is accepted if nothing in it is wrong."""

    verdict: str = "accepted"  # or "rejected", "unreadable"
    reason: str = ""
    made_by: str = ""
    claims: list[Claim] = field(default_factory=list)
    signature: str = "none"
    seed: int = 0  # of what was drawn

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 rejected, 2 unreadable, 3 accepted with parts that are not established."""
        all_hold = all(c.is_established for c in self.claims)
        return {"rejected": 1, "unreadable": 2}.get(self.verdict, 0 if all_hold else 3)

    @property
    def record(self) -> dict[str, Any]:
        shown = [asdict(c) | {"is_established": c.is_established} for c in self.claims]
        return {**vars(self), "claims": shown, "not_claimed": list(NOT_CLAIMED)}

    def __str__(self) -> str:
        lines = [self.verdict + (f": {self.reason}" if self.reason else "")]
        lines += [f"made by {self.made_by}; signature: {self.signature}"] if self.made_by else []
        held = [c for c in self.claims if c.is_established]
        told = Counter(c.claim + (f", if {c.condition}" if c.condition else "") for c in held)
        for claim, count in told.items():
            lines.append(f"  established: {claim}" + (f" ({count} times)" if count > 1 else ""))
        for c in self.claims:
            if not c.is_established:
                lines.append(f"  not established: {c.claim} [{c.scope}]: {c.reason}")
        lines += [f"drawn with --seed {self.seed}"] if self.exit_code in (1, 3) else []
        lines += [f"not claimed: {'; '.join(NOT_CLAIMED)}"] if self.claims else []
        return "\n".join(map(printable, lines))


def printable(text: str) -> str:
    """A text with escapes for what a terminal may take for a command, or cannot encode."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def check_file(
    path: str, public_key: bytes | None = None, effort: int = 1, seed: int | None = None
) -> Report:
    """Everything that can be said of a file. It is read once, and never more than a limit."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            need(stat.S_ISREG(os.fstat(handle).st_mode), path, "a file")
            data = file.read(reading.MOST_BYTES + 1)
    except OSError as error:
        return Report("unreadable", str(error.strerror))
    except Unreadable as error:
        return Report("unreadable", str(error))
    return check_bytes(data, public_key, effort, seed)


def check_bytes(
    data: bytes, public_key: bytes | None = None, effort: int = 1, seed: int | None = None
) -> Report:
    """The same of bytes. Nothing that they say makes it raise. A seed repeats a run."""
    report = Report(seed=randomness.fresh() if seed is None else seed)
    try:
        with randomness.seeded(report.seed):
            _Checking(data, report, effort).check(public_key)
    except Unreadable as error:
        report.verdict, report.reason = "unreadable", str(error)
    except (Rejected, NotEstablished) as error:
        report.verdict, report.reason = "rejected", str(error)
    except reading.UNEXPECTED as error:  # what no reader thought of is not accepted
        report.verdict, report.reason = "rejected", f"it cannot be followed: {error!r}"[:300]
    except MemoryError:
        report.verdict, report.reason = "rejected", "it takes too much memory"
    return report


class Passage(NamedTuple):
    """A stage, and the hashes of the graphs before and after it."""

    stage: str
    relation: str
    before: str
    after: str
    pairs: str
    cotangents: str
    frozen: tuple[str, ...]
    plan: str
    assumptions: tuple[str, ...]


_hash, _short, _long = reading.text(64), reading.text(100), reading.text(10_000)
_text_of_file = reading.text(reading.MOST_BYTES)
_document = record(
    format=_long, version=reading.integer(), manifest=_text_of_file, digest=_long,
    records=lambda given: given, signature=lambda given: given,
)  # fmt: skip
_passage = record(
    Passage, stage=_short, relation=reading.among(RELATIONS), before=_hash, after=_hash,
    pairs=_hash, cotangents=_hash, frozen=several(reading.text(1000)), plan=_hash,
    assumptions=several(reading.text(200), 20),
)  # fmt: skip
_program = record(name=_short, graph=_hash, graphs=lambda given: given, pairs=_hash, program=_hash)
# Rules are named so that people can look them up; what they did is checked anyway.
_rule = record(
    name=reading.text(200), statement=reading.text(2000), count=reading.integer(1),
    status=reading.among(["proved", "tested", "assumption"]),
    **{"class": reading.among(["exact", "rounding"])},
)  # fmt: skip
# What the compiler says of itself: of the right form, and not more than that.
_own_claim = record(
    claim=_long, condition=_long, evidence=_long, scope=_long, is_established=reading.flag
)
_manifest = record(
    treadle=_short, device=_short, precision=_short, passages=several(_passage, 1000),
    programs=several(_program, 1000), rules=several(_rule, 10_000),
    claims=several(_own_claim, 10_000), traced=several(_hash, 1000),
)  # fmt: skip
_hex = reading.text(200)
_signature = record(algorithm=reading.among(["ed25519"]), key=_hex, value=_hex)


class _Checking:
    """One certificate."""

    def __init__(self, data: bytes, report: Report, effort: int):
        self.report, self.effort, self.budget = report, effort, Budget()
        document = reading.parsed(data)
        if type(document) is dict and document.get("version") != VERSION:
            raise Unreadable("its format or its version is not one that this checker knows")
        document = _document(document)
        need(document["format"] == FORMAT, document["format"], FORMAT)
        self.signature, self.texts = document["signature"], document["records"]
        self.text = document["manifest"].encode()
        if reading.digest(self.text) != document["digest"]:
            raise Rejected("the manifest is not what its digest says")
        need(type(self.texts) is dict, self.texts, "an object of records")
        for name, content in self.texts.items():
            if reading.digest(_text_of_file(content).encode()) != name:
                raise Rejected(f"the record {name[:12]} has another content than its name says")
        self.manifest = _manifest(reading.parsed(self.text))
        self.graphs: dict[str, Graph] = {}
        self.depth = 0  # of graphs whose bodies are being read
        self.used: set[str] = set()

    def check(self, public_key: bytes | None) -> None:
        made = [self.manifest[n] for n in ("treadle", "device", "precision")]
        self.report.made_by = f"treadle {made[0]} for {made[1]} in {made[2]}"
        self._check_signature(public_key)
        for rule in self.manifest["rules"]:
            self._check_rule(**rule)
        for passage in self.manifest["passages"]:
            self._check_passage(passage)
        for program in self.manifest["programs"]:
            self._check_program(**program)
        self.report.claims += check_chain(self.manifest, self.graph)
        if self.texts.keys() - self.used:
            raise Rejected(f"{len(self.texts.keys() - self.used)} records are used by nothing")

    def record(self, name: str) -> Any:
        """What was stored under a hash."""
        if name not in self.texts:
            raise Rejected(f"there is no record {name}")
        self.used.add(name)
        return reading.parsed(self.texts[name].encode())

    def graph(self, name: str) -> Graph:
        if name not in self.graphs:
            need(self.depth <= 8, self.depth, "a depth of graphs in graphs up to 8")
            self.depth += 1
            self.graphs[name] = read_graph(self.record(name), self.graph, name)
            self.depth -= 1
        return self.graphs[name]

    def claim(self, claim: str, scope: str, look: Callable[[], str], condition: str = "") -> None:
        """A claim, with what was looked at or why it is not established."""
        evidence = reason = ""
        try:
            evidence = look()
        except NotEstablished as found:
            reason = str(found) or "not known"
        except Rejected as wrong:
            if not condition:
                raise
            reason = str(wrong)  # numbers that are near are taken for equal
        self.report.claims.append(Claim(claim, scope, evidence, condition, reason))

    def _check_passage(self, passage: Passage) -> None:
        """A stage against what the checker itself derives of the graph before it."""
        before, after = self.graph(passage.before), self.graph(passage.after)
        condition = ", ".join(passage.assumptions)
        told = RELATIONS[passage.relation]
        pairs = self.pairs(passage.pairs, before, after)
        if passage.relation == "gradients":
            self._check_gradients(passage, before, after, pairs)
        elif passage.relation == "updates":
            plan = read_plan(self.record(passage.plan), self.graph)
            told = told.format(stage=passage.stage, told="; ".join(plan.told()))
            step = partial(composed, before, plan)
            looked = partial(_compared, lambda: check_composed(step(), after, budget=self.budget))
            self.claim(told, passage.stage, looked)
        else:
            is_part = passage.relation == "part"
            looked = partial(
                _compared,
                lambda: check_equal(before, after, pairs, budget=self.budget, is_part=is_part),
            )
            self.claim(told.format(stage=passage.stage), passage.stage, looked, condition)

    def _check_gradients(self, passage: Passage, before: Graph, after: Graph, pairs: Pairs) -> None:
        cotangents = self.pairs(passage.cotangents, before, after)
        told, conditions = RELATIONS["gradients"].format(stage=passage.stage), list[str]()

        def look() -> Outcome:
            derived = with_gradients(before, after, passage.frozen, pairs, cotangents)
            conditions.extend(derived.conditions)
            return check_derived(derived, after, budget=self.budget)

        assumed = ", ".join(passage.assumptions)
        self.claim(told, passage.stage, lambda: _compared(look), assumed)
        known = self.report.claims[-1]
        self.report.claims[-1] = replace(
            known, condition=", ".join([*assumed.split(), *conditions])
        )

    def pairs(self, name: str, before: Graph, after: Graph) -> Pairs:
        """Which values of two graphs may be equal, as a record proposes."""

        def value(graph: Graph, node: int, output: int) -> Value:
            inside = node < len(graph.nodes) and output < len(graph.nodes[node].types)
            need(inside, [node, output], "a value of a graph")
            return Value(node, output)

        def both(a: int, b: int, c: int, d: int) -> tuple[Value, Value]:
            return value(before, a, b), value(after, c, d)

        found: Pairs = several(reading.row(both, *[reading.integer()] * 4))(self.record(name))
        return found

    def _check_program(self, name: str, graph: str, graphs: Any, pairs: str, program: str) -> None:
        whole, missing = self.graph(graph), "it has no record of its kernels"
        if program:
            need(type(graphs) is dict and "" in graphs, graphs, "graphs, one of the whole program")
            scopes = {reading.text(1000)(s): self.graph(_hash(g)) for s, g in graphs.items()}
            told = "the graph that was scheduled equals the one before over the reals"
            given = self.pairs(pairs, whole, scopes[""])
            look = partial(check_equal, whole, scopes[""], given, budget=self.budget)
            self.claim(told, name, lambda: _compared(look))
            for scope in sorted(scopes.keys() - {""}):
                self.claim(
                    told, f"{name} {scope}", partial(_check_body, scope, scopes, self.budget)
                )
            found = read_program(self.record(program))
            self.report.claims += check_program(found, scopes, self.effort, self.budget)
            missing = "" if self.effort else "kernels were not compared with the graph: effort 0"
        if missing:
            claim = Claim("its kernels compute its graph", name, reason=missing)
            self.report.claims.append(claim)

    def _check_rule(self, name: str, statement: str, status: str, **_: Any) -> None:
        if status != "proved":
            reason = "" if status == "tested" else f"the compiler assumes it: {statement}"
            told = f"the rule {name} holds for all sizes"
            self.report.claims.append(Claim(told, "compiler", "tested", "", reason))

    def _check_signature(self, public_key: bytes | None) -> None:
        if self.signature is None:
            if public_key is not None:
                raise Rejected("it is not signed")
            return
        found = _signature(self.signature)
        try:
            key, value = bytes.fromhex(found["key"]), bytes.fromhex(found["value"])
        except ValueError as error:
            raise Unreadable("its signature is not hexadecimal") from error
        if public_key is not None and key != public_key:
            raise Rejected("it is signed with another key")
        known = f"by {key.hex()[:16]}…, a key that nobody vouches for"
        known = known if public_key is None else "by the key that was given"
        if _is_verified(self.text, key, value):
            self.report.signature = known
            return
        missing = "the package cryptography is not installed"
        if public_key is not None:
            raise Unreadable(f"its signature cannot be verified: {missing}")
        self.report.signature = f"not verified: {missing}"
        told = "the key that it names has signed it"
        self.report.claims.append(Claim(told, "signature", reason=missing))


def _check_body(scope: str, graphs: Mapping[str, Graph], budget: Budget) -> str:
    """That the graph of a scan's kernels is the scan's body."""
    node, body = Scopes(graphs, ()).body_of(scope)
    return _compared(lambda: check_equal(node.attributes["body"], body, (), budget=budget))


def _compared(look: Callable[[], Outcome]) -> str:
    found = look()
    told = f"{found.congruent} values by their form, {found.compared} over the field"
    return f"{told} in {found.distinct} ways, at 16 elements or all of each"


def _is_verified(data: bytes, key: bytes, value: bytes) -> bool:
    """Whether it could be looked at; Rejected if a signature is wrong."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(value, data)
    except (InvalidSignature, ValueError) as error:
        raise Rejected("its signature is wrong") from error
    return True
