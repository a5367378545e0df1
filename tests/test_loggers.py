"""Loggers: what they write, that logs go on where they stopped, and that failures do no harm."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import resource
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle.train import loggers
from treadle.train.events import crc32c

ROWS: list[tuple[int, dict[str, float]]] = [
    (1, {"loss": 1.5, "rate": 0.1}),
    (2, {"loss": 0.1 + 0.2, "rate": 0.1}),
    (2, {"val/loss": 0.7}),
    (3, {"loss": math.nan, "rate": math.inf}),
    (4, {"loss": 1e-300, "steps": 7}),
]
FILES = [loggers.CSVLogger, loggers.JSONLLogger]


def _logged(logger: Any, rows: list[tuple[int, dict[str, float]]] = ROWS) -> None:
    for step, values in rows:
        logger.log(step, values)


def _read(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Rows of either kind of file, read by the standard library."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        table = csv.DictReader(io.StringIO(text), strict=True)
        rows: list[dict[str, Any]] = [{k: v for k, v in row.items() if v} for row in table]
    else:
        rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    return [(int(r.pop("step")), {k: float(v) for k, v in r.items()}) for r in rows]


def _path(folder: Path, logger: type) -> Path:
    return folder / "runs" / ("log.csv" if logger is loggers.CSVLogger else "log.jsonl")


def _same(found: list[Any], expected: list[Any]) -> None:
    assert str(found) == str(expected)  # NaN is NaN, and digits are all there


@pytest.mark.parametrize("kind", FILES)
def test_files_hold_every_row(kind: type, tmp_path: Path) -> None:
    path = _path(tmp_path, kind)
    logger = kind(path)
    for i, (step, values) in enumerate(ROWS, 1):
        logger.log(step, values)
        found = _read(path)  # each row is there at once
        _same(found, [(s, {k: float(v) for k, v in r.items()}) for s, r in ROWS[:i]])
    logger.close()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_csv_file_as_text(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    _logged(loggers.CSVLogger(path))
    assert path.read_text() == (
        "step,loss,rate,val/loss,steps\n"
        "1,1.5,0.1,,\n"
        "2,0.30000000000000004,0.1,,\n"
        "2,,,0.7,\n"
        "3,nan,inf,,\n"
        "4,1e-300,,,7\n"
    )


def test_odd_names_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logger = loggers.CSVLogger(path)
    logger.log(1, {'a,"b"': 1.0, "naïve": 2.0})
    logger.resume(1)
    logger.log(2, {'a,"b"': 3.0})
    assert _read(path) == [(1, {'a,"b"': 1.0, "naïve": 2.0}), (2, {'a,"b"': 3.0})]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("half", [b"", b"4", b'4,0.1,"', b'{"step": 4, "lo', b"\xff\xfe\xf0"])
@pytest.mark.parametrize("reached", [0, 2, 3, 9])
def test_a_log_goes_on(kind: type, reached: int, half: bytes, tmp_path: Path) -> None:
    """A process killed in the middle of a row; its successor goes on after an earlier step."""
    path = _path(tmp_path, kind)
    _logged(kind(path))
    with path.open("ab") as file:
        file.write(half)
    logger = kind(path)
    logger.resume(reached)
    logger.log(reached + 1, {"loss": 0.5, "other": 1.0})
    kept = [(s, {k: float(v) for k, v in r.items()}) for s, r in ROWS if s <= reached]
    _same(_read(path), [*kept, (reached + 1, {"loss": 0.5, "other": 1.0})])


@pytest.mark.parametrize("kind", FILES)
def test_a_log_begins_anew(kind: type, tmp_path: Path) -> None:
    path = _path(tmp_path, kind)
    _logged(kind(path))
    logger = kind(path)
    logger.log(1, {"loss": 2.0})
    assert _read(path) == [(1, {"loss": 2.0})]
    other = kind(path.with_name(f"none{path.suffix}"))
    other.resume(5)  # there is no file: nothing to keep
    other.log(6, {"loss": 1.0})
    assert _read(path.with_name(f"none{path.suffix}")) == [(6, {"loss": 1.0})]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("content", "line"),
    [("name,age\nAnn,3\n", 1), ("hello\n", 1), ("step,a\nx,1\n", 2), ('{"step": "1"}\n', 1)],
)
def test_files_of_others_are_refused(kind: type, content: str, line: int, tmp_path: Path) -> None:
    path = _path(tmp_path, kind)
    path.parent.mkdir()
    path.write_text(content)
    at = line if kind is loggers.CSVLogger else 1
    with pytest.raises(td.LoadError, match=f"line {at}, is not of this logger"):
        kind(path).resume(3)
    assert path.read_text() == content


@pytest.mark.parametrize("kind", FILES)
def test_a_disk_that_is_full_for_a_while(kind: type, tmp_path: Path) -> None:
    """The row that did not fit is lost, and nothing else: no half of it stays."""
    path = _path(tmp_path, kind)
    logger = kind(path)
    guarded = loggers.Loggers([logger])
    guarded.log(1, {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, before[1]))
    try:
        with pytest.warns(loggers.LoggerWarning, match=f"{kind.__name__} failed.*too large"):
            guarded.log(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    guarded.log(3, {"loss": 3.0})
    assert _read(path) == [(1, {"loss": 1.0}), (3, {"loss": 3.0})]


def test_half_a_row_that_could_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncating failed too: the next row does it."""
    path = tmp_path / "log.jsonl"
    logger = loggers.JSONLLogger(path)
    logger.log(1, {"loss": 1.0})
    write = os.write

    def full(handle: int, content: bytes) -> int:
        if len(content) < 20:
            raise OSError(errno.ENOSPC, "no space left")
        return write(handle, content[:15])

    def failing(handle: int, length: int) -> None:
        raise OSError(errno.EIO, "nor this")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        broken.setattr(os, "ftruncate", failing)
        with pytest.raises(OSError, match="no space left"):
            logger.log(2, {"loss": 2.0})
    assert not path.read_bytes().endswith(b"\n")
    logger.log(3, {"loss": 3.0})
    assert _read(path) == [(1, {"loss": 1.0}), (3, {"loss": 3.0})]


class _Failing:
    """Fails at some calls."""

    def __init__(self, failing: set[int]):
        self.failing, self.calls, self.rows = failing, 0, []  # type: ignore[var-annotated]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise ConnectionError(errno.ECONNREFUSED, "the server is gone")
        self.rows.append(step)

    def resume(self, step: int) -> None:
        raise td.LoadError("_Failing", "another run")

    def close(self) -> None:
        raise OSError("still gone")


def test_a_failing_logger_warns_once() -> None:
    bad, good = _Failing({2, 3, 5}), _Failing(set())
    both = loggers.Loggers([bad, good])
    with pytest.warns(loggers.LoggerWarning) as caught:
        _logged(both, [(step, {"loss": 1.0}) for step in range(1, 7)])
    assert len(caught) == 1
    assert "_Failing failed, training goes on" in str(caught[0].message)
    assert (bad.rows, good.rows) == ([1, 4, 6], [1, 2, 3, 4, 5, 6])
    with pytest.warns(loggers.LoggerWarning) as caught:
        both.close()
    assert len(caught) == 1  # the good one; the other has warned
    with pytest.raises(td.LoadError, match="another run"):
        both.resume(1)


def test_a_logger_that_keeps_failing_is_left_alone() -> None:
    bad = _Failing(set(range(100)))
    guarded = loggers.Loggers([bad])
    with pytest.warns(loggers.LoggerWarning):
        _logged(guarded, [(step, {}) for step in range(50)])
    assert bad.calls == loggers.MOST_FAILURES


def test_interrupts_are_not_swallowed() -> None:
    class Interrupted(_Failing):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loggers.Loggers([Interrupted(set())]).log(1, {})


def test_only_numbers_are_logged() -> None:
    values = {
        "float": 1.5,
        "int": 3,
        "numpy": np.float32(0.5),
        "zero axes": np.array(2),
        "flag": np.True_,
        "matrix": np.eye(2),
        "text": "abc",
        "none": None,
    }
    found = loggers.scalars(values)
    assert found == {"float": 1.5, "int": 3, "numpy": 0.5, "zero axes": 2, "flag": 1}
    assert {type(v) for v in found.values()} == {int, float}


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    logger = loggers.ConsoleLogger(every=2)
    for step in range(3):
        logger.log(step, {"loss": 1 / 3, "rate": 1e-5, "seen": 123456})
    logger.resume(1)
    logger.close()
    assert capsys.readouterr().out == (
        "step 0  loss 0.3333  rate 1e-05  seen 123456\nstep 2  loss 0.3333  rate 1e-05  seen 123456\n"
    )
    text = io.StringIO()
    loggers.ConsoleLogger(file=text).log(5, {})
    assert text.getvalue() == "step 5\n"
    with pytest.raises(td.ArgumentError, match="every = 0"):
        loggers.ConsoleLogger(every=0)


def test_a_value_named_step(tmp_path: Path) -> None:
    for kind in FILES:
        with pytest.raises(td.ArgumentError, match="named 'step'"):
            kind(_path(tmp_path, kind)).log(1, {"step": 2.0})


# TensorBoard


def _crc(data: bytes) -> int:
    """CRC-32C bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            top = (crc ^ byte >> bit) & 1
            crc = crc >> 1 ^ 0x82F63B78 * top
    return crc ^ 0xFFFFFFFF


def _records(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        length = content[at : at + 8]
        end = at + 12 + struct.unpack("<Q", length)[0]
        for part, check in ((length, at + 8), (content[at + 12 : end], end)):
            masked = struct.unpack("<I", content[check : check + 4])[0]
            rotated = (masked - 0xA282EAD8) % 2**32
            assert (rotated << 15 | rotated >> 17) % 2**32 == _crc(part)
        yield content[at + 12 : end]
        at = end + 4


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and contents of a protobuf message's fields."""
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        key = varint()
        match key & 7:
            case 0:
                value: Any = varint()
            case 1:
                (value,) = struct.unpack_from("<d", message, at)
                at += 8
            case 2:
                size = varint()
                value, at = message[at : at + size], at + size
            case 5:
                (value,) = struct.unpack_from("<f", message, at)
                at += 4
            case kind:
                raise AssertionError(f"field of kind {kind}")
        yield key >> 3, value


def _events(folder: Path) -> list[list[tuple[int, dict[str, float]]]]:
    """For each file the rows after its version; a restart is a row of None."""
    files = []
    for path in sorted(folder.iterdir()):
        rows: list[Any] = []
        first, *rest = (dict(_fields(r)) for r in _records(path.read_bytes()))
        assert first[3] == b"brain.Event:2"
        for event in rest:
            assert 1e9 < event[1] < 1e10  # seconds since 1970
            if 7 in event:
                assert dict(_fields(event[7])) == {1: 1}
                rows.append((event[2], None))
                continue
            values = [dict(_fields(v)) for field, v in _fields(event[5]) if field == 1]
            rows.append((event.get(2, 0), {v[1].decode(): v[2] for v in values}))
        files.append(rows)
    return files


def test_checksums() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    data = np.random.default_rng(0).bytes(100)
    assert all(crc32c(data[:n]) == _crc(data[:n]) for n in range(100))


def test_event_files(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    logger = loggers.TensorBoardLogger(folder)
    _logged(logger)
    logger.log(2**40, {"größe": 1e300, "x" * 300: -1e300})
    rows = _events(folder)
    assert len(rows) == 1  # what was logged is there before it is closed
    expected = [(s, {k: float(np.float32(v)) for k, v in r.items()}) for s, r in ROWS]
    expected.append((2**40, {"größe": math.inf, "x" * 300: -math.inf}))
    _same(rows[0], expected)
    logger.close()
    logger.close()


def test_event_files_go_on(tmp_path: Path) -> None:
    _logged(loggers.TensorBoardLogger(tmp_path))
    logger = loggers.TensorBoardLogger(tmp_path)
    logger.resume(2)
    logger.log(3, {"loss": 0.5})
    before, after = _events(tmp_path)
    assert len(before) == len(ROWS)
    assert after == [(3, None), (3, {"loss": 0.5})]


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    """With the package of the extra `tensorboard`; the tests above read the files by themselves."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = pytest.importorskip(module)
    _logged(loggers.TensorBoardLogger(tmp_path))
    logger = loggers.TensorBoardLogger(tmp_path)
    logger.resume(2)
    logger.log(3, {"loss": 0.5})
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) >= {"loss", "rate", "val/loss"}
    assert [(e.step, round(e.value, 6)) for e in found.Scalars("loss")] == [
        (1, 1.5),
        (2, 0.3),
        (3, 0.5),
    ]


# Services, by stand-ins for their packages


class _WandbRun:
    def __init__(self, step: int) -> None:
        self.step, self.rows, self.finished = step, [], False  # type: ignore[var-annotated]

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))
        self.step = step

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module: Any = types.ModuleType("wandb")
    module.started = []
    module.reached = 0

    def init(**options: Any) -> _WandbRun:
        module.started.append(options)
        module.run = _WandbRun(module.reached)
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb(wandb: Any) -> None:
    logger = loggers.WandbLogger("digits", name="first")
    assert wandb.started == [{"project": "digits", "name": "first"}]
    _logged(logger)
    assert [(s, dict(v)) for s, v in ROWS[:3]] == wandb.run.rows[:3]
    assert len(wandb.run.rows) == len(ROWS)
    logger.close()
    assert wandb.run.finished


def test_wandb_goes_on(wandb: Any) -> None:
    wandb.reached = 4  # steps 0 to 3 are on the server
    logger = loggers.WandbLogger("digits", id="abc", resume="must")
    logger.resume(2)
    for step in (3, 4, 5):
        logger.log(step, {"loss": 1.0})
    assert wandb.run.rows == [(4, {"loss": 1.0}), (5, {"loss": 1.0})]


class _Metric(types.SimpleNamespace):
    pass


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module: Any = types.ModuleType("mlflow")
    module.calls, module.rows, module.history = [], [], {}

    class Client:
        def get_run(self, run: str) -> Any:
            assert run == "the run"
            return types.SimpleNamespace(data=types.SimpleNamespace(metrics=module.history))

        def get_metric_history(self, run: str, key: str) -> list[_Metric]:
            return [_Metric(step=s) for s in module.history[key]]

    def start_run(**options: Any) -> Any:
        module.calls.append(("start_run", options))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="the run"))

    module.MlflowClient = Client
    module.start_run = start_run
    module.set_experiment = lambda name: module.calls.append(("set_experiment", name))
    module.end_run = lambda: module.calls.append(("end_run",))
    module.log_metrics = lambda values, step: module.rows.append((step, values))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_mlflow(mlflow: Any) -> None:
    logger = loggers.MLflowLogger("digits", run_name="first")
    _logged(logger, ROWS[:3])
    logger.close()
    assert mlflow.calls == [
        ("set_experiment", "digits"),
        ("start_run", {"run_name": "first"}),
        ("end_run",),
    ]
    assert mlflow.rows == [(s, dict(v)) for s, v in ROWS[:3]]


def test_mlflow_goes_on(mlflow: Any) -> None:
    mlflow.history = {"loss": [1, 2, 3], "val/loss": [2]}
    logger = loggers.MLflowLogger(run_id="the run")
    logger.resume(2)
    for step in (3, 4):
        logger.log(step, {"loss": 1.0, "val/loss": 2.0})
    assert mlflow.rows == [(3, {"val/loss": 2.0}), (4, {"loss": 1.0, "val/loss": 2.0})]


@pytest.mark.parametrize(
    ("package", "make"), [("wandb", loggers.WandbLogger), ("mlflow", loggers.MLflowLogger)]
)
def test_packages_that_are_not_there(
    package: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(td.ArgumentError, match=f"pip install {package}"):
        make()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "runs").write_text("")
    kinds = [loggers.CSVLogger, loggers.JSONLLogger]
    several = [kind(tmp_path / "runs" / "log") for kind in kinds]
    guarded = loggers.Loggers([*several, loggers.TensorBoardLogger(tmp_path / "runs")])
    with pytest.warns(loggers.LoggerWarning) as caught:
        _logged(guarded, ROWS)
    guarded.close()
    assert len(caught) == 3
    assert os.listdir(tmp_path) == ["runs"]
