"""Matmul, einsum, linear, convolution and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.base.dtypes import DType, bool_, int32
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.shapes import broadcast_shapes
from treadle.frontend.coerce import align, as_tensor, common_dtype
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.shaping import (
    axis_of,
    integer_of,
    number_of,
    permute,
    reshape,
    roll,
    slice_along,
    squeeze,
    unsqueeze,
)
from treadle.frontend.scopes import bind, bind1
from treadle.frontend.spelling import takes_dim
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


def aligned(*values: Operand) -> list[Tensor]:
    """The values in one dtype; bool counts as int32, as in sums and products."""
    dtype = common_dtype(values)
    numeric = int32 if dtype is bool_ else dtype
    return [cast_to(as_tensor(x), numeric) for x in values]


def matmul(x: Operand, y: Operand) -> Tensor:
    """The matrix product of the last two axes: (…, n, k), (…, k, m) → (…, n, m).

    The other axes broadcast. A vector on the left is a row, on the right a column; its axis goes
    away.
    """
    a, b = aligned(x, y)
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


@takes_dim
def cross(x: Operand, y: Operand, axis: int | None = None) -> Tensor:
    """The cross product along an axis of three, the first such axis of x unless given.

    (…, 3), (…, 3) → (…, 3); the other axes broadcast. `td.linalg.cross` takes the last axis.
    """
    a, b = align("cross", *aligned(x, y))
    found = next((i for i, n in enumerate(a.shape) if n == 3), None)
    at = found if axis is None else axis_of("cross", axis, a)
    if at is None or a.shape[at] != 3:
        raise ShapeError(
            "cross", f"{a.type} and {b.type}, axis {axis}", "Vectors have three elements."
        )
    turned = [(roll(a, -1, at), roll(b, -2, at)), (roll(a, -2, at), roll(b, -1, at))]
    (p, q), (r, s) = turned
    return p * q - r * s


def linear(x: Operand, weight: Operand, bias: Operand | None = None) -> Tensor:
    """x Wᵀ + b over the last axis: (…, in), (out, in), (out,) → (…, out), as F.linear."""
    a, w = aligned(x, weight)
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
    """Sums of products by labelled axes: "bij,bjk->bik" is (B, I, J), (B, J, K) → (B, I, K).

    As numpy.einsum. "..." stands for the axes that have no label.

    Axes of one element broadcast.
    """
    if not operands:
        raise ArgumentError("einsum", f"{spec!r} without operands", "Pass one for each term.")
    tensors = aligned(*operands)
    terms, result = _parse_einsum(spec, tensors)
    parts = [_without_diagonals(spec, t, labels) for t, labels in zip(tensors, terms, strict=True)]
    sizes = _einsum_sizes(spec, parts)
    parts = [_without_ones(x, labels, sizes) for x, labels in parts]
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
            "einsum",
            f"{spec!r} has {len(terms)} terms for {len(tensors)} operands",
            "Separate one term for each operand by commas.",
        )
    for term in (*terms, result):
        if set(term.replace("...", "", 1)) - set(_LETTERS):
            raise ArgumentError(
                "einsum", f"{term!r} of {spec!r} is not a term", 'Use letters and one "...".'
            )
    spare = [ch for ch in _LETTERS if ch not in text]
    widest = 0
    expanded: list[str] = []
    for term, tensor in zip(terms, tensors, strict=True):
        extra = tensor.ndim - len(term.replace("...", ""))
        if extra < 0 or (extra and "..." not in term):
            raise ShapeError(
                "einsum",
                f"{term!r} of {spec!r} does not fit {tensor.type}",
                'Name each axis, or write "..." for the rest.',
            )
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
            "einsum",
            f"the result of {spec!r} repeats a label or has one of its own",
            "Its labels are some of the operands', each once.",
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
                "einsum",
                f"label {label!r} of {spec!r} is {n} and {x.shape[j]} in {x.type}",
                "A diagonal needs axes of one size.",
            )
        rest = [k for k in range(x.ndim) if k not in (i, j)]
        x = reshape(permute(x, [*rest, i, j]), (*(x.shape[k] for k in rest), n * n))
        x = slice_along(x, len(rest), 0, n * n, n + 1)
        labels = "".join(labels[k] for k in rest) + label
    return x, labels


def _einsum_sizes(spec: str, parts: list[tuple[Tensor, str]]) -> dict[str, int]:
    """The size of each label; axes of one element take any."""
    sizes: dict[str, int] = {}
    for x, labels in parts:
        for label, n in zip(labels, x.shape, strict=True):
            known = sizes.get(label, 1)
            if 1 not in (known, n) and known != n:
                shapes = " and ".join(str(t.shape) for t, _ in parts)
                raise ShapeError(
                    "einsum",
                    f"label {label!r} of {spec!r} is {known} and {n} in {shapes}",
                    "One label has one size.",
                )
            sizes[label] = n if known == 1 else known
    return sizes


def _without_ones(x: Tensor, labels: str, sizes: dict[str, int]) -> tuple[Tensor, str]:
    """Without the axes of one element that broadcast: another operand has the label."""
    kept = [i for i, ch in enumerate(labels) if x.shape[i] == sizes[ch]]
    return reshape(x, tuple(x.shape[i] for i in kept)), "".join(labels[i] for i in kept)


def _sum_alone(x: Tensor, labels: str, needed: set[str]) -> tuple[Tensor, str]:
    """Sum the labels that nothing else needs."""
    alone = [i for i, ch in enumerate(labels) if ch not in needed]
    if not alone:
        return x, labels
    return sum_over(x, alone, dtype=x.dtype), "".join(ch for ch in labels if ch in needed)


def per_axis(
    name: str, label: str, value: int | Sequence[int], dims: int, least: int = 1
) -> tuple[int, ...]:
    given = value if isinstance(value, Sequence) else (value,) * dims
    numbers = tuple(integer_of(name, f"the {label}", n) for n in given)
    if len(numbers) != dims:
        raise ArgumentError(
            name,
            f"the {label} is {value} for {dims} spatial axes",
            "Give one number, or one for each axis.",
        )
    if min(numbers) < least:
        raise ArgumentError(name, f"the {label} is {value}", f"It must be at least {least}.")
    return numbers


def conv(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution over any number of axes: x (N, C, …), weight (O, C / groups, …) → (N, O, …).

    `padding` is a number, one per axis, "valid" or "same" (stride 1).
    """
    a, w = aligned(x, weight)
    dims = w.ndim - 2
    if dims > 0 and a.ndim == w.ndim - 1:  # one image, without an axis of images
        return squeeze(conv(unsqueeze(a, 0), w, bias, stride, padding, dilation, groups), 0)
    if dims < 1 or a.ndim != w.ndim:
        raise ShapeError(
            "conv", f"x is {a.type}, the weight {w.type}", "Both are (·, channels, spatial …)."
        )
    groups = integer_of("conv", "groups", groups)
    if groups < 1 or a.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ShapeError(
            "conv",
            f"x {a.type} and the weight {w.type} do not fit in {groups} groups",
            "The weight is (outputs, channels / groups, …) and groups divides both.",
        )
    strides = per_axis("conv", "stride", stride, dims)
    dilations = per_axis("conv", "dilation", dilation, dims)
    pads = _conv_padding(padding, w.shape[2:], strides, dilations)
    check_kernel("conv", a, w.shape[2:], dilations, pads)
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
    if b.dtype.is_float and not result.dtype.is_float:
        raise DTypeError("conv", f"the bias is {b.type}, x is {a.type}", "Cast one of them first.")
    return result + reshape(b, (w.shape[0], *(1,) * dims))


def check_kernel(
    name: str,
    x: Tensor,
    kernel: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> None:
    sizes = x.shape[x.ndim - len(kernel) :]
    for n, k, d, (low, high) in zip(sizes, kernel, dilations, pads, strict=True):
        if k < 1 or n + low + high < d * (k - 1) + 1:
            raise ShapeError(
                name,
                f"the kernel {tuple(kernel)} does not fit into {x.type}, padded by {tuple(pads)}",
                "Pad more, or use a smaller kernel.",
            )


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
    return tuple((p, p) for p in per_axis("conv", "padding", padding, len(kernel), 0))


def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    bias: Operand | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v: (B, H, T, D), (B, G, S, D), (B, G, S, E) → (B, H, T, E).

    G divides H: H / G heads of queries share one of keys.

    A float bias is added to the scores. A bool bias is True where a key takes part, as in
    `torch.nn.functional.scaled_dot_product_attention`. A query without keys gives zeros.

    `causal` lets position t see 0 … t. The scale is 1/√D unless given. T×T is never kept for the
    backward.
    """
    a, b, d = aligned(q, k, v)
    if not a.dtype.is_float:
        raise DTypeError(
            "attention", f"q {a.type}, k {b.type}, v {d.type} are not floats", "Cast them first."
        )
    fits = (
        a.ndim == b.ndim == d.ndim == 4 and b.shape[:3] == d.shape[:3] and a.shape[3] == b.shape[3]
    )
    is_empty = 0 in b.shape[1:3]
    if not fits or a.shape[0] != b.shape[0] or is_empty or a.shape[1] % b.shape[1]:
        raise ShapeError(
            "attention",
            f"q {a.type}, k {b.type}, v {d.type} do not fit",
            "q is (B, H, T, D), k (B, G, S, D), v (B, G, S, ·), and G divides H.",
        )
    factor = a.shape[3] ** -0.5 if scale is None else number_of("attention", "scale", scale)
    attributes = c.Attention(factor, causal)
    if bias is None:
        return bind(c.ATTENTION, attributes, a, b, d)[0]
    full = (a.shape[0], a.shape[1], a.shape[2], b.shape[2])
    return bind(c.ATTENTION, attributes, a, b, d, _attention_bias(bias, full, a.dtype))[0]


def _attention_bias(bias: Operand, shape: tuple[int, ...], dtype: DType) -> Tensor:
    given = as_tensor(bias)
    if not given.dtype.is_float and given.dtype is not bool_:
        raise DTypeError(
            "attention",
            f"the bias is {given.type}, neither float (added to the scores) nor bool",
            "Pass mask != 0: a bool bias is True where a key takes part.",
        )
    if broadcast_shapes(given.shape, shape) != shape:
        raise ShapeError(
            "attention",
            f"the bias {given.type} does not broadcast to {shape}",
            "The scores are (B, H, T, S).",
        )
    if given.dtype is bool_:
        zero, hidden = (cast_to(as_tensor(x), dtype) for x in (0.0, -math.inf))
        given = where(given, zero, hidden)
    return reshape(cast_to(given, dtype), (*(1,) * (4 - given.ndim), *given.shape))
