"""Loops: what is carried is a row, several rows, or a pair."""

from __future__ import annotations

from treadle.fuzz.catalogue.rules import HALF, proposal
from treadle.fuzz.chooser import SMALL, Chooser, Proposal
from treadle.fuzz.forms import family

LENGTHS = (1, 2, 3, 5, 8, 9, 17, 33)


def rows(choose: Chooser) -> Proposal | None:
    """(T, m, n) to go over, (m, n) to begin with, and (n, n) to multiply by."""
    length, rows = choose.pick(LENGTHS), choose.pick(SMALL)
    width = choose.size(129)
    if length * rows * width > 30_000:
        return None
    x = choose.like((length, rows, width), HALF)
    return proposal(x, choose.like((rows, width), HALF), choose.like((width, width), HALF))


_CELL = "lambda h, v: (td.tanh(h @ {2} * 0.3 + v), h)"
family(
    "scan",
    rows,
    {
        "rnn": f"td.scan({_CELL}, {{1}}, {{0}})[1]",
        "reversed": f"td.scan({_CELL}, {{1}}, {{0}}, reverse=True)[0]",
        "recomputed": f"td.scan({_CELL}, {{1}}, {{0}}, recompute=True)[1]",
        "average": "td.scan(lambda h, v: (h * 0.9 + v * 0.1, h * v), {1}, {0})[1]",
        "softmax": "td.scan(lambda h, v: (td.softmax(h + v), h), {1}, {0})[1]",
        "two": (
            "td.scan(lambda h, v: ((td.tanh(h[0] + v), h[1] + h[0] * 0.5), h[0] * h[1]), "
            "({1}, {1} * 2), {0})[1]"
        ),
        "layer_norm": (
            "td.scan(lambda h, v: (td.layer_norm(h + v, eps=0.1), td.max(h, -1)), {1}, {0})[1]"
        ),
        "logsumexp": "td.scan(lambda h, v: (h * 0.5 + v, td.logsumexp(h * v, -1)), {1}, {0})[1]",
        "centred": "td.scan(lambda h, v: (h * 0.5 + v - v.mean(0), td.var(h, 0, 0)), {1}, {0})[1]",
        "maximum": "td.scan(lambda h, v: (td.maximum(h * 0.9, v), h - h.max(0)), {1}, {0})[1]",
        "matrix": ("td.scan(lambda h, v: (h * 0.5 + v.T @ v * 0.1, h.sum(0)), {2}, {0})[1]"),
    },
)


def chosen(choose: Chooser) -> Proposal | None:
    """As `rows`, and m of the m rows for each step."""
    found = rows(choose)
    if found is None:
        return None
    length, count, _ = choose.shape(found.operands[0])
    return proposal(*found.operands[:2], choose.integers((length, count), count))


_GOING = "{1}, ({0}, {2})"
family(
    "scan_of_places",
    chosen,
    {
        "added": (
            "td.scan(lambda h, v: (h * 0.5 + td.segment_sum(v[0], v[1], {1}.shape[0]), h), "
            f"{_GOING})[1]"
        ),
        "read": (
            f"td.scan(lambda h, v: (h * 0.5 + td.take(td.tanh(h), v[1], 0) + v[0], h), {_GOING})[1]"
        ),
        "reversed": (
            "td.scan(lambda h, v: (h * 0.5 + td.scatter_add(v[0], v[1], h * 0.1), h), "
            f"{_GOING}, reverse=True)[1]"
        ),
        "sorted": (
            f"td.scan(lambda h, v: (td.take(h * 0.5 + v[0], td.argsort(v[1]), 0), h), {_GOING})[1]"
        ),
    },
)
