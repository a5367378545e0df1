"""What people write by hand: each is a few functions that a compiler may fuse."""

from __future__ import annotations

from treadle.fuzz.catalogue.rules import matrix, matrix_along, proposal, scaled
from treadle.fuzz.chooser import SIZES, Chooser, Proposal
from treadle.fuzz.forms import family

family(
    "compound",
    matrix_along,
    {
        "margin": "{0}.max({axis}) - {0}.mean({axis})",
        "weighted": "({0} * td.softmax({0}, {axis})).sum({axis})",
        "softargmax": (
            "(td.softmax({0}, {axis}) * td.iota({0}.shape, {axis}, td.float32)).sum({axis})"
        ),
        "log_mean_exp": "td.logsumexp({0} - td.max({0}), {axis})",
        "huberised": (
            "td.where(td.abs({0} - {0}.mean({axis}, keepdims=True)) < 1, {0} * {0}, "
            "td.abs({0})).mean({axis})"
        ),
        "triple": (
            "td.logsumexp({0} - {0}.max({axis}, keepdims=True), {axis}) + td.var({0}, {axis}, 0)"
        ),
        "spread": "{0}.max({axis}) - {0}.min({axis})",
        "max_normed": "{0} / (1 + td.abs({0}).max({axis}, keepdims=True))",
        "ratio": "td.exp({0}).sum({axis}) / (td.exp({0}.mean({axis})) + 1)",
        "geometric": "td.exp(td.log(td.abs({0}) + 0.1).mean({axis}))",
        "harmonic": "1 / (1 / (td.abs({0}) + 0.3)).mean({axis})",
        "lse_var": "td.logsumexp({0}, {axis}) * td.var({0}, {axis}, 0)",
        "top_margin": "td.sort({0}, {axis})[0].max({axis}) - td.logsumexp({0}, {axis})",
        "info_nce": "td.logsumexp({0}, {axis}).mean() - {0}.mean()",
    },
)

family(
    "compound_matrix",
    matrix,
    {
        "sinkhorn": (
            "(lambda y: y - td.logsumexp(y, 0, keepdims=True))"
            "({0} - td.logsumexp({0}, 1, keepdims=True))"
        ),
        "whiten": "(({0} - {0}.mean(0)) / (td.std({0}, 0, 0) + 0.1)).max(1)",
        "excite": "{0} * td.softmax({0}.mean(0)) * td.sigmoid({0}.max(1))[:, None]",
        "outer_norm": "{0} / (td.norm({0}, 1)[:, None] + 1) / (td.norm({0}, 0)[None] + 1)",
        "row_and_column": "{0} - {0}.mean(0) - {0}.mean(1, keepdims=True) + {0}.mean()",
        "diagonal": "({0} * {0}).sum(0) @ td.softmax({0}, 0).T",
        "rank_one": "{0}.mean(1, keepdims=True) * {0}.mean(0, keepdims=True)",
        "covariance": "({0} - {0}.mean(0)).T @ ({0} - {0}.mean(0)) / {0}.shape[0]",
        "gram": "{0} @ {0}.T * 0.1",
        "gram_norm": "td.layer_norm({0}.T @ {0}, eps=0.1)",
        "gate": "td.tanh({0}) * td.sigmoid(td.flip({0}, 1))",
        "similarity": "td.logsumexp({0} @ {0}.T * 0.1, 0)",
        "swiglu": "td.swiglu(td.concat([{0}, {0} * 2], -1))",
        "geglu": "td.geglu(td.concat([{0}, {0} * 2], -1))",
    },
)


def _linear(choose: Chooser) -> Proposal:
    x = choose.value(low=2, high=2, fits=lambda array: array.shape[1] <= 300)
    width, out = choose.shape(x)[1], choose.pick(SIZES)
    return proposal(x, scaled(choose, (out, width), width), choose.like((out,)))


_LINEAR = "td.linear({0}, {1}, {2})"
family(
    "linear",
    _linear,
    {
        "plain": _LINEAR,
        "relu": f"td.relu({_LINEAR})",
        "gelu": f"td.gelu({_LINEAR})",
        "layer_norm": f"td.layer_norm({_LINEAR}, eps=1e-2)",
        "softmax": f"td.softmax({_LINEAR})",
        "two": f"td.tanh({_LINEAR}) @ {{1}}",
        "residual": f"{{0}} + td.relu({_LINEAR}) @ {{1}}",
        "tanh_sum": f"td.tanh({_LINEAR}).sum(0)",
        "log_softmax": f"td.log_softmax({_LINEAR}).mean(0)",
        "logsumexp": f"td.logsumexp({_LINEAR}, -1)",
        "square_mean": f"td.square({_LINEAR}).mean(-1)",
        "batched": "td.linear({0}[None], {1}, {2})",
        "vector": "td.linear({0}[0], {1}, {2})",
    },
)
