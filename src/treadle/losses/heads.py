"""Losses of hidden states through a head, without the head's outputs in memory."""

from __future__ import annotations

from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.coerce import as_tensor, common_dtype
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.activations import linear_cross_entropy_rows
from treadle.frontend.functions.indexing import take
from treadle.frontend.mean import Mean
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.classification import class_indices, class_weights, masked

NAME = "linear_cross_entropy"


@takes_dim
def linear_cross_entropy(
    input: Operand,
    linear_weight: Operand,
    target: Operand,
    *,
    linear_bias: Operand | None = None,
    weight: Operand | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | Mean:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target)`, the logits never stored.

    The input is (…, D), `linear_weight` (classes, D), the target one class index per row. `weight`
    has one entry per class and excludes smoothing. With gradients, a loss that is a sum or mean of
    rows costs one pass; one that is not (its square, say) computes the logits twice.

    Shapes: input (…, D), linear_weight (classes, D), target (…) → (), or (…) for "none".
    """
    x, head, bias = _operands(input, linear_weight, linear_bias)
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(NAME, f"label_smoothing = {label_smoothing}", "It is 0 to 1.")
    classes, y = head.shape[0], as_tensor(target)
    if y.shape != x.shape[:-1]:
        raise ShapeError(
            NAME,
            f"targets are {y.type} for an input {x.type}",
            "Targets are one class index for each row of the input.",
        )
    index, kept = class_indices(NAME, x.shape[:-1], classes, y, ignore_index)
    rows = linear_cross_entropy_rows(x, head, index, bias, label_smoothing)
    if weight is None:
        return masked(NAME, rows, kept, None, reduction)
    if label_smoothing:
        raise ArgumentError(
            NAME,
            f"a weight for each class and label_smoothing = {label_smoothing}",
            "Leave one of them out, or use cross_entropy(linear(…)), which takes both.",
        )
    own = take(class_weights(NAME, weight, classes, rows.dtype), index)
    return masked(NAME, rows * own, kept, own, reduction)


def _operands(
    input: Operand, weight: Operand, bias: Operand | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if input is None or weight is None:
        raise ArgumentError(NAME, "the input or the weight is None", "Both are tensors.")
    given = [as_tensor(t) for t in (input, weight, bias) if t is not None]
    dtype = common_dtype(given)
    x, head, *rest = (cast_to(t, dtype) for t in given)
    if not dtype.is_float:
        raise DTypeError(NAME, f"the input is {x.type}, the weight {head.type}", "Cast to floats.")
    if x.ndim == 0 or head.ndim != 2 or x.shape[-1] != head.shape[1]:
        raise ShapeError(
            NAME,
            f"the input is {x.type}, the weight {head.type}",
            "The weight is (classes, features), the input (…, features).",
        )
    if rest and rest[0].shape != head.shape[:1]:
        raise ShapeError(
            NAME,
            f"the bias is {rest[0].type} for a weight {head.type}",
            "It has one entry for each class.",
        )
    return x, head, rest[0] if rest else None
