"""The checker's side of kernels: programs are accepted, and programs with a defect are not."""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
import treadle_checker
from checked_programs import graphs_of, record_of, rejects, survivors
from models import gpt_loss, gpt_specs
from test_kernel_claims import _onto_one_element, plain
from test_kernel_claims import graphs as loss_and_gradients
from test_lanes import APART, MEETING, REFUSED, K
from test_lanes import kernel as lanes_kernel
from treadle.autodiff.backward import differentiate
from treadle.ir.graph import Graph
from treadle.kernel.index import Var, constant, divide, uses, variable
from treadle.kernel.nodes import Barrier, For, Kernel, Literal, Matmul, Role, Store
from treadle.kernel.program import Program
from treadle.kernel.traverse import map_statements, walk
from treadle.schedule.schedule import CPU, GPU, Target, schedule
from treadle.verify.certificate.programs import kernel_record
from treadle.verify.indices import evaluate_index
from treadle.verify.kernels import check_kernels
from treadle_checker.kernel_checks import check_program
from treadle_checker.program import read_kernel, read_program
from treadle_checker.races import check_races
from treadle_checker.reading import Rejected
from treadle_checker.sites import Walk

TARGETS = {"cpu": CPU, "gpu": GPU}


def recurrent(w, x):
    """Gates of an LSTM, in a scan."""

    def cell(state, row):
        h, c = state
        gates = td.concat([h, row], axis=1) @ w
        i, f, o, g = (gates[:, 4 * k : 4 * k + 4] for k in range(4))
        c = td.sigmoid(f) * c + td.sigmoid(i) * td.tanh(g)
        return (td.sigmoid(o) * td.tanh(c), c), c

    first = td.zeros((3, 4)), td.zeros((3, 4))
    return (td.scan(cell, first, x)[1] ** 2).mean()


def drawn(w, x):
    """Random bits, a mask of −∞, and positions that are found by comparing."""
    kept = td.where(td.random.uniform((6, 9)) < 0.5, x @ w, 0.0)
    weights = td.softmax(td.where(x[:, :9] < 0, float("-inf"), kept), axis=-1)
    return weights.sum() + td.take_along_axis(kept, kept.argmax(1)[:, None], 1).sum()


def gradients(function: Callable[..., Any], *specs: Any, wrt: tuple[str, ...] = ("w",)) -> Graph:
    loss = td.trace(function, *specs)
    names = [n for n in loss.leaves if n.startswith(wrt)]
    return differentiate(loss, names).graph


def graph_of(name: str) -> Graph:
    match name:
        case "lstm":
            return gradients(recurrent, td.Spec((9, 16)), td.Spec((4, 3, 5)))
        case "drawn":
            return td.trace(drawn, td.Spec((11, 9)), td.Spec((6, 11)))
        case "gpt":
            specs = gpt_specs(layers=1, d=8, t=6, batch=2, vocabulary=11)
            return gradients(partial(gpt_loss, heads=2), *specs, wrt=("params", "arg0"))
        case _:
            return loss_and_gradients(name)[1]


@cache
def scheduled(name: str, kind: str, panel: int = 32) -> Program:
    target = TARGETS[kind]
    return schedule(graph_of(name), True, panel, True, target=target)


def reasons(program: Program, target: Target, effort: int = 1) -> set[str]:
    """Why something of a program is not established; Rejected where it is wrong."""
    claims = check_program(read_program(record_of(program, target)), graphs_of(program), effort)
    assert len(claims) > len(program.distinct())
    return {c.reason for c in claims if not c.is_established}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "block", "lstm", "drawn", "gpt"])
def test_programs_are_accepted(name: str, kind: str) -> None:
    left = reasons(scheduled(name, kind), TARGETS[kind])
    assert left <= {"it stands between a scan and what is around it"}
    assert not left or name == "lstm"


def test_the_compiler_says_the_same_of_a_scan_in_one_kernel() -> None:
    """Some results of a scan are given there, and others are asked for."""
    claims = check_kernels(scheduled("lstm", "gpu"))
    assert claims
    assert all(c.is_established for c in claims)


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_programs_of_every_width_are_accepted(name: str, lanes: int) -> None:
    assert reasons(scheduled(name, "cpu", 2 * lanes), CPU) == set()


def test_a_record_is_the_same_every_time() -> None:
    first, second = (record_of(schedule(graph_of("block")), CPU) for _ in range(2))
    assert first == second


# Defects of kernels


def normalised(w, x):
    return (td.tanh(td.layer_norm(x, w[0], w[1])) ** 3).mean()


def convolved(w, x):
    return (td.tanh(td.conv(x, w, padding=1)) ** 3).mean()


def embedded(w, at):
    return (td.tanh(w[at]) ** 3).sum()


def products(size: int) -> Graph:
    """No maximum, no square, no guard against infinities: every defect shows."""
    specs = [td.Spec((19, size)), td.Spec((size, 5)), td.Spec((2 * size + 4, 19))]
    specs.append(td.Spec((2 * size + 4, 5)))
    return gradients(plain, *specs, wrt=("w", "v"))


def defective(kind: str) -> list[tuple[Program, Target]]:
    graphs = [
        products(33),
        gradients(normalised, td.Spec((2, 12)), td.Spec((10, 12))),
        gradients(convolved, td.Spec((3, 2, 3, 3)), td.Spec((2, 2, 7, 9))),
        gradients(embedded, td.Spec((13, 6)), td.Spec((8,), td.int32)),
        gradients(recurrent, td.Spec((9, 16)), td.Spec((4, 3, 5))),
    ]
    return [(schedule(graph, target=TARGETS[kind]), TARGETS[kind]) for graph in graphs]


@pytest.mark.parametrize("kind", TARGETS)
def test_defects_are_rejected(kind: str) -> None:
    program = schedule(products(23), target=TARGETS[kind])
    assert survivors([(program, TARGETS[kind])], 20) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_many_defects_are_rejected(kind: str) -> None:
    """Of 1,200 in all, 13 survive, and none of them changes a number: a guard with one number on
    both sides, an index that its guard holds at 0 anyway, a constant behind guards one of which
    always holds, another element of a buffer of zeros."""
    found = survivors(defective(kind), 600)
    assert len(found) <= 9, "\n".join(found)


def columns() -> Program:
    return schedule(td.trace(lambda x: td.logsumexp(x.reshape(40, 3) * 2, 1), td.Spec((120,))))


def test_lanes_that_share_scratch_are_rejected() -> None:
    """Sums of three columns as they once were: all lanes used one element of scratch."""
    program = columns()
    read, wrong = read_program(record_of(program, CPU)), 0
    for site in Walk(read, graphs_of(program)).sites():
        kernel = program.distinct()[site.call.kernel]
        shared = _onto_one_element(kernel)
        if shared != kernel:
            wrong += 1
            assert rejects(read, site, shared)
    assert wrong


def test_memory_of_lanes_is_not_one_memory() -> None:
    """Scratch that each lane has for itself, said to be one for all of them."""
    program = schedule(td.trace(lambda x: td.sort(x, 1)[0][:, 1], td.Spec((37, 3))))
    record, changed = record_of(program, CPU), 0
    for kernel in record["kernels"]:
        for buffer in kernel["scratch"]:
            changed += buffer[3] > 1
            buffer[3] = 1
    assert changed
    with pytest.raises(Rejected, match="may meet"):
        check_program(read_program(record), graphs_of(program), 0)


def without_barriers(kernel: Kernel) -> Kernel:
    return replace(
        kernel,
        body=map_statements(kernel.body, lambda s: () if isinstance(s, Barrier) else (s,)),
    )


def colliding(kernel: Kernel) -> Kernel:
    """Lanes of a vector loop that all store to one element."""

    def changed(s):
        if not isinstance(s, For) or s.role is not Role.VECTOR or s.var.extent < 2:
            return (s,)
        return (replace(s, body=map_statements(s.body, partial(without, s.var))),)

    def without(var, s):
        if not isinstance(s, Store):
            return (s,)
        terms = tuple((atom, f) for atom, f in s.index.terms if not uses(atom, var))
        return (replace(s, index=replace(s.index, terms=terms)),)

    return replace(kernel, body=map_statements(kernel.body, changed))


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [(without_barriers, "gpu", "no barrier"), (colliding, "cpu", "may meet")],
)
def test_threads_and_lanes_that_meet_are_rejected(change, kind: str, told: str) -> None:
    """By what is shown for all iterations: nothing is run."""
    program, wrong = scheduled("block", kind), 0
    for kernel in program.distinct():
        changed = change(kernel)
        if changed != kernel:
            wrong += 1
            with pytest.raises(Rejected, match=told):
                check_races(read_kernel(kernel_record(changed)))
    assert wrong > 1


# What is shown for all iterations


def is_refused(*body: For) -> bool:
    try:
        check_races(read_kernel(kernel_record(lanes_kernel(*body))))
    except Rejected:
        return True
    return False


@pytest.mark.parametrize("name", [*APART, *MEETING])
def test_iterations_that_meet_are_told_from_those_that_do_not(name: str) -> None:
    outside = For(K, Role.SEQUENTIAL, ((APART | MEETING)[name],))
    assert is_refused(outside) == (name in MEETING)


@pytest.mark.parametrize("name", REFUSED)
def test_lanes_are_held_to_the_same(name: str) -> None:
    with pytest.raises(Rejected):
        check_races(read_kernel(kernel_record(REFUSED[name][0])))


def test_iterations_said_to_be_apart_are_by_counting() -> None:
    """Random indices of small loops, all of their iterations written out."""
    rng, apart = random.Random(1), 0
    for _ in range(400):
        i, j, k = (Var(n, rng.randint(1, 6)) for n in "ijk")
        found = []
        for _ in range(rng.randint(1, 2)):
            atoms = [variable(v) * rng.choice([0, 1, 2, 3, 4, 6, 12, 24]) for v in (i, j, k)]
            whole, rest = divide(
                variable(i) * rng.choice([1, 2, 3]) + variable(j), rng.randint(2, 5)
            )
            parts = [*atoms, whole * rng.choice([0, 1, 7]), rest * rng.choice([0, 1, 9])]
            found.append(sum(parts, constant(rng.choice([0, 0, 1, 30]))))
        stores = tuple(Store("y", index, Literal(0.0, td.float32)) for index in found)
        loop = For(i, Role.PARALLEL, (For(j, Role.SEQUENTIAL, stores),))
        if is_refused(For(k, Role.SEQUENTIAL, (loop,))):
            continue
        apart += 1
        for at in range(k.extent):
            owners: dict[int, set[int]] = {}
            for a in range(i.extent):
                for b in range(j.extent):
                    for index in found:
                        values = {"i": np.array(a), "j": np.array(b), "k": np.array(at)}
                        owners.setdefault(int(evaluate_index(index, values)), set()).add(a)
            assert all(len(o) == 1 for o in owners.values()), [str(index) for index in found]
    assert apart > 30


# Defects of everything around kernels


def overlapping(record: Any) -> None:
    """Two buffers of one call at one place."""
    kernel_of = {name for name, _ in record["offsets"]}
    for step in record["steps"]:
        for _, arguments, _ in step[1] if step[0] == "phase" else ():
            inside = [name for name, _ in arguments if name in kernel_of]
            if len(inside) > 1:
                record["offsets"] = [
                    [n, dict(record["offsets"])[inside[1]] if n == inside[0] else at]
                    for n, at in record["offsets"]
                ]
                return


def beyond(record: Any) -> None:
    record["arena"] //= 2


def in_another_order(record: Any) -> None:
    record["steps"].reverse()


def in_one_phase(record: Any) -> None:
    calls = [call for step in record["steps"] for call in step[1]]
    record["steps"] = [["phase", calls]]


def one_dropped(record: Any) -> None:
    del record["steps"][len(record["steps"]) // 2]


def other_values(record: Any) -> None:
    """Two buffers of one size hold each other's values."""
    sizes = {b[0]: (b[1], b[2]) for b in record["buffers"]}
    temporary = {name for name, _ in record["offsets"]}
    whole = [b for b in record["bindings"] if b[4] == ["whole"] and b[0] in temporary]
    pairs = ((a, b) for a in whole for b in whole if a[2:4] < b[2:4])
    a, b = next((a, b) for a, b in pairs if sizes[a[0]] == sizes[b[0]])
    a[2:4], b[2:4] = b[2:4], a[2:4]


def unbound(record: Any) -> None:
    record["bindings"] = record["bindings"][1:]


def transposed(record: Any) -> None:
    """A value in another layout than the one that it has."""
    found = [b for b in record["bindings"] if b[4][0] == "layout" and not b[4][-1]]
    assert found
    for binding in found:
        binding[4] = ["whole"]


def other_arguments(record: Any) -> None:
    buffers = {b[0]: b[1:] for b in record["buffers"]}
    for step in record["steps"]:
        for kernel, arguments, _ in step[1]:
            count = len(record["kernels"][kernel]["inputs"])
            for i in range(count - 1):
                first, second = arguments[i], arguments[i + 1]
                if first != second and buffers[first[0]] == buffers[second[0]]:
                    arguments[i], arguments[i + 1] = second, first
                    return
    raise AssertionError("no call has two arguments that could be exchanged")


def too_short(record: Any) -> None:
    record["buffers"][-1][2] -= 1


def written_twice(record: Any) -> None:
    """A call's two buffers are one."""
    for step in record["steps"]:
        for kernel, arguments, _ in step[1]:
            count = len(record["kernels"][kernel]["inputs"])
            sizes = {b[0]: b[1:3] for b in record["buffers"]}
            for i in range(count):
                if sizes[arguments[i][0]] == sizes[arguments[count][0]]:
                    arguments[i] = arguments[count]
                    return


def another_output(record: Any) -> None:
    first, second = record["outputs"][:2]
    first[2], second[2] = second[2], first[2]


def a_leaf_written(record: Any) -> None:
    record["updated"] = []
    record["leaves"] += [record["outputs"][-1][2]]


AROUND = [
    overlapping, beyond, in_another_order, in_one_phase, one_dropped, other_values, unbound,
    other_arguments, too_short, written_twice, another_output, a_leaf_written,
]  # fmt: skip


@pytest.mark.parametrize("change", AROUND, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", TARGETS)
def test_defects_around_kernels_are_rejected(change: Callable[[Any], None], kind: str) -> None:
    def unequal(w, v, x):
        return td.exp(x @ w) - v, td.tanh((x * 2) @ v).sum(0), td.sin(x @ w + v.sum())

    specs = [td.Spec((16, 16)) for _ in range(3)]
    program = schedule(td.trace(unequal, *specs), fuse=False, target=TARGETS[kind])
    record = record_of(program, TARGETS[kind])
    change(record)
    with pytest.raises(Rejected):
        check_program(read_program(record), graphs_of(program))


# What is not a program


def parts_of(record: Any) -> list[tuple[Any, Any]]:
    """Every list and record, with every place in it."""
    found, pending = [], [record]
    while pending:
        at = pending.pop()
        places = at.keys() if isinstance(at, dict) else range(len(at))
        found += [(at, place) for place in places]
        pending += [at[place] for place in places if isinstance(at[place], (list, dict))]
    return found


ODD = (None, True, -1, 0, 3, 2**70, 1.5, "", "add", "p0", [], {}, ["apply"], ["within", [0], 0, 1])


def test_whatever_a_record_says_nothing_else_is_raised() -> None:
    """A value in the place of another: refused, or a program that is checked in full."""
    program = schedule(td.trace(lambda x: td.softmax(x * 2, 1), td.Spec((5, 6))))
    record, graphs, rng = record_of(program, CPU), graphs_of(program), random.Random(0)
    refused = 0
    for _ in range(300):
        changed = copy.deepcopy(record)
        at, place = rng.choice(parts_of(changed))
        at[place] = rng.choice(ODD)
        try:
            check_program(read_program(changed), graphs)
        except Rejected:
            refused += 1
    assert refused > 200


def test_unknown_nodes_are_rejected() -> None:
    record = record_of(columns(), CPU)
    record["kernels"][0]["body"].append(["call", "os.system"])
    with pytest.raises(Rejected, match="call"):
        read_program(json.loads(json.dumps(record)))


def test_the_checker_imports_nothing_of_the_compiler() -> None:
    for path in Path(treadle_checker.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert all(name.split(".")[0] != "treadle" for name in names), path


def test_products_of_one_column_do_not_meet() -> None:
    """Columns lie as far apart as matrices do, and there is one."""
    specs = td.Spec((8192, 512, 4), td.bfloat16), td.Spec((8192, 4, 1), td.bfloat16)
    program = schedule(td.trace(lambda a, b: a @ b, *specs), target=GPU)
    assert any(isinstance(s, Matmul) for k in program.distinct() for s in walk(k.body))
    assert reasons(program, GPU, 0) == set()


def test_parts_of_a_variance_are_read_and_left() -> None:
    program = schedule(td.trace(lambda x: td.var(x, (0,)), td.Spec((256, 8, 256))), target=GPU)
    assert any("spread" in str(b.content) for b in program.bindings.every)
    assert all("variance" in reason for reason in reasons(program, GPU))


def nested(h, x, w):
    """A scan inside a scan: carries of the inner one are values of the outer body."""

    def body(c, v):
        d, ys = td.scan(lambda d, u: (td.tanh(d @ w + u), d * u), c, x[:2])
        return td.tanh(d @ w + v), ys[0] + d

    c, ys = td.scan(body, h, x)
    return (c * c).sum() + (ys * ys).sum()


def test_scans_in_scans_are_not_refused() -> None:
    """By full verification, nor by the checker: a call's scope is as deep as the call."""
    types = [td.Spec(shape) for shape in ((3, 4), (3, 3, 4), (4, 4))]
    graph = td.trace(lambda *given: td.grad(nested, (0, 1, 2))(*given), *types)
    program = schedule(graph, target=CPU)
    assert any(scope.count(":") == 2 for scope, _ in program.bindings.graphs)
    check_kernels(program)
    claims = check_program(read_program(record_of(program, CPU)), graphs_of(program))
    assert sum(c.is_established for c in claims) > 0.8 * len(claims)
