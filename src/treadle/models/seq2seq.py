"""`SourceModel`: an encoder and a decoder that answers a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treadle.models.config import Json
from treadle.models.decoding import Programs
from treadle.models.generation import Settings, generate, stream
from treadle.models.model import Model
from treadle.models.sources import SourcePrograms, WholeSourcePrograms
from treadle.models.tokenizer import Tokenizer


class SourceModel(Model):
    """What generation needs of a model with an encoder, beside `sources.SourceDecoder`."""

    tokenizer: Tokenizer | None = None
    ends: tuple[int, ...] | None = None  # tokens that end a text; None for the configuration's
    starts: tuple[int, ...] = ()  # tokens that the decoder starts from
    pads_sources = True

    @property
    def longest(self) -> int | None:
        """The most positions of the decoder; None where there is no end."""
        return None

    def source_width(self, prompts: Sequence[np.ndarray]) -> int:
        """The width of a program for these sources."""
        raise NotImplementedError(f"{type(self).__name__} has no source_width")

    def configure(self, given: Json) -> None:
        """Take what generation_config.json says beside the ends; by default nothing."""

    def begin(self, prompts: list[np.ndarray]) -> list[np.ndarray]:
        """Where the decoder starts, for each source."""
        return [np.array(self.starts, np.int64) for _ in prompts]

    def programs(
        self, prompts: list[np.ndarray], slots: int, settings: Settings, share: Any
    ) -> Programs:
        """Compiled programs for sources and a length: those of the last time, if they fit."""
        batch, width = len(prompts), self.source_width(prompts)
        kind: Any = SourcePrograms if settings.use_cache else WholeSourcePrograms

        def fits(before: Any) -> bool:
            return isinstance(before, kind) and before.fits(batch, slots, width)

        def opened(holder: Any) -> Any:
            return kind(self, batch, slots, width, holder)

        found = self.kept(fits, opened, share)
        found.begin = self.starts
        programs: Programs = found
        return programs

    def generate(self, prompt: Any, max_new_tokens: int = 20, **settings: Any) -> Any:
        """What the decoder says to a source, or several; as `CausalModel.generate`.

        Tokens that come back begin with those that the decoder starts from.
        """
        return generate(self, prompt, max_new_tokens, **settings)

    def stream(self, prompt: Any, max_new_tokens: int = 20, **settings: Any) -> Iterator[Any]:
        """The tokens that answer one source, each when it is chosen; for text pieces of text."""
        return stream(self, prompt, max_new_tokens, **settings)
