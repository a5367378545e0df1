"""Sorting, gathering and scattering."""

from __future__ import annotations

from treadle.fuzz.catalogue.rules import proposal
from treadle.fuzz.chooser import SMALL, Chooser, Proposal
from treadle.fuzz.forms import family

MOST_SORTED = 20_000


def _ordered(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= MOST_SORTED)
    axis = choose.axis(x)
    k = choose.whole(1, choose.shape(x)[axis])
    return proposal(x, axis=axis, descending=choose.flag(), k=k)


family(
    "sort",
    _ordered,
    {
        "values": "td.sort({0}, {axis}, {descending})[0]",
        "indices": "td.argsort({0}, {axis}, {descending})",
        "topk": "td.topk({0}, {k}, {axis}, {descending})[0]",
        "topk_indices": "td.topk({0}, {k}, {axis}, {descending})[1]",
        "median": "td.take(td.sort({0}, {axis})[0], {0}.shape[{axis}] // 2, {axis})",
        "sum": "td.sort({0}, {axis})[0].sum({axis})",
        "ranks": "(td.cast(td.argsort({0}, {axis}, {descending}), td.float32) * {0}).sum({axis})",
        "topk_mean": "td.topk({0}, {k}, {axis}, {descending})[0].mean({axis})",
        "softmax": "td.softmax(td.sort({0}, {axis}, {descending})[0], {axis})",
        "argmax": "td.argmax({0}, {axis})",
        "argmin": "td.argmin({0}, {axis})",
        "argmax_scaled": (
            "td.cast(td.argmax({0}, {axis}, True), td.float32) * {0}.sum({axis}, keepdims=True)"
        ),
        "along_argsort": "td.take_along_axis({0}, td.argsort({0}, {axis}), {axis})",
    },
)


def _taken(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= MOST_SORTED)
    axis = choose.axis(x)
    count = choose.shape(x)[axis]
    shape = (choose.pick(SMALL),) if choose.flag(0.7) else (3, 2)
    return proposal(x, choose.integers(shape, count), axis=axis)


family(
    "take",
    _taken,
    {
        "plain": "td.take({0}, {1}, {axis})",
        "summed": "td.take({0}, {1}, {axis}).sum({axis})",
        "of_softmax": "td.take(td.softmax({0}, {axis}), {1}, {axis})",
    },
)


def _entries(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= MOST_SORTED)
    axis = choose.axis(x)
    shape = list(choose.shape(x))
    count, shape[axis] = shape[axis], 1 if choose.flag(0.4) else choose.pick(SMALL)
    return proposal(x, choose.integers(shape, count), axis=axis)


family(
    "take_along_axis",
    _entries,
    {
        "plain": "td.take_along_axis({0}, {1}, {axis})",
        "of_log_softmax": "td.take_along_axis(td.log_softmax({0}, {axis}), {1}, {axis})",
    },
)


def _scattered(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= MOST_SORTED)
    axis = choose.axis(x)
    shape = choose.shape(x)
    count = choose.pick(SMALL)
    updates = choose.like((*shape[:axis], count, *shape[axis + 1 :]))
    return proposal(x, choose.integers((count,), shape[axis]), updates, axis=axis)


family(
    "scatter_add",
    _scattered,
    {
        "plain": "td.scatter_add({0}, {1}, {2}, {axis})",
        "softmax": "td.softmax(td.scatter_add({0}, {1}, {2}, {axis}), {axis})",
    },
)


def _table(choose: Chooser) -> Proposal:
    table = choose.value(low=2, high=2)
    rows = choose.shape(table)[0]
    return proposal(table, choose.integers((choose.pick(SMALL), choose.pick(SMALL)), rows))


family(
    "embedding",
    _table,
    {
        "plain": "td.embedding({1}, {0})",
        "mean": "td.embedding({1}, {0}).mean(1)",
        "one_hot": "td.one_hot({1}, {0}.shape[0]) @ {0}",
        "histogram": "td.one_hot({1}, {0}.shape[0]).sum((0, 1)) * {0}[:, 0]",
        "max": "td.embedding({1}, {0}).max(1)",
    },
)


def _counted_from_the_end(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= MOST_SORTED)
    count = choose.shape(x)[0]
    return proposal(x, choose.integers((choose.pick(SMALL),), count, -count))


family("getitem", _counted_from_the_end, {"rows": "{0}[{1}]", "mean": "{0}[{1}].mean(0)"})
