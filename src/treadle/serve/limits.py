"""What a service lets a client ask for, and how requests are gathered."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.numbers import NOT_NEGATIVE, POSITIVE, check_number, check_whole


@dataclass(frozen=True)
class Limits:
    """How large, how long and how many. What is more gets an error, and nothing is computed.

    `batch` requests at most are one call of a forward; the first of them waits `wait_ms` for
    others. The service reads at most `concurrency` bodies at a time, of `body_bytes` each. Bodies,
    what they are parsed to and answers take at most `request_bytes` together.
    """

    batch: int = 8
    wait_ms: float = 2.0
    body_bytes: int = 1 << 24
    request_bytes: int = 1 << 29  # of all requests that are read or answered
    header_seconds: float = 10.0  # from a connection's first byte to the end of its headers
    body_seconds: float = 10.0  # until all of a body is there
    answer_seconds: float = 60.0  # from then to the answer; a text ends then
    queue: int = 256  # requests that wait for one forward, or for the model
    concurrency: int = 512  # requests that are read or answered at a time
    connections: int = 1024
    drain_seconds: int = 30  # that requests have to end after SIGTERM
    context: int = 1024  # tokens of a prompt and what follows

    def __post_init__(self) -> None:
        for (
            name
        ) in "batch body_bytes request_bytes queue concurrency connections drain_seconds".split():
            check_whole("serve", name, getattr(self, name))
        check_whole("serve", "context", self.context, 2)
        check_number("serve", "wait_ms", self.wait_ms, NOT_NEGATIVE)
        for name in ("header_seconds", "body_seconds", "answer_seconds"):
            check_number("serve", name, getattr(self, name), POSITIVE)
