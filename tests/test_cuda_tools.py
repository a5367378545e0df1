"""What the tools for a device say of what they find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import treadle as td

TOOLS = Path(__file__).parent.parent / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([[["a", "a"], ["a", "a"]]] * 2, "the same"),
        ([[["a", "b"], ["a", "a"]], [["a", "a"], ["a", "a"]]], "differs from call to call"),
        ([[["a", "a"], ["b", "b"]]] * 2, "differs after another compilation"),
        ([[["a", "a"], ["a", "a"]], [["b", "b"], ["b", "b"]]], "differs in another process"),
        ([[["a", "a"], ["a", "a"]], "DeviceError: no"], "FAILED: DeviceError: no"),
        ([[["a", "a"], ["a", "a"]], None], "FAILED: the process ended"),
    ],
)
def test_how_far_bits_agree(found: list, said: str) -> None:
    assert tool("device_repeat").verdict(found) == said


def test_bits_of_a_program_on_the_processor() -> None:
    repeat = tool("device_repeat")
    x = np.ones((3, 4), np.float32)
    repeat.PROGRAMS["a sum"] = lambda rng: (lambda x: [x.sum(0), x * 2], [x])
    (first, second) = repeat.bits_of_program("a sum", "cpu", td.CompileOptions())
    assert len(set(first)) == 1
    assert first == second


def test_a_program_that_is_wrong_or_raises_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    churn = tool("device_churn")
    found = churn.Churn("cpu", seed=3)
    for number in range(len(churn.FAMILIES)):
        found.program(number)
    assert not found.trouble
    assert sum(found.done.values()) == len(churn.FAMILIES)
    monkeypatch.setattr(churn, "CLOSE", -1.0)
    found.program(0)
    (told,) = found.trouble
    assert "rows: ArithmeticError: case 0" in told
    with found.noting("cnn"):
        raise ValueError("no")
    assert found.trouble["cnn: ValueError: no"] == 1
