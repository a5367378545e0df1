"""LSTM, GRU and RNN through `scan`, with PyTorch's names and gate order; and their cells."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from treadle.base.errors import IndexRangeError, ShapeError
from treadle.base.numbers import check_choice, check_whole
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.control import scan
from treadle.frontend.functions import linear
from treadle.frontend.functions.activations import relu, sigmoid
from treadle.frontend.functions.arithmetic import tanh, where
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.shaping import (
    chunk,
    concat,
    iota,
    reshape,
    squeeze,
    stack,
    transpose,
    unsqueeze,
    zeros,
)
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.dropout import Dropout
from treadle.nn.module import Module, Parameter

Carry = tuple[Tensor, ...]


class _Recurrent(Module):
    """Layers of a cell, each over the whole sequence, one or both ways."""

    gates = 0
    carries = 0

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ):
        name = type(self).__name__
        check_whole(name, "input_size", input_size)
        check_whole(name, "hidden_size", hidden_size)
        check_whole(name, "num_layers", num_layers)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.has_bias, self.batch_first, self.bidirectional = bias, batch_first, bidirectional
        self.between = Dropout(dropout)
        bound = 1 / math.sqrt(hidden_size)
        ways = 2 if bidirectional else 1
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * ways
            for way in range(ways):
                self._declare(_suffix(layer, way), width, init.uniform(-bound, bound))

    def _declare(self, suffix: str, width: int, first: init.Init) -> None:
        rows = self.gates * self.hidden_size
        setattr(self, f"weight_ih_{suffix}", Parameter((rows, width), first))
        setattr(self, f"weight_hh_{suffix}", Parameter((rows, self.hidden_size), first))
        if self.has_bias:
            setattr(self, f"bias_ih_{suffix}", Parameter((rows,), first))
            setattr(self, f"bias_hh_{suffix}", Parameter((rows,), first))

    def step(self, inputs: Tensor, hidden: Tensor, carry: Carry) -> Carry:
        """The next carry from both projections; the first of it is the output."""
        raise NotImplementedError

    def run(
        self, x: Operand, initial: tuple[Operand, ...] | None, lengths: Operand | None = None
    ) -> tuple[Tensor, Carry]:
        """Outputs and final carries; sequences end at their lengths, if those are given."""
        sequence = as_tensor(x)
        if sequence.ndim == 2 and sequence.shape[1] == self.input_size:
            return self._one(sequence, initial, lengths)
        if sequence.ndim != 3 or sequence.shape[2] != self.input_size:
            raise ShapeError(
                type(self).__name__,
                f"x is {sequence.type}, the input size {self.input_size}",
                "x is (T, N, features), (N, T, features) with batch_first, or (T, features).",
            )
        if self.batch_first:
            sequence = transpose(sequence, 0, 1)
        starts = self._initial(sequence, initial)
        valid = None if lengths is None else self._valid(sequence, lengths)
        ways = 2 if self.bidirectional else 1
        finals: list[Carry] = []
        for layer in range(self.num_layers):
            if layer:
                sequence = self.between(sequence)
            outputs = []
            for way in range(ways):
                start = tuple(s[layer * ways + way] for s in starts)
                last, output = self._one_way(sequence, start, _suffix(layer, way), bool(way), valid)
                finals.append(last)
                outputs.append(output)
            sequence = concat(outputs, -1)
        result = transpose(sequence, 0, 1) if self.batch_first else sequence
        return result, tuple(stack(parts) for parts in zip(*finals, strict=True))

    def _one(
        self, sequence: Tensor, initial: tuple[Operand, ...] | None, lengths: Operand | None
    ) -> tuple[Tensor, Carry]:
        """A sequence without a batch axis: (T, features), its states (layers · ways, hidden)."""
        axis = 0 if self.batch_first else 1
        states = None if initial is None else tuple(unsqueeze(t, 1) for t in initial)
        if lengths is not None:
            lengths = reshape(lengths, (1,))
        output, carries = self.run(unsqueeze(sequence, axis), states, lengths)
        return squeeze(output, axis), tuple(squeeze(t, 1) for t in carries)

    def _initial(self, sequence: Tensor, initial: tuple[Operand, ...] | None) -> Carry:
        ways = 2 if self.bidirectional else 1
        shape = (self.num_layers * ways, sequence.shape[1], self.hidden_size)
        if initial is None:
            return (zeros(shape, sequence.dtype),) * self.carries
        given = tuple(as_tensor(t) for t in initial)
        if len(given) != self.carries or any(t.shape != shape for t in given):
            raise ShapeError(
                type(self).__name__,
                f"initial states are {', '.join(str(t.type) for t in given)}",
                f"Give {self.carries} of shape {shape}: (layers · ways, N, hidden).",
            )
        return given

    def _valid(self, sequence: Tensor, lengths: Operand) -> Tensor:
        """Which steps of each sequence count: (T, N, 1)."""
        t, n = sequence.shape[:2]
        given = as_tensor(lengths)
        if given.shape != (n,) or not given.dtype.is_integer:
            raise ShapeError(
                type(self).__name__,
                f"lengths are {given.type} for {n} sequences",
                "Give one integer for each, from 0 to T.",
            )
        _check_lengths(type(self).__name__, given, t)
        # An index, so that lengths of a batch are compared with 0 … T when the program runs.
        ends = take(iota((t + 1,), 0), given, 0)
        return unsqueeze(iota((t, n), 0) < ends, -1)

    def _one_way(
        self, sequence: Tensor, start: Carry, suffix: str, reverse: bool, valid: Tensor | None
    ) -> tuple[Carry, Tensor]:
        parameter: Callable[[str], Parameter | None] = lambda kind: getattr(  # noqa: E731
            self, f"{kind}_{suffix}", None
        )
        weight = parameter("weight_ih")
        hidden_weight, hidden_bias = parameter("weight_hh"), parameter("bias_hh")
        assert weight is not None and hidden_weight is not None  # noqa: PT018
        # The inputs' half does not depend on the carry: one product for all steps.
        projected = linear.linear(sequence, weight, parameter("bias_ih"))
        first = tuple(cast(t, projected.dtype) for t in start)

        def body(carry: Carry, inputs: Tensor) -> tuple[Carry, Tensor]:
            hidden = linear.linear(carry[0], hidden_weight, hidden_bias)
            after = self.step(inputs, hidden, carry)
            return after, after[0]

        def masked(carry: Carry, given: tuple[Tensor, Tensor]) -> tuple[Carry, Tensor]:
            """Beyond a sequence's end the carry stays and the output is 0."""
            inputs, is_valid = given
            after, output = body(carry, inputs)
            kept = tuple(where(is_valid, a, c) for a, c in zip(after, carry, strict=True))
            return kept, where(is_valid, output, 0)

        if valid is None:
            return scan(body, first, projected, reverse=reverse)
        return scan(masked, first, (projected, valid), reverse=reverse)


def _check_lengths(name: str, lengths: Tensor, steps: int) -> None:
    """Lengths that are known already are from 0 to T."""
    if not isinstance(lengths.handle, np.ndarray):
        return
    wrong = np.flatnonzero((lengths.handle < 0) | (lengths.handle > steps))
    if wrong.size:
        raise IndexRangeError(
            name,
            f"lengths[{wrong[0]}] is {lengths.handle[wrong[0]]}, and sequences have {steps} steps",
            f"Pass lengths from 0 to {steps}.",
        )


def _suffix(layer: int, way: int) -> str:
    return f"l{layer}_reverse" if way else f"l{layer}"


class LSTM(_Recurrent):
    """Long short-term memory: `output, (h, c) = lstm(x)`.

    Shapes: (T, N, input_size) → (T, N, ways · hidden_size) and two of (layers · ways, N,
    hidden_size); batch_first puts N first in x and in the output. All may be without N.
    """

    gates = 4
    carries = 2

    def step(self, inputs: Tensor, hidden: Tensor, carry: Carry) -> Carry:
        i, f, g, o = chunk(inputs + hidden, 4, -1)
        cell = sigmoid(f) * carry[1] + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(cell), cell

    def forward(
        self,
        x: Operand,
        initial: tuple[Operand, Operand] | None = None,
        lengths: Operand | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`lengths` (N,) end sequences early, as packing them does in PyTorch."""
        output, (h, c) = self.run(x, initial, lengths)
        return output, (h, c)


class GRU(_Recurrent):
    """Gated recurrent unit: `output, h = gru(x)`.

    Shapes: (T, N, input_size) → (T, N, ways · hidden_size) and (layers · ways, N, hidden_size);
    batch_first puts N first in x and in the output. All may be without N.
    """

    gates = 3
    carries = 1

    def step(self, inputs: Tensor, hidden: Tensor, carry: Carry) -> Carry:
        reset_x, update_x, new_x = chunk(inputs, 3, -1)
        reset_h, update_h, new_h = chunk(hidden, 3, -1)
        update = sigmoid(update_x + update_h)
        new = tanh(new_x + sigmoid(reset_x + reset_h) * new_h)
        return ((1 - update) * new + update * carry[0],)

    def forward(
        self, x: Operand, initial: Operand | None = None, lengths: Operand | None = None
    ) -> tuple[Tensor, Tensor]:
        """`lengths` (N,) end sequences early, as packing them does in PyTorch."""
        output, (h,) = self.run(x, None if initial is None else (initial,), lengths)
        return output, h


class RNN(_Recurrent):
    """The plain recurrent layer, of tanh or relu: `output, h = rnn(x)`.

    Shapes: (T, N, input_size) → (T, N, ways · hidden_size) and (layers · ways, N, hidden_size);
    batch_first puts N first in x and in the output. All may be without N.
    """

    gates = 1
    carries = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ):
        check_choice("RNN", "nonlinearity", nonlinearity, ("tanh", "relu"))
        self.nonlinearity = nonlinearity
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        )

    def step(self, inputs: Tensor, hidden: Tensor, carry: Carry) -> Carry:
        activation = tanh if self.nonlinearity == "tanh" else relu
        return (activation(inputs + hidden),)

    def forward(
        self, x: Operand, initial: Operand | None = None, lengths: Operand | None = None
    ) -> tuple[Tensor, Tensor]:
        """`lengths` (N,) end sequences early, as packing them does in PyTorch."""
        output, (h,) = self.run(x, None if initial is None else (initial,), lengths)
        return output, h


class _Cell(Module):
    """One step of a recurrent layer on (N, features) or (features,)."""

    layer: type[_Recurrent]

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True):
        name = type(self).__name__
        self.input_size = check_whole(name, "input_size", input_size)
        self.hidden_size = check_whole(name, "hidden_size", hidden_size)
        bound = 1 / math.sqrt(hidden_size)
        first, rows = init.uniform(-bound, bound), self.layer.gates * hidden_size
        self.weight_ih = Parameter((rows, input_size), first)
        self.weight_hh = Parameter((rows, hidden_size), first)
        self.bias_ih = Parameter((rows,), first) if bias else None
        self.bias_hh = Parameter((rows,), first) if bias else None

    def _next(self, x: Operand, carry: tuple[Operand, ...] | None) -> Carry:
        value = as_tensor(x)
        if value.ndim not in (1, 2) or value.shape[-1] != self.input_size:
            raise ShapeError(
                type(self).__name__, f"x is {value.type}", f"It is (N, {self.input_size})."
            )
        shape = (*value.shape[:-1], self.hidden_size)
        states = tuple(map(as_tensor, carry or ()))
        if carry is None:
            states = (zeros(shape, value.dtype),) * self.layer.carries
        if any(t.shape != shape for t in states):
            found = ", ".join(str(t.type) for t in states)
            raise ShapeError(type(self).__name__, f"the state is {found}", f"It is {shape}.")
        inputs = linear.linear(value, self.weight_ih, self.bias_ih)
        hidden = linear.linear(states[0], self.weight_hh, self.bias_hh)
        return self.layer.step(self, inputs, hidden, states)  # type: ignore[arg-type]


class LSTMCell(_Cell):
    """One step of an LSTM, `h, c = cell(x, (h, c))`: (N, input_size) → two of (N, hidden_size)."""

    layer = LSTM

    def forward(
        self, x: Operand, state: tuple[Operand, Operand] | None = None
    ) -> tuple[Tensor, Tensor]:
        h, c = self._next(x, state)
        return h, c


class GRUCell(_Cell):
    """One step of a GRU, `h = cell(x, h)`: (N, input_size), (N, hidden_size) → (N, hidden_size)."""

    layer = GRU

    def forward(self, x: Operand, state: Operand | None = None) -> Tensor:
        return self._next(x, None if state is None else (state,))[0]


class RNNCell(_Cell):
    """One step of a plain recurrent layer, `h = cell(x, h)`: (N, input_size) → (N, hidden_size)."""

    layer = RNN

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh"
    ):
        check_choice("RNNCell", "nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(input_size, hidden_size, bias)
        self.nonlinearity = nonlinearity

    def forward(self, x: Operand, state: Operand | None = None) -> Tensor:
        return self._next(x, None if state is None else (state,))[0]
