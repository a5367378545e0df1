"""A random program as data: what is printed, written to a corpus, run and made smaller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.kernel.machine import NATIVE

Literal = None | bool | int | float | str | tuple["Literal", ...]

FORWARD, GRADIENT, TRAINING = "forward", "gradient", "training"


@dataclass(frozen=True, slots=True)
class Values:
    """How an input is drawn: a method of NumPy's generators and its first two arguments."""

    kind: str  # normal, uniform or integers
    low: float  # the mean of normal
    high: float  # the standard deviation of normal; integers stay below it

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(getattr(rng, self.kind)(self.low, self.high, shape))


NORMAL = Values("normal", 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Input:
    """An argument of a function, an entry of a batch, or a parameter of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: Values = NORMAL
    is_parameter: bool = False

    @property
    def type(self) -> DType:
        return dtypes.BY_NAME[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.type.is_float


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a form of the catalogue: operands by name, attributes by name."""

    name: str
    form: str
    operands: tuple[str, ...]
    attributes: Mapping[str, Literal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Training:
    """How a program is trained whose output is a loss."""

    optimizer: str = "optim.sgd(0.1)"
    updates: int = 3
    clip_norm: float | None = None
    precision: str = "float32"


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in order; `threads` are run one after the other and must give the same bits."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    mode: str = FORWARD
    training: Training | None = None
    seed: int = 0
    threads: tuple[int, ...] = (1,)
    target: str = NATIVE

    @property
    def arguments(self) -> tuple[Input, ...]:
        """The inputs that are not parameters of a model."""
        return tuple(i for i in self.inputs if not i.is_parameter)

    def trimmed(self) -> Program:
        """Without steps and inputs that no output depends on."""
        needed = set(self.outputs)
        for step in reversed(self.steps):
            if step.name in needed:
                needed.update(step.operands)
        return replace(
            self,
            inputs=tuple(i for i in self.inputs if i.name in needed),
            steps=tuple(s for s in self.steps if s.name in needed),
        )

    def arrays(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Values for the arguments, in their dtypes, by name."""
        drawn = {i.name: i.values.draw(rng, i.shape) for i in self.arguments}
        return {i.name: drawn[i.name].astype(i.type.numpy) for i in self.arguments}


def to_json(program: Program) -> dict[str, Any]:
    return asdict(program)


def from_json(data: Mapping[str, Any]) -> Program:
    inputs = tuple(Input(**_tuples(i) | {"values": Values(**i["values"])}) for i in data["inputs"])
    steps = tuple(
        Step(**_tuples(s) | {"attributes": _tuples(s["attributes"])}) for s in data["steps"]
    )
    training = None if data["training"] is None else Training(**data["training"])
    rest = _tuples({k: data[k] for k in ("outputs", "mode", "seed", "threads", "target")})
    return Program(inputs=inputs, steps=steps, training=training, **rest)


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples, at any depth; dicts inside are left."""
    return {name: _tuple(value) for name, value in data.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, (list, tuple)) else value
