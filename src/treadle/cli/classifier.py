"""The model that `treadle tour` shows."""

from __future__ import annotations

import treadle as td

Params = dict[str, td.Tensor]


def logits(params: Params, x: td.Tensor) -> td.Tensor:
    hidden = td.tanh(td.linear(x, params["w1"], params["b1"]))  # (N, H)
    return td.linear(hidden, params["w2"], params["b2"])  # (N, C)


def loss(params: Params, x: td.Tensor, y: td.Tensor) -> td.Tensor:
    """The mean cross-entropy."""
    scores = td.log_softmax(logits(params, x))
    target = td.one_hot(y, scores.shape[-1])
    return -(scores * target).sum(-1).mean()


def accuracy(params: Params, x: td.Tensor, y: td.Tensor) -> td.Tensor:
    return (logits(params, x).argmax(-1) == y).astype(td.float32).mean()


def graph(*examples: object) -> td.Graph:
    return td.trace(loss, *examples)
