"""Values that are loaded by name: what fits, what is missing, what is tied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.base.errors import LoadError
from treadle.nn.module import Module
from treadle.runtime.files import load_arrays, save_arrays
from treadle.runtime.session import Session, fitted
from treadle.step.batches import Arrays

COUNTERS = "step:counters"
OWN = "step:"  # begins the names in files of what is a step's, not the model's
STEP, MODEL = "step", "model"  # kinds of files


class Loaded(NamedTuple):
    """What was not loaded: names of the model that were not given, and given ones it has not."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Checked(NamedTuple):
    """Arrays that fit, by first name, and what is not among them."""

    arrays: Arrays
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Counters:
    """Where a step is: its seed, updates and micro-steps done, and its stream in the session."""

    seed: int
    steps: int
    micro: int
    stream: int = 0

    def array(self) -> np.ndarray:
        """As files have them: the seed in two words, the stream of a step by itself left out."""
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32, self.steps, self.micro]
        return np.array(words + ([self.stream] if self.stream else []), np.int64)

    @staticmethod
    def read(state: object, accumulate: int) -> Counters:
        """Those of a `state_dict`, for a step that accumulates as many micro-steps."""
        if not isinstance(state, Mapping):
            cause = f"the state is a {type(state).__name__}, not a dict of arrays by name"
            raise LoadError("load_state_dict", cause, "Pass what state_dict gives.")
        words = np.asarray(state.get(COUNTERS, ()))
        if words.shape not in ((4,), (5,)) or words.dtype.kind not in "iu":
            raise LoadError("load_state_dict", f"there are no {COUNTERS}", "Use load_params.")
        low, high, steps, micro, *stream = (int(w) for w in words)
        if not (steps >= 0 and 0 <= micro < accumulate):
            raise LoadError(
                "load_state_dict",
                f"the state is at micro-step {micro}, but {accumulate} make an update here",
                "Compile with the same accumulate, or save right after an update.",
            )
        return Counters(low + (high << 32), steps, micro, *stream)


def own_names(state: Mapping[str, object], prefix: str) -> dict[str, object]:
    """What a `state_dict` has by the session's names, without the counters."""
    return {
        prefix + n[len(OWN) :] if n.startswith(OWN) else n: value
        for n, value in ((str(n), v) for n, v in state.items())
        if n != COUNTERS
    }


def load_values(
    session: Session,
    model: Module,
    own: Sequence[str],
    values: object,
    strict: bool,
    operation: str,
) -> Checked:
    """Write values of a model, and `own` ones beside it, by name; all or nothing.

    With `strict` the names must be exactly these. A shared parameter may be given by any of its
    names, or several where all say the same.
    """
    if not isinstance(values, Mapping):
        raise LoadError(
            operation,
            f"the values are a {type(values).__name__}, not a dict of arrays by name",
            "Pass what params or a state_dict gives.",
        )
    names = [*model.declarations(), *own]
    given, unexpected = _by_first_name(model, names, values)
    missing = [n for n in names if n not in given]
    arrays: Arrays = {}
    wrong: list[str] = []
    for name, aliases in given.items():
        found = _one_value(session, name, {n: values[n] for n in aliases})
        if isinstance(found, str):
            wrong.append(found)
        else:
            arrays[name] = found
    loaded = Loaded(tuple(missing), tuple(unexpected))
    if wrong or (strict and (missing or unexpected)):
        raise _refusal(operation, loaded if strict else Loaded(), wrong)
    session.write(arrays)
    return Checked(arrays, loaded)


def _by_first_name(
    model: Module, names: Sequence[str], values: Mapping[str, object]
) -> tuple[dict[str, list[str]], list[str]]:
    """Under which names each value is given, and the names that lead to nothing."""
    given: dict[str, list[str]] = {}
    unexpected: list[str] = []
    known = set(names)
    for name in values:
        first = name if name in known else model.first_name(str(name))
        if first is None:
            unexpected.append(str(name))
        else:
            given.setdefault(first, []).append(name)
    return {n: given[n] for n in names if n in given}, unexpected


def _one_value(session: Session, name: str, given: Mapping[str, object]) -> np.ndarray | str:
    """The array that all the names of a value give, or what is wrong."""
    arrays: Arrays = {}
    for alias, value in given.items():
        try:
            found = fitted(value, session.types[name], session.memory.is_wide)
        except (TypeError, ValueError, RuntimeError) as error:  # lists, tensors of other libraries
            return f"{alias} is not an array: {error}"
        if isinstance(found, str):
            return f"{alias} {found}"
        arrays[alias] = found
    first, *others = arrays.values()
    if all(_is_same(first, other) for other in others):
        return first
    return f"{' and '.join(arrays)} are one and the same in this model, and given they differ"


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _refusal(operation: str, loaded: Loaded, wrong: Sequence[str]) -> LoadError:
    parts = [
        f"missing: {', '.join(loaded.missing)}" if loaded.missing else "",
        f"unexpected: {', '.join(loaded.unexpected)}" if loaded.unexpected else "",
        f"mismatched: {'; '.join(wrong)}" if wrong else "",
    ]
    can_be_partial = operation != "load_state_dict" and not wrong
    remedy = (
        "Load a part with strict=False." if can_be_partial else "Check that it is the same model."
    )
    return LoadError(operation, "; ".join(p for p in parts if p), remedy)


def save_step(path: str | Path, state: Arrays) -> None:
    save_arrays(path, state, STEP)


def load_step(path: str | Path) -> Arrays:
    return load_arrays(path, (STEP,))


def save_model(path: str | Path, params: Arrays) -> None:
    save_arrays(path, params, MODEL)


def load_model(path: str | Path) -> Arrays:
    """Parameters and states of a file of either kind, or of another program's safetensors."""
    return model_values(load_arrays(path, (STEP, MODEL), foreign=True))


def model_values(state: Mapping[str, np.ndarray]) -> Arrays:
    """The part of a step's state that is the model's."""
    return {n: a for n, a in state.items() if not n.startswith(OWN)}
