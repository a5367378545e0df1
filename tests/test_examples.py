"""Every example runs, briefly; what they reach is asked by slow tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 150

# The settings that make a run short, and something it prints at its end.
BRIEF: dict[str, tuple[list[str], str]] = {
    "accumulate_and_resume": (["steps=4"], "the same bits: True; the same log: True; 4 updates"),
    "csv_table": (["epochs=1", "folder={folder}/table"], "row 5: "),
    "custom_vjp": (["epochs=1", "hidden=16"], "with weights of one bit; the first layer: 128 B"),
    "digits_cnn": (["epochs=1", "width=4"], "of 359 digits are read right"),
    "distributed_digits": (["epochs=1"], "1 ranks: "),
    "dqn": (["steps=600", "episodes=2"], "mean return of 2 episodes: "),
    "ensemble": (["members=2", "steps=3", "hidden=8"], "over spread where there is: "),
    "finetune": (
        ["steps=2", "batch=2", "context=8", "new_tokens=2", "out={folder}/finetuned"],
        "/finetuned: '    def ",
    ),
    "gan": (["steps=20", "out={folder}/gan.png"], "gan.png: digits that no one wrote"),
    "gat": (["steps=2", "people=60"], "groups told right: "),
    "gpt": (
        ["steps=2", "batch=4", "width=16", "layers=1", "letters=40000", "sampled=5"],
        "the network has ",
    ),
    "lora": (
        ["first_steps=2", "steps=2", "batch=2", "context=8", "r=2", "out={folder}/adapter"],
        "with the merged adapters ",
    ),
    "grid_search": (["epochs=1", "folds=2", "rows=200"], "of 1597 digits are read right"),
    "maml": (["steps=2", "hidden=8", "tasks=3"], "error after 5 steps of descent on ten points: "),
    "neural_ode": (["steps=2", "hidden=8", "paths=32", "batch=8"], "a path that was not seen: "),
    "optuna_search": (["trials=2", "epochs=1"], "of held-out digits with {"),
    "pinn": (["steps=5", "width=8"], "largest error at 4096 points: "),
    "plain_loop": (["epochs=2", "folder={folder}/run"], "'000001-step-22', '000002-step-44']"),
    "serve_digits": (["epochs=1", "weights={folder}/digits.safetensors"], "is there to serve"),
    "seq2seq": (["steps=2", "width=16", "layers=1", "batch=8"], "numbers held out are right"),
    "transfer": (["epochs=1", "width=4"], "with the backbone: "),
    "unet": (["steps=2", "width=4", "batch=2"], "that of a threshold "),
    "vae": (["epochs=1", "out={folder}/vae.png"], "vae.png: digits of the data"),
    "vit": (["epochs=1", "width=16", "layers=1"], "of 359 digits are read right"),
    "web_digits": (["epochs=1", "width=4"], "of 359 digits are read right"),
    "web_text": (
        ["steps=2", "width=16", "heads=2", "layers=1", "batch=2"],
        "after 2 steps\nThe weaver ",
    ),
    "wgan_gp": (["steps=2", "hidden=8"], "clouds found: "),
}
# These take seconds to compile; their steps are compared with PyTorch's in test_programs.py.
LARGE = set(
    "ensemble gat grid_search lora maml optuna_search seq2seq transfer unet vit web_digits web_text "
    "wgan_gp".split()
)

# What a whole run prints, and between which bounds it lies.
AIMS: dict[str, tuple[str, float, float]] = {
    "dqn": (r"mean return of \d+ episodes: (\S+)", 195.0, 200.0),
    "ensemble": (r"over spread where there is: (\S+)", 2.0, 1000.0),
    "gat": (r"by features alone, (\S+)% with the graph", 70.0, 100.0),
    "grid_search": (r"in a stack: (\S+)%", 95.0, 100.0),
    "maml": (r"error after 5 steps of descent on ten points: (\S+)", 0.0, 0.4),
    "neural_ode": (r"largest error along a path that was not seen: (\S+)", 0.0, 0.15),
    "optuna_search": (r"best: (\S+)% of held-out", 95.0, 100.0),
    "pinn": (r"largest error at 4096 points: (\S+)", 0.0, 0.01),
    "seq2seq": (r"(\S+)% of 500 numbers held out are right", 98.0, 100.0),
    "transfer": (r"with the backbone: (\S+)%", 90.0, 100.0),
    "unet": (r"the network's overlap is (\S+)%", 80.0, 100.0),
    "vit": (r"(\S+)% of 359 digits are read right", 94.0, 100.0),
    "wgan_gp": (r"clouds found: (\d+) of 8", 8, 8),
}


def test_every_example_is_here() -> None:
    assert sorted(BRIEF) == [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_LINES
    assert f"python examples/{path.name}" in text  # how it is run
    assert text.rstrip().endswith('if __name__ == "__main__":\n    train()')


def _brief(path: Path) -> object:
    marks = [pytest.mark.slow] if path.stem in LARGE else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [_brief(path) for path in EXAMPLES])
def test_examples_run(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the command, in this process: starting another takes longer than training."""
    settings, said = BRIEF[path.stem]
    given = [part for s in settings for part in ("--set", s.format(folder=tmp_path))]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TREADLE_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(path), *given]) == 0, capsys.readouterr().err
    assert said in capsys.readouterr().out


def _environment() -> dict[str, str]:
    """One thread: steps this small are slower with two where other programs run beside them."""
    return os.environ | {"TREADLE_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", AIMS)
def test_examples_reach_their_aim(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / f"{name}.py"
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", cwd=tmp_path, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    pattern, least, most = AIMS[name]
    found = re.findall(pattern, done.stdout)
    assert found, done.stdout
    assert least <= float(found[-1]) <= most, done.stdout


@pytest.mark.slow
def test_the_gpt_beats_pairs(tmp_path: Path) -> None:
    path = ROOT / "examples" / "gpt.py"
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, encoding="utf-8", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.partition("the network has ")[2].split()
    network, pairs = float(words[0]), float(words[words.index("pairs") + 1])
    assert network < pairs
