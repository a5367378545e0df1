"""Smaller programs that fail in the same way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from treadle.base.errors import TreadleError
from treadle.fuzz.forms import FORMS
from treadle.fuzz.generate import evaluated
from treadle.fuzz.program import (
    FORWARD,
    GRADIENT,
    NORMAL,
    TRAINING,
    Input,
    Literal,
    Program,
    Step,
    Training,
    Values,
    to_json,
)
from treadle.fuzz.source import definitions
from treadle.kernel.machine import NATIVE

MOST_TRIES = 300
AXES = frozenset({"axis", "axis2", "order", "dims", "diagonal", "groups", "spec"})  # not sizes
# What a step is tried as: most failures are of a reduction that is used again.
PLAIN = (
    "unary.half",
    "reduce.sum",
    "reduce.max",
    "reduce.logsumexp",
    "softmax.plain",
    "norm.layer",
)

Fails = Callable[[Program], bool]
Known = Mapping[str, np.ndarray]


def shrink(program: Program, fails: Fails, most: int = MOST_TRIES) -> Program:
    """A smaller program that fails, its values named in order.

    `fails` is asked at most so often. It sees valid programs only: the oracle has run them.
    """
    small = _shrunk(program, fails, most)
    named = _named_in_order(small)
    # The first values of parameters depend on names, so that this too has to be tried.
    return named if named != small and fails(named) else small


def _shrunk(program: Program, fails: Fails, most: int) -> Program:
    """Each time the first of the candidates that fails is taken."""
    seen = {_text(program)}
    tries = 1  # the last is for the names
    while True:
        for found in _smaller(program):
            candidate = found.trimmed()
            if not candidate.outputs or not candidate.steps:
                continue
            if _text(candidate) in seen or measure(candidate) >= measure(program):
                continue
            seen.add(_text(candidate))
            if not _is_valid(candidate):
                continue
            tries += 1
            if fails(candidate):
                program = candidate
                break
            if tries >= most:
                return program
        else:
            return program


def _named_in_order(program: Program) -> Program:
    """Inputs as x0, x1, … and steps as v0, v1, …"""
    names = {given.name: f"x{k}" for k, given in enumerate(program.inputs)}
    names |= {step.name: f"v{k}" for k, step in enumerate(program.steps)}
    return replace(
        program,
        inputs=tuple(replace(i, name=names[i.name]) for i in program.inputs),
        steps=tuple(
            replace(s, name=names[s.name], operands=tuple(names[o] for o in s.operands))
            for s in program.steps
        ),
        outputs=tuple(names[o] for o in program.outputs),
    )


def measure(program: Program) -> tuple[int, ...]:
    """What a smaller program has less of, the most important first."""
    training = program.training or Training("", 0)
    return (
        len(program.steps),
        (FORWARD, GRADIENT, TRAINING).index(program.mode),
        len(program.outputs),
        len(program.inputs),
        training.updates,
        sum(i.is_float and i.dtype != "float32" for i in program.inputs),
        sum(math.prod(i.shape) for i in program.inputs),
        sum(program.threads),
        program.target != NATIVE,
        len(definitions(program)) + len(training.optimizer),
        program.seed,
        len(_text(program)),
    )


def _text(program: Program) -> str:
    return json.dumps(to_json(program))


def _is_valid(program: Program) -> bool:
    """Whether the oracle can run it."""
    try:
        evaluated(program)
    except Exception:  # a candidate is a guess: whatever is wrong with it, it is none
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    """Candidates, those that leave out most first."""
    try:
        known = evaluated(program)
    except TreadleError:  # with these values it cannot be taken apart
        return
    yield from _modes(program, known)
    yield from _prefixes(program)
    yield from _cuts(program, known)
    yield from _bypasses(program, known)
    yield from _plainer(program)
    yield from _sizes(program)
    yield from _simpler_attributes(program)
    yield from _simpler_inputs(program)
    yield from _simpler_runs(program)


def _modes(program: Program, known: Known) -> Iterator[Program]:
    if program.mode == GRADIENT:
        yield replace(program, mode=FORWARD)
    if program.mode == TRAINING:
        loss = next(s for s in program.steps if s.name == program.outputs[0])
        plain = _without_layers(program, known)
        for outputs in (loss.operands[:1], program.outputs):
            for mode in (FORWARD, GRADIENT):
                yield replace(plain, outputs=outputs, mode=mode)


def _without_layers(program: Program, known: Known) -> Program:
    """A function in place of a model: what is trained is an input, and so is what layers give."""
    layers = [s for s in program.steps if FORMS[s.form].is_layer]
    inputs = [replace(i, is_parameter=False) for i in program.inputs]
    inputs += [_input_like(s.name, known[s.name]) for s in layers]
    steps = tuple(s for s in program.steps if s not in layers)
    return replace(program, inputs=tuple(inputs), steps=steps, training=None)


def _prefixes(program: Program) -> Iterator[Program]:
    """One value as the only output. The output of training stays a loss."""
    if program.mode == TRAINING:
        return
    for step in program.steps:
        yield replace(program, outputs=(step.name,))
    for output in program.outputs:
        yield replace(program, outputs=tuple(o for o in program.outputs if o != output))


def _cuts(program: Program, known: Known) -> Iterator[Program]:
    """A step's result as an input: what made it is gone."""
    for step in reversed(program.steps):
        given = _input_like(step.name, known[step.name])
        steps = tuple(s for s in program.steps if s is not step)
        outputs = tuple(o for o in program.outputs if o != step.name)
        yield replace(program, inputs=(*program.inputs, given), steps=steps, outputs=outputs)


def _input_like(name: str, array: np.ndarray) -> Input:
    """An input whose values lie where an array's do."""
    low, high = float(np.min(array, initial=0)), float(np.max(array, initial=0))
    if array.dtype.kind in "iub":
        values = Values("integers", int(low), int(high) + 1)
    elif low < 0 < high:
        values = NORMAL
    else:
        values = Values("uniform", round(low, 2), round(high, 2) + 0.1)
    return Input(name, array.shape, str(array.dtype), values)


def _bypasses(program: Program, known: Known) -> Iterator[Program]:
    """One of a step's operands in its place, where the types are the same."""
    for step in program.steps:
        for operand in step.operands:
            a, b = known[step.name], known[operand]
            if (a.shape, a.dtype) == (b.shape, b.dtype):
                yield _renamed(program, step.name, operand)


def _renamed(program: Program, old: str, new: str) -> Program:
    """Uses of one value as uses of another."""
    steps = tuple(
        replace(s, operands=tuple(new if o == old else o for o in s.operands))
        for s in program.steps
        if s.name != old
    )
    outputs = tuple(new if o == old else o for o in program.outputs)
    computed = {s.name for s in steps}
    return replace(program, steps=steps, outputs=tuple(o for o in outputs if o in computed))


def _plainer(program: Program) -> Iterator[Program]:
    """A plain function of a step's first operand in its place."""
    for k, step in enumerate(program.steps):
        if FORMS[step.form].is_loss:
            continue
        axis = step.attributes.get("axis", -1)
        keepdims = step.attributes.get("keepdims", False)
        for name in PLAIN:
            given = {"axis": axis, "keepdims": keepdims}
            fields = FORMS[name].fields
            attributes = {n: v for n, v in given.items() if n in fields}
            yield _with_step(program, k, Step(step.name, name, step.operands[:1], attributes))


def _with_step(program: Program, k: int, step: Step) -> Program:
    return replace(program, steps=(*program.steps[:k], step, *program.steps[k + 1 :]))


# Sizes


def _sizes(program: Program) -> Iterator[Program]:
    """One size everywhere as a smaller one; then one axis of one input alone."""
    present = sorted({n for i in program.inputs for n in i.shape if n > 1}, reverse=True)
    for old in present:
        for new in _less_than(old):
            yield _resized(program, old, new)
    for k, given in enumerate(program.inputs):
        for axis, old in enumerate(given.shape):
            for new in _less_than(old):
                shape = (*given.shape[:axis], new, *given.shape[axis + 1 :])
                yield _with_input(program, k, replace(given, shape=shape))


def _less_than(size: int) -> list[int]:
    return sorted({n for n in (1, 2, 3, 4, 8, 16, 17, size // 2, size - 1) if 0 < n < size})


def _resized(program: Program, old: int, new: int) -> Program:
    """A size everywhere: in shapes, in attributes that are sizes, and in the range of indices."""

    def swapped(value: Literal) -> Literal:
        if isinstance(value, tuple):
            return tuple(map(swapped, value))
        is_size = isinstance(value, int) and not isinstance(value, bool) and value == old
        return new if is_size else value

    inputs = tuple(
        replace(
            i,
            shape=tuple(new if n == old else n for n in i.shape),
            values=replace(i.values, high=new) if _is_range(i, old) else i.values,
        )
        for i in program.inputs
    )
    steps = tuple(
        replace(
            s,
            attributes={n: v if n in AXES else swapped(v) for n, v in s.attributes.items()},
        )
        for s in program.steps
    )
    return replace(program, inputs=inputs, steps=steps)


def _is_range(given: Input, size: int) -> bool:
    return given.values.kind == "integers" and given.values.high == size


def _with_input(program: Program, k: int, given: Input) -> Program:
    return replace(program, inputs=(*program.inputs[:k], given, *program.inputs[k + 1 :]))


# What is left


def _simpler_attributes(program: Program) -> Iterator[Program]:
    for k, step in enumerate(program.steps):
        for name, value in step.attributes.items():
            for simpler in _simpler(value):
                attributes = {**step.attributes, name: simpler}
                yield _with_step(program, k, replace(step, attributes=attributes))


def _simpler(value: Literal) -> Iterator[Literal]:
    if value is True:
        yield False
    if isinstance(value, tuple) and len(value) > 1:
        yield from ((part,) for part in value)
    if isinstance(value, str) and value.startswith("td."):
        yield "td.sum"
        yield "td.max"


def _simpler_inputs(program: Program) -> Iterator[Program]:
    plain = tuple(replace(i, dtype="float32") if i.is_float else i for i in program.inputs)
    yield replace(program, inputs=plain)
    for k, given in enumerate(program.inputs):
        for other in program.inputs[:k]:
            if (other.shape, other.dtype) == (given.shape, given.dtype):
                yield _renamed(program, given.name, other.name)
        if given.is_float and given.values != NORMAL:
            yield _with_input(program, k, replace(given, values=NORMAL))
        if given.is_parameter:
            yield _with_input(program, k, replace(given, is_parameter=False))


def _simpler_runs(program: Program) -> Iterator[Program]:
    for threads in program.threads:
        yield replace(program, threads=(threads,))
    yield replace(program, threads=(1,))
    yield replace(program, target=NATIVE)
    yield replace(program, seed=0)
    training = program.training
    if training is not None:
        for updates in range(1, training.updates):
            yield replace(program, training=replace(training, updates=updates))
        yield replace(program, training=replace(training, optimizer="optim.sgd(0.1)"))
        yield replace(program, training=replace(training, clip_norm=None))
        yield replace(program, training=replace(training, precision="float32"))
