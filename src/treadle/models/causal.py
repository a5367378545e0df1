"""`CausalModel`: a decoder that gives logits and generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treadle.base.errors import ShapeError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.context import Context
from treadle.models.decoding import (
    CachedPrograms,
    KeyShape,
    Programs,
    RecurrentShape,
    WholePrograms,
)
from treadle.models.generation import Settings, generate, stream
from treadle.models.model import Model
from treadle.models.prefix import Prefix, Prefixed
from treadle.models.tokenizer import Tokenizer


def check_tokens(name: str, tokens: Operand, longest: int | None) -> Tensor:
    given = as_tensor(tokens)
    if given.ndim != 2 or not given.dtype.is_integer:
        raise ShapeError(name, f"tokens are {given.type}", "They are integers (B, T).")
    if longest is not None and given.shape[1] > longest:
        cause = f"{given.shape[1]} tokens, and {longest} positions"
        raise ShapeError(name, cause, "Pass fewer.")
    return given


class CausalModel(Model):
    """Tokens (B, T) → logits (B, T, V), with what generation needs of it."""

    tokenizer: Tokenizer | None = None
    ends: tuple[int, ...] | None = None  # tokens that end a text; None for the configuration's
    takes_prefix = False  # whether its layers see keys that come before all tokens
    prefix_keys: Prefix | None = None

    @property
    def longest(self) -> int | None:
        """The most positions there are; None where there is no end."""
        return None

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """(B, T) → (B, T, width), of new positions in their context."""
        raise NotImplementedError(f"{type(self).__name__} has no hidden")

    def prefixed(self, context: Context) -> Context:
        """The context behind the model's prefix, if it has one."""
        return context if self.prefix_keys is None else Prefixed(context, self.prefix_keys)

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no logits")

    def key_shapes(self) -> Sequence[KeyShape | RecurrentShape]:
        """What each layer's cache holds: keys of positions, or what it carries."""
        raise NotImplementedError(f"{type(self).__name__} has no key_shapes")

    def begin(self, prompts: list[np.ndarray]) -> list[np.ndarray]:
        """What is continued: the prompts themselves."""
        return prompts

    def programs(
        self, prompts: list[np.ndarray], slots: int, settings: Settings, share: Any
    ) -> Programs:
        """Compiled programs for a batch and a length: those of the last time, if they fit."""
        batch = len(prompts)

        kind = CachedPrograms if settings.use_cache else WholePrograms

        def fits(before: Programs) -> bool:
            return isinstance(before, kind) and before.fits(batch, slots)

        def opened(holder: Any) -> Programs:
            return kind(self, batch, slots, holder)

        found: Programs = self.kept(fits, opened, share)
        return found

    def generate(self, prompt: Any, max_new_tokens: int = 20, **settings: Any) -> Any:
        """Continue a prompt, or several: tokens or strings, and the same comes back with more.

        One sequence of tokens gives an array; a batch of them, of any lengths, a list of arrays;
        strings need a tokenizer. The settings are those of `models.Settings`; `share` is a step or
        forward whose values are used.
        """
        return generate(self, prompt, max_new_tokens, **settings)

    def stream(self, prompt: Any, max_new_tokens: int = 20, **settings: Any) -> Iterator[Any]:
        """The tokens that follow one prompt, each when it is chosen; for text pieces of text."""
        return stream(self, prompt, max_new_tokens, **settings)
