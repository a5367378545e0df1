"""Instances of rules that are data, drawn at random: ranks, axes, labels and attributes.

A rule's cases show that it holds where its author looked. What is drawn here is where he may not
have: other ranks, axes that are somewhere else, sizes of 1. From the type of the result an op draws
attributes and the types of its operands, down to the tensors of the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from treadle.base import dtypes
from treadle.egraph.language import Applied, DataRule, Term, Text, applied
from treadle.ir.types import TensorType
from treadle.verify.rule_instances import Instance, NoInstanceError, instance

Shape = tuple[int, ...]
_UNARY = frozenset(
    "neg abs sign floor exp log sqrt rsqrt sin cos tanh erf stop_gradient relu sigmoid silu".split()
)
_BINARY = frozenset("add sub mul div max min pow atan2".split())
_COMPARING = frozenset("eq lt le".split())
_LOGICAL = frozenset("and or xor not".split())
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_RANKS = (0, 1, 2, 2, 3, 3, 3)


def drawn(rule: DataRule, random: Random, pool: Sequence[int]) -> Instance | None:
    """An instance with sizes from a pool, if this draw is one."""
    if rule.member:
        return None
    drawing = _Drawing(random, pool)
    try:
        for source in rule.sources:
            use = applied(source)
            drawing.pattern(source, drawing.type(use.op in _COMPARING if use else False))
        return instance(rule, drawing.names)
    except NoInstanceError:
        return None


@dataclass(slots=True)
class _Drawing:
    random: Random
    pool: Sequence[int]
    names: dict[str, Any] = field(default_factory=dict)

    def size(self) -> int:
        return self.random.choice(self.pool)

    def shape(self, rank: int) -> Shape:
        return tuple(self.size() for _ in range(rank))

    def type(self, is_flag: bool = False) -> TensorType:
        rank = self.random.choice(_RANKS)
        return TensorType(self.shape(rank), dtypes.bool_ if is_flag else dtypes.float32)

    def bound(self, name: str, value: Any) -> Any:
        """What a name stands for: the drawn value, if nothing else yet."""
        return self.names.setdefault(name, value)

    def given(self, use: Applied, name: str, value: Any) -> Any:
        """A field: what the pattern says, or what was drawn."""
        term: Term = dict(use.fields).get(name, name)
        if isinstance(term, str) and not isinstance(term, Text):
            return self.bound(term, value)
        return term

    def pattern(self, term: Term, type_: TensorType) -> None:
        """Binds the names of a pattern whose result has a type."""
        if isinstance(term, str):
            if term.endswith("..."):
                raise NoInstanceError("operands without a number")
            _same(self.bound(term, type_), type_)
        elif isinstance(term, tuple) and term[0] == "number":
            _same(self.bound(str(term[1]), type_), type_)
        elif isinstance(term, tuple):
            use = applied(term)
            assert use is not None
            self.use(use, type_)

    def use(self, use: Applied, type_: TensorType) -> None:
        draw = _DRAWS.get(use.op)
        types: Sequence[TensorType]
        if use.op in _UNARY or use.op in _BINARY:
            types = [type_] * len(use.operands)
        elif use.op in _LOGICAL:
            types = [type_.with_dtype(dtypes.bool_)] * len(use.operands)
        elif use.op in _COMPARING:
            types = [type_.with_dtype(dtypes.float32)] * len(use.operands)
        elif use.op == "where":
            types = [type_.with_dtype(dtypes.bool_), type_, type_]
        elif draw is not None:
            types = draw(self, use, type_)
        else:
            raise NoInstanceError(f"{use.op} is not drawn")
        self.operands(use, types)

    def operands(self, use: Applied, types: Sequence[TensorType]) -> None:
        rest = len(use.operands) - 1
        for i, term in enumerate(use.operands):
            if i == rest and isinstance(term, str) and term.endswith("..."):
                _same(self.bound(term, tuple(types[i:])), tuple(types[i:]))
            elif i < len(types):
                self.pattern(term, types[i])
            else:
                raise NoInstanceError("too few operands")


def _same(a: Any, b: Any) -> None:
    if a != b:
        raise NoInstanceError(f"{a} is not {b}")


_Draw = Callable[[_Drawing, Applied, TensorType], Sequence[TensorType]]


def _permute(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    axes = d.given(use, "axes", tuple(d.random.sample(range(type_.rank), type_.rank)))
    _same(sorted(axes), list(range(type_.rank)))
    return [type_.with_shape(tuple(type_.shape[axes.index(i)] for i in range(type_.rank)))]


def _reshape(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    _same(d.given(use, "shape", type_.shape), type_.shape)
    shape = list(type_.shape)
    match d.random.randrange(3):
        case 0 if len(shape) > 1:
            i = d.random.randrange(len(shape) - 1)
            shape[i : i + 2] = [shape[i] * shape[i + 1]]
        case 1:
            shape.insert(d.random.randint(0, len(shape)), 1)
    return [type_.with_shape(tuple(shape))]


def _broadcast(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    _same(d.given(use, "shape", type_.shape), type_.shape)
    kept = tuple(i for i in range(type_.rank) if d.random.random() < 0.6)
    axes = d.given(use, "axes", kept)
    if any(a >= type_.rank for a in axes):
        raise NoInstanceError("an axis that is not there")
    return [type_.with_shape(tuple(type_.shape[a] for a in axes))]


def _slice(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    rank = type_.rank
    starts = d.given(use, "starts", tuple(d.random.choice((0, d.size())) for _ in range(rank)))
    strides = d.given(use, "strides", tuple(d.random.choice((1, 1, 1, 2)) for _ in range(rank)))
    if len(starts) != rank or len(strides) != rank or min(type_.shape, default=1) < 1:
        raise NoInstanceError("bounds of another rank")
    ends = tuple(s + (n - 1) * k + 1 for s, n, k in zip(starts, type_.shape, strides, strict=True))
    stops = d.given(use, "stops", ends)
    _same(stops, ends)
    return [type_.with_shape(tuple(n + d.random.choice((0, d.size())) for n in stops))]


def _pad(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    rank = type_.rank
    low, high = (d.given(use, name, tuple(d.random.randint(0, 1) for _ in range(rank)))
                 for name in ("low", "high"))  # fmt: skip
    interior = d.given(use, "interior", (0,) * rank)
    d.given(use, "value", 0)
    if not len(low) == len(high) == len(interior) == rank or any(interior):
        raise NoInstanceError("amounts of another rank")
    inner = tuple(n - a - b for n, a, b in zip(type_.shape, low, high, strict=True))
    if min(inner, default=1) < 1:
        raise NoInstanceError("nothing is left")
    return [type_.with_shape(inner)]


def _concat(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    if not type_.rank:
        raise NoInstanceError("a number has no axis")
    axis = d.given(use, "axis", d.random.randrange(type_.rank))
    last = use.operands[-1]
    is_open = isinstance(last, str) and last.endswith("...")
    count = len(use.operands) + (d.random.randint(0, 1) if is_open else 0)
    if axis >= type_.rank or type_.shape[axis] < count:
        raise NoInstanceError("too few elements for so many parts")
    parts = [d.random.choice((1, 1, 2)) for _ in range(count - 1)]
    parts.insert(d.random.randint(0, len(parts)), type_.shape[axis] - sum(parts))
    if min(parts) < 1:
        raise NoInstanceError("an empty part")
    before, after = type_.shape[:axis], type_.shape[axis + 1 :]
    return [type_.with_shape((*before, n, *after)) for n in parts]


def _flip(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    d.given(use, "axes", tuple(i for i in range(type_.rank) if d.random.random() < 0.5))
    return [type_]


def _cast(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    _same(d.given(use, "dtype", type_.dtype.name), type_.dtype.name)
    return [type_.with_dtype(d.random.choice((dtypes.float32, dtypes.bfloat16)))]


def _reduce(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    count = d.random.randint(1, 2)
    rank = type_.rank + count
    axes = d.given(use, "axes", tuple(sorted(d.random.sample(range(rank), count))))
    rank = type_.rank + len(axes)
    if any(a >= rank for a in axes):
        raise NoInstanceError("an axis that is not there")
    left = iter(type_.shape)
    return [type_.with_shape(tuple(d.size() if i in axes else next(left) for i in range(rank)))]


def _contract(d: _Drawing, use: Applied, type_: TensorType) -> Sequence[TensorType]:
    fields = dict(use.fields)
    known = [d.names.get(str(fields.get(name))) for name in ("x", "y", "out")]
    used = {c for v in d.names.values() if isinstance(v, tuple) for c in v if isinstance(c, str)}
    free = (c for c in _LETTERS if c not in used)
    out = known[2] or tuple(next(free) for _ in range(type_.rank))
    x, y = _labels(d, known[0], known[1], out, free)
    for name, labels in (("x", x), ("y", y), ("out", out)):
        _same(d.given(use, name, labels), labels)
    d.given(use, "dtype", type_.dtype.name)
    if len(out) != type_.rank:
        raise NoInstanceError("labels of another rank")
    sizes = dict(zip(out, type_.shape, strict=True))
    for term, labels in zip(use.operands, (x, y), strict=True):
        bound = d.names.get(term) if isinstance(term, str) else None
        if bound is not None and len(labels) == bound.rank:
            for label, n in zip(labels, bound.shape, strict=True):
                _same(sizes.setdefault(label, n), n)
    return [type_.with_shape(tuple(sizes.setdefault(c, d.size()) for c in labels))
            for labels in (x, y)]  # fmt: skip


def _labels(
    d: _Drawing, x: Any, y: Any, out: tuple[str, ...], free: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of the operands: those of the result shared out, and one or two that are summed."""
    if x is None and y is None:
        sides = {c: d.random.choice(("x", "y", "both")) for c in out}
        summed = [next(free) for _ in range(d.random.randint(1, 2))]
        left = [c for c, side in sides.items() if side != "y"] + summed
        right = [c for c, side in sides.items() if side != "x"] + summed
        return tuple(d.random.sample(left, len(left))), tuple(d.random.sample(right, len(right)))
    known = x if x is not None else y
    if x is not None and y is not None:
        return x, y
    other = [c for c in (*known, *out) if (c in known) != (c in out)]
    other += [c for c in known if c in out and d.random.random() < 0.5]
    drawn_ = tuple(d.random.sample(other, len(other)))
    return (x, drawn_) if x is not None else (drawn_, y)


_DRAWS: dict[str, _Draw] = {
    "permute": _permute,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
    "flip": _flip,
    "cast": _cast,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "contract": _contract,
}
