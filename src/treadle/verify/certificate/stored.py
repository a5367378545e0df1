"""A program's part of a certificate as bytes: what the plan cache keeps beside the machine code."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

from treadle.ir.graph import Graph
from treadle.ir.marks import pairs_of
from treadle.kernel.program import Program
from treadle.memory.plan import BufferPlan
from treadle.verify.certificate.graphs import Records
from treadle.verify.certificate.programs import program_records

MOST_BYTES = 2**28  # of a record that is read back


def program_evidence(graph: Graph, program: Program, buffers: BufferPlan) -> Callable[[], bytes]:
    """The record of a program that was scheduled for a marked graph, made once it is asked for."""
    given: list[Any] = [graph, program, buffers]
    made: list[bytes] = []
    lock = threading.Lock()  # the plan cache asks in a thread of its own

    def record() -> bytes:
        with lock:
            if not made:
                made.append(_packed(*given))
                given.clear()  # programs are large
            return made[0]

    return record


def _packed(graph: Graph, program: Program, buffers: BufferPlan) -> bytes:
    records = Records()
    record, graphs = program_records(program, buffers, records)
    scheduled = dict(program.bindings.graphs)[""]
    found = {
        "program": records.add(record),
        "graphs": graphs,
        "pairs": [[*a, *b] for a, b in pairs_of(graph, scheduled)],
        "records": records.texts,
    }
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return zlib.compress(text.encode(), 1)


def unpacked(data: bytes) -> dict[str, Any] | None:
    """What was packed; None for anything else."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(data, MOST_BYTES)
        found = json.loads(text) if inflate.eof else None
    except (zlib.error, ValueError, RecursionError):
        return None
    names = {"program": str, "graphs": dict, "pairs": list, "records": dict}
    if not isinstance(found, dict) or found.keys() != names.keys():
        return None
    return found if all(isinstance(found[k], t) for k, t in names.items()) else None
