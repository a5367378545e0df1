"""The `treadle` command, in this process and through its entry points."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle.base.terminal import Terminal
from treadle.cli import demo, tour
from treadle.cli.console import Sections
from treadle.cli.main import main
from treadle.data.digits import load_digits


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
def demo_output() -> str:
    """What the whole demo prints when its output is not a terminal; exit code 0 is the target."""
    done = _run(_entry_point(), "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def _held_out(output: str) -> float:
    found = re.search(r"(\d+\.\d)% of (\d+) recognised", output)
    assert found is not None
    assert int(found[2]) == demo.HELD_OUT
    return float(found[1])


def test_demo_recognises_digits(demo_output: str) -> None:
    assert _held_out(demo_output) >= 98
    assert demo_output.count("ok: ") == 2
    assert "FAILED" not in demo_output


def test_demo_shows_its_parts(demo_output: str) -> None:
    titles = re.findall(r"^(\d)\. (\w+)", demo_output, re.MULTILINE)
    words = ["The", "Compiling", "Training", "Held", "Against", "What"]
    assert titles == [(str(i), word) for i, word in enumerate(words, 1)]
    assert td.summary(demo.Network()) in demo_output
    assert "device cpu, precision float32, 21,386 parameters" in demo_output
    assert "append_updates" in demo_output


def test_demo_prints_lines_while_training(demo_output: str) -> None:
    line = (
        r"^step +(\d+) of 800  loss (\d\.\d+)  accuracy +(\d+\.\d)% +\d+ steps/s +\d+\.\d s left$"
    )
    rows = re.findall(line, demo_output, re.MULTILINE)
    assert [int(count) for count, _, _ in rows] == [100 * i for i in range(1, 9)]
    assert float(rows[-1][1]) < float(rows[0][1])


def test_demo_is_plain_without_a_terminal(demo_output: str) -> None:
    assert "\x1b" not in demo_output
    assert demo_output.isascii()


def test_demo_measures_compiling_and_steps(demo_output: str) -> None:
    assert re.search(r"^\d+\.\d\d s from the model to its first step$", demo_output, re.MULTILINE)
    timed = r"^(\w+) +(\d+) +(\d+\.\d\d) +(\d+\.\d) *$"
    rows = re.findall(timed, demo_output, re.MULTILINE)
    assert [row[:2] for row in rows] == [("cpu", "800"), ("oracle", str(demo.ORACLE_STEPS))]
    ratio = re.search(r"^A native step is (\d+\.\d) times as fast", demo_output, re.MULTILINE)
    assert ratio is not None
    native, interpreted = (float(row[2]) for row in rows)
    # The figures are rounded, the step's to hundredths of a millisecond.
    assert (interpreted - 0.01) / (native + 0.01) - 0.1 <= float(ratio[1])
    assert float(ratio[1]) <= (interpreted + 0.01) / max(native - 0.01, 1e-3) + 0.1


def test_demo_compares_with_the_oracle(demo_output: str) -> None:
    found = re.search(r"losses within (\S+) of the oracle's", demo_output)
    assert found is not None
    assert 0 < float(found[1]) < 1e-4  # float32, and the same training


def test_demo_says_where_the_digits_are_from(demo_output: str) -> None:
    assert "Alpaydin and Kaynak, UCI, CC BY 4.0" in demo_output


def test_demo_draws_what_is_not_recognised(demo_output: str) -> None:
    captions = re.findall(r"(\d) taken for (\d)", demo_output)
    assert 1 <= len(captions) <= demo.DRAWN
    assert all(digit != guess for digit, guess in captions)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_missed_target_is_an_exit_code(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", str(steps)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: " in printed
    assert _held_out(printed) < 98
    assert len(re.findall(r"^step \d", printed, re.MULTILINE)) == steps


def test_demo_reaches_the_target_from_another_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seed", "1", "--steps", "400"]) == 0
    assert _held_out(capsys.readouterr().out) >= 98


def test_demo_does_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed in ("3", "3", "4"):
        main(["demo", "--seed", seed, "--steps", "12"])
        lines = capsys.readouterr().out.splitlines()
        figures = (
            r"loss \d\.\d+  accuracy +\d+\.\d%|.*recognised.*|.*taken for.*|.*of the oracle's.*"
        )
        printed.append([m[0] for line in lines if (m := re.search(figures, line))])
    assert len(printed[0]) > demo.LINES
    assert printed[0] == printed[1] != printed[2]


def test_a_loss_that_is_not_the_oracles_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "TOLERANCE", 0.0)
    assert main(["demo", "--steps", "2"]) == 1
    assert "of the oracle's, at most 0 wanted" in capsys.readouterr().out


def test_demo_on_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    terminal = Terminal(written, is_live=True, has_colours=True)
    monkeypatch.setattr(demo, "Sections", lambda: Sections(terminal))
    assert main(["demo", "--steps", "8"]) == 1
    assert "steps/s" in written.getvalue()
    assert re.search(r"\r1/8 .*━.*\x1b\[K", written.getvalue())
    assert "\r\x1b[Kstep" in written.getvalue()  # the bar is wiped out for a line
    assert len(re.findall(r"step \d of 8", written.getvalue())) == 8
    assert "\x1b[1;36mA native step is" in written.getvalue()
    assert re.search(r"\x1b\[48;5;2\d\dm  ", written.getvalue())  # a grey pixel


def test_the_split_is_fixed_and_has_everything_once() -> None:
    first, again = demo.split_digits(), demo.split_digits()
    assert [len(part) for part in first] == [1437, 360]
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.x, other.x)
    rows = np.concatenate([first[0].x, first[1].x])
    images, labels = load_digits()
    assert np.array_equal(np.sort(np.concatenate([p.y for p in first])), np.sort(labels))
    assert sorted(map(bytes, rows)) == sorted(map(bytes, images))


def test_batches_pass_through_every_image_before_any_comes_again() -> None:
    digits = demo.Digits(np.arange(200.0)[:, None], np.arange(200))
    found = [batch["y"] for batch in demo.batches(digits, 7, seed=0)]
    assert [len(y) for y in found] == [demo.BATCH] * 7
    for epoch in (found[:3], found[3:6]):
        assert len(set(np.concatenate(epoch).tolist())) == 3 * demo.BATCH
    assert not np.array_equal(found[0], found[3])


def test_drawn() -> None:
    image = np.zeros((2, 64))
    image[0, :8], image[1, 63] = 1, 0.5
    text = demo.drawn(image, ["one", "two"]).split("\n")
    assert len(text) == 9
    assert text[0] == "@" * 16
    assert text[7] == "==".rjust(34)
    assert text[8].split() == ["one", "two"]


def test_shaded() -> None:
    image = np.zeros((2, 1, 8, 8))
    image[0, 0, 0, 0] = 1
    lines = demo.shaded(image, ["one", "two"]).split("\n")
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in lines[:8]] == [[]] * 8
    assert lines[8].split() == ["one", "two"]
    assert re.findall(r"48;5;(\d+)m", lines[0])[:2] == ["255", "232"]


@pytest.fixture(scope="module")
def tour_output() -> str:
    """What the tour prints when its output is not a terminal."""
    done = _run(_entry_point(), "tour")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_tour_shows_every_stage(tour_output: str) -> None:
    titles = re.findall(r"^(\d)\. (\w+)", tour_output, re.MULTILINE)
    words = ["The", "Traced", "Differentiated", "Evaluated", "Forward", "Exact", "Gradient"]
    assert titles == [(str(i), word) for i, word in enumerate(words, 1)]


def test_tour_is_plain_without_a_terminal(tour_output: str) -> None:
    assert "\x1b" not in tour_output
    assert tour_output.isascii()


def test_tour_checks_hold(tour_output: str) -> None:
    assert tour_output.count("ok: ") == 5
    assert "FAILED" not in tour_output


def test_tour_points_at_the_lines_it_shows(tour_output: str) -> None:
    """Each node names a line of the printed model, and that line has the call."""
    code = dict(re.findall(r"^ {1,3}(\d+) (.*)$", tour_output, re.MULTILINE))
    calls = {"tanh": "td.tanh", "log_softmax": "td.log_softmax", "one_hot": "td.one_hot"}
    for op, call in calls.items():
        found = re.search(rf"= {op}\(.*# classifier\.py:(\d+) in", tour_output)
        assert found is not None, op
        assert call in code[found[1]]
    assert "in <module>" not in tour_output


def test_tour_counts_nodes(tour_output: str) -> None:
    found = re.search(r"(\d+) nodes before, (\d+) after \((\d+) added\)", tour_output)
    assert found is not None
    before, after, added = map(int, found.groups())
    assert after == before + added > before


def test_tour_descends(tour_output: str) -> None:
    rows = re.findall(r"^(\d+) +(\d\.\d+) +(\d\.\d+) *$", tour_output, re.MULTILINE)
    losses = [float(loss) for _, loss, _ in rows]
    assert [int(step) for step, _, _ in rows] == [0, 6, 12, 18, 24, 30]
    assert losses == sorted(losses, reverse=True)


def test_tour_says_what_it_is_not(tour_output: str) -> None:
    assert "All of this ran in the float64 oracle." in tour_output


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tour_holds_for_other_seeds(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "--seed", str(seed), "--steps", "3"]) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_full_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "--steps", "0"]) == 0
    short = capsys.readouterr().out
    assert main(["tour", "--steps", "0", "--full"]) == 0
    full = capsys.readouterr().out
    assert "lines left out" in short
    assert "lines left out" not in full
    assert len(full) > len(short)


def test_a_failed_check_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tour, "equal_graphs", lambda first, second: False)
    assert main(["tour", "--steps", "0"]) == 1
    assert "FAILED: softmax(x) = softmax(x + c) is accepted" in capsys.readouterr().out


def test_central_differences_find_a_slope() -> None:
    params = {"w": np.array([[1.0, -2.0]]), "b": np.array(3.0)}
    found = tour.central_differences(lambda p: float((p["w"] ** 2).sum() * p["b"]), params, "w")
    assert np.allclose(found, [[6.0, -12.0]])


def test_shortened_keeps_short_texts_whole() -> None:
    lines = [str(i) for i in range(12)]
    assert tour.shortened(lines, 3) == lines
    long = [str(i) for i in range(40)]
    cut = tour.shortened(long, 10)
    left_out = [int(n) for line in cut for n in re.findall(r"\.\.\. (\d+) lines", line)]
    assert sum(left_out) + len(cut) - 2 == len(long)
    assert (cut[0], cut[-1]) == ("0", "39")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"treadle {td.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["demo"], ["tour"], ["train"], ["explain"], ["bench"], ["info"]],
    ids=lambda a: " ".join(a),
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--help"])
    assert exit_.value.code == 0
    assert "Exit codes: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: FILE.py"),
        (["bench", "gpu"], "'gpu' is not one of: mlp, cnn, transformer"),
        (["bench", "--seconds", "-1"], "'-1' is not a number of seconds"),
        (["demo", "--steps", "-1"], "'-1' is not a whole number of at least 0"),
        (["demo", "--seed", "two"], "'two' is not a whole number of at least 0"),
        (["demo", "extra"], "unrecognized arguments: extra"),
        (["demo", "--full"], "unrecognized arguments: --full"),
        (["tour", "--steps", "1.5"], "'1.5' is not a whole number of at least 0"),
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
