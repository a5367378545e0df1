"""Networks for rows of numbers: what the estimators of scikit-learn's kind are made of.

Nothing here knows scikit-learn. A program is compiled once for each network and size of batches,
and is lent to whoever fits or predicts with such a one: seeds and rates are values of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from treadle import losses, nn, optim
from treadle.base.dtypes import int32
from treadle.base.errors import ArgumentError, NotFiniteError
from treadle.base.numbers import PROBABILITY, RATE, check_number, check_whole
from treadle.base.trees import Tree
from treadle.data.loaders import ArrayLoader
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Tensor
from treadle.ir.types import Spec
from treadle.nn.module import Module
from treadle.optim.optimizer import Optimizer
from treadle.step.compile import compile_step
from treadle.step.forward import Forward
from treadle.step.loading import model_values
from treadle.step.native_runs import MOST_IN_A_CALL
from treadle.step.train_step import TrainStep

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "elu": nn.ELU}
LOSSES: dict[str, Callable[..., Any]] = {
    "squared_error": losses.mse,
    "absolute_error": losses.l1,
    "huber": losses.huber,
}
PREDICTED = 256  # rows of a forward program: one size, so that a row's result depends on it alone
SMALLEST = 64  # rows of the least program: a batch size beyond the data is cut to a power of two
MOST_IDLE = 24  # programs that wait to be lent again
FIRST_RATE = 1e-3  # what a step is compiled with; the rate is set before it is used
State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Network:
    """What is compiled: everything that is a constant of the program."""

    module: Callable[[int, int], Module] | None
    hidden: tuple[int, ...]
    activation: str
    dropout: float
    optimizer: str | Callable[[float], Optimizer]
    loss: str  # "classes", or one of LOSSES
    inputs: int
    outputs: int
    rows: int
    device: str
    rate: float | None = None  # where the optimizer is a function of it

    def build(self) -> Module:
        """The module: the caller's, or layers with an activation between them."""
        if self.module is not None:
            made = self.module(self.inputs, self.outputs)
            if not isinstance(made, Module):
                cause = f"module gives a {type(made).__name__}"
                raise ArgumentError("fit", cause, "It is a function (inputs, outputs) → nn.Module.")
            return made
        sizes = [self.inputs, *self.hidden]
        layers: list[Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), ACTIVATIONS[self.activation]()]
            layers += [nn.Dropout(self.dropout)] if self.dropout else []
        return nn.Sequential(*layers, nn.Linear(sizes[-1], self.outputs))

    def make_optimizer(self) -> Optimizer:
        if not isinstance(self.optimizer, str):
            return self.optimizer(FIRST_RATE if self.rate is None else self.rate)
        found = getattr(optim, self.optimizer, None)
        if not callable(found):
            cause = f"optimizer = {self.optimizer!r}"
            raise ArgumentError("fit", cause, 'A name in td.optim such as "adamw", or a function.')
        return found(FIRST_RATE)

    def error(self, model: Any, batch: dict[str, Tensor]) -> Mean:
        """The mean over rows by their weights; rows that fill a batch have none."""
        out, weight = model(batch["x"]), batch["w"]
        if self.loss == "classes":
            each = losses.cross_entropy(out, batch["y"], reduction="none")
            return Mean((each * weight).sum(), weight.sum())
        each = LOSSES[self.loss](out, batch["y"], reduction="none")  # (rows, outputs)
        return Mean((each.mean(-1) * weight).sum(), weight.sum())

    def specs(self) -> dict[str, Spec]:
        is_classes = self.loss == "classes"
        y = Spec((self.rows,), int32) if is_classes else Spec((self.rows, self.outputs))
        return {"x": Spec((self.rows, self.inputs)), "y": y, "w": Spec((self.rows,))}


def check_network(network: Network) -> None:
    """What a user can get wrong, before anything is compiled."""
    for size in network.hidden:
        check_whole("fit", "hidden", size)
    check_number("fit", "dropout", network.dropout, PROBABILITY)
    if network.activation not in ACTIVATIONS:
        cause = f"activation = {network.activation!r}"
        raise ArgumentError("fit", cause, f"One of {', '.join(ACTIVATIONS)}, or pass module=.")


@dataclass(frozen=True)
class Start:
    """What training begins with: a seed alone, values from before, or all that a step had."""

    state: State | None = None
    whole: bool = False  # the optimizer's state and the counters too


FRESH = Start()


class Program:
    """A compiled step of a network, and the forward that predicts with its values."""

    def __init__(self, network: Network):
        self.network = network
        self.step: TrainStep = compile_step(
            network.build(),
            network.error,
            network.make_optimizer(),
            network.specs(),
            device=network.device,
        )
        self._forward: Forward | None = None
        self._held: State | None = None  # what was loaded last, where nothing was trained since

    def begin(self, seed: int, numbers: Mapping[str, float], start: Start = FRESH) -> None:
        """Values to start with, and the optimizer's numbers."""
        self._held = None
        self.step.reset(seed)
        if start.state is not None and start.whole:
            self.step.load_state_dict(start.state)
        elif start.state is not None:
            self.step.load_params(model_values(start.state))
        for name, value in numbers.items():
            if name == "lr":
                self.step.learning_rate = check_number("fit", "lr", value, RATE)
            else:
                self.step.hyperparameters[name] = value

    def run_epoch(self, loader: ArrayLoader) -> np.ndarray:
        """The losses of a pass; as many batches are made at a time as a native call takes."""
        batches, found = iter(loader), []
        while some := list(islice(batches, MOST_IN_A_CALL)):
            found.append(self.step.run(some).losses)
        return np.concatenate(found)

    def check_finite(self, losses: np.ndarray) -> None:
        """An error where training has diverged."""
        names = self.step.not_finite()
        if names or not np.isfinite(losses).all():
            raise NotFiniteError(
                "fit",
                f"training diverged: {', '.join(names[:4]) or 'the loss'} is not finite",
                "Use a lower lr, or standardise=True.",
                step=self.step.position[0],
                names=names,
            )

    def outputs(self, state: State, rows: np.ndarray) -> np.ndarray:
        """What the network gives for rows (n, inputs): (n, outputs) in float64."""
        if self._held is not state:
            self._held = None
            self.step.load_state_dict(state)
            self._held = state
        if self._forward is None:
            spec = Spec((PREDICTED, self.network.inputs))
            self._forward = self.step.attach(lambda model, x: model(x), spec)
        found = np.empty((len(rows), self.network.outputs))
        for start in range(0, len(rows), PREDICTED):
            part = rows[start : start + PREDICTED]
            given = np.zeros((PREDICTED, self.network.inputs), np.float32)
            given[: len(part)] = part
            found[start : start + PREDICTED] = self._forward(given)[: len(part)]
        return found


class Programs:
    """Programs that wait to be lent: one fit or prediction has one at a time."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, Program] = OrderedDict()  # the longest idle first
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, network: Network) -> Iterator[Program]:
        """A program of this network, from before or compiled now."""
        with self._lock:
            keys = [key for key, program in self._idle.items() if program.network == network]
            found = self._idle.pop(keys[-1]) if keys else None
        program = Program(network) if found is None else found
        yield program  # one that was left by an error is not lent again
        with self._lock:
            self._idle[id(program)] = program
            while len(self._idle) > MOST_IDLE:
                self._idle.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


PROGRAMS = Programs()


@dataclass(frozen=True)
class Scaling:
    """A shift and a scale for each column."""

    mean: np.ndarray
    scale: np.ndarray

    @staticmethod
    def of(columns: np.ndarray, weights: np.ndarray | None) -> Scaling:
        """Those that make columns (n, k) of mean 0 and variance 1, constant ones 0; or none."""
        if weights is None:
            return Scaling(np.zeros(columns.shape[1]), np.ones(columns.shape[1]))
        wide = columns.astype(np.float64, copy=False)
        mean = np.average(wide, axis=0, weights=weights)
        spread = np.sqrt(np.average((wide - mean) ** 2, axis=0, weights=weights))
        # What is constant but for rounding stays as it is.
        is_constant = spread <= 1e-12 * np.abs(mean)
        return Scaling(mean, np.where(is_constant, 1.0, spread))

    def applied(self, columns: np.ndarray) -> np.ndarray:
        """Columns as float32."""
        with np.errstate(over="ignore", invalid="ignore"):
            found = ((columns - self.mean) / self.scale).astype(np.float32)
        if not np.isfinite(found).all():
            row, column = np.argwhere(~np.isfinite(found))[0]
            cause = f"{columns[row, column]} in row {row}, column {column} is beyond float32"
            raise ArgumentError("scale", cause, "Scale the column first, or standardise=True.")
        return found

    def undone(self, columns: np.ndarray) -> np.ndarray:
        return columns * self.scale + self.mean


class Rows:
    """Rows of a table as batches of one size: the last is filled with rows of no weight."""

    def __init__(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray, size: int):
        self._arrays = {"x": x, "y": y, "w": weights}
        self._size = size

    def __len__(self) -> int:
        return len(self._arrays["x"])

    def gather(self, indices: np.ndarray) -> Tree:
        found = {}
        for name, array in self._arrays.items():
            found[name] = np.zeros((self._size, *array.shape[1:]), array.dtype)
            found[name][: len(indices)] = array[indices]
        return found

    def loader(self, seed: int | None) -> ArrayLoader:
        """Batches in an order of the seed, or in that of the rows."""
        return ArrayLoader(
            self, self._size, shuffle=seed is not None, seed=seed or 0, drop_last=False
        )


def batch_rows(batch_size: int, rows: int) -> int:
    """The rows of a program: the batch size, or a power of two where the data has fewer."""
    return min(batch_size, max(SMALLEST, 1 << max(rows - 1, 1).bit_length()))


def distinct_rows(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that are there once, in an order that depends on what they hold, and their weights.

    Equal rows become one with the sum of their weights, and rows without weight go: so a row that
    is there k times is the same as one of weight k, to the last bit.
    """
    is_there = weights > 0
    if not is_there.any():
        raise ArgumentError("fit", "every row has weight 0", "Nothing is left to learn from.")
    x, y, weights = x[is_there], y[is_there], weights[is_there]
    order = np.argsort(_hashes(x, y), kind="stable")
    x, y, weights = x[order], y[order], weights[order]
    flat = y.reshape(len(y), -1)
    is_new = (x[1:] != x[:-1]).any(1) | (flat[1:] != flat[:-1]).any(1)
    starts = np.flatnonzero(np.concatenate([[True], is_new]))
    return x[starts], y[starts], np.add.reduceat(weights, starts)


def _hashes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """64 bits of each row; those that collide are compared afterwards."""
    columns = np.concatenate([x, y.reshape(len(y), -1)], axis=1, dtype=np.float64)
    bits = np.ascontiguousarray(columns + 0.0).view(np.uint64)  # −0 becomes 0
    mixed = bits ^ (bits >> np.uint64(29))
    odd = np.random.Philox(key=20).random_raw(columns.shape[1]) | np.uint64(1)
    with np.errstate(over="ignore"):
        found = (mixed * odd).sum(axis=1, dtype=np.uint64)
    return found ^ (found >> np.uint64(32))


def epoch_means(found: np.ndarray, steps: int) -> list[float]:
    """The mean loss of each epoch of so many steps."""
    parts = np.split(found, range(steps, len(found), steps))
    return [float(part.mean(dtype=np.float64)) for part in parts]
