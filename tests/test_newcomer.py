"""Mistakes of the first hour: each is answered with what to do instead."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import callbacks, data, losses, nn, optim
from treadle.cli import main as command
from treadle.cli.main import main
from treadle.train import progress

BATCH = {"x": np.ones((4, 3), np.float32), "y": np.zeros(4, np.int32)}


def loss(model: Any, batch: Any) -> Any:
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def compiled(**changed: Any) -> td.TrainStep:
    given: dict[str, Any] = {
        "model": nn.Linear(3, 2),
        "loss": loss,
        "optimizer": optim.sgd(0.1),
        "batch": BATCH,
        "device": "oracle",
    }
    return td.compile_step(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"optimizer": optim.adamw}, ["optimizer is adamw", "Call it: optim.adamw(1e-3)"]),
        ({"optimizer": 1e-3}, ["optimizer is 0.001", "one of td.optim"]),
        ({"model": nn.Linear}, ["nn.layers.Linear", "a class", "Linear(...)"]),
        ({"loss": lambda model: model}, ["the loss takes (model)", "(model, batch)"]),
        ({"loss": losses.mse(1.0, 2.0)}, ["the loss is", "Pass a function"]),
    ],
)
def test_compiling(changed: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(td.ArgumentError) as caught:
        compiled(**changed)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_forward_of_one_argument() -> None:
    with pytest.raises(td.ArgumentError, match=r"the forward takes \(x\)"):
        compiled().attach(lambda x: x, td.Spec((1, 3)))


def test_rows_of_another_size_are_not_incomplete_batches() -> None:
    step = compiled()
    with pytest.raises(td.BatchError, match="Pass rows of the same size"):
        step({"x": np.ones((4, 5), np.float32), "y": BATCH["y"]})
    with pytest.raises(td.BatchError, match="Drop incomplete batches"):
        step({name: array[:3] for name, array in BATCH.items()})


def test_one_callback_is_not_a_list_of_them() -> None:
    with pytest.raises(td.ArgumentError, match=r"one EarlyStopping. Pass a list"):
        td.Trainer(compiled(), callbacks.EarlyStopping())  # type: ignore[arg-type]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_table_with_another_delimiter(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"a{delimiter}b\n1{delimiter}2\n")
    with pytest.raises(td.LoadError) as caught:
        data.read_csv(path)
    assert f"line 1: the header is one name, {f'a{delimiter}b'!r}" in str(caught.value)
    assert f"delimiter={delimiter!r}" in str(caught.value)
    table = data.read_csv(path, delimiter=delimiter)
    assert {name: column.tolist() for name, column in table.items()} == {"a": [1], "b": [2]}


def test_a_table_in_utf_16(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("a,b\n1,2\n".encode("utf-16-le"))
    with pytest.raises(td.LoadError, match="line 1: there is a zero byte.*utf-16"):
        data.read_csv(path)


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (data.read_csv, data.read_npy, data.read_idx):
        with pytest.raises(td.LoadError) as caught:
            read("rows.csv")
        assert f"no file rows.csv. It was looked for from {tmp_path}." in str(caught.value)
        with pytest.raises(td.LoadError, match="is a folder. Name a file in it"):
            read(tmp_path)


def test_encoders_name_themselves() -> None:
    with pytest.raises(td.ArgumentError, match="OneHotEncoder.transform: 'c'"):
        data.OneHotEncoder.fit(["a", "b"]).transform(["c"])
    with pytest.raises(td.ArgumentError, match="LabelEncoder.transform: 'c'"):
        data.LabelEncoder.fit(["a", "b"]).transform(["c"])


def test_why_a_run_stopped_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stop = callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)
    td.Trainer(compiled(), [stop], progress="lines").fit([BATCH], epochs=9)
    assert "stopped after step 2: loss did not improve" in capsys.readouterr().out


def test_validations_do_not_make_steps_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step each second, of four rows; and a validation of a minute."""
    run = callbacks.Run(compiled(), td.loggers.Loggers())
    times = itertools.chain([0.0, 0.0, 1.0, 61.0, 61.0], itertools.repeat(62.0))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(times))
    meter = progress.Meter(run, None, 100)
    run.batch = BATCH
    for is_followed in (False, True, False):
        run.steps += 1
        run.batches += 1
        meter.count(run)
        if is_followed:
            meter.evaluated()
    rate, *_, left = meter.speed(run)
    assert rate == "4 samples/s"
    assert left == f"{progress.clock(97 * 62 / 2)} left"


def test_commands_say_what_is_wrong_without_a_stack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TREADLE_THREADS", "many")
    assert main(["info"]) == 1
    written = capsys.readouterr()
    assert written.err.startswith("ArgumentError: threads: TREADLE_THREADS is 'many'")
    assert "Traceback" not in written.err
    assert written.out == ""


def test_a_command_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_demo", stopped)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_reader_that_has_seen_enough() -> None:
    script = f"{sys.executable} -m treadle tour | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Treadle ")
    assert done.stderr == ""
