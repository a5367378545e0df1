"""Requests that wait for a forward, and calls that answer several of them at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from treadle.serve.request_error import overloaded

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Waiting(Generic[Given, Found]):
    given: Given
    answer: asyncio.Future[Found]


class Batcher(Generic[Given, Found]):
    """Gathers requests in their order: a call begins when there are `size`, or after `wait`.

    While a call runs, others gather. Everything but `call` happens in the thread of the event loop.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Sequence[Given]], Sequence[Found]],
        executor: Executor,
        *,
        size: int,
        wait: float,
        most: int,
        on_call: Callable[[int], None] = lambda count: None,
    ):
        self.name, self.size, self.wait, self.most = name, size, wait, most
        self._call, self._executor, self._on_call = call, executor, on_call
        self._waiting: deque[Waiting[Given, Found]] = deque()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Requests that are there still are cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        while self._waiting:
            self._waiting.popleft().answer.cancel()

    async def answer(self, given: Given) -> Found:
        """What a call gives for one request. One that is no longer awaited is left out."""
        if len(self._waiting) >= self.most:
            values = {"waiting": len(self._waiting), "most": self.most}
            raise overloaded(self.name, f"{len(self._waiting)} requests wait already", values)
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(given, future))
        self._some.set()
        if len(self._waiting) >= self.size:
            self._enough.set()
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            taken = await self._gathered()
            if not taken:
                continue
            self._on_call(len(taken))
            rows = [w.given for w in taken]
            try:
                found = await loop.run_in_executor(self._executor, self._call, rows)
            except asyncio.CancelledError:
                for waiting in taken:
                    waiting.answer.cancel()
                raise
            except Exception as error:
                for waiting in taken:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
                continue
            for waiting, answer in zip(taken, found, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)

    async def _gathered(self) -> list[Waiting[Given, Found]]:
        """The requests of the next call, without those that nobody waits for any more."""
        await self._some.wait()
        if len(self._waiting) < self.size and self.wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.wait):
                    await self._enough.wait()
        taken = [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < self.size:
            self._enough.clear()
        return [w for w in taken if not w.answer.done()]
