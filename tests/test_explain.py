"""`treadle explain`, and what reports say of rewrites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import treadle as td
from treadle import nn, optim
from treadle.base.origin import Origin
from treadle.base.rewrites import Exactness, Recognised, Rewritten
from treadle.cli.explain import explained, shown
from treadle.cli.main import main
from treadle.step.train_step import TrainStep

SCRIPT = """
import numpy as np
import treadle as td
from treadle import nn, optim

def loss(model, batch):
    return model(batch["x"]).square().mean()

class Block(nn.Module):
    def __init__(self, d):
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(td.gelu(self.up(self.norm(x))))

def train(budget: float = 0.8, second: bool = False):
    print("hello")
    options = td.CompileOptions(memory_budget=budget)
    model = nn.Sequential(*(Block(64) for _ in range(4)))
    batch = {"x": np.zeros((256, 64), np.float32)}
    step = td.compile_step(model, loss, optim.adamw(0.1), batch, device="cpu", options=options)
    if second:
        td.compile_step(nn.Linear(64, 1), loss, optim.sgd(0.1), batch, device="oracle")
    step(batch)
    raise AssertionError("a step ran")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explain") / "net.py"
    path.write_text(SCRIPT)
    return str(path)


def test_steps_are_explained_before_they_run(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", script, "--set", "second=true", "--json"]) == 0
    printed = capsys.readouterr()
    first, second = json.loads(printed.out)
    assert printed.err == "hello\n"
    assert (first["device"], second["device"]) == ("cpu", "oracle")
    assert (second["kernels"], second["memory"]) == ([], None)
    shares = [k["share"] for k in first["kernels"]]
    assert shares == sorted(shares, reverse=True)
    assert abs(sum(shares) - 1) < 1e-9
    assert "net.py:14 in forward" in first["kernels"][0]["lines"]
    memory = first["memory"]
    assert max(memory["by_phase"]) == memory["live"] <= memory["arena"] <= 0.8 * memory["uncut"]
    assert sum(r["saved"] for r in memory["recomputed"]) > 0
    assert all(r["lines"] == ["net.py:14 in forward"] for r in memory["recomputed"])
    text = shown(first)
    assert "recomputed for the budget" in text
    assert f"{memory['arena'] / 1e6:,.1f} MB" in text
    assert "the oracle has no plan" in shown(second)
    # The methods that were watched are as they were.
    assert TrainStep.__call__.__name__ == "__call__"


def test_a_file_without_train_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plain.py"
    path.write_text(SCRIPT + '\nif __name__ == "__main__":\n    fit()\n')
    path.write_text(path.read_text().replace("def train", "def fit").replace('"cpu"', '"oracle"'))
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.startswith("step on oracle, float32, 132,864 parameters\n")
    assert main(["explain", str(path), "--set", "budget=1"]) == 2
    assert "nothing to --set" in capsys.readouterr().err


def test_wrong_files(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.py")]) == 2
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main(["explain", str(tmp_path / "empty.py")]) == 2
    assert "compiles no training step" in capsys.readouterr().err
    assert main(["explain", script, "--set", "bugdet=1"]) == 2
    assert "Did you mean 'budget'?" in capsys.readouterr().err
    assert main(["explain", script, "--set", "budget=0.01"]) == 1
    assert "OutOfMemoryError" in capsys.readouterr().err


def test_what_rules_did_is_shown() -> None:
    loss = lambda m, b: m(b["x"]).square().mean()  # noqa: E731
    specs = {"x": td.Spec((4, 2))}
    step = td.compile_step(nn.Linear(2, 1), loss, optim.sgd(0.1), specs, device="oracle")
    at = Origin("/home/someone/net.py", 7, "forward")
    step.report.recognised += [Recognised("attention", Exactness.SATURATING, at)] * 2
    step.report.recognised += [Recognised("softmax", Exactness.EXACT, None)]
    step.report.rewritten += [Rewritten("pack_qkv", 12, 100.0, 90.0)]
    step.report.rules["other_rule"] = 3
    found = explained(step)
    first = found["recognised"][0]
    assert (first["name"], first["origin"]) == ("attention", "net.py:7 in forward")
    assert first["exactness"] == Exactness.SATURATING.value
    assert json.loads(json.dumps(found)) == found
    text = shown(found)
    assert f"  {step.report.recognised[0]}, 2 times" in text
    assert "attention at net.py:7 in forward (saturating" in text
    assert "cost 100 to 90" in text
    assert "other_rule" in text
