"""Graphs and programs of three models as text. `TREADLE_SNAPSHOTS=write` writes them anew."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

import treadle as td
from models import block_specs, cnn_loss, cnn_specs, gpt_block, mlp_loss, mlp_specs
from treadle.autodiff.backward import differentiate
from treadle.ir.parse import parse
from treadle.ir.text import to_text
from treadle.ir.verify import verify
from treadle.kernel.text import program_text
from treadle.schedule.schedule import CPU, GPU, Target, schedule

FOLDER = Path(__file__).parent / "snapshots"


def block_loss(params, x):
    return (gpt_block(x, params, heads=2) ** 2).mean()


MODELS = {
    "mlp": (mlp_loss, mlp_specs()),
    "cnn": (cnn_loss, cnn_specs()),
    "transformer_block": (block_loss, (block_specs(8), td.Spec((2, 4, 8)))),
}


@pytest.mark.parametrize("name", MODELS)
def test_snapshot(name: str) -> None:
    function, specs = MODELS[name]
    traced = verify(td.trace(partial(function), *specs, name=name))
    wrt = [n for n in traced.leaves if n.startswith(("arg0", "params"))]
    both = verify(differentiate(traced, wrt).graph)
    text = f"{to_text(traced, origins=True)}\n\n{to_text(both, origins=True)}\n"
    assert parse(to_text(both)) == both
    assert_is(text, FOLDER / f"{name}.txt")


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda target: target.name)
@pytest.mark.parametrize("name", MODELS)
def test_program_snapshot(name: str, target: Target) -> None:
    function, specs = MODELS[name]
    traced = td.trace(partial(function), *specs, name=name)
    wrt = [n for n in traced.leaves if n.startswith(("arg0", "params"))]
    program = schedule(differentiate(traced, wrt).graph, target=target)
    assert_is(program_text(program), FOLDER / f"{name}.{target.name}.txt")


def assert_is(text: str, path: Path) -> None:
    if os.environ.get("TREADLE_SNAPSHOTS") == "write":
        path.write_text(text)
    assert text == path.read_text()
