"""The zoo's entries: both sides of each are the same model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import treadle as td
from treadle import optim

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from families import ZOO, with_torch, with_treadle


def twins(entry, sizes):
    ours, theirs = (entry.make(side, **sizes) for side in (with_treadle, with_torch))
    return ours, theirs


@pytest.mark.parametrize("name", ZOO)
def test_twins_have_the_same_parameters(name):
    entry = ZOO[name]
    ours, theirs = twins(entry, entry.cpu)
    found = {n: np.shape(v) for n, v in ours.init(0).items()}
    expected = {n: tuple(v.shape) for n, v in theirs.state_dict().items()}
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_twins_have_the_same_losses(name):
    """Three steps of AdamW from equal weights."""
    entry = ZOO[name]
    ours, theirs = twins(entry, entry.cpu)
    batch = entry.arrays("cpu")
    specs = {n: td.Spec(a.shape, getattr(td, a.dtype.name)) for n, a in batch.items()}
    step = td.compile_step(
        ours, lambda m, b: m(b), optim.adamw(1e-3, weight_decay=0.01), specs, device="cpu"
    )
    theirs.load_state_dict({n: torch.tensor(v) for n, v in ours.init(0).items()})
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3)
    tensors = {n: torch.tensor(a) for n, a in batch.items()}
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(tensors)
        loss.backward()
        optimizer.step()
        assert float(step(batch).loss) == pytest.approx(loss.item(), rel=1e-3)
