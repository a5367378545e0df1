"""Bad input: the error's class, its operation, the values, the remedy and the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import pytest

import treadle as td
from treadle.base.errors import TreadleError

V = td.Spec((3,))
S = td.Spec(())
a23 = td.zeros((2, 3))
a45 = td.zeros((4, 5))
a3 = td.zeros((3,))
scalar = td.zeros(())
i3 = td.zeros((3,), td.int32)
b3 = td.zeros((3,), td.bool_)
image = td.zeros((1, 2, 5, 5))
kernel = td.zeros((4, 2, 3, 3))
heads = td.zeros((2, 4, 5, 3))


class Row(NamedTuple):
    call: Callable[[], Any]
    error: type[TreadleError]
    operation: str
    fragments: tuple[str, ...]


def row(call: Callable[[], Any], error: type[TreadleError], operation: str, *fragments: str) -> Row:
    return Row(call, error, operation, fragments)


BROADCASTING = [
    "add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "maximum", "minimum", "eq",
    "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor",
]  # fmt: skip


@pytest.mark.parametrize("name", BROADCASTING)
def test_shapes_that_do_not_broadcast(name: str) -> None:
    function = getattr(td, name)
    check(row(lambda: function(a23, a45), td.ShapeError, name, "(2, 3) and (4, 5)", "reshape"))


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_integer_shapes_that_do_not_broadcast(name: str) -> None:
    x, y = a23.astype(td.int32), a45.astype(td.int32)
    function = getattr(td, name)
    check(row(lambda: function(x, y), td.ShapeError, name, "(2, 3) and (4, 5)", "reshape"))


SHAPES = [
    row(lambda: a23 + a45, td.ShapeError, "add", "(2, 3) and (4, 5)", "Sizes must be equal or 1"),
    row(lambda: a23 + np.zeros(2), td.ShapeError, "add", "(2, 3) and (2,)"),
    row(lambda: td.where(b3, a3, a23.T), td.ShapeError, "where", "(3,)", "(3, 2)"),
    row(lambda: td.clamp(a23, a45), td.ShapeError, "lt", "(2, 3) and (4, 5)"),
    row(lambda: a23 @ a45, td.ShapeError, "matmul", "(2, 3) @ (4, 5): 3 != 4", "Transpose"),
    row(lambda: a23 @ scalar, td.ShapeError, "matmul", "float32[2,3] @ float32[]", "with *"),
    row(
        lambda: td.zeros((2, 1, 3)) @ td.zeros((4, 3, 1)),
        td.ShapeError,
        "matmul",
        "(2, 1, 3) @ (4, 3, 1)",
        "equal or 1",
    ),
    row(lambda: td.linear(a23, a45), td.ShapeError, "linear", "float32[2,3]", "float32[4,5]"),
    row(
        lambda: td.linear(a23, td.zeros((4, 3)), a3),
        td.ShapeError,
        "linear",
        "float32[3]",
        "float32[4,3]",
        "one entry per output",
    ),
    row(lambda: td.einsum("ij,jk", a23, a45), td.ShapeError, "einsum", "'j'", "3 and 4", "(4, 5)"),
    row(lambda: td.einsum("ijk->i", a23), td.ShapeError, "einsum", "'ijk'", "float32[2,3]", "..."),
    row(lambda: td.einsum("ii", a23), td.ShapeError, "einsum", "'i'", "2 and 3", "diagonal"),
    row(lambda: td.einsum("ij,jk", a23), td.ArgumentError, "einsum", "2 terms for 1 operands"),
    row(lambda: td.einsum("ij->ii", a23), td.ArgumentError, "einsum", "'ij->ii'", "each once"),
    row(lambda: td.einsum("ij->ik", a23), td.ArgumentError, "einsum", "'ij->ik'", "of its own"),
    row(lambda: td.einsum("i1->i", a23), td.ArgumentError, "einsum", "'i1'", "letters"),
    row(lambda: td.einsum("......ij", a23), td.ArgumentError, "einsum", 'one "..."'),
    row(lambda: td.einsum(""), td.ArgumentError, "einsum", "without operands"),
    row(lambda: td.concat([a23, a45]), td.ShapeError, "concat", "float32[2,3]", "float32[4,5]"),
    row(lambda: td.concat([a23, a3]), td.ShapeError, "concat", "float32[2,3]", "float32[3]"),
    row(lambda: td.concat([]), td.ArgumentError, "concat", "nothing", "at least one"),
    row(lambda: td.stack([a23, a3]), td.ShapeError, "stack", "float32[2,3] and float32[3]"),
    row(lambda: td.stack([]), td.ArgumentError, "stack", "nothing", "at least one"),
    row(lambda: td.reshape(a23, 4, 2), td.ShapeError, "reshape", "6 elements, (4, 2) has 8", "−1"),
    row(lambda: td.reshape(a23, 4, -1), td.ShapeError, "reshape", "(4, -1)", "come out whole"),
    row(lambda: td.reshape(a23, -1, -1), td.ShapeError, "reshape", "(-1, -1)", "One size may be"),
    row(lambda: td.reshape(a23, -2, -3), td.ShapeError, "reshape", "(-2, -3)", "negative"),
    row(lambda: a23.reshape(2.0, 3), td.ArgumentError, "reshape", "2.0", "integer"),
    row(lambda: td.expand(a23, 2, 4), td.ShapeError, "expand", "float32[2,3]", "(2, 4)", "1 in x"),
    row(lambda: td.expand(a23, 3), td.ShapeError, "expand", "float32[2,3]", "(3,)"),
    row(lambda: td.squeeze(a23, 0), td.ShapeError, "squeeze", "axis 0", "2 elements"),
    row(lambda: td.repeat(a23, 2), td.ShapeError, "repeat", "1 counts", "float32[2,3]", "Give 1"),
    row(lambda: td.repeat(a3, -1), td.ArgumentError, "repeat", "(-1,)", "0 or more"),
    row(lambda: td.split(a23, [1, 1], 1), td.ShapeError, "split", "(1, 1)", "3", "float32[2,3]"),
    row(lambda: td.split(a23, [4, -1], 1), td.ShapeError, "split", "(4, -1)", "axis 1"),
    row(lambda: td.split(a23, 0), td.ArgumentError, "split", "pieces of 0", "at least 1"),
    row(lambda: td.split(a23, 1.5), td.ArgumentError, "split", "1.5", "integer"),
    row(lambda: td.chunk(a23, 0), td.ArgumentError, "chunk", "0 chunks", "at least 1"),
    row(lambda: td.pad(a23, [(1, 1)]), td.ShapeError, "pad", "1 pairs", "float32[2,3]", "(0, 0)"),
    row(lambda: td.pad(a23, [1, 1]), td.ArgumentError, "pad", "[1, 1]", "(before, after)"),
    row(lambda: td.pad(a3, [(-2, -2)]), td.ShapeError, "pad", "-2", "leaves nothing"),
    row(lambda: td.pad(i3, [(1, 0)], 0.5), td.ArgumentError, "constant", "0.5", "int32"),
    row(lambda: td.tril(a3), td.ShapeError, "tril", "float32[3]", "rows and columns"),
    row(lambda: td.swiglu(a23), td.ShapeError, "swiglu", "float32[2,3]", "halves"),
    row(lambda: td.geglu(scalar), td.ShapeError, "geglu", "float32[]", "halves"),
    row(lambda: td.layer_norm(a23, td.ones((2,))), td.ShapeError, "layer_norm", "float32[2]"),
    row(lambda: td.layer_norm(a23, dims=3), td.ShapeError, "layer_norm", "float32[2,3]", "3"),
    row(lambda: td.layer_norm(a23, None, a3), td.ArgumentError, "layer_norm", "bias", "ones"),
    row(lambda: td.rms_norm(a23, td.ones((2,))), td.ShapeError, "rms_norm", "float32[2]"),
    row(lambda: td.max(td.zeros((0, 3)), 0), td.ShapeError, "max", "float32[0,3]", "no elements"),
    row(lambda: td.min(td.zeros((0,))), td.ShapeError, "min", "float32[0]", "no elements"),
    row(lambda: td.argmax(td.zeros((0,))), td.ShapeError, "argmax", "float32[0]"),
    row(lambda: td.argmin(td.zeros((2, 0)), 1), td.ShapeError, "argmin", "float32[2,0]"),
    row(lambda: td.logsumexp(td.zeros((0,))), td.ShapeError, "logsumexp", "float32[0]"),
    row(lambda: td.topk(a23, 4), td.ArgumentError, "topk", "k = 4", "3 elements", "smaller k"),
    row(lambda: td.topk(a23, -1), td.ArgumentError, "topk", "k = -1", "smaller k"),
    row(lambda: td.topk(a23, 1.5), td.ArgumentError, "topk", "k is 1.5", "integer"),
    row(
        lambda: td.take_along_axis(a23, i3, 1),
        td.ShapeError,
        "take_along_axis",
        "int32[3]",
        "float32[2,3]",
        "All axes but 1",
    ),
    row(
        lambda: td.scatter_add(a23, [0, 1], a45),
        td.ShapeError,
        "scatter_add",
        "float32[4,5]",
        "float32[2,3]",
        "(2, 3)",
    ),
    row(lambda: td.embedding([0], a3), td.ShapeError, "embedding", "float32[3]", "(rows, width)"),
    row(lambda: td.dynamic_slice(a23, [0], (1, 1)), td.ShapeError, "dynamic_slice", "int32[1]"),
    row(lambda: td.dynamic_slice(a23, [0, 0], (3, 1)), td.ShapeError, "dynamic_slice", "(3, 1)"),
    row(
        lambda: td.dynamic_update_slice(a23, a45, [0, 0]),
        td.ShapeError,
        "dynamic_update_slice",
        "float32[4,5]",
        "float32[2,3]",
    ),
    row(lambda: td.full((2,), scalar), td.ArgumentError, "full", "float32[]", "td.expand"),
    row(lambda: td.tensor([[1], [1, 2]]), td.ShapeError, "tensor", "equal lengths"),
    row(lambda: td.add(a3, [[1], [1, 2]]), td.ShapeError, "tensor", "equal lengths"),
    row(lambda: bool(a3), td.ShapeError, "bool() of a tensor", "3 elements", "Reduce"),
    row(lambda: float(a3), td.ShapeError, "float() of a tensor", "float32[3]", "Reduce"),
    row(lambda: a3.item(), td.ShapeError, "item()", "float32[3]", "Reduce"),
    row(lambda: len(scalar), td.TraceError, "len", "float32[]"),
    row(lambda: list(scalar), td.TraceError, "len", "float32[]"),
]

WINDOWS = [
    row(lambda: td.conv(image, a23), td.ShapeError, "conv", "float32[1,2,5,5]", "channels"),
    row(lambda: td.conv(image, td.zeros((4, 3, 3, 3))), td.ShapeError, "conv", "1 groups"),
    row(lambda: td.conv(image, kernel, groups=3), td.ShapeError, "conv", "3 groups", "divides"),
    row(lambda: td.conv(image, td.zeros((4, 2, 7, 1))), td.ShapeError, "conv", "(7, 1)", "Pad"),
    row(lambda: td.conv(image, kernel, a3), td.ShapeError, "conv", "float32[3]", "per output"),
    row(lambda: td.conv(image, kernel, stride=0), td.ArgumentError, "conv", "stride is 0", "1"),
    row(lambda: td.conv(image, kernel, stride=(1,)), td.ArgumentError, "conv", "(1,) for 2"),
    row(lambda: td.conv(image, kernel, dilation=-1), td.ArgumentError, "conv", "dilation is -1"),
    row(lambda: td.conv(image, kernel, padding=-1), td.ArgumentError, "conv", "padding is -1"),
    row(lambda: td.conv(image, kernel, padding=0.5), td.ArgumentError, "conv", "padding is 0.5"),
    row(lambda: td.conv(image, kernel, padding="full"), td.ArgumentError, "conv", "'full'", "same"),
    row(
        lambda: td.conv(image, kernel, padding="same", stride=2),
        td.ArgumentError,
        "conv",
        "(2, 2)",
        "stride 1",
    ),
    row(lambda: td.max_pool(a23, 2), td.ShapeError, "max_pool", "float32[2,3]", "spatial"),
    row(lambda: td.max_pool(image, 6), td.ShapeError, "max_pool", "(6, 6)", "float32[1,2,5,5]"),
    row(lambda: td.max_pool(image, 2, padding=2), td.ArgumentError, "max_pool", "half"),
    row(lambda: td.avg_pool(image, (2, 2, 2, 2)), td.ShapeError, "avg_pool", "4 spatial axes"),
    row(lambda: td.avg_pool(image, 2, stride=0), td.ArgumentError, "avg_pool", "stride is 0"),
    row(lambda: td.attention(heads, a23, heads), td.ShapeError, "attention", "float32[2,3]"),
    row(
        lambda: td.attention(heads, td.zeros((2, 3, 5, 3)), td.zeros((2, 3, 5, 3))),
        td.ShapeError,
        "attention",
        "float32[2,4,5,3]",
        "float32[2,3,5,3]",
        "G divides H",
    ),
    row(lambda: td.attention(heads, heads, heads, a23), td.ShapeError, "attention", "(2, 4, 5, 5)"),
    row(
        lambda: td.attention(heads, heads, heads, td.ones((5, 5), td.int32)),
        td.DTypeError,
        "attention",
        "int32[5,5]",
        "Pass mask != 0",
    ),
    row(lambda: td.attention(*[heads.astype(td.int32)] * 3), td.DTypeError, "attention", "int32"),
]

DTYPES = [
    row(lambda: td.where(a3, a3, a3), td.DTypeError, "where", "float32[3]", "Compare"),
    row(lambda: td.neg(b3), td.DTypeError, "neg", "bool[3]", "Cast"),
    row(lambda: td.bitwise_and(a3, a3), td.DTypeError, "and", "float32[3]", "Cast"),
    row(lambda: ~a3, td.DTypeError, "not", "float32[3]", "Cast"),
    row(lambda: td.relu(i3), td.DTypeError, "relu", "int32[3]", "astype"),
    row(lambda: td.softmax(i3), td.DTypeError, "softmax", "int32[3]", "astype"),
    row(lambda: td.layer_norm(i3), td.DTypeError, "layer_norm", "int32[3]", "astype"),
    row(lambda: td.mean(i3), td.DTypeError, "mean", "int32[3]", "astype"),
    row(lambda: td.var(i3), td.DTypeError, "var", "int32[3]", "astype"),
    row(lambda: td.logsumexp(b3), td.DTypeError, "logsumexp", "bool[3]", "astype"),
    row(lambda: td.norm(i3), td.DTypeError, "norm", "int32[3]", "astype"),
    row(lambda: i3**-7, td.DTypeError, "pow", "int32[3]", "-7", "Cast"),
    row(lambda: td.take(a23, a3), td.DTypeError, "take", "float32[3]", "td.int32"),
    row(lambda: td.take(a23, [0.5]), td.DTypeError, "take", "float64", "integers"),
    row(lambda: td.take(a23, [True, False]), td.DTypeError, "take", "bool", "integers"),
    row(lambda: td.take_along_axis(a23, a23, 0), td.DTypeError, "take_along_axis", "float32[2,3]"),
    row(lambda: td.embedding(a3, a23), td.DTypeError, "embedding", "float32[3]", "td.int32"),
    row(lambda: td.one_hot(a3, 4), td.DTypeError, "one_hot", "float32[3]", "int32"),
    row(lambda: td.one_hot([0.5], 4), td.DTypeError, "one_hot", "float32[1]", "int32"),
    row(lambda: td.one_hot(i3, -1), td.ArgumentError, "one_hot", "-1 classes"),
    row(lambda: td.scatter_add(i3, [0], [0.5]), td.DTypeError, "scatter_add", "int32[3]", "Cast"),
    row(
        lambda: td.dynamic_update_slice(i3, td.ones((1,)), [0]),
        td.DTypeError,
        "dynamic_update_slice",
        "float32[1]",
        "int32[3]",
        "Cast",
    ),
    row(lambda: td.gelu(a3, "fast"), td.ArgumentError, "gelu", "'fast'", "tanh"),
    row(lambda: td.clamp(a3), td.ArgumentError, "clamp", "neither", "at least one"),
    row(lambda: td.tensor("text"), td.DTypeError, "tensor", "<U4", "float64"),
    row(lambda: td.tensor("text", td.int32), td.DTypeError, "tensor", "<U4"),
    row(lambda: td.tensor(None), td.DTypeError, "tensor", "object"),
    row(lambda: td.tensor(np.zeros(2, np.int16)), td.DTypeError, "tensor", "int16", "int32"),
    row(lambda: td.tensor(1j), td.DTypeError, "tensor", "complex128"),
    row(lambda: td.tensor(300, td.uint8), td.ArgumentError, "tensor", "300", "0 to 255", "dtype="),
    row(lambda: td.tensor(2**40), td.ArgumentError, "tensor", str(2**40), "td.int64"),
    row(lambda: td.tensor([-1, 2], td.uint32), td.ArgumentError, "tensor", "-1", "uint32"),
    row(lambda: td.tensor(float("nan"), td.int32), td.ArgumentError, "tensor", "nan", "int32"),
    row(lambda: td.zeros((2,), td.int8) + 300, td.ArgumentError, "constant", "300", "wider"),
    row(lambda: td.full((2,), 0.5, td.int32), td.ArgumentError, "constant", "0.5", "int32"),
    row(lambda: a3.astype("float99"), td.DTypeError, "dtype", "'float99'", "float32"),
    row(lambda: td.arange(0, 1, 0.5), td.ArgumentError, "arange", "step is 0.5", "integer"),
    row(lambda: td.arange(0, 5, 0), td.ArgumentError, "arange", "step is 0", "up or down"),
    row(lambda: td.iota((3,), 0, td.bool_), td.ArgumentError, "iota", "bool"),
    row(lambda: range(scalar), td.DTypeError, "a tensor as a Python index", "float32[]", "int(x)"),
    row(lambda: td.random.categorical(i3), td.DTypeError, "categorical", "int32[3]", "logits"),
    row(lambda: td.random.normal((2,), dtype=td.int32), td.DTypeError, "normal", "int32"),
    row(lambda: td.random.uniform((2,), dtype=td.bool_), td.DTypeError, "uniform", "bool"),
]

ONE_AXIS = [
    "argmax", "argmin", "cumsum", "sort", "argsort", "softmax", "log_softmax", "unsqueeze",
]  # fmt: skip
MANY_AXES = ["sum", "max", "min", "prod", "mean", "var", "std", "logsumexp", "norm", "any", "all"]
# The operation that the message names, where it is not the function itself.
INNER = {"argsort": "sort", "std": "var", "norm": "sum", "any": "sum", "all": "sum"}


@pytest.mark.parametrize("name", ONE_AXIS + MANY_AXES + ["flip", "squeeze"])
@pytest.mark.parametrize("axis", [5, -6, "rows"])
def test_axes_that_do_not_exist(name: str, axis: Any) -> None:
    function = getattr(td, name)
    operation = INNER.get(name, name)
    check(row(lambda: function(a23, axis=axis), td.AxisError, operation, repr(axis), "Axes are"))


@pytest.mark.parametrize("name", [*MANY_AXES, "flip", "squeeze"])
def test_axes_named_twice(name: str) -> None:
    function = getattr(td, name)
    operation = INNER.get(name, name)
    check(
        row(
            lambda: function(a23, axis=(1, -1)),
            td.AxisError,
            operation,
            "(1, -1)",
            "[2,3]",
            "twice",
            "Name each axis once",
        )
    )


AXES = [
    row(lambda: td.transpose(a23, 0, 2), td.AxisError, "transpose", "axis 2", "-2 to 1"),
    row(lambda: td.moveaxis(a23, 0, 2), td.AxisError, "moveaxis", "axis 2", "-2 to 1"),
    row(lambda: td.permute(a23, 0, 0), td.AxisError, "permute", "(0, 0)", "Name each axis once"),
    row(lambda: td.permute(a23, 0), td.AxisError, "permute", "(0,)", "float32[2,3]"),
    row(lambda: td.flatten(a23, 1, 0), td.AxisError, "flatten", "axis 1", "Exchange"),
    row(lambda: td.concat([a23, a23], 2), td.AxisError, "concat", "axis 2", "-2 to 1"),
    row(lambda: td.concat([1.0, 2.0]), td.AxisError, "concat", "axis 0", "it has no axes"),
    row(lambda: td.stack([a23, a23], 3), td.AxisError, "stack", "axis 3", "-3 to 2"),
    row(lambda: td.split(a23, 1, 2), td.AxisError, "split", "axis 2"),
    row(lambda: td.chunk(a23, 1, 2), td.AxisError, "chunk", "axis 2"),
    row(lambda: td.roll(a23, 1, 2), td.AxisError, "roll", "axis 2"),
    row(lambda: td.topk(a23, 1, 2), td.AxisError, "topk", "axis 2"),
    row(lambda: td.take(a23, [0], 2), td.AxisError, "take", "axis 2"),
    row(lambda: td.take_along_axis(a23, [[0]], 2), td.AxisError, "take_along_axis", "axis 2"),
    row(lambda: td.scatter_add(a23, [0], a23, 2), td.AxisError, "scatter_add", "axis 2"),
    row(lambda: td.iota((2, 3), 2), td.AxisError, "iota", "axis 2", "(2, 3)"),
    row(lambda: td.sum(scalar, 1), td.AxisError, "sum", "axis 1", "it has no axes"),
    row(lambda: td.random.categorical(a23, 2), td.AxisError, "argmax", "axis 2"),
]

INDICES = [
    row(lambda: a3[7], td.IndexRangeError, "index", "index 7", "axis 0", "float32[3]", "-3 and 2"),
    row(lambda: a23[0, -4], td.IndexRangeError, "index", "index -4", "axis 1", "-3 and 2"),
    row(lambda: td.zeros((0,))[0], td.IndexRangeError, "index", "index 0", "no elements"),
    row(lambda: a3[[0, 7]], td.IndexRangeError, "index", "index 7", "float32[3]", "-3 and 2"),
    row(lambda: a3[np.array([-9])], td.IndexRangeError, "index", "index -9", "-3 and 2"),
    row(lambda: a3[0, 0], td.IndexRangeError, "index", "2 indices", "float32[3]", "one per axis"),
    row(lambda: a23[..., 0, ...], td.IndexRangeError, "index", "float32[2,3]", "one '...'"),
    row(lambda: a3["name"], td.ArgumentError, "index", "'name'", "integer tensors"),
    row(lambda: a3[1.5], td.DTypeError, "index", "float64", "integers"),
    row(lambda: a3[a3], td.DTypeError, "index", "float32[3]", "td.int32"),
    row(lambda: a3[[True, False]], td.ShapeError, "index", "mask of shape (2,)", "sizes"),
    row(lambda: a3[True], td.DTypeError, "index", "True is a bool", "td.where(mask, x, 0)"),
    row(lambda: a23[[0, 1], [0, 1, 2]], td.ShapeError, "index", "(2,) and (3,)"),
    row(lambda: a3[::0], td.ArgumentError, "index", "step", "0"),
    row(lambda: a3["a":"b"], td.ArgumentError, "index", "'a'", "integer"),
    row(lambda: td.take(a23, [0, 2]), td.IndexRangeError, "take", "index 2", "axis 0", "-2 and 1"),
    row(lambda: td.take(a23, -3), td.IndexRangeError, "take", "index -3", "-2 and 1"),
    row(lambda: td.embedding([0, 5], a23), td.IndexRangeError, "embedding", "index 5", "-2 and 1"),
    row(lambda: td.scatter_add(a3, [3], [1.0]), td.IndexRangeError, "scatter_add", "index 3"),
    row(
        lambda: td.take_along_axis(a23, [[3], [0]], 1),
        td.IndexRangeError,
        "take_along_axis",
        "index 3",
    ),
    row(lambda: a3[td.tensor([3])], td.IndexRangeError, "gather", "index 3", "3 elements"),
]


def branch(x: td.Tensor) -> td.Tensor:
    return x if x > 0 else -x


def loop(x: td.Tensor) -> td.Tensor:
    while x < 3:
        x = x * 2
    return x


kept: list[td.Tensor] = []


def keep(x: td.Tensor) -> td.Tensor:
    kept.append(x)
    return x


td.trace(keep, V)

CONTROL = "td.where"
TRACES = [
    row(lambda: td.trace(branch, S), td.TraceError, "bool() of a tensor", "bool[]", CONTROL),
    row(lambda: td.trace(loop, S), td.TraceError, "bool() of a tensor", "`while`", CONTROL),
    row(lambda: td.trace(lambda x: [*range(x)], S), td.TraceError, "a tensor as a Python index"),
    row(lambda: td.trace(lambda x: int(x), S), td.TraceError, "int()", "float32[]", CONTROL),
    row(lambda: td.trace(lambda x: float(x), S), td.TraceError, "float()", "td.debug_print"),
    row(lambda: td.trace(lambda x: np.asarray(x), S), td.TraceError, "np.asarray", "float32[]"),
    row(lambda: td.trace(lambda x: x.numpy(), V), td.TraceError, "numpy()", "td.capture"),
    row(lambda: td.trace(lambda x: x.item(), S), td.TraceError, "item()", "td.tensor(...)"),
    row(lambda: td.trace(lambda x: x.reshape(x[0]), V), td.TraceError, "a tensor as a Python"),
    row(lambda: td.trace(lambda x: x[: x[0]], V), td.ArgumentError, "index", "td.dynamic_slice"),
    row(lambda: td.trace(lambda x: x[x > 0], V), td.DTypeError, "index", "mask", "td.where"),
    row(lambda: td.trace(lambda x: "text", V), td.TraceError, "trace", "'text'", "Return tensors"),
    row(lambda: td.trace(lambda x: {1, 2}, V), td.TraceError, "trace", "{1, 2}", "Return tensors"),
    row(lambda: td.trace(lambda x: x, object()), td.ArgumentError, "trace", "object", "td.Spec"),
    row(lambda: td.trace(lambda x: x, "text"), td.DTypeError, "tensor", "<U4"),
    row(lambda: td.exp(kept[0]), td.TraceError, "exp", "'keep'", "ended", "Return it"),
    row(lambda: kept[0] + 1, td.TraceError, "add", "'keep'", "ended", "Return it"),
    row(lambda: kept[0] + a3, td.TraceError, "add", "'keep'", "ended", "Return it"),
    row(lambda: kept[0].sum(), td.TraceError, "reduce_sum", "'keep'", "ended"),
    row(lambda: td.trace(lambda: kept[0]), td.TraceError, "trace", "'keep'", "ended", "Return it"),
    row(
        lambda: td.trace(lambda y: kept[0] * y, V),
        td.TraceError,
        "mul",
        "two traces",
        "'keep'",
        "argument",
    ),
    row(
        lambda: td.trace(lambda x: td.trace(lambda y: x + y, V), V),
        td.TraceError,
        "add",
        "two traces",
        "argument",
    ),
    row(
        lambda: td.trace(lambda x: td.trace(lambda y: x, V), V),
        td.TraceError,
        "trace",
        "two traces",
        "argument",
    ),
    row(
        lambda: td.trace(lambda x: td.trace(lambda y: td.capture("x", x), V), V),
        td.TraceError,
        "trace",
        "two traces",
        "argument",
    ),
    row(
        lambda: td.trace(lambda x: x, {"a.b": V, "a": {"b": V}}),
        td.NameTakenError,
        "trace",
        "'x.a.b'",
        "Rename",
    ),
    row(lambda: td.trace(lambda x: (td.capture("h", x), td.capture("h", x)), V),
        td.NameTakenError, "capture", "'h'", "a name of its own"),
    row(lambda: td.trace(lambda x: (td.metric("m", x), td.metric("m", x)), S),
        td.NameTakenError, "metric", "'m'", "a name of its own"),
    row(lambda: td.metric("m", a3), td.ArgumentError, "metric", "'m'", "float32[3]", "Reduce"),
    row(lambda: td.debug_print("{loss}", a3), td.ArgumentError, "debug_print", "{loss}", "Use {}"),
    row(lambda: td.debug_print("{} {}", a3), td.ArgumentError, "debug_print", "'{} {}'", "Use {}"),
    row(lambda: td.debug_print("{:.2f}", a3), td.ArgumentError, "debug_print", "float32[3]"),
    row(lambda: td.metric("m", 1.0, a3), td.ArgumentError, "metric", "weight", "float32[3]"),
]  # fmt: skip


def square(x: td.Tensor) -> td.Tensor:
    return x * x


def pair(x: td.Tensor, y: td.Tensor) -> td.Tensor:
    return x * y


def custom(
    backward: Callable[..., Any], forward: Callable[..., Any] = square
) -> Callable[..., Any]:
    return td.grad(lambda *xs: td.custom_vjp(forward, backward)(*xs).sum())


def closing_over(x: td.Tensor) -> td.Tensor:
    return td.custom_vjp(lambda y: x * y, lambda ct, out, y: (ct,))(x).sum()


def backward_closing_over(x: td.Tensor) -> td.Tensor:
    return td.custom_vjp(square, lambda ct, out, y: (ct * x,))(x).sum()


def printing_backward(ct: td.Tensor, out: td.Tensor, x: td.Tensor) -> tuple[td.Tensor]:
    td.debug_print("{}", ct)
    return (ct,)


GRADIENTS = [
    row(lambda: td.grad(square)(a3), td.GradientError, "grad", "float32[3]", ".mean()", "td.vjp"),
    row(lambda: td.grad(lambda x: i3.sum())(a3), td.GradientError, "grad", "int64[]"),
    row(lambda: td.grad(lambda x: (x / 2).sum())(i3), td.GradientError, "grad", "x is int32[3]"),
    row(lambda: td.grad(td.sum, 1)(a3), td.ArgumentError, "grad", "argnums 1", "1 arguments"),
    row(lambda: td.grad(td.sum)(), td.ArgumentError, "grad", "0 arguments", "from 0"),
    row(lambda: td.grad(lambda x: (x, x))(scalar), td.GradientError, "grad", "has_aux=True"),
    row(lambda: td.grad(lambda x: None)(scalar), td.GradientError, "grad", "None", "scalar"),
    row(lambda: td.grad(lambda x: x, has_aux=True)(scalar), td.GradientError, "grad", "(scalar,"),
    row(
        lambda: td.grad(lambda x: ((x, x), x), has_aux=True)(scalar),
        td.GradientError,
        "grad",
        "(scalar, other)",
    ),
    row(lambda: td.vjp(square, a3)[1](scalar), td.GradientError, "vjp", "float32[]", "float32[3]"),
    row(lambda: td.vjp(square, a3)[1](np.ones(3)), td.GradientError, "vjp", "float64[3]", "equal"),
    row(lambda: td.vjp(square, a3)[1]((a3, a3)), td.GradientError, "vjp", "structure", "(0, 1)"),
    row(
        lambda: td.jvp(square, (a3,), (scalar,)), td.GradientError, "jvp", "float32[]", "float32[3]"
    ),
    row(lambda: td.jvp(square, (a3,), (i3,)), td.GradientError, "jvp", "int32[3]", "equal"),
    row(lambda: td.jvp(square, (a3,), (a3, a3)), td.GradientError, "jvp", "structure"),
    row(
        lambda: td.jvp(td.custom_vjp(square, lambda ct, out, x: (ct,)), (a3,), (a3,)),
        td.GradientError,
        "jvp",
        "square",
        "backward of its own",
        "td.vjp",
    ),
    row(lambda: custom(lambda ct, out, x: (ct, ct))(a3), td.GradientError, "custom_vjp",
        "square", "2 gradients for 1 inputs", "one per input"),
    row(lambda: custom(lambda ct, out, x: ())(a3), td.GradientError, "custom_vjp", "0 gradients"),
    row(lambda: custom(lambda ct, out, x: (ct.sum(),))(a3), td.GradientError, "custom_vjp",
        "gradient 0 of square", "()", "(3,)", "Sum it"),
    row(lambda: custom(lambda ct, out, x: (ct.astype(td.float64),))(a3), td.GradientError,
        "custom_vjp", "float64", "float32", "Cast"),
    row(lambda: custom(lambda ct, out, x: ((ct, ct),))(a3), td.GradientError, "custom_vjp",
        "gradient 0 of square", "structure"),
    row(lambda: custom(lambda ct, out, x, y: (ct, "no"), pair)(a3, a3), td.DTypeError, "tensor"),
    row(lambda: td.grad(closing_over)(a3), td.GradientError, "custom_vjp", "not its arguments",
        "float32[3]", "Pass them"),
    row(lambda: td.grad(backward_closing_over)(a3), td.GradientError, "custom_vjp",
        "backward of square", "float32[3]", "Pass them"),
    row(lambda: custom(printing_backward)(a3), td.GradientError, "custom_vjp", "print", "forward"),
]  # fmt: skip


def scan(
    body: Callable[..., Any], init: Any = scalar, xs: Any = a3, **keywords: Any
) -> Callable[[], Any]:
    return td.scan(body, init, xs, **keywords)


def traced_scan(body: Callable[..., Any], init: Any = scalar, xs: Any = a3, **keywords: Any) -> Any:
    return td.trace(lambda: td.scan(body, init, xs, **keywords))


def scan_rows(run: Callable[..., Any]) -> list[Row]:
    return [
        row(lambda: run(lambda c, x: c + x), td.ArgumentError, "scan", "Tensor", "(carry, y)"),
        row(lambda: run(lambda c, x: (c, x, x)), td.ArgumentError, "scan", "tuple of 3", "(carry"),
        row(lambda: run(lambda c, x: ((c, c), x)), td.ArgumentError, "scan", "structure", "(0, 1)"),
        row(lambda: run(lambda c, x: (a3, x)), td.ShapeError, "scan", "carry 0", "float32[]",
            "float32[3]"),
        row(lambda: run(lambda c, x: (c + x, x), 0), td.DTypeError, "scan", "carry 0", "int32[]",
            "float32[]", "cast"),
        row(lambda: run(lambda c, x: (c, x), scalar, (a3, a45)), td.ShapeError, "scan",
            "float32[4,5]", "4", "3"),
        row(lambda: run(lambda c, x: (c, x), length=4), td.ShapeError, "scan", "3", "4"),
        row(lambda: run(lambda c, x: (c, x), scalar, scalar), td.ShapeError, "scan", "float32[]",
            "leading axis"),
        row(lambda: run(lambda c, x: (c, x), scalar, None), td.ArgumentError, "scan", "length="),
        row(lambda: run(lambda c, x: (c, x), scalar, None, length=-1), td.ArgumentError, "scan",
            "-1"),
        row(lambda: run(lambda c, x: (c, x), scalar, None, length=1.5), td.ArgumentError, "scan",
            "1.5", "integer"),
    ]  # fmt: skip


SCANS = [*scan_rows(scan), *scan_rows(traced_scan)]

RANDOM = [
    row(lambda: td.random.bernoulli(1.5), td.ArgumentError, "bernoulli", "1.5", "between 0 and 1"),
    row(lambda: td.random.bernoulli(-0.1, (3,)), td.ArgumentError, "bernoulli", "-0.1"),
    row(lambda: td.random.bernoulli(float("nan")), td.ArgumentError, "bernoulli", "nan"),
    row(lambda: td.random.bernoulli([0.5, 2.0]), td.ArgumentError, "bernoulli", "2.0"),
    row(lambda: td.random.bernoulli(np.float32(2)), td.ArgumentError, "bernoulli", "2.0"),
    row(lambda: td.random.bernoulli(a3, (2,)), td.ShapeError, "bernoulli", "float32[3]", "(2,)"),
    row(lambda: td.random.bernoulli(a23, (3,)), td.ShapeError, "bernoulli", "float32[2,3]"),
    row(lambda: td.random.uniform((2,), 1.0, 0.0), td.ArgumentError, "uniform", "low = 1.0"),
    row(lambda: td.random.normal((2,), 0.0, -1.0), td.ArgumentError, "normal", "std = -1.0"),
]

SPECS = [
    row(lambda: td.zeros((2, -1)), td.ArgumentError, "Spec", "(2, -1)", "not negative"),
    row(lambda: td.Spec((2,), "complex64"), td.DTypeError, "dtype", "'complex64'", "float32"),
    row(lambda: td.Spec((2,), 3), td.DTypeError, "dtype", "3", "float32"),
    row(lambda: td.Spec((2, -1)), td.ArgumentError, "Spec", "(2, -1)", "-1", "not negative"),
    row(lambda: td.Spec((2, 1.5)), td.ArgumentError, "Spec", "1.5", "integers"),
    row(lambda: td.Spec((2, None)), td.ArgumentError, "Spec", "None", "integers"),
    row(lambda: td.Spec(None), td.ArgumentError, "Spec", "None", "(128, 784)"),
    row(lambda: td.trace(lambda x: td.zeros((x,)), S), td.ArgumentError, "Spec", "float32[]"),
    row(lambda: td.random.uniform((-1,)), td.ArgumentError, "Spec", "-1"),
]

ROWS = SHAPES + WINDOWS + DTYPES + AXES + INDICES + TRACES + GRADIENTS + SCANS + RANDOM


def label(row: Row) -> str:
    return f"{row.operation} {row.error.__name__} {row.call.__code__.co_firstlineno}"


def lines_of(code: CodeType) -> set[int]:
    """The lines of a function and of those inside it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    own = {line for *_, line in code.co_lines() if line}
    return own.union(*map(lines_of, inner))


HELPERS = (branch, loop, square, pair, custom, closing_over, backward_closing_over, scan)
HELPER_LINES = set().union(*(lines_of(f.__code__) for f in (*HELPERS, traced_scan)))

# The cause says it all, or the program is already running.
WITHOUT_REMEDY = {"dynamic_slice", "dynamic_update_slice", "gather"}


def check(row: Row) -> None:
    with pytest.raises(row.error) as caught:
        row.call()
    error, message = caught.value, str(caught.value)
    assert type(error) is row.error
    assert message.startswith(row.operation), message
    for fragment in row.fragments:
        assert fragment in message, message
    found = re.search(r" \[test_errors\.py:(\d+) in [^]]+\]$", message)
    assert found, message
    assert int(found[1]) in lines_of(row.call.__code__) | HELPER_LINES
    assert "  " not in message
    assert error.cause
    assert error.remedy or row.operation in WITHOUT_REMEDY, message


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_error(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", SPECS, ids=label)
def test_error_of_a_spec(row: Row) -> None:
    check(row)


def test_the_line_is_the_one_of_the_call() -> None:
    with pytest.raises(td.ShapeError) as caught:
        _ = a23 + a45
    (entry,) = (t for t in caught.traceback if t.path.name == "test_errors.py")
    assert f"[test_errors.py:{entry.lineno + 1} in " in str(caught.value)


def test_the_line_inside_a_traced_function() -> None:
    def model(x: td.Tensor) -> td.Tensor:
        y = x * 2
        return y @ a45

    with pytest.raises(td.ShapeError) as caught:
        td.grad(model)(a23)
    entry = [t for t in caught.traceback if t.path.name == "test_errors.py"][-1]
    assert f"[test_errors.py:{entry.lineno + 1} in model]" in str(caught.value)


BASES = {
    td.ShapeError: ValueError,
    td.DTypeError: TypeError,
    td.AxisError: IndexError,
    td.IndexRangeError: IndexError,
    td.ArgumentError: ValueError,
    td.TraceError: TypeError,
    td.NameTakenError: ValueError,
    td.GradientError: ValueError,
}


@pytest.mark.parametrize("error", BASES)
def test_errors_are_python_errors_too(error: type[TreadleError]) -> None:
    assert issubclass(error, BASES[error])
    assert issubclass(error, td.TreadleError)


def test_a_failed_trace_leaves_nothing_behind() -> None:
    with pytest.raises(td.TraceError):
        td.trace(branch, S)
    assert (td.tensor(1.0) + 1).item() == 2.0
