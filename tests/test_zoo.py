"""The zoo's entries: both sides of each are the same model. Its results, and the page of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import performance_page
import treadle as td
from treadle import optim

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from families import ZOO, with_torch, with_treadle
from turns import Unable, Worker
from zoo_rows import added, stored, summary

BENCH = Path(__file__).parents[1] / "bench"
QUICK = ("pinn", "dqn")  # second derivatives, frozen parameters
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


def row(workload, ratio, device="cpu", **others):
    """A result as bench/zoo.py writes it."""
    ours = {"ms": 10 * ratio, "first_s": 2.0, "steps_mib": 30.0, "values": [1.0]}
    theirs = {"ms": 10.0, "first_s": 8.0, "steps_mib": 60.0, "values": [1.0]}
    facts = {"target": "native", "threads": 2, "clock": "perf_counter", "rounds": 3, "together": 1}
    return {
        "workload": workload, "device": device, "agree": True, "is_rough": False,
        "ratio": ratio, "best_peer": "eager", "processor": "a processor", "versions": {},
        "ratios": {"eager": {"median": ratio, "low": ratio, "high": ratio}},
        "contenders": {"treadle": ours, "eager": theirs},
    } | facts | others  # fmt: skip


def test_results_add_up(tmp_path):
    path = tmp_path / "zoo.json"
    added(path, row("gru", 0.9), row("vit", 0.5))
    added(path, row("gru", 1.25))
    added(path, row("gru", 0.8, "cuda"))
    rows = [r for r in stored(path) if r["device"] == "cpu"]
    facts = summary(rows)
    assert {r["workload"]: r["ratio"] for r in rows} == {"vit": 0.5, "gru": 1.25}
    assert facts["ratio"] == pytest.approx(0.625**0.5)
    assert (facts["worst"], facts["slower"]) == ("gru", ["gru"])
    assert (facts["first_s"], facts["first_peer_s"]) == (pytest.approx(2), pytest.approx(8))
    assert facts["memory"] == pytest.approx(0.5)


def test_a_page_says_what_is_slower_and_what_is_missing():
    rows = [row("gru", 1.25), row("vit", 0.5)]
    rows[1]["contenders"]["compile"] = {"error": "compile was not ready after 150 s"}
    found = performance_page.sections([*rows, row("no longer there", 2.0)])
    text = performance_page.text(found)
    assert "**Slower than a peer: GRU 1.25.**" in text
    assert "compile not ready in time for ViT" in text
    assert "On a GPU: not measured yet." in text
    drawn = performance_page.picture(found[0])
    assert drawn.count(performance_page.SLOWER) == 1
    assert drawn.index("GRU") < drawn.index("ViT")


def test_the_page_is_up_to_date():
    found = performance_page.sections(stored(performance_page.RESULTS))
    text = performance_page.PAGE.read_text(encoding="utf-8")
    assert performance_page.page(text, found) == text, "run tools/performance_page.py"
    for section in found:
        path = performance_page.PICTURES / section.picture
        assert path.read_text(encoding="utf-8") == performance_page.picture(section)


def test_a_contender_that_is_not_ready_in_time_is_left_out():
    worker = Worker("zoo_peers", "treadle", {})
    try:
        with pytest.raises(Unable, match=r"treadle was not ready after 0.05 s"):
            worker.ask("build", 0.05, task={}, memory=False)
    finally:
        worker.close()


@pytest.mark.slow
def test_entries_are_measured_together(tmp_path):
    path = tmp_path / "zoo.json"
    command = [
        sys.executable, BENCH / "zoo.py", "pinn", "dqn", "--peers", "eager,channels-last",
        "--together", "2", "--threads", "1", "--rounds", "1", "--patience", "0",
        "--clock", "process_time", "--json", path,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "geometric mean of the ratio" in done.stdout
    rows = {r["workload"]: r for r in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    assert set(rows["pinn"]["contenders"]) == {"treadle", "eager"}
    assert set(rows["dqn"]["contenders"]) == {"treadle", "eager", "channels-last"}
    for found in rows.values():
        assert found["agree"]
        assert all(c["ms"] > 0 and c["first_s"] > 0 for c in found["contenders"].values())
