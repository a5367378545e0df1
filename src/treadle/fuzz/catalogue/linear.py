"""Products, attention, convolutions and pools."""

from __future__ import annotations

import math

from treadle.fuzz.catalogue.rules import HALF, proposal
from treadle.fuzz.chooser import MOST_ELEMENTS, MOST_WORK, SIZES, Chooser, Proposal
from treadle.fuzz.forms import Rule, family

SPECS = (
    "ij,jk->ik", "ij,kj->ik", "ji,jk->ik", "ji,kj->ki", "i,i->", "i,j->ij", "ij->ji", "ij->i",
    "ij->j", "ii->i", "ii->", "ij,ij->ij", "ij,ij->i", "ij,ij->j", "ij,j->i", "ij,i->j",
    "bij,bjk->bik", "bij,bkj->bik", "bji,bjk->bki", "bij,jk->bik", "bi,bj->bij",
    "bhid,bhjd->bhij", "bhij,bhjd->bhid", "bihd,bjhd->bhij", "ij,jk,kl->il", "i,ij,j->",
    "abc,cd->abd", "abc,bd->adc", "abc,acd->bd", "abc,abd->cd", "ab,ac,ad->bcd", "abc->cba",
    "abc->bca", "abc->b", "aab->ab", "abcd,ab->cd", "ijk,ijk->", "ijk,jil->kl",
)  # fmt: skip


def _einsum(count: int) -> Rule:
    """A spec of so many operands; the first may be a value that is there."""
    specs = [spec for spec in SPECS if spec.count(",") == count - 1]

    def rule(choose: Chooser) -> Proposal | None:
        spec = choose.pick(specs)
        left, right = spec.split("->")
        first, *others = labels = left.split(",")
        sizes = {label: choose.size(129) for label in sorted({*left} - {","})}
        is_plain = len({*first}) == len(first)
        x = choose.value(len(first), len(first)) if is_plain and choose.known else None
        if x is not None:
            sizes |= dict(zip(first, choose.shape(x), strict=True))
        largest = max(math.prod(sizes[c] for c in each) for each in (*labels, right))
        if math.prod(sizes.values()) > MOST_WORK or largest > MOST_ELEMENTS:
            return None
        start = choose.like([sizes[c] for c in first], HALF) if x is None else x
        rest = [choose.like([sizes[c] for c in each], HALF) for each in others]
        return proposal(start, *rest, spec=spec)

    return rule


family("einsum", _einsum(1), {"one": "td.einsum({spec}, {0})"})
family(
    "einsum_pair",
    _einsum(2),
    {"two": "td.einsum({spec}, {0}, {1})", "squared": "td.square(td.einsum({spec}, {0}, {1}))"},
)
family("einsum_three", _einsum(3), {"three": "td.einsum({spec}, {0}, {1}, {2})"})


def _matmul(choose: Chooser) -> Proposal | None:
    x = choose.value(low=2, high=4)
    *batch, rows, inner = choose.shape(x)
    columns = choose.pick(SIZES)
    if math.prod(batch) * rows * inner * columns > MOST_WORK:
        return None
    kept = batch if choose.flag(0.6) else []
    return proposal(x, choose.like((*kept, inner, columns), HALF))


family(
    "matmul",
    _matmul,
    {
        "plain": "{0} @ {1}",
        "scaled": "{0} @ {1} * 0.5",
        "chain": "td.tanh({0} @ {1}) @ td.moveaxis({1}, -1, -2)",
        "softmax": "td.softmax({0} @ {1}, -2)",
        "vector": "{0} @ {1}[..., 0]",
        "max": "td.max({0} @ {1}, -1)",
    },
)


def _distances(choose: Chooser) -> Proposal | None:
    x = choose.value(low=2, high=2)
    rows, width = choose.shape(x)
    other = choose.pick(SIZES)
    if rows * width * other > MOST_WORK:
        return None
    return proposal(x, choose.like((other, width), HALF))


family(
    "distances",
    _distances,
    {
        "euclidean": (
            "td.sqrt(td.relu(({0} * {0}).sum(1)[:, None] + ({1} * {1}).sum(1)[None] "
            "- 2 * {0} @ {1}.T) + 3)"
        ),
        "kernel": "td.logsumexp({0} @ {1}.T * 0.1, 1)",
        "contrast": "td.logsumexp({0} @ {1}.T * 0.1, 0)",
    },
)


def _attention(choose: Chooser) -> Proposal:
    batch, groups = choose.whole(1, 3), choose.whole(1, 3)
    heads = groups * choose.pick((1, 1, 2, 3))
    length, width = (
        choose.pick(SIZES),
        choose.pick((1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 32, 64)),
    )
    is_square = choose.flag(0.6)
    others = length if is_square else choose.pick(SIZES)
    out = width if choose.flag(0.6) else choose.pick((1, 3, 8, 17, 32))
    return proposal(
        choose.like((batch, heads, length, width)),
        choose.like((batch, groups, others, width)),
        choose.like((batch, groups, others, out)),
        choose.like((length, others)),
        causal=is_square and choose.flag(),
    )


family(
    "attention",
    _attention,
    {
        "plain": "td.attention({0}, {1}, {2}, causal={causal})",
        "biased": "td.attention({0}, {1}, {2}, {3}, causal={causal})",
        "gated": "td.tanh(td.attention({0}, {1}, {2}, causal={causal}) * 2)",
    },
)


def _hand_attention(choose: Chooser) -> Proposal:
    shape = choose.whole(1, 4), choose.pick(SIZES), choose.pick((1, 3, 4, 7, 8, 16, 17, 32))
    return proposal(*(choose.like(shape) for _ in range(3)), scale=round(shape[-1] ** -0.5, 4))


_SCORES = "{0} @ td.permute({1}, 0, 2, 1) * {scale}"
family(
    "attention_by_hand",
    _hand_attention,
    {
        "plain": f"td.softmax({_SCORES}) @ {{2}}",
        "masked": (
            f"td.softmax(td.where(td.tril(td.ones(({{0}}.shape[1], {{0}}.shape[1]))) > 0, "
            f"{_SCORES}, -math.inf)) @ {{2}}"
        ),
    },
)

EXTENTS = {
    1: (1, 5, 8, 16, 17, 33, 64, 65, 100),
    2: (1, 3, 5, 7, 8, 9, 12, 16, 17, 28),
    3: (2, 3, 5, 8),
}


def _image(choose: Chooser, channels: int) -> str:
    """(N, C, …): a value of so many channels that is there, or a fresh input."""
    dims = choose.pick((1, 1, 2, 2, 2, 3))
    extents = tuple(choose.pick(EXTENTS[dims]) for _ in range(dims))
    known = [n for n, a in choose.known.items() if a.ndim >= 3 and a.shape[1] == channels]
    if known and choose.flag():
        return choose.pick(known)
    return choose.fresh((choose.pick((1, 2, 3, 8)), channels, *extents))


def _windows(choose: Chooser, extents: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """Kernel, stride, padding and dilation for each axis, that fit."""
    dims = len(extents)
    kernel = tuple(choose.whole(1, 5) for _ in range(dims))
    stride = tuple(choose.pick((1, 1, 2, 3)) for _ in range(dims))
    dilation = tuple(choose.pick((1, 1, 1, 2, 3)) for _ in range(dims))
    padding = tuple(choose.pick((0, 0, 1, 2)) for _ in range(dims))
    spans = zip(extents, kernel, padding, dilation, strict=True)
    if not all(n + 2 * p >= d * (k - 1) + 1 for n, k, p, d in spans):
        return None
    return {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}


def _conv(choose: Chooser) -> Proposal | None:
    groups = choose.pick((1, 1, 1, 2, 3, 4))
    inner, outer = choose.pick((1, 2, 3, 4, 5, 8)), groups * choose.pick((1, 2, 3, 5, 8, 9, 16))
    x = _image(choose, groups * inner)
    extents = choose.shape(x)[2:]
    found = _windows(choose, extents) if len(extents) <= 3 else None
    if found is None:
        return None
    kernel = found.pop("kernel")
    work = choose.known[x].size * outer // groups * math.prod(kernel)
    if work > MOST_WORK:
        return None
    weight = choose.like((outer, inner, *kernel), HALF)
    return proposal(x, weight, choose.like((outer,)), groups=groups, **found)


_CONV = "td.conv({0}, {1}, {2}, {stride}, {padding}, {dilation}, {groups})"
family(
    "conv",
    _conv,
    {
        "plain": _CONV,
        "unbiased": "td.conv({0}, {1}, None, {stride}, {padding}, {dilation}, {groups})",
        "relu": f"td.relu({_CONV})",
        "gelu": f"td.gelu({_CONV})",
        "mean": f"td.relu({_CONV}).mean(-1)",
        "layer_norm": f"td.layer_norm({_CONV}, dims=2, eps=1e-2)",
        "channels": f"td.softmax({_CONV}, 1)",
    },
)


def _pool(choose: Chooser) -> Proposal | None:
    x = _image(choose, choose.pick((1, 2, 3, 5, 8)))
    extents = choose.shape(x)[2:]
    found = _windows(choose, extents) if len(extents) <= 3 else None
    if found is None:
        return None
    kernel, padding = found["kernel"], found["padding"]
    is_narrow = all(2 * p <= k <= n for p, k, n in zip(padding, kernel, extents, strict=True))
    return proposal(x, **found, counted=choose.flag()) if is_narrow else None


family(
    "max_pool",
    _pool,
    {
        "plain": "td.max_pool({0}, {kernel}, {stride}, {padding}, {dilation})",
        "relu": "td.max_pool(td.relu({0}), {kernel}, {stride}, {padding}, {dilation})",
    },
)
family(
    "avg_pool",
    _pool,
    {
        "plain": "td.avg_pool({0}, {kernel}, {stride}, {padding}, {counted})",
        "squared": "td.avg_pool({0} * {0}, {kernel}, {stride}, {padding}, {counted})",
    },
)
