"""Activations, normalisations and the per-row cross-entropy."""

from __future__ import annotations

from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import abs, expm1, magnitude, tanh, where
from treadle.frontend.functions.shaping import axis_of, chunk, integer_of, number_of, reshape
from treadle.frontend.scopes import bind1
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir import composites as c
from treadle.ir.op import NONE
from treadle.ir.types import as_dtype

# Of the self-normalising unit: mean 0 and variance 1 stay so (Klambauer et al., 2017).
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _real(name: str, x: Operand) -> Tensor:
    x = as_tensor(x)
    if not x.dtype.is_float:
        raise DTypeError(
            name,
            f"{x.type} is not a float",
            "Cast it first, for instance with x.astype(td.float32).",
        )
    return x


def relu(x: Operand, inplace: bool = False) -> Tensor:
    """max(x, 0); the gradient at 0 is 0."""
    return bind1(c.RELU, NONE, _real("relu", x))


def leaky_relu(x: Operand, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x above 0, negative_slope · x below."""
    x = _real("leaky_relu", x)
    return where(x > 0, x, x * negative_slope)


def elu(x: Operand, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x above 0, alpha · (eˣ − 1) below."""
    x = _real("elu", x)
    below = where(x > 0, 0, x)  # keeps exp from overflowing where it is not used
    return where(x > 0, x, expm1(below) * alpha)


def relu6(x: Operand, inplace: bool = False) -> Tensor:
    """x limited to 0 … 6; the gradient at both ends is 0."""
    return hardtanh(x, 0.0, 6.0)


def hardtanh(
    x: Operand, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    """x limited to min_val … max_val; the gradient at both ends is 0."""
    low, high = (
        number_of("hardtanh", n, v) for n, v in (("min_val", min_val), ("max_val", max_val))
    )
    if low > high:
        raise ArgumentError("hardtanh", f"min_val {low} above max_val {high}", "Swap them.")
    x = _real("hardtanh", x)
    return where(x <= low, low, where(x >= high, high, x))


def threshold(x: Operand, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x above the threshold, otherwise the value."""
    x = _real("threshold", x)
    return where(x <= number_of("threshold", "threshold", threshold), value, x)


def selu(x: Operand, inplace: bool = False) -> Tensor:
    """The self-normalising exponential unit: scale · elu(x, alpha) with its two constants."""
    return elu(x, SELU_ALPHA) * SELU_SCALE


def celu(x: Operand, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x above 0, alpha · (e^(x / alpha) − 1) below."""
    x, alpha = _real("celu", x), number_of("celu", "alpha", alpha)
    if alpha <= 0:
        raise ArgumentError("celu", f"alpha is {alpha}", "It is positive.")
    below = where(x > 0, 0, x)
    return where(x > 0, x, expm1(below * (1 / alpha)) * alpha)


def mish(x: Operand, inplace: bool = False) -> Tensor:
    """x · tanh(softplus(x))."""
    x = _real("mish", x)
    return x * tanh(softplus(x))


def hardsigmoid(x: Operand, inplace: bool = False) -> Tensor:
    """x / 6 + ½, limited to 0 … 1."""
    x = _real("hardsigmoid", x)
    return where(x <= -3, 0, where(x >= 3, 1, x * (1 / 6) + 0.5))


def hardswish(x: Operand, inplace: bool = False) -> Tensor:
    """x · hardsigmoid(x)."""
    x = _real("hardswish", x)
    is_low, is_high = x <= -3, x >= 3
    inner = where(is_low, 0, where(is_high, 0, x))  # whose slope is no 0 · ∞ far outside
    return where(is_low, 0, where(is_high, x, inner * (inner + 3) * (1 / 6)))


def log_sigmoid(x: Operand) -> Tensor:
    """log sigmoid(x), without underflow."""
    x = _real("log_sigmoid", x)
    # min(x, 0) − log(1 + e^−|x|), from either side of 0 with the slopes of the whole.
    return where(x < 0, x, 0) - softplus(-magnitude(x), threshold=1.0)


def softsign(x: Operand) -> Tensor:
    """x / (1 + |x|)."""
    x = _real("softsign", x)
    return x / (1 + abs(x))


def tanhshrink(x: Operand) -> Tensor:
    """x − tanh x."""
    x = _real("tanhshrink", x)
    return x - tanh(x)


def softshrink(x: Operand, lambd: float = 0.5) -> Tensor:
    """x moved towards 0 by lambd; 0 where it is not further away."""
    x, far = _real("softshrink", x), _distance("softshrink", lambd)
    return where(abs(x) <= far, 0, where(x < 0, x + far, x - far))


def hardshrink(x: Operand, lambd: float = 0.5) -> Tensor:
    """x where it is further than lambd from 0, otherwise 0."""
    x, far = _real("hardshrink", x), _distance("hardshrink", lambd)
    return where(abs(x) <= far, 0, x)


def _distance(name: str, lambd: float) -> float:
    found = number_of(name, "lambd", lambd)
    if found < 0:
        raise ArgumentError(name, f"lambd is {found}", "It is not negative.")
    return found


def prelu(x: Operand, weight: Operand) -> Tensor:
    """x above 0, weight · x below; one weight, or one for each channel (axis 1)."""
    x, slope = _real("prelu", x), as_tensor(weight)
    channels = x.shape[1] if x.ndim > 1 else 1
    if slope.size not in (1, channels) or slope.ndim > 1:
        raise ShapeError(
            "prelu", f"the weight {slope.type} for {x.type}", f"It has 1 or {channels} entries."
        )
    each = (slope.size, *(1,) * (x.ndim - 2)) if x.ndim > 1 else ()
    return where(x > 0, x, x * reshape(cast_to(slope, x.dtype), each))


@takes_dim
def glu(x: Operand, axis: int = -1) -> Tensor:
    """a · sigmoid(b) for the halves a, b of an axis: (…, 2 · D) → (…, D)."""
    value, gate = _halves("glu", x, axis)
    return value * sigmoid(gate)


def sigmoid(x: Operand) -> Tensor:
    """1 / (1 + e⁻ˣ)."""
    return bind1(c.SIGMOID, NONE, _real("sigmoid", x))


def silu(x: Operand, inplace: bool = False) -> Tensor:
    """x · sigmoid(x), also called swish."""
    return bind1(c.SILU, NONE, _real("silu", x))


def gelu(x: Operand, approximate: str = "none") -> Tensor:
    """x · Φ(x); `approximate="tanh"` uses the tanh formula."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError("gelu", f"approximate is {approximate!r}", 'Use "none" or "tanh".')
    return bind1(c.GELU, c.Gelu(approximate), _real("gelu", x))


def softplus(x: Operand, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + e^(beta·x)) / beta; x itself where beta · x > threshold."""
    named = (("beta", beta), ("threshold", threshold))
    numbers = (number_of("softplus", label, n) for label, n in named)
    return bind1(c.SOFTPLUS, c.Softplus(*numbers), _real("softplus", x))


def swiglu(x: Operand) -> Tensor:
    """silu(a) · b for the halves a, b of the last axis: (…, 2 · D) → (…, D)."""
    gate, value = _halves("swiglu", x)
    return silu(gate) * value


def geglu(x: Operand) -> Tensor:
    """gelu(a) · b for the halves a, b of the last axis: (…, 2 · D) → (…, D)."""
    gate, value = _halves("geglu", x)
    return gelu(gate) * value


def _halves(name: str, x: Operand, axis: int = -1) -> tuple[Tensor, Tensor]:
    x = _real(name, x)
    at = axis_of(name, axis, x) if x.ndim else 0
    if not x.ndim or x.shape[at] % 2:
        raise ShapeError(
            name, f"axis {axis} of {x.type} cannot be halved", "It holds two halves, a and b."
        )
    first, second = chunk(x, 2, at)
    return first, second


@takes_dim
def softmax(x: Operand, axis: int = -1, dtype: object = None) -> Tensor:
    """eˣ / Σ eˣ along an axis. `dtype` casts x first."""
    x = _real("softmax", x if dtype is None else cast_to(as_tensor(x), as_dtype(dtype)))
    at = axis_of("softmax", axis, x)
    return bind1(c.SOFTMAX, c.Axis(at), x) if x.shape[at] else x


@takes_dim
def log_softmax(x: Operand, axis: int = -1, dtype: object = None) -> Tensor:
    """log softmax, computed without underflow. `dtype` casts x first."""
    x = _real("log_softmax", x if dtype is None else cast_to(as_tensor(x), as_dtype(dtype)))
    at = axis_of("log_softmax", axis, x)
    return bind1(c.LOG_SOFTMAX, c.Axis(at), x) if x.shape[at] else x


def layer_norm(
    x: Operand,
    weight: Operand | None = None,
    bias: Operand | None = None,
    dims: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """(x − mean) / √(var + eps) over the last `dims` axes, then scaled and shifted if given."""
    x = _real("layer_norm", x)
    operands = _affine("layer_norm", x, weight, bias, dims)
    return bind1(c.LAYER_NORM, c.Norm(dims, number_of("layer_norm", "eps", eps)), x, *operands)


def rms_norm(x: Operand, weight: Operand | None = None, dims: int = 1, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + eps) over the last `dims` axes, then scaled if given."""
    x = _real("rms_norm", x)
    operands = _affine("rms_norm", x, weight, None, dims)
    return bind1(c.RMS_NORM, c.Norm(dims, number_of("rms_norm", "eps", eps)), x, *operands)


def _affine(
    name: str, x: Tensor, weight: Operand | None, bias: Operand | None, dims: int
) -> list[Tensor]:
    if not 1 <= integer_of(name, "dims", dims) <= x.ndim:
        raise ShapeError(name, f"{x.type} has no {dims} last axes", "Give dims from 1 to its axes.")
    if weight is None and bias is not None:
        raise ArgumentError(name, "a bias without a weight", "Pass ones as the weight.")
    given = [cast_to(as_tensor(t), x.dtype) for t in (weight, bias) if t is not None]
    for t in given:
        if t.shape != x.shape[x.ndim - dims :]:
            raise ShapeError(
                name,
                f"{t.type} does not fit the last {dims} axes of {x.type}",
                "The weight and the bias have the shape of those axes.",
            )
    return given


def cross_entropy_rows(logits: Operand, targets: Operand, label_smoothing: float = 0.0) -> Tensor:
    """−log softmax(logits) at the target, one per row; logits (…, classes), targets (…)."""
    x, index = _real("cross_entropy", logits), as_tensor(targets)
    if not index.dtype.is_integer:
        raise DTypeError(
            "cross_entropy",
            f"targets {index.type} are not integers",
            "They are class indices; cast them with .astype(td.int32).",
        )
    if index.shape != x.shape[:-1] or x.ndim == 0:
        raise ShapeError(
            "cross_entropy",
            f"logits {x.type}, targets {index.type}",
            "Targets are one class index per row.",
        )
    return bind1(c.CROSS_ENTROPY, c.CrossEntropy(float(label_smoothing)), x, index)


def linear_cross_entropy_rows(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, label_smoothing: float
) -> Tensor:
    """`cross_entropy_rows` of `linear(x, weight, bias)`, for x (…, D), weight (classes, D)."""
    flat = reshape(x, (targets.size, x.shape[-1]))
    operands = [flat, weight, reshape(targets, (targets.size,))]
    operands += [] if bias is None else [bias]
    attributes = c.HeadCrossEntropy(float(label_smoothing))
    return reshape(bind1(c.LINEAR_CROSS_ENTROPY, attributes, *operands), targets.shape)
