"""Losses: values for each row, and the numbers that training makes smaller."""

from __future__ import annotations

from treadle.fuzz.catalogue.rules import proposal, scaled
from treadle.fuzz.chooser import SIZES, Chooser, Proposal
from treadle.fuzz.forms import family
from treadle.fuzz.program import Values

PROBABILITY = Values("uniform", 0.02, 0.98)
WEIGHTS = Values("uniform", 0.5, 2.0)


def _labelled(choose: Chooser) -> Proposal:
    """Scores (N, C, …), labels, and a weight for each class."""
    x = choose.value(low=2, high=4)
    rows, classes, *rest = choose.shape(x)
    return proposal(x, choose.integers((rows, *rest), classes), choose.like((classes,), WEIGHTS))


ROWS = {
    "cross_entropy": 'losses.cross_entropy({0}, {1}, reduction="none")',
    "ignored": 'losses.cross_entropy({0}, {1}, ignore_index=0, reduction="none")',
    "class_weights": 'losses.cross_entropy({0}, {1}, {2}, reduction="none")',
    "smoothed": 'losses.cross_entropy({0}, {1}, label_smoothing=0.1, reduction="none")',
    "nll": 'losses.nll(td.log_softmax({0}, 1), {1}, reduction="none")',
    "focal": (
        "(td.square(1 - td.softmax({0}, 1)) * td.log_softmax({0}, 1) * "
        "td.moveaxis(td.one_hot({1}, {0}.shape[1]), -1, 1)).sum(1)"
    ),
}
MEANS = {
    "cross_entropy": "losses.cross_entropy({0}, {1})",
    "ignored": "losses.cross_entropy({0}, {1}, ignore_index=1)",
    "class_weights": "losses.cross_entropy({0}, {1}, {2})",
    "smoothed": "losses.cross_entropy({0}, {1}, label_smoothing=0.1)",
    "nll": "losses.nll(td.log_softmax({0}, 1), {1})",
}
family("loss_rows", _labelled, ROWS)
family("loss_mean", _labelled, {name: f"{text}.tensor()" for name, text in MEANS.items()})
family("training_loss", _labelled, MEANS, is_loss=True)
family(
    "training_loss_rows",
    _labelled,
    {name: f"td.mean({text})" for name, text in ROWS.items()},
    is_loss=True,
)


def _compared(choose: Chooser) -> Proposal:
    x = choose.value(low=1)
    return proposal(x, choose.like(choose.shape(x), PROBABILITY))


PAIRS = {
    "mse": "losses.mse({0}, {1}, {reduction})",
    "l1": "losses.l1({0}, {1}, {reduction})",
    "huber": "losses.huber({0}, {1}, {reduction})",
    "bce_with_logits": "losses.bce_with_logits({0}, {1}, reduction={reduction})",
    "bce": "losses.bce(td.sigmoid({0}), {1}, reduction={reduction})",
    "kl": "losses.kl_div(td.log_softmax({0}, -1), td.softmax({1}, -1), {reduction})",
    "dense": "losses.cross_entropy({0}, td.softmax({1}, -1), reduction={reduction}, axis=-1)",
    "hinge": "td.mean(td.relu(1 + {0} - {0}.max(-1, keepdims=True) * {1}), -1)",
}


def _written(reduction: str) -> dict[str, str]:
    return {n: text.replace("{reduction}", f'"{reduction}"') for n, text in PAIRS.items()}


family("loss_pair", _compared, _written("none"))
family(
    "training_loss_pair",
    _compared,
    {name: text for name, text in _written("mean").items() if name != "hinge"},
    is_loss=True,
)


def _own(choose: Chooser) -> Proposal:
    return proposal(choose.value(low=2, high=2))


family(
    "training_loss_own",
    _own,
    {
        "square": "td.mean(td.square({0}))",
        "info_nce": "td.mean(td.logsumexp({0}, 0)) - td.mean({0})",
        "log_partition": "td.mean(td.logsumexp({0}, 1))",
        "variance": "td.mean(td.var({0}, 0, 0))",
        "entropy": "-td.mean((td.softmax({0}) * td.log_softmax({0})).sum(-1))",
    },
    is_loss=True,
)


def _head(choose: Chooser) -> Proposal:
    x = choose.value(low=2, high=2, fits=lambda array: array.shape[1] <= 129)
    rows, width = choose.shape(x)
    classes = choose.pick(SIZES)
    weight = scaled(choose, (classes, width), width)
    return proposal(x, weight, choose.integers((rows,), classes), choose.like((classes,)))


HEADS = {
    "plain": "losses.linear_cross_entropy({0}, {1}, {2}{how!s})",
    "biased": "losses.linear_cross_entropy({0}, {1}, {2}, linear_bias={3}{how!s})",
    "smoothed": "losses.linear_cross_entropy({0}, {1}, {2}, label_smoothing=0.1{how!s})",
}
family(
    "loss_head",
    _head,
    {n: text.replace("{how!s}", ', reduction="none"') for n, text in HEADS.items()},
)
family(
    "training_loss_head",
    _head,
    {n: text.replace("{how!s}", "") for n, text in HEADS.items()},
    is_loss=True,
)
