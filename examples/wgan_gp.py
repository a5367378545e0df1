"""A Wasserstein GAN with gradient penalty: points on a ring of eight clouds.

    python examples/wgan_gp.py

The critic's slope between real and drawn points is to be 1: its gradient by the points is part of
its loss (`td.grad` inside), and training differentiates through it once more. Two steps share the
values; the critic makes several for each of the generator's.
"""

import numpy as np

import treadle as td
from treadle import nn, optim

NOISE, BATCH, CLOUDS = 4, 128, 8
PENALTY = 0.1  # what slopes other than 1 cost, as the paper's authors have it for points


def network(inputs: int, outputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


def critic_loss(models, batch):
    """Drawn points minus real ones, and what slopes other than 1 cost."""
    critic = models["critic"]
    drawn = td.stop_gradient(models["generator"](batch["noise"]))
    between = drawn + batch["share"] * (batch["real"] - drawn)  # share is (B, 1), in 0 … 1
    slopes = td.grad(lambda points: critic(points).sum())(between)  # (B, 2)
    penalty = td.square(td.norm(slopes, axis=1) - 1).mean()
    distance = critic(batch["real"]).mean() - critic(drawn).mean()
    td.metric("distance", distance)
    return PENALTY * penalty - distance


def generator_loss(models, noise):
    return -models["critic"](models["generator"](noise)).mean()


def centres():
    angles = 2 * np.pi * np.arange(CLOUDS) / CLOUDS
    return 2 * np.stack([np.cos(angles), np.sin(angles)], 1)


def noise_of(rng, rows):
    return rng.normal(size=(rows, NOISE)).astype(np.float32)


def critic_batch(rng, rows):
    real = centres()[rng.integers(0, CLOUDS, rows)] + 0.1 * rng.normal(size=(rows, 2))
    share = rng.random((rows, 1))
    return {
        "real": real.astype(np.float32),
        "noise": noise_of(rng, rows),
        "share": share.astype(np.float32),
    }


def compiled(hidden: int, lr: float, rows: int = BATCH):
    """Two steps on one pair of networks."""
    pair = {"generator": network(NOISE, 2, hidden), "critic": network(2, 1, hidden)}
    adam = optim.adam(lr, betas=(0.5, 0.9))
    example = critic_batch(np.random.default_rng(0), rows)
    critic_step = td.compile_step(
        pair, critic_loss, optim.only("critic.*", adam), example, device="cpu"
    )
    generator_step = td.compile_step(
        pair, generator_loss, optim.only("generator.*", adam), example["noise"],
        device="cpu", share=critic_step,
    )  # fmt: skip
    return critic_step, generator_step


def picture(points, side: int = 25) -> str:
    """How many points fall where, as letters."""
    edges = np.linspace(-2.6, 2.6, side + 1)
    counts, *_ = np.histogram2d(points[:, 1], points[:, 0], [edges, edges])
    shades = np.digitize(counts, [1, 3, 9])
    return "\n".join("".join(" .+#"[s] * 2 for s in row) for row in shades[::-1])


def train(steps: int = 2500, critic_steps: int = 5, lr: float = 1e-3, hidden: int = 64):
    critic_step, generator_step = compiled(hidden, lr)
    rng = np.random.default_rng(1)
    for i in range(1, steps + 1):
        for _ in range(critic_steps):
            out = critic_step(critic_batch(rng, BATCH))
        generator_step(noise_of(rng, BATCH))
        if i % 250 == 0:
            print(f"step {i}: estimated distance {out.metrics['distance']:.3f}")

    draw = generator_step.attach(lambda models, z: models["generator"](z), td.Spec((1000, NOISE)))
    points = draw(noise_of(rng, 1000))
    gaps = np.linalg.norm(points[:, None] - centres(), axis=-1)  # (1000, 8)
    near = gaps.min(1) < 0.4
    found = len(set(gaps[near].argmin(1).tolist()))
    print(picture(points))
    print(f"{near.mean():.0%} of 1000 points are near a cloud; clouds found: {found} of {CLOUDS}")
    return float(near.mean()), found


if __name__ == "__main__":
    train()
