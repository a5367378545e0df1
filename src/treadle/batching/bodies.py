"""The batching rule of ops with a body: their bodies for all elements at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.batching.walk import BATCHING, Batch, batch_graph, mapped_names, repeated
from treadle.domains.domain import input_names
from treadle.frontend.functions.shaping import moveaxis
from treadle.frontend.scopes import bind
from treadle.frontend.tensor import Tensor
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph


@BATCHING(CALL)
def call_batch(attributes: Call, batch: Batch, *operands: Tensor) -> Sequence[Tensor]:
    """A call of the batched body; a user's backward is batched with it."""
    body, backward = attributes.body, attributes.backward
    names = mapped_names(input_names(body), batch.batched)
    if backward is None:
        wider = batch_graph(body, names, batch.size, batch.randomness)
        return bind(CALL, replace(attributes, body=wider), *operands)
    every = frozenset(range(len(body.outputs)))
    wider = batch_graph(body, names, batch.size, batch.randomness, every)
    gradient = _batched_backward(backward, batch)
    return bind(CALL, replace(attributes, body=wider, backward=gradient), *operands)


def _batched_backward(backward: Graph, batch: Batch) -> Graph:
    """Cotangents and results differ between elements; what an operand shares is added up."""
    given = len(backward.inputs) - len(batch.batched)
    names = mapped_names(input_names(backward), (True,) * given + batch.batched)
    shared = frozenset(i for i, o in enumerate(backward.outputs) if not batch.batched[int(o.name)])
    own = frozenset(range(len(backward.outputs))) - shared
    return batch_graph(backward, names, batch.size, batch.randomness, own, shared)


@BATCHING(SCAN)
def scan_batch(attributes: Scan, batch: Batch, *operands: Tensor) -> Sequence[Tensor]:
    """One scan for all elements: the loop's axis stays in front, theirs comes second.

    A carry has the axis if it has it at the start or gets it from what does, in any iteration.
    """
    first, carries = attributes.constants, attributes.carries
    wider, batched = _batched_body(attributes, batch)
    given = list(operands)
    for i in range(first, len(operands)):
        if i >= first + carries and batched[i]:
            given[i] = moveaxis(operands[i], 0, 1)
        elif batched[i] and not batch.batched[i]:
            given[i] = repeated(operands[i], batch.size)
    values = list(bind(SCAN, replace(attributes, body=wider), *given))
    types = zip(attributes.body.output_types, wider.output_types, strict=True)
    for i, (plain, found) in enumerate(types):
        if i >= carries and found.rank > plain.rank:
            values[i] = moveaxis(values[i], 1, 0)
    return values


def _batched_body(attributes: Scan, batch: Batch) -> tuple[Graph, Sequence[bool]]:
    """The body for all elements, and which of its inputs have their axis."""
    body, first, carries = attributes.body, attributes.constants, attributes.carries
    batched = list(batch.batched)
    while True:
        names = mapped_names(input_names(body), batched)
        now = batched[first : first + carries]
        spread = frozenset(i for i, is_batched in enumerate(now) if is_batched)
        wider = batch_graph(body, names, batch.size, batch.randomness, spread)
        types = zip(body.output_types[:carries], wider.output_types, strict=False)
        after = [found.rank > plain.rank for plain, found in types]
        if after == now:
            return wider, batched
        batched[first : first + carries] = after
