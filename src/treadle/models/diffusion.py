"""Diffusion: noise schedules, the training loss, and sampling by DDPM and DDIM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.dtypes import float32, int32
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import NOT_NEGATIVE, check_number, check_seed, check_whole
from treadle.base.shapes import Shape
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import clamp, minimum
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.reductions import mean
from treadle.frontend.functions.shaping import expand, reshape
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import TensorType
from treadle.models.config import Config
from treadle.models.model import Model
from treadle.step.forward import compile_forward

MOST_TIMES = 1_000_000  # of a schedule: chosen
CHOICES = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"),
    "prediction_type": ("epsilon", "sample", "v_prediction"),
    "variance_type": ("fixed_small", "fixed_large"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
}


@dataclass(frozen=True)
class NoiseSchedule(Config):
    """How much noise there is at each time, with the names of `diffusers`' DDPMScheduler.

    `NoiseSchedule.read(json)` takes the content of a scheduler_config.json.
    """

    model_type: str = "noise_schedule"
    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"
    variance_type: str = "fixed_small"
    clip_sample: bool = True
    clip_sample_range: float = 1.0
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    set_alpha_to_one: bool = True

    def check(self) -> None:
        fits = 1 <= self.num_train_timesteps <= MOST_TIMES
        self.need(fits, "num_train_timesteps", f"It is from 1 to {MOST_TIMES}.")
        for name, known in CHOICES.items():
            self.need(getattr(self, name) in known, name, f"Known are: {', '.join(known)}.")
        self.need(0 <= self.beta_start < 1, "beta_start", "It is from 0 and below 1.")
        self.need(self.beta_start <= self.beta_end < 1, "beta_end", "From beta_start, below 1.")
        self.need(self.clip_sample_range > 0, "clip_sample_range", "It is positive.")

    def betas(self) -> np.ndarray:
        """The share of noise that each time adds, float64."""
        count, low, high = self.num_train_timesteps, self.beta_start, self.beta_end
        if self.beta_schedule == "linear":
            return np.linspace(low, high, count)
        if self.beta_schedule == "scaled_linear":
            return np.linspace(low**0.5, high**0.5, count) ** 2
        if self.beta_schedule == "sigmoid":
            return (high - low) / (1 + np.exp(-np.linspace(-6, 6, count))) + low
        left = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * math.pi / 2) ** 2
        return np.minimum(1 - left[1:] / left[:-1], 0.999)

    def kept(self) -> np.ndarray:
        """ᾱ: the share of the signal's variance that is left at each time, float64."""
        found: np.ndarray = np.cumprod(1 - self.betas())
        return found

    def _parts(self, times: Operand, ndim: int) -> tuple[Tensor, Tensor]:
        """√ᾱ and √(1 − ᾱ) at times (B,), with axes of 1 behind."""
        share = self.kept()
        at = as_tensor(times)
        shape = (*at.shape, *[1] * (ndim - at.ndim))
        tables = (np.sqrt(share), np.sqrt(1 - share))
        signal, noise = (take(as_tensor(t.astype(np.float32)), at, 0) for t in tables)
        return reshape(signal, shape), reshape(noise, shape)

    def add_noise(self, x: Operand, noise: Operand, times: Operand) -> Tensor:
        """√ᾱ x + √(1 − ᾱ) noise, at times (B,)."""
        clean = as_tensor(x)
        signal, rest = self._parts(times, clean.ndim)
        return signal * clean + rest * as_tensor(noise)

    def target(self, x: Operand, noise: Operand, times: Operand) -> Tensor:
        """What a model of this `prediction_type` should say."""
        clean, drawn = as_tensor(x), as_tensor(noise)
        if self.prediction_type == "epsilon":
            return drawn
        if self.prediction_type == "sample":
            return clean
        signal, rest = self._parts(times, clean.ndim)
        return signal * drawn - rest * clean

    def loss(self, model: Callable[..., Any], x: Operand, *more: Operand) -> Tensor:
        """The squared error of a model at a random time of each row, for `compile_step`.

        `model(noised, times, *more)` is called once; times and noise are drawn by the step's seed.
        """
        clean = as_tensor(x)
        count = self.num_train_timesteps
        drawn = cast(random.uniform((clean.shape[0],)) * count, int32)
        times = minimum(drawn, count - 1)  # rounding may reach the end
        noise = random.normal(clean.shape)
        said = model(self.add_noise(clean, noise, times), times, *more)
        error = cast(said, float32) - self.target(clean, noise, times)
        return mean(error * error)

    def times(self, count: int) -> np.ndarray:
        """The times of a sampler of so many steps, from the noisiest."""
        every = self.num_train_timesteps
        check_whole("times", "count", count)
        if count > every:
            cause = f"{count} steps of {every} times"
            raise ArgumentError("times", cause, "Take at most as many steps.")
        found: np.ndarray
        if self.timestep_spacing == "linspace":
            found = np.linspace(0, every - 1, count).round()[::-1]
        elif self.timestep_spacing == "leading":
            found = np.arange(count)[::-1] * (every // count) + self.steps_offset
        else:
            found = np.round(np.arange(every, 0, -every / count)) - 1
        return np.minimum(found.astype(np.int64), every - 1)


@dataclass(frozen=True)
class Steps:
    """A sampler: x ← c₀ x̂ + c₁ x + c₂ ε̂ + c₃ noise, with numbers of their own for each step."""

    times: np.ndarray
    signal: np.ndarray  # √ᾱ
    rest: np.ndarray  # √(1 − ᾱ)
    weights: np.ndarray  # (steps, 4)

    @property
    def draws(self) -> bool:
        return bool(self.weights[:, 3].any())

    def rows(self) -> tuple[np.ndarray, ...]:
        floats = (self.signal, self.rest, self.weights)
        return (self.times.astype(np.int32), *(a.astype(np.float32) for a in floats))


def ddpm(schedule: NoiseSchedule, count: int) -> Steps:
    """Ancestral sampling, as DDPMScheduler: each step draws from the posterior."""
    times, share = schedule.times(count), schedule.kept()
    now, last = share[times], np.append(share[times[1:]], 1.0)
    beta = 1 - now / last
    variance = np.maximum((1 - last) / (1 - now) * beta, 1e-20)
    if schedule.variance_type == "fixed_large":
        variance = beta
    spread = np.sqrt(variance) * (times > 0)
    clean = np.sqrt(last) * beta / (1 - now)
    kept = np.sqrt(now / last) * (1 - last) / (1 - now)
    weights = np.stack([clean, kept, np.zeros(count), spread], 1)
    return Steps(times, np.sqrt(now), np.sqrt(1 - now), weights)


def ddim(schedule: NoiseSchedule, count: int, eta: float = 0.0) -> Steps:
    """As DDIMScheduler: with eta = 0 nothing is drawn, with 1 as much as by DDPM."""
    check_number("ddim", "eta", eta, NOT_NEGATIVE)
    times, share = schedule.times(count), schedule.kept()
    before = times - schedule.num_train_timesteps // count
    end = 1.0 if schedule.set_alpha_to_one else share[0]
    now, last = share[times], np.where(before >= 0, share[before], end)
    spread = eta * np.sqrt((1 - last) / (1 - now) * (1 - now / last))
    noise = np.sqrt(np.maximum(1 - last - spread**2, 0))
    weights = np.stack([np.sqrt(last), np.zeros(count), noise, spread], 1)
    return Steps(times, np.sqrt(now), np.sqrt(1 - now), weights)


def denoised(
    model: Callable[..., Any], schedule: NoiseSchedule, steps: Steps, noise: Operand, *more: Operand
) -> Tensor:
    """Samples from noise (B, …): all steps in one loop, for `compile_forward`."""
    start = as_tensor(noise)

    def step(x: Tensor, row: tuple[Tensor, ...]) -> tuple[Tensor, tuple[()]]:
        time, signal, rest, weights = row
        said = cast(model(x, expand(reshape(time, (1,)), x.shape[0]), *more), float32)
        clean, drift = _predicted(schedule.prediction_type, said, x, signal, rest)
        if schedule.clip_sample:
            clean = clamp(clean, -schedule.clip_sample_range, schedule.clip_sample_range)
        found = weights[0] * clean + weights[1] * x + weights[2] * drift
        if steps.draws:
            found = found + weights[3] * random.normal(x.shape)
        return found, ()

    last: Any = scan(step, start, tuple(map(as_tensor, steps.rows())))[0]
    result: Tensor = last
    return result


def _predicted(
    kind: str, said: Tensor, x: Tensor, signal: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """The clean sample and the noise, of what a model said of x."""
    if kind == "epsilon":
        return (x - rest * said) / signal, said
    if kind == "sample":
        return said, (x - signal * said) / rest
    return signal * x - rest * said, signal * said + rest * x


class Sampler:
    """Sampling as one compiled program: `sampler()` gives samples, others at each call.

    `method` is "ddpm" or "ddim"; `inputs` are specifications of what the model takes beside the
    sample and the time, labels for one; `share` is a step or forward whose values are used.
    """

    def __init__(
        self,
        model: Model,
        schedule: NoiseSchedule,
        shape: Shape,
        steps: int = 50,
        *,
        method: str = "ddim",
        eta: float = 0.0,
        inputs: Sequence[TensorType] = (),
        seed: int = 0,
        share: Any = None,
    ):
        if method not in ("ddpm", "ddim"):
            raise ArgumentError("Sampler", f"method {method!r}", 'It is "ddpm" or "ddim".')
        if method == "ddpm" and eta:
            raise ArgumentError("Sampler", f"ddpm with eta = {eta}", "eta is ddim's.")
        found = ddpm(schedule, steps) if method == "ddpm" else ddim(schedule, steps, eta)

        def forward(module: Any, batch: dict[str, Any]) -> Tensor:
            return denoised(module, schedule, found, batch["noise"], *batch["inputs"])

        self.shape = TensorType(shape).shape
        self._source = np.random.default_rng(check_seed("Sampler", seed))
        self._forward = compile_forward(
            model,
            forward,
            {"noise": TensorType(self.shape, float32), "inputs": tuple(inputs)},
            device=model.device,
            precision=model.precision,
            seed=seed,
            share=share,
        )

    def __call__(self, *inputs: object, noise: object = None) -> np.ndarray:
        """Samples from noise that is drawn, or given."""
        drawn = self._source.normal(size=self.shape) if noise is None else np.asarray(noise)
        if drawn.shape != self.shape:
            cause = f"noise of shape {drawn.shape}"
            raise ShapeError("Sampler", cause, f"It is {self.shape}.")
        batch = {"noise": drawn.astype(np.float32), "inputs": inputs}
        return np.asarray(self._forward(batch))
