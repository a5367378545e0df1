"""Reductions, alone and of what reductions were used in; softmaxes, norms and running sums."""

from __future__ import annotations

import math

from treadle.fuzz.catalogue.rules import along, over, proposal, weighted
from treadle.fuzz.chooser import Chooser, Proposal
from treadle.fuzz.forms import family

OPS = ("td.sum", "td.mean", "td.max", "td.min", "td.logsumexp", "td.norm", "td.var", "td.std")

family(
    "reduce",
    over,
    {
        "sum": "td.sum({0}, {axis}, {keepdims})",
        "mean": "td.mean({0}, {axis}, {keepdims})",
        "max": "td.max({0}, {axis}, {keepdims})",
        "min": "td.min({0}, {axis}, {keepdims})",
        "var": "td.var({0}, {axis}, 0, {keepdims})",
        "std": "td.std({0}, {axis}, 0, {keepdims})",
        "logsumexp": "td.logsumexp({0}, {axis}, {keepdims})",
        "norm": "td.norm({0}, {axis}, {keepdims})",
        "any": "td.any({0} > 1, {axis}, {keepdims})",
        "all": "td.all({0} > -2, {axis}, {keepdims})",
        "count": "td.sum({0} > 0, {axis}, {keepdims})",
    },
)


MOST_FACTORS = 64  # a product's gradient is compiled for long where there are many


def _few(choose: Chooser) -> Proposal | None:
    found = over(choose)
    axes, shape = found.attributes["axis"], choose.shape(found.operands[0])
    assert isinstance(axes, tuple)
    factors = math.prod(shape[a] for a in axes if isinstance(a, int))
    return found if factors <= MOST_FACTORS else None


family(
    "product",
    _few,
    {
        "plain": "td.prod(1 + td.tanh({0}) * 0.1, {axis}, {keepdims})",
        "of_tanh": "td.prod(td.tanh({0}) + 1.5, {axis}, {keepdims}) * 0.1",
    },
)


def _op(choose: Chooser) -> Proposal:
    x = choose.value(low=1)
    return proposal(x, op=choose.pick(OPS), axis=choose.axes(x))


def _permuted(choose: Chooser) -> Proposal:
    x = choose.value(low=2)
    return proposal(x, op=choose.pick(OPS), order=choose.order(x), axis=choose.axes(x))


family(
    "reduce_permuted",
    _permuted,
    {
        "plain": "{op!s}(td.permute({0}, {order}), {axis})",
        "squared": "{op!s}(td.permute({0} * {0}, {order}), {axis})",
    },
)

family(
    "reduce_broadcast",
    _op,
    {
        "sub": "{0} - {op!s}({0}, {axis}, keepdims=True)",
        "mul": "{0} * {op!s}({0}, {axis}, keepdims=True)",
        "div": "{0} / (1 + td.square({op!s}({0}, {axis}, keepdims=True)))",
        "gate": "{0} * td.sigmoid({op!s}({0}, {axis}, keepdims=True))",
    },
)


def _twice(choose: Chooser) -> Proposal:
    x = choose.value(low=1)
    first = choose.axes(x)
    second = first if choose.flag(0.7) else choose.axes(x)
    return proposal(x, op=choose.pick(OPS), axis=first, op2=choose.pick(OPS), axis2=second)


family(
    "reduce_twice",
    _twice,
    {
        "sub": "{op2!s}({0} - {op!s}({0}, {axis}, keepdims=True), {axis2})",
        "gate": "{op2!s}({0} * td.sigmoid({op!s}({0}, {axis}, keepdims=True)), {axis2})",
        "gaussian": (
            "{op2!s}(td.exp(-td.square({0} - {op!s}({0}, {axis}, keepdims=True))), {axis2})"
        ),
        "difference": "{op!s}({0}, {axis}, keepdims=True) - {op2!s}({0}, {axis2}, keepdims=True)",
    },
)


def _thrice(choose: Chooser) -> Proposal:
    x = choose.value(low=1)
    ops = {name: choose.pick(OPS) for name in ("op", "op2", "op3")}
    return proposal(x, axis=choose.axes(x), **ops)


family(
    "reduce_thrice",
    _thrice,
    {
        "normalised": (
            "{op3!s}(td.square(({0} - {op!s}({0}, {axis}, keepdims=True)) / "
            "(1 + td.abs({op2!s}({0}, {axis}, keepdims=True)))), {axis})"
        ),
        "nested": (
            "{op3!s}({0} - {op2!s}({0} - {op!s}({0}, {axis}, keepdims=True), {axis}, "
            "keepdims=True), {axis})"
        ),
        "several": "{op!s}({0}, {axis}) * {op2!s}({0}, {axis}) + {op3!s}({0}, {axis})",
    },
)

family(
    "softmax",
    along,
    {
        "plain": "td.softmax({0}, {axis})",
        "log": "td.log_softmax({0}, {axis})",
        "sharp": "td.softmax({0} * 3, {axis}) * {0}",
        "masked": "td.softmax(td.where({0} > -1, {0}, -1e9), {axis})",
        "entropy": "-(td.softmax({0}, {axis}) * td.log_softmax({0}, {axis})).sum({axis})",
        "by_logsumexp": "{0} - td.logsumexp({0}, {axis}, keepdims=True)",
        "kl": (
            "(td.softmax({0}, {axis}) * (td.log_softmax({0}, {axis}) - "
            "td.log_softmax({0} * 0.5, {axis}))).sum({axis})"
        ),
        "max": "td.softmax({0} - td.log(td.abs({0}) + 0.1), {axis}).max({axis})",
        "double": "td.softmax(td.softmax({0}, {axis}) * 4, {axis})",
        "softmin": "td.softmax(-td.abs({0}), {axis})",
        "sparse": (
            "td.relu(td.softmax({0}, {axis}) - td.mean(td.softmax({0}, {axis}), {axis}, "
            "keepdims=True))"
        ),
    },
)

family(
    "norm",
    weighted,
    {
        "layer": "td.layer_norm({0}, eps=1e-2)",
        "layer_affine": "td.layer_norm({0}, {1}, {2}, eps=1e-2)",
        "rms": "td.rms_norm({0}, eps=1e-2)",
        "rms_scaled": "td.rms_norm({0}, {1}, eps=1e-2)",
    },
)


def _dims(choose: Chooser) -> Proposal:
    x = choose.value(low=2)
    return proposal(x, dims=choose.whole(1, len(choose.shape(x))))


family("norm_dims", _dims, {"layer": "td.layer_norm({0}, dims={dims}, eps=1e-2)"})

_CENTRED = "({0} - {0}.mean({axis}, keepdims=True))"
family(
    "norm_by_hand",
    along,
    {
        "standard": (
            f"{_CENTRED} / td.sqrt(td.square({_CENTRED}).mean({{axis}}, keepdims=True) + 1e-2)"
        ),
        "l2": "{0} / td.sqrt(({0} * {0}).sum({axis}, keepdims=True) + 1e-2)",
        "min_max": (
            "({0} - {0}.min({axis}, keepdims=True)) / "
            "({0}.max({axis}, keepdims=True) - {0}.min({axis}, keepdims=True) + 1)"
        ),
        "skew": (
            f"({_CENTRED} ** 3).mean({{axis}}) / (td.square({_CENTRED}).mean({{axis}}) + 1) ** 1.5"
        ),
        "kurtosis": (
            f"({_CENTRED} ** 4).mean({{axis}}) / "
            f"td.square(td.square({_CENTRED}).mean({{axis}}) + 1)"
        ),
        "z_score": f"({_CENTRED} / (td.std({{0}}, {{axis}}, 0, True) + 1)).max({{axis}})",
        "cosine": "({0} * td.flip({0}, {axis})).sum({axis}) / (({0} * {0}).sum({axis}) + 1)",
    },
)


def _but_channels(choose: Chooser) -> Proposal | None:
    x = choose.value(low=2)
    if choose.shape(x)[1] * 2 > len(choose.known[x].reshape(-1)):
        return None  # a variance of one element
    return proposal(x, axis=tuple(a for a in range(len(choose.shape(x))) if a != 1))


family(
    "batch_norm",
    _but_channels,
    {
        "by_hand": (
            f"{_CENTRED} * td.rsqrt(td.square({_CENTRED}).mean({{axis}}, keepdims=True) + 1e-2)"
        ),
        "mean": "td.mean({0}, {axis})",
        "variance": "td.var({0}, {axis})",
    },
)


def _running(choose: Chooser) -> Proposal:
    x = choose.value(low=1)
    return proposal(x, axis=choose.axis(x), reverse=choose.flag())


_RUNNING = "td.cumsum({0}, {axis}, {reverse})"
family(
    "cumsum",
    _running,
    {
        "plain": _RUNNING,
        "of_softmax": "td.cumsum(td.softmax({0}, {axis}), {axis}, {reverse})",
        "max": f"{_RUNNING}.max({{axis}})",
        "squared": f"td.square({_RUNNING}).sum({{axis}})",
        "logsumexp": "td.logsumexp(td.cumsum({0} * 0.1, {axis}, {reverse}), {axis})",
        "centred": f"{_RUNNING} - {_RUNNING}.mean({{axis}}, keepdims=True)",
        "of_centred": f"td.cumsum({_CENTRED}, {{axis}}, {{reverse}})",
        "of_exp": "td.log(td.cumsum(td.exp({0} * 0.1), {axis}, {reverse}) + 1)",
        "twice": f"td.cumsum({_RUNNING} * 0.1, {{axis}}, {{reverse}}) * 0.1",
        "mean": f"{_RUNNING}.mean(-1)",
        "scaled": f"{_RUNNING} / (td.abs({{0}}).sum({{axis}}, keepdims=True) + 1)",
    },
)
