"""LSTM, GRU and RNN through `scan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.control import scan
from treadle.frontend.functions import activations as act
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator

Function = Callable[[Tensor], Tensor]
Carry = tuple[Tensor, ...]
# Activations by their names in files, with the usual alpha and beta.
FUNCTIONS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], float, float]] = {
    "Sigmoid": (lambda x, alpha, beta: act.sigmoid(x), 0, 0),
    "Tanh": (lambda x, alpha, beta: a.tanh(x), 0, 0),
    "Relu": (lambda x, alpha, beta: act.relu(x), 0, 0),
    "Affine": (lambda x, alpha, beta: x * alpha + beta, 1.0, 0.0),
    "LeakyRelu": (lambda x, alpha, beta: act.leaky_relu(x, alpha), 0.01, 0),
    "ThresholdedRelu": (lambda x, alpha, beta: a.where(a.gt(x, alpha), x, 0.0), 1.0, 0),
    "ScaledTanh": (lambda x, alpha, beta: a.tanh(x * beta) * alpha, 1.0, 1.0),
    "HardSigmoid": (lambda x, alpha, beta: a.clamp(x * alpha + beta, 0.0, 1.0), 0.2, 0.5),
    "Elu": (lambda x, alpha, beta: act.elu(x, alpha), 1.0, 0),
    "Softsign": (lambda x, alpha, beta: act.softsign(x), 0, 0),
    "Softplus": (lambda x, alpha, beta: act.softplus(x), 0, 0),
}
USUAL = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
TAKES_ALPHA = ("Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu")
TAKES_BETA = ("Affine", "ScaledTanh", "HardSigmoid")


@dataclass(frozen=True)
class Cell:
    """One direction: its parameters, functions and how it steps."""

    call: Call
    weight: Tensor  # (gates · H, features)
    recurrent: Tensor  # (gates · H, H)
    bias: Tensor | None  # (gates · H,) of the inputs
    hidden_bias: Tensor | None
    peepholes: Carry
    functions: tuple[Function, ...]

    def step(self, projected: Tensor, carry: Carry) -> Carry:
        return {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.call.op](
            projected, carry
        )

    def _limited(self, x: Tensor) -> Tensor:
        clip = self.call.real("clip", 0.0)
        return a.clamp(x, -clip, clip) if clip > 0 else x

    def _hidden(self, h: Tensor, first: int, last: int) -> Tensor:
        """The hidden state's part of some gates."""
        size = self.recurrent.shape[1]
        part = s.slice_along(self.recurrent, 0, first * size, last * size)
        if self.hidden_bias is None:
            return linear.linear(h, part)
        return linear.linear(h, part, s.slice_along(self.hidden_bias, 0, first * size, last * size))

    def _rnn(self, projected: Tensor, carry: Carry) -> Carry:
        return (self.functions[0](self._limited(projected + self._hidden(carry[0], 0, 1))),)

    def _lstm(self, projected: Tensor, carry: Carry) -> Carry:
        """Gates are in the order i, o, f, c."""
        f, g, h = self.functions
        hidden, cell = carry
        gates = s.chunk(projected + self._hidden(hidden, 0, 4), 4, -1)
        i, o, forget, new = gates
        if self.peepholes:
            i, forget = i + self.peepholes[0] * cell, forget + self.peepholes[2] * cell
        i = f(self._limited(i))
        forget = 1 - i if self.call.flag("input_forget") else f(self._limited(forget))
        cell = forget * cell + i * g(self._limited(new))
        if self.peepholes:
            o = o + self.peepholes[1] * cell
        return f(self._limited(o)) * h(cell), cell

    def _gru(self, projected: Tensor, carry: Carry) -> Carry:
        """Gates are in the order z, r, h."""
        f, g = self.functions
        (hidden,) = carry
        update_x, reset_x, new_x = s.chunk(projected, 3, -1)
        update_h, reset_h = s.chunk(self._hidden(hidden, 0, 2), 2, -1)
        update = f(self._limited(update_x + update_h))
        reset = f(self._limited(reset_x + reset_h))
        if self.call.flag("linear_before_reset"):
            inner = reset * self._hidden(hidden, 2, 3)
        else:
            inner = self._hidden(reset * hidden, 2, 3)
        new = g(self._limited(new_x + inner))
        return ((1 - update) * new + update * hidden,)


def _functions(call: Call, way: int) -> tuple[Function, ...]:
    usual = USUAL[call.op]
    named = call.texts("activations", ())
    names = named[way * len(usual) : (way + 1) * len(usual)] if named else usual
    if len(names) != len(usual) or any(n not in FUNCTIONS for n in names):
        raise call.refuse(f"activations {str(named)[:200]}", f"{', '.join(FUNCTIONS)} are read.")
    before = list(named[: way * len(usual)])
    found = []
    for name in names:
        function, alpha, beta = FUNCTIONS[name]
        alpha = _given(call, "activation_alpha", TAKES_ALPHA, before, name, alpha)
        beta = _given(call, "activation_beta", TAKES_BETA, before, name, beta)
        before.append(name)
        found.append(_bound(function, alpha, beta))
    return tuple(found)


def _given(
    call: Call, key: str, takes: tuple[str, ...], before: list[str], name: str, usual: float
) -> float:
    """The number of an activation among those that take one, or its usual one."""
    values = call.reals(key, ())
    place = sum(n in takes for n in before)
    return values[place] if name in takes and place < len(values) else usual


def _bound(function: Callable[..., Tensor], alpha: float, beta: float) -> Function:
    return lambda x: function(x, alpha, beta)


@operator("LSTM", "GRU", "RNN")
def _recurrent(
    call: Call,
    x: Value,
    weight: Value,
    recurrent: Value,
    bias: Value = None,
    lengths: Value = None,
    first_h: Value = None,
    first_c: Value = None,
    peepholes: Value = None,
) -> list[Tensor]:
    ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(
        call.text("direction", "forward")
    )
    rows, w, u = as_tensor(x), as_tensor(weight), as_tensor(recurrent)
    if ways is None or rows.ndim != 3 or w.ndim != 3 or u.ndim != 3 or w.shape[0] != len(ways):
        raise call.refuse(f"x is {rows.type}, the weights {w.type} and {u.type}")
    is_batch_first = call.flag("layout")
    rows = s.transpose(rows, 0, 1) if is_batch_first else rows
    t, n = rows.shape[:2]
    valid = None
    if lengths is not None:
        ends = cast_to(as_tensor(lengths), dtypes.int32)
        valid = s.unsqueeze(s.iota((t, n), 0) < ends, -1)
    starts = [first_h, first_c] if call.op == "LSTM" else [first_h]
    outputs, lasts = [], []
    for way, is_reverse in enumerate(ways):
        cell = _cell(call, way, w, u, bias, peepholes)
        carry = tuple(_start(v, way, is_batch_first, (n, u.shape[2]), rows) for v in starts)
        last, output = _run(cell, rows, carry, is_reverse, valid)
        outputs.append(output)
        lasts.append(last)
    result = s.stack(outputs, 1)  # (T, ways, N, H)
    finals = [s.stack(parts, 0) for parts in zip(*lasts, strict=True)]
    if is_batch_first:
        result = s.permute(result, (2, 0, 1, 3))
        finals = [s.transpose(f, 0, 1) for f in finals]
    return [result, *finals]


def _cell(call: Call, way: int, w: Tensor, u: Tensor, bias: Value, peepholes: Value) -> Cell:
    size = GATES[call.op] * u.shape[2]
    biases: list[Tensor | None] = [None, None]
    if bias is not None:
        both = as_tensor(bias)[way]
        biases = [s.slice_along(both, 0, i * size, (i + 1) * size) for i in (0, 1)]
    holes: Carry = ()
    if peepholes is not None:
        holes = tuple(s.chunk(as_tensor(peepholes)[way], 3, 0))
    functions = _functions(call, way)
    return Cell(call, w[way], u[way], biases[0], biases[1], holes, functions)


def _start(
    value: Value, way: int, is_batch_first: bool, shape: tuple[int, int], rows: Tensor
) -> Tensor:
    if value is None:
        return s.zeros(shape, rows.dtype)
    given = as_tensor(value)
    return given[:, way] if is_batch_first else given[way]


def _run(
    cell: Cell, rows: Tensor, start: Carry, is_reverse: bool, valid: Tensor | None
) -> tuple[Carry, Tensor]:
    projected = linear.linear(rows, cell.weight, cell.bias)

    def body(carry: Carry, given: Any) -> tuple[Carry, Tensor]:
        if valid is None:
            after = cell.step(given, carry)
            return after, after[0]
        inputs, is_valid = given
        after = cell.step(inputs, carry)
        kept = tuple(a.where(is_valid, new, old) for new, old in zip(after, carry, strict=True))
        return kept, a.where(is_valid, after[0], 0.0)

    given = projected if valid is None else (projected, valid)
    return scan(body, start, given, reverse=is_reverse)
