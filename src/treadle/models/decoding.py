"""The programs of generation: a prompt at once, then token by token over caches of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from treadle.base.dtypes import DType, int32
from treadle.base.shapes import Shape
from treadle.compile_report import CompileOptions
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.reductions import argmax
from treadle.frontend.functions.shaping import expand, reshape, unsqueeze
from treadle.frontend.tensor import Tensor
from treadle.ir.types import TensorType
from treadle.models.context import Cached, Context, Whole
from treadle.models.model import Holder, float_named
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.decoding import KVCache
from treadle.nn.module import Module, State, update
from treadle.runtime.session import Session
from treadle.step.first_values import declare_model
from treadle.step.forward import Forward, compile_forward

BLOCK = 64  # slots of a cache are a multiple, so that few programs serve many lengths
NEAREST = 256  # slots that any program looks at; others are 2ᵏ: chosen, 8 % of a token at most
SHORTEST = 16  # tokens of the smallest program for prompts; others are 2ᵏ or 3 · 2ᵏ

Waiting = Callable[[], np.ndarray]  # a result that is waited for when it is asked for


@dataclass(frozen=True)
class KeyShape:
    """Heads of keys and values of a layer, and their width."""

    heads: int
    width: int

    def cache(self, batch: int, length: int, dtype: DType) -> Module:
        return KVCache(batch, self.heads, length, self.width, dtype)


@dataclass(frozen=True)
class RecurrentShape:
    """What a layer carries from position to position, for each row: shapes of arrays."""

    shapes: tuple[Shape, ...]

    def cache(self, batch: int, length: int, dtype: DType) -> Module:
        """In float32, whatever the precision: rounding at each position would add up."""
        return Carried(batch, self.shapes)


class Carried(Module):
    """What a layer carries, whatever the length."""

    def __init__(self, batch: int, shapes: Sequence[Shape]):
        self.values = [State((batch, *shape), init.zeros) for shape in shapes]


class Decoder(Protocol):
    """What is asked of a model that generates."""

    device: str
    precision: str

    @property
    def longest(self) -> int | None: ...

    def hidden(self, tokens: Tensor, context: Context) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def key_shapes(self) -> Sequence[KeyShape | RecurrentShape]: ...

    def _parts(self) -> list[tuple[str, Any]]: ...


class WithCaches(Module):
    """A model and caches for one batch and length. The model's names stay as they are."""

    def __init__(self, model: Decoder, batch: int, length: int, name: str = "cache"):
        shapes, dtype = model.key_shapes(), float_named(model.precision)
        self.model, self.name = model, name
        self.caches = ModuleList(s.cache(batch, length, dtype) for s in shapes)
        self.last = State((batch,), init.zeros, int32)  # the likeliest tokens of the last run

    def _parts(self) -> list[tuple[str, Any]]:
        own = (self.name, self.caches), (f"{self.name}.last", self.last)
        return [*self.model._parts(), *own]

    def logits(self, batch: dict[str, Tensor], reach: int) -> Tensor:
        """(B, V) behind the last of some new tokens (B, T), which look at `reach` slots.

        A token that is negative is the likeliest of the run before.
        """
        given = batch["tokens"]
        before = unsqueeze(self.last.tensor(), 1)
        tokens = where(given < 0, before, given) if given.shape[1] == 1 else given
        caches: Sequence[Any] = list(self.caches)
        context = Cached(caches, batch["at"], batch["first"], given.shape[1], reach)
        last = self.model.hidden(tokens, context)[:, -1]
        return self.model.logits(last)

    def likeliest(self, batch: dict[str, Tensor], reach: int) -> Tensor:
        """(B,): the likeliest tokens, which the next run may go on with."""
        found = cast(argmax(self.logits(batch, reach), -1), int32)
        update(self.last, found)
        return found

    def reorder(self, rows: Tensor) -> None:
        """Row i of each cache becomes what row rows[i] was."""
        for _, state in self.caches.named_states():
            update(state, take(state, rows, 0))


class Lent:
    """Programs and caches that one run at a time has."""

    is_lent = False

    def give_back(self) -> None:
        """The run is over. Without a lock: this may be called when a generator is collected."""
        self.is_lent = False


class LentCaches(Lent):
    """Programs with caches, whose names in the session are their own."""

    def __init__(self, session: Session, stem: str, make: Callable[[str], Module]):
        self.session = session
        with session.lock, session.unless_it_fails():
            taken = {name.partition(".")[0] for name in session.types}
            names = (stem if n == 1 else f"{stem}_{n}" for n in count(1))
            self.name = next(name for name in names if name not in taken)
            self.module: Any = make(self.name)
            declare_model(session, self.module, 0)

    def close(self) -> None:
        """Give the caches' memory back."""
        with self.session.lock:
            own = f"{self.name}."
            self.session.forget([n for n in self.session.types if n.startswith(own)])


class CachedPrograms(LentCaches):
    """Compiled prefill, decode and reorder over one set of caches, in a session with the model.

    There is a program for each number of tokens and slots that occurs, of which there are few.
    """

    has_likeliest = True

    def __init__(self, model: Decoder, batch: int, length: int, share: Holder):
        self.batch, self.length, self._model = batch, length, model
        super().__init__(
            share.session,
            f"cache_{batch}x{length}",
            lambda name: WithCaches(model, batch, length, name),
        )
        self._programs: dict[tuple[bool, int, int], Forward] = {}
        self._reorder: Forward | None = None
        self._first = np.zeros(batch, np.int32)
        self._before = np.full((batch, 1), -1, np.int32)
        self._at = 0
        self._share = share

    def _program(self, is_greedy: bool, tokens: int) -> Forward:
        """The program that takes so many tokens behind the slots that are written."""
        reach = reach_of(self._at + tokens, self.length)
        key = is_greedy, tokens, reach
        if key not in self._programs:
            self._programs[key] = self._compiled(*key)
        return self._programs[key]

    def _compiled(self, is_greedy: bool, tokens: int, reach: int) -> Forward:
        batch = {"tokens": TensorType((self.batch, tokens), int32), "at": TensorType((), int32)}
        batch["first"] = TensorType((self.batch,), int32)

        def run(module: WithCaches, given: dict[str, Tensor]) -> Tensor:
            found = module.likeliest if is_greedy else module.logits
            return found(given, reach)

        return compile_forward(
            self.module,
            run,
            batch,
            device=self._model.device,
            precision=self._model.precision,
            share=self._share,
            # Tokens of prompts were looked at, others are our own.
            options=CompileOptions(check_indices=False),
        )

    def fits(self, batch: int, slots: int) -> bool:
        return batch == self.batch and slots <= self.length

    def start(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Write the prompts; the logits (B, V) behind each."""
        return self._launched(False, self._written(prompts))()

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        """Write a token of each row; the logits behind them."""
        return self._launched(False, tokens.astype(np.int32)[:, None])()

    def start_likeliest(self, prompts: Sequence[np.ndarray]) -> Waiting:
        """Write the prompts; the likeliest token behind each."""
        return self._launched(True, self._written(prompts))

    def advance_likeliest(self) -> Waiting:
        """Write the likeliest tokens of the run before; those behind them."""
        return self._launched(True, self._before)

    def _written(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Prompts that end together, and where each begins."""
        width = bucket(max(len(p) for p in prompts))
        tokens = np.zeros((self.batch, width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[width - len(prompt) :] = prompt
        self._first = np.array([width - len(p) for p in prompts], np.int32)
        self._at = 0
        return tokens

    def _launched(self, is_greedy: bool, tokens: np.ndarray) -> Waiting:
        program = self._program(is_greedy, tokens.shape[1])
        batch = {"tokens": tokens, "at": np.array(self._at, np.int32), "first": self._first}
        self._at += tokens.shape[1]
        waiting = program.launch(batch)
        return lambda: np.asarray(waiting())

    def take(self, rows: np.ndarray) -> None:
        """Each row goes on from what another one was."""
        if np.array_equal(rows, np.arange(self.batch)):
            return
        if self._reorder is None:
            self._reorder = compile_forward(
                self.module,
                _reorder,
                {"rows": TensorType((self.batch,), int32)},
                device=self._model.device,
                share=self,
            )
        self._reorder({"rows": rows.astype(np.int32)})
        self._first = self._first[rows]


class WholePrograms(Lent):
    """The same answers without a cache: all tokens again for each one that is chosen."""

    has_likeliest = False

    def __init__(self, model: Decoder, batch: int, length: int, share: Holder):
        length = length if model.longest is None else min(length, model.longest)
        self.batch, self.length = batch, length
        self._tokens = np.zeros((batch, length), np.int32)
        self._ends = np.zeros(batch, np.int32)
        types = {"tokens": TensorType((batch, length), int32), "ends": TensorType((batch,), int32)}
        self._forward = compile_forward(
            model, _behind_ends, types, device=model.device, precision=model.precision, share=share
        )
        self.session = self._forward.session

    def fits(self, batch: int, slots: int) -> bool:
        return batch == self.batch and slots <= self.length

    def start(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        for row, prompt in zip(self._tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self._ends = np.array([len(p) for p in prompts], np.int32)
        return self._run()

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        self._tokens[np.arange(self.batch), self._ends] = tokens
        self._ends = self._ends + np.int32(1)
        return self._run()

    def take(self, rows: np.ndarray) -> None:
        self._tokens, self._ends = self._tokens[rows], self._ends[rows]

    def _run(self) -> np.ndarray:
        return np.asarray(self._forward({"tokens": self._tokens, "ends": self._ends}))

    def close(self) -> None:
        """There is nothing to give back."""


class Programs(Protocol):
    """What generation runs: a batch of prompts, then a token of each row at a time."""

    has_likeliest: bool  # whether they are `Likeliest` too

    @property
    def session(self) -> Any: ...

    def start(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Take the prompts; the logits (B, V) behind each."""
        ...

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        """Take a token of each row; the logits behind them."""
        ...

    def take(self, rows: np.ndarray) -> None:
        """Each row goes on from what another one was."""
        ...

    def give_back(self) -> None:
        """The run is over: another may have them."""
        ...


class Likeliest(Protocol):
    """Programs that choose the likeliest tokens themselves, and go on with them.

    A device computes while others wait: the next run may begin before a token is looked at.
    """

    @property
    def session(self) -> Any: ...

    def start_likeliest(self, prompts: Sequence[np.ndarray]) -> Waiting:
        """Take the prompts; the likeliest token (B,) behind each."""
        ...

    def advance_likeliest(self) -> Waiting:
        """Take the likeliest tokens of the run before; those behind them."""
        ...


def bucket(length: int) -> int:
    """The tokens of the program for prompts of a length: the next 2ᵏ, or 3 · 2ᵏ."""
    power = max(SHORTEST, 1 << (length - 1).bit_length())
    less = power // 4 * 3
    return less if length <= less and less > SHORTEST else power


def slots_for(prompt: int, new: int) -> int:
    """The length of caches for a prompt and what follows."""
    wanted = bucket(prompt) + new
    return -(-wanted // BLOCK) * BLOCK


def reach_of(written: int, length: int) -> int:
    """The slots that a program looks at, of which so many are written: the next 2ᵏ."""
    return min(length, max(NEAREST, 1 << (written - 1).bit_length()))


def _reorder(module: WithCaches, batch: dict[str, Tensor]) -> list[Tensor]:
    module.reorder(batch["rows"])
    return []


def _behind_ends(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"]
    hidden = model.hidden(tokens, Whole(tokens.shape[1]))
    return model.logits(at_ends(hidden, batch["ends"]))


def at_ends(hidden: Tensor, ends: Tensor) -> Tensor:
    """(B, T, width) → (B, width), before each row's end."""
    b, _, width = hidden.shape
    at = expand(reshape(ends - 1, (b, 1, 1)), b, 1, width)
    return take_along_axis(hidden, at, 1)[:, 0]
