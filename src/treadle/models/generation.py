"""Generation: prompts in, tokens out, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import FINITE, check_flag, check_number, check_whole
from treadle.frontend.tensor import Tensor
from treadle.models.beams import Beams
from treadle.models.config import Config
from treadle.models.decoding import Likeliest, Programs, slots_for
from treadle.models.sampling import Choice
from treadle.models.tokenizer import Tokenizer

OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings(Choice):
    """How a prompt is continued: how tokens are chosen, and when it ends.

    `eos_token_id` is a token or several that end a row, by default the configuration's; () is
    none. `stop_strings` end a row whose new text contains one. `on_token(row, token)` is called
    for each token when it is chosen. With `num_beams` the likeliest of several continuations is
    searched: `length_penalty` and `early_stopping` are as in `transformers`.
    """

    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    use_cache: bool = True
    on_token: OnToken | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("generate", "num_beams", self.num_beams)
        check_number("generate", "length_penalty", self.length_penalty, FINITE)
        check_flag("generate", use_cache=self.use_cache)
        if self.early_stopping not in (True, False, "never"):
            cause = f"early_stopping = {self.early_stopping!r}"
            raise ArgumentError("generate", cause, 'It is True, False or "never".')
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise ArgumentError("generate", f"stop_strings has {text!r}", "Pass strings.")
        if self.num_beams > 1 and (self.temperature or self.stops or self.on_token):
            cause = f"{self.num_beams} beams with a temperature, stop strings or on_token"
            raise ArgumentError("generate", cause, "Beams are searched, not drawn or streamed.")

    @property
    def stops(self) -> tuple[str, ...]:
        given = self.stop_strings
        return (given,) if isinstance(given, str) else tuple(given)


class Generating(Protocol):
    """What is asked of a model that generates."""

    tokenizer: Tokenizer | None
    ends: tuple[int, ...] | None

    @property
    def config(self) -> Config: ...

    @property
    def longest(self) -> int | None: ...

    def programs(
        self, prompts: list[np.ndarray], slots: int, settings: Any, share: Any
    ) -> Programs: ...

    def begin(self, prompts: list[np.ndarray]) -> list[np.ndarray]:
        """What is continued: the prompts, or where a decoder starts that looks at them."""
        ...


class Prompts(NamedTuple):
    """Rows of tokens, and what they were given as."""

    rows: list[np.ndarray]
    is_one: bool
    is_text: bool


def generate(
    model: Generating, prompt: Any, max_new_tokens: int = 20, *, share: Any = None, **given: Any
) -> Any:
    """See `CausalModel.generate`."""
    settings = settings_from(given)
    prompts = read_prompts(model, prompt)
    if settings.num_beams > 1:
        rows = _beam_rows(model, prompts.rows, max_new_tokens, settings, share)
    else:
        run = Run.of(model, prompts.rows, max_new_tokens, settings, share)
        for row, token in run.tokens():
            if settings.on_token is not None:
                settings.on_token(row, token)
        rows = [np.array(row, np.int64) for row in run.rows]
    if prompts.is_text:
        assert model.tokenizer is not None
        found: list[Any] = [model.tokenizer.decode(row.tolist()) for row in rows]
    else:
        found = list(rows)
    return found[0] if prompts.is_one else found


def stream(
    model: Generating, prompt: Any, max_new_tokens: int = 20, *, share: Any = None, **given: Any
) -> Iterator[Any]:
    """See `CausalModel.stream`."""
    settings = settings_from(given)
    prompts = read_prompts(model, prompt)
    if not prompts.is_one or settings.num_beams > 1:
        raise ArgumentError(
            "stream", "several prompts or beams", "Stream one prompt, without beams."
        )
    run = Run.of(model, prompts.rows, max_new_tokens, settings, share)
    return text_pieces(model.tokenizer, run) if prompts.is_text else (t for _, t in run.tokens())


def text_pieces(tokenizer: Tokenizer | None, run: Run) -> Iterator[str]:
    """Text as it grows; a character of several tokens waits for the last of them."""
    assert tokenizer is not None
    shown = tokenizer.decode(run.rows[0])
    for _ in run.tokens():
        text = tokenizer.decode(run.rows[0])
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            if len(text) > len(shown):
                yield text[len(shown) :]
            shown = text


def settings_from(given: dict[str, Any]) -> Settings:
    known = [f.name for f in fields(Settings)]
    unknown = [name for name in given if name not in known]
    if unknown:
        cause = f"there is no setting {unknown[0]!r}"
        raise ArgumentError("generate", cause, f"There are: {', '.join(known)}, share.")
    return Settings(**given)


def read_prompts(model: Generating, prompt: Any) -> Prompts:
    """One prompt or several, as tokens or text; or as a model has read them already."""
    if isinstance(prompt, Prompts):
        return prompt
    if isinstance(prompt, str):
        return Prompts([_row(model, prompt)], True, True)
    if isinstance(prompt, Tensor):
        prompt = prompt.numpy()
    if isinstance(prompt, np.ndarray):
        is_one = prompt.ndim == 1
        return Prompts([_row(model, p) for p in ([prompt] if is_one else prompt)], is_one, False)
    if not isinstance(prompt, (list, tuple)) or not prompt:
        raise ArgumentError("generate", f"the prompt is {prompt!r}", "Pass tokens or text.")
    if isinstance(prompt[0], (int, np.integer)):
        return Prompts([_row(model, prompt)], True, False)
    return Prompts([_row(model, p) for p in prompt], False, isinstance(prompt[0], str))


def _row(model: Generating, prompt: Any) -> np.ndarray:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            cause = "the prompt is text, and the model has no tokenizer"
            raise ArgumentError("generate", cause, "Pass tokens, or load a folder with one.")
        prompt = model.tokenizer.encode(prompt)
    row = np.asarray(prompt)
    vocabulary: int = getattr(model.config, "vocab_size")  # noqa: B009
    if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
        cause = f"a prompt of shape {row.shape} and dtype {row.dtype}"
        raise ShapeError("generate", cause, "Each prompt is at least one whole number.")
    if row.min() < 0 or row.max() >= vocabulary:
        cause = f"a prompt has tokens from {row.min()} to {row.max()}"
        raise ArgumentError("generate", cause, f"There are {vocabulary}.")
    return row.astype(np.int64)


def _slots(model: Generating, rows: Sequence[np.ndarray], max_new_tokens: int) -> int:
    check_whole("generate", "max_new_tokens", max_new_tokens, 0)
    longest = max(map(len, rows))
    if model.longest is not None and longest + max_new_tokens > model.longest:
        cause = f"{longest} tokens and {max_new_tokens} new ones, for {model.longest} positions"
        raise ArgumentError("generate", cause, "Ask for fewer, or shorten the prompt.")
    return slots_for(longest, max_new_tokens)


def ends_of(model: Generating, settings: Settings) -> tuple[int, ...]:
    given: Any = settings.eos_token_id
    if given is None:
        given = getattr(model.config, "eos_token_id", None) if model.ends is None else model.ends
    if given is None:
        return ()
    ends = (given,) if isinstance(given, (int, np.integer)) else tuple(given)
    return tuple(check_whole("generate", "eos_token_id", t, 0) for t in ends)


class Run:
    """Prompts that grow, a token of each row at a time, until all have ended."""

    def __init__(
        self,
        opened: Callable[[], Programs],
        prompts: list[np.ndarray],
        rows: Sequence[np.ndarray],
        most: int,
    ):
        self.opened, self.prompts, self.most = opened, prompts, most
        self.rows: list[list[int]] = [row.tolist() for row in rows]
        self.starts = [len(row) for row in rows]
        self.has_ended = [False] * len(rows)
        self.choice: Choice = Choice()
        self.ends: tuple[int, ...] = ()
        self.stops: tuple[str, ...] = ()
        self.tokenizer: Tokenizer | None = None

    @staticmethod
    def of(
        model: Generating, prompts: list[np.ndarray], most: int, settings: Settings, share: Any
    ) -> Run:
        rows = model.begin(prompts)
        slots = _slots(model, rows, most)
        if settings.stops and model.tokenizer is None:
            cause = "stop_strings, and the model has no tokenizer"
            raise ArgumentError("generate", cause, "Load a folder with one.")
        opened = partial(model.programs, prompts, slots, settings, share)
        run = Run(opened, prompts, rows, most)
        run.choice, run.ends = settings, ends_of(model, settings)
        run.stops, run.tokenizer = settings.stops, model.tokenizer
        return run

    def tokens(self) -> Iterator[tuple[int, int]]:
        """Rows and their new tokens, in the order in which they are chosen.

        Programs are this run's from the first token until it ends or is closed.
        """
        programs: Any = self.opened()
        try:
            yield from self._chosen(programs)
        finally:
            programs.give_back()

    def _chosen(self, programs: Any) -> Iterator[tuple[int, int]]:
        is_greedy = self.choice.is_greedy and programs.has_likeliest
        every = self._likeliest(programs) if is_greedy else self._drawn(programs)
        for chosen in islice(every, self.most):
            for row, token in enumerate(chosen.tolist()):
                if not self.has_ended[row]:
                    self.rows[row].append(token)
                    self.has_ended[row] = token in self.ends or self._has_stopped(row)
                    yield row, token
            if all(self.has_ended):
                return

    def _drawn(self, programs: Programs) -> Iterator[np.ndarray]:
        """Tokens of each row, chosen on the host."""
        sources = self.choice.sources(len(self.rows))
        logits = programs.start(self.prompts)
        while True:
            seen = [np.array(row) for row in self.rows]
            chosen = self.choice.choose(logits, seen, sources)
            yield chosen
            logits = programs.advance(chosen)

    def _likeliest(self, programs: Likeliest) -> Iterator[np.ndarray]:
        """Tokens of each row, chosen by the program; a device is one run ahead of who looks."""
        waiting, left = programs.start_likeliest(self.prompts), self.most - 1
        is_ahead = not programs.session.memory.is_host
        while True:
            following = programs.advance_likeliest() if is_ahead and left > 0 else None
            yield waiting()
            waiting, left = following or programs.advance_likeliest(), left - 1

    def _has_stopped(self, row: int) -> bool:
        if not self.stops or self.tokenizer is None:
            return False
        text = self.tokenizer.decode(self.rows[row][self.starts[row] :])
        return any(stop in text for stop in self.stops)


def _beam_rows(
    model: Generating, prompts: list[np.ndarray], most: int, settings: Settings, share: Any
) -> list[np.ndarray]:
    """The likeliest continuation of each prompt."""
    count, rows = settings.num_beams, model.begin(prompts)
    slots = _slots(model, rows, most)
    if not most:
        return rows
    repeated = [prompt for prompt in prompts for _ in range(count)]
    ends = ends_of(model, settings)
    searches = [
        Beams(row, count, most, ends, settings.length_penalty, settings.early_stopping)
        for row in rows
    ]
    programs = model.programs(repeated, slots, settings, share)
    try:
        _search(programs, repeated, searches, settings)
    finally:
        programs.give_back()
    return [search.best() for search in searches]


def _search(
    programs: Programs, prompts: list[np.ndarray], searches: list[Beams], settings: Settings
) -> None:
    count, logits = settings.num_beams, programs.start(prompts)
    while True:
        parts = np.split(logits, len(searches))
        for search, part in zip(searches, parts, strict=True):
            search.advance(part, settings)
        is_full = settings.early_stopping is True and all(s.is_full for s in searches)
        is_over = not any(s.is_open for s in searches) or all(s.has_reached_end for s in searches)
        if is_full or is_over:
            return
        sources = [s.sources + i * count for i, s in enumerate(searches)]
        programs.take(np.concatenate(sources))
        logits = programs.advance(np.concatenate([s.last for s in searches]))
