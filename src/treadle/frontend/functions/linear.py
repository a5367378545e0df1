"""Products: matmul, einsum, linear; convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.shapes import broadcast_shapes
from treadle.frontend.coerce import align, as_tensor, common_dtype, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import permute, reshape, slice_along
from treadle.frontend.scopes import bind, bind1
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir import composites as c
from treadle.ir.ops.linear import CONTRACT, Contraction, canonical_spec

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def contract(
    x: Tensor, y: Tensor, labels: tuple[str, str, str], dtype: DType | None = None
) -> Tensor:
    """The product by labelled axes; narrow floats are accumulated in float32 and rounded once."""
    spec = canonical_spec(*labels)
    return bind1(CONTRACT, Contraction(spec, dtype or x.dtype), x, y)


def matmul(x: Operand, y: Operand) -> Tensor:
    """The matrix product of the last two axes, batched over the others with broadcasting."""
    dtype = common_dtype((x, y))
    a, b = cast_to(as_tensor(x), dtype), cast_to(as_tensor(y), dtype)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError("matmul", f"{a.type} @ {b.type}: a scalar has no rows", "Multiply with *.")
    inner = a.shape[-1], b.shape[-2] if b.ndim > 1 else b.shape[0]
    if inner[0] != inner[1]:
        raise ShapeError(
            "matmul",
            f"inner sizes differ: {a.shape} @ {b.shape}: {inner[0]} != {inner[1]}",
            "Transpose one operand?",
        )
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch is None:
        raise ShapeError(
            "matmul",
            f"batch axes do not broadcast: {a.shape} @ {b.shape}",
            "Sizes must be equal or 1.",
        )
    letters = _LETTERS[: len(batch)]
    row, column = "M" * (a.ndim > 1), "N" * (b.ndim > 1)
    a, left = _drop_ones(a, batch, letters)
    b, right = _drop_ones(b, batch, letters)
    kept = "".join(ch for ch in letters if ch in left or ch in right)
    product = contract(a, b, (left + row + "K", right + "K" + column, kept + row + column))
    # Axes that are 1 on both sides were dropped and come back here.
    return reshape(product, (*batch, *product.shape[len(kept) :]))


def _drop_ones(x: Tensor, batch: tuple[int, ...], letters: str) -> tuple[Tensor, str]:
    """Without the batch axes of one element, and the labels of those that stay."""
    count = max(0, x.ndim - 2)
    own = letters[len(batch) - count :]
    kept = [i for i in range(count) if x.shape[i] != 1]
    shape = (*(x.shape[i] for i in kept), *x.shape[count:])
    return reshape(x, shape), "".join(own[i] for i in kept)


def linear(x: Operand, weight: Operand, bias: Operand | None = None) -> Tensor:
    """x Wᵀ + b over the last axis; weight is (out, in), as in PyTorch."""
    dtype = common_dtype((x, weight))
    a, w = cast_to(as_tensor(x), dtype), cast_to(as_tensor(weight), dtype)
    if a.ndim == 0 or w.ndim != 2 or a.shape[-1] != w.shape[1]:
        raise ShapeError(
            "linear",
            f"the last axis of {a.type} does not fit the weight {w.type}",
            "The weight is (out, in).",
        )
    batch = _LETTERS[: a.ndim - 1]
    result = contract(a, w, (batch + "K", "NK", batch + "N"))
    if bias is None:
        return result
    b = as_tensor(bias)
    if b.shape != (w.shape[0],):
        raise ShapeError(
            "linear",
            f"the bias {b.type} does not fit the weight {w.type}",
            "It has one entry per output.",
        )
    return result + b


def einsum(spec: str, *operands: Operand) -> Tensor:
    """Sums of products by labelled axes, as numpy.einsum: "bij,bjk->bik"; "..." is the rest."""
    dtype = common_dtype(operands)
    tensors = [cast_to(as_tensor(x), dtype) for x in operands]
    terms, result = _parse_einsum(spec, tensors)
    parts = [_without_diagonals(spec, t, labels) for t, labels in zip(tensors, terms, strict=True)]
    _check_sizes(spec, parts)
    x, labels = parts[0]
    for i, (y, other) in enumerate(parts[1:], 1):
        needed = set(result).union(*(later for _, later in parts[i + 1 :]))
        x, labels = _sum_alone(x, labels, needed | set(other))
        y, other = _sum_alone(y, other, needed | set(labels))
        both = labels + "".join(ch for ch in other if ch not in labels)
        out = "".join(ch for ch in both if ch in needed)
        x, labels = contract(x, y, (labels, other, out)), out
    x, labels = _sum_alone(x, labels, set(result))
    return permute(x, [labels.index(ch) for ch in result]) if labels != result else x


def _parse_einsum(spec: str, tensors: Sequence[Tensor]) -> tuple[list[str], str]:
    text = spec.replace(" ", "")
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(tensors):
        raise ArgumentError(
            "einsum", f"{spec!r} has {len(terms)} terms for {len(tensors)} operands"
        )
    spare = [ch for ch in _LETTERS if ch not in text]
    widest = 0
    expanded: list[str] = []
    for term, tensor in zip(terms, tensors, strict=True):
        extra = tensor.ndim - len(term.replace("...", ""))
        if extra < 0 or (extra and "..." not in term):
            raise ShapeError("einsum", f"{term!r} of {spec!r} does not fit {tensor.type}")
        widest = max(widest, extra if "..." in term else 0)
        expanded.append(term.replace("...", "".join(spare[-extra:]) if extra else ""))
    rest = "".join(spare[-widest:]) if widest else ""
    if not arrow:
        joined = "".join(expanded)
        single = sorted(ch for ch in set(joined) if joined.count(ch) == 1 and ch not in rest)
        return expanded, rest + "".join(single)
    result = result.replace("...", rest)
    unknown = [ch for ch in result if ch not in "".join(expanded)]
    if unknown or len(set(result)) != len(result):
        raise ArgumentError(
            "einsum", f"the result of {spec!r} repeats a label or has one of its own"
        )
    return expanded, result


def _without_diagonals(spec: str, x: Tensor, labels: str) -> tuple[Tensor, str]:
    """Repeated labels within one operand select the diagonal."""
    while len(set(labels)) < len(labels):
        label = next(ch for ch in labels if labels.count(ch) > 1)
        i = labels.index(label)
        j = labels.index(label, i + 1)
        n = x.shape[i]
        if x.shape[j] != n:
            raise ShapeError(
                "einsum", f"label {label!r} of {spec!r} is {n} and {x.shape[j]} in {x.type}"
            )
        rest = [k for k in range(x.ndim) if k not in (i, j)]
        x = reshape(permute(x, [*rest, i, j]), (*(x.shape[k] for k in rest), n * n))
        x = slice_along(x, len(rest), 0, n * n, n + 1)
        labels = "".join(labels[k] for k in rest) + label
    return x, labels


def _check_sizes(spec: str, parts: list[tuple[Tensor, str]]) -> None:
    sizes: dict[str, int] = {}
    for x, labels in parts:
        for label, n in zip(labels, x.shape, strict=True):
            if sizes.setdefault(label, n) != n:
                shapes = " and ".join(str(t.shape) for t, _ in parts)
                raise ShapeError(
                    "einsum", f"label {label!r} of {spec!r} is {sizes[label]} and {n} in {shapes}"
                )


def _sum_alone(x: Tensor, labels: str, needed: set[str]) -> tuple[Tensor, str]:
    """Sum the labels that nothing else needs."""
    alone = [i for i, ch in enumerate(labels) if ch not in needed]
    if not alone:
        return x, labels
    return sum_over(x, alone), "".join(ch for ch in labels if ch in needed)


def _per_axis(name: str, value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    given = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(given) != dims:
        raise ArgumentError(
            name, f"{value} for {dims} spatial axes", "Give one number, or one for each axis."
        )
    return given


def conv(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution in any number of dimensions: x (N, C, …), weight (O, C / groups, …).

    `padding` is a number, one per axis, "valid" or "same" (stride 1).
    """
    dtype = common_dtype((x, weight))
    a, w = cast_to(as_tensor(x), dtype), cast_to(as_tensor(weight), dtype)
    dims = w.ndim - 2
    if dims < 1 or a.ndim != w.ndim:
        raise ShapeError(
            "conv", f"x is {a.type}, the weight {w.type}", "Both are (·, channels, spatial …)."
        )
    if groups < 1 or a.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ShapeError(
            "conv",
            f"x {a.type} and the weight {w.type} do not fit in {groups} groups",
            "The weight is (outputs, channels / groups, …) and groups divides both.",
        )
    strides, dilations = _per_axis("conv", stride, dims), _per_axis("conv", dilation, dims)
    pads = _conv_padding(padding, w.shape[2:], strides, dilations)
    for n, k, d, (low, high) in zip(a.shape[2:], w.shape[2:], dilations, pads, strict=True):
        if n + low + high < d * (k - 1) + 1:
            raise ShapeError(
                "conv", f"the kernel of {w.type} is larger than the padded input {a.type}"
            )
    result = bind1(c.CONV, c.Conv(strides, pads, dilations, groups), a, w)
    if bias is None:
        return result
    b = as_tensor(bias)
    if b.shape != (w.shape[0],):
        raise ShapeError(
            "conv",
            f"the bias {b.type} does not fit the weight {w.type}",
            "It has one entry per output.",
        )
    return result + reshape(b, (w.shape[0], *(1,) * dims))


def _conv_padding(
    padding: int | Sequence[int] | str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise ArgumentError(
                "conv", f'padding "same" with stride {tuple(strides)}', "It needs stride 1."
            )
        total = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        return tuple((t // 2, t - t // 2) for t in total)
    if isinstance(padding, str):
        raise ArgumentError(
            "conv", f"padding {padding!r}", 'Use a number, one per axis, "same" or "valid".'
        )
    return tuple((p, p) for p in _per_axis("conv", padding, len(kernel)))


def _pool(
    name: str,
    x: Operand,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    count_padding: bool,
) -> tuple[Tensor, c.Pool]:
    x = as_tensor(x)
    dims = x.ndim - 2 if isinstance(kernel, int) else len(kernel)
    if not 0 < dims < x.ndim:
        raise ShapeError(
            name, f"{x.type} has no {dims} spatial axes", "x is (N, channels, spatial …)."
        )
    sizes, pads = _per_axis(name, kernel, dims), _per_axis(name, padding, dims)
    if any(2 * p > k for p, k in zip(pads, sizes, strict=True)):
        raise ArgumentError(name, f"padding {pads} is more than half of the kernel {sizes}")
    strides = sizes if stride is None else _per_axis(name, stride, dims)
    return x, c.Pool(sizes, strides, pads, _per_axis(name, dilation, dims), count_padding)


def max_pool(
    x: Operand,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """The greatest of each window over the last axes; the first of equals gets the gradient."""
    tensor, attributes = _pool("max_pool", x, kernel, stride, padding, dilation, True)
    return bind1(c.MAX_POOL, attributes, tensor)


def avg_pool(
    x: Operand,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window over the last axes."""
    tensor, attributes = _pool("avg_pool", x, kernel, stride, padding, 1, count_include_pad)
    return bind1(c.AVG_POOL, attributes, tensor)


def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    bias: Operand | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v; q is (B, H, T, D), k and v (B, G, S, ·) with G dividing H.

    `causal` lets position t see 0 … t. The scale is 1/√D unless given. T×T is never kept for the
    backward.
    """
    dtype = common_dtype((q, k, v))
    a, b, d = (cast_to(as_tensor(t), dtype) for t in (q, k, v))
    fits = (
        a.ndim == b.ndim == d.ndim == 4 and b.shape[:3] == d.shape[:3] and a.shape[3] == b.shape[3]
    )
    if not fits or a.shape[0] != b.shape[0] or b.shape[1] == 0 or a.shape[1] % b.shape[1]:
        raise ShapeError(
            "attention",
            f"q {a.type}, k {b.type}, v {d.type} do not fit",
            "q is (B, H, T, D), k (B, G, S, D), v (B, G, S, ·), and G divides H.",
        )
    attributes = c.Attention(a.shape[3] ** -0.5 if scale is None else float(scale), causal)
    if bias is None:
        return bind(c.ATTENTION, attributes, a, b, d)[0]
    full = (a.shape[0], a.shape[1], a.shape[2], b.shape[2])
    spread, _ = align("attention", cast_to(as_tensor(bias), dtype), constant(0, full, dtype))
    if spread.shape != full:
        raise ShapeError("attention", f"the bias {spread.type} does not broadcast to {full}")
    return bind(c.ATTENTION, attributes, a, b, d, spread)[0]
