"""PyTorch's own database of modules: values and gradients of inputs and parameters, compiled twice.

Each module agrees, or differs in a way that `differences.toml` lists.
"""

from __future__ import annotations

import pytest
from peer_differences import DIFFERENCES, unlisted
from peer_modules import examine, is_absent, names

PRESENT = [n for n in names() if not is_absent(n)]
QUICK = (
    "nn.BatchNorm1d",
    "nn.Conv1d",
    "nn.GroupNorm",
    "nn.Linear",
    "nn.CrossEntropyLoss",
    "nn.RNNCell",
)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PRESENT]
)
def test_modules_agree_or_are_listed(name: str) -> None:
    assert not unlisted(name, examine(name))


def test_absent_modules_are_listed_and_absent() -> None:
    listed = {n for d in DIFFERENCES if "absent" in d.kinds for n in d.operators}
    assert set(names()) - set(PRESENT) == {n for n in listed if n in names()}
