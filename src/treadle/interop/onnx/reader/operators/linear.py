"""Products and convolutions."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.images import conv_transpose, fold
from treadle.frontend.functions.padding import pad
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator, shape_of
from treadle.ir import composites as c
from treadle.linalg.elimination import det

AUTO = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
Pads = tuple[tuple[int, int], ...]


@operator("MatMul")
def _matmul(call: Call, x: Value, y: Value) -> Tensor:
    return linear.matmul(x, y)


@operator("Gemm")
def _gemm(call: Call, x: Value, y: Value, bias: Value = None) -> Tensor:
    left, right = as_tensor(x), as_tensor(y)
    if left.ndim != 2 or right.ndim != 2:
        raise call.refuse(f"{left.type} and {right.type} are no matrices")
    left = s.transpose(left, 0, 1) if call.flag("transA") else left
    alpha, beta = call.real("alpha", 1.0), call.real("beta", 1.0)
    is_plain = call.flag("transB") and alpha == beta == 1 and bias is not None
    if is_plain and shape_of(bias) == right.shape[:1]:
        return linear.linear(left, right, bias)
    right = s.transpose(right, 0, 1) if call.flag("transB") else right
    found = linear.matmul(left, right)
    found = found if alpha == 1 else _scaled(found, alpha)
    if bias is None:
        return found
    shift = as_tensor(bias)
    return found + (shift if beta == 1 else _scaled(shift, beta))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor if x.dtype.is_float else cast_to(cast_to(x, dtypes.float64) * factor, x.dtype)


@operator("Einsum")
def _einsum(call: Call, *values: Value) -> Tensor:
    return linear.einsum(call.text("equation"), *values)


@operator("Det")
def _det(call: Call, x: Value) -> Tensor:
    return det(as_tensor(x))


# Convolutions


def per_axis(call: Call, name: str, dims: int, default: int = 1) -> tuple[int, ...]:
    found = call.integers(name, (default,) * dims)
    if len(found) != dims or min(found, default=0) < default:
        raise call.refuse(f"{name} is {found[:32]} for {dims} axes")
    return found


def pads_of(call: Call, sizes: Shape, kernel: Shape, strides: Shape, dilations: Shape) -> Pads:
    """What is put before and after each axis."""
    dims = len(kernel)
    auto = call.choice("auto_pad", "NOTSET", AUTO)
    if auto == "VALID":
        return ((0, 0),) * dims
    if auto == "NOTSET":
        given = call.integers("pads", (0,) * 2 * dims)
        if len(given) != 2 * dims or min(given, default=0) < 0:
            raise call.refuse(f"pads {given[:32]} for {dims} axes")
        return tuple(zip(given[:dims], given[dims:], strict=True))
    found = []
    for n, k, stride, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-n // stride) - 1) * stride + d * (k - 1) + 1 - n)
        less, more = total // 2, total - total // 2
        found.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return tuple(found)


@operator("Conv")
def convolution(call: Call, x: Value, w: Value, bias: Value = None) -> Tensor:
    tensor, weight = linear.aligned(x, w)
    dims, groups = weight.ndim - 2, call.integer("group", 1)
    if dims < 1 or tensor.ndim != weight.ndim or groups < 1:
        raise call.refuse(f"x is {tensor.type}, the weight {weight.type}")
    if tensor.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise call.refuse(f"x {tensor.type} and the weight {weight.type} in {groups} groups")
    strides, dilations = (per_axis(call, n, dims) for n in ("strides", "dilations"))
    kernel = weight.shape[2:]
    pads = pads_of(call, tensor.shape[2:], kernel, strides, dilations)
    linear.check_kernel("conv", tensor, kernel, dilations, pads)
    found = bind1(c.CONV, c.Conv(strides, pads, dilations, groups), tensor, weight)
    return found if bias is None else found + channels(bias, dims)


def channels(bias: Value, dims: int) -> Tensor:
    vector = as_tensor(bias)
    return s.reshape(vector, (*vector.shape, *(1,) * dims))


@operator("ConvTranspose")
def _conv_transpose(call: Call, x: Value, w: Value, bias: Value = None) -> Tensor:
    """Without padding, and then cut; or at once, where both ends are alike."""
    tensor, weight = linear.aligned(x, w)
    dims, groups = weight.ndim - 2, call.integer("group", 1)
    if dims < 1 or tensor.ndim != weight.ndim:
        raise call.refuse(f"x is {tensor.type}, the weight {weight.type}")
    strides, dilations = (per_axis(call, n, dims) for n in ("strides", "dilations"))
    extra = per_axis(call, "output_padding", dims, 0)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, weight.shape[2:], strict=True)]
    whole = [(n - 1) * q + r for n, q, r in zip(tensor.shape[2:], strides, reach, strict=True)]
    pads = _transposed_pads(call, tensor, whole, strides, extra)
    is_even = all(low == high for low, high in pads) and not any(extra)
    if is_even:
        plain = [low for low, _ in pads]
        found = conv_transpose(tensor, weight, None, strides, plain, 0, groups, dilations)
    else:
        found = conv_transpose(tensor, weight, None, strides, 0, 0, groups, dilations)
        amounts = [(-low, e - high) for (low, high), e in zip(pads, extra, strict=True)]
        found = pad(found, [(0, 0), (0, 0), *amounts])
    return found if bias is None else found + channels(bias, dims)


def _transposed_pads(call: Call, x: Tensor, whole: list[int], strides: Shape, extra: Shape) -> Pads:
    """What is cut off at each end."""
    dims, auto = len(whole), call.choice("auto_pad", "NOTSET", AUTO)
    wanted = call.integers("output_shape", ())[-dims:] if call.has("output_shape") else ()
    if auto in ("SAME_UPPER", "SAME_LOWER") and not wanted:
        wanted = tuple(n * q for n, q in zip(x.shape[2:], strides, strict=True))
    if not wanted:
        return pads_of(call, x.shape[2:], (1,) * dims, strides, (1,) * dims)
    found = []
    for n, e, size in zip(whole, extra, wanted, strict=True):
        total = n + e - size
        less, more = total // 2, total - total // 2
        found.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return tuple(found)


@operator("Col2Im")
def _col2im(call: Call, x: Value, image: Value, block: Value) -> Tensor:
    size, kernel = call.whole(image, "the image's shape"), call.whole(block, "the block's shape")
    dims = len(size)
    strides, dilations = (per_axis(call, n, dims) for n in ("strides", "dilations"))
    pads = pads_of(call, size, kernel, strides, dilations)
    whole = [n + low + high for n, (low, high) in zip(size, pads, strict=True)]
    found = fold(as_tensor(x), whole, kernel, dilations, 0, strides)
    return pad(found, [(0, 0), (0, 0), *((-low, -high) for low, high in pads)])
