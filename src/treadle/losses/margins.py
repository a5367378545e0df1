"""Losses of margins: between classes, pairs, triplets and embeddings."""

from __future__ import annotations

import math

from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import FINITE, POSITIVE, check_number
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.activations import log_sigmoid, relu
from treadle.frontend.functions.arithmetic import clamp, eq, maximum, minimum, sqrt, where
from treadle.frontend.functions.distances import normalize, pairwise_distance
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.reductions import any as any_of
from treadle.frontend.functions.reductions import logsumexp
from treadle.frontend.functions.reductions import mean as mean_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import (
    arange,
    concat,
    eye,
    iota,
    roll,
    squeeze,
    transpose,
    unsqueeze,
)
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.classification import class_indices, class_weights, cross_entropy
from treadle.losses.reduction import pair, reduced, weighted

Loss = Tensor | Mean


def soft_margin(input: Operand, target: Operand, reduction: str = "mean") -> Loss:
    """log(1 + e^(−y x)) for targets y of −1 and 1.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("soft_margin", input, target)
    return reduced("soft_margin", -log_sigmoid(y * x), reduction)


def hinge(
    input: Operand,
    target: Operand,
    margin: float = 1.0,
    squared: bool = False,
    reduction: str = "mean",
) -> Loss:
    """max(0, margin − y x) for targets y of −1 and 1; its square if asked for.

    Shapes: two of one shape → (), or that shape for "none".
    """
    check_number("hinge", "margin", margin, FINITE)
    x, y = pair("hinge", input, target)
    values = relu(margin - y * x)
    return reduced("hinge", values * values if squared else values, reduction)


def hinge_embedding(
    input: Operand, target: Operand, margin: float = 1.0, reduction: str = "mean"
) -> Loss:
    """Distances x where y is 1, max(0, margin − x) where it is −1.

    Shapes: two of one shape → (), or that shape for "none".
    """
    check_number("hinge_embedding", "margin", margin, FINITE)
    x, y = pair("hinge_embedding", input, target)
    near = where(eq(y, -1), 0, x)
    far = where(eq(y, 1), 0, clamp(margin - x, min=0))
    return reduced("hinge_embedding", near + far, reduction)


def margin_ranking(
    input1: Operand, input2: Operand, target: Operand, margin: float = 0.0, reduction: str = "mean"
) -> Loss:
    """max(0, −y (x₁ − x₂) + margin): the first ranks higher where y is 1, lower where it is −1.

    Shapes: three of one shape → (), or that shape for "none".
    """
    check_number("margin_ranking", "margin", margin, FINITE)
    a, b = pair("margin_ranking", input1, input2)
    _, y = pair("margin_ranking", a, target)
    return reduced("margin_ranking", clamp(-(y * (a - b)) + margin, min=0), reduction)


def cosine_embedding(
    input1: Operand,
    input2: Operand,
    target: Operand,
    margin: float = 0.0,
    reduction: str = "mean",
) -> Loss:
    """1 − cos(x₁, x₂) where y is 1, max(0, cos − margin) where it is −1; rows (N, D) or (D,).

    Shapes: (N, D), (N, D), (N,) → (), or (N,) for "none".
    """
    check_number("cosine_embedding", "margin", margin, FINITE)
    a, b = pair("cosine_embedding", input1, input2)
    y = as_tensor(target)
    if a.ndim not in (1, 2) or y.shape != a.shape[:-1]:
        raise ShapeError(
            "cosine_embedding",
            f"inputs {a.type}, target {y.type}",
            "Inputs are (N, D) with a target (N,), or (D,) with one number.",
        )
    # PyTorch's own: the square roots of the sums of squares, each with an epsilon.
    eps = 1e-12
    product = sum_of(a * b, -1)
    lengths = sqrt((sum_of(a * a, -1) + eps) * (sum_of(b * b, -1) + eps))
    cosine = product / lengths
    values = where(eq(y, 1), 1 - cosine, where(eq(y, -1), clamp(cosine - margin, min=0), 0))
    return reduced("cosine_embedding", values, reduction)


def multi_margin(
    input: Operand,
    target: Operand,
    p: int = 1,
    margin: float = 1.0,
    weight: Operand | None = None,
    reduction: str = "mean",
) -> Loss:
    """Σ max(0, margin − x_y + x_i)ᵖ / classes over the other classes i.

    Shapes: (N, classes), (N,) → (), or (N,) for "none".
    """
    if p not in (1, 2):
        raise ArgumentError("multi_margin", f"p is {p}", "Use 1 or 2.")
    check_number("multi_margin", "margin", margin, FINITE)
    x, y = _rows_and_classes("multi_margin", input, target)
    classes = x.shape[1]
    own = take_along_axis(x, unsqueeze(y, -1), -1)
    gap = relu(margin - own + x)
    terms = gap if p == 1 else gap * gap
    if weight is not None:
        scale = class_weights("multi_margin", weight, classes, x.dtype)
        terms = terms * unsqueeze(take(scale, y), -1)
    others = iota(x.shape, 1, y.dtype) == unsqueeze(y, -1)
    return reduced("multi_margin", sum_of(where(others, 0, terms), -1) / classes, reduction)


def _rows_and_classes(name: str, input: Operand, target: Operand) -> tuple[Tensor, Tensor]:
    x, y = as_tensor(input), as_tensor(target)
    if not x.dtype.is_float or not y.dtype.is_integer:
        raise DTypeError(
            name, f"input {x.type}, target {y.type}", "A float and class indices are needed."
        )
    if x.ndim == 1 and y.ndim == 0:
        x, y = unsqueeze(x, 0), unsqueeze(y, 0)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ShapeError(
            name, f"input {x.type}, target {y.type}", "They are (N, classes) and (N,)."
        )
    index, _ = class_indices(name, y.shape, x.shape[1], y, -100)
    return x, index


def multilabel_soft_margin(
    input: Operand, target: Operand, weight: Operand | None = None, reduction: str = "mean"
) -> Loss:
    """The mean over classes of the binary cross-entropy of each, for targets of 0 and 1.

    Shapes: two of (N, classes) → (), or (N,) for "none".
    """
    x, y = pair("multilabel_soft_margin", input, target)
    terms = -(y * log_sigmoid(x) + (1 - y) * log_sigmoid(-x))
    terms = weighted("multilabel_soft_margin", terms, weight)
    return reduced("multilabel_soft_margin", mean_of(terms, -1), reduction)


def multilabel_margin(input: Operand, target: Operand, reduction: str = "mean") -> Loss:
    """Σ max(0, 1 − (x_y − x_i)) / classes over labels y and other classes i.

    Each row of the target lists its labels first; −1 ends the list.

    Shapes: two of (N, classes) → (), or (N,) for "none".
    """
    x, y = as_tensor(input), as_tensor(target)
    if x.shape != y.shape or x.ndim not in (1, 2) or not y.dtype.is_integer:
        raise ShapeError(
            "multilabel_margin",
            f"input {x.type}, target {y.type}",
            "Both are (N, classes); the target is of class indices, −1 after the last.",
        )
    if x.ndim == 1:
        found = multilabel_margin(unsqueeze(x, 0), unsqueeze(y, 0), reduction)
        return squeeze(as_tensor(found), 0) if reduction == "none" else found
    classes = x.shape[1]
    # A label counts while no −1 stands before it.
    ended = _running_any(y < 0)
    index = where(ended, 0, y)
    is_label = any_of(where(unsqueeze(ended, -1), False, _matches(index, classes)), 1)
    own = take_along_axis(x, index, -1)
    gaps = relu(1 - (unsqueeze(own, -1) - unsqueeze(x, 1)))  # (N, label, class)
    counted = where(unsqueeze(ended, -1), 0, where(unsqueeze(is_label, 1), 0, gaps))
    return reduced("multilabel_margin", sum_of(counted, (1, 2)) / classes, reduction)


def _matches(index: Tensor, classes: int) -> Tensor:
    """True at the class of each index."""
    shape = (*index.shape, classes)
    return iota(shape, -1, index.dtype) == unsqueeze(index, -1)


def _running_any(flags: Tensor) -> Tensor:
    from_start = iota((flags.shape[1], flags.shape[1]), 1) <= iota((flags.shape[1],) * 2, 0)
    return any_of(where(from_start, unsqueeze(flags, 1), False), -1)


def triplet_margin(
    anchor: Operand,
    positive: Operand,
    negative: Operand,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Loss:
    """max(0, |a − p| − |a − n| + margin); with `swap` the nearer of |a − n| and |p − n|.

    Shapes: three of (N, D) → (), or (N,) for "none".
    """
    check_number("triplet_margin", "margin", margin, POSITIVE)
    a, b = pair("triplet_margin", anchor, positive)
    _, c = pair("triplet_margin", a, negative)
    near, far = pairwise_distance(a, b, p, eps), pairwise_distance(a, c, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(b, c, p, eps))
    return reduced("triplet_margin", clamp(near - far + margin, min=0), reduction)


def contrastive(
    input1: Operand, input2: Operand, target: Operand, margin: float = 1.0, reduction: str = "mean"
) -> Loss:
    """d² for pairs that belong together (target 1), max(0, margin − d)² for others (target 0).

    d is the Euclidean distance of rows (Hadsell et al., 2006, without its factor ½).

    Shapes: (N, D), (N, D), (N,) → (), or (N,) for "none".
    """
    check_number("contrastive", "margin", margin, POSITIVE)
    a, b = pair("contrastive", input1, input2)
    distance = pairwise_distance(a, b, 2.0, 1e-6)
    y = cast_to(as_tensor(target), a.dtype)
    if y.shape != distance.shape:
        raise ShapeError(
            "contrastive", f"target {y.type} for rows {a.type}", "It has one entry for each row."
        )
    gap = relu(margin - distance)
    return reduced("contrastive", y * distance * distance + (1 - y) * gap * gap, reduction)


def info_nce(
    query: Operand,
    positive: Operand,
    negatives: Operand | None = None,
    temperature: float = 0.1,
    reduction: str = "mean",
) -> Loss:
    """Cross-entropy of cosine similarities: each query (N, D) picks its own positive (N, D).

    The other positives are its negatives, unless negatives (M, D) are given.

    Shapes: (N, D), (N, D) and perhaps (M, D) → (), or (N,) for "none".
    """
    check_number("info_nce", "temperature", temperature, POSITIVE)
    q, p = (normalize(t) for t in pair("info_nce", query, positive))
    if q.ndim != 2:
        raise ShapeError("info_nce", f"queries {q.type}", "They are rows (N, D).")
    if negatives is None:
        scores = matmul(q, transpose(p, 0, 1)) * (1 / temperature)
        return cross_entropy(scores, arange(q.shape[0]), reduction=reduction)
    n = normalize(cast_to(as_tensor(negatives), q.dtype))
    if n.ndim != 2 or n.shape[1] != q.shape[1]:
        raise ShapeError("info_nce", f"negatives {n.type} for {q.type}", "They are rows (M, D).")
    own = sum_of(q * p, -1, keepdims=True)
    scores = concat([own, matmul(q, transpose(n, 0, 1))], 1) * (1 / temperature)
    return cross_entropy(scores, arange(q.shape[0]) * 0, reduction=reduction)


def nt_xent(
    first: Operand, second: Operand, temperature: float = 0.5, reduction: str = "mean"
) -> Loss:
    """SimCLR's loss: of two views (N, D) of a batch each picks the other among all 2 N − 1.

    Shapes: two of (N, D) → (), or (2 · N,) for "none".
    """
    check_number("nt_xent", "temperature", temperature, POSITIVE)
    a, b = pair("nt_xent", first, second)
    if a.ndim != 2:
        raise ShapeError("nt_xent", f"views are {a.type}", "They are rows (N, D).")
    both = normalize(concat([a, b], 0))
    scores = matmul(both, transpose(both, 0, 1)) * (1 / temperature)
    itself = eye(both.shape[0]) > 0
    return cross_entropy(
        where(itself, -math.inf, scores), roll(arange(both.shape[0]), -a.shape[0], 0),
        reduction=reduction,
    )  # fmt: skip


def supervised_contrastive(
    input: Operand, target: Operand, temperature: float = 0.1, reduction: str = "mean"
) -> Loss:
    """Rows (N, D) of one class attract each other, all others repel (Khosla et al., 2020).

    A row that is alone in its class counts for nothing.

    Shapes: (N, D), (N,) → (), or (N,) for "none".
    """
    check_number("supervised_contrastive", "temperature", temperature, POSITIVE)
    x, y = as_tensor(input), as_tensor(target)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ShapeError(
            "supervised_contrastive", f"rows {x.type}, classes {y.type}", "(N, D) and (N,)."
        )
    rows = normalize(x)
    scores = matmul(rows, transpose(rows, 0, 1)) * (1 / temperature)
    itself = eye(x.shape[0]) > 0
    log_p = scores - logsumexp(where(itself, -math.inf, scores), 1, keepdims=True)
    is_same = (unsqueeze(y, 0) == unsqueeze(y, 1)) & ~itself
    count = sum_of(where(is_same, as_tensor(1.0), 0), 1)
    values = -sum_of(where(is_same, log_p, 0), 1) / maximum(count, 1)
    has_any = cast_to(count > 0, x.dtype)
    return reduced(
        "supervised_contrastive", values * has_any, reduction, maximum(sum_of(has_any), 1)
    )


def triplet_with_distance(
    anchor: Operand,
    positive: Operand,
    negative: Operand,
    distance: object = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Loss:
    """`triplet_margin` with a distance of one's own: a function of two tensors.

    Shapes: three of (N, D) → (), or (N,) for "none".
    """
    check_number("triplet_with_distance", "margin", margin, POSITIVE)
    measure = distance if callable(distance) else pairwise_distance
    a, b = pair("triplet_with_distance", anchor, positive)
    _, c = pair("triplet_with_distance", a, negative)
    near, far = as_tensor(measure(a, b)), as_tensor(measure(a, c))
    if swap:
        far = minimum(far, as_tensor(measure(b, c)))
    return reduced("triplet_with_distance", clamp(near - far + margin, min=0), reduction)
