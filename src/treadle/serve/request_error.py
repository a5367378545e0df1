"""Errors as a client gets them: a status, and JSON with operation, values, cause and remedy."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping

from treadle.base.errors import TreadleError
from treadle.base.origin import Origin

_REPEATED = reprlib.Repr()  # a few elements, and few levels
MOST_SHOWN = 80  # characters of what a client sent that an error repeats
_LINE = re.compile(r" at [^\s:]+:\d+ in \S+")  # as an Origin is shown
_NOWHERE = Origin("request", 0, "")  # no line of the service's own code is at fault


class RequestError(TreadleError):
    """A request that is not answered. `status` is HTTP's; `values` are those that were wrong."""

    def __init__(
        self,
        status: int,
        operation: str,
        cause: str,
        remedy: str,
        values: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(operation, cause, remedy, origin=_NOWHERE)
        self.status, self.values, self.headers = status, dict(values or {}), dict(headers or {})

    def body(self) -> bytes:
        parts = {
            "operation": self.operation,
            "values": self.values,
            "cause": self.cause,
            "remedy": self.remedy,
        }
        return json.dumps({"error": parts}).encode()


def of_error(status: int, operation: str, error: TreadleError) -> RequestError:
    """What a part of Treadle says of a request, without the lines of code it was raised in."""
    return RequestError(status, operation, _LINE.sub("", error.cause), error.remedy)


def overloaded(operation: str, cause: str, values: Mapping[str, object]) -> RequestError:
    """A request that may be sent again as it is."""
    return RequestError(503, operation, cause, "Send it again later.", values, {"retry-after": "1"})


def shown(value: object) -> str:
    """A value of a request, as an error repeats it: little of it, however large or deep it is."""
    return _REPEATED.repr(value)[:MOST_SHOWN]
