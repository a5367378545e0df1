"""The cases of ONNX's operators: on the oracle, and on the CPU as compiled and from the plan cache.

What the CPU compiles is loaded again from the plan cache and gives the same bits: `twice.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import VARIABLE
from onnx_cases import (
    DIFFERENT,
    OTHER_TYPES,
    OTHER_VALUES,
    PASSED,
    REFUSED,
    counted,
    every_case,
    outcome,
    some_cases,
)
from twice import Twins

PARTS = 8
# Every outcome but PASSED: refused by name, or listed as different.
NAMED = {OTHER_VALUES, OTHER_TYPES, *REFUSED.values(), *(why for _, why in DIFFERENT.values())}


def test_some_cases() -> None:
    found = Counter(result for _, result in counted(some_cases()))
    assert found[PASSED] > 150, found


def compiled(
    cases: Sequence[Any], twins: Twins, folder: Path, patch: pytest.MonkeyPatch
) -> Counter[str]:
    """Outcomes on the CPU, each case with an empty plan cache."""
    found: Counter[str] = Counter()
    for case in cases:
        patch.setenv(VARIABLE, str(folder / case.name))
        before = twins.calls
        result = outcome(case, "cpu")
        found[result] += 1
        assert result != PASSED or twins.calls > before, f"{case.name} did not run a second time"
    return found


def test_some_cases_compiled_and_from_the_cache(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled(some_cases()[::8], twins, tmp_path, monkeypatch)
    assert found[PASSED] > 15, found


@pytest.mark.slow
def test_every_case() -> None:
    found = Counter(result for _, result in counted(every_case()))
    assert set(found) == {PASSED, *NAMED}, found
    assert found[PASSED] >= 1534, found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_compiled_and_from_the_cache(
    part: int, twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled(every_case()[part::PARTS], twins, tmp_path, monkeypatch)
    assert set(found) <= {PASSED, *NAMED}, found
    assert found[PASSED] >= 1440 // PARTS, found
