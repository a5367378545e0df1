"""What composites mean: each is short for primitives, built here over operands of given types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from treadle_checker.field import DTYPES, Number, is_float
from treadle_checker.reading import MOST_ELEMENTS, Rejected
from treadle_checker.types import RULES, Types, accumulator
from treadle_checker.values import Graph, Node, Type, Value, key_of

Shape = tuple[int, ...]
DEFINITIONS: dict[str, Callable[..., Any]] = {}


def infer(op: str, attributes: Mapping[str, Any], operands: Types) -> Types:
    """The types of an op's results; Rejected if the operands or attributes do not fit."""
    try:
        if op in DEFINITIONS:
            return definition(op, _Frozen(attributes), operands).output_types
        found = RULES[op](attributes, *operands)
    except (ValueError, IndexError, TypeError, KeyError, ArithmeticError) as error:
        given = ", ".join(map(str, operands))
        raise Rejected(f"{op} of {given} with {key_of('', attributes)[:200]}: {error}") from error
    for type_ in found:
        if len(type_.shape) > 32 or min(type_.shape, default=0) < 0 or type_.size > MOST_ELEMENTS:
            raise Rejected(f"{op} gives a tensor of {type_.size} elements")
    return found


class _Frozen(dict[str, Any]):
    """Attributes as a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(key_of("", self))


@lru_cache(maxsize=1024)
def definition(op: str, attributes: _Frozen, operands: Types) -> Graph:
    """The definition of a composite for operands of these types, its inputs in order."""
    builder = Builder()
    inputs = [builder.add("input", {"name": str(i), "type": t}) for i, t in enumerate(operands)]
    found = DEFINITIONS[op](attributes, *inputs)
    results = found if isinstance(found, tuple) else (found,)
    outputs = tuple(("result", str(i), t.value) for i, t in enumerate(results))
    return Graph(tuple(builder.nodes), outputs, op)


def body_of(op: str, attributes: Mapping[str, Any], operands: Types) -> Graph:
    """What a call or a composite is short for."""
    found = attributes["body"] if op == "call" else definition(op, _Frozen(attributes), operands)
    assert isinstance(found, Graph)
    return found


def promoted(a: str, b: str) -> str:
    """The float that holds both."""
    if not is_float(a) or not is_float(b):
        raise ValueError(f"{a} and {b}")
    return "float32" if DTYPES[a] == DTYPES[b] else max(a, b, key=DTYPES.__getitem__)


class Builder:
    """Grows a graph; equal nodes are one, and every node is typed."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple[str, tuple[Value, ...]], int] = {}

    def add(self, op: str, attributes: Mapping[str, Any], *operands: Tensor) -> Tensor:
        values = tuple(t.value for t in operands)
        key = key_of(op, attributes)
        at = self._known.get((key, values))
        if at is None:
            types = infer(op, attributes, tuple(t.type for t in operands))
            at = self._known[key, values] = len(self.nodes)
            self.nodes.append(Node(op, attributes, values, types, "", key))
        return Tensor(self, Value(at))


class Tensor:
    """A value of a builder with the operators that definitions are written in.

    Numbers and shapes broadcast as in NumPy; of two floats the wider one holds the result.
    """

    def __init__(self, builder: Builder, value: Value):
        self.builder, self.value = builder, value

    @property
    def type(self) -> Type:
        return self.builder.nodes[self.value.node].types[self.value.output]

    @property
    def shape(self) -> Shape:
        return self.type.shape

    def of(self, op: str, *others: Tensor, **attributes: Any) -> Tensor:
        return self.builder.add(op, attributes, self, *others)

    def full(self, number: Number, shape: Shape | None = None, dtype: str = "") -> Tensor:
        type_ = Type(dtype or self.type.dtype, self.shape if shape is None else shape)
        return self.builder.add("constant", {"value": number, "type": type_})

    def with_(self, op: str, other: Tensor | Number, swapped: bool = False) -> Tensor:
        """A binary op, both operands broadcast to one shape."""
        if not isinstance(other, Tensor):
            other = self.full(other)
        if self.type.dtype != other.type.dtype:
            wide = promoted(self.type.dtype, other.type.dtype)
            return self.cast(wide).with_(op, other.cast(wide), swapped)
        x, y = (other, self) if swapped else (self, other)
        rank = max(len(x.shape), len(y.shape))
        a, b = ((1,) * (rank - len(t.shape)) + t.shape for t in (x, y))
        shape = tuple(n if m == 1 else m for n, m in zip(a, b, strict=True))
        return x.spread(shape).of(op, y.spread(shape))

    def __add__(self, other: Tensor | Number) -> Tensor:
        return self.with_("add", other)

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return self.with_("sub", other)

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return self.with_("mul", other)

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return self.with_("div", other)

    def reshape(self, *shape: int) -> Tensor:
        return self if shape == self.shape else self.of("reshape", shape=shape)

    def spread(self, shape: Shape) -> Tensor:
        """Broadcast as in NumPy."""
        if shape == self.shape:
            return self
        own = (1,) * (len(shape) - len(self.shape)) + self.shape
        axes = tuple(i for i, n in enumerate(own) if n == shape[i])
        return self.reshape(*(own[i] for i in axes)).of("broadcast", shape=shape, axes=axes)

    def cast(self, dtype: str) -> Tensor:
        return self if dtype == self.type.dtype else self.of("cast", dtype=dtype)

    def reduced(self, op: str, axes: Shape, keep: bool = False) -> Tensor:
        axes = tuple(sorted(i % len(self.shape) for i in axes))
        found = self.of(f"reduce_{op}", axes=axes)
        return (
            found.reshape(*(1 if i in axes else n for i, n in enumerate(self.shape)))
            if keep
            else found
        )

    def sum(self, axes: Shape, keep: bool = False) -> Tensor:
        return self.reduced("sum", axes, keep)

    def mean(self, axes: Shape, keep: bool = False) -> Tensor:
        total = self.sum(axes, keep)
        return total / (math.prod(self.shape[i] for i in axes))

    def top(self, axes: Shape) -> Tensor:
        """The maximum, by which exponents are shifted."""
        return self.reduced("max", axes, keep=True).of("stop_gradient")

    def where(self, x: Tensor | Number, y: Tensor | Number) -> Tensor:
        like = x if isinstance(x, Tensor) else y
        assert isinstance(like, Tensor)
        a, b = (
            t.spread(self.shape) if isinstance(t, Tensor) else like.full(t, self.shape)
            for t in (x, y)
        )
        return self.builder.add("where", {}, self, a, b)

    def finite(self) -> Tensor:
        """0 in place of infinities."""
        inside = self.with_("eq", math.inf).where(0, self)
        return self.with_("eq", -math.inf).where(0, inside)

    def dot(self, other: Tensor, spec: str, dtype: str) -> Tensor:
        """A contraction, labels by their order; narrow operands are widened to the wider one's."""
        if self.type.dtype != other.type.dtype:
            wide = promoted(self.type.dtype, other.type.dtype)
            return self.cast(wide).dot(other.cast(wide), spec, promoted(wide, dtype))
        names: dict[str, str] = {}
        for c in spec:
            if c.isalpha():
                names.setdefault(c, "abcdefghijklmnopqrstuvwxyz"[len(names)])
        return self.of("contract", other, spec="".join(names.get(c, c) for c in spec), dtype=dtype)

    def picked(self, indices: Tensor) -> Tensor:
        """Along the last axis, one for each index: the indices' shape."""
        last = len(self.shape) - 1
        return self.of("gather", indices, axis=last, batch=last)


def define(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        DEFINITIONS[name] = function
        return function

    return enter


def _exp(x: Tensor) -> Tensor:
    return x.of("exp")


@define("relu")
def relu(a: Any, x: Tensor) -> Tensor:
    return x.with_("le", 0).where(0, x)


@define("sigmoid")
def sigmoid(a: Any, x: Tensor) -> Tensor:
    return (_exp(x.of("neg")) + 1).with_("div", 1, swapped=True)


@define("silu")
def silu(a: Any, x: Tensor) -> Tensor:
    return x * sigmoid(a, x)


@define("gelu")
def gelu(a: Any, x: Tensor) -> Tensor:
    if a["approximate"] == "tanh":
        inner = ((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)).of("tanh")
    elif a["approximate"] == "none":
        inner = (x * math.sqrt(0.5)).of("erf")
    else:
        raise ValueError("an approximation that is not known")
    return x * 0.5 * (inner + 1)


@define("softplus")
def softplus(a: Any, x: Tensor) -> Tensor:
    scaled = x * a["beta"]
    return (
        scaled.full(a["threshold"])
        .with_("lt", scaled)
        .where(x, (_exp(scaled) + 1).of("log") / a["beta"])
    )


@define("mean")
def mean(a: Any, x: Tensor) -> Tensor:
    return x.mean(a["axes"])


@define("var")
def var(a: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(a["axes"], keep=True)
    count = math.prod(x.shape[i] for i in a["axes"])
    return (centred * centred).sum(a["axes"]) / max(0, count - a["correction"])


@define("logsumexp")
def logsumexp(a: Any, x: Tensor) -> Tensor:
    shift = x.top(a["axes"]).finite()
    total = _exp(x - shift).sum(a["axes"])
    return total.of("log") + shift.reshape(*total.shape)


@define("softmax")
def softmax(a: Any, x: Tensor) -> Tensor:
    axes = (a["axis"],)
    weights = _exp(x - x.top(axes))
    return weights / weights.sum(axes, keep=True)


@define("log_softmax")
def log_softmax(a: Any, x: Tensor) -> Tensor:
    axes = (a["axis"],)
    centred = x - x.top(axes)
    return centred - _exp(centred).sum(axes, keep=True).of("log")


@define("layer_norm")
def layer_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    return _normed(x - x.mean(_last(a, x), keep=True), a, *affine)


@define("rms_norm")
def rms_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    return _normed(x, a, *affine)


def _last(a: Any, x: Tensor) -> Shape:
    return tuple(range(len(x.shape) - a["dims"], len(x.shape)))


def _normed(x: Tensor, a: Any, *affine: Tensor) -> Tensor:
    found = x * ((x * x).mean(_last(a, x), keep=True) + a["eps"]).of("rsqrt")
    found = found * affine[0] if affine else found
    return found + affine[1] if len(affine) > 1 else found


@define("batch_norm")
def batch_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    axes = tuple(i for i in range(len(x.shape)) if i != 1)
    wide = x.cast(accumulator(x.type.dtype))
    centred = wide - wide.mean(axes, keep=True)
    return _scaled(centred, (centred * centred).mean(axes, keep=True), a, x, affine)


@define("group_norm")
def group_norm(a: Any, x: Tensor, *affine: Tensor) -> Tensor:
    n, channels, *rest = x.shape
    groups = a["groups"]
    wide = x.cast(accumulator(x.type.dtype))

    def means(t: Tensor) -> Tensor:
        each = t.reshape(n, groups, channels // groups, *rest)
        found = each.mean(tuple(range(2, len(each.shape))), keep=True)
        return found.spread(each.shape).reshape(*x.shape)

    centred = wide - means(wide)
    return _scaled(centred, means(centred * centred), a, x, affine)


def _scaled(
    centred: Tensor, spread: Tensor, a: Any, x: Tensor, affine: tuple[Tensor, ...]
) -> Tensor:
    found = centred * (spread + a["eps"]).of("rsqrt")
    along = (x.shape[1], *(1,) * (len(x.shape) - 2))
    scale_and_shift = [t.cast(found.type.dtype).reshape(*along) for t in affine]
    if scale_and_shift:
        found = found * scale_and_shift[0] + scale_and_shift[1]
    return found.cast(x.type.dtype)


def _scores(a: Any, q: Tensor, k: Tensor, bias: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """(B, G, R, T, S) of queries (B, G, R, T, D), and who may see whom."""
    wide = accumulator(q.type.dtype)
    scores = q.dot(k, "bgrtd,bgsd->bgrts", wide) * a["scale"]
    for given in bias:
        b, heads, t, s = given.shape
        parts = (1, 1) if heads == 1 else scores.shape[1:3]
        scores = scores + given.reshape(b, *parts, t, s).cast(wide)
    if not a["causal"]:
        return scores, None
    rows, columns = (
        q.builder.add("iota", {"axis": i, "shape": scores.shape[-2:], "dtype": "int32"})
        for i in (0, 1)
    )
    return scores, columns.with_("le", rows).spread(scores.shape)


def _grouped(q: Tensor, groups: int) -> Tensor:
    b, h, t, d = q.shape
    return q.reshape(b, groups, h // groups, t, d)


def _masked(x: Tensor, seen: Tensor | None, other: float = 0) -> Tensor:
    return x if seen is None else seen.where(x, other)


_LOWEST = {"float64": -1.797e308, "float32": -3.4e38}  # finite, where nothing is seen


@define("attention")
def attention(a: Any, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
    scores, seen = _scores(a, _grouped(q, k.shape[1]), k, bias)
    top = _masked(scores, seen, _LOWEST[scores.type.dtype]).top((4,)).finite()
    total = _masked(_exp(scores - top), seen).sum((4,), keep=True)
    lse = total.of("log") + top
    weights = _masked(_exp(scores - lse.finite()), seen).cast(v.type.dtype)
    mixed = weights.dot(v, "bgrts,bgsd->bgrtd", accumulator(v.type.dtype))
    return mixed.reshape(*q.shape[:3], v.shape[3]).cast(q.type.dtype), lse.reshape(*q.shape[:3])


@define("attention_grad")
def attention_grad(
    a: Any, ct: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor
) -> tuple[Tensor, ...]:
    wide, groups = accumulator(q.type.dtype), k.shape[1]
    queries, upstream = _grouped(q, groups), _grouped(ct, groups)
    scores, seen = _scores(a, queries, k, bias)
    kept = (*scores.shape[:-1], 1)
    weights = _masked(_exp(scores - lse.reshape(*kept).finite()), seen)
    d_v = weights.cast(v.type.dtype).dot(upstream, "bgrts,bgrtd->bgsd", wide)
    d_weights = upstream.dot(v, "bgrtd,bgsd->bgrts", wide)
    row = (ct.cast(wide) * out.cast(wide)).sum((3,))
    d_scores = weights * (d_weights - row.reshape(*kept))
    narrow = (d_scores * a["scale"]).cast(q.type.dtype)
    d_q = narrow.dot(k, "bgrts,bgsd->bgrtd", wide).reshape(*q.shape)
    d_k = narrow.dot(queries, "bgrts,bgrtd->bgsd", wide)
    found = [t.cast(like.type.dtype) for t, like in ((d_q, q), (d_k, k), (d_v, v))]
    of_heads = d_scores.reshape(*q.shape[:3], k.shape[2])
    for given in bias:
        axes = tuple(i for i, n in enumerate(given.shape) if n != of_heads.shape[i])
        summed = of_heads.sum(axes, keep=True) if axes else of_heads
        found.append(summed.cast(given.type.dtype))
    return tuple(found)


@define("cross_entropy")
def cross_entropy(a: Any, logits: Tensor, targets: Tensor) -> Tensor:
    last = len(logits.shape) - 1
    total = logsumexp({"axes": (last,)}, logits)
    picked = logits.picked(targets.reshape(*targets.shape, 1)).reshape(*targets.shape)
    smoothing = Fraction(a["label_smoothing"])
    if smoothing == 0:
        return total - picked
    return total - picked * (1 - smoothing) - logits.mean((last,)) * smoothing


def _logits(a: Any, x: Tensor, weight: Tensor, bias: tuple[Tensor, ...]) -> Tensor:
    wide = accumulator(x.type.dtype)
    held = x.type.dtype if a["rounded"] else wide
    logits = x.dot(weight, "nd,vd->nv", held).cast(wide)
    return logits + bias[0].cast(wide) if bias else logits


@define("linear_cross_entropy")
def linear_cross_entropy(
    a: Any, x: Tensor, weight: Tensor, targets: Tensor, *bias: Tensor
) -> Tensor:
    return cross_entropy(a, _logits(a, x, weight, bias), targets)


@define("linear_cross_entropy_grad")
def linear_cross_entropy_grad(
    a: Any, ct: Tensor, x: Tensor, weight: Tensor, targets: Tensor, *bias: Tensor
) -> tuple[Tensor, ...]:
    """The rows, and the gradients of x, weight and bias."""
    logits = _logits(a, x, weight, bias)
    wide, classes = logits.type.dtype, weight.shape[0]
    rows = cross_entropy(a, logits, targets)
    smoothing = Fraction(a["label_smoothing"])
    target = one_hot({"classes": classes, "dtype": wide}, targets)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    slope = ct.reshape(*ct.shape, 1) * (softmax({"axis": 1}, logits) - target)
    narrow = slope.cast(x.type.dtype)
    d_x = narrow.dot(weight, "nv,vd->nd", wide).cast(x.type.dtype)
    d_weight = narrow.dot(x, "nv,nd->vd", wide).cast(weight.type.dtype)
    return (rows, d_x, d_weight, *(narrow.cast(wide).sum((0,)).cast(b.type.dtype) for b in bias))


def _labels(dims: int) -> tuple[str, str, str]:
    """Of windows (N, groups, channels, places, kernel), the kernel, and the result."""
    o, k = "stu"[:dims], "xyz"[:dims]
    return f"ngc{o}{k}", f"gfc{k}", f"ngf{o}"


def _conv_window(a: Any, kernel: Shape) -> dict[str, Any]:
    axes = tuple(range(2, 2 + len(kernel)))
    return {"axes": axes, "sizes": kernel, "strides": a["strides"], "dilations": a["dilations"]}


def _conv_windows(a: Any, x: Tensor, kernel: Shape) -> Tensor:
    low, high = ((0, 0, *(pair[i] for pair in a["padding"])) for i in (0, 1))
    padded = x.of("pad", low=low, high=high, interior=(0,) * len(x.shape), value=0)
    windows = padded.of("window", **_conv_window(a, kernel))
    n, channels, *rest = windows.shape
    return windows.reshape(n, a["groups"], channels // a["groups"], *rest)


def _in_groups(a: Any, w: Tensor, axis: int = 0) -> Tensor:
    n, groups = w.shape[axis], a["groups"]
    return w.reshape(*w.shape[:axis], groups, n // groups, *w.shape[axis + 1 :])


@define("conv")
def conv(a: Any, x: Tensor, w: Tensor) -> Tensor:
    lx, lw, lr = _labels(len(w.shape) - 2)
    windows = _conv_windows(a, x, w.shape[2:])
    found = windows.dot(_in_groups(a, w), f"{lx},{lw}->{lr}", accumulator(x.type.dtype))
    return found.reshape(x.shape[0], w.shape[0], *found.shape[3:]).cast(x.type.dtype)


@define("conv_grad_x")
def conv_grad_x(a: Any, ct: Tensor, w: Tensor) -> Tensor:
    """Every window's products, added up where windows overlap, without the padding."""
    conv, shape = a["conv"], a["shape"]
    lx, lw, lr = _labels(len(w.shape) - 2)
    products = _in_groups(conv, ct, 1).dot(_in_groups(conv, w), f"{lr},{lw}->{lx}", ct.type.dtype)
    whole = products.reshape(*shape[:2], *ct.shape[2:], *w.shape[2:])
    low = (0, 0, *(pair[0] for pair in conv["padding"]))
    padded = (
        *shape[:2],
        *(n + sum(pair) for n, pair in zip(shape[2:], conv["padding"], strict=True)),
    )
    found = whole.of("unwindow", window=_conv_window(conv, w.shape[2:]), shape=padded)
    stops = tuple(b + n for b, n in zip(low, shape, strict=True))
    found = found.of("slice", starts=low, stops=stops, strides=(1,) * len(shape))
    return found.cast(ct.type.dtype) if math.prod(conv["strides"]) <= 9 else found


@define("conv_grad_w")
def conv_grad_w(a: Any, ct: Tensor, x: Tensor) -> Tensor:
    conv, shape = a["conv"], a["shape"]
    lx, lw, lr = _labels(len(shape) - 2)
    windows = _conv_windows(conv, x, shape[2:])
    return _in_groups(conv, ct, 1).dot(windows, f"{lr},{lx}->{lw}", ct.type.dtype).reshape(*shape)


def _pool_windows(a: Any, x: Tensor, fill: float) -> Tensor:
    """Windows over the last axes, their own axes flattened into one, the last."""
    lead = len(x.shape) - len(a["sizes"])
    amounts = (*(0,) * lead, *a["padding"])
    padded = x.of("pad", low=amounts, high=amounts, interior=(0,) * len(x.shape), value=fill)
    axes = tuple(range(lead, len(x.shape)))
    parts = {name: a[name] for name in ("sizes", "strides", "dilations")}
    windows = padded.of("window", axes=axes, **parts)
    return windows.reshape(*windows.shape[: len(x.shape)], math.prod(a["sizes"]))


@define("max_pool")
def max_pool(a: Any, x: Tensor) -> Tensor:
    if not x.type.dtype.startswith(("float", "bfloat")):
        raise ValueError("max_pool of integers")
    windows = _pool_windows(a, x, -math.inf)
    last = len(windows.shape) - 1
    first = windows.of("argmax", axis=last).reshape(*windows.shape[:-1], 1)
    return windows.picked(first).reshape(*windows.shape[:-1])


@define("avg_pool")
def avg_pool(a: Any, x: Tensor) -> Tensor:
    windows = _pool_windows(a, x, 0)
    total = windows.sum((len(windows.shape) - 1,))
    if a["count_padding"] or not any(a["padding"]):
        return total / math.prod(a["sizes"])
    inside = _pool_windows(a, x.full(1), 0)
    return total / inside.sum((len(inside.shape) - 1,))


@define("one_hot")
def one_hot(a: Any, indices: Tensor) -> Tensor:
    narrow = {"int64": "int64", "uint32": "int64"}.get(indices.type.dtype, "int32")
    wide = indices.cast("uint32" if indices.type.dtype == "uint32" else narrow)
    shape = (*indices.shape, a["classes"])
    classes = indices.builder.add(
        "iota", {"axis": len(shape) - 1, "shape": shape, "dtype": wide.type.dtype}
    )
    return classes.with_("eq", wide.reshape(*indices.shape, 1)).cast(a["dtype"])


@define("embedding")
def embedding(a: Any, table: Tensor, indices: Tensor) -> Tensor:
    return table.of("gather", indices, axis=0, batch=0)
