"""What a decoder's layers see: a whole sequence, or new positions and a cache of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions import linear
from treadle.frontend.functions.activations import softmax
from treadle.frontend.functions.arithmetic import logical_and, logical_or, maximum, where
from treadle.frontend.functions.shaping import iota, reshape, transpose, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.attention import spread_heads
from treadle.nn.dropout import Dropout
from treadle.nn.module import update


class Context(Protocol):
    """Positions of the tokens, and which keys each of them sees."""

    def positions(self) -> Tensor:
        """(B or 1, T), from 0."""
        ...

    def seen(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (B, G, S, D) of a layer, from those of the new positions."""
        ...

    def bias(self, window: int | None) -> Tensor | None:
        """What is added to scores, (B or 1, 1, T, S); None hides only what comes later."""
        ...

    def hiding(self, window: int | None) -> Tensor:
        """The same, written out in any case."""
        ...

    def distances(self) -> Tensor:
        """(T, S): how far each key is behind its query; negative for earlier ones."""
        ...

    def given(self) -> Tensor | None:
        """(B, T): which of the positions are no padding; None where all are."""
        ...

    def carried(self, layer: int) -> list[Tensor] | None:
        """What a layer that recurs has carried here; None at a beginning."""
        ...

    def carry(self, layer: int, values: Sequence[Tensor]) -> None:
        """Hold what a layer carries on to the next positions."""
        ...


@dataclass(frozen=True)
class Whole:
    """A sequence from its beginning; `mask` (B, T) is 0 for padding."""

    length: int
    mask: Tensor | None = None

    def positions(self) -> Tensor:
        return iota((1, self.length), 1)

    def seen(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def bias(self, window: int | None) -> Tensor | None:
        if self.mask is None and (window is None or window >= self.length):
            return None
        return self.hiding(window)

    def hiding(self, window: int | None) -> Tensor:
        """The bias, written out."""
        t, s = iota((self.length,) * 2, 0), iota((self.length,) * 2, 1)
        is_seen = _within(t, s, window)
        if self.mask is not None:
            is_given = unsqueeze(self.mask != 0, 1)  # (B, 1, S)
            is_seen = logical_or(logical_and(is_seen, is_given), t == s)
        return _hidden(is_seen, self.length)

    def distances(self) -> Tensor:
        return iota((self.length,) * 2, 1) - iota((self.length,) * 2, 0)

    def given(self) -> Tensor | None:
        return None if self.mask is None else self.mask != 0

    def carried(self, layer: int) -> list[Tensor] | None:
        return None

    def carry(self, layer: int, values: Sequence[Tensor]) -> None:
        """Nothing follows."""


@dataclass(frozen=True)
class Cached:
    """New positions behind those of a cache. Row b of the batch begins in slot `first[b]`.

    Every row writes its new keys to the slots from `at`: rows of unequal lengths end together.
    """

    caches: Sequence[Any]  # a KVCache of each layer, or what it carries
    at: Tensor  # int32, how many slots are written
    first: Tensor  # int32 (B,)
    length: int  # of the new positions
    reach: int | None = None  # slots that are looked at, those that are written; None for all

    @property
    def width(self) -> int:
        """Slots that are looked at."""
        found = self.caches[0].keys.shape[2]
        return found if self.reach is None else self.reach

    def _slots(self) -> Tensor:
        return iota((1, self.length), 1) + self.at

    def positions(self) -> Tensor:
        return maximum(self._slots() - unsqueeze(self.first, 1), 0)

    def seen(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, _ = self.caches[layer](k, v, self.at)
        return keys[:, :, : self.width], values[:, :, : self.width]

    def bias(self, window: int | None) -> Tensor | None:
        return self.hiding(window)

    def hiding(self, window: int | None) -> Tensor:
        slots = self.width
        t = reshape(self._slots(), (1, self.length, 1))
        s = iota((1, 1, slots), 2)
        is_own = s >= reshape(self.first, (-1, 1, 1))
        # Padding sees itself: a row of scores that are all hidden would not be a number.
        return _hidden(logical_or(logical_and(_within(t, s, window), is_own), t == s), slots)

    def distances(self) -> Tensor:
        return iota((1, self.width), 1) - reshape(self._slots(), (self.length, 1))

    def given(self) -> Tensor | None:
        return self._slots() >= unsqueeze(self.first, 1)

    def carried(self, layer: int) -> list[Tensor] | None:
        # What an earlier prompt left there is not of this one.
        held = [state.tensor() for _, state in self.caches[layer].named_states()]
        return [where(self.at == 0, as_tensor(0.0).astype(x.dtype), x) for x in held]

    def carry(self, layer: int, values: Sequence[Tensor]) -> None:
        states = self.caches[layer].named_states()
        for (_, state), value in zip(states, values, strict=True):
            update(state, cast(value, state.dtype))


def _within(t: Tensor, s: Tensor, window: int | None) -> Tensor:
    """Keys that are not later than the query, nor a window or more before it."""
    is_past = s <= t
    return is_past if window is None else logical_and(is_past, s > t - window)


def _hidden(is_seen: Tensor, slots: int) -> Tensor:
    bias = where(is_seen, as_tensor(0.0), as_tensor(-math.inf))
    return reshape(bias, (-1, 1, bias.shape[-2], slots))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    dropout: Dropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention (B, H, T, D) → (B, T, H · D); written out where its weights are dropped."""
    if dropout is None or not dropout.training or dropout.p == 0:
        mixed = linear.attention(q, k, v, bias, is_causal, scale)
    else:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        keys, values = spread_heads(k, q.shape[1]), spread_heads(v, q.shape[1])
        scores = linear.matmul(q, transpose(keys, -1, -2)) * factor
        if bias is not None:
            scores = scores + cast(bias, scores.dtype)
        if is_causal:
            t, s = scores.shape[-2:]
            scores = where(iota((t, s), 1) <= iota((t, s), 0), scores, -math.inf)
        mixed = linear.matmul(dropout(softmax(scores)), values)
    b, h, t, d = mixed.shape
    return reshape(transpose(mixed, 1, 2), (b, t, h * d))


def heads_of(x: Tensor, count: int) -> Tensor:
    """(B, T, H · D) → (B, H, T, D)."""
    b, t, width = x.shape
    return transpose(reshape(x, (b, t, count, width // count)), 1, 2)


def padding_bias(mask: Operand | None) -> Tensor | None:
    """A mask (B, S), 0 for padding, as what is added to scores: (B, 1, 1, S)."""
    if mask is None:
        return None
    given = as_tensor(mask)
    b, s = given.shape
    # Finite, as in the reference: a row that is all padding must still be a number.
    bias = where(given != 0, as_tensor(0.0), as_tensor(-1e30))
    return reshape(bias, (b, 1, 1, s))
