"""What a buffer holds when it is read: carries and leaves that were overwritten too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import treadle as td
from test_scans import kept_twice, specs, swapped
from treadle.ir.graph import Graph, OutputKind, Value
from treadle.kernel.bindings import Whole
from treadle.kernel.held import Touch, check_held, check_scope
from treadle.kernel.program import Phase, Program, Repeat
from treadle.kernel.target import CPU, GPU, Target
from treadle.schedule import scans
from treadle.schedule.nests import copies, shifted
from treadle.schedule.order import Order
from treadle.schedule.schedule import schedule


def early(body: scans.ScanBody, order: Order) -> None:
    """`ScanBody.finish` as it once was: next values are copied before all have read the last."""
    pairs = list(body.copied_rows)
    made = [body.names[o.value] for o in body.graph.outputs[: body.attributes.carries]]
    for k, name in enumerate(made):
        if name in body.carried and name not in body.in_carries:
            made[k] = body._room(f"{body.prefix}next{k}", body.buffers[name])
            body.held[made[k]] = body.graph.outputs[k].value, Whole()
            pairs.append((name, made[k]))
    rows = {source: (source, row) for source, row in body.copied_rows}
    for source, target in zip(made, body.carried, strict=True):
        if target in rows and rows[target] in pairs and source not in body.carried:
            pairs.remove(rows[target])
            order.add(*shifted(rows[target][1], target, source, body.buffers[target]))
        elif source != target:
            pairs.append((source, target))
    for source, target in pairs:
        order.add(*copies(source, target, body.buffers[source]))


def slopes_of(function: Callable[..., td.Tensor]) -> Graph:
    def slopes(h, x, w):
        return td.grad(lambda *a: (function(*a) ** 2).sum(), (0, 1, 2))(h, x, w)

    return td.trace(slopes, *specs((3, 4), (5, 3, 4), (4, 4)))


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("function", [kept_twice, swapped], ids=lambda f: f.__name__)
def test_a_carry_that_is_overwritten_too_early_is_refused(
    function: Callable[..., td.Tensor], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = slopes_of(function)
    schedule(graph, target=target)
    monkeypatch.setattr(scans.ScanBody, "finish", early)
    with pytest.raises(td.GraphError, match=r"kernel copy .*reads .*test_scans.py"):
        schedule(graph, target=target)


def body_graph() -> Graph:
    """tanh(h) and h · h of a carry h: outputs %1 and %2 of the input %0."""
    return td.trace(lambda h: (td.tanh(h), h * h), td.Spec((4,)))


H, NEXT, SQUARE = Value(0), Value(1), Value(2)
HELD = {"h": [H, NEXT], "next": [NEXT], "square": [SQUARE], "copy": [H]}


def touch(read: str, written: str) -> Touch:
    return Touch("k", (), tuple(read.split()), tuple(written.split()))


def test_readers_of_the_last_value_come_before_the_next() -> None:
    good = [touch("h", "next"), touch("h", "square"), touch("next", "h")]
    check_scope(body_graph(), HELD, good)
    with pytest.raises(td.GraphError, match="makes square of %0, and reads h, which holds %1"):
        check_scope(body_graph(), HELD, [good[0], good[2], good[1]])
    with pytest.raises(td.GraphError, match="reads next before it is written"):
        check_scope(body_graph(), HELD, [good[2], good[1], good[0]])
    with pytest.raises(td.GraphError, match="h does not hold its next value in the end"):
        check_scope(body_graph(), HELD, good[:2])


def test_the_last_value_may_be_given_by_another_buffer() -> None:
    steps = [touch("h", "copy next"), touch("next", "h"), touch("h copy", "square")]
    check_scope(body_graph(), HELD, steps)


def test_a_carry_that_stays_may_be_copied_and_back() -> None:
    held = {"h": [H, H], "next": [NEXT], "square": [SQUARE], "copy": [H]}
    steps = [touch("h", "next square"), touch("h", "copy"), touch("copy", "h")]
    check_scope(body_graph(), held, steps)
    with pytest.raises(td.GraphError, match="reads copy before it is written"):
        check_scope(body_graph(), held, steps[::-1])


def test_a_kernel_may_read_what_it_replaces() -> None:
    check_scope(body_graph(), HELD, [touch("h", "next"), touch("next", "square h")])


def test_a_value_that_is_made_once_more_is_not_read() -> None:
    """A buffer that held tanh(h) and holds its square now, beside what is made of both."""
    graph = td.trace(lambda h: td.tanh(h) ** 2 + td.tanh(h), td.Spec((4,)))
    first, second, total = (Value(i) for i in (1, 2, len(graph.nodes) - 1))
    held = {"h": [H], "both": [first, second], "total": [total]}
    steps = [touch("h", "first"), touch("h first", "both"), touch("h both", "total")]
    check_scope(graph, held, steps)


def updating() -> Program:
    """A weight that is updated in place, and read by something else before."""
    graph = td.trace(lambda w, x: ((x @ w).sum(), w - 0.1 * td.tanh(w)), *specs((8, 8), (4, 8)))
    kinds = (OutputKind.RESULT, OutputKind.UPDATE)
    named = [replace(o, kind=k, name="w") for o, k in zip(graph.outputs, kinds, strict=True)]
    return schedule(replace(graph, outputs=tuple(named)), fuse=False, in_place=True)


def test_a_leaf_is_read_before_its_update() -> None:
    program = updating()
    assert program.updated == ("w",)
    readers = [s for s in program.steps if isinstance(s, Phase) and _touches(s, "read")]
    writers = [s for s in program.steps if isinstance(s, Phase) and _touches(s, "written")]
    assert len(writers) == 1
    with pytest.raises(td.GraphError, match="of %0, and reads w, which holds"):
        check_held(replace(program, steps=(*program.steps, *readers)))


def _touches(phase: Phase, how: str) -> bool:
    return any(a.buffer == "w" for call in phase.calls for a in getattr(call, how))


def test_the_end_of_an_iteration_is_looked_at_in_a_program() -> None:
    def last(h, x, w):
        return td.scan(lambda h, v: (td.tanh(h @ w + v), None), h, x)[0]

    program = schedule(td.trace(last, *specs((3, 4), (5, 3, 4), (4, 4))))
    (at,) = (i for i, s in enumerate(program.steps) if isinstance(s, Repeat))
    repeat = program.steps[at]
    assert isinstance(repeat, Repeat)
    steps = list(program.steps)
    steps[at] = replace(repeat, steps=repeat.steps[:-1])
    with pytest.raises(td.GraphError, match="does not hold its next value"):
        check_held(replace(program, steps=tuple(steps)))


def test_a_program_has_the_outputs_of_its_graph() -> None:
    program = schedule(td.trace(lambda x: (x + 1, x * 2), td.Spec((3,))))
    with pytest.raises(td.GraphError, match="outputs of the program"):
        check_held(replace(program, outputs=program.outputs[1:]))


def test_one_part_of_parts_put_together_needs_no_other() -> None:
    """The last row is a carry, and rows before it are of a scan that began with what is gone."""

    def function(h: td.Tensor, x: td.Tensor) -> td.Tensor:
        last, rows = td.scan(lambda c, v: (td.tanh(c + v), c), td.tanh(h), x)
        every = td.concat([rows[1:], last[None]], 0)
        return every[4:] * 2

    graph = td.trace(function, *specs((3, 4), (5, 3, 4)))
    (scan,) = (i for i, n in enumerate(graph.nodes) if n.op.name == "scan")
    begun, last = graph.nodes[scan].operands[0], Value(scan)
    made = graph.outputs[0].value
    held = {"carry": [begun, last], "y": [made]}
    calls = [Touch("before", (), (), ("carry",)), frozenset(["carry"])]
    check_scope(graph, held, [*calls, Touch("after", (), ("carry",), ("y",))])
    first = td.trace(lambda h, x: function(h, x) + td.tanh(h), *specs((3, 4), (5, 3, 4)))
    held = held | {"y": [first.outputs[0].value]}
    with pytest.raises(td.GraphError, match="reads carry"):
        check_scope(first, held, [*calls, Touch("after", (), ("carry",), ("y",))])
