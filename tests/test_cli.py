"""The `treadle` command, in this process and through its entry points."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle.cli import demo
from treadle.cli.main import main


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "FORCE_COLOR"}
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", check=False, env=environment
    )


def _entry_point() -> str:
    beside = Path(sys.executable).parent / "treadle"
    found = str(beside) if beside.exists() else shutil.which("treadle")
    assert found is not None, "treadle is not installed"
    return found


@pytest.fixture(scope="module")
def output() -> str:
    """What the demo prints when its output is not a terminal."""
    done = _run(_entry_point(), "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_demo_shows_every_stage(output: str) -> None:
    titles = re.findall(r"^(\d)\. (\w+)", output, re.MULTILINE)
    words = ["The", "Traced", "Differentiated", "Evaluated", "Forward", "Exact", "Gradient"]
    assert titles == [(str(i), word) for i, word in enumerate(words, 1)]


def test_demo_is_plain_without_a_terminal(output: str) -> None:
    assert "\x1b" not in output
    assert output.isascii()


def test_demo_checks_hold(output: str) -> None:
    assert output.count("ok: ") == 5
    assert "FAILED" not in output


def test_demo_points_at_the_lines_it_shows(output: str) -> None:
    """Each node names a line of the printed model, and that line has the call."""
    code = dict(re.findall(r"^ {1,3}(\d+) (.*)$", output, re.MULTILINE))
    calls = {"tanh": "td.tanh", "log_softmax": "td.log_softmax", "one_hot": "td.one_hot"}
    for op, call in calls.items():
        found = re.search(rf"= {op}\(.*# classifier\.py:(\d+) in", output)
        assert found is not None, op
        assert call in code[found[1]]
    assert "in <module>" not in output


def test_demo_counts_nodes(output: str) -> None:
    found = re.search(r"(\d+) nodes before, (\d+) after \((\d+) added\)", output)
    assert found is not None
    before, after, added = map(int, found.groups())
    assert after == before + added > before


def test_demo_descends(output: str) -> None:
    rows = re.findall(r"^(\d+) +(\d\.\d+) +(\d\.\d+) *$", output, re.MULTILINE)
    losses = [float(loss) for _, loss, _ in rows]
    assert [int(step) for step, _, _ in rows] == [0, 6, 12, 18, 24, 30]
    assert losses == sorted(losses, reverse=True)


def test_demo_says_what_it_is_not(output: str) -> None:
    assert "Native code is not generated yet." in output


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_demo_holds_for_other_seeds(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seed", str(seed), "--steps", "3"]) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_full_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0"]) == 0
    short = capsys.readouterr().out
    assert main(["demo", "--steps", "0", "--full"]) == 0
    full = capsys.readouterr().out
    assert "lines left out" in short
    assert "lines left out" not in full
    assert len(full) > len(short)


def test_a_failed_check_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "equal_graphs", lambda first, second: False)
    assert main(["demo", "--steps", "0"]) == 1
    assert "FAILED: softmax(x) = softmax(x + c) is accepted" in capsys.readouterr().out


def test_central_differences_find_a_slope() -> None:
    params = {"w": np.array([[1.0, -2.0]]), "b": np.array(3.0)}
    found = demo.central_differences(lambda p: float((p["w"] ** 2).sum() * p["b"]), params, "w")
    assert np.allclose(found, [[6.0, -12.0]])


def test_shortened_keeps_short_texts_whole() -> None:
    lines = [str(i) for i in range(12)]
    assert demo.shortened(lines, 3) == lines
    long = [str(i) for i in range(40)]
    cut = demo.shortened(long, 10)
    left_out = [int(n) for line in cut for n in re.findall(r"\.\.\. (\d+) lines", line)]
    assert sum(left_out) + len(cut) - 2 == len(long)
    assert (cut[0], cut[-1]) == ("0", "39")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"treadle {td.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "Exit codes: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--steps", "-1"], "'-1' is not a whole number of at least 0"),
        (["demo", "--seed", "two"], "'two' is not a whole number of at least 0"),
        (["demo", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_python_m_treadle() -> None:
    done = _run(sys.executable, "-m", "treadle", "--version")
    assert (done.returncode, done.stdout) == (0, f"treadle {td.__version__}\n")
    assert _run(sys.executable, "-m", "treadle").returncode == 2
