"""`treadle fuzz`: what is drawn, how it is judged, made small, printed, and run in processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes
from treadle.cli.main import main
from treadle.domains.float64 import MEANING, Float64
from treadle.fuzz import judge as judging
from treadle.fuzz.campaign import Finding, Plan, Tally, examine, read_corpus, run, write_corpus
from treadle.fuzz.cases import FunctionCase, TrainingCase
from treadle.fuzz.chooser import Chooser
from treadle.fuzz.forms import FORMS, Form
from treadle.fuzz.generate import Maker, evaluated, families, generate
from treadle.fuzz.judge import CRASH, HANG, REFUSED, RIGHT, SKIPPED, UNSTEADY, WRONG, judge
from treadle.fuzz.program import (
    FORWARD,
    GRADIENT,
    TRAINING,
    Input,
    Program,
    Step,
    Training,
    from_json,
    to_json,
)
from treadle.fuzz.shrink import shrink
from treadle.fuzz.source import definitions, script
from treadle.fuzz.worker import Worker
from treadle.ir.op import OPS
from treadle.ir.ops.elementwise import TANH
from treadle.ir.ops.leaves import NAMED_LEAVES
from treadle.ir.types import TensorType
from treadle.verify.bounds import allowed, complaint

CORPUS = Path(__file__).parent / "corpus"


def program_of(form: str, shape: tuple[int, ...], mode: str = FORWARD, **attributes) -> Program:
    """One step on one input."""
    step = Step("v0", form, ("x0",), attributes)
    return Program((Input("x0", shape, "float32"),), (step,), ("v0",), mode)


# The corpus: programs that were once wrong, and must never be again


@pytest.mark.parametrize("name", read_corpus(CORPUS))
def test_the_corpus_is_right(name: str) -> None:
    verdict = judge(read_corpus(CORPUS)[name])
    assert verdict.kind == RIGHT, verdict.text


def test_a_corpus_is_written_and_read(tmp_path: Path) -> None:
    program = generate(3, 7)
    path = write_corpus(tmp_path, program)
    assert read_corpus(tmp_path) == {path.name: program}
    path.write_text('{"inputs": []}')
    with pytest.raises(td.LoadError, match="is no program"):
        read_corpus(tmp_path)


# What is drawn


def test_programs_are_data() -> None:
    modes = set()
    for index in range(60):
        program = generate(11, index)
        assert from_json(json.loads(json.dumps(to_json(program)))) == program
        compile(definitions(program), "program", "exec")
        modes.add(program.mode)
    assert modes == {FORWARD, GRADIENT, TRAINING}
    assert generate(11, 5) == generate(11, 5) != generate(12, 5)


def test_the_families_of_what_went_wrong_before_are_there() -> None:
    wanted = "unary pair reduce reduce_permuted reduce_broadcast reduce_twice reduce_thrice softmax"
    wanted += " norm norm_by_hand batch_norm attention attention_by_hand conv max_pool avg_pool"
    wanted += (
        " cumsum sort take take_along_axis scatter_add embedding getitem move slice pad concat"
    )
    wanted += " dynamic einsum einsum_pair einsum_three linear matmul scan loss_rows loss_mean"
    wanted += " loss_pair loss_head compound compound_matrix"
    assert not set(wanted.split()) - set(families())


def made_of(form: Form) -> Program:
    """A program that begins with a form; layers and losses are trained, functions differentiated."""
    is_trained = form.is_layer or form.is_loss
    maker = Maker(Chooser(np.random.default_rng(0), is_model=is_trained))
    for _ in range(5):
        if maker.add([form]):
            break
    else:
        raise AssertionError(f"{form.name} is never chosen")
    inputs = tuple(maker.choose.inputs)
    if not is_trained:
        return Program(inputs, tuple(maker.steps), maker.sinks()).trimmed()
    if not form.is_loss:
        assert maker.add([FORMS["training_loss_pair.mse"]])
    last = Program(inputs, tuple(maker.steps), maker.sinks(), TRAINING, Training())
    floats = tuple(replace(i, is_parameter=i.is_float) for i in maker.choose.inputs)
    return replace(last, inputs=floats).trimmed()


def ops_of(program: Program) -> set[str]:
    if program.mode == TRAINING:
        return {node.op.name for node in TrainingCase(program).graph.nodes}
    graph = FunctionCase(program).graph
    wrt = [n for n, i in graph.leaves.items() if graph.nodes[i].types[0].is_float]
    floats = [o for o, t in zip(graph.outputs, graph.output_types, strict=True) if t.is_float]
    scalar = (
        td.trace(
            lambda *given: sum(
                td.sum(y) for y in FunctionCase(program).function(*given) if y.dtype.is_float
            ),
            *FunctionCase(program).arguments,
        )
        if wrt and floats
        else graph
    )
    names = [n for n, i in scalar.leaves.items() if scalar.nodes[i].types[0].is_float]
    both = differentiate(scalar, names).graph if wrt and floats else graph
    return {node.op.name for node in both.nodes} | {node.op.name for node in graph.nodes}


@pytest.mark.filterwarnings("ignore::treadle.UnreachedWarning")
def test_every_form_is_chosen_and_they_are_made_of_every_op() -> None:
    used = set().union(*(ops_of(made_of(form)) for form in FORMS.values()))
    wanted = {op.name for op in OPS.values() if op not in NAMED_LEAVES}
    assert not wanted - used
