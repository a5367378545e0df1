"""Checkpoints: nothing is lost, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import ast
import dataclasses
import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treadle as td
from disks import largest_file, not_permitted
from treadle import losses, nn, optim
from treadle.train import checkpoint as checkpoint_module
from treadle.train import folder as writer
from treadle.train import packing, restoring
from treadle.train.manifest import MANIFEST, checksum, read_manifest

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "treadle"
WORKER = HERE / "interrupted.py"
Spec = td.Spec


class Net(nn.Module):
    def __init__(self, hidden: int = 5, dropout: float = 0.2):
        self.fc1, self.fc2 = nn.Linear(4, hidden), nn.Linear(hidden, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.fc2(self.dropout(td.tanh(self.fc1(x))))


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(6, 4)).astype(np.float32), "y": rng.integers(0, 3, 6)}


SPECS = {"x": Spec((6, 4)), "y": Spec((6,), td.int32)}


def make(model: nn.Module | None = None, **keywords) -> td.TrainStep:
    optimizer = keywords.pop("optimizer", optim.adamw(1e-2))
    return td.compile_step(model or Net(), loss, optimizer, SPECS, **keywords)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n]) for n in a
    )


def saved(folder: Path, count: int, **keywords) -> tuple[td.TrainStep, list[td.Checkpoint], list]:
    """A step, and checkpoints of it with their states."""
    step, states, found = make(accumulate=2), [], []
    with td.CheckpointManager(folder, keep_last=None, **keywords) as checkpoints:
        for i in range(count):
            step(batch(i))
            found.append(
                checkpoints.save(step, metrics={"loss": 1 / (i + 1)}, extra={"position": i})
            )
            states.append(step.state_dict())
    return step, found, states


def names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# Saving and going on


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_a_checkpoint_goes_on_with_the_same_bits(device: str, tmp_path: Path) -> None:
    step = make(device=device, accumulate=3, clip_norm=0.5, seed=9)
    with td.CheckpointManager(tmp_path / "runs" / "a") as checkpoints:
        for i in range(4):
            step(batch(i))
        extra = {"position": 4, "epoch": 1, "order": [3, 1, 2], "name": "Ä", "none": None}
        made = checkpoints.save(step, extra=extra)
        assert (made.count, made.micro_step, made.extra) == (1, 1, extra)
        ahead = [step(batch(i)).loss for i in range(4, 9)]

        other = make(device=device, accumulate=3, clip_norm=0.5, seed=1)
        found = checkpoints.restore(other)
        assert found == made
        assert [other(batch(i)).loss for i in range(4, 9)] == ahead
        assert same(other.state_dict(), step.state_dict())


def test_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    step, (made,), _ = saved(tmp_path, 1)
    assert names_in(made.path) == {"manifest.json", "step.safetensors"}
    arrays = load_file(made.path / "step.safetensors")
    assert same(arrays, step.state_dict())
    manifest = json.loads((made.path / MANIFEST).read_text())
    assert manifest["schema"] == 1
    assert manifest["steps"]["step"]["plan"]["device"] == "cpu"
    assert manifest["steps"]["step"]["fingerprint"] == made.fingerprint
    assert manifest["extra"] == {"position": 0}
    assert set(manifest["files"]) == {"step.safetensors"}


def test_which_one_is_restored(tmp_path: Path) -> None:
    step, _, states = saved(tmp_path, 4)
    with td.CheckpointManager(tmp_path, metric="loss", mode="max") as checkpoints:
        for which, expected in (("auto", 3), ("latest", 3), ("best", 0)):
            found = checkpoints.restore(step, which)
            assert found is not None
            assert found.extra == {"position": expected}
            assert same(step.state_dict(), states[expected])
        for which in (checkpoints.list()[2].path, str(checkpoints.list()[2].path), "000003-step-1"):
            checkpoints.restore(step, which)
            assert same(step.state_dict(), states[2])
        assert checkpoints.best().number == 1
        assert checkpoints.latest().number == 4


def test_an_empty_folder(tmp_path: Path) -> None:
    step = make()
    with td.CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(step) is None
        assert checkpoints.list() == ()
        assert checkpoints.best() is None
        assert checkpoints.latest() is None
        for which in ("latest", "best", "lastest", tmp_path / "nowhere"):
            with pytest.raises(td.CheckpointError, match="there is no checkpoint"):
                checkpoints.restore(step, which)
    reading = td.CheckpointManager(tmp_path / "nowhere", read_only=True)
    assert reading.restore(step) is None
    assert not (tmp_path / "nowhere").exists()


def test_the_best_needs_the_metric(tmp_path: Path) -> None:
    step = make()
    with td.CheckpointManager(tmp_path, metric="accuracy", mode="max") as checkpoints:
        checkpoints.save(step)
        checkpoints.save(step, metrics={"accuracy": float("nan")})
        assert [c.metrics for c in checkpoints.list()] == [{}, {"accuracy": None}]
        with pytest.raises(td.CheckpointError, match="no checkpoint with the metric 'accuracy'"):
            checkpoints.restore(step, "best")
        with pytest.raises(
            td.ArgumentError, match="metrics has loss, but the best is by 'accuracy'"
        ):
            checkpoints.save(step, metrics={"loss": 1.0})
        assert len(checkpoints.list()) == 2
        checkpoints.save(step, metrics={"accuracy": 0.5, "loss": 3})
        assert checkpoints.best().metrics == {"accuracy": 0.5, "loss": 3.0}


def test_the_best_accuracy_is_the_greatest(tmp_path: Path) -> None:
    step = make()
    with td.CheckpointManager(tmp_path / "a", metric="val/acc", keep_last=None) as checkpoints:
        for accuracy in (0.348, 0.747, 0.6):
            checkpoints.save(step, metrics={"val/acc": accuracy})
        assert (checkpoints.mode, checkpoints.best().number) == ("max", 2)
    for options in ({}, {"keep_best": 0, "read_only": True}):
        manager = td.CheckpointManager(tmp_path / "a", metric="val/acc", **options)
        assert manager.best().number == 2
        manager.close()
    with pytest.raises(td.ArgumentError, match="a small or a large 'val/gap' is good. Pass mode="):
        td.CheckpointManager(tmp_path / "b", metric="val/gap")
    with td.CheckpointManager(tmp_path / "b", metric="val/gap", mode="min") as checkpoints:
        checkpoints.save(step, metrics={"val/gap": 1.0})  # the folder is free, and says it now
    assert td.CheckpointManager(tmp_path / "b", metric="val/gap", read_only=True).mode == "min"


def test_metric_and_mode_are_in_the_folder(tmp_path: Path) -> None:
    step = make()
    with td.CheckpointManager(
        tmp_path, metric="accuracy", mode="max", keep_last=1, keep_best=2
    ) as checkpoints:
        for accuracy, value in ((0.5, 1.0), (0.9, 3.0), (0.7, 2.0), (0.6, 0.5)):
            checkpoints.save(step, metrics={"accuracy": accuracy, "loss": value})
    for manager in (
        td.CheckpointManager(tmp_path, read_only=True),
        td.CheckpointManager(tmp_path, metric="accuracy", read_only=True),
    ):
        assert (manager.metric, manager.mode) == ("accuracy", "max")
        assert manager.best().number == manager.restore(step, "best").number == 2
    with td.CheckpointManager(tmp_path, keep_last=1, keep_best=2) as checkpoints:
        with pytest.raises(td.ArgumentError, match="the best is by 'accuracy'"):
            checkpoints.save(step, metrics={"loss": 0.1})
        checkpoints.save(step, metrics={"accuracy": 0.8})
        assert [c.number for c in checkpoints.list()] == [2, 5]
    # What a user says counts more, and is what the folder says from then on.
    with td.CheckpointManager(tmp_path, metric="loss", keep_last=None) as checkpoints:
        assert (checkpoints.mode, checkpoints.best().number) == ("min", 2)
        checkpoints.save(step, metrics={"loss": 5.0})
    worst = td.CheckpointManager(tmp_path, mode="max", read_only=True)
    assert (worst.metric, worst.best().number) == ("loss", 6)


def test_a_ranking_that_is_none(tmp_path: Path) -> None:
    step, (found,), _ = saved(tmp_path, 1)
    manager = td.CheckpointManager(tmp_path, read_only=True)
    for ranking in ("loss", {"metric": "loss", "mode": "best"}, {"metric": "loss"}):
        body = json.loads((found.path / MANIFEST).read_text())
        rewrite(found.path, body | {"ranking": ranking})
        with pytest.raises(td.CheckpointError, match="is damaged: manifest.json has the ranking"):
            manager.restore(step, found.path)
        assert manager.list() == ()


def test_a_path_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(td.ArgumentError, match="CheckpointManager: the path is None"):
        td.CheckpointManager(None)
    with pytest.raises(td.ArgumentError, match="restore: the path is None"):
        td.CheckpointManager(tmp_path, read_only=True).restore(make(), None)


def test_a_folder_of_before_it_had_a_metric(tmp_path: Path) -> None:
    _, found, _ = saved(tmp_path, 3)
    for checkpoint in found:
        body = json.loads((checkpoint.path / MANIFEST).read_text())
        assert body.pop("ranking") == {"metric": "loss", "mode": "min"}
        rewrite(checkpoint.path, body)
    manager = td.CheckpointManager(tmp_path, read_only=True)
    assert (manager.metric, manager.mode, manager.best().number) == ("loss", "min", 3)


@pytest.mark.parametrize(
    ("keywords", "kept"),
    [
        ({"keep_last": 1, "keep_best": 0}, [6]),
        ({"keep_last": 2, "keep_best": 0}, [5, 6]),
        ({"keep_last": 1, "keep_best": 1}, [3, 6]),
        ({"keep_last": 1, "keep_best": 1, "mode": "max"}, [1, 6]),
        ({"keep_last": 2, "keep_best": 3}, [2, 3, 5, 6]),
        ({"keep_last": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 10}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_kept(keywords: dict, kept: list[int], tmp_path: Path) -> None:
    step = make()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "000099-other").mkdir()
    with td.CheckpointManager(tmp_path, **keywords) as checkpoints:
        for value in (9.0, 2.0, 1.0, 4.0, 2.0, 5.0):
            checkpoints.save(step, metrics={"loss": value})
        assert [c.number for c in checkpoints.list()] == kept
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "000099-other").exists()


def test_a_branch_from_the_best_is_the_latest(tmp_path: Path) -> None:
    """The latest is what was written last, not what has the most updates."""
    step, _, states = saved(tmp_path, 6)
    with td.CheckpointManager(tmp_path, mode="max") as checkpoints:
        checkpoints.restore(step, "best")
        checkpoints.save(step, metrics={"loss": 0.0}, extra="branch")
        other = make(accumulate=2)
        assert checkpoints.restore(other).extra == "branch"
        assert same(other.state_dict(), states[0])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"keep_last": 0}, "keep_last = 0"),
        ({"keep_best": -1}, "keep_best = -1"),
        ({"mode": "best"}, "mode = 'best'"),
    ],
)
def test_bad_arguments(keywords: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(td.ArgumentError, match=message):
        td.CheckpointManager(tmp_path, **keywords)


@pytest.mark.parametrize("extra", [np.zeros(2), {1, 2}, float("nan"), {"x": object()}, b"bytes"])
def test_extra_is_json(extra: object, tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(td.ArgumentError, match="extra is not JSON"):
            checkpoints.save(make(), extra=extra)
        assert checkpoints.list() == ()


def test_several_steps_are_one_checkpoint(tmp_path: Path) -> None:
    pair = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}

    def critic(models, x):
        return models["d"](td.stop_gradient(models["g"](x))).mean()

    def maker(models, x):
        return -models["d"](models["g"](x)).mean()

    def steps(seed: int) -> dict[str, td.TrainStep]:
        spec = Spec((3, 2))
        d = td.compile_step(pair, critic, optim.only("d.*", optim.adam(0.1)), spec, seed=seed)
        g = td.compile_step(pair, maker, optim.only("g.*", optim.adam(0.1)), spec, share=d)
        return {"d": d, "g": g}

    x = np.ones((3, 2), np.float32)
    first, second = steps(0), steps(1)
    for _ in range(3):
        first["d"](x)
        first["g"](x)
    with td.CheckpointManager(tmp_path) as checkpoints:
        made = checkpoints.save(first)
        assert names_in(made.path) == {MANIFEST, "d.safetensors", "g.safetensors"}
        checkpoints.restore(second)
        for _ in range(3):
            for own, other in zip(first.values(), second.values(), strict=True):
                assert own(x) == other(x)
        for name in first:
            assert same(first[name].state_dict(), second[name].state_dict())
        before = second["g"].state_dict()
        with pytest.raises(td.CheckpointError, match="is of the steps d, g, not of one step"):
            checkpoints.restore(second["g"])
        with pytest.raises(td.CheckpointError, match="does not fit the step"):
            checkpoints.restore({"d": second["g"], "g": second["d"]})
        assert same(before, second["g"].state_dict())
        for wrong in ({}, {"a/b": first["d"]}, {"a": 3}):
            with pytest.raises(td.ArgumentError, match="is not a step by a plain name"):
                checkpoints.save(wrong)


# Damage


def flipped(path: Path, position: float, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(position * len(data)), len(data) - 1)] ^= 1 << bit
    path.write_bytes(bytes(data))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the state": (
        lambda p: flipped(p / "step.safetensors", 0.7, 3),
        "step.safetensors does not match its checksum",
    ),
    "a bit of its header": (
        lambda p: flipped(p / "step.safetensors", 0.01, 0),
        "step.safetensors does not match its checksum",
    ),
    "a bit of the manifest": (lambda p: flipped(p / MANIFEST, 0.5, 1), MANIFEST),
    "a truncated state": (lambda p: truncated(p / "step.safetensors"), "bytes, not"),
    "a truncated manifest": (lambda p: truncated(p / MANIFEST), f"{MANIFEST} is not JSON"),
    "an empty state": (lambda p: (p / "step.safetensors").write_bytes(b""), "has 0 bytes"),
    "an empty manifest": (lambda p: (p / MANIFEST).write_bytes(b""), f"{MANIFEST} is not JSON"),
    "another manifest": (lambda p: (p / MANIFEST).write_text("[1]"), "not a checkpoint's"),
    "NaN in the manifest": (
        lambda p: (p / MANIFEST).write_text('{"kind": "treadle checkpoint", "x": NaN}'),
        f"{MANIFEST} is not JSON",
    ),
    "no state": (lambda p: (p / "step.safetensors").unlink(), "No such file"),
    "no manifest": (lambda p: (p / MANIFEST).unlink(), f"{MANIFEST} cannot be read: No such file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    step, found, states = saved(tmp_path, 3, mode="max")
    damage(found[2].path)
    damage(found[0].path)  # by the metric the best
    here = step.state_dict()
    with td.CheckpointManager(tmp_path, keep_last=1, keep_best=0, mode="max") as checkpoints:
        with pytest.raises(td.CheckpointError, match="is damaged: ") as caught:
            checkpoints.restore(step, found[2].path)
        assert message in str(caught.value)
        assert same(here, step.state_dict())
        for which in ("auto", "latest", "best"):
            with pytest.warns(td.CheckpointWarning) as warned:
                used = checkpoints.restore(step, which)
            assert used == found[1]
            assert same(step.state_dict(), states[1])
            text = " ".join(str(w.message) for w in warned)
            assert message in text
            assert f"{found[1].path.name} is used instead" in text
            damaged = found[0] if which == "best" else found[2]
            assert f"checkpoint {damaged.path.name} is damaged" in text
        # What is known to be damaged neither counts as kept nor is deleted.
        checkpoints.keep_last = 2
        checkpoints.save(step)
        assert [c.number for c in checkpoints.list()] == [2, 4]
        assert found[0].path.exists()
        assert found[2].path.exists()


SENSELESS = {
    "no steps": lambda body: body.pop("steps"),
    "no step": lambda body: body.update(steps={}),
    "steps in a list": lambda body: body.update(steps=[1]),
    "a count of text": lambda body: body["steps"]["step"].update(count="many"),
    "a negative count": lambda body: body["steps"]["step"].update(count=-1),
    "no plan": lambda body: body["steps"]["step"].update(plan=None),
    "files of numbers": lambda body: body.update(files={"step.safetensors": 3}),
    "a file elsewhere": lambda body: body["files"].update({"../x": {"bytes": 0, "sha256": ""}}),
    "the folder above": lambda body: body["files"].update({"..": {"bytes": 0, "sha256": ""}}),
    "a zero byte": lambda body: body["files"].update({"a\0": {"bytes": 0, "sha256": ""}}),
    "a metric of text": lambda body: body.update(metrics={"loss": "low"}),
    "metrics in a list": lambda body: body.update(metrics=[1, 2]),
    "chunks of numbers": lambda body: body.update(
        chunks={"step": {"ranks": 1, "shards": 1, "shapes": {"w": 3}}}
    ),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_manifest_without_sense_is_passed_over(name: str, tmp_path: Path) -> None:
    """Its checksum fits: anyone can compute one."""
    step, found, states = saved(tmp_path, 2)
    file = found[1].path / MANIFEST
    body = json.loads(file.read_bytes())
    SENSELESS[name](body)
    file.write_text(json.dumps(body | {"checksum": checksum(body)}))
    with td.CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.list() == (found[0],)
        assert checkpoints.best() == found[0]
        with pytest.warns(td.CheckpointWarning, match="is damaged"):
            assert checkpoints.restore(step) == found[0]
    assert same(step.state_dict(), states[0])


def test_when_all_are_damaged_nothing_starts_anew(tmp_path: Path) -> None:
    step, found, _ = saved(tmp_path, 2)
    for checkpoint in found:
        truncated(checkpoint.path / "step.safetensors")
    here = step.state_dict()
    with td.CheckpointManager(tmp_path) as checkpoints:
        for which in ("auto", "latest", "best"):
            with pytest.raises(td.CheckpointError, match="every checkpoint in .* is damaged") as e:
                checkpoints.restore(step, which)
            assert all(c.path.name in str(e.value) for c in found)
    assert same(here, step.state_dict())


@given(st.sampled_from(["step.safetensors", MANIFEST]), st.floats(0, 1), st.integers(0, 7))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_flipped_bit_is_found(shared_run, file: str, position: float, bit: int) -> None:
    folder, step, found, states = shared_run
    path = found[1].path / file
    kept = path.read_bytes()
    flipped(path, position, bit)
    try:
        checkpoints = td.CheckpointManager(folder, read_only=True)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            used = checkpoints.restore(step)
        # White space between the manifest's words may be other white space.
        is_harmless = file == MANIFEST and used == found[1]
        assert is_harmless or (used == found[0] and "is damaged" in str(warned[0].message))
        assert same(step.state_dict(), states[1 if is_harmless else 0])
    finally:
        path.write_bytes(kept)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("run")
    step, found, states = saved(folder, 2)
    return folder, step, found, states


def test_a_name_that_leads_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    step, (made,), _ = saved(tmp_path, 1)
    body = json.loads((made.path / MANIFEST).read_text())
    body["files"] = {"../../secret": {"bytes": 1, "sha256": ""}}
    rewrite(made.path, body)
    reading = td.CheckpointManager(tmp_path, read_only=True)
    with pytest.raises(td.CheckpointError, match="names the file '../../secret'"):
        reading.restore(step, made.path)


# Checkpoints of others


def rewrite(path: Path, body: dict) -> None:
    body["checksum"] = checksum(body)
    (path / MANIFEST).write_text(json.dumps(body))


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    step, found, states = saved(tmp_path, 2)
    body = json.loads((found[1].path / MANIFEST).read_text()) | {"schema": 3, "news": [1]}
    rewrite(found[1].path, body)
    here = step.state_dict()
    with td.CheckpointManager(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        for which in ("auto", "latest", "best", found[1].path):
            with pytest.raises(td.CheckpointError, match="has schema 3, this version reads 1"):
                checkpoints.restore(step, which)
            assert same(here, step.state_dict())
        checkpoints.restore(step, found[0].path)
        assert same(step.state_dict(), states[0])
        checkpoints.save(step)
        checkpoints.save(step)
        assert [c.number for c in checkpoints.list()] == [4]
    assert found[1].path.exists()


def test_a_changed_schema_without_a_checksum_is_said(tmp_path: Path) -> None:
    step, found, _ = saved(tmp_path, 1)
    manifest = found[0].path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 7'))
    reading = td.CheckpointManager(tmp_path, read_only=True)
    with pytest.raises(td.CheckpointError, match="and says schema 7, not 1"):
        reading.restore(step)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make(Net(hidden=7), accumulate=2), r"fc1.weight has the shape \(5, 4\)"),
        (lambda: make(optimizer=optim.sgd(0.1), accumulate=2), "unexpected: .*optimizer:m"),
        (lambda: make(), "accumul"),
        (
            lambda: td.compile_step(
                nn.Linear(4, 3),
                lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]),
                optim.adamw(1e-2),
                SPECS,
                accumulate=2,
            ),
            "missing: weight, bias",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(other, message: str, tmp_path: Path) -> None:
    _, found, _ = saved(tmp_path, 3)
    step = other()
    step(batch(5))
    here = step.state_dict()
    kept = {c.path: (c.path / "step.safetensors").read_bytes() for c in found}
    with td.CheckpointManager(tmp_path) as checkpoints:
        for which in ("auto", "best", found[0].path):
            with pytest.raises(td.CheckpointError, match="does not fit the step") as caught:
                checkpoints.restore(step, which)
            assert caught.match(message)
            assert same(here, step.state_dict())
    assert all((path / "step.safetensors").read_bytes() == data for path, data in kept.items())


def test_another_plan_is_said(tmp_path: Path) -> None:
    step, found, states = saved(tmp_path, 1)
    with td.CheckpointManager(tmp_path) as checkpoints:
        exact = make(accumulate=2, device="oracle")
        with pytest.warns(
            td.CheckpointWarning, match="device was cpu, is oracle: training goes on"
        ):
            checkpoints.restore(exact)
        assert exact.count == step.count
        with pytest.warns(td.CheckpointWarning, match="plan: the graph differs"):
            checkpoints.restore(make(Net(dropout=0.5), accumulate=2))
        body = json.loads((found[0].path / MANIFEST).read_text())
        body["versions"]["numpy"] = "0.9"
        rewrite(found[0].path, body)
        with pytest.warns(td.CheckpointWarning, match="numpy was 0.9, is "):
            checkpoints.restore(step)
        assert same(step.state_dict(), states[0])


def test_the_fingerprint_is_of_graph_device_and_precision(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path, keep_last=None) as checkpoints:

        def fingerprint(*arguments, **keywords) -> str:
            return checkpoints.save(make(*arguments, **keywords)).fingerprint

        base = fingerprint()
        assert fingerprint(seed=4) == base
        assert fingerprint(optimizer=optim.adamw(0.5)) == base  # numbers are state
        first = make()
        assert fingerprint(share=first) == base  # the second step of a session
        others = [
            fingerprint(device="oracle"),
            fingerprint(precision="bfloat16"),
            fingerprint(accumulate=2),
            fingerprint(clip_norm=1.0),
            fingerprint(Net(dropout=0.1)),
            fingerprint(optimizer=optim.adam(1e-2)),
        ]
        assert len({base, *others}) == 7


def test_what_functions_are_called_is_not_the_plan(tmp_path: Path) -> None:
    def part(x):
        return td.tanh(x)

    def other_part(x):
        return td.tanh(x)

    def named(function):
        def objective(model, batch):
            hidden = td.checkpoint(function)(model.fc1(batch["x"]))
            return losses.cross_entropy(model.fc2(hidden), batch["y"])

        return objective

    step, other = (
        td.compile_step(Net(), function, optim.adamw(1e-2), SPECS, device="oracle")
        for function in (named(part), lambda model, batch: named(other_part)(model, batch))
    )
    with td.CheckpointManager(tmp_path) as checkpoints:
        made = checkpoints.save(step)
        assert checkpoints.restore(other) == made  # without a warning, which is an error here
        assert checkpoints.save(other).fingerprint == made.fingerprint


# The disk


@pytest.mark.parametrize("size", [0, 300, 2500])
def test_a_quota_that_is_used_up(size: int, tmp_path: Path) -> None:
    step, found, states = saved(tmp_path, 2)
    with td.CheckpointManager(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        step(batch(7))
        here = step.state_dict()
        with largest_file(size), pytest.raises(td.CheckpointError) as caught:
            checkpoints.save(step)
        assert "cannot be written" in str(caught.value)
        assert os.strerror(errno.EFBIG) in str(caught.value)
        assert same(here, step.state_dict())
        assert names_in(tmp_path) == {".lock", *(c.path.name for c in found)}
        other = make(accumulate=2)
        checkpoints.restore(other)
        assert same(other.state_dict(), states[1])
        assert checkpoints.save(step).number == 3  # there is room again


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 KB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    step = make()
    with td.CheckpointManager(small_disk, keep_last=None) as checkpoints:
        checkpoints.save(step)
        (small_disk / "filler").write_bytes(bytes(16 << 10))
        here = step.state_dict()
        with pytest.raises(td.CheckpointError, match=os.strerror(errno.ENOSPC)):
            checkpoints.save(step)
        assert same(here, step.state_dict())
        (small_disk / "filler").unlink()
        found = checkpoints.list()
        assert len(found) == 1
        assert names_in(small_disk) == {".lock", *(c.path.name for c in found)}
        assert checkpoints.restore(step) == found[-1]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(td.CheckpointError, match=os.strerror(errno.EROFS)):
        td.CheckpointManager(small_disk)
    assert td.CheckpointManager(small_disk, read_only=True).restore(step) == found[-1]


def test_a_folder_that_is_read_only() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders cannot even be entered
        Path(place).chmod(0o755)
        folder = Path(place) / "run"
        step, found, states = saved(folder, 2)
        for file in folder.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o444)
        checkpoints = td.CheckpointManager(folder, keep_last=1)
        here = step.state_dict()
        with not_permitted(folder):
            with pytest.raises(td.CheckpointError, match="cannot be written to.*Permission denied"):
                checkpoints.save(step)
            checkpoints.close()
            with pytest.raises(td.CheckpointError, match="cannot be written to.*read_only=True"):
                td.CheckpointManager(folder)
            with pytest.raises(td.CheckpointError, match="cannot be written to"):
                td.CheckpointManager(folder / "new")
            assert same(here, step.state_dict())
            reading = td.CheckpointManager(folder, read_only=True)
            assert reading.restore(step) == found[1]
            assert same(step.state_dict(), states[1])
            with pytest.raises(td.CheckpointError, match="closed or was made with read_only"):
                reading.save(step)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(td.CheckpointError, match="cannot be written to"):
        td.CheckpointManager(tmp_path / "file")


def test_a_failure_of_the_last_step_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, found, _ = saved(tmp_path, 1)
    with td.CheckpointManager(tmp_path) as checkpoints:
        for name, error in (
            ("rename", OSError(errno.EIO, "I/O error")),
            ("fsync", KeyboardInterrupt()),
        ):

            def fails(*_: object, error: BaseException = error) -> None:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(os, name, fails)
                with pytest.raises((td.CheckpointError, KeyboardInterrupt)):
                    checkpoints.save(step)
            assert names_in(tmp_path) == {".lock", found[0].path.name}


def test_what_cannot_be_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, _, _ = saved(tmp_path, 2)

    def fails(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checkpoint_module, "delete_entry", fails)
    with td.CheckpointManager(tmp_path, keep_last=1, keep_best=0) as checkpoints:
        with pytest.warns(td.CheckpointWarning, match="cannot be deleted: Operation not permitted"):
            made = checkpoints.save(step)
        assert checkpoints.latest() == made


# Writers and readers


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


HOLDER = """
import sys, time
import treadle as td
held = td.CheckpointManager(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_one_process_writes(tmp_path: Path) -> None:
    step, found, states = saved(tmp_path, 2)
    with start(HOLDER, tmp_path) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(td.CheckpointError, match=f"process {holder.pid} writes"):
                td.CheckpointManager(tmp_path)
            reading = td.CheckpointManager(tmp_path, read_only=True)
            assert reading.restore(step) == found[1]
            assert same(step.state_dict(), states[1])
        finally:
            holder.kill()
    td.CheckpointManager(tmp_path).close()  # the lock went with the process


FORKED = """
import os, signal, sys, time
import treadle as td
held = td.CheckpointManager(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        held.save({})
    except td.ArgumentError:
        pass
    try:
        held._turn().__enter__()
    except td.CheckpointError as error:
        print(error.cause, flush=True)
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    with start(FORKED, tmp_path) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "this process was forked from the one that writes\n"
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # it lives
            td.CheckpointManager(tmp_path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(writer.fcntl, "flock", fails)
    with pytest.warns(
        td.CheckpointWarning, match="cannot be locked: No locks available; see to it"
    ):
        checkpoints = td.CheckpointManager(tmp_path)
    assert checkpoints.save(make()).number == 1


def test_managers_of_one_process_share_the_lock(tmp_path: Path) -> None:
    """A cell of a notebook that runs again makes a second one before the first is gone."""
    step = make()
    first = td.CheckpointManager(tmp_path, keep_last=None)
    second = td.CheckpointManager(tmp_path / "." / "", keep_last=None)
    assert first.save(step).number == 1
    assert second.save(step).number == 2
    first.close()
    with pytest.raises(td.CheckpointError, match="closed"):
        first.save(step)
    assert second.save(step).number == 3


def test_a_reader_beside_a_writer_that_deletes(tmp_path: Path, monkeypatch) -> None:
    step, found, _ = saved(tmp_path, 2)
    reading = td.CheckpointManager(tmp_path, read_only=True)
    check = restoring.check_files
    written = []

    def deleted_meanwhile(path, manifest):
        if not written:  # what is read vanishes, and a newer one comes
            with td.CheckpointManager(tmp_path, keep_last=1, keep_best=0) as writing:
                written.append(writing.save(step))
        check(path, manifest)

    monkeypatch.setattr(restoring, "check_files", deleted_meanwhile)
    here = step.state_dict()
    other = make(accumulate=2)
    assert reading.restore(other) == written[0]
    assert same(other.state_dict(), here)
    assert not found[1].path.exists()


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_a_checkpoint_is_of_one_moment(device: str, tmp_path: Path) -> None:
    """Another thread saves while the step trains; every checkpoint is between two calls."""
    step, other = make(device=device, accumulate=2), make(device=device, accumulate=2)
    states = [step.state_dict()]
    with td.CheckpointManager(tmp_path, keep_last=None) as checkpoints:

        def save() -> None:
            for _ in range(10):
                checkpoints.save(step)

        thread = threading.Thread(target=save)
        thread.start()
        while thread.is_alive():
            step(batch(len(states)))
            states.append(step.state_dict())
            time.sleep(0.001)  # lets the other thread have its turn
        thread.join()
        for checkpoint in checkpoints.list():
            checkpoints.restore(other, checkpoint.path)
            number = 2 * checkpoint.count + checkpoint.micro_step
            assert same(other.state_dict(), states[number])
        assert len(checkpoints.list()) == 10


def test_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    _, found, _ = saved(tmp_path, 1)
    for name in (f"{writer.WRITING}000002-step-1", f"{writer.DELETING}000001-step-1"):
        shutil.copytree(found[0].path, tmp_path / name)
    reading = td.CheckpointManager(tmp_path, read_only=True)
    assert reading.list() == tuple(found)  # they are no checkpoints
    assert len(names_in(tmp_path)) == 4
    with td.CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.list() == tuple(found)
    assert names_in(tmp_path) == {".lock", found[0].path.name}


def test_nothing_is_unpickled() -> None:
    unsafe = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"}
    imported = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path
    assert not imported & unsafe


# kill -9


def trained(folder: Path, result: Path, device: str, kill_at: int | None = None) -> int:
    arguments = ["train", folder, result, device, *([] if kill_at is None else [kill_at])]
    run = [sys.executable, "-W", "error", WORKER, *arguments]
    done = subprocess.run(list(map(str, run)), capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[bytes, list]]:
    """The final state of a run that was never killed, and the lines it went through."""
    known: dict[str, tuple[bytes, list[str]]] = {}

    def run(device: str) -> tuple[bytes, list[str]]:
        if device not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            result = folder / "result.safetensors"
            assert trained(folder / "checkpoints", result, device) == 0
            lines = result.with_suffix(".lines").read_text().splitlines()
            known[device] = result.read_bytes(), lines
        return known[device]

    return run


def finish(folder: Path, result: Path, device: str) -> bytes:
    for _ in range(3):
        if trained(folder, result, device) == 0:
            return result.read_bytes()
    raise AssertionError("the run does not end")


def lines_to_kill_at(lines: list[str], count: int, seed: int) -> list[int]:
    """Half of them inside a write, half anywhere."""
    rng = random.Random(seed)
    writing = [i + 1 for i, module in enumerate(lines) if module == "folder"]
    anywhere = range(1, len(lines) + 1)
    return [rng.choice(writing if i % 2 == 0 else anywhere) for i in range(count)]


def check_killed_runs(device: str, trials: int, seed: int, tmp_path: Path, uninterrupted) -> None:
    expected, lines = uninterrupted(device)
    for trial, at in enumerate(lines_to_kill_at(lines, trials, seed)):
        folder, result = tmp_path / str(trial) / "checkpoints", tmp_path / str(trial) / "result"
        assert trained(folder, result, device, at) == -signal.SIGKILL
        again = lines_to_kill_at(lines, 2, seed + trial)[trial % 2] // 3
        trained(folder, result, device, max(again, 1))  # and once more, while it catches up
        assert finish(folder, result, device) == expected, (trial, at, again)


@pytest.mark.parametrize(("device", "trials"), [("oracle", 2), ("cpu", 1)])
def test_killed_runs_end_with_the_same_bits(device, trials, tmp_path, uninterrupted) -> None:
    check_killed_runs(device, trials, 0, tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "trials"), [("oracle", 24), ("cpu", 12)])
def test_many_killed_runs_end_with_the_same_bits(device, trials, tmp_path, uninterrupted) -> None:
    check_killed_runs(device, trials, 1, tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_runs_killed_at_random_times_end_with_the_same_bits(
    device, tmp_path, uninterrupted
) -> None:
    """From outside, at any moment: while importing, compiling, training or writing."""
    expected, _ = uninterrupted(device)
    rng, kills = random.Random(7), 0
    for trial in range(6):
        folder, result = tmp_path / str(trial) / "checkpoints", tmp_path / str(trial) / "result"
        for _ in range(4):
            arguments = ["train", folder, result, device]
            run = subprocess.Popen([sys.executable, str(WORKER), *map(str, arguments)])
            time.sleep(rng.uniform(0.3, 1.5))
            kills += run.poll() is None
            run.kill()
            run.wait()
        assert finish(folder, result, device) == expected
    assert kills >= 8


def test_a_save_that_is_killed_at_any_line() -> None:
    """Hundreds of saves: in memory where there is such a folder, as flushing a disk takes long."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        run = [sys.executable, "-W", "error", str(WORKER), "save", place]
        done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100


def bomb(declared: int, content: int) -> bytes:
    """A packed file whose header declares so many bytes of an array, and what follows it."""
    entry = {"a": {"dtype": "U8", "shape": [declared], "data_offsets": [0, declared]}}
    header = json.dumps(entry).encode()
    return gzip.compress(len(header).to_bytes(8, "little") + header + bytes(content), 1)


@pytest.mark.parametrize(
    ("declared", "content", "told"),
    [
        (1 << 40, 0, "says that it holds 1,099,511"),
        (8, 1 << 26, "more than the"),
        (9, 4, "damaged"),
    ],
)
def test_a_packed_checkpoint_is_unpacked_as_far_as_the_step_takes_it(
    declared: int, content: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kB that are GiB unpacked, with a manifest that agrees, are an error before they are."""
    step, (first, last), states = saved(tmp_path, 2, compress=True)
    manifest = read_manifest(last.path)
    (name,) = manifest.files
    (last.path / name).write_bytes(bomb(declared, content))
    files = {name: writer.digest_of(last.path / name)}
    (last.path / MANIFEST).write_bytes(dataclasses.replace(manifest, files=files).encode())
    written = []
    monkeypatch.setattr(packing, "BLOCK", 1 << 16)
    inflate = packing._inflate

    def watched(packed, source, target, most):
        try:
            inflate(packed, source, target, most)
        finally:
            written.append(target.tell())

    monkeypatch.setattr(packing, "_inflate", watched)
    with td.CheckpointManager(tmp_path, read_only=True) as reading:
        with pytest.warns(td.CheckpointWarning, match=told):
            assert reading.restore(step).number == first.number
        assert same(step.state_dict(), states[0])
        with pytest.raises(td.CheckpointError, match=told):
            reading.restore(step, last.path.name)
        with pytest.raises(td.CheckpointError, match=told):
            last.params()
    assert min(written) < max(written) < 10_000  # the first checkpoint's, and headers


def test_a_packed_checkpoint_of_another_optimizer_is_still_named(tmp_path: Path) -> None:
    saved(tmp_path, 1, compress=True)
    other = make(optimizer=optim.sgd(0.1), accumulate=2)
    with pytest.raises(td.CheckpointError, match="of another model, optimizer or accumulation"):
        td.CheckpointManager(tmp_path, read_only=True).restore(other)
