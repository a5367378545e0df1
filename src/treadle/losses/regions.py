"""Losses of regions: overlaps of masks and of boxes, and classes that are rare."""

from __future__ import annotations

from treadle.base.errors import ShapeError
from treadle.base.numbers import NOT_NEGATIVE, check_choice, check_number
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.activations import (
    cross_entropy_rows,
    relu,
    sigmoid,
    softmax,
)
from treadle.frontend.functions.arithmetic import abs, exp, maximum, minimum, pow, where
from treadle.frontend.functions.indexing import one_hot, take, take_along_axis
from treadle.frontend.functions.reductions import argsort, cumsum
from treadle.frontend.functions.reductions import mean as mean_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import concat, moveaxis, reshape, slice_along
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.classification import bce_with_logits, class_indices, class_weights, masked
from treadle.losses.reduction import pair, reduced

Loss = Tensor | Mean


def sigmoid_focal(
    input: Operand,
    target: Operand,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: str = "none",
) -> Loss:
    """Binary cross-entropy of logits, weighed by (1 − p)ᵞ; as torchvision, alpha < 0 is none.

    Shapes: two of one shape → that shape, or () for "mean" and "sum".
    """
    check_number("sigmoid_focal", "gamma", gamma, NOT_NEGATIVE)
    x, y = pair("sigmoid_focal", input, target)
    rows = bce_with_logits(x, y, reduction="none")
    p = sigmoid(x)
    missed = 1 - (p * y + (1 - p) * (1 - y))
    values = as_tensor(rows) * _power(missed, gamma)
    if alpha >= 0:
        values = values * (alpha * y + (1 - alpha) * (1 - y))
    return reduced("sigmoid_focal", values, reduction)


def focal(
    input: Operand,
    target: Operand,
    gamma: float = 2.0,
    weight: Operand | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Loss:
    """−(1 − p)ᵞ log p of the target's class; logits (N, classes, …), weights for each class.

    Shapes: (N, classes, …), (N, …) → (), or (N, …) for "none".
    """
    check_number("focal", "gamma", gamma, NOT_NEGATIVE)
    x = moveaxis(as_tensor(input), 1, -1)
    index, kept = class_indices("focal", x.shape[:-1], x.shape[-1], as_tensor(target), ignore_index)
    rows = cross_entropy_rows(x, index)
    values = rows * _power(1 - exp(-rows), gamma)
    if weight is None:
        return masked("focal", values, kept, None, reduction)
    own = take(class_weights("focal", weight, x.shape[-1], x.dtype), index)
    return masked("focal", values * own, kept, own, reduction)


def _power(x: Tensor, p: float) -> Tensor:
    """xᵖ for x ≥ 0; its slope at 0 is 0 where p is below 1."""
    if p in (0, 1, 2, 3, 4):
        return pow(x, int(p))
    is_zero = x <= 0
    return where(is_zero, 0, pow(where(is_zero, 1, x), p))


def poly(
    input: Operand,
    target: Operand,
    epsilon: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Loss:
    """Cross-entropy + epsilon · (1 − p): the first term of its series changed (Poly-1).

    Shapes: (N, classes, …), (N, …) → (), or (N, …) for "none".
    """
    x = moveaxis(as_tensor(input), 1, -1)
    index, kept = class_indices("poly", x.shape[:-1], x.shape[-1], as_tensor(target), ignore_index)
    rows = cross_entropy_rows(x, index)
    return masked("poly", rows + (1 - exp(-rows)) * epsilon, kept, None, reduction)


# Masks


def dice(input: Operand, target: Operand, smooth: float = 1.0, mode: str = "multiclass") -> Tensor:
    """1 − (2 Σ p y + smooth) / (Σ p + Σ y + smooth), per class over the batch, then the mean.

    Multiclass: logits (N, classes, …) and class indices (N, …). Binary: logits and targets of one
    shape.

    Shapes: (N, classes, …), (N, …) → (); binary: two of one shape → ().
    """
    check_number("dice", "smooth", smooth, NOT_NEGATIVE)
    return _index("dice", input, target, 0.5, 0.5, smooth / 2, mode)


def tversky(
    input: Operand,
    target: Operand,
    alpha: float = 0.5,
    beta: float = 0.5,
    smooth: float = 1.0,
    mode: str = "multiclass",
) -> Tensor:
    """1 − (TP + smooth) / (TP + alpha FP + beta FN + smooth), per class, then the mean.

    Shapes: (N, classes, …), (N, …) → (); binary: two of one shape → ().
    """
    return _index("tversky", input, target, alpha, beta, smooth, mode)


def _index(
    name: str,
    input: Operand,
    target: Operand,
    alpha: float,
    beta: float,
    smooth: float,
    mode: str,
) -> Tensor:
    """Tversky's index, taken from 1; Dice's is that of equal weights."""
    check_number(name, "smooth", smooth, NOT_NEGATIVE)
    p, y = _masks(name, input, target, mode)  # (classes, pixels)
    true = sum_of(p * y, 1)
    wrong, missed = sum_of(p * (1 - y), 1), sum_of((1 - p) * y, 1)
    return mean_of(1 - (true + smooth) / (true + wrong * alpha + missed * beta + smooth))


def _masks(name: str, input: Operand, target: Operand, mode: str) -> tuple[Tensor, Tensor]:
    """Probabilities and targets, a row for each class."""
    check_choice(name, "mode", mode, ("multiclass", "binary"))
    if mode == "binary":
        x, y = pair(name, input, target)
        return reshape(sigmoid(x), (1, -1)), reshape(y, (1, -1))
    x, index = as_tensor(input), as_tensor(target)
    if x.ndim < 2 or index.shape != (x.shape[0], *x.shape[2:]):
        raise ShapeError(
            name,
            f"logits {x.type}, targets {index.type}",
            "They are (N, classes, …) and class indices (N, …).",
        )
    classes = x.shape[1]
    rows = reshape(moveaxis(softmax(x, 1), 1, 0), (classes, -1))
    chosen = one_hot(reshape(index, (-1,)), classes, x.dtype)
    return rows, moveaxis(chosen, -1, 0)


def lovasz_hinge(input: Operand, target: Operand) -> Tensor:
    """The Lovász extension of the intersection over union of a binary mask, all pixels at once.

    Shapes: two of one shape → ().
    """
    x, y = pair("lovasz_hinge", input, target)
    flat, truth = reshape(x, (-1,)), reshape(y, (-1,))
    errors = 1 - flat * (truth * 2 - 1)
    order = argsort(errors, 0, descending=True)
    slopes = _jaccard_slopes(take(truth, order))
    return sum_of(relu(take(errors, order)) * slopes)


def lovasz_softmax(input: Operand, target: Operand, classes: str = "present") -> Tensor:
    """The Lovász extension of each class's intersection over union, averaged.

    Logits are (N, classes, …), targets class indices. "present" leaves out classes that no pixel
    has, "all" counts them.

    Shapes: (N, classes, …), (N, …) → ().
    """
    check_choice("lovasz_softmax", "classes", classes, ("present", "all"))
    p, y = _masks("lovasz_softmax", input, target, "multiclass")
    errors = abs(y - p)
    order = argsort(errors, 1, descending=True)
    slopes = _jaccard_slopes(take_along_axis(y, order, 1))
    values = sum_of(take_along_axis(errors, order, 1) * slopes, 1)
    if classes == "all":
        return mean_of(values)
    present = cast_to(sum_of(y, 1) > 0, values.dtype)
    return sum_of(values * present) / maximum(sum_of(present), 1)


def _jaccard_slopes(truth: Tensor) -> Tensor:
    """How much each pixel adds to 1 − IoU, pixels in order of their error."""
    axis = truth.ndim - 1
    total = sum_of(truth, axis, keepdims=True)
    inside = total - cumsum(truth, axis)
    union = total + cumsum(1 - truth, axis)
    lost = 1 - inside / union
    first = slice_along(lost, axis, 0, 1)
    count = lost.shape[axis]
    steps = slice_along(lost, axis, 1, count) - slice_along(lost, axis, 0, count - 1)
    return concat([first, steps], axis)


# Boxes


def box_iou(boxes1: Operand, boxes2: Operand) -> Tensor:
    """Intersection over union of boxes (…, 4) given as x₁, y₁, x₂, y₂, each with its own.

    Shapes: two of (…, 4) → (…).
    """
    return _overlap("box_iou", boxes1, boxes2)[0]


def giou(boxes1: Operand, boxes2: Operand, reduction: str = "none", eps: float = 1e-7) -> Loss:
    """1 − the generalised IoU of boxes (…, 4): also apart they have a slope.

    Shapes: two of (…, 4) → (…), or () for "mean" and "sum".
    """
    ratio, union, a, b = _overlap("giou", boxes1, boxes2, eps)
    low, high = minimum(a[..., :2], b[..., :2]), maximum(a[..., 2:], b[..., 2:])
    around = _area(low, high)
    return reduced("giou", 1 - (ratio - (around - union) / (around + eps)), reduction)


def diou(boxes1: Operand, boxes2: Operand, reduction: str = "none", eps: float = 1e-7) -> Loss:
    """1 − IoU + the squared distance of the centres, relative to the box around both.

    Shapes: two of (…, 4) → (…), or () for "mean" and "sum".
    """
    ratio, _, a, b = _overlap("diou", boxes1, boxes2, eps)
    low, high = minimum(a[..., :2], b[..., :2]), maximum(a[..., 2:], b[..., 2:])
    diagonal = sum_of((high - low) * (high - low), -1) + eps
    apart = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) * 0.5
    return reduced("diou", 1 - ratio + sum_of(apart * apart, -1) / diagonal, reduction)


def _overlap(
    name: str, boxes1: Operand, boxes2: Operand, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = pair(name, boxes1, boxes2)
    if a.ndim == 0 or a.shape[-1] != 4:
        raise ShapeError(name, f"boxes {a.type}", "They are (…, 4): x₁, y₁, x₂, y₂.")
    inside = _area(maximum(a[..., :2], b[..., :2]), minimum(a[..., 2:], b[..., 2:]))
    first, second = (_area(t[..., :2], t[..., 2:]) for t in (a, b))
    union = first + second - inside
    return inside / (union + eps), union, a, b


def _area(low: Tensor, high: Tensor) -> Tensor:
    sides = relu(high - low)
    return sides[..., 0] * sides[..., 1]
