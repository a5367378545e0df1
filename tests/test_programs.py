"""Eight programs of `examples/` beside the same programs in PyTorch: 20 steps from equal weights.

Both sides compute in float32 on the processor and start from a state dict of PyTorch. What is random
(noise, shares, points) is data, so that both see the same. Losses agree to 1e-5 of their size, and the
weights at the end to `WEIGHTS`, absolutely.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import treadle as td
from treadle import optim

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

NAMES = "gat maml neural_ode seq2seq transfer unet vit wgan_gp".split()
STEPS, LOSSES, WEIGHTS = 20, 1e-5, 2e-4
Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


def program(name: str):
    assert name in NAMES
    return importlib.import_module(name)


def test_programs_are_short_and_compared() -> None:
    own = Path(__file__).read_text(encoding="utf-8")
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120
        assert f'program("{name}")' in own


def tensors(batch: Arrays) -> Tensors:
    """As PyTorch wants them: integers as int64."""
    whole = {name: torch.from_numpy(np.asarray(array)) for name, array in batch.items()}
    return {name: t if t.is_floating_point() else t.long() for name, t in whole.items()}


def compare(
    step: td.TrainStep,
    reference: nn.Module,
    loss: Callable[[nn.Module, Tensors], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Arrays],
    clip: float | None = None,
    rate: Callable[[int], float] | None = None,
) -> None:
    """Train both on the same batches and compare losses and weights."""
    step.load_params(reference.state_dict())
    found, expected = [], []
    for i, batch in enumerate(batches):
        found.append(step(batch).loss)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(i)
        optimizer.zero_grad()
        value = loss(reference, tensors(batch))
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
        expected.append(float(value.detach()))
    assert len(found) == STEPS
    assert max(found) > 1.01 * min(found)  # something was learned, or at least moved
    np.testing.assert_allclose(found, expected, rtol=LOSSES)
    same_weights(step.params, reference)


def same_weights(params: Arrays, reference: nn.Module) -> None:
    state = reference.state_dict()
    assert sorted(params) == sorted(state)
    for name, value in state.items():
        found, expected = params[name], value.numpy()
        if name.endswith("in_proj_bias"):
            found, expected = (without_keys(v) for v in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=WEIGHTS, atol=WEIGHTS, err_msg=name)


def without_keys(bias: np.ndarray) -> np.ndarray:
    """That of queries and values. A bias of keys adds the same to all scores of a row: its gradient
    is rounding, of which Adam makes steps of full size."""
    queries, _, values = np.split(bias, 3)
    return np.concatenate([queries, values])


# Transfer: two groups, and a backbone whose batch norms stay in evaluation.


class TorchNet(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
def test_transfer(stays: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = program("transfer"), TorchNet(4, 2)
    rng = np.random.default_rng(0)
    batches = [
        {
            "x": rng.random((12, 1, 8, 8), np.float32),
            "y": rng.integers(0, 2, 12).astype(np.int32),
        }
        for _ in range(STEPS)
    ]
    model = ours.Net(4, 2)
    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()  # as if learned elsewhere
        norm.running_var.uniform_(0.5, 2)
    if stays:
        model.backbone.eval()
        theirs.backbone.eval()
    step = td.compile_step(model, ours.loss, ours.two_groups(1e-2), batches[0], device="cpu")
    both = TwoOptimizers(
        torch.optim.SGD(theirs.backbone.parameters(), 1e-3, momentum=0.9),
        torch.optim.AdamW(theirs.head.parameters(), 1e-2, weight_decay=0.01),
    )
    before = {n: v.clone() for n, v in theirs.state_dict().items() if "running" in n}
    compare(step, theirs, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), both, batches)
    moved = [n for n, v in before.items() if (step.params[n] != v.numpy()).any()]
    assert len(moved) == (0 if stays else 4)


class TwoOptimizers:
    """A group each: PyTorch has one kind of optimizer for all groups of one."""

    def __init__(self, *members: torch.optim.Optimizer):
        self.members = members
        self.param_groups = [group for m in members for group in m.param_groups]

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad()

    def step(self) -> None:
        for member in self.members:
            member.step()


# A vision transformer.


class TorchViT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        first = self.cls_token.expand(x.shape[0], -1, -1)
        x = self.encoder(torch.cat([first, x], 1) + self.positions)
        return self.head(x[:, 0])


def warmup_cosine(peak: float, warmup: int, steps: int) -> Callable[[int], float]:
    def rate(count: int) -> float:
        if count < warmup:
            return peak * (count + 1) / warmup
        part = min(1.0, (count - warmup) / (steps - warmup))
        return 0.5 * peak * (1 + np.cos(np.pi * part))

    return rate


@pytest.mark.slow
def test_vit() -> None:
    torch.manual_seed(1)
    ours, theirs = program("vit"), TorchViT(24, 4, 2)
    rng = np.random.default_rng(1)
    batches = [
        {
            "x": rng.random((9, 1, 8, 8), np.float32),
            "y": rng.integers(0, 10, 9).astype(np.int32),
        }
        for _ in range(STEPS)
    ]
    schedule = optim.warmup_cosine(2e-3, warmup=5, steps=30)
    step = td.compile_step(
        ours.ViT(width=24, layers=2), ours.loss, optim.adamw(schedule, weight_decay=0.05),
        batches[0], device="cpu", clip_norm=1.0,
    )  # fmt: skip
    compare(
        step,
        theirs,
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"], label_smoothing=0.1),
        torch.optim.AdamW(theirs.parameters(), weight_decay=0.05),
        batches,
        clip=1.0,
        rate=warmup_cosine(2e-3, 5, 30),
    )


# A U-Net.


def torch_block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU(),
    )  # fmt: skip


class TorchUNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.down1, self.down2 = torch_block(1, width), torch_block(width, 2 * width)
        self.bottom = torch_block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = torch_block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = torch_block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        x = self.bottom(self.pool(coarse))
        x = self.join2(torch.cat([self.up2(x), coarse], 1))
        x = self.join1(torch.cat([self.up1(x), fine], 1))
        return self.out(x)


def torch_overlap(model: nn.Module, batch: Tensors) -> torch.Tensor:
    logits, truth = model(batch["x"]), batch["y"]
    chance = torch.sigmoid(logits)
    overlap, total = (chance * truth).sum((1, 2, 3)), (chance + truth).sum((1, 2, 3))
    dice = 1 - ((2 * overlap + 1) / (total + 1)).mean()
    return F.binary_cross_entropy_with_logits(logits, truth) + dice


@pytest.mark.slow
def test_unet() -> None:
    torch.manual_seed(2)
    ours, theirs = program("unet"), TorchUNet(8)
    batches = [ours.pictures(3, seed=i) for i in range(STEPS)]
    step = td.compile_step(ours.UNet(8), ours.loss, optim.adam(3e-3), batches[0], device="cpu")
    optimizer = torch.optim.Adam(theirs.parameters(), 3e-3)
    compare(step, theirs, torch_overlap, optimizer, batches)


# Sequence to sequence with padding on both sides.


class TorchTranslator(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, words: int, source: int):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.words, self.digits = nn.Embedding(words, width), nn.Embedding(13, width)
        self.positions = nn.Parameter(0.02 * torch.randn(source, width))
        encoder = nn.TransformerEncoderLayer(width, heads, 2 * width, **options)
        decoder = nn.TransformerDecoderLayer(width, heads, 2 * width, **options)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 13)

    def forward(self, source, target):
        hidden, length = source == 0, target.shape[1]
        memory = self.encoder(self.words(source) + self.positions, src_key_padding_mask=hidden)
        x = self.decoder(
            self.digits(target) + self.positions[:length],
            memory,
            tgt_mask=torch.ones(length, length).triu(1) > 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=hidden,
        )
        return self.out(self.norm(x))


def torch_translation(model: nn.Module, batch: Tensors) -> torch.Tensor:
    given, wanted = batch["target"][:, :-1], batch["target"][:, 1:]
    scores = model(batch["source"], given)
    return F.cross_entropy(scores.reshape(-1, 13), wanted.reshape(-1), ignore_index=0)


@pytest.mark.slow
def test_seq2seq() -> None:
    torch.manual_seed(3)
    ours = program("seq2seq")
    theirs = TorchTranslator(16, 4, 2, len(ours.WORDS), ours.SOURCE)
    rng = np.random.default_rng(3)
    batches = [ours.tokens(rng.integers(0, 10_000, 9)) for _ in range(STEPS)]
    step = td.compile_step(
        ours.Translator(16, layers=2), ours.loss, optim.adamw(2e-3), batches[0],
        device="cpu", clip_norm=1.0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(theirs.parameters(), 2e-3)
    compare(step, theirs, torch_translation, optimizer, batches, clip=1.0)


# Attention over the edges of a graph.


class TorchGATLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int):
        super().__init__()
        self.heads, self.outputs = heads, outputs
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.to_source = nn.Parameter(torch.randn(heads, outputs))
        self.to_target = nn.Parameter(torch.randn(heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x, source, target):
        """The softmax is written out: weights by hand over the edges of each target."""
        count = x.shape[0]
        h = self.project(x).reshape(count, self.heads, self.outputs)
        a, b = (h * self.to_source).sum(-1), (h * self.to_target).sum(-1)
        scores = F.leaky_relu(a[source] + b[target], 0.2)
        index = target[:, None].expand(-1, self.heads)
        empty = torch.full((count, self.heads), -torch.inf)
        greatest = empty.scatter_reduce(0, index, scores.detach(), "amax")
        weights = torch.exp(scores - greatest[target])
        totals = torch.zeros(count, self.heads).index_add(0, target, weights)
        weights = weights / totals[target]
        none = torch.zeros(count, self.heads, self.outputs)
        mixed = none.index_add(0, target, weights.unsqueeze(-1) * h[source])
        return mixed.reshape(count, -1) + self.bias


class TorchGAT(nn.Module):
    def __init__(self, features: int, groups: int, hidden: int, heads: int):
        super().__init__()
        self.first = TorchGATLayer(features, hidden, heads)
        self.second = TorchGATLayer(hidden * heads, groups, 1)

    def forward(self, x, source, target):
        return self.second(F.elu(self.first(x, source, target)), source, target)


def torch_known(model: nn.Module, graph: Tensors) -> torch.Tensor:
    scores = model(graph["x"], graph["source"], graph["target"])
    each = F.cross_entropy(scores, graph["y"], reduction="none")
    return (each * graph["known"]).sum() / graph["known"].sum()


@pytest.mark.slow
def test_gat() -> None:
    torch.manual_seed(4)
    ours = program("gat")
    theirs = TorchGAT(ours.FEATURES, ours.GROUPS, 5, 3)
    graph = ours.society(60, known=0.5)
    optimizer = optim.adam(1e-2, weight_decay=5e-3)
    step = td.compile_step(ours.GAT(5, 3), ours.loss, optimizer, graph, device="cpu")
    peer = torch.optim.Adam(theirs.parameters(), 1e-2, weight_decay=5e-3)
    compare(step, theirs, torch_known, peer, [graph] * STEPS)


# Two networks against each other, with a gradient inside the loss.


def torch_network(inputs: int, outputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


def torch_critic_loss(pair: nn.ModuleDict, batch: Tensors, weight: float) -> torch.Tensor:
    critic = pair["critic"]
    drawn = pair["generator"](batch["noise"]).detach()
    between = (drawn + batch["share"] * (batch["real"] - drawn)).requires_grad_()
    (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = ((slopes.norm(dim=1) - 1) ** 2).mean()
    return weight * penalty - (critic(batch["real"]).mean() - critic(drawn).mean())


def test_wgan_gp() -> None:
    torch.manual_seed(5)
    ours = program("wgan_gp")
    critic_step, generator_step = ours.compiled(hidden=12, lr=1e-3, rows=20)
    pair = nn.ModuleDict(
        {"generator": torch_network(ours.NOISE, 2, 12), "critic": torch_network(2, 1, 12)}
    )
    critic_step.load_params(pair.state_dict())
    adam = {n: torch.optim.Adam(m.parameters(), 1e-3, (0.5, 0.9)) for n, m in pair.items()}
    rng = np.random.default_rng(5)
    found, expected = [], []
    for _ in range(STEPS):
        batch, noise = ours.critic_batch(rng, 20), ours.noise_of(rng, 20)
        found += [critic_step(batch).loss, generator_step(noise).loss]
        losses = (
            ("critic", lambda b=batch: torch_critic_loss(pair, tensors(b), ours.PENALTY)),
            (
                "generator",
                lambda z=noise: -pair["critic"](pair["generator"](torch.tensor(z))).mean(),
            ),
        )
        for name, loss in losses:
            adam[name].zero_grad()
            value = loss()
            value.backward()
            adam[name].step()
            expected.append(float(value.detach()))
    np.testing.assert_allclose(found, expected, rtol=LOSSES, atol=1e-6)  # a generator's may be 0
    same_weights(generator_step.params, pair)


# A network as a law of motion, through the steps of its solver.


class TorchVelocity(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, y):
        return self.net(y**3)


def torch_path(velocity: nn.Module, y: torch.Tensor, times: int, h: float) -> torch.Tensor:
    path = []
    for _ in range(times):
        k1 = velocity(y)
        k2 = velocity(y + h / 2 * k1)
        k3 = velocity(y + h / 2 * k2)
        k4 = velocity(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        path.append(y)
    return torch.stack(path)


@pytest.mark.slow
def test_neural_ode() -> None:
    torch.manual_seed(6)
    ours, theirs = program("neural_ode"), TorchVelocity(9)
    rng = np.random.default_rng(6)
    batches = [ours.observed(rng, 7, times=9) for _ in range(STEPS)]
    step = td.compile_step(
        ours.Velocity(9), ours.loss, optim.adam(1e-2), batches[0], device="cpu", clip_norm=1.0
    )

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.mse_loss(torch_path(model, batch["start"], 9, ours.STEP), batch["path"])

    optimizer = torch.optim.Adam(theirs.parameters(), 1e-2)
    compare(step, theirs, loss, optimizer, batches, clip=1.0)


# A gradient step inside the loss.


def torch_network_of_sines(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )


@pytest.mark.parametrize(
    "inner", [1, pytest.param(2, marks=pytest.mark.slow)], ids=lambda n: f"{n} inside"
)
def test_maml(inner: int) -> None:
    torch.manual_seed(7)
    ours, theirs = program("maml"), torch_network_of_sines(9)
    rng = np.random.default_rng(7)
    batches = [ours.sines(rng, tasks=5, points=6) for _ in range(STEPS)]

    def loss(model: nn.Module, tasks: Tensors) -> torch.Tensor:
        total = torch.zeros(())
        for i in range(5):
            weights = dict(model.named_parameters())
            for _ in range(inner):
                error = F.mse_loss(functional_call(model, weights, tasks["x"][i]), tasks["y"][i])
                slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True)
                parts = zip(weights.items(), slopes, strict=True)
                weights = {n: w - ours.INNER * g for (n, w), g in parts}
            total = total + F.mse_loss(
                functional_call(model, weights, tasks["x2"][i]), tasks["y2"][i]
            )
        return total / 5

    step = td.compile_step(
        ours.network(9),
        lambda model, tasks: ours.loss(model, tasks, inner),
        optim.adam(2e-3),
        batches[0],
        device="cpu",
    )
    compare(step, theirs, loss, torch.optim.Adam(theirs.parameters(), 2e-3), batches)
