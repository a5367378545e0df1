"""`treadle conformance`: errors beside contracts, and the page of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

import conformance_page
import treadle as td
from treadle.cli.conformance import rows_on
from treadle.cli.main import main
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.ir.op import OPS
from treadle.verify.conformance import measured, summary, table, taken
from treadle.verify.retyped import COMPUTED


def test_rows_of_an_op() -> None:
    rows = list(rows_on("cpu", ["exp", "flip"]))
    assert not [r.wrong for r in rows if r.wrong]
    assert {r.dtype for r in rows if r.op == "exp"} == {"float64", "float32", "bfloat16", "float16"}
    assert all(0 <= r.share <= 1 and r.elements > 10 for r in rows)
    assert any(r.share > 0 for r in rows if r.op == "exp")
    assert all(r.cell == "=" for r in rows if r.op == "flip")
    assert "all within their contracts" in summary(rows, "cpu")
    assert table(rows).splitlines()[0].startswith("| op | contract | float64 | float32 |")


def spoiled(factor: float):
    def run(graph: Graph, arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        found = evaluate_float64(graph, arrays)
        types = graph.output_types
        return [(x * factor).astype(t.dtype.numpy) for x, t in zip(found, types, strict=True)]

    return run


@pytest.mark.parametrize("name", ["exp", "reduce_sum", "softmax", "permute"])
def test_an_error_beyond_the_contract_is_seen(name: str) -> None:
    right = [r for r in measured(spoiled(1.0), [OPS[name]]) if r.dtype == "float32"]
    wrong = [r for r in measured(spoiled(1 + 1e-3), [OPS[name]]) if r.dtype == "float32"]
    assert not right[0].wrong
    assert "is allowed" in wrong[0].wrong
    assert wrong[0].cell == "wrong"


def test_a_dtype_that_a_device_does_not_have_is_refused_and_not_wrong() -> None:
    right = spoiled(1.0)

    def narrow(graph: Graph, arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        if any(t.dtype is td.float64 for n in graph.nodes for t in n.types):
            raise td.DTypeError("narrow", "there is no float64", "Use float32.")
        return right(graph, arrays)

    rows = list(measured(narrow, [OPS["exp"]]))
    assert {r.dtype: r.cell for r in rows if r.cell == "refused"} == {"float64": "refused"}
    assert [r.wrong for r in rows if r.wrong] == []
    assert "1 refused, as the device does not have their dtypes; all within" in summary(rows, "x")
    assert summary(rows[:1], "x").endswith("nothing to compare")

    def broken(graph: Graph, arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        raise td.DeviceError("broken", "it is lost", "")

    assert all(r.wrong == "refused: it is lost" for r in measured(broken, [OPS["exp"]]))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--only", "tanh,not"]) == 0
    assert "| `tanh` | 4 ulp |" in capsys.readouterr().out
    assert main(["conformance", "--only", "neg", "--json", "--device", "oracle"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == "oracle"
    assert {row["op"] for row in facts["rows"]} == {"neg"}
    assert main(["conformance", "--only", "nothing"]) == 1


@pytest.mark.parametrize("name", ["parameter", "tanhh", "nothing"])
def test_an_op_that_computes_nothing_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--only", f"exp,{name}"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"no op {name}" in told.err
    assert ("Did you mean tanh" in told.err) is (name == "tanhh")


def test_every_op_is_measured_in_some_dtype() -> None:
    assert [op.name for op in COMPUTED if not taken(op)] == []


def test_the_page_has_the_rows_of_the_table() -> None:
    found = conformance_page.cells(conformance_page.PAGE.read_text(encoding="utf-8"))
    assert "cpu" in found
    wanted = {
        op.name: [str(op.contract.error), *sorted(d.name for d in taken(op))] for op in COMPUTED
    }
    for device, rows in found.items():
        named = {name: [row[0], *sorted(row[1:])] for name, row in rows.items()}
        assert named == wanted, f"run tools/conformance_page.py ({device})"
