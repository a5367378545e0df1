"""An NCCL that copies: the ranks of a job are in one process, each with the same fake driver.

Exchanges are work of the stream that is captured, as on a device; nothing moves until all ranks of
a group have given theirs. Calls are written down.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from fake_cuda import FakeDriver
from treadle.runtime.cuda import nccl


class FakeNccl:
    """One rank's library: what it is asked for becomes work of a stream when a group ends."""

    def __init__(self, driver: FakeDriver, version: int = 22703):
        self.driver, self.version = driver, version
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, int] = {}
        self.depth, self.size, self.rank = 0, 1, 0

    def _code(self, name: str) -> int:
        return self.failing.get(name, 0)

    def ncclGetVersion(self, found: Any) -> int:
        found._obj.value = self.version
        return self._code("ncclGetVersion")

    def ncclGetUniqueId(self, found: Any) -> int:
        for i in range(128):
            found._obj.words[i] = i + 1
        return self._code("ncclGetUniqueId")

    def ncclGetErrorString(self, code: int) -> bytes:
        return b"unhandled system error"

    def ncclCommInitRank(self, handle: Any, size: int, identity: Any, rank: int) -> int:
        assert list(identity.words) == [i + 1 for i in range(128)], "what the first rank made"
        handle._obj.value, self.size, self.rank = 77, size, rank
        self.calls.append(("init", rank, size))
        return self._code("ncclCommInitRank")

    def ncclCommDestroy(self, handle: Any) -> int:
        self.calls.append(("destroy",))
        return 0

    def ncclGroupStart(self) -> int:
        self.depth += 1
        self.calls.append(("group",))
        return 0

    def ncclGroupEnd(self) -> int:
        self.depth -= 1
        self.calls.append(("end",))
        return self._code("ncclGroupEnd")

    def _note(self, name: str, rank: int, given: int, taken: int, nbytes: int, stream: int) -> int:
        assert self.depth == 1, "exchanges are one group"
        assert stream in self.driver.captures, "exchanges are captured"
        self.calls.append((name, rank, given, taken, nbytes))
        return self._code(name)

    def ncclSend(
        self, given: int, count: int, kind: int, rank: int, handle: Any, stream: int
    ) -> int:
        assert (kind, handle.value) == (1, 77)
        self._sent = given
        return self._note("send", rank, given, 0, count, stream)

    def ncclRecv(
        self, taken: int, count: int, kind: int, rank: int, handle: Any, stream: int
    ) -> int:
        if rank == self.rank:
            self._move(taken, self._sent, count, stream)
        return self._note("receive", rank, 0, taken, count, stream)

    def ncclAllGather(
        self, given: int, taken: int, count: int, kind: int, handle: Any, stream: int
    ) -> int:
        self._move(taken + self.rank * count, given, count, stream)
        return self._note("gather", -1, given, taken, count, stream)

    def _move(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.driver._do(lambda: ctypes.memmove(target, source, nbytes) and None, stream)


@contextlib.contextmanager
def fake_nccl(driver: FakeDriver, version: int = 22703) -> Iterator[FakeNccl]:
    """The library is a fake one, for steps on the driver's device."""
    fake = FakeNccl(driver, version)
    from treadle.step.parallel import transport

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "library", lambda: fake)
        patch.setattr(transport, "_communicators", {})
        nccl.version.cache_clear()
        try:
            yield fake
        finally:
            nccl.version.cache_clear()
