"""What a sample is: attributes and operands of one use of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from treadle.base import dtypes
from treadle.domains.philox import make_key
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind
from treadle.ir.op import Attributes, Op, RuleTable
from treadle.ir.ops import indexing, leaves
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Draw:
    """How an operand's values are drawn: a type and a range. Floats are distinct and well apart."""

    type: TensorType
    low: float = -2.0
    high: float = 2.0

    def values(self, rng: np.random.Generator) -> np.ndarray:
        """Values in the range, at least a step apart from each other and from whole numbers."""
        size, shape = self.type.size, self.type.shape
        if self.type == indexing.KEY_TYPE:
            return make_key(int(rng.integers(2**32)))
        if not self.type.is_float:
            drawn = rng.integers(int(self.low), int(self.high) + 1, shape)
            return drawn.astype(self.type.dtype.numpy)
        places = (rng.permutation(size) + 0.5 + rng.uniform(-0.2, 0.2, size)) / max(size, 1)
        return (self.low + (self.high - self.low) * places).reshape(shape)


@dataclass(frozen=True, slots=True)
class Sample:
    """One use of an op."""

    attributes: Attributes
    operands: tuple[Draw, ...]

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {str(i): d.values(rng) for i, d in enumerate(self.operands)}


Samples = Iterable[Sample]
SAMPLES: RuleTable[Callable[[], Samples]] = RuleTable("samples")


def sample_graph(op: Op, sample: Sample) -> Graph:
    """A graph of the op alone: inputs "0", "1", … and all its results."""
    builder = GraphBuilder()
    inputs = [
        builder.add(leaves.INPUT, leaves.Leaf(str(i), d.type), ())[0]
        for i, d in enumerate(sample.operands)
    ]
    values = builder.add(op, sample.attributes, inputs)
    results = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values)]
    return builder.build(results, op.name)


SHAPES = ((3, 4), (), (1,), (0, 3), (2, 3, 5), (7,))


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Draw:
    return Draw(TensorType(shape), low, high)


def integer(*shape: int, low: int = -9, high: int = 9) -> Draw:
    return Draw(TensorType(shape, dtypes.int32), low, high)


def flag(*shape: int) -> Draw:
    return Draw(TensorType(shape, dtypes.bool_), 0, 1)
