"""Memory that all requests may take together: bodies, what they are parsed to, and answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.serve.encoding import JSON, Named
from treadle.serve.request_error import RequestError, overloaded

# Bytes of CPython's objects, measured and rounded up: a number with its place in a list; what a
# list and a dict with one entry take besides; a string without its characters.
VALUE, LIST, DICT, STRING = 48, 96, 320, 64
ELEMENT = 96  # of an array, as a number of Python's, in lists and as text
TOKENIZED = 256  # for each byte of a text that becomes tokens


class Budget:
    """Bytes that requests hold, `most` together. It belongs to one event loop."""

    def __init__(self, most: int):
        self.most, self.taken = most, 0


class Reserved:
    """What one request holds of a budget, until `release`."""

    def __init__(self, budget: Budget):
        self._budget, self._held = budget, 0

    def hold(self, operation: str, nbytes: int) -> None:
        """From now on the request takes so many bytes. One that does not fit is refused."""
        budget = self._budget
        values = {"bytes": nbytes, "most": budget.most}
        if nbytes > budget.most:
            cause = f"the request takes up to {nbytes} bytes of memory, of {budget.most}"
            remedy = "Send less at a time, or send and accept arrays as safetensors."
            raise RequestError(413, operation, cause, remedy, values)
        if budget.taken - self._held + nbytes > budget.most:
            cause = f"requests take {budget.taken} of {budget.most} bytes already"
            raise overloaded(operation, cause, values)
        budget.taken += nbytes - self._held
        self._held = nbytes

    def release(self) -> None:
        self._budget.taken -= self._held
        self._held = 0


def request_bytes(kind: str, body: bytes, inputs: Sequence[Named]) -> int:
    """A bound of the memory that a body takes while it becomes arrays."""
    arrays = array_bytes(inputs, is_json=kind == JSON)
    return 2 * len(body) + arrays + (json_bytes(body) if kind == JSON else 0)


def array_bytes(named: Sequence[Named], is_json: bool) -> int:
    """A bound of the memory that arrays take while they are read or written."""
    elements = sum(math.prod(n.type.shape) for n in named)
    return 3 * sum(n.type.nbytes for n in named) + (ELEMENT * elements if is_json else 0)


def json_bytes(body: bytes) -> int:
    """A bound of the memory that parsed JSON takes, whatever the JSON is: its signs are counted."""
    commas, lists, dicts, colons, quotes = map(body.count, (b",", b"[", b"{", b":", b'"'))
    text = len(body) if body.isascii() else 4 * len(body)
    strings = len(body) if body.isascii() and b"\\u" not in body else 4 * len(body)
    values = 1 + commas + lists + dicts + colons
    return text + 2 * strings + VALUE * values + LIST * lists + DICT * dicts + STRING * quotes
