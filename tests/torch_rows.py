"""Samples of every ATen op that has a row: arguments for PyTorch's op and for the row alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

DRAWN = torch.Generator().manual_seed(7)


@dataclass(frozen=True)
class Sample:
    """A call of an op. What it draws at random is compared by its type alone."""

    op: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    is_random: bool = False
    compared: tuple[int, ...] | None = None  # which results; all, unless some are of no use

    def __str__(self) -> str:
        return self.op


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAWN)


def unit(*shape: int) -> torch.Tensor:
    """Inside of (0, 1)."""
    return torch.rand(shape, generator=DRAWN) * 0.9 + 0.05


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=DRAWN) * 3 + 0.2


def whole(*shape: int, high: int = 5, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=DRAWN)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=DRAWN) > 0.4


def samples() -> Iterator[Sample]:
    for family in (
        _unary,
        _binary,
        _choices,
        _activations,
        _kinds,
        _views,
        _cuts,
        _pads,
        _made,
        _random,
        _sums,
        _ordered,
        _places,
        _products,
        _convolutions,
        _recurrent,
        _norms,
        _pools,
        _resized,
        _losses,
        _sizes,
    ):
        for name, *arguments in family():
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            marks = {k: keywords.pop(k) for k in ("is_random", "compared") if k in keywords}
            whole_name = name if "." in name else f"{name}.default"
            yield Sample(whole_name, tuple(arguments), keywords, **marks)


def _unary() -> Iterator[tuple[Any, ...]]:
    anywhere = (
        "abs ceil cos cosh erf erfc exp exp2 expm1 floor frac isfinite isinf isnan logical_not neg "
        "reciprocal round sign sgn sin sinh square tan tanh trunc fix positive deg2rad rad2deg "
        "signbit"
    )
    for name in anywhere.split():
        yield name, real(3, 4)
    for name in "digamma lgamma log log10 log1p log2 rsqrt sqrt".split():
        yield name, positive(3, 4)
    for name in "acos asin atan asinh atanh logit".split():
        yield name, unit(3, 4)
    yield "acosh", positive(3, 4) + 1
    yield "logit", real(3, 4), 0.2
    yield "bitwise_not", whole(3, 4)
    yield "bitwise_not", flags(3)
    yield "isnan", torch.tensor([1.0, math.nan, math.inf])
    yield "nan_to_num", torch.tensor([1.0, math.nan, math.inf, -math.inf]), 7.0
    yield "abs", whole(3, low=-4)


def _binary() -> Iterator[tuple[Any, ...]]:
    for name in "eq ge gt le lt ne mul".split():
        yield f"{name}.Tensor", real(3, 4), real(4)
        yield f"{name}.Scalar", whole(3, 4), 2
    yield "mul.Tensor", flags(3), real(3)
    for name in "bitwise_and bitwise_or bitwise_xor".split():
        yield f"{name}.Tensor", whole(3, 4), whole(4)
        yield f"{name}.Scalar", whole(3, 4), 3
    for name in "logical_and logical_or logical_xor".split():
        yield name, flags(3, 4), flags(4)
    for name in "atan2 hypot logaddexp logaddexp2 maximum minimum fmax fmin".split():
        yield name, real(3, 4), real(4)
    for name in ("max.other", "min.other"):
        yield name, real(3, 4), real(4)
    for name in ("add", "sub", "rsub"):
        yield f"{name}.Tensor", real(3, 4), real(4), {"alpha": 2}
        yield f"{name}.Scalar", whole(3), 4
    yield "add.Tensor", whole(3), 2.5
    for name in ("remainder", "fmod"):
        yield f"{name}.Tensor", real(3, 4) * 5, positive(4)
        yield f"{name}.Scalar", whole(5, low=-4), 3
    yield "div.Tensor", whole(3, 4), whole(3, 4, low=1)
    yield "div.Scalar", real(3), 3
    yield "true_divide.Tensor", real(3), positive(3)
    for mode in ("floor", "trunc", None):
        yield "div.Tensor_mode", real(3, 4) * 4, positive(4), {"rounding_mode": mode}
    yield "div.Scalar_mode", whole(6, low=-5), 2, {"rounding_mode": "trunc"}
    yield "floor_divide", whole(6, low=-5), whole(6, low=1)
    yield "floor_divide.Scalar", real(4) * 5, 2.0
    yield "pow.Tensor_Tensor", positive(3, 4), real(4)
    yield "pow.Tensor_Scalar", real(3, 4), 3
    yield "pow.Scalar", 2.0, real(3)
    for kind in ("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"):
        first = 1.5 if kind == "xlogy.Scalar_Self" else torch.tensor([0.0, 1.0, 2.0])
        yield kind, first, 2.5 if kind == "xlogy.Scalar_Other" else positive(3)
    for way in ("left", "right"):
        yield f"bitwise_{way}_shift.Tensor", whole(4, high=40), whole(4, high=3)
        yield f"bitwise_{way}_shift.Tensor_Scalar", whole(4, high=40), 2
    yield "__lshift__.Scalar", whole(4), 2
    yield "__rshift__.Scalar", whole(4, high=40), 2


def _choices() -> Iterator[tuple[Any, ...]]:
    x = real(3, 4)
    yield "clamp", x, -0.5, 0.5
    yield "clamp", x, None, 0.5
    yield "clamp.Tensor", x, real(4) - 1, None
    yield "clamp_min", x, 0.1
    yield "clamp_min.Tensor", x, real(4)
    yield "clamp_max", x, 0.1
    yield "clamp_max.Tensor", x, real(4)
    yield "where.self", flags(3, 4), x, real(4)
    yield "where.ScalarSelf", flags(3, 4), 2.0, x
    yield "where.ScalarOther", flags(3, 4), x, 2.0
    yield "where.Scalar", flags(3, 4), 1.0, 2.0
    yield "masked_fill.Scalar", x, flags(3, 4), -math.inf
    yield "masked_fill.Tensor", x, flags(4), torch.tensor(2.0)
    yield "lerp.Scalar", x, real(3, 4), 0.3
    yield "lerp.Tensor", x, real(3, 4), unit(3, 4)
    yield "addcmul", x, real(3, 4), real(4), {"value": 0.5}
    yield "addcdiv", x, real(3, 4), positive(4), {"value": 0.5}


def _activations() -> Iterator[tuple[Any, ...]]:
    x = real(3, 6) * 2
    for name in "hardsigmoid hardswish log_sigmoid mish relu relu6 selu sigmoid silu".split():
        yield name, x
    for name in "celu hardshrink softshrink leaky_relu elu gelu hardtanh glu softplus".split():
        yield name, x
    yield "gelu", x, {"approximate": "tanh"}
    yield "elu", x, 0.7, 1.3, 0.5
    yield "celu", x, 0.7
    yield "leaky_relu", x, 0.2
    yield "hardtanh", x, -0.3, 0.8
    yield "threshold", x, 0.1, 20.0
    yield "softplus", x, 2.0, 1.0
    yield "glu", x, 1
    yield "prelu", x, unit(6)
    yield "_prelu_kernel", x, unit(1, 6)
    yield "log_sigmoid_forward", x, {"compared": (0,)}
    for name in ("softmax.int", "log_softmax.int"):
        yield name, x, 0
        yield name, whole(3), -1, torch.float32
    yield "_softmax", x, -1, False
    yield "_log_softmax", x, 1, False
    yield "_safe_softmax", x, -1


def _kinds() -> Iterator[tuple[Any, ...]]:
    x = real(2, 3)
    for name in ("clone", "contiguous", "alias", "lift_fresh_copy", "lift_fresh", "lift", "detach"):
        yield name, x
    yield "_to_copy", x * 9, {"dtype": torch.int64}
    yield "_to_copy", x, {"dtype": torch.bfloat16}
    yield "to.dtype_layout", x, {"dtype": torch.float64}
    yield "to.dtype", x, torch.bool
    yield "to.device", x, torch.device("cpu"), torch.float16
    yield "to.other", x, whole(2)
    yield "type_as", whole(2), x
    yield "copy", x, real(3)


def _views() -> Iterator[tuple[Any, ...]]:
    x = real(2, 3, 4)
    yield "permute", x, [2, 0, -2]
    yield "transpose.int", x, 0, -1
    yield "swapaxes", x, 0, 1
    yield "unsqueeze", x, -1
    yield "squeeze", real(1, 3, 1)
    yield "squeeze.dim", real(1, 3, 1), 1
    yield "squeeze.dims", real(1, 3, 1), [0, 1]
    yield "flatten.using_ints", x, 1
    yield "unflatten.int", x, -1, [2, -1]
    for name in ("view", "reshape", "_unsafe_view", "view_copy"):
        yield name, x, [4, -1]
    yield "_reshape_alias", x, [6, 4], [4, 1]
    yield "view_as", x, real(6, 4)
    yield "reshape_as", x, real(6, 4)
    yield "expand", real(3, 1), [2, -1, 4]
    yield "expand_as", real(3, 1), x
    yield "broadcast_to", real(3, 1), [3, 4]
    yield "broadcast_tensors", [real(3, 1), real(4)]
    yield "t", real(2, 3)
    yield "numpy_T", real(2, 3)
    yield "mT", x
    for name in ("movedim", "moveaxis"):
        yield f"{name}.int", x, 0, -1
        yield f"{name}.intlist", x, [0, 1], [1, 2]
    yield "flip", x, [0, -1]
    yield "roll", x, [1, -1], [0, 2]
    yield "roll", x, [5]
    yield "rot90", x, 1, [0, 2]
    yield "diagonal", x, 1, 1, 2
    yield "diag_embed", real(2, 3), 1
    yield "diag_embed", real(2, 3), 0, 0, 2
    yield "tril", x, 1
    yield "triu", x
    yield "repeat", real(2, 3), [2, 1, 2]
    yield "tile", real(2, 3), [2]
    yield "repeat_interleave.self_int", real(2, 3), 2, 1
    yield "meshgrid", [real(2), real(3)]
    yield "meshgrid.indexing", [real(2), real(3)], {"indexing": "xy"}
    yield "pixel_shuffle", real(1, 8, 2, 3), 2
    yield "pixel_unshuffle", real(1, 2, 4, 6), 2
    yield "channel_shuffle", real(1, 6, 2, 2), 3
    yield "native_channel_shuffle", real(1, 6, 2, 2), 3
    yield "as_strided", real(12), [2, 3, 2], [3, 1, 2], 1


def _cuts() -> Iterator[tuple[Any, ...]]:
    x = real(4, 5)
    for name in ("cat", "concat", "concatenate"):
        yield name, [x, real(0), real(2, 5)]
    yield "stack", [x, real(4, 5)], 1
    yield "select.int", x, 1, -2
    yield "slice.Tensor", x, 1, 1, 9223372036854775807, 2
    yield "slice.Tensor", x, 0, -3, -1
    yield "narrow", x, 1, 1, 3
    yield "split.Tensor", x, 2, 1
    yield "unsafe_split.Tensor", x, 3
    yield "split_with_sizes", x, [1, 3]
    yield "split.sizes", x, [2, 3], 1
    yield "chunk", x, 2, 1
    yield "tensor_split.sections", x, 3, 1
    yield "tensor_split.indices", x, [1, 3], 1
    yield "unbind.int", x, 1
    yield "unfold", x, 1, 3, 2
    yield "select_scatter", x, real(4), 1, -2
    yield "slice_scatter", x, real(4, 2), 1, 1, 4, 2
    yield "slice_scatter", x, real(2, 5), 0, 2


def _pads() -> Iterator[tuple[Any, ...]]:
    yield "constant_pad_nd", real(2, 3), [1, 2, -1, 0], 0.5
    yield "pad", real(2, 3), [1, 1]
    yield "pad", real(1, 2, 5), [1, 2], "reflect"
    yield "pad", real(1, 2, 5), [1, 2], "circular"
    for dims in (1, 2, 3):
        shape, pad = (1, 2, *(4,) * dims), [1, 2] * dims
        yield f"reflection_pad{dims}d", real(*shape), pad
        yield f"replication_pad{dims}d", real(*shape), pad
    yield "im2col", real(1, 2, 4, 5), [2, 3], [1, 1], [1, 0], [1, 2]
    yield "col2im", real(1, 12, 4), [4, 5], [3, 2], [1, 1], [0, 0], [1, 2]


def _made() -> Iterator[tuple[Any, ...]]:
    x = real(2, 3)
    yield "full", [2, 3], 1.5
    yield "full", [2], True
    yield "full_like", x, 2
    yield "new_full", x, [4], 2
    yield "zeros", [2, 3], {"dtype": torch.int64}
    yield "ones", [2, 3]
    yield "zeros_like", x
    yield "zero", x
    yield "ones_like", x, {"dtype": torch.int32}
    yield "new_zeros", x, [4]
    yield "new_ones", x, [4]
    for name, *rest in (
        ("empty.memory_format", [2, 3]),
        ("empty_like", x),
        ("new_empty", x, [4]),
        ("empty_strided", [2, 3], [3, 1]),
        ("empty_permuted", [2, 3], [0, 1]),
    ):
        yield name, *rest, {"is_random": True}
    yield "fill.Scalar", x, 3
    yield "fill.Tensor", x, torch.tensor(3.0)
    yield "scalar_tensor", 2.5
    yield "arange", 5
    yield "arange.start", 1.0, 4.0
    yield "arange.start_step", 1, 9, 3
    yield "arange.start_step", 1.0, 0.0, -0.25
    yield "linspace", 0.0, 2.0, 5
    yield "eye", 3
    yield "eye.m", 2, 3
    yield "tril_indices", 3, 4, 1
    yield "triu_indices", 3, 4


def _random() -> Iterator[tuple[Any, ...]]:
    x = real(2, 3)
    for name, *rest in (
        ("rand", [2, 3]),
        ("randn", [2, 3]),
        ("rand_like", x),
        ("randn_like", x),
        ("randint", 5, [3]),
        ("randint.low", 2, 5, [3]),
        ("randint_like", whole(3), 5),
        ("randint_like.low_dtype", whole(3), 2, 5),
        ("randperm", 5),
        ("uniform", x, -1.0, 1.0),
        ("normal_functional", x, 1.0, 2.0),
        ("bernoulli", unit(2, 3)),
        ("bernoulli.p", x, 0.3),
        ("dropout", x, 0.5, True),
        ("native_dropout", x, 0.5, True),
    ):
        yield name, *rest, {"is_random": True}
    yield "dropout", x, 0.5, False
    yield "native_dropout", x, 0.5, False


def _sums() -> Iterator[tuple[Any, ...]]:
    x = real(3, 4)
    for name in ("sum", "mean", "prod", "max", "min", "var", "std", "median"):
        yield name, x
    yield "sum", flags(3, 4)
    for name in ("sum.dim_IntList", "mean.dim"):
        yield name, x, [1], True
        yield name, x, [0, -1], {"dtype": torch.float64}
    yield "prod.dim_int", whole(3, 4), 1
    yield "nansum", torch.tensor([1.0, math.nan]), [0]
    for name in ("amax", "amin"):
        yield name, x, [1]
        yield name, x
    yield "aminmax", x, {"dim": 1}
    for name in ("max.dim", "min.dim"):
        yield name, x, 1
        yield name, whole(3, 4), 0, True
    for name in ("argmax", "argmin"):
        yield name, x
        yield name, x, 1, True
    for name in ("any", "all"):
        yield name, flags(3, 4)
        yield f"{name}.dim", flags(3, 4), 1
        yield f"{name}.dims", flags(3, 4), [0, 1], True
    yield "count_nonzero", flags(3, 4)
    yield "count_nonzero.dim_IntList", whole(3, 4), [1]
    for name in ("var", "std"):
        yield f"{name}.correction", x, [1], {"correction": 0}
        yield f"{name}.dim", x, [1], False, True
        yield f"{name}_mean.correction", x, [1], {"keepdim": True}
    yield "var", x, False
    yield "var.dim", x, [0]
    yield "logsumexp", x, [1]
    for order in (0.0, 1.0, 2.0, 3.0, math.inf):
        yield "linalg_vector_norm", x, order, [1]
    yield "norm.Scalar", x
    yield "norm.ScalarOpt_dim", x, 1.0, [1]
    yield "frobenius_norm.dim", x, [0, 1]
    yield "dist", x, real(3, 4), 1.0
    yield "trace", real(3, 3)


def _ordered() -> Iterator[tuple[Any, ...]]:
    x = real(3, 5)
    yield "cumsum", whole(3, 4), 1
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield name, x, 1
    yield "sort", x, 1, True
    yield "sort.stable", x, {"stable": True, "dim": 0}
    yield "argsort", x
    yield "argsort.stable", x, {"stable": True, "descending": True}
    yield "topk", x, 2, -1, False
    yield "kthvalue", x, 2, 1
    yield "median.dim", x, 1, True
    yield "diff", x, 2, 1
    yield "diff", x, 1, 1, real(3, 1), real(3, 2)


def _places() -> Iterator[tuple[Any, ...]]:
    x = real(4, 5)
    rows = torch.tensor([0, 2, -1])
    for name in ("index.Tensor", "_unsafe_index.Tensor"):
        yield name, x, [rows, torch.tensor([1, 0, 4])]
    yield "index.Tensor", real(2, 3, 4), [torch.tensor([0, 1]), None, torch.tensor([3, 1])]
    yield "index.Tensor", x, [None, rows]
    for name in ("index_put", "_unsafe_index_put"):
        yield name, x, [rows, torch.tensor([1, 0, 4])], real(3)
    yield "index_put", x, [torch.tensor([0, 0, 2])], real(3, 5), True
    yield "index_put", x, [flags(4, 5)], torch.tensor(2.0)
    yield "gather", x, 1, whole(3, 2)
    yield "take_along_dim", x, whole(4, 2), 1
    yield "take", x, torch.tensor([0, 7])
    spread = torch.tensor([[0, 2, 1], [3, 1, 0]])
    yield "scatter.src", x, 1, spread, real(2, 3)
    yield "scatter.value", x, 1, spread, 2.0
    yield "scatter_add", x, 0, spread, real(2, 3)
    yield "scatter_add", x, 0, spread, real(4, 5)
    for how in ("sum", "mean", "amax", "amin"):
        yield "scatter_reduce.two", x, 1, whole(4, 3), real(4, 3), how
        yield "scatter_reduce.two", x, 1, whole(4, 3), real(4, 3), how, {"include_self": False}
    yield "index_select", x, 1, torch.tensor([3, 0])
    yield "index_add", x, 0, torch.tensor([1, 1, 3]), real(3, 5), {"alpha": 2}
    yield "index_copy", x, 1, torch.tensor([3, 0]), real(4, 2)
    yield "index_fill.int_Scalar", x, 0, torch.tensor([3, 0]), 2.0
    yield "index_fill.int_Tensor", x, 1, torch.tensor([3, 0]), torch.tensor(2.0)
    yield "embedding", real(5, 3), whole(2, 4), 2
    bags = real(6, 3), torch.tensor([1, 5, 0, 2, 2, 4, 1]), torch.tensor([0, 2, 2, 5])
    for name in ("_embedding_bag", "_embedding_bag_forward_only"):
        for mode in (0, 1, 2):
            given = None if mode else positive(7)
            terms = False, mode, False, given, False, 2
            yield name, *bags, *terms, {"compared": (0,)}
    yield "one_hot", whole(2, 3), 5
    line = torch.tensor([0.0, 0.5, 1.0])
    yield "searchsorted.Tensor", line, real(2, 3), {"right": True}
    yield "bucketize.Tensor", real(2, 3), line
    yield "isin.Tensor_Tensor", whole(2, 3), torch.tensor([1, 4])


def _products() -> Iterator[tuple[Any, ...]]:
    a, b = real(2, 3), real(3, 4)
    yield "mm", a, b
    yield "bmm", real(2, 2, 3), real(2, 3, 2)
    yield "matmul", real(2, 2, 3), b
    yield "mv", a, real(3)
    yield "dot", real(3), real(3)
    yield "vdot", real(3), real(3)
    yield "linear", real(2, 5, 3), real(4, 3), real(4)
    yield "outer", real(2), real(3)
    yield "ger", real(2), real(3)
    yield "addmm", real(4), a, b, {"beta": 0.5, "alpha": 2}
    yield "addmv", real(2), a, real(3)
    yield "baddbmm", real(2, 2, 2), real(2, 2, 3), real(2, 3, 2)
    yield "addbmm", real(2, 2), real(2, 2, 3), real(2, 3, 2)
    yield "addr", real(2, 3), real(2), real(3)
    yield "einsum", "bij,bjk->bik", [real(2, 2, 3), real(2, 3, 2)]
    yield "bilinear", real(2, 3), real(2, 4), real(5, 3, 4), real(5)
    yield "linalg_cross", real(2, 3), real(2, 3)
    yield "_cdist_forward", real(3, 2), real(4, 2), 2.0, None
    yield "cdist", real(3, 2), real(4, 2), 1.0
    yield "cosine_similarity", real(3, 4), real(3, 4)
    yield "kron", real(2, 3), real(3, 1)
    q, k, v = real(2, 4, 3, 8), real(2, 4, 5, 8), real(2, 4, 5, 6)
    name = "scaled_dot_product_attention"
    yield name, q, k, v
    yield name, q, k, v, real(3, 5), {"scale": 0.5}
    seen = flags(2, 1, 3, 5)
    seen[0, 0, 1] = False
    yield name, q, k, v, seen
    yield name, real(2, 5, 8), real(2, 5, 8), real(2, 5, 8), None, 0.0, True
    yield name, q, k[:, :2], v[:, :2], {"enable_gqa": True}


def _convolutions() -> Iterator[tuple[Any, ...]]:
    for dims in (1, 2, 3):
        side = (5,) * dims
        x, w = real(2, 4, *side), real(6, 2, *(3,) * dims)
        yield f"conv{dims}d", x, w, real(6), [2], [1], [1], 2
        yield f"conv{dims}d.padding", x, w, None, [1], "same", [1], 2
        kind = "" if dims == 1 else ".input"
        back = real(4, 3, *(3,) * dims)
        yield f"conv_transpose{dims}d{kind}", x, back, real(6), [2], [1], [1], 2
    yield "conv2d", real(3, 5, 5), real(2, 3, 3, 3)
    terms = [2, 1], [1, 0], [1, 1]
    yield "convolution", real(1, 2, 5, 5), real(3, 2, 3, 3), real(3), *terms, False, [0, 0], 1
    yield "convolution", real(1, 2, 3, 3), real(2, 3, 3, 3), None, *terms, True, [1, 0], 1


def _recurrent() -> Iterator[tuple[Any, ...]]:
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        hidden, n, layers = 5, 3, 2 if name == "gru" else 1
        start = real(2 * layers, 2, hidden)
        params = []
        for layer in range(layers):
            for _ in range(2):
                width = n if layer == 0 else 2 * hidden
                params += [real(gates * hidden, width) / 2, real(gates * hidden, hidden) / 2]
                params += [real(gates * hidden), real(gates * hidden)]
        hx = [start, real(2 * layers, 2, hidden)] if name == "lstm" else start
        yield f"{name}.input", real(2, 4, n), hx, params, True, layers, 0.0, True, True, True


def _norms() -> Iterator[tuple[Any, ...]]:
    x, w, b = real(2, 4, 3, 3), positive(4), real(4)
    yield "layer_norm", real(2, 3, 4), [3, 4], real(3, 4), real(3, 4)
    yield "layer_norm", real(2, 4), [4], None, b
    yield "native_layer_norm", real(2, 3, 4), [4], w, b, 1e-5
    yield "rms_norm", real(2, 4), [4], w, 1e-5
    yield "rms_norm", real(2, 4), [4]
    yield "_fused_rms_norm", real(2, 4), [4], w, 1e-5
    yield "group_norm", x, 2, w, b
    yield "group_norm", x, 2
    yield "native_group_norm", x, w, b, 2, 4, 9, 2, 1e-5
    running = real(4), positive(4)
    yield "_native_batch_norm_legit_functional", x, w, b, *running, True, 0.1, 1e-5
    name = "_native_batch_norm_legit_functional"
    yield name, x, None, None, *running, False, 0.1, 1e-5, {"compared": (0, 3, 4)}
    name = "_batch_norm_with_update_functional"
    yield name, x, w, b, *running, 0.1, 1e-5, {"compared": (0, 1, 2, 4, 5)}
    yield "_native_batch_norm_legit.no_stats", x, w, b, True, 0.1, 1e-5
    name = "_native_batch_norm_legit_no_training"
    yield name, x, w, b, *running, 0.1, 1e-5, {"compared": (0,)}
    yield "batch_norm", x, w, b, None, None, True, 0.1, 1e-5, False
    yield "batch_norm", x, w, b, *running, False, 0.1, 1e-5, False
    yield "instance_norm", x, w, b, None, None, True, 0.1, 1e-5, False
    yield "instance_norm", x, w, b, *running, False, 0.1, 1e-5, False


def _pools() -> Iterator[tuple[Any, ...]]:
    for dims in (1, 2, 3):
        x = real(1, 2, *(6,) * dims)
        yield f"max_pool{dims}d", x, [3], [2], [1]
        yield f"max_pool{dims}d_with_indices", x, [2] * dims, [2] * dims
        yield f"avg_pool{dims}d", x, [3], [2], [1], False, False
        yield f"adaptive_avg_pool{dims}d", x, [4] * dims
        yield f"adaptive_max_pool{dims}d", x, [3] * dims
        yield f"adaptive_max_pool{dims}d", x, [4] * dims, {"compared": (0,)}
    x = real(1, 2, 7, 6)
    yield "max_pool2d", x, [3, 2], [], [1, 1], [1, 1], True
    yield "avg_pool2d", x, [3, 2], [], [1, 1], True, True, 4
    yield "_adaptive_avg_pool2d", x, [3, 2]
    yield "_adaptive_avg_pool3d", real(1, 2, 4, 6, 6), [2, 3, 3]
    values, places = torch.ops.aten.max_pool2d_with_indices(real(1, 2, 6, 6), [2, 2])
    yield "max_unpool2d", values, places, [6, 6]


def _resized() -> Iterator[tuple[Any, ...]]:
    for kind in ("upsample_nearest", "_upsample_nearest_exact"):
        for dims in (1, 2, 3):
            x = real(1, 2, *(4,) * dims)
            yield f"{kind}{dims}d.vec", x, None, [2.0] * dims
            yield f"{kind}{dims}d", x, [6] * dims
    for kind, dims in (("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)):
        x = real(1, 2, *(4,) * dims)
        yield f"upsample_{kind}{dims}d.vec", x, None, False, [1.5] * dims
        yield f"upsample_{kind}{dims}d", x, [6] * dims, True


def _losses() -> Iterator[tuple[Any, ...]]:
    x, y = real(4, 3), real(4, 3)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield name, x, y
        yield name, x, y, 0
    yield "smooth_l1_loss", x, y, 2, 0.5
    yield "huber_loss", x, y, 1, 0.5
    yield "soft_margin_loss", x, y.sign()
    yield "binary_cross_entropy", unit(4, 3), unit(4, 3), unit(3)
    name = "binary_cross_entropy_with_logits"
    yield name, x, unit(4, 3), unit(3), positive(3)
    yield "kl_div", x, unit(4, 3)
    yield "kl_div", x, y, 2, {"log_target": True}
    classes, weight = torch.tensor([0, 2, -100, 1]), positive(3)
    yield "nll_loss_forward", x, classes, weight, 1, -100
    image = torch.tensor([[[0, 2], [1, 1]]])
    yield "nll_loss2d_forward", real(1, 3, 2, 2), image, None, 1, -100
    yield "nll_loss", x, classes
    yield "nll_loss_nd", real(1, 3, 2, 2), image, weight
    yield "nll_loss2d", real(1, 3, 2, 2), image
    for kind in ({}, {"label_smoothing": 0.1}):
        yield "cross_entropy_loss", x, classes, None, 1, -100, *kind.values()
        yield "cross_entropy_loss", x, classes, weight, 1, -100, *kind.values()
        yield "cross_entropy_loss", x, y.softmax(1), weight, 1, -100, *kind.values()
    yield "cross_entropy_loss", real(1, 3, 2, 2), image, None, 0


def _sizes() -> Iterator[tuple[Any, ...]]:
    x = real(2, 3)
    yield "sym_size.int", x, 1
    yield "sym_numel", x
    yield "sym_stride.int", x, 0
    yield "sym_storage_offset", x
    yield "_assert_scalar", True, "told"
    yield "_assert_tensor_metadata", x, [2, 3]
    yield "_assert_async.msg", torch.tensor(True), "told"
    yield "sym_constrain_range", 3, {"min": 1, "max": 4}
    yield "sym_constrain_range_for_size", 3, {"min": 1, "max": 4}
