"""`treadle train`, `bench` and `info`."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import treadle as td
import treadle_checker.__main__
from treadle import optim
from treadle.cli.bench import WORKLOADS, loss
from treadle.cli.main import main
from treadle.cli.train import LARGEST, UsageError, converted, parsed, settings_of

SCRIPT = '''
"""A training script."""
from __future__ import annotations
import json
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import treadle as td
from beside import rate
from treadle import losses, nn, optim

@dataclass
class Seen:
    settings: dict

def train(out: str, steps: int = 3, lr: float = rate, wide: bool = False, name: str | None = None,
          sizes=(1, 2), resume: str | None = None, fail: str = ""):
    """Fits a line."""
    Path(out).write_text(json.dumps(Seen(dict(steps=steps, lr=lr, wide=wide, name=name,
                                              sizes=sizes, resume=resume)).settings))
    batch = {"x": np.eye(2, dtype=np.float32), "y": np.ones((2, 1), np.float32)}
    loss = lambda model, b: losses.mse(model(b["x"]), b["y"])
    step = td.compile_step(nn.Linear(2, 1), loss, optim.sgd(lr), batch, device="oracle")
    if fail == "treadle":
        step({"x": batch["x"]})
    if fail == "other":
        raise KeyError("gone")
    td.Trainer(step).fit([batch], steps=steps, checkpoint=Path(out).with_suffix(".run"),
                         resume=resume)
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("rate = 0.25\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)


def call(script: Path, *settings: str, resume: bool = False) -> int:
    out = script.with_name("out.json")
    arguments = [part for s in (f"out={out}", *settings) for part in ("--set", s)]
    return main(["train", str(script), *arguments, *(["--resume"] if resume else [])])


def seen(script: Path) -> dict:
    return json.loads(script.with_name("out.json").read_text())


def test_settings_are_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(script) == 0
    assert seen(script)["lr"] == 0.25
    assert "step 3/3" in capsys.readouterr().out
    out = script.with_name("out.json")
    assert (
        call(script, "steps=5", "lr=1e-1", "wide=true", "name=a=b", "sizes=[3]", resume=True) == 0
    )
    assert seen(script) == {
        "steps": 5,
        "lr": 0.1,
        "wide": True,
        "name": "a=b",
        "sizes": [3],
        "resume": "auto",
    }
    assert "resumed at step 3" in capsys.readouterr().out
    assert len(out.with_suffix(".run").joinpath("history.jsonl").read_text().splitlines()) >= 5


def test_settings_are_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(script), "--settings"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "Fits a line."
    assert "  out (needed)\n  steps = 3\n  lr = 0.25\n" in out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["stepz=3"], "has no setting 'stepz'. Did you mean 'steps'? There are: out, steps, lr"),
        (["steps"], "--set 'steps' is not key=value"),
        (["steps=three"], "--set steps=three: 'three' is not of type int"),
        (["lr=fast"], "'fast' is not of type float"),
        (["wide=maybe"], "'maybe' is not of type bool"),
    ],
)
def test_wrong_settings(
    settings: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(script, *settings) == 2
    assert message in capsys.readouterr().err
    assert not script.with_name("out.json").exists()


COMMANDS = (["train"], ["explain"], ["export-web", "--out", "page"], ["serve"])
NO_PYTHON = {
    "none.py": (None, "cannot be read: No such file"),
    "folder.py": ("", "cannot be read: Is a directory"),
    "image.py": (b"\x89PNG\xff", "is no text in UTF-8"),
    "zeros.py": (b"x = 1\0", "null bytes"),
    "half.py": (b"x = 1\ndef (:\n", "line 2 is no Python: invalid syntax"),
    "deep.py": (b"x = " + b"(" * 5000, "is no Python"),
    "large.py": (b"# " + b"x" * (LARGEST - 1), "has more than"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
@pytest.mark.parametrize("name", NO_PYTHON)
def test_what_is_no_python_is_said_in_a_line(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, told = NO_PYTHON[name]
    path = tmp_path / name
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert main([command[0], str(path), *command[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"treadle {command[0]}: {path}")
    assert told in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret.py"
    path.touch(0o000)
    assert main(["train", str(path)]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_errors_name_no_line_of_the_command(tmp_path: Path) -> None:
    """A user's own lines are named, and begin a traceback; those of the command are nobody's."""
    (tmp_path / "own.py").write_text("import nothing_of_that_name\n")
    cases = {
        ("generate", "none", "hello"): "LoadError: load: there is no folder none. ",
        ("train", "own.py"): "Traceback (most recent call last):\n"
        '  File "own.py", line 1, in <module>\n',
    }
    for arguments, begin in cases.items():
        found = subprocess.run(
            [sys.executable, "-m", "treadle", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 1
        assert found.stderr.startswith(begin), found.stderr
        assert "runpy" not in found.stderr


def test_a_corpus_that_cannot_be_written_is_known_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["fuzz", "--cases", "0", "--corpus", str(tmp_path / "file")]) == 1
    assert "cannot be a folder of programs: File exists" in capsys.readouterr().err


def test_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert main(["train", str(tmp_path / "none.py")]) == 2
    assert "none.py cannot be read" in capsys.readouterr().err
    assert main(["train", str(script)]) == 2
    assert "needs out: --set out=..." in capsys.readouterr().err
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    assert main(["train", str(empty)]) == 2
    assert "has no function 'train'" in capsys.readouterr().err
    empty.write_text("def train(): pass\n")
    assert main(["train", str(empty), "--resume"]) == 2
    assert "train has no setting 'resume'" in capsys.readouterr().err


def test_failures(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(script, "fail=treadle") == 1
    err = capsys.readouterr().err
    assert err.startswith("BatchError: step: the batch does not fit: y is missing.")
    assert "script.py:" in err
    assert "Traceback" not in err
    assert call(script, "fail=other") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "KeyError: 'gone'" in err


def test_ctrl_c(script: Path) -> None:
    command = [sys.executable, "-m", "treadle", "train", str(script), "--set", "steps=100000000"]
    out = script.with_name("out.json")
    process = subprocess.Popen(
        [*command, "--set", f"out={out}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not out.with_suffix(".run").exists():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "stopped after step" in err or err.endswith("stopped\n")


PRINTS = """
import sys
def train(lines: int = 1):
    for i in range(lines):
        print("line", i)
    sys.stdout.flush()
"""


def closed(command: list[str], *, before: bool) -> tuple[int, str]:
    """The code and the errors of a command whose reader goes away: at once, or after a line."""
    words = [sys.executable, "-m", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        if not before:
            process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read().decode()
        return process.wait(timeout=300), err


def test_a_closed_pipe_is_no_verdict(tmp_path: Path) -> None:
    """`| head` exits as a shell says that a pipe was closed, in silence, however short the output."""
    script, broken = tmp_path / "script.py", tmp_path / "step.cert"
    script.write_text(PRINTS)
    broken.write_bytes(b"no certificate")
    for before, command in (
        (True, ["treadle", "info"]),
        (True, ["treadle", "check", str(broken)]),
        (True, ["treadle_checker", str(broken)]),
        (False, ["treadle", "train", str(script), "--set", "lines=100000"]),
    ):
        assert closed(command, before=before) == (141, ""), command


def test_a_pipe_of_the_users_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def train():\n    raise BrokenPipeError('a socket of mine')\n")
    process = subprocess.run(
        [sys.executable, "-m", "treadle", "train", str(script)], capture_output=True, text=True
    )
    assert process.returncode == 1
    assert "a socket of mine" in process.stderr


def test_ctrl_c_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(treadle_checker.__main__, "check_file", stopped)
    assert main(["check", "step.cert"]) == treadle_checker.__main__.main(["step.cert"]) == 130
    assert capsys.readouterr().err == "stopped\n" * 2


def _parameter(**annotations) -> inspect.Parameter:
    return inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, **annotations)


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        (_parameter(annotation=int), "3", 3),
        (_parameter(annotation=float), "3", 3.0),
        (_parameter(annotation=float), "inf", float("inf")),
        (_parameter(annotation=int | None), "none", None),
        (_parameter(annotation=int | float), "2.5", 2.5),
        (_parameter(annotation=str), "3", "3"),
        (_parameter(annotation=str), "none", "none"),
        (_parameter(annotation=bool), "off", False),
        (_parameter(annotation=Path), "a/b", "a/b"),
        (_parameter(default=1.5), "2", 2.0),
        (_parameter(default="a"), "2", "2"),
        (_parameter(default=None), "2", 2),
        (_parameter(default=(1, 2)), "(3, 4)", (3, 4)),
        (_parameter(), "{'a': 1}", {"a": 1}),
        (_parameter(), "free text", "free text"),
    ],
)
def test_conversions(parameter: inspect.Parameter, text: str, value: object) -> None:
    found = converted(text, parameter)
    assert (type(found), found) == (type(value), value)


def test_annotations_that_cannot_be_evaluated() -> None:
    def train(x: Unknown = 3, *rest, **more): ...  # noqa: F821

    parameters = settings_of(train)
    assert list(parameters) == ["x"]
    with pytest.raises(UsageError, match="no setting 'rest'"):
        parsed(["rest=1"], parameters, Path("file.py"))


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mlp", "--device", "oracle", "--seconds", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["workload"], row["parameters"], row["steps"]) == ("mlp", 101_770, 1)
    assert row["ms"] > 0
    assert row["per_second"] == pytest.approx(128e3 / row["ms"])
    assert main(["bench", "mlp", "--device", "oracle", "--seconds", "0"]) == 0
    assert "MLP 784-128-10, batch 128" in capsys.readouterr().out


@pytest.mark.parametrize("name", WORKLOADS)
def test_bench_workloads_are_models(name: str) -> None:
    work = WORKLOADS[name]
    batch = work.batch()
    assert batch["x"].shape == work.x
    assert batch["y"].max() < work.classes
    step = td.compile_step(work.make(), loss, optim.sgd(0.1), batch, device="oracle")
    assert step.report.unreached == ()


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_THREADS", "3")
    monkeypatch.setenv("TREADLE_CACHE", "off")
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["treadle"] == td.__version__
    assert facts["cpu"]["threads"] == 3
    assert facts["plan cache"] is None
    assert {"oracle", "cpu"} <= set(facts["devices"])
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "3 threads" in out
    assert "plan cache     off" in out


def test_info_of_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "plans"))
    assert main(["info"]) == 0
    assert f"{tmp_path / 'plans'}: 0 entries" in capsys.readouterr().out
