"""Memory of compiled programs: the forecast holds, buffers do not meet, nothing is read unwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from backend import build, rounded_inputs, same_bits
from programs import random_training
from test_trajectories import CASES
from treadle import losses, nn, optim
from treadle.kernel.program import Program
from treadle.memory.plan import buffers_of, plan_buffers
from treadle.schedule.schedule import schedule
from treadle.step.programs import Watched

BENCH = str(Path(__file__).parents[1] / "bench")


# The forecast


MEASURED = """
import gc, json, sys
sys.path.insert(0, {bench!r})
import numpy as np
import treadle as td
from models import GPT, loss
from treadle import nn, optim

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss"))

square = lambda model, x: (model(x) ** 2).mean()
small = td.compile_step(nn.Linear(4, 4), square, optim.adamw(), td.Spec((4, 4)), device="cpu")
small(np.ones((4, 4)))
vocabulary, context, width, heads, layers, rows = {sizes}
tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, context)).astype(np.int32)
specs = {{k: td.Spec((rows, context), td.int32) for k in "xy"}}
gc.collect()
before = resident()
step = td.compile_step(
    GPT(vocabulary, context, width, heads, layers), loss, optim.adamw(1e-3), specs,
    clip_norm=1.0, device="cpu",
)
for _ in range(2):
    step({{"x": tokens, "y": tokens}})
gc.collect()
print(json.dumps([step.report.cache_hits, step.report.peak_bytes, resident() - before]))
"""


def forecast_and_growth(sizes: tuple[int, ...], cache: Path) -> tuple[int, int]:
    """Bytes that the report foretells, and those that a process grew by that compiled nothing."""
    script = MEASURED.format(bench=BENCH, sizes=sizes)
    environment = {"TREADLE_CACHE": str(cache), "TREADLE_THREADS": "2", "PYTHONPATH": _paths()}
    for is_warm in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True, text=True, timeout=600, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        hits, forecast, growth = json.loads(done.stdout)
        assert hits == is_warm
    return forecast, growth


def _paths() -> str:
    return str(Path(td.__file__).parents[1])


# Bytes of code, threads, what default verification computes and Python's objects, which no report
# counts.
OTHERS = 16e6


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_forecast_of_a_gpt_holds(tmp_path: Path) -> None:
    forecast, growth = forecast_and_growth((65, 256, 384, 6, 2, 4), tmp_path)
    assert forecast > 100e6
    assert growth == pytest.approx(forecast, abs=0.05 * forecast + OTHERS)


@linux
@pytest.mark.slow
def test_the_forecast_of_the_gpt_that_is_measured_holds(tmp_path: Path) -> None:
    forecast, growth = forecast_and_growth((65, 256, 384, 6, 6, 4), tmp_path)
    assert growth == pytest.approx(forecast, abs=0.05 * forecast + OTHERS)


def test_the_forecast_counts_every_program() -> None:
    """What is built later is added; what a plan holds is what its memory takes."""
    step = td.compile_step(
        nn.Linear(64, 64),
        lambda model, x: (td.tanh(model(x)) ** 2).mean(),
        optim.adamw(1e-3),
        td.Spec((256, 64)),
        device="cpu",
    )
    x = np.ones((256, 64), np.float32)
    first = step.report.peak_bytes
    assert step.report.state_bytes == sum(v.nbytes for v in step.session.values.values())
    step.gradients(x)
    second = step.report.peak_bytes
    assert second >= first + 64 * 64 * 4, "gradients leave the program"
    step.evaluate(x)
    assert step.report.peak_bytes > second
    assert [p.name for p in step.report.programs] == ["step", "gradients", "evaluate"]


# Buffers


def live_at_once(program: Program) -> list[set[str]]:
    """Which buffers are needed in each step of a program, and between their first and last use."""
    touched = [buffers_of(step) for step in program.steps]
    names = set().union(*touched)
    spans = {n: [i for i, t in enumerate(touched) if n in t] for n in names}
    return [
        {n for n, uses in spans.items() if uses[0] <= i <= uses[-1]} for i in range(len(touched))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_buffers_that_live_at_one_time_do_not_meet(seed: int) -> None:
    program = schedule(random_training(seed).graph, in_place=True)
    plan = plan_buffers(program)
    sizes = {b.name: b.nbytes for b in program.buffers}
    for live in live_at_once(program):
        placed = sorted((plan.offsets[n], sizes[n], n) for n in live if n in plan.offsets)
        for (start, size, name), (other, _, after) in pairwise(placed):
            assert start + size <= other, (name, after)
        assert all(start % 64 == 0 and start + size <= plan.size for start, size, _ in placed)


def test_temporary_memory_does_not_grow_with_what_is_done_with() -> None:
    def chain(x, w):
        for _ in range(12):
            x = td.softmax(x @ w) + x.mean()
        return x.sum()

    specs = td.Spec((128, 128)), td.Spec((128, 128))
    plan = plan_buffers(schedule(td.trace(chain, *specs)))
    assert plan.size <= 5 * 128 * 128 * 4


# Nothing is read before it is written


@pytest.mark.parametrize("seed", range(100, 112))
def test_what_memory_held_before_does_not_matter(seed: int) -> None:
    training = random_training(seed)
    values = rounded_inputs(training.graph, training.values)
    built = build(training.graph, in_place=True, shared=True)
    expected = built.on(2).run(values)
    program = built.on(2)
    for fill in (0xFF, 0x7F, 0x00):  # NaN, large numbers, zeros
        program._arena[:] = fill
        program._scratch[:] = fill
        assert same_bits(program.run(values), expected), fill


@pytest.mark.parametrize("name", CASES)
def test_what_memory_held_before_does_not_matter_to_a_trajectory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    model, _, x_shape, y_shape, classes, optimizer, _, clip, _ = CASES[name]
    y = td.Spec(y_shape, td.int32)
    specs = {"x": y if x_shape is None else td.Spec(x_shape), "y": y}

    def loss(model, batch):
        return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)

    def trained(fill: int | None) -> list[bytes]:
        rng = np.random.default_rng(0)
        step = td.compile_step(model(), loss, optimizer(), specs, clip_norm=clip, device="cpu")
        for _ in range(4):
            tokens = rng.integers(0, classes, y_shape)
            x = tokens if x_shape is None else rng.normal(size=x_shape)
            if fill is not None:
                native = step._programs.built(step._inputs).step(step._mode(), Watched())
                native._arena[:] = fill
                native._scratch[:] = fill
            step({"x": x, "y": rng.integers(0, classes, y_shape)})
        return [a.tobytes() for a in step.state_dict().values()]

    assert trained(0xFF) == trained(None)
