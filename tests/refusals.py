"""Errors that must be clear: the class, the operation, the values, the remedy, the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from treadle.base.errors import TreadleError


def refused(
    call: Callable[[], Any], error: type[TreadleError], operation: str, *fragments: str
) -> None:
    """`call` raises exactly this error; the line it names is one of the call's own."""
    with pytest.raises(error) as caught:
        call()
    found, message = caught.value, str(caught.value)
    assert type(found) is error
    assert found.operation == operation, message
    assert found.cause
    assert found.remedy, message
    assert "  " not in message
    for fragment in fragments:
        assert fragment in message, message
    place = re.search(r" \[(\S+\.py):(\d+) in [^]]+\]$", message)
    assert place, message
    code = call.__code__
    assert place[1] == Path(code.co_filename).name
    assert int(place[2]) in _lines(code), message


def _lines(code: CodeType) -> set[int]:
    """The lines of a function and of those inside it."""
    own = {line for *_, line in code.co_lines() if line}
    return own.union(*(_lines(c) for c in code.co_consts if isinstance(c, CodeType)))
