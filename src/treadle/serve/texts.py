"""A language model as requests see it: prompts in, pieces of text or tokens out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from treadle.base.errors import TreadleError
from treadle.base.memory import shown as shown_bytes
from treadle.models.causal import CausalModel
from treadle.models.decoding import bucket, slots_for
from treadle.models.generation import (
    Prompts,
    Run,
    read_prompts,
    settings_from,
    stream,
    text_pieces,
)
from treadle.serve.limits import Limits
from treadle.serve.request_error import RequestError, of_error, overloaded, shown

NAME = "generate"
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop_strings")
FIELDS = ("prompt", "max_new_tokens", "stream", *SETTINGS)
DEFAULT_NEW = 20
# Temperatures and penalties have bounds because beyond them float32 has nothing in between.
RANGES = {
    "temperature": (0.01, 100.0),
    "repetition_penalty": (0.01, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}
MOST_STOPS = 16
Piece = str | int


@dataclass
class Asked:
    """What a request asks for, once it is checked, and how far it is."""

    run: Run
    is_text: bool
    streams: bool
    deadline: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)
    is_late: bool = False

    @property
    def new(self) -> int:
        """Tokens so far."""
        return len(self.run.rows[0]) - self.run.starts[0]

    @property
    def ended(self) -> str:
        """Why it did: a token or string that ends texts, as many tokens as were asked for, time."""
        if self.run.has_ended[0]:
            return "stop"
        return "time" if self.is_late else "length"


class Texts:
    """One model and the requests that wait for it. One text at a time is generated."""

    def __init__(self, model: CausalModel, limits: Limits, executor: Executor):
        self.model, self.limits, self._executor = model, limits, executor
        longest = model.longest
        self.context = limits.context if longest is None else min(limits.context, longest)
        self.waiting = 0
        self.on_tokens: Callable[[int], None] = lambda count: None

    def described(self) -> dict[str, object]:
        return {
            "model": self.model.architecture or type(self.model).__name__,
            "context": self.context,
            "takes_text": self.model.tokenizer is not None,
            "fields": list(FIELDS),
        }

    def lengths(self) -> list[int]:
        """Prompts for which the programs differ, the one that needs the largest caches first."""
        every = range(1, self.context)
        largest = max(every, key=lambda n: slots_for(n, self.context - n), default=1)
        each = {bucket(n): n for n in every}
        each.pop(bucket(largest), None)
        return [largest, *each.values()]

    def prepare(self, say: Callable[[str], None]) -> None:
        """Compile what any prompt within the context needs, likeliest tokens and drawn ones."""
        if self.model.tokenizer is not None:
            self.model.tokenizer.encode("")  # opens it: what is wrong with it is said now
        lengths = self.lengths()
        for i, length in enumerate(lengths):
            say(f"{NAME}: prompts of {bucket(length)} tokens, {i + 1} of {len(lengths)}")
            # The first asks for all there is, so that its caches fit every other prompt.
            new = self.context - length if i == 0 else min(2, self.context - length)
            for temperature in (0.0, 1.0):
                settings = {"temperature": temperature, "eos_token_id": ()}
                pieces = stream(self.model, [0] * length, new, **settings)
                for _ in islice(pieces, 2):  # of the prompt, and of a token behind it
                    pass
                del pieces  # its caches come back
        say(f"{NAME}: the model and its caches of keys and values take {shown_bytes(self.nbytes)}")

    @property
    def nbytes(self) -> int:
        """Bytes of the model's values and of the caches: texts have them one after the other."""
        return int(self.model._held(None).session.nbytes)

    def ask(self, given: Mapping[str, Any]) -> Asked:
        """A request's fields, or an error that names what is wrong."""
        unknown = [name for name in given if name not in FIELDS]
        if unknown or "prompt" not in given:
            cause = f"there is no field {shown(unknown[0])}" if unknown else "there is no prompt"
            raise RequestError(422, NAME, cause, f"There are: {', '.join(FIELDS)}.")
        new = given.get("max_new_tokens", min(DEFAULT_NEW, self.context - 1))
        if type(new) is not int or not 1 <= new < self.context:
            raise _wrong("max_new_tokens", new, f"a whole number from 1 to {self.context - 1}")
        streams = given.get("stream", False)
        if type(streams) is not bool:
            raise _wrong("stream", streams, "true or false")
        settings, prompts = _settings(given), self._prompts(given["prompt"])
        length = len(prompts.rows[0])
        if length + new > self.context:
            cause = f"the prompt has {length} tokens and {new} may follow, of {self.context}"
            values = {"prompt": length, "max_new_tokens": new, "context": self.context}
            raise RequestError(422, NAME, cause, "Ask for fewer, or shorten the prompt.", values)
        try:
            run = Run.of(self.model, prompts.rows, new, settings_from(settings), None)
        except TreadleError as error:
            raise of_error(422, NAME, error) from error
        return Asked(run, prompts.is_text, streams)

    def _prompts(self, prompt: object) -> Prompts:
        is_tokens = type(prompt) is list and all(type(t) is int for t in prompt)
        if not is_tokens and type(prompt) is not str:
            raise _wrong("prompt", prompt, "text, or a list of tokens")
        if type(prompt) is list and any(not 0 <= t < 1 << 31 for t in prompt):
            raise _wrong("prompt", prompt, "text, or a list of tokens")
        try:
            return read_prompts(self.model, prompt)
        except TreadleError as error:
            raise of_error(422, NAME, error) from error
        except UnicodeEncodeError as error:  # half of a pair of surrogates, which JSON can write
            raise _wrong("prompt", prompt, "text that UTF-8 can hold") from error

    def check_queue(self) -> None:
        if self.waiting >= self.limits.queue:
            values = {"waiting": self.waiting, "most": self.limits.queue}
            raise overloaded(NAME, f"{self.waiting} requests wait already", values)

    async def pieces(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """What follows the prompt, as it is chosen. Nothing is computed after the time is over."""
        self.check_queue()  # a stream begins after its headers: others have come meanwhile
        asked.deadline = time.monotonic() + self.limits.answer_seconds
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[Piece | None] = asyncio.Queue()  # of at most max_new_tokens

        def told(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(found.put_nowait, piece)

        self.waiting += 1
        running = loop.run_in_executor(self._executor, self._generate, asked, told)
        try:
            while (piece := await found.get()) is not None:
                yield piece
            await running  # raises what the thread did
        finally:
            asked.stopped.set()
            self.waiting -= 1
            self.on_tokens(asked.new)

    def _generate(self, asked: Asked, told: Callable[[Piece | None], None]) -> None:
        """In the model's thread, until the text ends, the time is over or nobody listens."""
        pieces: Iterator[Piece]
        if asked.is_text:
            pieces = text_pieces(self.model.tokenizer, asked.run)
        else:
            pieces = (token for _, token in asked.run.tokens())
        try:
            while not asked.stopped.is_set():
                asked.is_late = time.monotonic() >= asked.deadline
                piece = None if asked.is_late else next(pieces, None)
                if piece is None:
                    return
                told(piece)
        finally:
            del pieces  # caches come back before the next text begins
            told(None)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """How tokens are chosen; what is left out, and null, is the model's default."""
    settings = {name: given[name] for name in SETTINGS if given.get(name) is not None}
    for name, (low, high) in RANGES.items():
        value = settings.get(name, high)
        is_number = type(value) in (int, float)
        is_greedy = name == "temperature" and is_number and value == 0
        if not is_greedy and not (is_number and low <= value <= high):
            raise _wrong(name, value, f"a number from {low:g} to {high:g}")
    for name in ("top_k", "seed"):
        value = settings.get(name, 1)
        if type(value) is not int or abs(value) >= 1 << 64:
            raise _wrong(name, value, "a whole number")
    stops = settings.get("stop_strings", [])
    is_list = type(stops) is list and len(stops) <= MOST_STOPS
    if not is_list or not all(type(text) is str for text in stops):
        raise _wrong("stop_strings", stops, f"a list of at most {MOST_STOPS} strings")
    return settings


def _wrong(name: str, value: object, wanted: str) -> RequestError:
    values = {"name": name, "value": shown(value)}
    return RequestError(422, NAME, f"{name} is {shown(value)}", f"It is {wanted}.", values)
