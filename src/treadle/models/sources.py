"""Programs of generation for a decoder that looks at a source: encode it once, then decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from treadle.base.dtypes import int32
from treadle.frontend.tensor import Tensor
from treadle.ir.types import TensorType
from treadle.models.context import Cached, Whole
from treadle.models.decoding import KeyShape, Lent, LentCaches, at_ends
from treadle.models.model import Holder
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.decoding import KVCache
from treadle.nn.module import Module, State, update
from treadle.step.forward import Forward, compile_forward


@dataclass(frozen=True)
class Source:
    """Keys and values (B, H, S, D) of each layer, and what hides padding: (B, 1, 1, S)."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None


class SourceDecoder(Protocol):
    """What is asked of a model with an encoder."""

    device: str
    precision: str
    pads_sources: bool  # whether sources are of unequal lengths, and padding is hidden

    @property
    def longest(self) -> int | None: ...

    def source_types(self, batch: int, width: int) -> dict[str, TensorType]:
        """What the encoder is given, for sources of a width."""
        ...

    def source_arrays(self, prompts: Sequence[np.ndarray], width: int) -> dict[str, np.ndarray]: ...

    def encode_source(self, batch: dict[str, Tensor]) -> Source:
        """What the decoder's layers look at; with a bias where sources are padded."""
        ...

    def hidden(self, tokens: Tensor, context: Any, source: Source) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def key_shapes(self) -> list[KeyShape]: ...

    def _parts(self) -> list[tuple[str, Any]]: ...


class _Kept(Module):
    """Keys and values of one layer's view of the source."""

    def __init__(self, batch: int, shape: KeyShape, length: int):
        size = (batch, shape.heads, length, shape.width)
        self.keys, self.values = State(size, init.zeros), State(size, init.zeros)


class WithSource(Module):
    """A model, caches of its decoder, and what it keeps of a source."""

    def __init__(self, model: SourceDecoder, batch: int, length: int, source: int, name: str):
        shapes = model.key_shapes()
        self.model, self.name = model, name
        self.caches = ModuleList(KVCache(batch, s.heads, length, s.width) for s in shapes)
        self.kept = ModuleList(_Kept(batch, s, source) for s in shapes)
        self.bias = State((batch, 1, 1, source), init.zeros) if model.pads_sources else None

    def _parts(self) -> list[tuple[str, Any]]:
        held: dict[str, Any] = {"decoder": self.caches, "source": self.kept, "bias": self.bias}
        return [*self.model._parts(), (self.name, held)]

    def encode(self, batch: dict[str, Tensor]) -> None:
        found = self.model.encode_source(batch)
        every: Any = self.kept
        for kept, (keys, values) in zip(every, found.pairs, strict=True):
            update(kept.keys, keys)
            update(kept.values, values)
        if self.bias is not None and found.bias is not None:
            update(self.bias, found.bias)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (B, V) behind a token of each row, (B, 1)."""
        every: Any = self.kept
        pairs = [(kept.keys.tensor(), kept.values.tensor()) for kept in every]
        caches: Sequence[Any] = list(self.caches)
        context = Cached(caches, batch["at"], batch["first"], batch["tokens"].shape[1])
        source = Source(pairs, None if self.bias is None else self.bias.tensor())
        return self.model.logits(self.model.hidden(batch["tokens"], context, source)[:, -1])

    def reorder(self, rows: Tensor) -> None:
        """Row i of each cache becomes what row rows[i] was; sources of a prompt's beams are one."""
        for _, state in self.caches.named_states():
            update(state, state.tensor()[rows])


class SourcePrograms(LentCaches):
    """Compiled encode, decode and reorder in a session with the model."""

    has_likeliest = False
    begin: Sequence[int] = ()  # the tokens that the decoder starts from

    def __init__(self, model: SourceDecoder, batch: int, slots: int, width: int, share: Holder):
        self.batch, self.length, self.width, self._model = batch, slots, width, model
        super().__init__(
            share.session,
            f"cache_{batch}x{slots}x{width}",
            lambda name: WithSource(model, batch, slots, width, name),
        )
        tokens = {"tokens": TensorType((batch, 1), int32), "at": TensorType((), int32)}
        tokens["first"] = TensorType((batch,), int32)
        self.decode = self._compiled(_advance, tokens, share)
        self.encode = self._compiled(_encode, model.source_types(batch, width), self.decode)
        self._reorder: Forward | None = None
        self._at = 0

    def _compiled(self, function: Any, inputs: Any, share: Any) -> Forward:
        return compile_forward(
            self.module,
            function,
            inputs,
            device=self._model.device,
            precision=self._model.precision,
            share=share,
        )

    def fits(self, batch: int, slots: int, width: int) -> bool:
        return batch == self.batch and slots <= self.length and width == self.width

    def start(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Encode the sources; the logits (B, V) behind the decoder's first tokens."""
        self.encode(self._model.source_arrays(prompts, self.width))
        self._at = 0
        return [self.advance(np.full(self.batch, token)) for token in self.begin][-1]

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        batch = {"tokens": tokens.astype(np.int32)[:, None], "at": np.array(self._at, np.int32)}
        batch["first"] = np.zeros(self.batch, np.int32)
        self._at += 1
        return np.asarray(self.decode(batch))

    def take(self, rows: np.ndarray) -> None:
        if np.array_equal(rows, np.arange(self.batch)):
            return
        if self._reorder is None:
            types = {"rows": TensorType((self.batch,), int32)}
            self._reorder = self._compiled(_reorder, types, self.decode)
        self._reorder({"rows": rows.astype(np.int32)})


class WholeSourcePrograms(Lent):
    """The same answers without a cache: everything again for each token that is chosen."""

    has_likeliest = False
    begin: Sequence[int] = ()

    def __init__(self, model: SourceDecoder, batch: int, slots: int, width: int, share: Holder):
        slots = slots if model.longest is None else min(slots, model.longest)
        self.batch, self.length, self.width = batch, slots, width
        types = {"rows": TensorType((batch, slots), int32), "ends": TensorType((batch,), int32)}
        types |= model.source_types(batch, width)
        self._forward = compile_forward(
            model, _whole, types, device=model.device, precision=model.precision, share=share
        )
        self.session = self._forward.session
        self._model, self._batch = model, dict[str, np.ndarray]()

    def fits(self, batch: int, slots: int, width: int) -> bool:
        return batch == self.batch and slots <= self.length and width == self.width

    def start(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        rows, ends = np.zeros((self.batch, self.length), np.int32), np.zeros(self.batch, np.int32)
        rows[:, : len(self.begin) - 1] = self.begin[:-1]
        self._batch = {"rows": rows, "ends": ends + np.int32(len(self.begin) - 1)}
        self._batch |= self._model.source_arrays(prompts, self.width)
        return self.advance(np.full(self.batch, self.begin[-1]))

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        ends = self._batch["ends"]
        self._batch["rows"][np.arange(self.batch), ends] = tokens
        ends += 1
        return np.asarray(self._forward(self._batch))

    def take(self, rows: np.ndarray) -> None:
        self._batch["rows"] = self._batch["rows"][rows]

    def close(self) -> None:
        """There is nothing to give back."""


def _advance(module: WithSource, batch: dict[str, Tensor]) -> Tensor:
    return module.forward(batch)


def _encode(module: WithSource, batch: dict[str, Tensor]) -> list[Tensor]:
    module.encode(batch)
    return []


def _reorder(module: WithSource, batch: dict[str, Tensor]) -> list[Tensor]:
    module.reorder(batch["rows"])
    return []


def _whole(model: SourceDecoder, batch: dict[str, Tensor]) -> Tensor:
    rows = batch["rows"]
    hidden = model.hidden(rows, Whole(rows.shape[1]), model.encode_source(batch))
    return model.logits(at_ends(hidden, batch["ends"]))
