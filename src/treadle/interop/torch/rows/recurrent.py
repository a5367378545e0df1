"""Rows of whole recurrent layers, which stay one scan for each direction of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.errors import ArgumentError
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import aten
from treadle.nn.recurrent import GRU, LSTM, RNN

Tensors = Sequence[Tensor]
Layer = LSTM | GRU | RNN


def _layer(
    kind: type[LSTM] | type[GRU] | type[RNN],
    x: Tensor,
    hidden: Tensor,
    params: Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Layer:
    """A layer with the given tensors in place of its parameters."""
    sizes = x.shape[-1], hidden.shape[-1], num_layers
    layer = kind(
        *sizes,
        bias=has_biases,
        batch_first=batch_first,
        dropout=dropout,
        bidirectional=bidirectional,
    )
    names = [n for n, _ in layer.named_parameters()]
    if len(names) != len(params):
        raise ArgumentError(
            "from_module", "a recurrent layer with proj_size", "Use a linear layer after it."
        )
    for name, given in zip(names, params, strict=True):
        setattr(layer, name, given)
    layer.train(train)
    return layer


@aten("lstm.input")
def _lstm(
    x: Tensor,
    hx: Tensors,
    params: Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    terms = has_biases, num_layers, dropout, train, bidirectional, batch_first
    if hx[0].shape != hx[1].shape:
        raise ArgumentError("from_module", "an LSTM with proj_size", "Use a linear layer after it.")
    output, (h, c) = _layer(LSTM, x, hx[0], params, *terms).run(x, (hx[0], hx[1]))
    return output, h, c


def _plain(layer: Layer, x: Tensor, hx: Tensor) -> tuple[Tensor, Tensor]:
    output, (h,) = layer.run(x, (hx,))
    return output, h


@aten("gru.input")
def _gru(
    x: Tensor,
    hx: Tensor,
    params: Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    terms = has_biases, num_layers, dropout, train, bidirectional, batch_first
    return _plain(_layer(GRU, x, hx, params, *terms), x, hx)


@aten("rnn_tanh.input")
def _rnn_tanh(x: Tensor, hx: Tensor, params: Tensors, *terms: bool) -> tuple[Tensor, Tensor]:
    return _plain(_layer(RNN, x, hx, params, *terms), x, hx)


@aten("rnn_relu.input")
def _rnn_relu(x: Tensor, hx: Tensor, params: Tensors, *terms: bool) -> tuple[Tensor, Tensor]:
    layer = _layer(RNN, x, hx, params, *terms)
    assert isinstance(layer, RNN)
    layer.nonlinearity = "relu"
    return _plain(layer, x, hx)
