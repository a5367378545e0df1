"""Whether a plan from outside belongs to a graph, before anything is run by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from treadle.ir.graph import Graph
from treadle.kernel.plan import Plan, PlannedCall, PlannedRepeat, PlannedStep


def fits(plan: Plan, graph: Graph, constants: Mapping[str, np.ndarray]) -> bool:
    """Whether leaves and outputs are the graph's, and every number points at what is there.

    That its machine code is right cannot be told from here.
    """
    try:
        checks = (_has_its_outputs, _has_its_leaves, _has_room)
        return all(check(plan, graph) for check in checks) and _has_constants(plan, constants)
    except (TypeError, AttributeError, LookupError):  # numbers that are none
        return False


def _has_its_outputs(plan: Plan, graph: Graph) -> bool:
    found = [(o.kind, o.name, o.type) for o in plan.outputs]
    wanted = zip(graph.outputs, graph.output_types, strict=True)
    return found == [(o.kind, o.name, t) for o, t in wanted] and all(
        o.type.nbytes <= plan.slots[_checked(o.slot, plan.slots)].nbytes for o in plan.outputs
    )


def _has_its_leaves(plan: Plan, graph: Graph) -> bool:
    """All of the graph's, and what it only writes."""
    types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    found = {name: type_ for name, _, type_ in plan.leaves}
    own = {name: type_ for name, type_ in found.items() if name in types}
    is_written = all(name in plan.updated for name in found if name not in types)
    return own == types and is_written and all(n in found for n in plan.updated)


def _has_room(plan: Plan, graph: Graph) -> bool:
    """Buffers lie in the arena or are given from outside; calls name what there is."""
    outside = {s for _, s, _ in plan.leaves} | {s for s, _ in plan.constants}
    outside |= {o.slot for o in plan.outputs}
    for i, slot in enumerate(plan.slots):
        is_inside = slot.offset >= 0 and 0 <= slot.nbytes <= plan.arena - slot.offset
        is_given = slot.offset == -1 and (i in outside or slot.nbytes == 0)
        if not (is_inside or is_given):
            return False
    if any(e.iterations < 0 or e.scratch < 0 for e in plan.entries):
        return False
    leaves = all(t.nbytes <= plan.slots[_checked(s, plan.slots)].nbytes for _, s, t in plan.leaves)
    return leaves and _can_follow(plan, plan.steps, 1)


def _can_follow(plan: Plan, steps: Sequence[PlannedStep], length: int) -> bool:
    for step in steps:
        if isinstance(step, PlannedRepeat):
            if step.length < 0 or not _can_follow(plan, step.steps, step.length):
                return False
        elif not all(_can_call(plan, call, length) for call in step.calls):
            return False
    return True


def _can_call(plan: Plan, call: PlannedCall, length: int) -> bool:
    """Rows of all iterations of the repeat around start inside their buffers."""
    _checked(call.entry, plan.entries)
    if call.tasks < 1 or len(call.slots) != len(call.rows):
        return False
    return all(
        0 <= row * max(0, length - 1) <= plan.slots[_checked(slot, plan.slots)].nbytes
        for slot, row in zip(call.slots, call.rows, strict=True)
    )


def _has_constants(plan: Plan, constants: Mapping[str, np.ndarray]) -> bool:
    return all(
        constants[name].nbytes >= plan.slots[_checked(slot, plan.slots)].nbytes
        for slot, name in plan.constants
    )


def _checked(number: int, among: Sequence[object]) -> int:
    """A position in a sequence: no negative one, which Python would count from the end."""
    if not 0 <= number < len(among):
        raise IndexError(number)
    return number
