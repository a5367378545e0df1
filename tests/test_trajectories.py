"""Fifty training steps beside PyTorch in float64: the same losses and parameters to 1e-9."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from trajectories import TRAJECTORIES
from treadle import losses

STEPS = {
    "lstm-adam": 15
}  # of 50: sequences are interpreted step by step; all of them as a slow test


class TorchMLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(6, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class TorchCNN(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(4 * 9, 3)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(h.flatten(1))


class TorchBlock(torch.nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.attn = torch.nn.MultiheadAttention(d, heads, batch_first=True)
        self.fc, self.out = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)

    def forward(self, x):
        t = x.shape[1]
        mask = torch.full((t, t), -torch.inf, dtype=x.dtype).triu(1)
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class TorchGPT(torch.nn.Module):
    def __init__(self, vocabulary: int = 11, d: int = 8, t: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocabulary, d), torch.nn.Embedding(t, d)
        self.blocks = torch.nn.ModuleList(TorchBlock(d, 2) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(d)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class TorchTagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = torch.nn.LSTM(5, 7, num_layers=2), torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.fc(self.lstm(x)[0])


def warmup_cosine(count: int, peak: float, warmup: int, steps: int) -> float:
    if count < warmup:
        return peak * (count + 1) / warmup
    part = min(1.0, (count - warmup) / (steps - warmup))
    return 0.5 * peak * (1 + np.cos(np.pi * part))


# Beside a trajectory: the model there, its optimizer, and the rate of each step where it changes.
PEERS = {
    "mlp-adamw": (TorchMLP, lambda p: torch.optim.AdamW(p, 1e-2), None),
    "cnn-batchnorm-sgd": (
        TorchCNN,
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
        None,
    ),
    "gpt-adamw-clip-warmup": (
        TorchGPT,
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
        lambda i: warmup_cosine(i, 1e-2, 5, 40),
    ),
    "lstm-adam": (TorchTagger, lambda p: torch.optim.Adam(p, 1e-2), None),
}
CASES = {
    name: (t.model, peer, t.x, t.y, t.classes, t.optimizer, theirs, t.clip, rate)
    for (name, t), (peer, theirs, rate) in zip(TRAJECTORIES.items(), PEERS.values(), strict=True)
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((n, STEPS.get(n, 50)) for n in CASES),
        *(pytest.param(n, 50, marks=pytest.mark.slow) for n in STEPS),
    ],
)
def test_trajectory(name: str, steps: int) -> None:
    model, torch_model, x_shape, y_shape, classes, ours, theirs, clip, rate = CASES[name]
    rng = np.random.default_rng(0)

    def batch() -> dict[str, np.ndarray]:
        y = rng.integers(0, classes, y_shape)
        return {
            "x": rng.integers(0, classes, y_shape) if x_shape is None else rng.normal(size=x_shape),
            "y": y,
        }

    def loss(model, batch):
        return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)

    x_spec = td.Spec(y_shape, td.int32) if x_shape is None else td.Spec(x_shape)
    spec = {"x": x_spec, "y": td.Spec(y_shape, td.int32)}
    options = td.CompileOptions(verify=True)
    step = td.compile_step(
        model(), loss, ours(), spec, clip_norm=clip, options=options, device="oracle"
    )
    reference = torch_model().double()
    reference.load_state_dict({n: torch.tensor(v) for n, v in step.params.items()})
    optimizer = theirs(reference.parameters())
    for i in range(steps):
        data = batch()
        if rate is not None:
            assert step.learning_rate == pytest.approx(rate(i), rel=1e-12, abs=1e-15)
            for group in optimizer.param_groups:
                group["lr"] = rate(i)
        out = step(data)
        optimizer.zero_grad()
        logits = reference(torch.tensor(data["x"]))
        expected = F.cross_entropy(logits.reshape(-1, classes), torch.tensor(data["y"]).reshape(-1))
        expected.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert out.grad_norm == pytest.approx(float(norm), rel=1e-9)
        optimizer.step()
        assert out.loss == pytest.approx(float(expected.detach()), rel=1e-9)
    found = step.params
    for key, value in reference.state_dict().items():
        np.testing.assert_allclose(found[key], value.numpy(), rtol=1e-9, atol=1e-9, err_msg=key)
