"""The named differences of `differences.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from peer_operators import Outcome

FINE = ("agrees", "not representable", "error refused", "error not representable")
NUMBERS = "Python numbers stand for tensors."  # the reason of a row


@dataclass(frozen=True)
class Difference:
    kinds: tuple[str, ...]
    operators: tuple[str, ...]
    reason: str
    matching: str = ""

    def covers(self, operator: str, outcome: Outcome) -> bool:
        is_named = any(fnmatchcase(operator, pattern) for pattern in self.operators)
        is_kind = outcome.kind in self.kinds
        return is_named and is_kind and bool(re.search(self.matching, outcome.detail))


def _read() -> tuple[Difference, ...]:
    rows = tomllib.loads((Path(__file__).parent / "differences.toml").read_text(encoding="utf-8"))
    return tuple(
        Difference(tuple(r["kinds"]), tuple(r["operators"]), r["reason"], r.get("matching", ""))
        for r in rows["difference"]
    )


DIFFERENCES = _read()


def reasons(operator: str, outcome: Outcome) -> list[str]:
    """Why an outcome is as it is, of all rows that cover it."""
    return [d.reason for d in DIFFERENCES if d.covers(operator, outcome)]


def unlisted(operator: str, outcomes: Iterable[Outcome]) -> list[str]:
    """Outcomes that differ and are in no row, a line each."""
    return [
        f"{o.kind} {o.sample} {o.detail}"
        for o in outcomes
        if o.kind not in FINE and not reasons(operator, o)
    ]
