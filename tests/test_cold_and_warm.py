"""What comes from the plan cache gives what was compiled: values, dtypes, shapes and bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from conftest import TWICE
from constant_programs import PROGRAMS, SPEC, Results, X, constants, functions, steps, values_of
from treadle import nn, optim
from treadle.backends import stored
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.records import from_json, to_json
from treadle.ir.types import TensorType
from treadle.kernel.plan import PlannedConstant
from treadle.memory import assemble
from twice import Twins, assert_same
from webgpu_backend import needs_adapter

LINE = np.linspace(0, 1, 5, dtype=np.float32)


def assert_equal(found: Results, again: Results) -> None:
    assert list(found) == list(again)
    assert_same(list(found.values()), list(again.values()))


# Results that are constants


def test_a_constant_keeps_its_dtype() -> None:
    for _ in range(2):
        program = td.compile(lambda x: td.linspace(0.0, 1.0, 5), td.Spec((2,)), device="cpu")
        found = program(np.zeros(2, np.float32))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, LINE, rtol=1e-6)
    assert program.report.cache_hits == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_compile_gives_the_same(name: str) -> None:
    assert_equal(PROGRAMS[name]("cpu"), PROGRAMS[name]("cpu"))


@needs_adapter
@pytest.mark.parametrize("name", ["functions", "constants"])
def test_a_second_compile_gives_the_same_with_webgpu(name: str) -> None:
    assert_equal(PROGRAMS[name]("webgpu"), PROGRAMS[name]("webgpu"))


def test_constants_are_what_was_written() -> None:
    for _ in range(2):
        for name, found in constants("cpu").items():
            dtype, _, shape = name.partition(" ")
            expected = values_of(
                dtypes.BY_NAME[dtype], tuple(json.loads(f"[{shape[1:-1].rstrip(',')}]"))
            )
            assert_same([found], [expected])


def test_functions_are_what_pytorch_gives() -> None:
    weights = torch.tensor([0.5, 2.0, -1.0, 4.0])
    for _ in range(2):
        found = functions("cpu")
        np.testing.assert_allclose(found["several.line"], LINE, rtol=1e-6)
        np.testing.assert_allclose(found["several.again"], LINE, rtol=1e-6)
        np.testing.assert_allclose(found["several.rows"], LINE[None], rtol=1e-6)
        assert_same([found["several.x"], found["gradient"]], [X, weights.numpy()])
        assert_same([found["both.0"]], [(torch.tensor(X) * weights).sum().numpy()])


def test_steps_give_their_numbers() -> None:
    for _ in range(2):
        found = steps("cpu")
        np.testing.assert_allclose(found["attach"], LINE, rtol=1e-6)
        np.testing.assert_allclose(found["metrics.rate"], 0.3, rtol=1e-6)
        np.testing.assert_allclose(found["evaluated.rate"], 0.3, rtol=1e-6)
        assert_same([found["captures.halves"]], [np.full((2, 2), 0.5, np.float32)])
        assert_same([found["gradients.fc.bias"]], [np.full(2, 3, np.float32)])


@pytest.mark.parametrize("dtype", dtypes.EVERY.values(), ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2), (1,)])
def test_constants_of_every_dtype_are_stored_with_their_type(
    dtype: DType, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype.numpy).reshape(shape)
    constant = assemble._constant("c", 3, array)
    assert constant == from_json(PlannedConstant, to_json(constant))
    assert constant.type == TensorType(shape, dtype)
    data = array.tobytes()
    assert_same([stored._array(data, constant.type)], [array])
    for wrong in [data + b"\0", *([data[:-1]] if data else [])]:
        with pytest.raises(ValueError, match="size"):
            stored._array(wrong, constant.type)


# Another process

FRESH = """
import json, sys
sys.path.insert(0, {tests!r})
from constant_programs import PROGRAMS
from treadle.backends.cpu import backend as cpu

def refuse(*_):
    raise AssertionError("nothing is compiled")

cpu.compile_object = cpu.render_program = cpu.schedule = refuse
found = {{f"{{n}} {{k}}": v for n, p in PROGRAMS.items() for k, v in p("cpu").items()}}
print(json.dumps({{k: [str(v.dtype), v.shape, v.tobytes().hex()] for k, v in found.items()}}))
"""


def test_another_process_gives_the_same() -> None:
    here = {f"{n} {k}": v for n, p in PROGRAMS.items() for k, v in p("cpu").items()}
    expected = {k: [str(v.dtype), list(v.shape), v.tobytes().hex()] for k, v in here.items()}
    script = FRESH.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


# The fixture by which the programs of whole modules run a second time


def test_every_module_that_is_to_run_twice_does() -> None:
    tests = [f"{Path(__file__).parent / name}.py::{test}" for name, test in TWICE.items()]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^(\w+): (\d+) calls again", done.stdout, re.MULTILINE)
    assert {name for name, calls in found if int(calls)} == set(TWICE), done.stdout


def compiled_scale() -> Any:
    scale = float(np.random.default_rng().random())  # a program that no cache has
    return td.compile(lambda x: (x * scale, td.linspace(0.0, scale, 5)), SPEC, device="cpu")


def test_what_is_compiled_runs_a_second_time(twins: Twins) -> None:
    before = twins.programs, twins.calls
    program = compiled_scale()
    program(X)
    program(X)
    assert (twins.programs, twins.calls) == (before[0] + 1, before[1] + 2)

    model, batch = nn.Linear(4, 2), {"x": np.ones((3, 4), np.float32)}
    rate = float(np.random.default_rng().random())
    step = td.compile_step(
        model, lambda m, b: (m(b["x"]) ** 2).mean() * rate, optim.adam(0.1), batch, device="cpu"
    )
    before = twins.programs, twins.calls
    step(batch)
    step.run([batch] * 3)
    step.gradients(batch)
    step.evaluate(batch)
    assert twins.programs >= before[0] + 2
    assert twins.calls >= before[1] + 6


def bytes_alone(data: bytes, type_: TensorType) -> np.ndarray:
    return np.frombuffer(data, np.uint8).view(np.int32).reshape(type_.shape)


def zeros(data: bytes, type_: TensorType) -> np.ndarray:
    return np.zeros(type_.shape, type_.dtype.numpy)


@pytest.mark.parametrize("made", [zeros])
def test_what_differs_from_the_cache_is_an_error(
    made: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_array", made)
    program = compiled_scale()
    with pytest.raises(AssertionError, match="from the cache"):
        program(X)


def test_what_does_not_come_from_the_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_array", bytes_alone)  # an entry that is refused
    with pytest.raises(AssertionError, match="did not come from the plan cache"):
        compiled_scale()
