"""Rows of losses that programs have inside; means are over what counts, as in PyTorch."""

from __future__ import annotations

from treadle import losses
from treadle.base.dtypes import float32
from treadle.frontend.coerce import align, as_tensor, cast
from treadle.frontend.functions.activations import cross_entropy_rows, log_softmax
from treadle.frontend.functions.arithmetic import abs, ne, where
from treadle.frontend.functions.indexing import take, take_along_axis
from treadle.frontend.functions.reductions import mean, sum
from treadle.frontend.functions.shaping import moveaxis, squeeze, unsqueeze
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import aten

NONE, MEAN, SUM = 0, 1, 2  # ATen's numbers of reductions
Given = Tensor | None


def _reduced(each: Tensor, reduction: int) -> Tensor:
    return {NONE: lambda x: x, MEAN: mean, SUM: sum}[reduction](each)


def _alike(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of one shape: PyTorch broadcasts them here."""
    first, second = align("loss", x, target)
    return first, second


@aten("mse_loss")
def _mse(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduced((x - target) * (x - target), reduction)


@aten("l1_loss")
def _l1(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduced(abs(x - target), reduction)


@aten("smooth_l1_loss")
def _smooth_l1(x: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    return _reduced(as_tensor(losses.smooth_l1(*_alike(x, target), "none", beta)), reduction)


@aten("huber_loss")
def _huber(x: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    return _reduced(as_tensor(losses.huber(*_alike(x, target), "none", delta)), reduction)


@aten("soft_margin_loss")
def _soft_margin(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduced(as_tensor(losses.soft_margin(x, target, "none")), reduction)


@aten("binary_cross_entropy")
def _bce(x: Tensor, target: Tensor, weight: Given = None, reduction: int = MEAN) -> Tensor:
    return _reduced(as_tensor(losses.bce(x, target, weight, "none")), reduction)


@aten("binary_cross_entropy_with_logits")
def _bce_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Given = None,
    pos_weight: Given = None,
    reduction: int = MEAN,
) -> Tensor:
    each = losses.bce_with_logits(x, target, weight, "none", pos_weight)
    return _reduced(as_tensor(each), reduction)


@aten("kl_div")
def _kl_div(x: Tensor, target: Tensor, reduction: int = MEAN, log_target: bool = False) -> Tensor:
    return _reduced(as_tensor(losses.kl_div(*_alike(x, target), "none", log_target)), reduction)


# Of classes


def _weighed(
    rows: Tensor, target: Tensor, weight: Given, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """Rows reduced, and the total weight; ignored ones weigh nothing."""
    counts = cast(ne(target, ignored), rows.dtype)
    if weight is not None:
        counts = counts * take(weight, _inside(target, ignored), 0)
    each = where(ne(target, ignored), rows * (1.0 if weight is None else counts), 0.0)
    total = sum(counts)
    return (sum(each) / total if reduction == MEAN else _reduced(each, reduction)), total


def _inside(target: Tensor, ignored: int) -> Tensor:
    """Targets that are classes; ignored ones are looked up as class 0."""
    return where(ne(target, ignored), target, 0)


@aten("nll_loss_forward", "nll_loss2d_forward")
def _nll_forward(
    x: Tensor, target: Tensor, weight: Given, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, C, …) at the targets (N, …)."""
    axis = 1 if x.ndim > 1 else 0
    index = unsqueeze(_inside(target, ignore_index), axis)
    rows = squeeze(take_along_axis(x, index, axis), axis) * -1.0
    return _weighed(rows, target, weight, reduction, ignore_index)


@aten("nll_loss", "nll_loss_nd", "nll_loss2d")
def _nll(
    x: Tensor,
    target: Tensor,
    weight: Given = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Tensor:
    return _nll_forward(x, target, weight, reduction, ignore_index)[0]


@aten("cross_entropy_loss")
def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Given = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    axis = 1 if x.ndim > 1 else 0
    if target.dtype.is_float or (weight is not None and label_smoothing):
        return _by_probabilities(x, target, weight, reduction, ignore_index, label_smoothing)
    index = _inside(target, ignore_index)
    rows = cross_entropy_rows(moveaxis(x, axis, -1), index, label_smoothing)
    return _weighed(rows, target, weight, reduction, ignore_index)[0]


def _by_probabilities(
    x: Tensor, target: Tensor, weight: Given, reduction: int, ignored: int, smoothing: float
) -> Tensor:
    axis = 1 if x.ndim > 1 else 0
    logs = moveaxis(log_softmax(x, axis), axis, -1)
    factors = logs * 0.0 + 1.0 if weight is None else as_tensor(weight)
    if not target.dtype.is_float:
        index = _inside(target, ignored)
        kept = cast(ne(target, ignored), logs.dtype)
        at = squeeze(take_along_axis(logs * factors, unsqueeze(index, -1), -1), -1) * -1.0
        spread = sum(logs * factors, -1) * -1.0
        each = (at * (1 - smoothing) + spread * (smoothing / logs.shape[-1])) * kept
        total = sum(take(factors, index, 0) * kept)
        return sum(each) / total if reduction == MEAN else _reduced(each, reduction)
    chances = moveaxis(target, axis, -1) * (1 - smoothing) + smoothing / logs.shape[-1]
    rows = sum(chances * logs * factors, -1) * -1.0
    rows = cast(rows, float32) if rows.dtype.is_narrow else rows
    return _reduced(rows, reduction)
