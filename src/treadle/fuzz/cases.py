"""A program ready to run: on a device, and over a domain of the oracle's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

import treadle as td
from treadle.base import dtypes, trees
from treadle.domains.domain import evaluate
from treadle.domains.float64 import Float64, lift
from treadle.domains.philox import make_key
from treadle.frontend.scopes import RANDOM_STATE
from treadle.fuzz.program import FORWARD, GRADIENT, TRAINING, Program
from treadle.fuzz.source import NAMESPACE, defined
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.runtime.session import select
from treadle.verify.bounds import over

Arrays = list[np.ndarray]
Batch = dict[str, np.ndarray]


class Case(Protocol):
    """What is compared: arrays in a fixed order."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def types(self) -> Sequence[TensorType]: ...

    def exact(self, domain: Float64) -> Sequence[np.ndarray]:
        """What the program gives over a domain."""
        ...

    def on(self, device: str, threads: int) -> tuple[Arrays, Arrays]:
        """What it gives on a device: the first time, and once more."""
        ...


def prepared(program: Program) -> Case:
    return TrainingCase(program) if program.mode == TRAINING else FunctionCase(program)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Programs that are loaded inside use so many threads."""
    before = os.environ.get("TREADLE_THREADS")
    os.environ["TREADLE_THREADS"] = str(count)
    try:
        yield
    finally:
        del os.environ["TREADLE_THREADS"]
        if before is not None:
            os.environ["TREADLE_THREADS"] = before


class FunctionCase:
    """A function or its gradient."""

    def __init__(self, program: Program):
        self.program, self.function = program, defined(program)
        rng = np.random.default_rng(program.seed)
        self.arguments = list(program.arrays(rng).values())
        if program.mode == GRADIENT:
            self.arguments += self._weights(rng)
        oracle = td.compile(self.function, *self.arguments, device="oracle")
        self.graph = oracle.graph
        self.types = self.graph.output_types
        self.names = [o.name for o in self.graph.outputs]

    def exact(self, domain: Float64) -> Sequence[np.ndarray]:
        named = {f"batch:{k}": array for k, array in enumerate(self.arguments)}
        return over(self.graph, named)(domain)

    def _weights(self, rng: np.random.Generator) -> Arrays:
        """A random weight for each element of each float output."""
        function = defined(replace(self.program, mode=FORWARD))
        outputs = td.trace(function, *self.arguments).output_types
        return [rng.normal(size=t.shape).astype(np.float32) for t in outputs if t.is_float]

    def on(self, device: str, threads: int) -> tuple[Arrays, Arrays]:
        with threads_of(threads):
            compiled = td.compile(
                self.function,
                *self.arguments,
                device=device,
                options=td.CompileOptions(target=self.program.target),
            )
            return self._call(compiled), self._call(compiled)

    def _call(self, compiled: td.Program) -> Arrays:
        return [np.array(x) for x in trees.flatten(compiled(*self.arguments))[0]]


class TrainingCase:
    """A few updates of a model: the loss of each, and the parameters and states at the end."""

    def __init__(self, program: Program):
        training = program.training
        assert training is not None
        self.program, self.training, self.model = program, training, defined(program)
        rng = np.random.default_rng(program.seed)
        self.batches = [program.arrays(rng) for _ in range(training.updates)]
        oracle = self.compiled("oracle")
        self.values = oracle.session.read(oracle.session.types)
        self.graph = select(oracle.graph, {OutputKind.UPDATE}, ["loss"])
        params = oracle.params
        losses = [f"loss {k}" for k in range(training.updates)]
        self.names = [*losses, *params]
        scalar = TensorType((), dtypes.float32)
        self.types = [scalar for _ in losses] + [oracle.session.types[n] for n in params]

    def compiled(self, device: str) -> td.TrainStep:
        """The step, not yet called."""
        training = self.training
        return td.compile_step(
            self.model(),
            lambda model, batch: model(**batch),
            eval(training.optimizer, dict(NAMESPACE)),
            self.batches[0],
            device=device,
            clip_norm=training.clip_norm,
            precision=training.precision,
            options=td.CompileOptions(target=self.program.target),
        )

    def exact(self, domain: Float64) -> Sequence[np.ndarray]:
        """Updates one after the other: what one gives, the next one starts from."""
        leaves = {n: self.graph.nodes[i].types[0] for n, i in self.graph.leaves.items()}
        # Values as they are held on a device, so that only the arithmetic differs.
        values = {n: _held(a, leaves[n]) if n in leaves else a for n, a in self.values.items()}
        losses = []
        for count, batch in enumerate(self.batches):
            given = {f"batch:{name}": array for name, array in batch.items()}
            given[RANDOM_STATE] = make_key(0, count)
            inputs = {n: lift(given.get(n, values.get(n)), t) for n, t in leaves.items()}
            losses.append(_advance(self.graph, inputs, values, domain))
        return [*losses, *(values[n] for n in self.names[len(losses) :])]

    def on(self, device: str, threads: int) -> tuple[Arrays, Arrays]:
        with threads_of(threads):
            step = self.compiled(device)
            first = self._trained(step)
            step.reset()
            return first, self._trained(step)

    def _trained(self, step: td.TrainStep) -> Arrays:
        losses = [np.array(step(batch).loss, np.float32) for batch in self.batches]
        return [*losses, *step.params.values()]


def _held(array: np.ndarray, type_: TensorType) -> np.ndarray:
    return lift(array.astype(type_.dtype.numpy), type_)


def _advance(graph: Graph, inputs: Batch, values: Batch, domain: Float64) -> np.ndarray:
    """One update of the values; its loss."""
    outputs = zip(graph.outputs, evaluate(graph, inputs, domain), strict=True)
    loss = np.zeros(())
    for output, value in outputs:
        if output.kind is OutputKind.UPDATE:
            values[output.name] = value
        else:
            loss = value
    return loss
