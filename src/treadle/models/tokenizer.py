"""Text and tokens, through the `tokenizers` package where a folder has a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from treadle.base.errors import ArgumentError, LoadError

LARGEST = 1 << 28  # bytes of a tokenizer.json; those of large vocabularies have some 2²⁵


class Tokenizer:
    """A tokenizer.json as it was found; `tokenizers` is imported when it is first used.

    `content` makes its text where another file has it in other words.
    """

    def __init__(self, path: Path, content: Callable[[], str] | None = None):
        self.path = path
        self._content = content or partial(_text, path)
        self._found: Any = None

    @property
    def backend(self) -> Any:
        """The object of `tokenizers`."""
        if self._found is None:
            self._found = _opened(self.path, self._content)
        return self._found

    def encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise ArgumentError("encode", f"{text!r} is not a string", "Pass text.")
        return list(self.backend.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.backend.decode([int(t) for t in tokens]))

    def text(self) -> bytes:
        """The content of a tokenizer.json."""
        return str(self.backend.to_str(pretty=True)).encode()

    def file(self) -> bytes:
        """The content to be saved: as it was found, unless it was opened and may have changed."""
        if self._found is None:
            return self._content().encode(errors="surrogateescape")
        return self.text()


def _text(path: Path) -> str:
    if path.stat().st_size > LARGEST:
        cause = f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST:,}"
        raise LoadError("load", cause, "It is no tokenizer.json.")
    return path.read_text(encoding="utf-8")


def _opened(path: Path, content: Callable[[], str]) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        cause = f"{path} needs the package tokenizers, which is not installed"
        raise LoadError("load", cause, 'pip install "treadle[models]", or pass tokens.') from error
    try:
        return tokenizers.Tokenizer.from_str(content())
    except LoadError:
        raise
    except Exception as error:  # what `tokenizers` raises has no class of its own
        cause = f"{path} is damaged or has no tokenizer: {str(error)[:200]}"
        raise LoadError("load", cause, "Use another copy, or pass tokens.") from error
