"""Records of plain facts as JSON: what is read back equals what was written, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.records import from_json, to_json


class Kind(Enum):
    PLAIN = "plain"
    OTHER = "other"


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int
    kind: Kind = Kind.PLAIN


@dataclass(frozen=True)
class Branch:
    leaves: tuple[Leaf | Branch, ...]
    pairs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Whole:
    top: Branch | None
    dtype: DType
    count: int | None
    is_last: bool


LEAF = Leaf("a", 3, Kind.OTHER)
WHOLE = Whole(Branch((LEAF, Branch((), ((1, 0.5),)))), dtypes.bfloat16, 7, True)


@pytest.mark.parametrize("value", [LEAF, WHOLE, Whole(None, dtypes.int8, None, False)])
def test_what_was_written_is_read(value: object) -> None:
    assert from_json(type(value), to_json(value)) == value


def test_tuples_of_records() -> None:
    assert from_json(tuple[Leaf, ...], to_json((LEAF, LEAF))) == (LEAF, LEAF)
    assert from_json(tuple[str, int], to_json(("a", 1))) == ("a", 1)


WRONG = {
    "no record": "3",
    "too few fields": '["a", 3]',
    "another type": '["a", "3", "plain"]',
    "a bool for a number": '["a", true, "plain"]',
    "no member": '["a", 3, "red"]',
    "a mapping": "{}",
    "no JSON": "[",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_record_is_refused(name: str) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        from_json(Leaf, WRONG[name])
