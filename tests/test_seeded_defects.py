"""Defects put into every stage, one at a time: each is rejected before anything runs.

The table at the end counts them by kind. Defects of kernels, made by the hundred, are in
`test_kernel_claims.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import test_attested
import test_mapping
import test_rule_proofs
import treadle as td
from derived_gradients import compare_gradients
from treadle.autodiff.backward import VJP, differentiate
from treadle.backends.stored import key_of
from treadle.base.errors import TreadleError
from treadle.compile_report import CompileOptions
from treadle.frontend.scopes import bind
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, linear, reductions, shaping
from treadle.ir.verify import verify as verify_graph
from treadle.kernel.bindings import Bindings
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import Accumulate, Buffer, For, Kernel, Let, Literal, Load, Role, Store
from treadle.kernel.program import Phase, check_phases
from treadle.kernel.verify import verify
from treadle.memory.plan import check_plan, plan_buffers
from treadle.runtime.cache import PlanCache
from treadle.schedule.schedule import CPU, schedule
from treadle.verify.kernels import check_kernels
from treadle.verify.library import attest
from treadle.verify.rule_proofs import Status, prove
from treadle.verify.samples import samples_of

Rejected = (TreadleError, AssertionError)  # what verifiers raise
F32 = td.float32


class SurvivedError(Exception):
    """Nothing was found."""


@dataclass(frozen=True)
class Defect:
    """`run` raises where the defect is found; what is slow is tested elsewhere too."""

    kind: str
    name: str
    run: Callable[[pytest.MonkeyPatch, Path], object]
    is_slow: bool = False


# Rules of the optimizer, and gradients


def wrong_rules() -> Iterator[Defect]:
    def refused(text: str) -> None:
        proof = prove(test_rule_proofs.rule_of(text))
        assert proof.status is not Status.REFUSED, proof.reason

    for name, text in test_rule_proofs.WRONG.items():
        yield Defect("wrong rule", name, lambda *_, text=text: refused(text), is_slow=True)


def _loss(op: Op) -> Graph:
    """A sum of an op's results, each with a weight of its own."""
    sample = next(s for s in samples_of(op) if s.operands and s.operands[0].type.size > 1)
    types = [td.Spec(d.type.shape, d.type.dtype) for d in sample.operands]

    def function(weights: td.Tensor, *xs: td.Tensor) -> td.Tensor:
        results = [y for y in bind(op, sample.attributes, *xs) if y.dtype.is_float]
        total, first = td.zeros(()), 0
        for y in results:
            own = weights[first : first + y.size].reshape(y.shape)
            total, first = total + (y * own).sum(), first + y.size
        return total

    return td.trace(function, td.Spec((400,)), *types)


def _gradient(op: Op) -> None:
    loss = _loss(op)
    floats = [n for n, i in loss.leaves.items() if loss.nodes[i].types[0].is_float]
    compare_gradients(loss, differentiate(loss, [n for n in floats if n != "weights"]))


WAYS: dict[str, Callable[[Any], Any]] = {
    "the wrong sign": lambda ct: -ct,
    "a term dropped": lambda ct: ct * 0.0,
    "a factor of 2": lambda ct: ct * 2.0,
}
GRADIENTS: dict[Op, tuple[str, ...]] = {
    e.NEG: ("a term dropped",), e.EXP: ("a factor of 2", "a term dropped"),
    e.LOG: ("the wrong sign",), e.SQRT: ("a factor of 2",), e.RSQRT: ("the wrong sign",),
    e.SIN: ("the wrong sign",), e.COS: ("the wrong sign",), e.TANH: ("a factor of 2",),
    e.ERF: ("a factor of 2",), e.ADD: ("a term dropped",), e.SUB: ("the wrong sign",),
    e.MUL: ("a term dropped", "the wrong sign"), e.DIV: ("a term dropped", "the wrong sign"),
    reductions.REDUCE_SUM: ("a term dropped",), reductions.REDUCE_MAX: ("a factor of 2",),
    reductions.REDUCE_PROD: ("a factor of 2",), reductions.CUMSUM: ("the wrong sign",),
    shaping.PERMUTE: ("the wrong sign",), shaping.BROADCAST: ("a factor of 2",),
    shaping.SLICE: ("a term dropped",), shaping.PAD: ("a factor of 2",),
    shaping.CONCAT: ("a term dropped",), shaping.FLIP: ("the wrong sign",),
    linear.CONTRACT: ("a term dropped", "the wrong sign"), linear.WINDOW: ("a factor of 2",),
    indexing.GATHER: ("a term dropped",), indexing.SCATTER_ADD: ("a factor of 2",),
    c.SOFTMAX: ("a term dropped", "a factor of 2"), c.LOGSUMEXP: ("the wrong sign",),
    c.LAYER_NORM: ("a term dropped", "the wrong sign"), c.GELU: ("a factor of 2",),
    c.SIGMOID: ("the wrong sign",), c.CONV: ("a term dropped",),
    c.CROSS_ENTROPY: ("the wrong sign",), c.ATTENTION: ("a term dropped",),
}  # fmt: skip


def wrong_gradients() -> Iterator[Defect]:
    """The entry of an op in the table of reverse mode, changed: the first of its terms."""

    def run(patch: pytest.MonkeyPatch, op: Op, way: str) -> None:
        right = VJP[op]

        def changed(*given: Any) -> Any:
            terms = list(right(*given))
            at = next(i for i, t in enumerate(terms) if t is not None)
            return tuple(WAYS[way](t) if i == at else t for i, t in enumerate(terms))

        patch.setitem(VJP._entries, op, changed)
        _gradient(op)

    kinds = {"a term dropped": "dropped vjp term"}
    for op, ways in GRADIENTS.items():
        for way in ways:
            kind = kinds.get(way, "wrong derivative")
            named = f"{op.name}: {way}"
            yield Defect(kind, named, lambda p, _, op=op, way=way: run(p, op, way))


# A program of another graph than the one it says


X, Y = td.Spec((8, 8)), td.Spec((8, 8))
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a sum along another axis": (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    "a maximum along another axis": (lambda x, y: x.max(0), lambda x, y: x.max(1)),
    "an argmax along another axis": (lambda x, y: x.argmax(0), lambda x, y: x.argmax(1)),
    "a softmax along another axis": (
        lambda x, y: td.softmax(x, 0), lambda x, y: td.softmax(x, 1)
    ),
    "a running sum along another axis": (lambda x, y: td.cumsum(x, 0), lambda x, y: td.cumsum(x, 1)),
    "a flip along another axis": (lambda x, y: td.flip(x, 0) * y, lambda x, y: td.flip(x, 1) * y),
    "a transposed operand": (
        lambda x, y: x.reshape(4, 4, 4).permute(0, 2, 1) * y.reshape(4, 4, 4),
        lambda x, y: x.reshape(4, 4, 4).permute(2, 1, 0) * y.reshape(4, 4, 4),
    ),
    "labels of a matmul": (
        lambda x, y: td.einsum("ij,jk->ik", x, y), lambda x, y: td.einsum("ij,kj->ik", x, y)
    ),
    "operands of a difference": (lambda x, y: x - y, lambda x, y: y - x),
    "operands of a quotient": (lambda x, y: x / y, lambda x, y: y / x),
    "another function": (lambda x, y: td.tanh(x) + y, lambda x, y: td.erf(x) + y),
    "another constant": (lambda x, y: x * 0.5 + y, lambda x, y: x * 0.25 + y),
    "a slice one further": (lambda x, y: x[0:4] * y[0:4], lambda x, y: x[1:5] * y[0:4]),
    "a stride of a slice": (lambda x, y: x[0:4] * y[0:4], lambda x, y: x[0:8:2] * y[0:4]),
    "pads on the other side": (
        lambda x, y: td.pad(x, [(1, 0), (0, 0)]), lambda x, y: td.pad(x, [(0, 1), (0, 0)])
    ),
    "parts in the other order": (
        lambda x, y: td.concat([x, y], 0) * 2, lambda x, y: td.concat([y, x], 0) * 2
    ),
    "branches of a choice": (
        lambda x, y: td.where(x < y, x, y * 3), lambda x, y: td.where(x < y, y * 3, x)
    ),
    "a comparison the other way": (
        lambda x, y: td.where(x < y, x, y * 3), lambda x, y: td.where(y < x, x, y * 3)
    ),
    "the direction of a sort": (
        lambda x, y: td.sort(x, 1)[0], lambda x, y: td.sort(x, 1, descending=True)[0]
    ),
    "the mean of others": (lambda x, y: (x * y).sum(1) / 8, lambda x, y: (x * y).sum(1) / 7),
}  # fmt: skip


def wrong_graphs() -> Iterator[Defect]:
    def run(right: Callable[..., Any], wrong: Callable[..., Any]) -> None:
        program = schedule(td.trace(right, X, Y))
        other = dict(schedule(td.trace(wrong, X, Y)).bindings.graphs)[""]
        bound = {b.value.node for b in program.bindings.every if b.scope == ""}
        if max(bound) >= len(other.nodes):
            raise SurvivedError("the graphs have different values")
        graphs = tuple((s, other if s == "" else g) for s, g in program.bindings.graphs)
        bindings = Bindings(graphs, program.bindings.every)
        check_kernels(replace(program, bindings=bindings))
        raise SurvivedError

    for name, pair in PAIRS.items():
        kind = "swapped axis" if "axis" in name else "another graph"
        yield Defect(kind, name, lambda *_, pair=pair: run(*pair))
    graph = td.trace(lambda x, y: (x @ y).sum(0), X, Y)

    def spoiled(change: Callable[[Graph], Graph]) -> Callable[..., Any]:
        return lambda *_: verify_graph(change(graph))

    nodes, outputs = graph.nodes, graph.outputs
    swapped = (*nodes[:2], nodes[3], nodes[2], *nodes[4:])
    yield Defect(
        "broken graph", "a node before its operand", spoiled(lambda g: Graph(swapped, outputs))
    )
    typed = (*nodes[:-1], replace(nodes[-1], types=(td.Spec((9,)),)))
    yield Defect(
        "broken graph", "a type that is not the op's", spoiled(lambda g: Graph(typed, outputs))
    )


# Kernels by hand: bounds and lanes


AXIS = Var("i", 16)
FROM, INTO = Buffer("x", F32, 16), Buffer("y", F32, 16)


def _kernel(*body: Any, buffers: tuple[Buffer, Buffer] = (FROM, INTO)) -> Kernel:
    return Kernel("k", (buffers[0],), (buffers[1],), tuple(body))


def _loop(*body: Any, role: Role = Role.PARALLEL, var: Var = AXIS) -> For:
    return For(var, role, tuple(body))


def _copy(at: Index, into: Index) -> Store:
    return Store("y", into, Load("x", at, F32))


def wrong_bounds() -> Iterator[Defect]:
    i = variable(AXIS)
    kernels = {
        "a load one further": _kernel(_loop(_copy(i + 1, i))),
        "a load one back": _kernel(_loop(_copy(i - 1, i))),
        "a store one further": _kernel(_loop(_copy(i, i + 1))),
        "a stride of 2": _kernel(_loop(_copy(i * 2, i))),
        "a loop too long": _kernel(_loop(_copy(variable(Var("i", 17)), i), var=Var("i", 17))),
        "a buffer too small": _kernel(
            _loop(_copy(i, i)), buffers=(replace(FROM, size=15), INTO)
        ),
        "an output too small": _kernel(_loop(_copy(i, i)), buffers=(FROM, replace(INTO, size=15))),
        "a negative stride": _kernel(_loop(_copy(i * -1 + 14, i))),
        "a buffer that there is not": _kernel(_loop(Store("z", i, Load("x", i, F32)))),
        "a name that there is not": _kernel(_loop(Accumulate("acc", "add", Load("x", i, F32)))),
    }  # fmt: skip
    for name, kernel in kernels.items():
        yield Defect("off-by-one bound", name, lambda *_, k=kernel: verify(k))


def wrong_lanes() -> Iterator[Defect]:
    i = variable(AXIS)
    one = Let("acc", Literal(0.0, F32))
    kernels = {
        "lanes that store to one element": _loop(_copy(i, i * 0), role=Role.VECTOR),
        "lanes that read what others store": _loop(
            Store("y", i, Load("y", i * -1 + 15, F32)), role=Role.VECTOR
        ),
        "iterations that read their neighbour": _loop(
            Store("y", i, Load("y", Index((), 3), F32)), role=Role.PARALLEL
        ),
        "iterations of one element": _loop(_copy(i, Index((), 0))),
    }
    for name, loop in kernels.items():
        outputs = _kernel(one, loop)
        yield Defect("lane conflict", name, lambda *_, k=outputs: verify(k))
    for name, (kernel, _) in test_mapping.WRONG.items():
        kind = "missing barrier" if "barrier" in name else "mapping of threads"
        run = lambda *_, k=kernel: verify(k, test_mapping.MAPPING)  # noqa: E731
        yield Defect(kind, name, run, is_slow=True)


# Programs: phases, buffers, bindings


def _program() -> Any:
    def function(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        return td.softmax((td.exp(x) @ y) @ x, 1) @ (x - y)

    return schedule(td.trace(function, td.Spec((64, 64)), td.Spec((64, 64))), fuse=False)


def wrong_programs() -> Iterator[Defect]:
    program = _program()
    steps = program.steps
    last = len(steps) - 1
    turns = {
        "the last phase first": (steps[last], *steps[:last]),
        "two phases in the other order": (steps[1], steps[0], *steps[2:]),
        "a phase left out": steps[1:],
        "two phases at once": (Phase((*steps[0].calls, *steps[1].calls)), *steps[2:]),
        "a call twice in a phase": (Phase(steps[0].calls * 2), *steps[1:]),
    }
    for name, wrong in turns.items():
        yield Defect("phases", name, lambda *_, w=wrong: check_phases(replace(program, steps=w)))
    plan, buffers = plan_buffers(program, CPU), {b.name: b for b in program.buffers}
    live = [n for n in plan.offsets if n in buffers]
    meeting = [
        (a, b) for a in live for b in live
        if a < b and plan.spans[a].first <= plan.spans[b].last
        and plan.spans[b].first <= plan.spans[a].last
    ]  # fmt: skip
    random.Random(0).shuffle(meeting)
    for a, b in meeting[:4]:
        moved = replace(plan, offsets=plan.offsets | {a: plan.offsets[b]})
        near = replace(plan, offsets=plan.offsets | {a: plan.offsets[b] + 64})
        yield Defect(
            "overlapping buffers", f"{a} where {b} is", lambda *_, p=moved: check_plan(p, buffers)
        )
        yield Defect(
            "overlapping buffers", f"{a} inside {b}", lambda *_, p=near: check_plan(p, buffers)
        )
    names = [b.name for b in program.buffers]
    for name in names[-2:]:
        left = Bindings(
            program.bindings.graphs, tuple(b for b in program.bindings.every if b.buffer != name)
        )
        yield Defect("missing binding", name, lambda *_, b=left: b.check(names))
    for at, call in enumerate(program.calls()):
        sizes = {b.size for b in call.kernel.inputs}
        if len(call.kernel.inputs) == 2 and len(sizes) == 1:
            first, second, *rest = call.arguments
            other = replace(call, arguments=(second, first, *rest))
            phases = tuple(Phase(tuple(other if c is call else c for c in s.calls)) for s in steps)
            wrong = replace(program, steps=phases)
            yield Defect(
                "call on other buffers",
                f"{at} {call.kernel.name}",
                lambda *_, w=wrong: check_kernels(w),
            )


# What is on disk


KEY = "ab" * 32


def _stored(folder: Path) -> tuple[PlanCache, Path]:
    cache = PlanCache(folder / "plans")
    cache.put(KEY, {"plan": b"a plan", "code": bytes(range(200))})
    assert cache.get(KEY) == {"plan": b"a plan", "code": bytes(range(200))}
    (path,) = (p for p in (folder / "plans").rglob("*.plan"))
    return cache, path


def _must_be_gone(cache: PlanCache, key: str = KEY) -> None:
    assert cache.get(key) is not None, "it was not taken"


def tampered_files() -> Iterator[Defect]:
    def changed(change: Callable[[bytes], bytes]) -> Callable[[pytest.MonkeyPatch, Path], None]:
        def run(_: pytest.MonkeyPatch, folder: Path) -> None:
            cache, path = _stored(folder)
            path.write_bytes(change(path.read_bytes()))
            _must_be_gone(cache)

        return run

    def flipped(at: float) -> Callable[[bytes], bytes]:
        def change(data: bytes) -> bytes:
            i = min(len(data) - 1, int(at * len(data)))
            return data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]

        return change

    changes = {
        "a bit of the magic": flipped(0.0), "a bit of the version": lambda d: d[:8] + b"\x02" + d[9:],
        "a bit of the checksum": flipped(0.1), "a bit of the header": flipped(0.3),
        "a bit of the code": flipped(0.8), "the last bit": flipped(1.0),
        "cut short": lambda d: d[:-7], "longer": lambda d: d + b"\0", "empty": lambda d: b"",
        "two parts changed over": lambda d: d.replace(b"a plan", b"b plan"),
    }  # fmt: skip
    for name, change in changes.items():
        yield Defect("tampered file", name, changed(change))


def stale_plans() -> Iterator[Defect]:
    from treadle.backends.cpu.backend import CpuBackend

    graph = td.trace(lambda x, y: (x @ y).sum(0), X, Y)
    others: dict[str, Any] = {
        "another graph": (td.trace(lambda x, y: (x @ y).sum(1), X, Y), {}, ""),
        "other sizes": (td.trace(lambda x, y: (x @ y).sum(0), X, td.Spec((8, 9))), {}, ""),
        "another constant": (td.trace(lambda x, y: (x @ y * 2).sum(0), X, Y), {}, ""),
        "other options": (graph, {"recompute": False}, ""),
        "another version": (graph, {}, "0.0.0-other"),
    }

    def run(patch: pytest.MonkeyPatch, folder: Path, other: Any) -> None:
        """What was stored for one is not found for the other."""
        toolchain = CpuBackend().toolchain(CompileOptions())
        cache = PlanCache(folder / "plans")
        cache.put(key_of(graph, CompileOptions(), toolchain), {"plan": b"a plan"})
        wanted, options, version = other
        if version:
            patch.setattr("treadle.backends.stored.__version__", version)
        _must_be_gone(cache, key_of(wanted, CompileOptions(**options), toolchain))

    for name, other in others.items():
        yield Defect("stale plan", name, lambda p, f, other=other: run(p, f, other))


def wrong_libraries() -> Iterator[Defect]:
    for kind, defect in (("plain", {"off": 0.5}), ("bias", {"forgets": "bias"}),
                         ("adds", {"forgets": "adds"}), ("scales", {"forgets": "scales"})):  # fmt: skip
        call = test_attested.KINDS[kind]
        compute = test_attested.multiplied(call, **defect)
        yield Defect("library", f"{kind} matmul", lambda *_, a=call, b=compute: attest(a, b, "k"))


def every() -> Iterator[Defect]:
    for make in (
        wrong_rules, wrong_gradients, wrong_graphs, wrong_bounds, wrong_lanes, wrong_programs,
        tampered_files, stale_plans, wrong_libraries,
    ):  # fmt: skip
        yield from make()


DEFECTS = list(every())
# What is not found, and why.
SURVIVORS: dict[str, str] = {}


def test_there_are_many_of_every_kind() -> None:
    kinds = Counter(d.kind for d in DEFECTS)
    assert len(DEFECTS) >= 80
    assert len(DEFECTS) == len({(d.kind, d.name) for d in DEFECTS})
    assert len(SURVIVORS) <= 0.02 * len(DEFECTS)
    for kind in (
        "wrong rule", "swapped axis", "dropped vjp term", "wrong derivative", "off-by-one bound",
        "overlapping buffers", "lane conflict", "missing barrier", "stale plan", "tampered file",
    ):  # fmt: skip
        assert kinds[kind] >= 3, kinds


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(d, id=f"{d.kind}: {d.name}", marks=[pytest.mark.slow] if d.is_slow else [])
        for d in DEFECTS
    ],
)
def test_a_defect_is_rejected(
    defect: Defect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if defect.name in SURVIVORS:
        defect.run(monkeypatch, tmp_path)
        return
    with pytest.raises(Rejected):
        defect.run(monkeypatch, tmp_path)


@pytest.mark.parametrize("op", GRADIENTS, ids=lambda op: op.name)
def test_gradients_without_a_defect_are_accepted(op: Op) -> None:
    _gradient(op)


def test_programs_without_a_defect_are_accepted() -> None:
    program = check_phases(_program())
    check_plan(plan_buffers(program, CPU), {b.name: b for b in program.buffers})
    assert all(claim.is_established for claim in check_kernels(program))
    for right, wrong in PAIRS.values():
        for function in (right, wrong):
            assert all(
                claim.is_established for claim in check_kernels(schedule(td.trace(function, X, Y)))
            )
    verify(_kernel(_loop(_copy(variable(AXIS), variable(AXIS)))))
