"""What moves elements: slices, pads, joins, permutations."""

from __future__ import annotations

from treadle.fuzz.catalogue.rules import proposal
from treadle.fuzz.chooser import SIZES, SMALL, Chooser, Proposal
from treadle.fuzz.forms import family
from treadle.fuzz.program import Values


def _moved(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3)
    axis = choose.axis(x)
    count = choose.shape(x)[axis]
    return proposal(
        x,
        axis=axis,
        order=choose.order(x),
        shift=choose.whole(-count, count),
        half=(count + 1) // 2,
    )


family(
    "move",
    _moved,
    {
        "flip": "td.flip({0}, {axis}) * {0}",
        "roll": "td.roll({0}, {shift}, {axis}) + {0}",
        "permute": "td.permute({0}, {order}) * 2",
        "permute_sum": "td.permute({0} * {0}, {order}).sum(-1)",
        "stack": "td.stack([{0}, {0} * 2, -{0}], {axis})",
        "stack_sum": "td.stack([{0}, {0} * 2, -{0}], {axis}).sum(-1)",
        "concat": "td.concat([{0}, {0} * 2], {axis})",
        "reshape": "{0}.reshape(-1) * 2",
        "reversed": "{0}.reshape({0}.shape[::-1]) * 2",
        "chunks": "sum(part.sum({axis}) for part in td.split({0}, {half}, {axis}))",
        "unsqueeze": "td.softmax({0}.unsqueeze({axis}), -1)",
        "expand": "td.expand({0}.mean({axis}, keepdims=True), *{0}.shape) - {0}",
    },
)


def _window(choose: Chooser) -> Proposal:
    """Subscripts along one axis, as text."""
    x = choose.value(low=1, high=3)
    axis = choose.axis(x)
    count = choose.shape(x)[axis]
    start = choose.whole(0, count - 1)
    stop = choose.whole(start + 1, count)
    before = ":, " * axis
    return proposal(
        x,
        axis=axis,
        index=f"{before}{start}:{stop}",
        strided=f"{before}::{choose.pick((1, 1, 2, 3, 5, -1, -2))}",
        later=f"{before}1:",
        sooner=f"{before}:-1",
    )


family(
    "slice",
    _window,
    {
        "plain": "{0}[{index!s}] * 2",
        "strided": "{0}[{strided!s}] * 2",
        "difference": "{0}[{later!s}] - {0}[{sooner!s}]",
        "mean": "{0}[{index!s}].mean({axis})",
    },
)


def _padded(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= 10_000)
    rank = len(choose.shape(x))
    amounts = tuple((choose.whole(0, 3), choose.whole(0, 3)) for _ in range(rank))
    interior = tuple(choose.whole(0, 2) for _ in range(rank))
    return proposal(x, amounts=amounts, interior=interior, axis=choose.axis(x))


family(
    "pad",
    _padded,
    {
        "plain": "td.pad({0}, {amounts})",
        "interior": "td.pad({0}, {amounts}, interior={interior})",
        "sum": "td.pad({0}, {amounts}, interior={interior}).sum({axis})",
        "softmax": "td.softmax(td.pad({0}, {amounts}, -1.0), {axis})",
    },
)


def _joined(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3)
    axis = choose.axis(x)
    shape = list(choose.shape(x))
    shape[axis] = choose.pick(SMALL)
    return proposal(x, choose.like(shape), axis=axis)


family(
    "concat",
    _joined,
    {
        "plain": "td.concat([{0}, {1}, {0} * 2], {axis})",
        "softmax": "td.softmax(td.concat([{0}, {1}], {axis}), {axis})",
        "mean": "td.concat([{0}, {1}], {axis}).mean({axis})",
    },
)


def _triangle(choose: Chooser) -> Proposal:
    return proposal(choose.value(low=2), diagonal=choose.whole(-3, 3))


family(
    "triangle",
    _triangle,
    {
        "both": "td.tril({0}, {diagonal}) + 2 * td.triu({0}, -{diagonal})",
        "sum": "td.tril({0}, {diagonal}).sum(-1)",
    },
)


def _square(choose: Chooser) -> Proposal:
    known = [n for n, a in choose.known.items() if a.ndim == 2 and a.shape[0] == a.shape[1]]
    known = [n for n in known if choose.known[n].dtype.kind == "f"]
    size = choose.pick(SIZES)
    return proposal(choose.pick(known) if known else choose.fresh((size, size)))


family(
    "square",
    _square,
    {
        "symmetric": "{0} + {0}.T * 2",
        "distance": "td.abs({0} - {0}.T).max(0)",
        "masked": "td.logsumexp({0} - 1e4 * td.eye({0}.shape[0]), 1)",
    },
)


def _tiled(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3, fits=lambda array: array.size <= 10_000)
    return proposal(x, times=tuple(choose.pick((1, 1, 2, 3)) for _ in choose.shape(x)))


family("repeat", _tiled, {"plain": "td.repeat({0}, *{times})"})


def _dynamic(choose: Chooser) -> Proposal:
    x = choose.value(low=1, high=3)
    shape = choose.shape(x)
    sizes = tuple(choose.whole(1, n) for n in shape)
    starts = choose.fresh((len(shape),), Values("integers", -2, max(shape) + 2), "int32")
    return proposal(x, starts, choose.like(sizes), sizes=sizes)


family(
    "dynamic",
    _dynamic,
    {
        "slice": "td.dynamic_slice({0}, {1}, {sizes})",
        "update": "td.dynamic_update_slice({0}, {2}, {1})",
    },
)
