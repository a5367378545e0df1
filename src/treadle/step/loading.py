"""Values that are loaded by name: what fits, what is missing, what is tied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.base.errors import LoadError
from treadle.base.shapes import Shape
from treadle.nn.module import Module
from treadle.runtime.files import load_arrays, save_arrays
from treadle.runtime.foreign import readable, shape_of
from treadle.runtime.session import Session, fitted
from treadle.step.batches import Arrays

COUNTERS = "step:counters"
OWN = "step:"  # begins the names in files of what is a step's, not the model's
STEP, MODEL = "step", "model"  # kinds of files


Rename = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was not loaded: names of the model that were not given, and given ones it has not.

    `mismatched` were given in another shape, and left out because that was asked for. As PyTorch's
    it unpacks to (missing, unexpected), which are `missing_keys` and `unexpected_keys` too.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def missing_keys(self) -> list[str]:
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        return list(self.unexpected)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter((self.missing, self.unexpected))


@dataclass(frozen=True, slots=True)
class Terms:
    """What a loading forgives: other names, other shapes, and how given names are read."""

    strict: bool = True
    rename: Rename | None = None
    skip_mismatched: bool = False


STRICT = Terms()


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
    operation: str,
    terms: Terms = STRICT,
) -> Checked:
    """Write values of a model, and `own` ones beside it, by name; all or nothing.

    With `terms.strict` the names must be exactly these. A shared parameter may be given by any of
    its names, or several where all say the same.
    """
    if not isinstance(values, Mapping):
        raise LoadError(
            operation,
            f"the values are a {type(values).__name__}, not a dict of arrays by name",
            "Pass what params or a state_dict gives.",
        )
    values = _renamed(operation, values, terms.rename)
    names = [*model.declarations(), *own]
    given, unexpected = _by_first_name(model, names, values)
    missing = [n for n in names if n not in given]
    arrays: Arrays = {}
    wrong: list[str] = []
    mismatched: list[str] = []
    for name, aliases in given.items():
        found = _one_value(session, name, {n: values[n] for n in aliases})
        if not isinstance(found, str):
            arrays[name] = found
        elif terms.skip_mismatched and _differs(values[aliases[0]], session.types[name].shape):
            mismatched.append(name)
        else:
            wrong.append(found)
    loaded = Loaded(tuple(missing), tuple(unexpected), tuple(mismatched))
    if wrong or (terms.strict and (missing or unexpected)):
        raise _refusal(operation, loaded if terms.strict else Loaded(), wrong)
    session.write(arrays)
    return Checked(arrays, loaded)


def _differs(value: object, shape: Shape) -> bool:
    try:
        return shape_of(value) != shape
    except ValueError:  # lists of unequal lengths have none
        return False


def _renamed(
    operation: str, values: Mapping[str, object], rename: Rename | None
) -> Mapping[str, object]:
    """Values by the names that they are read as; a name that is read as None is left out."""
    if rename is None:
        return values
    found: dict[str, object] = {}
    source: dict[str, str] = {}
    for given, value in values.items():
        new = _new_name(str(given), rename)
        if new is None:
            continue
        if new in found:
            cause = f"rename makes {new} of both {source[new]} and {given}"
            raise LoadError(operation, cause, "Give each name one source.")
        found[new], source[new] = value, str(given)
    return found


def _new_name(name: str, rename: Rename) -> str | None:
    """By a function, or by the longest prefix of whole parts that a dict has."""
    if not isinstance(rename, Mapping):
        return rename(name)
    parts = name.split(".")
    by_prefix = {old.strip("."): new.strip(".") for old, new in rename.items()}
    for count in range(len(parts), -1, -1):
        prefix = ".".join(parts[:count])
        if prefix in by_prefix:
            return ".".join(p for p in (by_prefix[prefix], *parts[count:]) if p)
    return name


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
            found = fitted(readable(value), session.types[name], session.memory.is_wide)
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
    remedy = "Check that it is the same model."
    if operation != "load_state_dict":
        remedy = "Load a part with strict=False." if not wrong else remedy
        if wrong and all("has the shape" in problem for problem in wrong):
            remedy = f"{remedy} To leave out what has another shape: skip_mismatched=True."
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
