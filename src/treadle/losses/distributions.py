"""Losses of distributions: counts, numbers with a variance, sequences, and a teacher's outputs."""

from __future__ import annotations

import math

from treadle.base.dtypes import int32, promote
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.numbers import FRACTION, NOT_NEGATIVE, POSITIVE, check_choice, check_number
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.control import scan
from treadle.frontend.functions.activations import log_softmax, softmax
from treadle.frontend.functions.arithmetic import (
    abs,
    eq,
    exp,
    log,
    log1p,
    logical_and,
    magnitude,
    maximum,
    stop_gradient,
    tanh,
    where,
)
from treadle.frontend.functions.distances import normalize
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.reductions import mean as mean_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import (
    concat,
    full,
    iota,
    reshape,
    slice_along,
    stack,
    unsqueeze,
)
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Operand, Tensor
from treadle.losses.classification import cross_entropy
from treadle.losses.reduction import pair, reduced

Loss = Tensor | Mean


def smooth_l1(input: Operand, target: Operand, reduction: str = "mean", beta: float = 1.0) -> Loss:
    """½ (x − y)² / beta within beta, |x − y| − ½ beta beyond.

    Shapes: two of one shape → (), or that shape for "none".
    """
    check_number("smooth_l1", "beta", beta, NOT_NEGATIVE)
    x, y = pair("smooth_l1", input, target)
    difference = x - y
    distance = abs(difference)
    if beta == 0:
        return reduced("smooth_l1", distance, reduction)
    # Of the difference: a square of |x − y| would have no curvature at 0.
    inside = difference * difference * (0.5 / beta)
    return reduced("smooth_l1", where(distance < beta, inside, distance - 0.5 * beta), reduction)


def log_cosh(input: Operand, target: Operand, reduction: str = "mean") -> Loss:
    """log cosh(x − y), without overflow.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("log_cosh", input, target)
    difference = x - y
    is_near = abs(difference) < 1
    # log cosh d = log(1 + 2 t² / (1 − t²)) with t = tanh(d / 2): nothing cancels near 0.
    square = tanh(where(is_near, difference, 0) * 0.5) ** 2
    distance = where(is_near, 1, magnitude(difference))
    inner = where(is_near, square * 2 / (1 - square), exp(distance * -2))
    values = where(is_near, 0, distance - math.log(2)) + log1p(inner)
    return reduced("log_cosh", values, reduction)


def poisson_nll(
    input: Operand,
    target: Operand,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Loss:
    """eˣ − y x of counts y, the input being log rates; rates themselves with log_input=False.

    `full` adds Stirling's approximation of log y! for counts above 1.

    Shapes: two of one shape → (), or that shape for "none".
    """
    x, y = pair("poisson_nll", input, target)
    values = exp(x) - y * x if log_input else x - y * log(x + eps)
    if full:
        many = y > 1
        count = where(many, y, 2)
        factorial = count * log(count) - count + log(count * (2 * math.pi)) * 0.5
        values = values + where(many, factorial, 0)
    return reduced("poisson_nll", values, reduction)


def gaussian_nll(
    input: Operand,
    target: Operand,
    var: Operand,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Loss:
    """½ (log var + (x − y)² / var); the variance is held above eps, with the gradient of itself.

    Shapes: three of one shape → (), or that shape for "none".
    """
    check_number("gaussian_nll", "eps", eps, POSITIVE)
    x, y = pair("gaussian_nll", input, target)
    given = cast_to(as_tensor(var), x.dtype)
    if given.shape == x.shape[:-1] and given.ndim < x.ndim:
        given = unsqueeze(given, -1)
    held = given + stop_gradient(maximum(given, eps) - given)
    values = (log(held) + (x - y) * (x - y) / held) * 0.5
    if full:
        values = values + 0.5 * math.log(2 * math.pi)
    return reduced("gaussian_nll", values, reduction)


# Sequences


def ctc(
    log_probs: Operand,
    targets: Operand,
    input_lengths: Operand,
    target_lengths: Operand,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Connectionist temporal classification of log-probabilities (T, N, classes).

    Targets are (N, S), padded with anything; lengths are (N,). "mean" divides each loss by its
    target's length first, as PyTorch does.

    Shapes: (T, N, classes), (N, S), (N,), (N,) → (), or (N,) for "none".
    """
    x, labels = as_tensor(log_probs), as_tensor(targets)
    times, lengths = (cast_to(as_tensor(t), int32) for t in (input_lengths, target_lengths))
    _check_ctc(x, labels, times, lengths, blank)
    labels = cast_to(labels, promote(labels.dtype, int32))
    n, s = labels.shape
    # blank, label, blank, label, … blank: 2 S + 1 states.
    blanks = labels * 0 + blank
    states = concat([reshape(stack([blanks, labels], 2), (n, 2 * s)), blanks[:, :1]], 1)
    before = concat([states[:, :2] * 0 - 1, states[:, : 2 * s - 1]], 1)
    may_skip = logical_and(states != blank, states != before)
    emitted = take_along_axis(x, _spread_over(states, x.shape[0]), 2)  # (T, N, 2 S + 1)
    start = where(iota(states.shape, 1) < 2, emitted[0], -math.inf)

    def step(alpha: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        scores, time = given
        found = _logaddexp3(
            alpha, _shifted(alpha, 1), where(may_skip, _shifted(alpha, 2), -math.inf)
        )
        is_over = unsqueeze(time >= times, -1)
        return where(is_over, alpha, found + scores), None

    last, _ = scan(step, start, (emitted[1:], iota((x.shape[0] - 1,), 0) + 1))
    ends = stack([lengths * 2, maximum(lengths * 2 - 1, 0)], 1)
    finals = take_along_axis(last, ends, 1)
    second = where(lengths > 0, finals[:, 1], -math.inf)
    losses = -_logaddexp3(finals[:, 0], second, full((n,), -math.inf, x.dtype))
    if zero_infinity:
        losses = where(losses == math.inf, 0, losses)
    if reduction == "mean":
        return mean_of(losses / cast_to(maximum(lengths, 1), losses.dtype))
    return as_tensor(reduced("ctc", losses, reduction))


def _check_ctc(x: Tensor, labels: Tensor, times: Tensor, lengths: Tensor, blank: int) -> None:
    if x.ndim != 3 or not x.dtype.is_float:
        raise ShapeError("ctc", f"log_probs is {x.type}", "It is (T, N, classes), of floats.")
    n = x.shape[1]
    fits = labels.ndim == 2 and labels.shape[0] == n and times.shape == lengths.shape == (n,)
    if not fits:
        raise ShapeError(
            "ctc",
            f"targets {labels.type}, lengths {times.type} and {lengths.type} for {n} sequences",
            "Targets are (N, S), padded to one length; lengths are (N,).",
        )
    if not labels.dtype.is_integer:
        raise DTypeError("ctc", f"targets {labels.type}", "They are class indices.")
    if not 0 <= blank < x.shape[2]:
        raise ArgumentError("ctc", f"blank = {blank}", f"It is one of {x.shape[2]} classes.")


def _spread_over(states: Tensor, length: int) -> Tensor:
    return unsqueeze(states, 0) + iota((length, 1, 1), 0, states.dtype) * 0


def _shifted(alpha: Tensor, by: int) -> Tensor:
    """States moved on, nothing coming in."""
    n, count = alpha.shape
    out = full((n, by), -math.inf, alpha.dtype)
    return concat([out, slice_along(alpha, 1, 0, count - by)], 1)


def _logaddexp3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """log(eᵃ + eᵇ + eᶜ); −∞ where all are."""
    top = stop_gradient(maximum(maximum(a, b), c))
    is_none = eq(top, -math.inf)
    centre = where(is_none, 0, top)
    total = exp(a - centre) + exp(b - centre) + exp(c - centre)
    return where(is_none, -math.inf, log(where(is_none, 1, total)) + centre)


# A teacher's outputs


def distillation(
    student: Operand,
    teacher: Operand,
    target: Operand | None = None,
    temperature: float = 2.0,
    alpha: float = 0.5,
) -> Tensor:
    """T² · KL(teacher ‖ student) of logits at a temperature; with a target mixed with its loss.

    alpha weighs the teacher, 1 − alpha the target's cross-entropy. Classes lie along the last axis.

    Shapes: (N, classes), (N, classes) and perhaps (N,) → ().
    """
    check_number("distillation", "temperature", temperature, POSITIVE)
    check_number("distillation", "alpha", alpha, FRACTION)
    x, y = pair("distillation", student, teacher)
    soft = stop_gradient(log_softmax(y * (1 / temperature), -1))
    log_p = log_softmax(x * (1 / temperature), -1)
    rows = sum_of(exp(soft) * (soft - log_p), -1)
    taught = mean_of(rows) * temperature**2
    if target is None:
        return taught
    hard = as_tensor(cross_entropy(x, target, axis=-1))
    return taught * alpha + hard * (1 - alpha)


def feature_distillation(
    student: Operand, teacher: Operand, kind: str = "mse", reduction: str = "mean"
) -> Loss:
    """Hidden features of a student near a teacher's: "mse", "l1" or "cosine" of the last axis.

    Shapes: two of one shape (…, D) → (), or that shape for "none", (…) with "cosine".
    """
    check_choice("feature_distillation", "kind", kind, ("mse", "l1", "cosine"))
    x, y = pair("feature_distillation", student, teacher)
    y = stop_gradient(y)
    if kind == "cosine":
        return reduced(
            "feature_distillation", 1 - sum_of(normalize(x, axis=-1) * normalize(y, axis=-1), -1),
            reduction,
        )  # fmt: skip
    values = abs(x - y) if kind == "l1" else (x - y) * (x - y)
    return reduced("feature_distillation", values, reduction)


def attention_distillation(student: Operand, teacher: Operand, reduction: str = "mean") -> Loss:
    """Attention transfer: squared distance of normalised maps of mean squares over channels.

    Features are (N, C, spatial …); the numbers of channels may differ (Zagoruyko, 2017).

    Shapes: (N, C, …), (N, C′, …) → (), or (N, positions) for "none".
    """
    maps = []
    for t in (as_tensor(student), stop_gradient(as_tensor(teacher))):
        if t.ndim < 3:
            raise ShapeError("attention_distillation", f"{t.type}", "It is (N, C, spatial …).")
        energy = mean_of(t * t, 1)
        maps.append(normalize(reshape(energy, (t.shape[0], -1)), axis=1))
    x, y = pair("attention_distillation", *maps)
    return reduced("attention_distillation", (x - y) * (x - y), reduction)


def soft_target_cross_entropy(input: Operand, target: Operand, reduction: str = "mean") -> Loss:
    """−Σ y log softmax(x) along the last axis, for targets that are probabilities.

    Shapes: two of (…, classes) → (), or (…) for "none".
    """
    x, y = pair("soft_target_cross_entropy", input, target)
    return reduced("soft_target_cross_entropy", -sum_of(y * log_softmax(x, -1), -1), reduction)


def entropy(logits: Operand, reduction: str = "mean") -> Loss:
    """The entropy of softmax(logits) along the last axis: to be lowered, or raised with a minus.

    Shapes: (…, classes) → (), or (…) for "none".
    """
    x = as_tensor(logits)
    log_p = log_softmax(x, -1)
    return reduced("entropy", -sum_of(softmax(x, -1) * log_p, -1), reduction)
