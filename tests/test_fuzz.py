"""`treadle fuzz`: what is drawn, how it is judged, made small, printed, and run in processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle.base import dtypes
from treadle.cli.main import main
from treadle.domains.float64 import MEANING, Float64
from treadle.fuzz import judge as judging
from treadle.fuzz.campaign import Finding, Plan, Tally, read_corpus, run, write_corpus
from treadle.fuzz.cases import FunctionCase, TrainingCase
from treadle.fuzz.chooser import Chooser
from treadle.fuzz.forms import FORMS, Form
from treadle.fuzz.generate import LANES, Maker, evaluated, families, generate, targets
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
@pytest.mark.parametrize("target", ["native", *LANES])
def test_the_corpus_is_right(name: str, target: str) -> None:
    verdict = judge(replace(read_corpus(CORPUS)[name], target=target))
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


def test_programs_are_for_every_target_or_for_the_one_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TREADLE_TARGET", raising=False)
    assert {generate(11, index, ("unary",)).target for index in range(80)} == {*targets()}
    assert {"native", *LANES} <= {*targets()}
    monkeypatch.setenv("TREADLE_TARGET", "4")
    assert targets() == ("native",)


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
    if form.is_layer:
        maker.steps.append(Step("v1", "training_loss_pair.mse", ("v0", "v0")))
    trained = tuple(replace(i, is_parameter=i.is_float) for i in inputs)
    loss = (maker.steps[-1].name,)
    return Program(trained, tuple(maker.steps), loss, TRAINING, Training()).trimmed()


def ops_of(program: Program) -> set[str]:
    """The ops of a program's graph; of the gradient too, where it has one."""
    if program.mode == TRAINING:
        return {node.op.name for node in TrainingCase(program).graph.nodes}
    values = evaluated(program)
    is_smooth = any(values[o].dtype.kind == "f" for o in program.outputs)
    modes = (FORWARD, GRADIENT) if is_smooth else (FORWARD,)
    graphs = [FunctionCase(replace(program, mode=mode)).graph for mode in modes]
    return {node.op.name for graph in graphs for node in graph.nodes}


@pytest.mark.filterwarnings("ignore::treadle.UnreachedWarning")
def test_every_form_is_chosen_and_they_are_made_of_every_op() -> None:
    used = set().union(*(ops_of(made_of(form)) for form in FORMS.values()))
    # A sum over shards is made by data-parallel steps alone.
    wanted = {op.name for op in OPS.values() if op not in NAMED_LEAVES} - {"shard_sum"}
    assert not wanted - used


# How programs are judged


class Fixed:
    """A case whose results are given: the oracle's, and those of each run on the device."""

    names, types = ("y",), (TensorType((2,)),)

    def __init__(self, exact: list[float], *runs: list[float]):
        self.values, self.runs = np.array(exact), [np.array(r, np.float32) for r in runs]

    def exact(self, domain: Float64) -> list[np.ndarray]:
        return [self.values]

    def on(self, device: str, threads: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        if not self.runs:
            raise td.ShapeError("sum", "it does not fit", "Make it.")
        return [self.runs[2 * threads - 2]], [self.runs[2 * threads - 1]]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        (Fixed([1, 2], [1, 2], [1, 2], [1, 2], [1, 2]), RIGHT, ""),
        (Fixed([1, 2], [1, 2], [1, 2.001], [1, 2], [1, 2]), WRONG, "y: 2.0"),
        (Fixed([1, 2], [1, 2], [1, np.nan], [1, 2], [1, 2]), WRONG, "y: nan"),
        (Fixed([1, 2], [1, 2], [1, 2], [1, 2.0000002], [1, 2]), UNSTEADY, "2 threads, call 1"),
        (Fixed([1, 2], [1, 2], [1, 2.0000002], [1, 2], [1, 2]), UNSTEADY, "1 threads, call 2"),
        (Fixed([1, np.inf]), SKIPPED, "too large"),
        (Fixed([1, 2]), REFUSED, "by cpu with 1 threads: ShapeError: it does not fit"),
    ],
)
def test_verdicts(case: Fixed, kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "prepared", lambda program: case)
    verdict = judge(replace(program_of("unary.tanh", (2,)), threads=(1, 2)))
    assert verdict.kind == kind
    assert text in verdict.text


def test_what_the_oracle_refuses_is_said_to_be() -> None:
    verdict = judge(program_of("reduce.sum", (2,), axis=(4,), keepdims=False))
    assert verdict.kind == REFUSED
    assert verdict.text.startswith("by the oracle: AxisError")


def test_masks_do_not_hide_what_rounding_does() -> None:
    def masked(x):
        return td.softmax(td.where(td.tril(td.ones((4, 4))) > 0, x, -np.inf)) @ x

    graph = td.trace(masked, td.Spec((4, 4)))
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    (bound,) = allowed(graph, {"x": x})
    assert np.isfinite(bound).all()
    assert (bound[1:] > 1e-6).all()


def test_what_noise_decides_may_be_anything() -> None:
    graph = td.trace(lambda x: td.argmax(td.exp(x), 1), td.Spec((2, 2)))
    (bound,) = allowed(graph, {"x": np.array([[1, 1 + 1e-9], [1, 2]])})
    assert bound.tolist() == [np.inf, 0]
    type_ = TensorType((2,), dtypes.int32)
    exact = np.array([1, 1], np.int32)
    assert complaint(np.array([0, 1], np.int32), exact, type_, bound) is None
    assert complaint(np.array([1, 0], np.int32), exact, type_, bound) == "0 at [1] is not 1"


# Defects are found and made small


def first_finding(seed: int, only: tuple[str, ...]) -> Program:
    for index in range(60):
        program = generate(seed, index, only)
        if judge(program).kind == WRONG:
            return program
    raise AssertionError("nothing was found")


def is_wrong(program: Program) -> bool:
    return judge(program).kind == WRONG


def test_a_defect_is_found_and_shrunk_to_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's tanh is off by a thousandth: the device is then wrong wherever there is one."""
    monkeypatch.setitem(MEANING._entries, TANH, lambda x: np.tanh(x) * 1.001)
    found = first_finding(1, ("unary", "pair", "scan"))
    small = shrink(found, is_wrong)
    assert len(small.steps) == 1
    assert "tanh" in FORMS[small.steps[0].form].text
    assert small.mode == FORWARD
    assert small.threads == (1,)
    assert sum(np.prod(i.shape) for i in small.inputs) <= 16
    assert is_wrong(small)


def test_a_defect_of_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(
        (Input("x0", (5, 3), "float32"),),
        (
            Step("v0", "layer.Linear", ("x0",), {"width": 3, "out": 4}),
            Step("v1", "unary.tanh", ("v0",)),
            Step("v2", "training_loss_own.square", ("v1",)),
        ),
        ("v2",),
        TRAINING,
        Training("optim.adam(0.01)", 3, 0.1),
    )
    assert judge(program).kind == RIGHT
    monkeypatch.setitem(MEANING._entries, TANH, lambda x: np.tanh(x) * 1.001)
    small = shrink(program, is_wrong)
    assert is_wrong(small)
    assert small.mode == FORWARD
    assert [s.form for s in small.steps] == ["unary.tanh"]


def uses(form: str) -> Callable[[Program], bool]:
    return lambda program: any(step.form == form for step in program.steps)


@pytest.mark.parametrize("form", ["reduce.logsumexp", "sort.values", "conv.plain", "scan.rnn"])
def test_programs_are_shrunk_to_what_fails(form: str) -> None:
    family = FORMS[form].family
    found = (generate(2, index, (family,)) for index in range(200))
    program = next(p for p in found if uses(form)(p) and len(p.steps) > 2 and p.mode != TRAINING)
    small = shrink(program, uses(form))
    assert [step.form for step in small.steps] == [form]
    assert small.mode == FORWARD
    assert small.inputs[0].dtype == "float32"
    assert sum(np.prod(i.shape) for i in small.inputs) <= 40
    assert shrink(small, uses(form)) == small


def test_shrinking_asks_no_more_than_it_may() -> None:
    asked: list[Program] = []
    program = generate(2, 3, ("reduce",), TRAINING)
    assert shrink(program, lambda p: bool(asked.append(p)), most=7) == program
    assert 0 < len(asked) <= 7


# Scripts


SCRIPTED = {
    "forward": program_of("reduce.logsumexp", (33, 3), axis=(1,), keepdims=False),
    "gradient": program_of("softmax.plain", (5, 7), GRADIENT, axis=0),
    "training": Program(
        (Input("x0", (9, 3), "float32"), Input("x1", (3,), "float32", is_parameter=True)),
        (
            Step("v0", "layer.Linear", ("x0",), {"width": 3, "out": 3}),
            Step("v1", "pair.mul", ("v0", "x1")),
            Step("v2", "training_loss_own.square", ("v1",)),
        ),
        ("v2",),
        TRAINING,
        Training("optim.adam(0.01)", 2, 0.5, "bfloat16"),
    ),
}


@pytest.mark.parametrize("mode", SCRIPTED)
def test_scripts_run_by_themselves(mode: str, tmp_path: Path) -> None:
    """All in one process: what is allowed decides whether they exit with 1."""
    program, outcome = SCRIPTED[mode], {}
    bound = 0.5 if mode == "training" else None
    texts = {
        "right": script(program, "cpu", "about", bound),
        "wrong": script(program, "cpu", "about", 1e-30),
        "bits": script(replace(program, threads=(1, 2)), "cpu", "about", steady=False),
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        runner = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
        with pytest.raises(SystemExit) as exited:
            exec(runner, {})
        outcome[name] = bool(exited.value.code)
    assert outcome == {"right": False, "wrong": True, "bits": False}


# Processes


@pytest.fixture
def worker(tmp_path: Path):
    with Worker("cpu", str(tmp_path), longest=60) as worker:
        yield worker


def trained_by(optimizer: str) -> Program:
    return replace(SCRIPTED["training"], training=Training(optimizer, 1))


def test_crashes_and_hangs_are_findings(worker: Worker) -> None:
    assert worker.judge(SCRIPTED["forward"]).kind == RIGHT
    aborted = worker.judge(trained_by("__import__('os').abort()"))
    assert aborted.kind == CRASH
    assert aborted.text.startswith("SIGABRT")
    assert worker.judge(SCRIPTED["gradient"]).kind == RIGHT  # another process
    worker.longest = 0.3
    assert worker.judge(trained_by("__import__('time').sleep(100)")).kind == HANG


def test_a_campaign_counts_its_cases() -> None:
    heard: list[int] = []

    def told(tally: Tally, found: Finding | None) -> None:
        heard.append(tally.tried)

    tally = run(Plan(seed=5, cases=4, processes=2, only=("unary", "move")), told)
    assert (tally.tried, tally.findings) == (4, [])
    assert heard == [1, 2, 3, 4]
    assert run(Plan(seed=5, seconds=0.0)).tried == 0


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["fuzz", "--cases", "2", "--seed", "4", "--only", "unary", "--processes", "1"]
    assert main([*line, "--corpus", str(tmp_path)]) == 0
    assert "seed 4 on cpu: 2 cases, 0 skipped, 0 found" in capsys.readouterr().out


def test_what_the_command_finds_is_shrunk_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = Program(
        (Input("x0", (1,), "float32", is_parameter=True),),
        (Step("v0", "unary.half", ("x0",)), Step("v1", "training_loss_pair.mse", ("v0", "x0"))),
        ("v1",),
        TRAINING,
        Training("__import__('os').abort()", 1),
    )
    write_corpus(tmp_path, program)
    assert main(["fuzz", "--cases", "0", "--corpus", str(tmp_path), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    (found,) = facts["findings"]
    assert (facts["cases"], found["kind"]) == (0, CRASH)
    small = from_json(found["program"])
    assert [step.form for step in small.steps] == ["training_loss_pair.mse"]
    assert small in read_corpus(tmp_path).values()
    compile(found["script"], "script", "exec")


@pytest.mark.parametrize("wrong", ["7", "7:x", ":3", "a:b"])
def test_wrong_usage(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["fuzz", "--replay", wrong])
    assert exited.value.code == 2
    assert "SEED:INDEX" in capsys.readouterr().err


def test_families_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--only", "unary,nothing"]) == 1
    assert "no family nothing" in capsys.readouterr().err
