"""What compiled things share: batches that are checked, programs by shape, values by name."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from treadle.base import trees
from treadle.base.errors import ArgumentError, BatchError
from treadle.base.numbers import check_whole
from treadle.base.trees import Tree
from treadle.frontend.tracing import function_name
from treadle.ir.types import TensorType
from treadle.nn.module import Module
from treadle.nn.tracing import INPUT_PREFIX, Inputs
from treadle.pipeline import CompileOptions
from treadle.runtime.foreign import described, is_on_device, shape_of
from treadle.runtime.memory import Memory
from treadle.runtime.session import Session, fitted
from treadle.step.index_checks import Looking

MOST_SHOWN = 6  # problems that one message lists
Built = TypeVar("Built", bound=Looking)
Arrays = dict[str, np.ndarray]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class OfSession(Protocol):
    """Whatever acts on the values of a session."""

    session: Session


Own = TypeVar("Own", bound=OfSession)


def in_turn(
    method: Callable[Concatenate[Own, Parameters], Result],
) -> Callable[Concatenate[Own, Parameters], Result]:
    """A method that sees values and counters of one moment: no other thread makes a step then."""

    @functools.wraps(method)
    def call(own: Own, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with own.session.lock:
            return method(own, *args, **kwargs)

    return call


def check_arguments(operation: str, what: str, function: Callable[..., object]) -> None:
    """A function is called with a model and a batch, and must take them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not a function, or one that does not say what it takes
        signature = None
    if not callable(function):
        raise ArgumentError(operation, f"{what} is {function!r}", "Pass a function.")
    try:
        if signature is not None:
            signature.bind(None, None)
    except TypeError as error:
        raise ArgumentError(
            operation,
            f"{what} takes {signature}, and is called with a model and a batch",
            "Write it as a function of (model, batch).",
        ) from error


def check_specs(function: Callable[..., object], specs: Sequence[object]) -> None:
    """`td.compile` needs a spec for each argument of the function."""
    called = function.forward if isinstance(function, Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # it does not say what it takes
        return
    try:
        signature.bind(*specs)
    except TypeError as error:
        count = f"{len(specs)} spec{'' if len(specs) == 1 else 's'}" if specs else "no specs"
        raise ArgumentError(
            "compile",
            f"{function_name(function)} takes {signature}, and there are {count}",
            "Pass one for each argument: td.compile(f, td.Spec((3,))), or an example array.",
        ) from error


def check_flags(operation: str, inputs: Inputs, **flags: object) -> None:
    """What stands after a batch is True or False: a second array there is meant as data."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise BatchError(
                operation,
                f"its argument {name} is of {type(value).__name__}, not True or False",
                f"A batch is one argument, {_one_batch(inputs)}.",
            )


def _one_batch(inputs: Inputs) -> str:
    """What a batch looks like, to be pasted."""
    names = [name[len(INPUT_PREFIX) :] for name, _ in inputs.types]
    shown = inputs.structure.rebuild(names)
    if type(shown) is dict and all(shown.get(n) == n for n in names):
        return "a dict: {" + ", ".join(f'"{n}": ...' for n in names) + "}"
    return "an array" if names == [""] else f"a {type(shown).__name__} of {len(names)} arrays"


def check_batch(operation: str, inputs: Inputs, batch: Tree, memory: Memory) -> Arrays:
    """The batch's arrays by leaf name, or one error that names everything that is wrong.

    Arrays that are in the device's memory already are taken as they are.
    """
    given = dict(zip(trees.paths(batch), trees.flatten(batch)[0], strict=True))
    expected = {name[len(INPUT_PREFIX) :]: type_ for name, type_ in inputs.types}
    wrong = [f"{shown(n)} is missing" for n in expected if n not in given]
    wrong += [f"{shown(n)} is unexpected" for n in given if n not in expected]
    arrays: Arrays = {}
    for name, type_ in expected.items():
        if name in given:
            taken = _taken(given[name], type_, memory)
            if isinstance(taken, str):
                wrong.append(f"{shown(name)} {taken}")
            else:
                arrays[f"{INPUT_PREFIX}{name}"] = taken
    if wrong:
        raise _refused(operation, inputs, batch, wrong)
    return arrays


def _refused(operation: str, inputs: Inputs, batch: Tree, wrong: list[str]) -> BatchError:
    """One error for all that is wrong with a batch."""
    if len(wrong) > MOST_SHOWN:
        wrong = [*wrong[:MOST_SHOWN], f"and {len(wrong) - MOST_SHOWN} more"]
    expected = {name[len(INPUT_PREFIX) :]: type_ for name, type_ in inputs.types}
    given = dict(zip(trees.paths(batch), trees.flatten(batch)[0], strict=True))
    numbers = [n for n, leaf in given.items() if isinstance(leaf, (int, float))]
    listed = [n for n in numbers if any(n.startswith(f"{e}." if e else e) for e in expected)]
    extra = [n for n in numbers if n not in expected and n not in listed]
    if listed:
        wrong = [*wrong, "lists of numbers are not arrays: use np.asarray"]
    remedy = f"Expected {', '.join(f'{shown(n)}: {t}' for n, t in expected.items())}."
    if extra:
        names = ", ".join(map(shown, extra))
        remedy += f" A number that changes is an input too: compile with td.Spec(()) for {names}."
    elif not isinstance(batch, Mapping):
        remedy += f" A batch is {_one_batch(inputs)}."
    return BatchError(operation, f"the batch does not fit: {'; '.join(wrong)}", remedy)


def _taken(value: Any, type_: TensorType, memory: Memory) -> Any:
    """The array as a program takes it, or what is wrong with it."""
    if type(value) is np.ndarray or not is_on_device(value):
        return fitted(value, type_)
    if memory.is_host:
        return "is on a GPU, where this program is not"
    there = memory.found(value, type_.shape, type_.dtype.numpy)
    if there is not None:
        return there
    return f"is on the device as {described(value)}, not as {type_} without gaps"


def shown(name: str) -> str:
    return name or "the array"


class ByShape(Generic[Built]):
    """What was built for each set of input types; the least recently used of too many goes.

    Threads may ask at the same time: one of them builds, and has the session meanwhile.
    """

    def __init__(
        self,
        build: Callable[[Inputs], Built],
        options: CompileOptions,
        fixed: Inputs,
        session: Session,
    ):
        self._build, self._options, self._fixed = build, options, fixed
        self._memory, self._lock = session.memory, session.lock
        self._built: OrderedDict[Inputs, Built] = OrderedDict()
        self._plain = _plain_leaves(fixed)
        self._usual: Built | None = None  # what was built for the declared shapes

    def get(self, operation: str, batch: Tree) -> tuple[Built, Arrays]:
        """What to run and the checked arrays of the batch, indices among them.

        Those on a device are for the program to look at.
        """
        built, arrays = self._fitting(operation, batch)
        built.indices.check(operation, arrays)
        return built, arrays

    def _fitting(self, operation: str, batch: Tree) -> tuple[Built, Arrays]:
        if self._usual is not None and len(self._built) == 1:
            exact = self._exact(batch)
            if exact is not None:
                return self._usual, exact
        inputs = self._inputs_for(operation, batch)
        arrays = check_batch(operation, inputs, batch, self._memory)
        return self.built(inputs), arrays

    def _exact(self, batch: Tree) -> Arrays | None:
        """The arrays of a flat batch that fits as it is: the usual case, in little time."""
        if type(batch) is not dict or self._plain is None or len(batch) != len(self._plain):
            return None
        arrays: Arrays = {}
        for key, name, shape, dtype in self._plain:
            array: Any = batch.get(key)
            if type(array) is not np.ndarray:
                array = self._memory.found(array, shape, dtype)
                if array is None:
                    return None
            elif array.shape != shape or array.dtype != dtype:
                return None
            arrays[name] = array
        return arrays

    def built(self, inputs: Inputs) -> Built:
        known = self._built.get(inputs)
        if known is not None:
            with suppress(KeyError):  # another thread may have put one in its place since
                self._built.move_to_end(inputs)
            return known
        with self._lock:
            if inputs in self._built:
                return self._built[inputs]
            self._built[inputs] = found = self._build(inputs)
            if inputs == self._fixed:
                self._usual = found
            while len(self._built) > self._options.max_shapes:
                self._built.popitem(last=False)
            return found

    def _inputs_for(self, operation: str, batch: Tree) -> Inputs:
        """The declared types; other sizes where that is allowed, never other names or dtypes."""
        fixed = self._fixed
        resized = _resized(fixed, batch)
        if resized is None or resized == fixed:
            return fixed
        if self._options.on_new_shape == "specialise":
            return resized
        pairs = zip(fixed.types, resized.types, strict=True)
        changed = [(n, old.shape, new.shape) for (n, old), (_, new) in pairs if old != new]
        changes = "; ".join(
            f"{shown(n[len(INPUT_PREFIX) :])} is {new}, compiled for {old}"
            for n, old, new in changed
        )
        only_rows = all(old[1:] == new[1:] for _, old, new in changed)
        raise BatchError(
            operation,
            f"the batch has other shapes: {changes}",
            f"{'Drop incomplete batches' if only_rows else 'Pass rows of the same size'}, or "
            'compile with CompileOptions(on_new_shape="specialise").',
        )


Plain = tuple[str, str, tuple[int, ...], np.dtype[np.generic]]


def _plain_leaves(inputs: Inputs) -> list[Plain] | None:
    """Keys, names, shapes and dtypes of the inputs, if they are a flat dictionary."""
    paths = [name[len(INPUT_PREFIX) :] for name, _ in inputs.types]
    probe = inputs.structure.rebuild(paths)
    if type(probe) is not dict or any(probe.get(p) != p for p in paths):
        return None
    return [
        (path, name, type_.shape, type_.dtype.numpy)
        for path, (name, type_) in zip(paths, inputs.types, strict=True)
    ]


def _resized(fixed: Inputs, batch: Tree) -> Inputs | None:
    """The inputs with the batch's sizes; None if names or ranks differ, which is another error."""
    given = dict(zip(trees.paths(batch), trees.flatten(batch)[0], strict=True))
    types: list[tuple[str, TensorType]] = []
    for name, type_ in fixed.types:
        path = name[len(INPUT_PREFIX) :]
        shape = shape_of(given[path]) if path in given else None
        if shape is None or len(shape) != type_.rank:
            return None
        types.append((name, type_.with_shape(shape)))
    return Inputs(tuple(types), fixed.structure) if len(given) == len(types) else None


def chosen_stream(session: Session, stream: int | None, is_step: bool) -> int:
    """The random stream of the next program of a session: its own, or the one that it is told."""
    if stream is None:
        return session.stream(is_step)
    return check_whole("compile", "stream", stream, 0)
