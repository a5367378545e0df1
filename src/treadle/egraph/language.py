"""The file of rules: s-expressions, read into values by one small parser.

A rule says that each pattern of `from` equals the expression of `to` at the same place:

    (rule NAME "statement" (class exact|rounding) (set canonical|optimize)
      (from PATTERN …) (to PATTERN …) (let (NAME EXPRESSION) …) (when CONDITION …)
      (if CONDITION …) (case (NAME VALUE) …) …)

With `(from-each PATTERN)` in place of `from`, the rule is about all nodes of a graph that match the
pattern in the same way but for one tensor `a`: in `to`, which is about each of them, `a...` are the
tensors of all and `a.before` those of the ones before it.

`when` is what the equation needs to be true. `if` only says where it is worth a try, so that a
checker need not look at it. A `case` is an instance with symbolic sizes, for proofs: shapes of
tensors, lists of axes or labels, names of dtypes.

A pattern is a name (any tensor; twice the same name is one tensor), a number (a constant that is
that number everywhere), `(number NAME)` (a constant of any one number), `NAME...` (the remaining
operands) or `(op :field VALUE … PATTERN …)`. In `from` a field's value is a name or a literal; in
`to` it is an expression over names. Fields that a pattern leaves out may be anything; in cases they
go by their own names. Operands of commutative ops match in either order. A contraction has the
fields `:x :y :out`, lists of labels, and `:dtype`; labels are bound names, so that patterns match
up to renaming. Expressions are those of `expressions.py`. A rule applies only where its `to` is
well typed and has the type of `from`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from treadle.base.errors import ArgumentError

# Symbols are str, numbers int or Fraction, lists tuples; quoted text is a Text.
Term = object
RULES_FILE = Path(__file__).with_name("rules.txt")
PARTS = frozenset("class set from from-each to let when if case".split())
CLASSES = ("exact", "rounding")
SETS = ("canonical", "optimize")
COMMUTATIVE = frozenset(["add", "mul", "max", "min", "and", "or", "xor", "eq"])

_TOKEN = re.compile(r'[()]|"[^"]*"|;[^\n]*|[^\s()";]+|"')
_NUMBER = re.compile(r"-?\d+(/[1-9]\d*)?$")


class Text(str):
    """Quoted text."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DataRule:
    """A rule as the file has it."""

    name: str
    statement: str
    is_exact: bool  # both sides have the same bits; otherwise they are equal over the reals
    set: str
    sources: tuple[Term, ...]  # one, of a rule about each of several nodes
    targets: tuple[Term, ...]
    lets: tuple[tuple[str, Term], ...] = ()
    when: tuple[Term, ...] = ()
    worth: tuple[Term, ...] = ()
    cases: tuple[Mapping[str, Term], ...] = ()
    member: str = ""  # of a rule about each of several nodes: the tensor in which they differ


@dataclass(frozen=True, slots=True)
class Applied:
    """A pattern `(op :field VALUE … PATTERN …)`, taken apart."""

    op: str
    fields: tuple[tuple[str, Term], ...]
    operands: tuple[Term, ...]


def parse(text: str) -> tuple[Term, ...]:
    """The expressions in a text."""
    stack: list[list[Term]] = [[]]
    for found in _TOKEN.finditer(text):
        token = found.group()
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise _wrong(text, found.start(), "a bracket that was not opened")
            closed = tuple(stack.pop())
            stack[-1].append(closed)
        elif token[0] == '"':
            if token == '"':
                raise _wrong(text, found.start(), "quotes that do not end")
            stack[-1].append(Text(" ".join(token[1:-1].split())))
        elif token[0] != ";":
            stack[-1].append(_atom(token))
    if len(stack) > 1:
        raise _wrong(text, len(text), f"{len(stack) - 1} brackets that are not closed")
    return tuple(stack[0])


def _atom(word: str) -> Term:
    if not (word[0].isdigit() or word[0] == "-") or not _NUMBER.match(word):
        return word
    return Fraction(word) if "/" in word else int(word)


def _wrong(text: str, position: int, cause: str) -> ArgumentError:
    line = text.count("\n", 0, position) + 1
    return ArgumentError("rules", f"line {line} has {cause}", "See treadle/egraph/rules.txt.")


def rules_of(text: str) -> tuple[DataRule, ...]:
    """The rules in a text, in order."""
    rules = tuple(map(_rule, parse(text)))
    names = [r.name for r in rules]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ArgumentError("rules", f"{', '.join(twice)} is there twice", "Give each its name.")
    return rules


@cache
def own_rules() -> tuple[DataRule, ...]:
    """Treadle's own rules."""
    return rules_of(RULES_FILE.read_text(encoding="utf-8"))


def _rule(term: Term) -> DataRule:
    match term:
        case ("rule", str(name), Text() as statement, *parts):
            pass
        case _:
            raise ArgumentError(
                "rules", f"{term!r} is no rule", 'Begin: (rule NAME "statement" …).'
            )
    found: dict[str, list[tuple[Term, ...]]] = {}
    for part in parts:
        if not isinstance(part, tuple) or not part or not isinstance(part[0], str):
            raise ArgumentError("rules", f"{name}: {part!r} is no part of a rule", "See the file.")
        found.setdefault(part[0], []).append(part[1:])
    if set(found) - PARTS or not {"class", "to"} <= set(found):
        raise ArgumentError("rules", f"{name} has {sorted(found)}", "It needs class, from and to.")
    each = _joined(found, "from-each")
    sources, targets = each or _joined(found, "from"), _joined(found, "to")
    class_, set_ = _one_of(name, found, "class", CLASSES), _one_of(name, found, "set", SETS)
    if len(sources) != len(targets) or not sources:
        raise ArgumentError("rules", f"{name} has {len(sources)} from, {len(targets)} to", "Pair.")
    lets = tuple((str(n), value) for n, value in _pairs(name, _joined(found, "let")))
    cases = tuple({str(n): v for n, v in _pairs(name, c)} for c in found.get("case", ()))
    when, worth = _joined(found, "when"), _joined(found, "if")
    member = next((t[:-3] for t in _symbols(targets) if t.endswith("...")), "") if each else ""
    return DataRule(
        name,
        str(statement),
        class_ == "exact",
        set_,
        sources,
        targets,
        lets,
        when,
        worth,
        cases,
        member,
    )


def _symbols(term: Term) -> Iterator[str]:
    if isinstance(term, tuple):
        for part in term:
            yield from _symbols(part)
    elif isinstance(term, str):
        yield term


def _joined(found: dict[str, list[tuple[Term, ...]]], key: str) -> tuple[Term, ...]:
    return tuple(term for part in found.get(key, ()) for term in part)


def _one_of(
    name: str, found: dict[str, list[tuple[Term, ...]]], key: str, known: tuple[str, ...]
) -> str:
    given = _joined(found, key) or known[-1:]
    if len(given) != 1 or given[0] not in known:
        raise ArgumentError("rules", f"{name}: {key} {given}", f"Use one of {', '.join(known)}.")
    return str(given[0])


def _pairs(name: str, terms: tuple[Term, ...]) -> Iterator[tuple[Term, Term]]:
    for term in terms:
        if not isinstance(term, tuple) or len(term) != 2:
            raise ArgumentError("rules", f"{name}: {term!r}", "Write (NAME VALUE).")
        yield term[0], term[1]


def applied(term: Term) -> Applied | None:
    """A pattern's op, fields and operands, if it is one over an op."""
    if not isinstance(term, tuple) or term[0] == "number":
        return None
    fields: list[tuple[str, Term]] = []
    operands: list[Term] = []
    rest = list(term[1:])
    while rest:
        first = rest.pop(0)
        if isinstance(first, str) and first.startswith(":"):
            fields.append((first[1:], rest.pop(0)))
        else:
            operands.append(first)
    return Applied(str(term[0]), tuple(fields), tuple(operands))


def to_text(term: Term) -> str:
    """An expression as the file has it."""
    if isinstance(term, tuple):
        return f"({' '.join(map(to_text, term))})"
    return f'"{term}"' if isinstance(term, Text) else str(term)
