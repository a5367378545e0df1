"""The types that ops give, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from treadle_checker.field import DTYPES, is_float
from treadle_checker.values import Type

Types = tuple[Type, ...]
Rule = Callable[..., Types]
RULES: dict[str, Rule] = {}


def need(holds: object, why: str = "the operands do not fit") -> None:
    if not holds:
        raise ValueError(why)


def rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def accumulator(dtype: str) -> str:
    """What sums of a dtype are held in."""
    return "float32" if is_float(dtype) and DTYPES[dtype] < 32 else dtype


def is_integer(dtype: str) -> bool:
    return not is_float(dtype) and dtype != "bool"


def _elementwise(arity: int, accepts: Callable[[str], bool], result: str = "") -> Rule:
    def infer(_: Any, *xs: Type) -> Types:
        need(len(xs) == arity and len(set(xs)) == 1 and accepts(xs[0].dtype))
        return (Type(result or xs[0].dtype, xs[0].shape),)

    return infer


def _any(dtype: str) -> bool:
    return True


def _number(dtype: str) -> bool:
    return dtype != "bool"


def _discrete(dtype: str) -> bool:
    return not is_float(dtype)


for _names, _arity, _accepts, _result in (
    ("neg abs sign", 1, _number, ""),
    ("floor exp log sqrt rsqrt sin cos tanh erf shard_sum", 1, is_float, ""),
    ("not", 1, _discrete, ""),
    ("stop_gradient", 1, _any, ""),
    ("add sub mul floordiv mod max min", 2, _number, ""),
    ("div pow atan2", 2, is_float, ""),
    ("eq", 2, _any, "bool"),
    ("lt le", 2, _number, "bool"),
    ("and or xor", 2, _discrete, ""),
):
    rule(*_names.split())(_elementwise(_arity, _accepts, _result))


@rule("where")
def _where(_: Any, c: Type, x: Type, y: Type) -> Types:
    need(c == Type("bool", x.shape) and x == y)
    return (x,)


@rule("cast")
def _cast(a: Any, x: Type) -> Types:
    return (Type(a["dtype"], x.shape),)


@rule("input", "parameter", "state")
def _leaf(a: Any) -> Types:
    return (a["type"],)


@rule("constant")
def _constant(a: Any) -> Types:
    value, type_ = a["value"], a["type"]
    if hasattr(value, "array"):
        need(value.text.startswith(f"{type_} "), "an array of another type")
    elif is_integer(type_.dtype):
        bits, unsigned = DTYPES[type_.dtype], type_.dtype.startswith("u")
        low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        need(math.isfinite(value) and low <= value <= high and value % 1 == 0)
    else:
        float(value)
    return (type_,)


@rule("iota")
def _iota(a: Any) -> Types:
    need(0 <= a["axis"] < len(a["shape"]) and a["dtype"] != "bool" and min(a["shape"]) >= 0)
    return (Type(a["dtype"], a["shape"]),)


def _axis(a: Any, x: Type) -> int:
    need(0 <= a["axis"] < len(x.shape) and x.dtype != "bool")
    return int(a["axis"])


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
def _reduce(a: Any, x: Type) -> Types:
    axes = a["axes"]
    need(
        list(axes) == sorted(set(axes))
        and all(0 <= i < len(x.shape) for i in axes)
        and x.dtype != "bool"
    )
    return (Type(x.dtype, tuple(n for i, n in enumerate(x.shape) if i not in axes)),)


@rule("argmax", "argmin")
def _arg(a: Any, x: Type) -> Types:
    axis = _axis(a, x)
    need(x.shape[axis] > 0)
    return (Type("int32", x.shape[:axis] + x.shape[axis + 1 :]),)


@rule("cumsum")
def _cumsum(a: Any, x: Type) -> Types:
    _axis(a, x)
    return (x,)


@rule("sort")
def _sort(a: Any, x: Type) -> Types:
    _axis(a, x)
    return x, Type("int32", x.shape)


@rule("top_k")
def _top_k(a: Any, x: Type) -> Types:
    axis = _axis(a, x)
    need(0 <= a["k"] <= x.shape[axis])
    shape = (*x.shape[:axis], a["k"], *x.shape[axis + 1 :])
    return Type(x.dtype, shape), Type("int32", shape)


@rule("reshape")
def _reshape(a: Any, x: Type) -> Types:
    need(min(a["shape"], default=0) >= 0 and math.prod(a["shape"]) == x.size)
    return (Type(x.dtype, a["shape"]),)


@rule("permute")
def _permute(a: Any, x: Type) -> Types:
    need(sorted(a["axes"]) == list(range(len(x.shape))))
    return (Type(x.dtype, tuple(x.shape[i] for i in a["axes"])),)


@rule("broadcast")
def _broadcast(a: Any, x: Type) -> Types:
    axes, shape = a["axes"], a["shape"]
    need(
        list(axes) == sorted(set(axes)) and len(axes) == len(x.shape) and min(shape, default=0) >= 0
    )
    need(all(0 <= i < len(shape) and shape[i] == n for i, n in zip(axes, x.shape, strict=True)))
    return (Type(x.dtype, shape),)


@rule("slice")
def _slice(a: Any, x: Type) -> Types:
    bounds = list(zip(a["starts"], a["stops"], a["strides"], x.shape, strict=True))
    need(all(0 <= b <= e <= n and s >= 1 for b, e, s, n in bounds))
    return (Type(x.dtype, tuple(-(-(e - b) // s) for b, e, s, _ in bounds)),)


@rule("pad")
def _pad(a: Any, x: Type) -> Types:
    parts = list(zip(x.shape, a["low"], a["high"], a["interior"], strict=True))
    need(all(min(low, high, gap) >= 0 for _, low, high, gap in parts))
    return (Type(x.dtype, tuple(lo + n + max(n - 1, 0) * gap + hi for n, lo, hi, gap in parts)),)


@rule("concat")
def _concat(a: Any, *xs: Type) -> Types:
    axis, first = a["axis"], xs[0]
    need(0 <= axis < len(first.shape))
    rest = {(x.dtype, x.shape[:axis], x.shape[axis + 1 :]) for x in xs}
    need(len(rest) == 1 and all(len(x.shape) == len(first.shape) for x in xs))
    total = sum(x.shape[axis] for x in xs)
    return (Type(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)


@rule("flip")
def _flip(a: Any, x: Type) -> Types:
    need(all(0 <= i < len(x.shape) for i in a["axes"]))
    return (x,)


@rule("dynamic_slice")
def _dynamic_slice(a: Any, x: Type, starts: Type) -> Types:
    need(starts.shape == (len(x.shape),) and is_integer(starts.dtype))
    need(all(0 <= s <= n for s, n in zip(a["sizes"], x.shape, strict=True)))
    return (Type(x.dtype, a["sizes"]),)


@rule("dynamic_update_slice")
def _dynamic_update(a: Any, x: Type, update: Type, starts: Type) -> Types:
    need(starts.shape == (len(x.shape),) and is_integer(starts.dtype) and update.dtype == x.dtype)
    need(all(u <= n for u, n in zip(update.shape, x.shape, strict=True)))
    return (x,)


def labels(spec: str) -> tuple[str, str, str]:
    """The axes of both operands and of the result."""
    operands, result = spec.split("->")
    x, y = operands.split(",")
    return x, y, result


@rule("contract")
def _contract(a: Any, x: Type, y: Type) -> Types:
    lx, ly, lr = labels(a["spec"])
    need(all(len(set(part)) == len(part) for part in (lx, ly, lr)))
    need(all((c in lx) + (c in ly) + (c in lr) >= 2 for c in lx + ly + lr), "a label stands alone")
    eight = DTYPES[x.dtype] == DTYPES[y.dtype] == 8 and is_float(x.dtype) and is_float(y.dtype)
    need(x.dtype == y.dtype or eight)
    need(is_float(x.dtype) == is_float(a["dtype"]) and x.dtype != "bool")
    need(DTYPES[a["dtype"]] >= (16 if eight else DTYPES[x.dtype]))
    need(is_float(x.dtype) or x.dtype.startswith("u") == a["dtype"].startswith("u"))
    sizes = dict(zip(lx, x.shape, strict=True))
    need(all(sizes.setdefault(c, n) == n for c, n in zip(ly, y.shape, strict=True)))
    return (Type(a["dtype"], tuple(sizes[c] for c in lr)),)


def window_starts(a: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many windows there are along each windowed axis."""
    axes, parts = a["axes"], (a["sizes"], a["strides"], a["dilations"])
    need(list(axes) == sorted(set(axes)) and all(0 <= i < len(shape) for i in axes))
    need(all(min(part, default=1) >= 1 for part in parts))
    rows = zip(axes, *parts, strict=True)
    found = tuple((shape[i] - (k - 1) * d - 1) // s + 1 for i, k, s, d in rows)
    need(min(found, default=1) >= 1, "no window fits")
    return found


def windowed(a: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    counts = dict(zip(a["axes"], window_starts(a, shape), strict=True))
    return (*(counts.get(i, n) for i, n in enumerate(shape)), *a["sizes"])


@rule("window")
def _window(a: Any, x: Type) -> Types:
    return (Type(x.dtype, windowed(a, x.shape)),)


@rule("unwindow")
def _unwindow(a: Any, x: Type) -> Types:
    need(x.shape == windowed(a["window"], a["shape"]))
    return (Type(x.dtype, a["shape"]),)


@rule("gather")
def _gather(a: Any, x: Type, indices: Type) -> Types:
    axis, batch = a["axis"], a["batch"]
    need(
        is_integer(indices.dtype)
        and 0 <= batch <= axis < len(x.shape)
        and batch <= len(indices.shape)
    )
    need(x.shape[:batch] == indices.shape[:batch])
    return (Type(x.dtype, x.shape[:axis] + indices.shape[batch:] + x.shape[axis + 1 :]),)


@rule("scatter_add")
def _scatter_add(a: Any, x: Type, indices: Type) -> Types:
    axis, batch, chosen = a["axis"], a["batch"], len(indices.shape) - a["batch"]
    need(is_integer(indices.dtype) and x.dtype != "bool" and 0 <= batch <= axis and chosen >= 0)
    need(axis + chosen <= len(x.shape) and a["size"] >= 0)
    need(x.shape[:batch] + x.shape[axis : axis + chosen] == indices.shape)
    return (Type(x.dtype, (*x.shape[:axis], a["size"], *x.shape[axis + chosen :])),)


@rule("random_bits")
def _random_bits(a: Any, key: Type) -> Types:
    need(key == Type("uint32", (6,)) and 0 <= a["site"] < 2**16 and min(a["shape"], default=0) >= 0)
    return (Type("uint32", a["shape"]),)


@rule("call")
def _call(a: Any, *operands: Type) -> Types:
    body = a["body"]
    need(operands == tuple(body.nodes[i].types[0] for i in body.inputs))
    return tuple(body.output_types)


@rule("scan")
def _scan(a: Any, *operands: Type) -> Types:
    body, constants, carries, length = a["body"], a["constants"], a["carries"], a["length"]
    need(constants >= 0 and carries >= 0 and 0 <= length < 2**31)
    given, slices = operands[: constants + carries], operands[constants + carries :]
    need(len(given) == constants + carries and all(x.shape[:1] == (length,) for x in slices))
    steps = tuple(Type(x.dtype, x.shape[1:]) for x in slices)
    need(given + steps == tuple(body.nodes[i].types[0] for i in body.inputs))
    carried, stacked = body.output_types[:carries], body.output_types[carries:]
    need(carried == given[constants:])
    return carried + tuple(Type(y.dtype, (length, *y.shape)) for y in stacked)
