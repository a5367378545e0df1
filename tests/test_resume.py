"""Runs that are stopped, by whatever: what they leave is what a run without a stop leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import interrupted_fit as worker
import treadle as td
from treadle import data, losses, nn, optim
from treadle.train.manifest import MANIFEST, checksum

SCRIPT = Path(worker.__file__)


def _start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def _wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return
    raise AssertionError(f"it ended without {text!r}: {process.stderr and process.stderr.read()}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, err = _finish(_start("fit", folder, "oracle", 0.001))
    assert code == 0, err
    return worker.left(folder)


def test_killed_at_random_lines(tmp_path: Path) -> None:
    code, out, err = _finish(_start("sweep", tmp_path, 1, 2))
    assert code == 0, err
    assert "2 runs" in out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_many_random_lines(seed: int, tmp_path: Path) -> None:
    code, _, err = _finish(_start("sweep", tmp_path, 100 + seed, 60))
    assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_several_steps_killed_at_many_random_lines(seed: int, tmp_path: Path) -> None:
    code, _, err = _finish(_start("sweep", tmp_path, 200 + seed, 5, "several"))
    assert code == 0, err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_signals(number: int, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Killed, interrupted and terminated, with batches made ahead."""
    process = _start("fit", tmp_path, "oracle", 0.02)
    _wait_for(process, "step 16")
    os.kill(process.pid, number)
    code, out, err = _finish(process)
    assert "done" not in out
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == (-number if number == signal.SIGINT else 128 + number), err
        latest = td.CheckpointManager(tmp_path / "checkpoints", read_only=True).latest()
        assert latest is not None
        assert latest.extra["batches"] >= 16
        if number == signal.SIGINT:
            assert "KeyboardInterrupt: stopped after step" in err
            assert "which is saved in" in err
    code, out, err = _finish(_start("fit", tmp_path, "oracle", 0.001))
    assert (code, out.split()[-2:]) == (0, ["done", "16"]), err
    found = worker.left(tmp_path)
    assert [name for name in whole if found[name] != whole[name]] == []


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    process = _start("fit", tmp_path, "oracle", 60)
    _wait_for(process, "step 1")
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    while "again" not in process.stderr.readline():
        pass
    os.kill(process.pid, signal.SIGINT)
    code, _, _ = _finish(process)
    assert code == -signal.SIGINT
    reader = td.CheckpointManager(tmp_path / "checkpoints", read_only=True)
    assert reader.latest() is None  # it may have been in the middle of a step


# In this process


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def loss(model, batch):
    return losses.mse(model(batch["x"]), batch["y"])


def make(model: nn.Module | None = None, **keywords) -> td.TrainStep:
    spec = {"x": td.Spec((4, 2)), "y": td.Spec((4, 1))}
    step = model or nn.Linear(2, 1)
    device = keywords.pop("device", "oracle")
    return td.compile_step(step, loss, optim.adam(0.05), spec, device=device, **keywords)


def trainer(step: td.TrainStep, *callbacks: td.callbacks.Callback, **keywords) -> td.Trainer:
    return td.Trainer(step, callbacks, progress=False, **keywords)


def loader(count: int = 22, **keywords) -> data.ArrayLoader:
    return data.ArrayLoader(rows(count), 4, shuffle=True, **keywords)


def same(a: td.TrainStep, b: td.TrainStep) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)


def test_more_steps_later(tmp_path: Path) -> None:
    """A run that is over goes on when more is asked for, in the middle of a pass or at its end."""
    expected, step = make(), make()
    whole = trainer(expected).fit(loader(), steps=13)
    for steps in (3, 5, 5, 11, 13):
        history = trainer(step).fit(loader(), steps=steps, checkpoint=tmp_path, resume="auto")
        assert len(history) == steps
    assert same(step, expected)
    assert np.array_equal(history["loss"], whole["loss"])


def test_native_runs_go_on(tmp_path: Path) -> None:
    expected = trainer(make(device="cpu")).fit(loader(), steps=9)
    trainer(make(device="cpu")).fit(loader(), steps=4, checkpoint=tmp_path)
    step = make(device="cpu")
    history = trainer(step).fit(loader(), steps=9, checkpoint=tmp_path, resume="auto")
    assert np.array_equal(history["loss"], expected["loss"])


def test_a_second_fit_goes_on(tmp_path: Path) -> None:
    expected, step = make(), make()
    whole = trainer(expected).fit(loader(), steps=13)
    one, batches = trainer(step), loader()
    one.fit(batches, steps=3, checkpoint=tmp_path)
    one.fit(batches, steps=5, checkpoint=tmp_path)
    history = one.fit(batches, steps=13, checkpoint=tmp_path)
    assert same(step, expected)
    assert history is one.history
    assert history["step"].tolist() == list(range(1, 14))
    assert np.array_equal(history["loss"], whole["loss"])
    again = make()
    resumed = trainer(again).fit(loader(), steps=13, checkpoint=tmp_path, resume="latest")
    assert np.array_equal(resumed["loss"], whole["loss"])


def test_an_error_in_a_callback_loses_nothing(tmp_path: Path) -> None:
    class Faulty(td.callbacks.Callback):
        def on_step_end(self, run):
            if run.steps == 7:
                raise ZeroDivisionError("mine")

    class After(td.callbacks.Callback):
        seen = 0

        def on_step_end(self, run):
            self.seen += 1

        def state_dict(self):
            return {"seen": self.seen}

    step, after = make(), After()
    with pytest.raises(td.CallbackError) as caught:
        trainer(step, Faulty(), after).fit(loader(), steps=13, checkpoint=tmp_path)
    error = caught.value
    assert "the callback Faulty raised ZeroDivisionError('mine') in on_step_end, at step 7" in str(
        error
    )
    assert (type(error.callback), error.hook) == (Faulty, "on_step_end")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert f"step 7, which is saved in {tmp_path}" in error.__notes__[0]
    assert after.seen == 7  # the others were called too
    expected, other = make(), make()
    trainer(expected).fit(loader(), steps=13)
    with pytest.warns(td.CheckpointWarning, match="callbacks that are not here: After"):
        history = trainer(other).fit(loader(), steps=13, checkpoint=tmp_path, resume="auto")
    assert history["step"].tolist() == list(range(1, 14))
    assert same(other, expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("hook", ["on_load", "on_step_end", "load_state_dict", None])
def test_a_resumed_fit_leaves_a_loader_of_whole_passes(
    hook: str | None, ahead: bool, tmp_path: Path
) -> None:
    """However it ends: who trains on the loader next gets all batches, once each."""

    def fail(*_):
        raise ZeroDivisionError("mine")

    class Remembers(td.callbacks.Callback):
        def state_dict(self):
            return {"one": 1}

    trainer(make(), Remembers()).fit(loader(40), steps=6, checkpoint=tmp_path)
    own = data.Prefetch(loader(40)) if ahead else loader(40)
    next(iter(own))  # to look at a batch takes nothing away
    faulty = Remembers() if hook is None else type("Remembers", (Remembers,), {hook: fail})()
    again = trainer(make(), faulty)
    if hook is None:
        again.fit(own, steps=8, checkpoint=tmp_path, resume="auto")
    else:
        with pytest.raises(td.CallbackError):
            again.fit(own, epochs=2, checkpoint=tmp_path, resume="auto")
    wanted = list(loader(40))
    found = list(own)
    assert len(found) == len(wanted) == 10
    for mine, theirs in zip(found, wanted, strict=True):
        assert np.array_equal(mine["x"], theirs["x"])


def test_who_goes_on_after_a_failed_resume_misses_no_batch(tmp_path: Path) -> None:
    """The same trainer goes on from where it failed, to the bits of a run without a failure."""
    trainer(make()).fit(loader(40), steps=6, checkpoint=tmp_path)
    failing = {"at": 8}

    class Faulty(td.callbacks.Callback):
        def on_load(self, run):
            if failing["at"] == 0:
                raise ZeroDivisionError("mine")

        def on_step_end(self, run):
            if run.steps == failing["at"]:
                raise ZeroDivisionError("mine")

    for at in (8, 0):
        failing["at"] = at
        step, own = make(), loader(40)
        again = trainer(step, Faulty())
        with pytest.raises(td.CallbackError):
            again.fit(own, steps=13, checkpoint=tmp_path, resume="latest")
        failing["at"] = -1
        again.fit(own, steps=13)
        expected = make()
        trainer(expected).fit(loader(40), steps=13)
        assert same(step, expected)


def test_epochs_and_steps_are_totals_of_a_run(tmp_path: Path) -> None:
    """In a second fit as after resume; a second fit without anything to do is an error."""
    step, own = make(), loader(40)
    run = trainer(step)
    assert len(run.fit(own, epochs=2)) == 20
    assert len(run.fit(own, epochs=3)) == 30
    assert len(run.fit(own, steps=35)) == 35
    assert len(run.fit(own, epochs=4)) == 40
    expected = make()
    trainer(expected).fit(loader(40), epochs=4)
    assert same(step, expected)
    for keywords, advice in (({"epochs": 4}, "pass epochs=8"), ({"steps": 30}, "pass steps=70")):
        with pytest.raises(td.ArgumentError, match=f"from the beginning of the run: {advice}"):
            run.fit(own, **keywords)
    assert len(run.history) == 40
    for epochs, rows_ in ((2, 20), (2, 20), (3, 30)):  # a command that is repeated
        history = trainer(make()).fit(loader(40), epochs=epochs, checkpoint=tmp_path, resume="auto")
        assert len(history) == rows_


@pytest.mark.parametrize("hook", ["on_save", "state_dict", "arrays"])
def test_a_callback_that_fails_while_saving(hook: str, tmp_path: Path) -> None:
    def fail(*_):
        raise OSError("no")

    faulty = type("Faulty", (td.callbacks.Callback,), {hook: fail})()
    with (
        pytest.warns(td.CheckpointWarning, match="the callback Faulty raised OSError"),
        pytest.raises(td.CallbackError, match="Faulty raised OSError"),
    ):
        trainer(make(), faulty).fit(loader(), epochs=2, checkpoint=tmp_path)
    found = td.CheckpointManager(tmp_path, read_only=True).latest()
    assert found is not None
    assert (found.extra["epoch"], found.extra["steps"]) == (1, 5)


def test_an_error_of_the_data_loses_nothing(tmp_path: Path) -> None:
    batches = [{k: v[4 * i : 4 * i + 4] for k, v in rows(40).items()} for i in range(10)]

    def broken(epoch):
        yield from batches[:6]
        raise OSError("the disk is gone")

    step = make()
    with pytest.raises(OSError, match="gone") as caught:
        trainer(step).fit(data.IterableLoader(broken), epochs=1, checkpoint=tmp_path)
    assert "step 6" in caught.value.__notes__[0]
    expected, other = make(), make()
    trainer(expected).fit(batches, epochs=2)
    trainer(other).fit(batches, epochs=2, checkpoint=tmp_path, resume="auto")
    assert same(other, expected)


def test_an_error_of_the_validation_is_made_up_for(tmp_path: Path) -> None:
    """Going on begins with the validation that failed."""
    good = [rows(5, seed=1)]
    bad = [rows(5, seed=1), {"x": np.zeros((3, 2))}]
    arguments = {"steps": 8, "validate_every": 4, "checkpoint_every": 3}
    whole = trainer(make()).fit(loader(100), validation=good, **arguments)
    with pytest.raises(td.BatchError):
        trainer(make()).fit(
            loader(100), validation=bad, checkpoint=tmp_path, resume="auto", **arguments
        )
    log = td.loggers.JSONLLogger(tmp_path / "log.jsonl")
    with pytest.warns(td.CheckpointWarning, match="validated on other data: .*items was 2 and is"):
        again = trainer(make(), loggers=[log]).fit(
            loader(100), validation=good, checkpoint=tmp_path, resume="auto", **arguments
        )
    assert list(again.rows()) == list(whole.rows())
    assert again.series("val/loss")[0].tolist() == [4, 8]


# Folders


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    trainer(make()).fit(loader(), epochs=1, checkpoint=tmp_path / "a")
    with pytest.raises(td.CheckpointError, match="has checkpoints of another run.*resume="):
        trainer(make()).fit(loader(), epochs=1, checkpoint=tmp_path / "a")
    before = (tmp_path / "a" / "history.jsonl").read_bytes()
    resume = {"epochs": 2, "checkpoint": tmp_path / "a", "resume": "auto"}
    with pytest.raises(td.CheckpointError, match="does not fit the step"):
        trainer(make(nn.Sequential(nn.Linear(2, 1)))).fit(loader(), **resume)
    step = make()
    first = step.state_dict()
    with pytest.raises(td.CheckpointError, match="run on other data: .*rows was 22 and is 30"):
        trainer(step).fit(loader(30), **resume)
    with pytest.raises(td.CheckpointError, match="run on other data: .*seed was 0 and is 1"):
        trainer(step).fit(loader(seed=1), **resume)
    assert all(np.array_equal(first[n], v) for n, v in step.state_dict().items())
    assert (tmp_path / "a" / "history.jsonl").read_bytes() == before
    with td.CheckpointManager(tmp_path / "b") as manager:
        manager.save(step, extra={"position": 3})
    with pytest.raises(td.CheckpointError, match="was not written by a Trainer"):
        trainer(step).fit(loader(), epochs=2, checkpoint=tmp_path / "b", resume="auto")
    with pytest.raises(td.CheckpointError, match="there is no checkpoint"):
        trainer(step).fit(loader(), epochs=2, checkpoint=tmp_path / "c", resume="latest")
    with pytest.raises(td.ArgumentError, match="resume without checkpoint"):
        trainer(step).fit(loader(), epochs=2, resume="auto")


@pytest.mark.parametrize("lost", ["epoch", "loader", "callbacks", "logged", "evaluated_at"])
def test_a_run_that_makes_no_sense_changes_nothing(lost: str, tmp_path: Path) -> None:
    trainer(make()).fit(loader(), steps=3, checkpoint=tmp_path)
    (file,) = tmp_path.glob(f"*/{MANIFEST}")
    body = json.loads(file.read_bytes())
    del body["extra"][lost]
    file.write_text(json.dumps(body | {"checksum": checksum(body)}))
    step = make()
    first = step.state_dict()
    with pytest.raises(td.CheckpointError, match=f"makes sense of .*{lost}"):
        trainer(step).fit(loader(), steps=9, checkpoint=tmp_path, resume="auto")
    assert all(np.array_equal(first[n], v) for n, v in step.state_dict().items())


def test_a_callback_that_cannot_be_restored_leaves_the_position(tmp_path: Path) -> None:
    class Picky(td.callbacks.Callback):
        def state_dict(self):
            return {"seen": 1}

        def load_state_dict(self, state):
            raise ValueError("no")

    trainer(make(), Picky()).fit(loader(), steps=3, checkpoint=tmp_path)
    step, batches = make(), loader()
    first, position = step.state_dict(), batches.state_dict()
    with pytest.raises(td.CallbackError, match="no"):
        trainer(step, Picky()).fit(batches, steps=9, checkpoint=tmp_path, resume="auto")
    assert all(np.array_equal(first[n], v) for n, v in step.state_dict().items())
    assert batches.state_dict() == position


def test_a_list_of_another_length(tmp_path: Path) -> None:
    """In the middle of a pass and between two, by steps and by epochs."""
    batches = [rows(4, seed=i) for i in range(5)]
    for name, until in (("middle", {"steps": 3}), ("between", {"epochs": 1})):
        folder = tmp_path / name
        trainer(make()).fit(batches, checkpoint=folder, **until)
        step = make()
        first = step.state_dict()
        for other in (batches[:4], [*batches, rows(4)], batches[:1]):
            with pytest.raises(
                td.CheckpointError, match=f"other data: .*items was 5 and is {len(other)}"
            ):
                trainer(step).fit(other, steps=9, checkpoint=folder, resume="auto")
        assert all(np.array_equal(first[n], v) for n, v in step.state_dict().items())
        trainer(step).fit(list(batches), steps=9, checkpoint=folder, resume="auto")
        whole = make()
        trainer(whole).fit(batches, steps=9)
        assert same(step, whole)


def test_going_back_to_the_best(tmp_path: Path) -> None:
    def spoil(run):
        if run.epoch == 2:
            run.step.load_params({"bias": np.full(1, 9.0)}, strict=False)

    held_out = data.ArrayLoader(rows(9, seed=1), 4)
    keywords = {"validation": held_out, "checkpoint": tmp_path}
    spoiler = td.callbacks.Lambda(on_epoch_start=spoil)
    one = trainer(make(), spoiler).fit(loader(), epochs=4, **keywords)
    best = td.CheckpointManager(tmp_path, read_only=True).best()  # by val/loss, as the run
    assert best is not None
    assert best.extra["steps"] == one.best("val/loss").step == 10
    two = trainer(make()).fit(loader(), epochs=4, resume="best", **keywords)
    assert two["step"].tolist() == one["step"].tolist()
    assert two["loss"][:10].tolist() == one["loss"][:10].tolist()
    assert two.last("val/loss").value < one.last("val/loss").value


def test_the_best_by_something_unknown(tmp_path: Path) -> None:
    with (
        td.CheckpointManager(tmp_path, metric="val/accuracy", mode="max") as manager,
        pytest.raises(td.ArgumentError, match="by 'val/accuracy', which.*loss, grad_norm, val/l"),
    ):
        trainer(make()).fit(loader(), epochs=1, validation=[rows(4)], checkpoint=manager)


def test_the_folder_knows_what_the_best_is_by(tmp_path: Path) -> None:
    """Not the training loss of the last batch, which falls while the validation gets worse."""

    def spoil(run):
        run.step.load_params({"bias": np.full(1, 3.0 * run.epoch)}, strict=False)

    spoiler = td.callbacks.Lambda(on_epoch_start=spoil)
    held_out = [rows(4, seed=1)]
    trainer(make(), spoiler).fit(
        loader(), epochs=4, validation=held_out, checkpoint=tmp_path / "by folder"
    )
    with td.CheckpointManager(tmp_path / "by manager") as manager:  # which is not told either
        trainer(make(), spoiler).fit(loader(), epochs=4, validation=held_out, checkpoint=manager)
        assert (manager.metric, manager.mode) == ("val/loss", "min")
    for name in ("by folder", "by manager"):
        reading = td.CheckpointManager(tmp_path / name, read_only=True)
        found = reading.restore(make(), "best")
        assert (reading.metric, reading.mode) == ("val/loss", "min")
        assert found is not None
        assert found.extra["steps"] == 5
        assert reading.best() == found
    # Where it goes on without a validation, the best is what it was.
    trainer(make()).fit(loader(), epochs=6, checkpoint=tmp_path / "by folder", resume="auto")
    assert td.CheckpointManager(tmp_path / "by folder", read_only=True).best() == found_again(
        tmp_path / "by folder", 5
    )


def found_again(folder: Path, steps: int) -> td.Checkpoint:
    every = td.CheckpointManager(folder, read_only=True).list()
    return next(c for c in every if c.extra["steps"] == steps)


def test_a_lost_history(tmp_path: Path) -> None:
    trainer(make()).fit(loader(), steps=4, checkpoint=tmp_path)
    contents = (None, b"what is this\n", b'{"step": 1, "loss": {}}\n')
    for steps, content in enumerate(contents, 5):
        file = tmp_path / "history.jsonl"
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.warns(td.CheckpointWarning, match="history"):
            found = trainer(make()).fit(loader(), steps=steps, checkpoint=tmp_path, resume="auto")
        assert found.last("loss").step == steps


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_, **__):
        raise td.CheckpointError("save", "no space left")

    with td.CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(manager, "save", full)
        with pytest.warns(td.CheckpointWarning, match="training goes on: no space left") as caught:
            history = trainer(make()).fit(loader(), epochs=2, checkpoint=manager)
    assert len(history) == 10
    assert len(caught) == 2


def test_compressed_checkpoints(tmp_path: Path) -> None:
    expected, step = make(), make()
    trainer(expected).fit(loader(), steps=9)
    for steps in (4, 9):
        with td.CheckpointManager(tmp_path, compress=True, keep_last=1) as manager:
            average = td.callbacks.EMA(0.5)
            trainer(step, average).fit(loader(), steps=steps, checkpoint=manager, resume="auto")
            latest = manager.latest()
    assert same(step, expected)
    assert {p.name for p in latest.path.iterdir()} == {
        "manifest.json",
        "step.safetensors.gz",
        "beside.arrays.safetensors.gz",
    }
    assert sorted(latest.arrays()) == ["EMA:bias", "EMA:weight"]
    packed = latest.path / "step.safetensors.gz"
    packed.write_bytes(packed.read_bytes()[:-9] + b"123456789")
    with (
        pytest.raises(td.CheckpointError, match="damaged"),
        warnings.catch_warnings(action="ignore"),
    ):
        td.CheckpointManager(tmp_path, read_only=True).restore(make())


def test_a_resumed_run_that_had_stopped_is_over(tmp_path: Path) -> None:
    keywords = {"validation": [rows(4)], "checkpoint": tmp_path, "resume": "auto", "epochs": 50}
    never = 1e9  # no gain is that large

    def stopper(patience):
        return td.callbacks.EarlyStopping(patience=patience, min_delta=never)

    one = trainer(make(), stopper(2)).fit(loader(), **keywords)
    assert one.stopped == "val/loss did not improve for 2 validations"
    two = trainer(make(), stopper(2)).fit(loader(), **keywords)
    assert (len(two), two.stopped) == (len(one), one.stopped)
    three = trainer(make(), stopper(4)).fit(loader(), **keywords)
    assert len(three) == len(one) + 2 * 5
