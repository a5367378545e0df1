"""Scopes: traces that grow a graph, and the eager oracle. `bind` picks the one an op runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from treadle.base.arrays import rounded
from treadle.base.errors import NameTakenError, TraceError
from treadle.base.memory import refuse_beyond
from treadle.base.origin import Origin, user_origin
from treadle.domains.domain import Typed, apply
from treadle.domains.float64 import Float64
from treadle.domains.philox import make_key
from treadle.frontend.tensor import Scope, Tensor
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Attributes, Op, infer_types
from treadle.ir.ops.indexing import KEY_TYPE, MAX_SITES
from treadle.ir.ops.leaves import CONSTANT, INPUT, STATE, Constant, Leaf
from treadle.ir.rewrite import replace_values
from treadle.ir.types import TensorType

RANDOM_STATE = "random:key"  # no path of a model or batch has a colon


class Eager:
    """Runs each op at once through the oracle."""

    title = "eager"
    depth = 0
    parent: Scope | None = None

    def __init__(self) -> None:
        self.oracle = Float64()
        self.seed = 0
        self.sites = 0

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        types = infer_types(op, attributes, tuple(o.type for o in operands))
        for type_ in types:
            refuse_beyond(op.name, f"the result {type_}", type_.nbytes)
        typed = [Typed(o.type, o.handle) for o in operands]
        values = apply(self.oracle, op, attributes, typed, types)
        return tuple(Tensor(self, t, v) for t, v in zip(types, values, strict=True))

    def adopt(self, tensor: Tensor) -> Tensor:
        raise AssertionError("nothing encloses the eager scope")

    def wrap(self, array: np.ndarray, type_: TensorType) -> Tensor:
        return Tensor(self, type_, array)

    def next_site(self) -> int:
        self.sites += 1
        return self.sites - 1

    def random_key(self) -> Tensor:
        # Sites are 16 bits wide; what overflows counts as steps, so eager streams never repeat.
        return Tensor(self, KEY_TYPE, make_key(self.seed, step=self.sites // MAX_SITES))

    def program_key(self) -> Tensor:
        """A key for a program that counts its own sites: a step of its own."""
        self.sites = -(-self.sites // MAX_SITES) * MAX_SITES
        key = self.random_key()
        self.sites += MAX_SITES
        return key


EAGER = Eager()


class Trace:
    """A graph in the making. Tensors of enclosing scopes are adopted as inputs when used."""

    def __init__(self, title: str, parent: Trace | None = None):
        self.title = title
        self.parent: Scope | None = parent
        self.depth: int = parent.depth + 1 if parent else 1
        self.builder = GraphBuilder()
        self.origin: Origin | None = None  # overrides the user's line while differentiating
        self.finished = False
        self.effects: list[Output] = []
        self._leaves: dict[str, tuple[Op, TensorType]] = {}
        self.replacements: dict[Value, Value] = {}  # applied when the trace is finished
        self.adopted: list[tuple[Tensor, Tensor]] = []  # (outer, inner)
        # (outer, inner) by the outer's place; holding the outer keeps an id from being used again.
        self._known: dict[tuple[int, object], tuple[Tensor, Tensor]] = {}
        self._enclosing = parent
        # The innermost trace around this one that work on outer tensors is not done outside of.
        self.region: Trace | None = parent.region if parent else None
        self._sites = 0
        self._key: Tensor | None = None
        self.make_key: Callable[[Tensor], Tensor] | None = None

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self.check_open(op.name)
        origin = self.origin or user_origin()
        values = self.builder.add(op, attributes, [o.handle for o in operands], origin)
        return tuple(self.tensor(v) for v in values)

    def tensor(self, value: Value) -> Tensor:
        return Tensor(self, self.builder.type_of(value), value)

    def leaf(self, op: Op, name: str, type_: TensorType) -> Tensor:
        if self._leaves.setdefault(name, (op, type_)) != (op, type_):
            self._refuse_name(name)
        (tensor,) = self.apply(op, Leaf(name, type_), ())
        return tensor

    def input(self, name: str, type_: TensorType) -> Tensor:
        if name in self._leaves:
            self._refuse_name(name)
        return self.leaf(INPUT, name, type_)

    def _refuse_name(self, name: str) -> None:
        op, type_ = self._leaves[name]
        raise NameTakenError(
            "trace",
            f"two leaves of {self.title!r} are named {name!r}; one is the {op} {type_}",
            "Rename the argument or the key.",
        )

    def check_open(self, operation: str) -> None:
        if self.finished:
            raise TraceError(
                operation,
                f"a tensor of the trace {self.title!r} is used after that trace has ended",
                "Return it from the traced function instead of keeping it elsewhere.",
            )

    def adopt(self, tensor: Tensor) -> Tensor:
        """The tensor of this trace that stands for one of an enclosing scope."""
        key = (id(tensor.scope), id(tensor.handle) if tensor.scope is EAGER else tensor.handle)
        if key not in self._known:
            self._known[key] = (tensor, self._adopt(tensor))
        return self._known[key][1]

    def _adopt(self, tensor: Tensor) -> Tensor:
        if tensor.scope is EAGER:
            return self._constant(tensor)
        if self._enclosing is None:
            raise mixed_traces("trace", tensor.scope, self)
        if tensor.scope is not self._enclosing:
            return self.adopt(self._enclosing.adopt(tensor))
        inner = self.input(f"^{len(self.adopted)}", tensor.type)
        self.adopted.append((tensor, inner))
        return inner

    def _constant(self, tensor: Tensor) -> Tensor:
        exact = ArrayLiteral(rounded(tensor.handle, tensor.dtype.numpy))
        (known,) = self.apply(CONSTANT, Constant(exact, tensor.type), ())
        return known

    @property
    def is_inside_scan(self) -> bool:
        """Whether this is the body of a scan, or lies in one."""
        inside = self._enclosing is not None and self._enclosing.is_inside_scan
        return self.make_key is not None or inside

    def add_effect(self, kind: OutputKind, name: str, tensor: Tensor) -> None:
        """What a trace does besides its results. A state's later update takes the place of its
        earlier one, from which it was made: `update` refuses others.
        """
        same = [i for i, e in enumerate(self.effects) if e.kind is kind and e.name == name]
        effect = Output(kind, name, tensor.handle)
        if not same or kind is OutputKind.PRINT:
            self.effects.append(effect)
        elif kind is OutputKind.UPDATE:
            self.effects[same[0]] = effect
        else:
            raise NameTakenError(
                kind.value,
                f"the name {name!r} is used twice in one trace",
                "Give each a name of its own, for instance with the layer's number.",
            )

    def update_of(self, name: str) -> Tensor | None:
        """What a state becomes, as far as it is known here or in the traces around this one."""
        for effect in self.effects:
            if effect.kind is OutputKind.UPDATE and effect.name == name:
                return self.tensor(effect.value)
        return None if self._enclosing is None else self._enclosing.update_of(name)

    def next_site(self) -> int:
        """A number for a random call site, unique in the outermost trace."""
        if self._enclosing is not None:
            return self._enclosing.next_site()
        self._sites += 1
        return self._sites - 1

    def skip_sites(self, count: int) -> None:
        """Leave the first call sites to a graph that is inlined here and has them already."""
        assert self._enclosing is None, "sites are counted by the outermost trace"
        self._sites = max(self._sites, count)

    def random_key(self) -> Tensor:
        """The key for random bits in this trace; `make_key` derives it from the enclosing one."""
        if self._key is None:
            if self._enclosing is None:
                self._key = self.leaf(STATE, RANDOM_STATE, KEY_TYPE)
            else:
                outer = self.adopt(self._enclosing.random_key())
                with resumed(self):  # a trace inside this one may have asked
                    self._key = self.make_key(outer) if self.make_key else outer
        return self._key

    def finish(self, results: Sequence[Tensor], name: str | None = None) -> Graph:
        """The graph: results first, then effects. The trace takes no more ops."""
        outputs = [Output(OutputKind.RESULT, str(i), r.handle) for i, r in enumerate(results)]
        return self.finish_outputs([*outputs, *self.effects], name)

    def finish_outputs(self, outputs: Sequence[Output], name: str | None = None) -> Graph:
        self.finished = True
        graph = self.builder.build(outputs, name or self.title)
        return replace_values(graph, self.replacements) if self.replacements else graph


class _Active(threading.local):
    def __init__(self) -> None:
        self.traces: list[Trace] = []


_active = _Active()


@contextmanager
def tracing(title: str) -> Iterator[Trace]:
    """A new trace inside the current one, if any; ops without operands go there."""
    parent = _active.traces[-1] if _active.traces else None
    trace = Trace(title, parent)
    _active.traces.append(trace)
    try:
        yield trace
    finally:
        _active.traces.pop()
        trace.finished = True


@contextmanager
def region_tracing(title: str) -> Iterator[Trace]:
    """A trace that all work inside belongs to, on outer tensors too: what is done on a condition.

    Elsewhere ops run in the scope of their operands, and what uses outer tensors only is done once,
    outside.
    """
    with tracing(title) as trace:
        trace.region = trace
        yield trace


@contextmanager
def isolated_tracing(title: str) -> Iterator[Trace]:
    """A trace that nothing encloses, whatever is being traced: for definitions and rules."""
    outer, _active.traces = _active.traces, []
    try:
        with tracing(title) as trace:
            yield trace
    finally:
        _active.traces = outer


@contextmanager
def resumed(trace: Trace) -> Iterator[None]:
    """Make a trace the current one again, to append to it."""
    _active.traces.append(trace)
    try:
        yield
    finally:
        _active.traces.pop()


@contextmanager
def at_one_line() -> Iterator[None]:
    """Everything traced inside comes from the line that is being run: looking once is quicker."""
    trace = current_trace()
    if trace is None or trace.origin is not None:
        yield
        return
    trace.origin = user_origin()
    try:
        yield
    finally:
        trace.origin = None


def current_scope() -> Trace | Eager:
    return _active.traces[-1] if _active.traces else EAGER


def current_trace() -> Trace | None:
    return _active.traces[-1] if _active.traces else None


def bind(op: Op, attributes: Attributes, *operands: Tensor) -> tuple[Tensor, ...]:
    """Apply an op in the innermost scope of its operands, or the current one if it has none."""
    scope: Scope = current_scope() if not operands else operands[0].scope
    for operand in operands[1:]:
        if operand.scope is not scope:
            scope = _inner(op, scope, operand.scope)
    region = _active.traces[-1].region if _active.traces else None
    if region is not None and region is not scope:
        scope = _inner(op, scope, region)
    if isinstance(scope, Trace):
        scope.check_open(op.name)
    adopted = [o if o.scope is scope else scope.adopt(o) for o in operands]
    return scope.apply(op, attributes, adopted)


def bind1(op: Op, attributes: Attributes, *operands: Tensor) -> Tensor:
    """The result of an op that has one."""
    (result,) = bind(op, attributes, *operands)
    return result


def _inner(op: Op, a: Scope, b: Scope) -> Scope:
    """The deeper of two scopes, if it lies inside the other."""
    outer, inner = (a, b) if a.depth <= b.depth else (b, a)
    scope: Scope | None = inner
    while scope is not None and scope is not outer:
        scope = scope.parent
    if scope is None and outer is not EAGER:
        raise mixed_traces(op.name, outer, inner)
    return inner


def mixed_traces(operation: str, a: Scope, b: Scope) -> TraceError:
    return TraceError(
        operation,
        f"tensors of two traces are mixed: {a.title!r} and {b.title!r}",
        "Pass the tensor as an argument of the function that is traced.",
    )


def into_scope(tensor: Tensor, scope: Scope) -> Tensor:
    """The tensor seen from a scope inside its own."""
    return tensor if tensor.scope is scope else scope.adopt(tensor)
