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

QUICK = ("pinn", "dqn", "lora")  # second derivatives, frozen parameters of two kinds
EVERY = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ZOO]


def twins(entry, sizes):
    ours, theirs = (entry.make(side, **sizes) for side in (with_treadle, with_torch))
    return ours, theirs


def specs_of(batch):
    return {n: td.Spec(a.shape, getattr(td, a.dtype.name)) for n, a in batch.items()}


def test_there_are_many_families():
    assert len(ZOO) >= 30
    assert all(entry.cpu.keys() == entry.gpu.keys() for entry in ZOO.values())


@pytest.mark.parametrize("name", ZOO)
def test_twins_have_the_same_parameters(name):
    entry = ZOO[name]
    ours, theirs = twins(entry, entry.cpu)
    found = {n: d.shape for n, d in ours.declarations().items()}
    expected = {n: tuple(v.shape) for n, v in theirs.state_dict().items()}
    assert found == expected
    trained = {n for n, p in ours.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in theirs.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", EVERY)
def test_twins_have_the_same_losses(name):
    """Three steps of AdamW from equal weights; what is frozen stays."""
    entry = ZOO[name]
    ours, theirs = twins(entry, entry.cpu)
    batch, first = entry.arrays("cpu"), ours.init(0)
    step = td.compile_step(
        ours, lambda m, b: m(b), optim.adamw(1e-3, weight_decay=0.01), specs_of(batch), device="cpu"
    )
    theirs.load_state_dict({n: torch.tensor(v) for n, v in first.items()})
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3)
    tensors = {n: torch.tensor(a) for n, a in batch.items()}
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(tensors)
        loss.backward()
        optimizer.step()
        assert float(step(batch).loss) == pytest.approx(loss.item(), rel=1e-3)
    frozen = [n for n, p in ours.named_parameters() if not p.requires_grad]
    assert all(np.array_equal(step.params[n], first[n]) for n in frozen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_sizes_for_a_gpu_fit(name):
    """Nothing is computed: shapes alone."""
    entry = ZOO[name]
    batch = entry.arrays("cuda")
    small = entry.arrays("cpu")
    assert {n: (a.ndim, a.dtype) for n, a in batch.items()} == {
        n: (a.ndim, a.dtype) for n, a in small.items()
    }
    model = entry.make(with_treadle, **entry.gpu)
    values = {n: td.Spec(d.shape) for n, d in model.declarations().items()}
    graph = td.trace(lambda v, b: model.apply(v, b, training=True), values, specs_of(batch))
    assert graph.type_of(graph.outputs[0].value).shape == ()
