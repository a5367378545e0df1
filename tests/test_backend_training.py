"""Whole training steps compiled: as near to float64 as PyTorch, the same bits on any number of threads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from backend import THREADS
from test_trajectories import CASES
from treadle import losses, nn, optim
from treadle.backends.cpu.backend import CpuBackend, CpuToolchain
from treadle.ir.graph import Graph, Value
from treadle.kernel.target import CPU, Materialization, Target
from treadle.runtime.cpu.native import chosen_target
from treadle.schedule import keep, lower

# The keys' bias moves all scores of a row alike: its gradient is 0, and Adam makes whole steps of
# what rounding leaves of it.
NO_GRADIENT = "in_proj_bias"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", "0")


@pytest.fixture
def shared(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest kernel is cut into tasks; one plan is used for all numbers of threads."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    chosen = (("tasks.serial", 0), ("tasks.operations", 1))
    monkeypatch.setattr(
        CpuBackend,
        "toolchain",
        lambda _, options: CpuToolchain(chosen_target(options.target), chosen),
    )


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)


def compiled(name: str, device: str, seed: int = 0, **keywords) -> td.TrainStep:
    model, _, x_shape, y_shape, _, optimizer, _, clip, _ = CASES[name]
    y = td.Spec(y_shape, td.int32)
    specs = {"x": y if x_shape is None else td.Spec(x_shape), "y": y}
    keywords = {"clip_norm": clip, "device": device, "seed": seed} | keywords
    return td.compile_step(model(), loss, optimizer(), specs, **keywords)


def batches(name: str, seed: int, count: int) -> Iterator[dict[str, np.ndarray]]:
    _, _, x_shape, y_shape, classes, *_ = CASES[name]
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(0, classes, y_shape)
        x = tokens if x_shape is None else rng.normal(size=x_shape).astype(np.float32)
        yield {"x": x, "y": rng.integers(0, classes, y_shape)}


# As near to float64 as PyTorch


def torch_losses(name: str, model: torch.nn.Module, data: list) -> list[float]:
    _, _, _, _, classes, _, optimizer, clip, rate = CASES[name]
    updates = optimizer(model.parameters())
    found = []
    for i, batch in enumerate(data):
        if rate is not None:
            for group in updates.param_groups:
                group["lr"] = rate(i)
        updates.zero_grad()
        logits = model(torch.tensor(batch["x"])).reshape(-1, classes)
        value = F.cross_entropy(logits, torch.tensor(batch["y"]).reshape(-1))
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
        found.append(float(value.detach()))
    return found


def apart(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """The squared distance of parameters from the exact ones."""
    names = [n for n, v in exact.items() if v.dtype.kind == "f" and NO_GRADIENT not in n]
    return float(sum(((found[n].astype(np.float64) - exact[n]) ** 2).sum() for n in names))


def deviations(name: str, seed: int, steps: int) -> np.ndarray:
    """Squared deviations of losses and of the last parameters: ours twice, then PyTorch's."""
    data = list(batches(name, seed, steps))
    exact, native = compiled(name, "oracle", seed), compiled(name, "cpu", seed)
    start = {n: v.astype(np.float32) if v.dtype.kind == "f" else v for n, v in exact.params.items()}
    exact.load_params(start)
    native.load_params(start)
    reference = CASES[name][1]()
    reference.load_state_dict({n: torch.tensor(v) for n, v in start.items()})
    truth = np.array([exact(b).loss for b in data])
    ours = np.array([native(b).loss for b in data])
    theirs = np.array(torch_losses(name, reference, data))
    after = {n: v.detach().numpy() for n, v in reference.state_dict().items()}
    return np.array(
        [
            ((ours - truth) ** 2).sum(),
            apart(native.params, exact.params),
            ((theirs - truth) ** 2).sum(),
            apart(after, exact.params),
        ]
    )


LONG = [pytest.param(n, marks=pytest.mark.slow) if n == "lstm-adam" else n for n in CASES]


@pytest.mark.parametrize("name", LONG)
def test_float32_deviates_no_more_than_twice_as_far_as_pytorch(name: str) -> None:
    """From the float64 trajectory, in losses and in parameters; several seeds together."""
    found = sum(deviations(name, seed, 30) for seed in range(2))
    our_losses, our_params, their_losses, their_params = np.sqrt(found)
    assert our_losses <= 2 * their_losses
    assert our_params <= 2 * their_params


# The same bits on any number of threads


def trained(step: td.TrainStep, data: list) -> list[bytes]:
    """Losses and norms of some steps, then everything that the next one depends on."""
    results = [step(b) for b in data]
    numbers = [np.array([(r.loss, r.grad_norm or 0.0) for r in results])]
    return [a.tobytes() for a in (*numbers, *step.state_dict().values())]


@pytest.mark.parametrize("name", CASES)
def test_a_trajectory_is_the_same_on_any_number_of_threads(
    name: str, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = list(batches(name, 1, 6))
    found = {}
    for threads in (*THREADS, 3):  # one of them again
        monkeypatch.setenv("TREADLE_THREADS", str(threads))
        step = compiled(name, "cpu")
        found[threads] = [*found.get(threads, []), trained(step, data)]
        if threads == 1:
            step.reset()
            found[threads].append(trained(step, data))
    (first, again), *others = found.values()
    assert first == again, "a repeated run"
    assert all(run == first for runs in others for run in runs)
    assert len(found[3]) == 2


class Dropping(nn.Module):
    """Random numbers, a scan, running statistics and an embedding that many rows write to."""

    def __init__(self) -> None:
        self.wte, self.drop = nn.Embedding(5, 24), nn.Dropout(0.3)
        self.lstm, self.bn, self.fc = nn.LSTM(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, tokens):
        h = self.lstm(self.drop(self.wte(tokens)))[0]
        return self.fc(self.bn(h.reshape(-1, 16))).reshape(*tokens.shape, 5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precision_and_accumulation_on_any_number_of_threads(
    precision: str, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {k: td.Spec((7, 9), td.int32) for k in "xy"}
    rng = np.random.default_rng(0)
    data = [{k: rng.integers(0, 5, (7, 9)) for k in "xy"} for _ in range(5)]
    found = []
    for threads in THREADS:
        monkeypatch.setenv("TREADLE_THREADS", str(threads))
        step = td.compile_step(
            Dropping(), loss, optim.adamw(1e-2), specs, device="cpu", accumulate=2,
            clip_norm=1.0, precision=precision,
        )  # fmt: skip
        found.append(trained(step, data))
    assert all(run == found[0] for run in found)


def test_a_larger_model_on_any_number_of_threads(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are cut into tasks as they are in earnest."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))  # one plan for all numbers of threads
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 49, 130), nn.LayerNorm(130), nn.GELU(), nn.Linear(130, 10),
    )  # fmt: skip
    specs = {"x": td.Spec((48, 1, 14, 14)), "y": td.Spec((48,), td.int32)}
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(48, 1, 14, 14)), "y": rng.integers(0, 10, 48)} for _ in range(4)]
    found = []
    for threads in THREADS:
        monkeypatch.setenv("TREADLE_THREADS", str(threads))
        step = td.compile_step(model(), loss, optim.adamw(1e-3), specs, device="cpu")
        assert step.report.cache_hits == (threads > 1)
        found.append(trained(step, data))
    assert all(run == found[0] for run in found)


@pytest.mark.parametrize("name", CASES)
def test_unfused_and_fused_steps_agree(name: str) -> None:
    plain = compiled(name, "cpu", options=td.CompileOptions(optimize=False))
    fused = compiled(name, "cpu")
    for batch in batches(name, 2, 3):
        assert plain(batch).loss == pytest.approx(fused(batch).loss, rel=1e-5)
    assert sum(k.calls for k in plain.kernels) > sum(k.calls for k in fused.kernels)


class Recurrent(nn.Module):
    def __init__(self):
        self.embed, self.lstm = nn.Embedding(65, 64), nn.LSTM(64, 64)
        self.head = nn.Linear(64, 65)

    def __call__(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def test_updates_that_were_fused_into_products_wait_for_their_scalars() -> None:
    """The scalars' kernel takes more in after the products have come to wait for it."""
    tokens = td.Spec((2, 2), td.int32)
    batch = {k: np.array([[3, 60], [7, 21]], np.int32) for k in "xy"}
    after = {}
    for device in ("oracle", "cpu"):
        step = td.compile_step(
            Recurrent(), loss, optim.adamw(1e-3), {"x": tokens, "y": tokens}, device=device
        )
        step(batch)
        after[device] = {n: np.asarray(a) for n, a in step.params.items()}
    for name, expected in after["oracle"].items():
        np.testing.assert_allclose(after["cpu"][name], expected, atol=2e-5, err_msg=name)


def deep(width: int = 64, layers: int = 6) -> nn.Module:
    parts: list[nn.Module] = [nn.Embedding(65, width)]
    for _ in range(layers):
        parts += [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()]
        parts += [nn.Linear(4 * width, width)]
    return nn.Sequential(*parts, nn.Linear(width, 65))


def again_with(
    sizes: Materialization, graph: Graph, kept: Collection[Value], target: Target
) -> dict[int, Value]:
    return keep.recomputed_operands(graph, kept, replace(target, materialization=sizes))


def test_activations_that_are_computed_again_for_gradients_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms' weights change in the same step: they are read before."""
    tokens = td.Spec((4, 64), td.int32)
    rng = np.random.default_rng(0)
    data = [{k: rng.integers(0, 65, (4, 64)).astype(np.int32) for k in "xy"} for _ in range(3)]
    found, arenas = {}, {}
    for room in (0, 1 << 40):
        sizes = replace(CPU.materialization, waiting_bytes=room)
        monkeypatch.setattr(lower, "recomputed_operands", partial(again_with, sizes))
        step = td.compile_step(
            deep(), loss, optim.adamw(1e-2), {"x": tokens, "y": tokens}, device="cpu"
        )
        losses_ = [step(batch).loss for batch in data]
        found[room] = losses_, {n: np.asarray(a) for n, a in step.params.items()}
        arenas[room] = step.report.peak_bytes - step.report.state_bytes
    (again, params), (kept, others) = found.values()
    assert again == kept
    assert all(np.array_equal(params[n], others[n]) for n in others)
    waiting = 4 * 64 * 64 * 4  # bytes of a norm's result
    assert arenas[0] <= arenas[1 << 40] - waiting
