"""Lines of the user's code: in errors, in kernels and in profiles, from the script at hand."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim
from treadle.base import origin
from treadle.base.origin import user_origin

SCRIPT = """
class Net(nn.Module):
    def __init__(self):
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.lstm, self.drop = nn.LSTM(8, 8), nn.Dropout(0.2)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.drop(self.norm(self.fc(y)))

def loss(model, x):
    with contextlib.suppress(ValueError):
        rows = td.softmax(model(x))
    return (rows ** 2).mean()

step = td.compile_step(Net(), loss, optim.adamw(1e-3), td.Spec((3, 2, 8)), device="cpu")
"""


def step_of(name: str, lines_before: int) -> td.TrainStep:
    scope = {"nn": nn, "td": td, "optim": optim, "contextlib": contextlib}
    exec(compile("\n" * lines_before + SCRIPT, name, "exec"), scope)
    step = scope["step"]
    assert isinstance(step, td.TrainStep)
    return step


def places(lines: list[str]) -> set[tuple[str, int]]:
    """Files and lines: "model.py:12 in loss"."""
    found = (line.partition(" in ")[0].rpartition(":") for line in lines)
    return {(file, int(line)) for file, _, line in found}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "plans"))


@pytest.mark.usefixtures("cache")
def test_kernels_have_the_lines_of_the_script_at_hand() -> None:
    first, second = step_of("first.py", 0), step_of("second.py", 100)
    assert (first.report.cache_hits, second.report.cache_hits) == (0, 1)
    batch = np.ones((3, 2, 8), np.float32)
    for lines_of in (
        lambda step: [line for k in step.kernels for line in k.lines],
        lambda step: [line for k in step.profile(batch).kernels for line in k.lines],
    ):
        there, here = places(lines_of(first)), places(lines_of(second))
        assert len(there) > 4
        assert {file for file, _ in there} == {"first.py"}
        assert here == {("second.py", line + 100) for _, line in there}
    names = [k.kernel.name for k in second.profile(batch).kernels]
    assert sorted(names) == sorted(k.name for k in second.kernels)


def test_the_standard_library_is_nobodys_line() -> None:
    @contextlib.contextmanager
    def around():
        yield user_origin()

    with around() as found:
        pass
    assert found is not None
    assert (Path(found.file).name, found.function) == ("test_origins.py", "around")
    assert origin.is_own(contextlib.__file__)
    assert not origin.is_own(np.__file__), "installed beside the library, but not part of it"
    assert not origin.is_own(__file__)


def test_what_enters_a_with_of_treadles_is_the_users() -> None:
    """Contexts inside Treadle are entered by contextlib, whose frame lies between."""
    graph = step_of("third.py", 0).graph  # the optimizer's updates are traced in one
    files = {Path(node.origin.file).name for node in graph.nodes if node.origin is not None}
    assert files == {"third.py"}


ERROR = """
import contextlib, functools, treadle as td
with contextlib.suppress(KeyError):
    try:
        functools.reduce(lambda a, b: td.add(a, b), [td.ones((2,)), td.ones((3,))])
    except td.ShapeError as error:
        print(error.origin.line, error.origin.function)
"""


def test_errors_name_the_users_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ERROR)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "5 <lambda>\n"
