"""Rows of the composites: named functions of primitives. The definition is the meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.contract import Contract, DefinitionError, Exact
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, NoAttributes, Op, Precision, RuleTable, Types, declare
from treadle.ir.types import TensorType

Ints = tuple[int, ...]

# Filled by frontend/definitions, where functions of tensors can be written.
DEFINITIONS: RuleTable[Callable[..., Graph]] = RuleTable("definition")


@lru_cache(maxsize=4096)
def definition_graph(op: Op, attributes: Attributes, operands: Types) -> Graph:
    """The composite's definition for these operands: inputs are the operands, in order."""
    entry = DEFINITIONS[op]
    return entry(attributes, *operands) if op.has_attributes else entry(*operands)


@dataclass(frozen=True, slots=True)
class Axis(Attributes):
    axis: int


@dataclass(frozen=True, slots=True)
class Axes(Attributes):
    axes: Ints


@dataclass(frozen=True, slots=True)
class Variance(Attributes):
    """Divides by n − `correction`, as torch.var."""

    axes: Ints
    correction: float = 1


@dataclass(frozen=True, slots=True)
class Norm(Attributes):
    """Over the last `dims` axes."""

    dims: int
    eps: float


@dataclass(frozen=True, slots=True)
class BatchNorm(Attributes):
    """Over all axes but the second."""

    eps: float


@dataclass(frozen=True, slots=True)
class GroupNorm(Attributes):
    """Over equal groups of the second axis, and all axes after it."""

    groups: int
    eps: float


@dataclass(frozen=True, slots=True)
class Gelu(Attributes):
    approximate: str = "none"  # or "tanh"


@dataclass(frozen=True, slots=True)
class Softplus(Attributes):
    beta: float = 1.0
    threshold: float = 20.0


@dataclass(frozen=True, slots=True)
class Attention(Attributes):
    """Queries (B, H, T, D), keys and values (B, G, S, ·), G dividing H; results: out, logsumexp.

    A bias, if there is one, is (B or 1, H or 1, T or 1, S or 1). `causal` lets position t see
    positions 0 … t.
    """

    scale: float
    causal: bool = False


@dataclass(frozen=True, slots=True)
class CrossEntropy(Attributes):
    """Per row, over the last axis; targets are indices."""

    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadCrossEntropy(Attributes):
    """Of a head's logits; `rounded` to the dtype of its operands, as a product's result is."""

    label_smoothing: float = 0.0
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Conv(Attributes):
    """x (N, C, …), w (O, C / groups, …), as torch.nn.functional.conv1d/2d/3d."""

    strides: Ints
    padding: tuple[tuple[int, int], ...]
    dilations: Ints
    groups: int = 1


@dataclass(frozen=True, slots=True)
class ConvGrad(Attributes):
    """The gradient of a convolution for one of its operands, which has a shape."""

    conv: Conv
    shape: Ints


@dataclass(frozen=True, slots=True)
class Pool(Attributes):
    """Over the last len(sizes) axes."""

    sizes: Ints
    strides: Ints
    padding: Ints
    dilations: Ints
    count_padding: bool = True


@dataclass(frozen=True, slots=True)
class OneHot(Attributes):
    classes: int
    dtype: DType = dtypes.float32


def _composite(
    name: str, attributes: type[Attributes], precision: Precision, contract: Contract
) -> Op:
    def infer(*arguments: Attributes | TensorType) -> Types:
        given = arguments[0] if isinstance(arguments[0], Attributes) else NoAttributes()
        operands = tuple(a for a in arguments if isinstance(a, TensorType))
        return definition_graph(op, given, operands).output_types

    op = declare(Op(name, attributes, infer, precision, contract, is_composite=True))
    return op


_SMOOTH = Contract(DefinitionError())
_NARROW, _FOLLOW, _WIDEN = Precision.NARROW, Precision.FOLLOW, Precision.WIDEN

RELU = _composite("relu", NoAttributes, _FOLLOW, Contract(Exact(), "NaN stays NaN", "0 at 0"))
SIGMOID = _composite("sigmoid", NoAttributes, _FOLLOW, _SMOOTH)
SILU = _composite("silu", NoAttributes, _FOLLOW, _SMOOTH)
GELU = _composite("gelu", Gelu, _FOLLOW, _SMOOTH)
SOFTPLUS = _composite(
    "softplus",
    Softplus,
    _WIDEN,
    Contract(DefinitionError(), "x where beta·x > threshold, as PyTorch", "1 beyond the threshold"),
)
MEAN = _composite("mean", Axes, _WIDEN, _SMOOTH)
VAR = _composite("var", Variance, _WIDEN, _SMOOTH)
SOFTMAX = _composite(
    "softmax", Axis, _WIDEN, Contract(DefinitionError(), "NaN where a row is all −∞")
)
LOG_SOFTMAX = _composite(
    "log_softmax", Axis, _WIDEN, Contract(DefinitionError(), "NaN where a row is all −∞")
)
LOGSUMEXP = _composite(
    "logsumexp", Axes, _WIDEN, Contract(DefinitionError(), "−∞ where all are −∞")
)
LAYER_NORM = _composite("layer_norm", Norm, _WIDEN, _SMOOTH)
RMS_NORM = _composite("rms_norm", Norm, _WIDEN, _SMOOTH)
BATCH_NORM = _composite("batch_norm", BatchNorm, Precision.FIRST, _SMOOTH)
GROUP_NORM = _composite("group_norm", GroupNorm, Precision.FIRST, _SMOOTH)
ATTENTION = _composite("attention", Attention, _NARROW, _SMOOTH)
ATTENTION_GRAD = _composite("attention_grad", Attention, _NARROW, _SMOOTH)
CROSS_ENTROPY = _composite(
    "cross_entropy", CrossEntropy, _WIDEN, Contract(DefinitionError(), "targets in 0 … classes − 1")
)
LINEAR_CROSS_ENTROPY = _composite(
    "linear_cross_entropy",
    HeadCrossEntropy,
    _NARROW,
    Contract(DefinitionError(), "targets in 0 … classes − 1"),
)
LINEAR_CROSS_ENTROPY_GRAD = _composite(
    "linear_cross_entropy_grad",
    HeadCrossEntropy,
    _NARROW,
    Contract(DefinitionError(), "targets in 0 … classes − 1"),
)
CONV = _composite("conv", Conv, _NARROW, _SMOOTH)
CONV_GRAD_X = _composite("conv_grad_x", ConvGrad, _NARROW, _SMOOTH)  # of ct and w
CONV_GRAD_W = _composite("conv_grad_w", ConvGrad, _NARROW, _SMOOTH)  # of ct and x
MAX_POOL = _composite(
    "max_pool", Pool, _FOLLOW, Contract(Exact(), "NaN wins", "to the first of equals")
)
AVG_POOL = _composite("avg_pool", Pool, _WIDEN, _SMOOTH)
ONE_HOT = _composite(
    "one_hot", OneHot, _FOLLOW, Contract(Exact(), "zeros outside the range", "zero everywhere")
)
EMBEDDING = _composite(
    "embedding",
    NoAttributes,
    _FOLLOW,
    Contract(Exact(), "0 ≤ index < rows, as gather", "linear in the table"),
)
