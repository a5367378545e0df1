"""The U-Net, noise schedules and samplers, beside `diffusers` where it is installed."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
import twins
from treadle import models, optim
from treadle.models.diffusion import ddim, ddpm, denoised

SMALL: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
OTHER: dict[str, Any] = {
    **SMALL,
    "layers_per_block": 2,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "resnet_time_scale_shift": "scale_shift",
    "num_class_embeds": 5,
    "mid_block_scale_factor": 1.5,
    "center_input_sample": True,
    "attention_head_dim": None,
}
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
TIMES, LABELS = np.array([3, 77]), np.array([1, 4])


def value_for(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values by name, so that figures of the reference may be written down."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.normal(size=shape) * 0.2 + 0.1).astype(np.float32)


def figures(found: np.ndarray) -> list[float]:
    """A few numbers that depend on all of an array."""
    weights = np.random.default_rng(1).normal(size=(3, found.size))
    return (weights @ found.reshape(-1).astype(np.float64)).tolist()


# Of diffusers 0.42.1, by `test_figures_are_diffusers`.
FIGURES = {
    "small": (144, [-19.090018, -5.262854, -10.175250]),
    "other": (207, [-26.612160, -6.824697, -12.510914]),
}
CASES = {"small": (SMALL, ()), "other": (OTHER, (LABELS,))}


@pytest.mark.parametrize("name", CASES)
def test_the_unet_gives_diffusers_figures(name: str) -> None:
    config, labels = CASES[name]
    model = models.UNet2D(models.UNet2DConfig(**config))
    values = {n: value_for(n, d.shape) for n, d in model.declarations().items()}
    count, wanted = FIGURES[name]
    assert len(values) == count
    found = model.apply(values, IMAGES, TIMES, *labels)
    assert np.allclose(figures(np.asarray(found)), wanted, rtol=1e-4)


def diffusers() -> Any:
    twins.transformers()
    return pytest.importorskip("diffusers")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_figures_are_diffusers(name: str) -> None:
    config, labels = CASES[name]
    twin = diffusers().UNet2DModel(**config).eval()
    values = {n: value_for(n, tuple(v.shape)) for n, v in twin.state_dict().items()}
    twin.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    with torch.no_grad():
        given = map(torch.tensor, (IMAGES, TIMES, *labels))
        found = twin(*given).sample.numpy()
    assert (len(values), pytest.approx(figures(found), rel=1e-4)) == FIGURES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_folders_go_both_ways(name: str, device: str, tmp_path: Path) -> None:
    config, labels = CASES[name]
    torch.manual_seed(0)
    twin = diffusers().UNet2DModel(**config).eval()
    twin.save_pretrained(tmp_path / "theirs")
    model = models.load(tmp_path / "theirs", device=device)
    given = [torch.tensor(a) for a in (IMAGES, TIMES, *labels)]
    with torch.no_grad():
        wanted = twin(*given).sample.numpy()
    assert np.abs(model(IMAGES, TIMES, *labels) - wanted).max() < 1e-4
    models.save(model, tmp_path / "ours")
    back = diffusers().UNet2DModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert np.array_equal(back(*given).sample.numpy(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_diffusers(name: str) -> None:
    config, labels = CASES[name]
    twin = diffusers().UNet2DModel(**config).eval()
    model = models.UNet2D(models.UNet2DConfig(**config))
    values = {n: value_for(n, d.shape) for n, d in model.declarations().items()}
    twin.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    twin.double()  # as the oracle: the first layers' gradients are small differences

    def total(values: dict[str, td.Tensor]) -> td.Tensor:
        return (model.apply(values, IMAGES, TIMES, *labels) ** 2).mean()

    found = td.grad(total)(values)
    given = [torch.tensor(a) for a in (IMAGES.astype(np.float64), TIMES, *labels)]
    (twin(*given).sample ** 2).mean().backward()
    greatest = max(float(p.grad.abs().max()) for p in twin.parameters())
    for key, parameter in twin.named_parameters():
        error = np.abs(found[key].numpy() - parameter.grad.numpy()).max()
        assert error < 1e-4 * (float(parameter.grad.abs().max()) + 0.02 * greatest), key


def test_a_folder_of_our_own(tmp_path: Path) -> None:
    model = models.UNet2D(models.UNet2DConfig(**SMALL))
    models.save(model, tmp_path, shard_bytes=20_000)
    assert (tmp_path / "diffusion_pytorch_model.safetensors.index.json").exists()
    again = models.load(tmp_path)
    first, second = model.values(), again.values()
    assert all(np.array_equal(first[n], second[n]) for n in first)
    # Files of before the names of attention were changed.
    old = {n.replace("to_q", "query").replace("to_out.0", "proj_attn"): v for n, v in first.items()}
    from treadle.models.weights import named_values

    assert set(named_values(model, old)) == set(first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("method", ["ddpm", "ddim"])
def test_samples_are_diffusers(
    kind: str, spacing: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = diffusers()
    torch.manual_seed(0)
    twin = library.UNet2DModel(**SMALL).eval()
    twin.save_pretrained(tmp_path)
    model = models.load(tmp_path, device="cpu")
    given = {"prediction_type": kind, "timestep_spacing": spacing}
    scheduler = (library.DDIMScheduler if method == "ddim" else library.DDPMScheduler)(**given)
    scheduler.set_timesteps(7)
    if method == "ddpm":  # without noise: other generators draw others
        module = __import__("diffusers.schedulers.scheduling_ddpm", fromlist=["x"])
        monkeypatch.setattr(module, "randn_tensor", lambda shape, **_: torch.zeros(shape))
        monkeypatch.setattr("treadle.frontend.random.normal", lambda shape: td.zeros(shape))
    x = torch.tensor(IMAGES)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(twin(x, t).sample, t, x).prev_sample
    schedule = models.NoiseSchedule.read(dict(scheduler.config))
    found = models.Sampler(model, schedule, IMAGES.shape, 7, method=method)(noise=IMAGES)
    assert np.abs(found - x.numpy()).max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_schedules_are_diffusers(kind: str) -> None:
    theirs = diffusers().DDPMScheduler(beta_schedule=kind)
    ours = models.NoiseSchedule(beta_schedule=kind)
    assert np.allclose(ours.kept(), theirs.alphas_cumprod.numpy(), rtol=2e-5, atol=1e-9)
    for variance in ("fixed_small", "fixed_large"):
        scheduler = diffusers().DDPMScheduler(beta_schedule=kind, variance_type=variance)
        scheduler.set_timesteps(20)
        steps = ddpm(models.NoiseSchedule(beta_schedule=kind, variance_type=variance), 20)
        wanted = [float(scheduler._get_variance(int(t))) for t in scheduler.timesteps[:-1]]
        assert np.allclose(steps.weights[:-1, 3] ** 2, wanted, rtol=1e-3)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_ddim_with_all_noise_is_ddpm(kind: str) -> None:
    """Two derivations of one posterior: with ε̂ written by x̂ and x the weights are the same."""
    schedule = models.NoiseSchedule(beta_schedule=kind, num_train_timesteps=60)
    one, other = ddpm(schedule, 20), ddim(schedule, 20, eta=1.0)
    clean, _, noise, spread = other.weights.T
    assert np.allclose(one.weights[:, 0], clean - noise * one.signal / one.rest)
    assert np.allclose(one.weights[:, 1], noise / one.rest)
    assert np.allclose(one.weights[:-1, 3], spread[:-1])
    assert spread[0] > 0
    assert np.array_equal(one.times, np.arange(57, -1, -3))


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("method", [ddim, ddpm])
def test_who_knows_the_noise_finds_the_sample(kind: str, method: Any) -> None:
    schedule = models.NoiseSchedule(prediction_type=kind, num_train_timesteps=50)
    wanted = np.random.default_rng(0).uniform(-1, 1, (2, 5)).astype(np.float32)

    def model(x: td.Tensor, times: td.Tensor) -> td.Tensor:
        signal, rest = schedule._parts(times, 2)
        return schedule.target(wanted, (x - signal * wanted) / rest, times)

    noise = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    found = denoised(model, schedule, method(schedule, 10), noise)
    assert np.abs(found.numpy() - wanted).max() < 1e-4


class Denoiser(models.Model):
    """A small network that sees a point and how much noise there is."""

    def __init__(self, schedule: models.NoiseSchedule):
        self.config = models.MLPConfig()
        self.inner = models.MLP([3, 48, 48, 2])
        self.schedule = schedule

    def forward(self, x: Any, times: Any) -> td.Tensor:
        _, rest = self.schedule._parts(times, 2)
        return self.inner(td.concat([td.tensor(x), rest], 1))


@pytest.mark.slow  # docs/models.md has it too
def test_what_was_trained_samples_the_data() -> None:
    """Two points; the loss falls below that of saying nothing, and samples are near them."""
    schedule = models.NoiseSchedule(num_train_timesteps=100, beta_end=0.1, clip_sample=False)
    model = Denoiser(schedule)
    points = np.array([[1.5, 0.5], [-1.0, -0.5]], np.float32)
    batch = np.tile(points, (64, 1))
    spec = {"x": td.Spec(batch.shape)}
    step = td.compile_step(
        model, lambda m, b: schedule.loss(m, b["x"]), optim.adam(1e-2), spec, device="cpu"
    )
    losses = [float(step({"x": batch}).loss) for _ in range(400)]
    assert abs(losses[0] - 1) < 0.4
    assert np.mean(losses[-50:]) < 0.4
    sampler = models.Sampler(model, schedule, (64, 2), 20, method="ddpm", share=step)
    first, second = sampler(), sampler()
    assert not np.array_equal(first, second)
    distances = np.linalg.norm(first[:, None] - points, axis=-1)
    assert np.median(distances.min(1)) < 0.35
    assert 16 < (distances.argmin(1) == 0).sum() < 48


def test_wrong_use() -> None:
    model = models.UNet2D(models.UNet2DConfig(**SMALL))
    schedule = models.NoiseSchedule()
    for call, message in (
        (lambda: models.UNet2DConfig(block_out_channels=(30,)), "block_out_channels|_block_types"),
        (lambda: models.UNet2DConfig(**{**SMALL, "class_embed_type": "timestep"}), "Known are"),
        (lambda: models.NoiseSchedule(beta_schedule="square"), "Known are"),
        (lambda: models.NoiseSchedule(beta_end=1.5), "beta_end"),
        (lambda: schedule.times(1001), "1001 steps of 1000 times"),
        (lambda: models.Sampler(model, schedule, (1, 3, 8, 8), method="euler"), "euler"),
        (lambda: models.Sampler(model, schedule, (1, 3, 8, 8), method="ddpm", eta=1.0), "ddim's"),
        (lambda: model.apply(model.values(), IMAGES[..., :7], TIMES), "multiples of 2"),
        (lambda: model.apply(model.values(), IMAGES, TIMES, LABELS), "model of classes"),
        (lambda: model.apply(model.values(), IMAGES, np.arange(3)), "They are .2,. or one"),
    ):
        with pytest.raises(td.TreadleError, match=message):
            call()
