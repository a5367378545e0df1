"""Losses with derivatives in them: equations, penalties of gradients, steps within steps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats


def dense(s: Any, sizes: list[int], activation: Any) -> Any:
    """Linear layers with an activation between them."""
    pairs = itertools.pairwise(sizes)
    layers = [part for a, b in pairs for part in (s.nn.Linear(a, b), activation())]
    return s.nn.Sequential(*layers[:-1])


def pinn(s: Any, width: int, depth: int, **others: int) -> Any:
    """Burgers' equation u_t + u u_x = ν u_xx as a loss: second derivatives by the points."""
    nn = s.nn

    class Solution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense(s, [2, *[width] * depth, 1], nn.Tanh)

        def forward(self, batch: Any) -> Any:
            def first(points: Any) -> Any:
                return s.gradient(lambda p: self.net(p).sum(), points)  # (N, 2)

            points = batch["points"]
            u, du = self.net(points)[:, 0], first(points)
            second = s.gradient(lambda p: first(p)[:, 0].sum(), points)[:, 0]
            residual = du[:, 1] + u * du[:, 0] - second * (0.01 / np.pi)
            known = self.net(batch["edge"])[:, 0] - batch["u"]
            return (residual * residual).mean() + (known * known).mean()

    return Solution()


def equation(rng: np.random.Generator, n: int, edge: int, **others: int) -> Arrays:
    """Points inside, and u = −sin(πx) at the first moment."""
    points, at = (rng.uniform(-1, 1, (k, 2)).astype(np.float32) for k in (n, edge))
    points[:, 1], at[:, 1] = np.abs(points[:, 1]), 0
    return {"points": points, "edge": at, "u": -np.sin(np.pi * at[:, 0]).astype(np.float32)}


def wgan(s: Any, width: int, latent: int, size: int, **others: int) -> Any:
    """WGAN-GP: the critic's loss with the penalty of its gradient, and the generator's."""
    nn, small = s.nn, size // 4

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(latent, 2 * width * small * small)
            self.up1 = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
            self.norm = nn.BatchNorm2d(width)
            self.up2 = nn.ConvTranspose2d(width, 3, 4, 2, 1)

        def forward(self, z: Any) -> Any:
            x = s.relu(self.first(z)).reshape(z.shape[0], 2 * width, small, small)
            return s.tanh(self.up2(s.relu(self.norm(self.up1(x)))))

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, width, 4, 2, padding=1)
            self.conv2 = nn.Conv2d(width, 2 * width, 4, 2, padding=1)
            self.last = nn.Linear(2 * width * small * small, 1)

        def forward(self, x: Any) -> Any:
            y = s.leaky_relu(self.conv2(s.leaky_relu(self.conv1(x), 0.2)), 0.2)
            return self.last(y.reshape(x.shape[0], -1))[:, 0]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = Generator(), Critic()

        def penalty(self, between: Any) -> Any:
            slope = s.gradient(lambda x: self.critic(x).sum(), between)
            length = s.sqrt((slope * slope).sum((1, 2, 3)) + 1e-12)
            return ((length - 1) * (length - 1)).mean()

        def forward(self, batch: Any) -> Any:
            image, fake = batch["image"], self.generator(batch["z"])
            given = s.stop_gradient(fake)
            between = given + batch["share"] * (image - given)
            critic = self.critic(given).mean() - self.critic(image).mean()
            frozen = {n: s.stop_gradient(p) for n, p in self.critic.named_parameters()}
            generator = -s.call(self.critic, frozen, fake).mean()
            return critic + 10 * self.penalty(between) + generator

    return Both()


def faked(rng: np.random.Generator, n: int, latent: int, size: int, **others: int) -> Arrays:
    image = np.tanh(floats(rng, n, 3, size, size))
    share = rng.uniform(0, 1, (n, 1, 1, 1)).astype(np.float32)
    return {"image": image, "z": floats(rng, n, latent), "share": share}


def maml(s: Any, width: int, size: int, ways: int, **others: int) -> Any:
    """MAML: the loss after a step on a task, of the values before it; tasks side by side."""
    nn, small = s.nn, size // 4

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, width, 3, 2, padding=1)
            self.conv2 = nn.Conv2d(width, width, 3, 2, padding=1)
            self.last = nn.Linear(width * small * small, ways)

        def forward(self, x: Any) -> Any:
            y = s.relu(self.conv2(s.relu(self.conv1(x))))
            return self.last(y.reshape(x.shape[0], -1))

    class MAML(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learner = Learner()

        def forward(self, batch: Any) -> Any:
            first = dict(self.learner.named_parameters())

            def error(values: Any, x: Any, y: Any) -> Any:
                return s.cross_entropy(s.call(self.learner, values, x), y)

            def after(x: Any, y: Any, later: Any, asked: Any) -> Any:
                slopes = s.grad(error)(first, x, y)
                return error({n: v - 0.1 * slopes[n] for n, v in first.items()}, later, asked)

            parts = (batch[name] for name in ("x", "y", "later", "asked"))
            return s.vmap(after)(*parts).mean()

    return MAML()


def tasks(
    rng: np.random.Generator, tasks: int, shots: int, ways: int, size: int, **others: int
) -> Arrays:
    shape = (tasks, shots * ways)
    images = {name: floats(rng, *shape, 1, size, size) for name in ("x", "later")}
    return images | {name: classes(rng, ways, *shape) for name in ("y", "asked")}


def dqn(s: Any, size: int, width: int, hidden: int, actions: int, **others: int) -> Any:
    """Deep Q-learning: the network by what its frozen twin expects of the next state."""
    nn = s.nn
    small = ((size - 8) // 4 + 1 - 4) // 2 + 1 - 2

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(4, width, 8, 4)
            self.conv2 = nn.Conv2d(width, 2 * width, 4, 2)
            self.conv3 = nn.Conv2d(2 * width, 2 * width, 3)
            self.fc1 = nn.Linear(2 * width * small * small, hidden)
            self.fc2 = nn.Linear(hidden, actions)

        def forward(self, x: Any) -> Any:
            y = s.relu(self.conv3(s.relu(self.conv2(s.relu(self.conv1(x))))))
            return self.fc2(s.relu(self.fc1(y.reshape(x.shape[0], -1))))

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = Network(), Network()
            self.target.requires_grad_(False)

        def forward(self, batch: Any) -> Any:
            later = s.amax(self.target(batch["later"]), 1)
            wanted = batch["reward"] + 0.99 * batch["goes_on"] * later
            found = s.take_along(self.online(batch["x"]), batch["action"][:, None], 1)[:, 0]
            return s.huber(found, s.stop_gradient(wanted))

    return Learner()


def played(rng: np.random.Generator, n: int, size: int, actions: int, **others: int) -> Arrays:
    return {
        "x": floats(rng, n, 4, size, size),
        "later": floats(rng, n, 4, size, size),
        "action": classes(rng, actions, n),
        "reward": floats(rng, n),
        "goes_on": (rng.random(n) < 0.9).astype(np.float32),
    }


ENTRIES = [
    Entry(
        "pinn",
        "PINN, second derivatives",
        pinn,
        equation,
        {"n": 512, "edge": 128, "width": 48, "depth": 4},
        {"n": 16384, "edge": 2048, "width": 256, "depth": 6},
        gpu_precision="float32",
    ),
    Entry(
        "wgan",
        "WGAN with gradient penalty",
        wgan,
        faked,
        {"n": 16, "size": 32, "width": 24, "latent": 32},
        {"n": 128, "size": 64, "width": 64, "latent": 128},
        is_image=True,
    ),
    Entry(
        "maml",
        "MAML, gradients of steps",
        maml,
        tasks,
        {"tasks": 4, "shots": 2, "ways": 5, "size": 28, "width": 16},
        {"tasks": 16, "shots": 5, "ways": 20, "size": 28, "width": 64},
    ),
    Entry(
        "dqn",
        "DQN, a frozen twin",
        dqn,
        played,
        {"n": 8, "size": 52, "width": 16, "hidden": 128, "actions": 6},
        {"n": 256, "size": 84, "width": 32, "hidden": 512, "actions": 18},
        is_image=True,
    ),
]
