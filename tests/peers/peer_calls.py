"""Treadle's call for each operator of PyTorch's database: of the same name, or a line here.

An adapter takes PyTorch's arguments and spells the call as Treadle's user would; it computes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peer_values import NotRepresentableError

import treadle as td
from treadle import losses
from treadle.frontend.tensor import Tensor

Call = Callable[..., Any]
MODULES = {"linalg": td.linalg, "fft": td.fft}
ADAPTERS: dict[str, Call | None] = {}


def call_for(name: str) -> Call | None:
    """Treadle's function for an operator, None where there is none."""
    if name in ADAPTERS:
        return ADAPTERS[name]
    *path, last = name.split(".")
    if path == ["nn", "functional"]:
        return (
            _function(td, last)
            or _function(losses, last)
            or _function(losses, last.removesuffix("_loss"))
        )
    if len(path) == 1 and path[0] in MODULES:
        return _function(MODULES[path[0]], last)
    if path and path != ["special"]:
        return None
    method = getattr(Tensor, last, None) if not last.startswith("_") else None
    return _function(td, last) or (method if inspect.isfunction(method) else None)


def _function(module: Any, name: str) -> Call | None:
    found = getattr(module, name, None) if name in dir(module) else None
    return found if inspect.isfunction(found) else None


def adapter(*names: str) -> Callable[[Call], Call]:
    def add(call: Call) -> Call:
        for name in names:
            ADAPTERS[name] = call
        return call

    return add


def _one(value: Any) -> Any:
    """A number for a tensor of one element: what is static in Treadle."""
    return value.item() if isinstance(value, Tensor) else value


def _each(size, dims):
    """One number for each of the axes that PyTorch's name counts."""
    given = (size,) if size is None or isinstance(size, int) else tuple(size)
    return given * dims if len(given) == 1 else given


def _stride(stride, kernel_size):
    return kernel_size if stride is None or stride == () or stride == [] else stride


def _avg_pool(dims):
    def call(
        x,
        kernel_size,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    ):
        sizes = [_each(n, dims) for n in (kernel_size, _stride(stride, kernel_size), padding)]
        return td.avg_pool(x, *sizes, count_include_pad, ceil_mode, divisor_override)

    return call


def _max_pool(dims):
    def call(
        x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
    ):
        sizes = [
            _each(n, dims) for n in (kernel_size, _stride(stride, kernel_size), padding, dilation)
        ]
        function = td.max_pool_with_indices if return_indices else td.max_pool
        return function(x, *sizes, ceil_mode)

    return call


def _adaptive_avg_pool(dims):
    return lambda x, output_size: td.adaptive_avg_pool(x, _each(output_size, dims))


def _adaptive_max_pool(dims):
    def call(x, output_size, return_indices=False):
        if return_indices:
            raise NotRepresentableError("indices of adaptive_max_pool")
        return td.adaptive_max_pool(x, _each(output_size, dims))

    return call


ADAPTERS |= {f"nn.functional.max_unpool{n}d": td.max_unpool for n in (1, 2, 3)}
ADAPTERS |= dict.fromkeys(("mm", "bmm", "mv"), td.matmul)
ADAPTERS |= {
    "__rmatmul__": lambda x, y: td.matmul(y, x),
    "cat": td.concat,
    "amax": td.max,
    "amin": td.min,
    "true_divide": td.div,
    "movedim": td.moveaxis,
    "broadcast_to": td.expand,
    "index_select": lambda x, dim, index: td.take(x, index, axis=dim),
    "gather": lambda x, dim, index, sparse_grad=False: td.take_along_axis(x, index, dim),
    "scatter_add": td.scatter_add_along,
    "nn.functional.logsigmoid": td.log_sigmoid,
    "take": lambda x, index: td.take(td.reshape(x, (-1,)), index),
    "einsum": lambda operands, spec: td.einsum(spec, *operands),
    "unfold": None,  # Tensor.unfold; td.unfold is F.unfold
    "trace": None,  # the sum of a diagonal; td.trace is of functions
    "polygamma": lambda x, n: td.polygamma(n, x),
    "special.polygamma": lambda x, n: td.polygamma(n, x),
}


def _of_complex(name: str) -> Call:
    """A transform of complex numbers, given real ones as PyTorch takes them."""
    function = getattr(td.fft, name)
    return lambda x, *given, **more: function(td.fft.complex(x, td.zeros_like(x)), *given, **more)


for _name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "irfft", "irfft2", "irfftn"):
    ADAPTERS[f"fft.{_name}"] = _of_complex(_name)


@adapter("nn.functional.scaled_dot_product_attention")
def _attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if dropout_p:
        raise td.ArgumentError("attention", "dropout_p", "It is td.dropout of the weights.")
    more = {"enable_gqa": True} if enable_gqa else {}
    return td.attention(q, k, v, attn_mask, is_causal, scale, **more)


@adapter("nn.functional.triplet_margin_with_distance_loss")
def _triplet(
    anchor, positive, negative, distance_function=None, margin=1.0, swap=False, reduction="mean"
):
    if isinstance(distance_function, torch.nn.PairwiseDistance):
        distance_function = td.pairwise_distance
    elif distance_function is not None:
        raise NotRepresentableError("a distance in PyTorch's words")
    return losses.triplet_with_distance(
        anchor, positive, negative, distance_function, margin, swap, reduction
    )


@adapter("nn.functional.binary_cross_entropy")
def _bce(x, y, weight=None, reduction="mean"):
    return losses.bce(x, y, weight, reduction)


@adapter("nn.functional.binary_cross_entropy_with_logits")
def _bce_with_logits(x, y, weight=None, reduction="mean", pos_weight=None):
    return losses.bce_with_logits(x, y, weight, reduction, pos_weight)


@adapter("nn.functional.pad", "constant_pad_nd")
def _pad(x, pad, mode="constant", value=0):
    """PyTorch's list of amounts, from the last axis on, is Treadle's pairs from the first on."""
    if not isinstance(mode, str):
        mode, value = "constant", mode
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)]
    amounts = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return td.pad(x, amounts, mode=mode, **({"value": value} if value else {}))


@adapter("nn.functional.layer_norm")
def _layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    if x.shape[x.ndim - len(normalized_shape) :] != tuple(normalized_shape):
        raise td.ShapeError("layer_norm", "another shape", "They are the last axes.")
    return td.layer_norm(x, weight, bias, len(normalized_shape), eps)


@adapter("nn.functional.rms_norm")
def _rms_norm(x, normalized_shape, weight=None, eps=None):
    eps = float(np.finfo(np.float32).eps) if eps is None else eps
    return td.rms_norm(x, weight, len(normalized_shape), eps)


@adapter("nn.functional.one_hot")
def _one_hot(x, num_classes=-1):
    classes = int(x.numpy().max()) + 1 if num_classes == -1 else num_classes
    return td.one_hot(x, classes, dtype=td.int64)


@adapter("nn.functional.embedding")
def _embedding(
    weight,
    indices,
    padding_idx=None,
    max_norm=None,
    norm_type=2.0,
    scale_grad_by_freq=False,
    sparse=False,
):
    given = {
        "padding_idx": padding_idx,
        "max_norm": max_norm,
        "scale_grad_by_freq": scale_grad_by_freq,
        "sparse": sparse,
    }
    return td.embedding(indices, weight, **{k: v for k, v in given.items() if v})


@adapter("bincount")
def _bincount(x, weights=None, minlength=0):
    """The number of bins is static: PyTorch's is the greatest element and one."""
    most = int(x.numpy().max()) + 1 if x.size else 0
    return td.bincount(x, max(minlength, most), weights)


@adapter("searchsorted")
def _searchsorted(boundaries, values, out_int32=False, right=False, side=None, sorter=None):
    more = {} if sorter is None else {"sorter": sorter}
    return td.searchsorted(boundaries, values, right, side, **more)


@adapter("bucketize")
def _bucketize(values, boundaries, out_int32=False, right=False):
    return td.searchsorted(boundaries, values, right)


@adapter("narrow")
def _narrow(x, dim, start, length):
    first = _one(start)
    return td.moveaxis(td.moveaxis(x, dim, 0)[first : first + length], 0, dim)


@adapter("select")
def _select(x, dim, index):
    return td.moveaxis(x, dim, 0)[index]


@adapter("__getitem__")
def _getitem(x, index):
    return x[index]


@adapter("eye")
def _eye(n, m=None, dtype=None, **more):
    return td.eye(n, m, td.float32 if dtype is None else dtype)


@adapter("where")
def _where(x, condition, other):
    """The database's first argument is the second of `torch.where`."""
    return td.where(condition, x, other)


@adapter("full")
def _full(size, value, dtype=None, **more):
    return td.full(size, value, **({} if dtype is None else {"dtype": dtype}))


@adapter("zeros")
def _zeros(size, dtype=None, **more):
    return td.zeros(size, td.float32 if dtype is None else dtype)


@adapter("ones")
def _ones(size, dtype=None, **more):
    return td.ones(size, td.float32 if dtype is None else dtype)


def _reflected(name: str) -> Call:
    function = getattr(td, name)
    return lambda x, y: function(y, x)


REFLECTED = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
ADAPTERS |= {f"__r{theirs}__": _reflected(ours) for theirs, ours in REFLECTED.items()}


@adapter("rsub")
def _rsub(x, y, alpha=1):
    return td.sub(y, x) if alpha == 1 else td.sub(y, x, alpha=alpha)


for _n in (1, 2, 3):
    _f = f"nn.functional.{{}}{_n}d".format
    ADAPTERS[_f("conv")] = td.conv
    ADAPTERS[_f("conv_transpose")] = td.conv_transpose
    ADAPTERS[_f("adaptive_avg_pool")] = _adaptive_avg_pool(_n)
    ADAPTERS[_f("adaptive_max_pool")] = _adaptive_max_pool(_n)
    ADAPTERS[_f("avg_pool")] = _avg_pool(_n)
    ADAPTERS[_f("max_pool")] = _max_pool(_n)
