"""PyTorch's version of every op, written without looking at Treadle's definitions."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from treadle.base.dtypes import DType

REFERENCES: dict[str, object] = {}

TORCH = {
    "float64": torch.float64,
    # Floats of every width are compared in float64: the oracle does not round them.
    "float32": torch.float64,
    "bfloat16": torch.float64,
    "float16": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint32": torch.int64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    return TORCH[dtype.name]


def reference(*names: str):
    def add(function):
        for name in names:
            REFERENCES[name] = function
        return function

    return add


def _unary(name: str, function) -> None:
    REFERENCES[name] = lambda attributes, *xs: function(*xs)


for _name in (
    "neg",
    "abs",
    "sign",
    "floor",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "erf",
):
    _unary(_name, getattr(torch, _name))
for _name in ("add", "sub", "mul", "div", "eq", "lt", "le", "pow", "atan2"):
    _unary(_name, getattr(torch, _name))
_unary("not", torch.bitwise_not)
_unary("stop_gradient", lambda x: x.detach())
_unary("shard_sum", lambda x: x * 1.0)
_unary("floordiv", torch.floor_divide)
_unary("mod", torch.remainder)
_unary("max", torch.maximum)
_unary("min", torch.minimum)
_unary("and", torch.bitwise_and)
_unary("or", torch.bitwise_or)
_unary("xor", torch.bitwise_xor)
_unary("where", torch.where)
_unary("relu", F.relu)
_unary("sigmoid", torch.sigmoid)
_unary("silu", F.silu)


@reference("constant")
def _constant(a):
    value = a.value.array if hasattr(a.value, "array") else float(a.value)
    return torch.tensor(
        np.broadcast_to(value, a.type.shape).copy(), dtype=torch_dtype(a.type.dtype)
    )


@reference("iota")
def _iota(a):
    line = torch.arange(a.shape[a.axis], dtype=torch_dtype(a.dtype))
    shape = [-1 if i == a.axis else 1 for i in range(len(a.shape))]
    return line.reshape(shape).expand(a.shape)


@reference("cast")
def _cast(a, x):
    return x.to(torch_dtype(a.dtype))


@reference("reduce_sum")
def _sum(a, x):
    return x.sum(a.axes, dtype=x.dtype) if a.axes else x


@reference("reduce_prod")
def _prod(a, x):
    for axis in reversed(a.axes):
        x = x.prod(axis, dtype=x.dtype)
    return x


@reference("reduce_max")
def _amax(a, x):
    return x.amax(a.axes) if a.axes else x


@reference("reduce_min")
def _amin(a, x):
    return x.amin(a.axes) if a.axes else x


@reference("argmax")
def _argmax(a, x):
    return x.argmax(a.axis)


@reference("argmin")
def _argmin(a, x):
    return x.argmin(a.axis)


@reference("cumsum")
def _cumsum(a, x):
    if a.reverse:
        return x.flip(a.axis).cumsum(a.axis, dtype=x.dtype).flip(a.axis)
    return x.cumsum(a.axis, dtype=x.dtype)


@reference("sort")
def _sort(a, x):
    return tuple(x.sort(dim=a.axis, descending=a.descending, stable=True))


@reference("top_k")
def _top_k(a, x):
    # torch.topk does not say which of equals it takes, so the reference sorts stably.
    values, indices = x.sort(dim=a.axis, descending=a.largest, stable=True)
    return values.narrow(a.axis, 0, a.k), indices.narrow(a.axis, 0, a.k)


@reference("reshape")
def _reshape(a, x):
    return x.reshape(a.shape)


@reference("permute")
def _permute(a, x):
    return x.permute(a.axes)


@reference("broadcast")
def _broadcast(a, x):
    sizes = [1] * len(a.shape)
    for axis, n in zip(a.axes, x.shape, strict=True):
        sizes[axis] = n
    return x.reshape(sizes).expand(a.shape)


@reference("slice")
def _slice(a, x):
    return x[tuple(slice(*b) for b in zip(a.starts, a.stops, a.strides, strict=True))]


@reference("pad")
def _pad(a, x):
    for axis, gap in enumerate(a.interior):
        if gap and x.shape[axis] > 1:
            rows = x.unbind(axis)
            filler = [torch.full_like(rows[0], a.value)] * gap
            parts = [p for row in rows[:-1] for p in (row, *filler)] + [rows[-1]]
            x = torch.stack(parts, axis)
    amounts = [n for pair in zip(a.low[::-1], a.high[::-1], strict=True) for n in pair]
    return F.pad(x, amounts, value=float(a.value))


@reference("concat")
def _concat(a, *xs):
    return torch.cat(xs, a.axis)


@reference("flip")
def _flip(a, x):
    return x.flip(a.axes)


def _window_slices(starts, sizes, shape):
    clamped = [min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(s, s + k) for s, k in zip(clamped, sizes, strict=True))


@reference("dynamic_slice")
def _dynamic_slice(a, x, starts):
    return x[_window_slices(starts, a.sizes, x.shape)]


@reference("dynamic_update_slice")
def _dynamic_update_slice(a, x, update, starts):
    result = x.clone()
    result[_window_slices(starts, update.shape, x.shape)] = update
    return result


@reference("contract")
def _contract(a, x, y):
    return torch.einsum(a.spec, x, y).to(torch_dtype(a.dtype))


@reference("window")
def _window(a, x):
    for axis, size, stride, dilation in zip(a.axes, a.sizes, a.strides, a.dilations, strict=True):
        # unfold appends the window's axis, in the order of the axes.
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x


@reference("unwindow")
def _unwindow(a, x):
    """The adjoint of torch's own window, by autograd."""
    base = torch.zeros(a.shape, dtype=x.dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(_window(a.window, base), base, x, create_graph=True)
    return gradient


@reference("gather")
def _gather(a, x, indices):
    index = indices.long()
    if a.batch == 0:
        return x.index_select(a.axis, index.reshape(-1)).reshape(
            x.shape[: a.axis] + index.shape + x.shape[a.axis + 1 :]
        )
    inner = type(a)(a.axis - 1, a.batch - 1)
    return torch.stack([_gather(inner, *pair) for pair in zip(x, index, strict=True)])


@reference("scatter_add")
def _scatter_add(a, updates, indices):
    index = indices.long()
    if a.batch:
        inner = type(a)(a.axis - 1, a.size, a.batch - 1)
        return torch.stack(
            [_scatter_add(inner, *pair) for pair in zip(updates, index, strict=True)]
        )
    lead, rest = updates.shape[: a.axis], updates.shape[a.axis + index.ndim :]
    flat = updates.reshape(*lead, index.numel(), *rest)
    zeros = torch.zeros((*lead, a.size, *rest), dtype=updates.dtype)
    return zeros.index_add(a.axis, index.reshape(-1), flat)


@reference("gelu")
def _gelu(a, x):
    return F.gelu(x, approximate=a.approximate)


@reference("softplus")
def _softplus(a, x):
    return F.softplus(x, a.beta, a.threshold)


@reference("mean")
def _mean(a, x):
    return x.mean(a.axes)


@reference("var")
def _var(a, x):
    return x.var(a.axes, correction=a.correction)


@reference("softmax")
def _softmax(a, x):
    return x.softmax(a.axis)


@reference("log_softmax")
def _log_softmax(a, x):
    return x.log_softmax(a.axis)


@reference("logsumexp")
def _logsumexp(a, x):
    return x.logsumexp(a.axes)


@reference("layer_norm")
def _layer_norm(a, x, *affine):
    return F.layer_norm(x, x.shape[x.ndim - a.dims :], *affine, eps=a.eps)


@reference("rms_norm")
def _rms_norm(a, x, *affine):
    return F.rms_norm(x, x.shape[x.ndim - a.dims :], *affine, eps=a.eps)


@reference("attention")
def _attention(a, q, k, v, *bias):
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * a.scale + (bias[0] if bias else 0)
    if a.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@reference("cross_entropy")
def _cross_entropy(a, logits, targets):
    rows = logits.reshape(-1, logits.shape[-1])
    flat = targets.long().reshape(-1)
    loss = F.cross_entropy(rows, flat, reduction="none", label_smoothing=a.label_smoothing)
    return loss.reshape(targets.shape)


@reference("linear_cross_entropy")
def _linear_cross_entropy(a, x, weight, targets, *bias):
    return _cross_entropy(a, F.linear(x, weight, *bias), targets)


@reference("linear_cross_entropy_grad")
def _linear_cross_entropy_grad(a, ct, x, weight, targets, *bias):
    leaves = [t.clone().requires_grad_() for t in (x, weight, *bias)]
    rows = _linear_cross_entropy(a, *leaves[:2], targets, *leaves[2:])
    rows.backward(ct)
    return (rows.detach(), *(t.grad for t in leaves))


@reference("conv")
def _conv(a, x, w):
    amounts = [n for pair in reversed(a.padding) for n in pair]
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[w.ndim - 2]
    return function(F.pad(x, amounts), w, None, a.strides, 0, a.dilations, a.groups)


@reference("conv_grad_x")
def _conv_grad_x(a, ct, w):
    x = torch.zeros(a.shape, dtype=ct.dtype, requires_grad=True)
    return torch.autograd.grad(_conv(a.conv, x, w), x, ct)[0]


@reference("conv_grad_w")
def _conv_grad_w(a, ct, x):
    w = torch.zeros(a.shape, dtype=ct.dtype, requires_grad=True)
    return torch.autograd.grad(_conv(a.conv, x, w), w, ct)[0]


@reference("batch_norm")
def _batch_norm(a, x, *affine):
    return F.batch_norm(x, None, None, *affine, training=True, eps=a.eps)


@reference("group_norm")
def _group_norm(a, x, *affine):
    return F.group_norm(x, a.groups, *affine, eps=a.eps)


@reference("max_pool")
def _max_pool(a, x):
    function = {1: F.max_pool1d, 2: F.max_pool2d}[len(a.sizes)]
    return function(x, a.sizes, a.strides, a.padding, a.dilations)


@reference("avg_pool")
def _avg_pool(a, x):
    function = {1: F.avg_pool1d, 2: F.avg_pool2d}[len(a.sizes)]
    return function(x, a.sizes, a.strides, a.padding, count_include_pad=a.count_padding)


@reference("one_hot")
def _one_hot(a, indices):
    classes = torch.arange(a.classes)
    return (indices[..., None] == classes).to(torch_dtype(a.dtype))


@reference("embedding")
def _embedding(a, table, indices):
    return F.embedding(indices.long(), table)
