"""Batches and loops by transformation: `vmap`, `associative_scan`, `while_loop`.

Conditions count iterations: computed values, which backends round differently, would choose
differently too.
"""

from __future__ import annotations

from treadle.fuzz.catalogue.scans import rows
from treadle.fuzz.forms import family

_AFFINE = "lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1])"

family(
    "transform",
    rows,
    {
        "mapped": "td.vmap(lambda v, h: td.tanh(v @ {2} * 0.3) + h, (0, None))({0}, {1})",
        "mapped_last": "td.vmap(lambda v: td.softmax(v, 0), -1, -1)({0})",
        "mapped_twice": (
            "td.vmap(td.vmap(lambda v, h: v * h.sum(), (0, None)), (0, None))({0}, {1})"
        ),
        "mapped_gradient": (
            "td.vmap(td.grad(lambda v: (td.tanh(v @ {2} * 0.3) * {1}).sum()))({0})"
        ),
        "mapped_scan": (
            "td.vmap(lambda h: "
            "td.scan(lambda c, v: (td.tanh(c * 0.5 + v), c), h, {0}[:, 0])[1])({1})"
        ),
        "mapped_norm": "td.vmap(lambda v, w: td.layer_norm(v, w, eps=0.1), (0, None))({0}, {1}[0])",
        "associative": f"td.associative_scan({_AFFINE}, (td.sigmoid({{0}}), {{0}}))[1]",
        "associative_last": "td.associative_scan(td.add, {0} * 0.1, -1, reverse=True)",
        "while": (
            "td.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, td.tanh(s[1] * 0.5 + {1})), "
            "(0, {0}[0]), max_iterations=5)[1]"
        ),
    },
)
