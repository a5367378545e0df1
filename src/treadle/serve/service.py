"""What is served, without HTTP: forwards and a model, their queues, threads and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from treadle.base.errors import ArgumentError, TreadleError
from treadle.models.causal import CausalModel
from treadle.serve.batching import Batcher
from treadle.serve.budget import Budget
from treadle.serve.encoding import Arrays
from treadle.serve.limits import Limits
from treadle.serve.metrics import Gauge, Labels, Metrics
from treadle.serve.request_error import RequestError, of_error, overloaded, shown
from treadle.serve.served import Served
from treadle.serve.texts import Texts
from treadle.step.forward import Forward

LONGEST_NAME = 64
Say = Callable[[str], None]


class Service:
    """Forwards by name and a language model, or one of them.

    `prepare` compiles everything. `start` and `stop` belong to an event loop; one thread calls all
    forwards, which take turns on a device anyway, and another one generates.
    """

    def __init__(
        self,
        forwards: Mapping[str, Forward],
        model: CausalModel | None = None,
        limits: Limits | None = None,
    ):
        self.limits, self.metrics = limits or Limits(), Metrics()
        self.forwards = {_checked_name(n): Served(n, _checked(n, f)) for n, f in forwards.items()}
        if not self.forwards and model is None:
            raise ArgumentError("serve", "there is nothing to serve", "Give a forward or a model.")
        self._calling = ThreadPoolExecutor(1, "treadle-forwards")
        self._generating = ThreadPoolExecutor(1, "treadle-texts")
        self.texts = None if model is None else Texts(model, self.limits, self._generating)
        self._batchers: dict[str, Batcher[Arrays, Arrays]] = {}
        self.is_prepared = self.is_stopping = False
        self.in_progress = 0
        self.budget = Budget(self.limits.request_bytes)
        self._count()

    @property
    def is_ready(self) -> bool:
        return self.is_prepared and bool(self._batchers or self.texts) and not self.is_stopping

    def _count(self) -> None:
        metrics = self.metrics
        if self.texts is not None:
            self.texts.on_tokens = metrics.tokens.add
        metrics.gauges += [
            Gauge("treadle_ready", "Whether requests are answered.", lambda: {(): self.is_ready}),
            Gauge(
                "treadle_requests_in_progress",
                "Requests that are read or answered.",
                lambda: {(): self.in_progress},
            ),
            Gauge(
                "treadle_request_bytes",
                "Memory that is set aside for requests.",
                lambda: {(): self.budget.taken},
            ),
            Gauge("treadle_queue_length", "Requests that wait for a call.", self._waiting),
        ]

    def _waiting(self) -> dict[Labels, float]:
        found: dict[Labels, float] = {(("name", n),): len(b) for n, b in self._batchers.items()}
        if self.texts is not None:
            found[(("name", "generate"),)] = self.texts.waiting
        return found

    def described(self) -> dict[str, object]:
        found: dict[str, object] = {n: s.described() for n, s in self.forwards.items()}
        text = {} if self.texts is None else {"generate": self.texts.described()}
        return {"forwards": found, **text}

    def prepare(self, say: Say = lambda line: None) -> None:
        """Compile and run everything once, so that no request waits for a compiler."""
        for i, served in enumerate(self.forwards.values()):
            say(f"{served.name}: compiling, {i + 1} of {len(self.forwards)}")
            served.prepare(self.limits.batch)
            inputs = ", ".join(f"{n.name}: {n.type}" for n in served.inputs)
            alone = f" ({served.alone})" if served.alone else ""
            say(f"{served.name}: {inputs or 'no inputs'}; {served.batch} a call{alone}")
        if self.texts is not None:
            self.texts.prepare(say)
        self.is_prepared = True

    def start(self) -> None:
        """Begin to answer, in the running event loop; once, as `stop` ends the threads."""
        if self.is_stopping:
            raise ArgumentError("serve", "the service was stopped", "Make another Service.")
        for name, served in self.forwards.items():
            self._batchers[name] = batcher = self._batcher(name, served)
            batcher.start()

    def _batcher(self, name: str, served: Served) -> Batcher[Arrays, Arrays]:
        def counted(count: int) -> None:
            self.metrics.calls.add(forward=name)
            self.metrics.rows.add(count, forward=name)

        def call(rows: Sequence[Arrays]) -> Sequence[Arrays]:
            return served.run(rows)

        return Batcher(
            name,
            call,
            self._calling,
            size=served.batch,
            wait=0.0 if served.batch == 1 else self.limits.wait_ms / 1000,
            most=self.limits.queue,
            on_call=counted,
        )

    async def stop(self) -> None:
        """Calls that run end; nothing begins."""
        self.is_stopping = True
        for batcher in self._batchers.values():
            await batcher.stop()
        self._batchers.clear()
        await asyncio.to_thread(self._calling.shutdown)
        await asyncio.to_thread(self._generating.shutdown)

    def served(self, name: str) -> Served:
        if name not in self.forwards:
            known = ", ".join(self.forwards) or "none"
            cause = f"there is no forward {shown(name)}"
            raise RequestError(404, "forwards", cause, f"There are: {known}.", {"name": name[:100]})
        return self.forwards[name]

    async def call(self, served: Served, arrays: Arrays) -> Arrays:
        """A forward's results for one request that was checked."""
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                return await self._batchers[served.name].answer(arrays)
        except TimeoutError:
            cause = f"there was no answer in {self.limits.answer_seconds:g} s"
            values = {"seconds": self.limits.answer_seconds}
            raise overloaded(served.name, cause, values) from None
        except RequestError:
            raise
        except TreadleError as error:  # the device is lost, or its memory is full
            raise of_error(500, served.name, error) from error


def _checked_name(name: object) -> str:
    """A name that stands in a path as it is."""
    allowed = "letters, digits, - and _"
    plain = name.replace("-", "").replace("_", "") if isinstance(name, str) else ""
    if not (plain.isascii() and plain.isalnum()) or len(str(name)) > LONGEST_NAME:
        raise ArgumentError("serve", f"a forward is called {name!r}", f"A name is {allowed}.")
    return str(name)


def _checked(name: object, forward: object) -> Forward:
    if not isinstance(forward, Forward):
        raise ArgumentError(
            "serve",
            f"{name} is a {type(forward).__name__}, not a forward",
            "Give what td.compile_forward or step.attach returns.",
        )
    return forward
