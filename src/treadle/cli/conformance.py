"""`treadle conformance`: every op in every dtype on a device, beside the oracle."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from treadle.backends.registry import backend, choose_device
from treadle.base.errors import ArgumentError
from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.verify.conformance import Row, measured, summary, table
from treadle.verify.retyped import COMPUTED


def run_conformance(options: argparse.Namespace) -> int:
    """Measure and print; 1 if something is not as promised."""
    device = choose_device(options.device)
    rows = list(rows_on(device, [n for n in options.only.split(",") if n], options.seed))
    if options.json:
        facts = {"device": device, "seed": options.seed, "rows": [r.record for r in rows]}
        print(json.dumps(facts, indent=1))
    else:
        print(table(rows))
        wrong = [f"{r.op} in {r.dtype}: {r.wrong}" for r in rows if r.wrong]
        print("", summary(rows, device), *wrong, sep="\n")
    return int(any(r.wrong for r in rows))


def rows_on(device: str, only: Sequence[str] = (), seed: int = 0) -> Iterator[Row]:
    """The rows of a device, of all ops or of some."""
    known = [op.name for op in COMPUTED]
    unknown = [name for name in only if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 3)
        remedy = f"Did you mean {' or '.join(close)}?" if close else f"Use {', '.join(known)}."
        cause = f"there is no op {', '.join(unknown)} that computes"
        raise ArgumentError("conformance", cause, remedy)
    backend(device).require()
    ops = [op for op in COMPUTED if not only or op.name in only]
    return measured(lambda graph, arrays: _run(device, graph, arrays), ops, seed)


def _run(device: str, graph: Graph, arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    report = CompileReport(device, "float32")
    program = backend(device).load(graph, report, CompileOptions(), "conformance")
    found = [np.asarray(x) for x in program.run(arrays)]
    if device != "oracle":
        return found
    # The oracle computes in float64: what is measured is the rounding of its results.
    return [x.astype(t.dtype.numpy) for x, t in zip(found, graph.output_types, strict=True)]
