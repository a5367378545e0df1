"""Losses between distributions and classes."""

from __future__ import annotations

from fractions import Fraction

from treadle.base.dtypes import DType, float16, int32, promote
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.activations import (
    cross_entropy_rows,
    log_sigmoid,
    log_softmax,
)
from treadle.frontend.functions.arithmetic import exp, log, maximum, ne, stop_gradient, where
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import axis_of, moveaxis, squeeze, unsqueeze
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.reduction import fitting, pair, reduced, weighted


def cross_entropy(
    input: Operand,
    target: Operand,
    weight: Operand | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    axis: int | None = None,
) -> Tensor | Mean:
    """−log softmax(input) at the target: class indices (N, …), or probabilities of input's shape.

    Classes lie along axis 1 as in PyTorch (axis 0 of a vector); `axis=-1` takes the last. `weight`
    has one entry per class. Targets equal to `ignore_index` count for nothing.

    Shapes: input (N, classes, …), target (N, …) or the input's shape → (), or (N, …) for "none".
    """
    logits, classes, axis = _classes_last("cross_entropy", input, axis)
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(
            "cross_entropy", f"label_smoothing = {label_smoothing}", "It is 0 to 1."
        )
    y = as_tensor(target)
    if y.dtype.is_float:
        if ignore_index >= 0:
            raise ArgumentError(
                "cross_entropy",
                f"ignore_index = {ignore_index} with probabilities {y.type}",
                "It is for class indices; rows of zeros count for nothing in a sum.",
            )
        return _dense(logits, y, axis, weight, reduction, label_smoothing)
    index, kept = class_indices("cross_entropy", logits.shape[:-1], classes, y, ignore_index)
    if weight is None:
        rows = cross_entropy_rows(logits, index, label_smoothing)
        return masked("cross_entropy", rows, kept, None, reduction)
    scale = class_weights("cross_entropy", weight, classes, logits.dtype)
    log_p = log_softmax(logits, -1)
    own = take(scale, index)
    smoothing = Fraction(label_smoothing)
    chosen = squeeze(take_along_axis(log_p, unsqueeze(index, -1), -1), -1)
    rows = -(chosen * own) * (1 - smoothing)
    if smoothing:
        rows = rows - sum_of(log_p * scale, -1) * (smoothing / classes)
    return masked("cross_entropy", rows, kept, own, reduction)


def nll(
    input: Operand,
    target: Operand,
    weight: Operand | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    axis: int | None = None,
) -> Tensor | Mean:
    """−input at the target: the loss of log-probabilities. Arguments as in `cross_entropy`.

    Shapes: input (N, classes, …), target (N, …) → (), or (N, …) for "none".
    """
    log_p, classes, _ = _classes_last("nll", input, axis)
    index, kept = class_indices("nll", log_p.shape[:-1], classes, as_tensor(target), ignore_index)
    rows = -squeeze(take_along_axis(log_p, unsqueeze(index, -1), -1), -1)
    if weight is None:
        return masked("nll", rows, kept, None, reduction)
    own = take(class_weights("nll", weight, classes, log_p.dtype), index)
    return masked("nll", rows * own, kept, own, reduction)


def _classes_last(name: str, input: Operand, axis: int | None) -> tuple[Tensor, int, int]:
    x = as_tensor(input)
    if not x.dtype.is_float or x.ndim == 0:
        raise DTypeError(
            name, f"the input is {x.type}", "It is a float tensor with an axis of classes."
        )
    at = axis_of(name, min(1, x.ndim - 1) if axis is None else axis, x)
    moved = moveaxis(x, at, -1)
    return moved, moved.shape[-1], at


def class_indices(
    name: str, rows: tuple[int, ...], classes: int, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Class indices, 0 for those that are ignored, and which are not."""
    if not target.dtype.is_integer:
        raise DTypeError(
            name, f"targets {target.type} are not class indices", "Cast them to int32."
        )
    if target.shape != rows:
        raise ShapeError(
            name,
            f"targets are {target.type} for rows {rows} of {classes} classes",
            "Targets are one class index per row, or probabilities of the input's shape. "
            "Classes lie along axis 1; axis=-1 takes the last.",
        )
    # Labels are often uint8, which does not hold −100.
    index = cast_to(target, promote(target.dtype, int32))
    kept = ne(index, ignore_index)
    return where(kept, index, 0), kept


def class_weights(name: str, weight: Operand, classes: int, dtype: DType) -> Tensor:
    scale = cast_to(as_tensor(weight), dtype)
    if scale.shape != (classes,):
        raise ShapeError(
            name, f"the weight is {scale.type}", f"It has one entry for each of {classes} classes."
        )
    return scale


def masked(
    name: str, rows: Tensor, kept: Tensor, own: Tensor | None, reduction: str
) -> Tensor | Mean:
    values = where(kept, rows, 0)
    amount = cast_to(kept, rows.dtype) if own is None else where(kept, own, 0)
    return reduced(name, values, reduction, sum_of(amount))


def _dense(
    logits: Tensor,
    target: Tensor,
    axis: int,
    weight: Operand | None,
    reduction: str,
    smoothing: float,
) -> Tensor | Mean:
    """Targets are probabilities; the mean is over rows, whatever the class weights."""
    moved = moveaxis(target, axis, -1) if target.ndim == logits.ndim else target
    if moved.shape != logits.shape:
        raise ShapeError(
            "cross_entropy",
            f"targets {target.type} are floats, so probabilities, for rows {logits.shape[:-1]} of "
            f"{logits.shape[-1]} classes",
            "Probabilities have the input's shape; class indices are integers.",
        )
    probabilities = cast_to(moved, logits.dtype)
    classes, part = logits.shape[-1], Fraction(smoothing)
    if part:
        probabilities = probabilities * (1 - part) + part / classes
    terms = log_softmax(logits, -1) * probabilities
    if weight is not None:
        terms = terms * class_weights("cross_entropy", weight, classes, logits.dtype)
    return reduced("cross_entropy", -sum_of(terms, -1), reduction)


def bce(
    input: Operand, target: Operand, weight: Operand | None = None, reduction: str = "mean"
) -> Tensor | Mean:
    """−y log x − (1 − y) log(1 − x) of probabilities; logarithms are kept above −100.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("bce", input, target)
    least = 2.0**-14 if x.dtype is float16 else 1e-12  # float16 has no smaller normal number
    is_inner = x * (1 - x) >= least
    inner = where(is_inner, x, 0.5)
    inner_values = -(y * log(inner) + (1 - y) * log(1 - inner))
    # Logarithms have no slope at 0; PyTorch's is (x − y) / max(x (1 − x), 1e-12), and its second
    # derivative is (x² − 2 x y + y) / ((x + 1e-12) (1 − x + 1e-12))².
    fixed = stop_gradient(x)
    log_x, log_rest = maximum(log(fixed), -100.0), maximum(log(1 - fixed), -100.0)
    moved = x - fixed  # 0 with the slope 1
    scaled = moved / ((fixed + least) * (1 - fixed + least))
    change = moved * ((fixed - y) / least) + scaled * scaled * (
        (fixed * fixed - 2 * fixed * y + y) * 0.5
    )
    edge_values = change - (y * log_x + (1 - y) * log_rest)
    values = where(is_inner, inner_values, edge_values)
    return reduced("bce", weighted("bce", values, weight), reduction)


def bce_with_logits(
    input: Operand,
    target: Operand,
    weight: Operand | None = None,
    reduction: str = "mean",
    pos_weight: Operand | None = None,
) -> Tensor | Mean:
    """`bce` of sigmoid(input), without overflow; `pos_weight` weighs the positive part.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("bce_with_logits", input, target)
    lost = -log_sigmoid(x)
    if pos_weight is not None:
        scale = fitting("bce_with_logits", "pos_weight", pos_weight, x)
        lost = lost * (1 + (scale - 1) * y)
    values = (1 - y) * x + lost
    return reduced("bce_with_logits", weighted("bce_with_logits", values, weight), reduction)


def kl_div(
    input: Operand, target: Operand, reduction: str = "mean", log_target: bool = False
) -> Tensor | Mean:
    """target · (log target − input), the input being log-probabilities; 0 where the target is 0.

    "mean" is over all elements as in PyTorch; "batchmean" over the first axis.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("kl_div", input, target)
    if log_target:
        values = exp(y) * (y - x)
    else:
        is_zero = y == 0
        values = where(is_zero, 0, y * log(where(is_zero, 1, y))) - y * x
    if reduction == "batchmean":
        if x.ndim == 0:
            raise ShapeError("kl_div", f'"batchmean" of {x.type}', "It needs a batch axis.")
        return reduced("kl_div", values, "mean", x.shape[0])
    return reduced("kl_div", values, reduction)
