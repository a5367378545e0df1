"""Training in bfloat16 and float16: both devices, overflows, and numbers that survive rounding."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from treadle import losses, nn, optim
from treadle.optim import append
from treadle_checker import updates

both = pytest.mark.parametrize("device", ["oracle", "cpu"])
Arrays = dict[str, np.ndarray]


class Net(nn.Module):
    def __init__(self) -> None:
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.fc2(td.gelu(self.norm(self.fc1(x))))


def loss(model, b):
    return losses.cross_entropy(model(b["x"]) * b["factor"], b["y"])


def batch(seed: int = 0, factor: float = 1.0) -> Arrays:
    x = np.random.default_rng(seed).normal(size=(32, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0.5)
    return {"x": x, "y": y.astype(np.int32), "factor": np.float32(factor)}


def make(device: str, precision: str, optimizer: optim.Optimizer | None = None, **options):
    return td.compile_step(
        Net(),
        loss,
        optimizer or optim.adamw(0.01),
        batch(),
        device=device,
        precision=precision,
        **options,
    )


@both
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_narrow_training_follows_float32(device: str, precision: str) -> None:
    wide, narrow = make(device, "float32"), make(device, precision)
    for i in range(40):
        a, b = wide(batch(i)), narrow(batch(i))
    assert b.loss != a.loss  # it is narrow
    assert b.loss == pytest.approx(a.loss, rel=0.05)
    assert b.loss < 0.5 * make(device, "float32")(batch()).loss
    held = np.float64 if device == "oracle" else np.float32
    assert {v.dtype for v in narrow.params.values()} == {np.dtype(held)}  # masters
    assert narrow.skipped == 0
    assert narrow.loss_scale == (65536.0 if precision == "float16" else 1.0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_devices_agree(precision: str) -> None:
    """Narrow values are rounded alike; sums inside a product may differ in the last place."""
    steps = [make(device, precision) for device in ("oracle", "cpu")]
    for i in range(20):
        a, b = (s(batch(i)) for s in steps)
    assert a.loss == pytest.approx(b.loss, rel=2e-2 if precision == "bfloat16" else 2e-3)


@both
def test_an_overflow_is_skipped_and_training_recovers(device: str) -> None:
    step = make(device, "float16", optim.adamw(optim.linear(0.02, 0.0, 100)))
    for i in range(5):
        step(batch(i))
    before = step.state_dict()
    out = step(batch(5, factor=3e5))
    assert out.skipped
    assert not out.updated
    assert not np.isfinite(out.grad_norm)
    after = step.state_dict()
    kept = set(before) - {"step:loss_scale", "step:good_steps", "step:skipped", "step:counters"}
    assert all(np.array_equal(before[n], after[n]) for n in kept)
    assert step.loss_scale == before["step:loss_scale"] / 2
    assert (step.skipped, step.count) == (1, 5)
    assert step.learning_rate == pytest.approx(0.02 * 0.95)  # a skipped step does not count
    run = step.run([batch(6, factor=3e5), *(batch(i) for i in range(40))])
    assert (run.skipped, run.updates, step.skipped) == (1, 40, 2)
    assert np.isfinite(run.losses[1:]).all()
    assert run.losses[-1] < 0.6 * run.losses[1]


@both
def test_the_scale_finds_its_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls until gradients fit, and doubles after a number of good steps."""
    for module in (append, updates):  # the checker derives the step with a rule of its own
        monkeypatch.setattr(module, "GROWTH_INTERVAL", 4)
    step = make(device, "float16", optim.sgd(1e-6))
    scales, skipped = [], []
    for i in range(30):
        out = step(batch(i, factor=3000.0))
        scales.append(step.loss_scale)
        skipped.append(out.skipped)
    assert skipped[0]
    ratios = np.array([1.0, *scales[1:]]) / np.array([1.0, *scales[:-1]])
    assert set(ratios) <= {0.5, 1.0, 2.0}
    assert scales[0] == 32768.0
    for i in range(1, 30):
        if skipped[i]:
            assert ratios[i] == 0.5
        elif ratios[i] == 2.0:
            assert not any(skipped[i - 3 : i + 1])
    assert 2.0 in ratios
    assert sum(skipped) == step.skipped == 30 - step.count


@both
def test_a_loss_that_is_never_finite_leaves_a_scale(device: str) -> None:
    step = make(device, "float16")
    for _ in range(40):
        assert step(batch(0, factor=np.inf)).skipped
    assert step.loss_scale == append.LEAST_LOSS_SCALE
    assert step(batch(0)).updated


@both
def test_an_overflow_in_one_micro_batch(device: str) -> None:
    """The whole update is skipped, and nothing of it is left in the accumulators."""
    step = make(device, "float16", accumulate=2)
    for i in range(20):  # totals are larger than means: the scale falls first
        out = step(batch(i))
    assert out.updated
    before = step.params
    first, second = step(batch(2, factor=3e5)), step(batch(3))
    assert not first.skipped  # it is known when the update is due
    assert not first.updated
    assert second.skipped
    assert all(np.array_equal(before[n], v) for n, v in step.params.items())
    step(batch(4))
    out = step(batch(5))
    assert out.updated
    assert np.isfinite(out.grad_norm)


@both
@pytest.mark.parametrize("wide", [True, False])
def test_an_overflow_elsewhere_is_skipped_too(device: str, wide: bool) -> None:
    """SAM's second gradient overflows where the first did not."""
    optimizer = optim.sam(optim.sgd(0.01), rho=1e6 if wide else 0.05)
    step = td.compile_step(
        nn.Linear(4, 3),
        lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]),
        optimizer,
        {k: v for k, v in batch().items() if k != "factor"},
        device=device,
        precision="float16",
    )
    before = step.params
    out = step({k: v for k, v in batch().items() if k != "factor"})
    assert np.isfinite(out.grad_norm)
    assert out.skipped == wide
    unchanged = all(np.array_equal(before[n], v) for n, v in step.params.items())
    assert unchanged == wide


def test_states_of_the_model_are_kept_in_an_overflow() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            self.fc, self.bn = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.bn(self.fc(x))

    step = td.compile_step(Normed(), loss, optim.sgd(0.01), batch(), precision="float16")
    step(batch(0))
    before = step.params
    assert step(batch(1, factor=1e8)).skipped
    assert np.array_equal(step.params["bn.running_mean"], before["bn.running_mean"])


# Numbers after rounding


def narrow_model(dtype: td.Spec) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter((3,), nn.init.ones, dtype=dtype)}


def narrow_step(dtype, optimizer: optim.Optimizer, device: str = "oracle", **options):
    def loss(model, x):
        return ((model["w"].tensor().astype(td.float32) * x) ** 2).mean()

    return td.compile_step(
        narrow_model(dtype), loss, optimizer, td.Spec((3,)), device=device, **options
    )


ROUNDED = [
    (td.float16, lambda: optim.adam(), r"adam: eps = 1e-08 becomes 0 in float16"),
    (td.float16, lambda: optim.adam(betas=(0.9, 0.9999), eps=1e-4), r"beta2 = 0.9999 becomes 1 in float16"),
    (td.float16, lambda: optim.adam(betas=(0.9999, 0.9), eps=1e-4), r"beta1 = 0.9999 becomes 1"),
    (td.bfloat16, lambda: optim.adam(), r"beta2 = 0.999 becomes 1 in bfloat16"),
    (td.float16, lambda: optim.sgd(weight_decay=1e-9), r"weight_decay = 1e-09 becomes 0 in float16"),
    (td.float16, lambda: optim.sgd(momentum=1e5), r"momentum = 100000.0 becomes inf in float16"),
    (td.float16, lambda: optim.adabelief(), r"eps = 1e-16 becomes 0 in float16"),
    (td.float32, lambda: optim.adam(betas=(0.9, 1 - 1e-9)), r"beta2 = 0.999999999 becomes 1 in float32"),
    (td.float32, lambda: optim.adam(eps=1e-60), r"eps = 1e-60 becomes 0 in float32"),
    (td.float32, lambda: optim.sgd(1e-60), r"lr = 1e-60 becomes 0 in float32"),
    (td.float32, lambda: optim.sgd(1e40), r"lr = 1e\+40 becomes inf in float32"),
    (td.float32, lambda: optim.sgd(optim.cosine(1e-50, 5)), r"peak = 1e-50 becomes 0 in float32"),
    (td.float32, lambda: optim.ema(optim.sgd(), 1e-50), r"ema.decay = 1e-50 becomes 0 in float32"),
    (td.float32, lambda: optim.chain(optim.clip_by_value(1e-50), optim.sgd()), r"clip_by_value.0.limit = 1e-50"),
    (td.float64, lambda: optim.adam(eps=1e-60), r"eps = 1e-60 becomes 0 in float32"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "optimizer", "message"), ROUNDED)
def test_numbers_that_do_not_survive_rounding(dtype, optimizer, message: str) -> None:
    with pytest.raises(td.ArgumentError, match=message) as caught:
        narrow_step(dtype, optimizer())
    if dtype in (td.float16, td.bfloat16):
        assert "declare them float32" in caught.value.remedy
        narrow_step(td.float32, optimizer(), precision=dtype)  # masters are float32


@both
@pytest.mark.parametrize("dtype", [td.float16, td.bfloat16], ids=str)
def test_narrow_parameters_train_with_numbers_that_fit(device: str, dtype) -> None:
    step = narrow_step(dtype, optim.adam(0.05, betas=(0.9, 0.95), eps=1e-4), device)
    x = np.array([1.0, 2.0, 3.0], np.float32)
    first = step(x).loss
    for _ in range(30):
        out = step(x)
    assert out.loss < 0.2 * first
    if device == "cpu":
        assert step.params["w"].dtype == dtype.numpy
        assert step.state_dict()["step:optimizer:m.w"].dtype == dtype.numpy


def test_the_same_rule_while_it_runs() -> None:
    step = narrow_step(td.float16, optim.adam(betas=(0.9, 0.95), eps=1e-4))
    for key, value in (("eps", 1e-9), ("beta2", 0.99999), ("lr", 1e-60)):
        with pytest.raises(td.ArgumentError, match=f"{key} = .* becomes"):
            step.hyperparameters[key] = value
    step.hyperparameters["eps"] = 0.0  # zero was meant
    step.hyperparameters["lr"] = 1e-9  # rates are float32
    assert step.hyperparameters["eps"] == 0.0


def test_only_parameters_of_a_group_count() -> None:
    model = narrow_model(td.float16) | {"v": nn.Parameter((3,), nn.init.ones)}

    def loss(m, x):
        return ((m["w"].tensor().astype(td.float32) * m["v"] * x) ** 2).mean()

    def build(*groups):
        return td.compile_step(model, loss, optim.groups(*groups), td.Spec((3,)))

    step = build(("w", optim.sgd(0.1)), ("v", optim.adam()))
    assert step(np.ones(3, np.float32)).updated
    with pytest.raises(td.ArgumentError, match="group0.eps = 1e-08 becomes 0 in float16"):
        build(("w", optim.adam()), ("v", optim.sgd(0.1)))


def test_counts_are_not_held_in_the_narrow_dtype() -> None:
    """A million updates do not fit into float16; a schedule of that length does."""
    schedule = optim.warmup_cosine(1e-2, 10_000, 1_000_000)
    assert narrow_step(td.float16, optim.sgd(schedule))(np.ones(3, np.float32)).updated


def test_a_factor_on_the_rate_is_rounded_too() -> None:
    with pytest.raises(td.ArgumentError, match="lr_scale = 1e-60 becomes 0 in float32"):
        make("oracle", "float32").lr_scale = 1e-60


@pytest.mark.parametrize("value", ["1", None, float("nan"), float("inf"), -1.0, True, [1.0]])
def test_wrong_scales_and_bounds_are_refused(value) -> None:
    step = make("oracle", "float32", clip_norm=1.0)
    with pytest.raises(td.ArgumentError, match="lr_scale = "):
        step.lr_scale = value
    with pytest.raises(td.ArgumentError, match="clip_norm = "):
        step.clip_norm = value
    if value is not None:
        with pytest.raises(td.ArgumentError, match="clip_norm = "):
            make("oracle", "float32", clip_norm=value)
    with pytest.raises(td.ArgumentError, match="lr = "):
        step.learning_rate = value
