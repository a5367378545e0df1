"""Who trains the workloads: Treadle, PyTorch eager and compiled, JAX. Each at its own best habits.

PyTorch: fused AdamW, `scaled_dot_product_attention`, gradients set to None; compiled, the model
and its loss are one `torch.compile`d function. JAX: one jitted step whose state is donated,
weights (in, out), images NHWC. All start from the same values, so that losses can be compared.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from turns import Contender, Running

import treadle as td
from models import WORKLOADS, Workload, loss
from treadle import optim

RATE, DECAY, BETAS, EPSILON = 1e-3, 1e-2, (0.9, 0.999), 1e-8

Arrays = dict[str, np.ndarray]
Start = Callable[[Workload, Arrays, Arrays], Running]  # (workload, batch, first values)


def prepare(start: Start, task: dict[str, Any]) -> Callable[[], Running]:
    """A task names a workload and the file with the first values of its parameters."""
    work = WORKLOADS[task["workload"]]
    with np.load(task["values"]) as file:
        values = {n: file[n] for n in file.files}
    return functools.partial(start, work, work.batch(), values)


def treadle_start(work: Workload, batch: Arrays, values: Arrays) -> Running:
    """Its own first values are the given ones: they came from the same seed."""
    optimizer = optim.adamw(RATE, BETAS, EPSILON, DECAY)
    step = td.compile_step(
        work.make(), loss, optimizer, work.specs(), clip_norm=work.clip, device="cpu", seed=0
    )
    last: list[Any] = [None]

    def run() -> None:
        last[0] = step(batch)

    return Running(run, lambda: None, lambda: float(last[0].loss))


# --- PyTorch ----------------------------------------------------------------------------------


def torch_mlp(activation: str, *widths: int) -> Any:
    from torch import nn

    layers: list[Any] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        if i:
            layers.append(getattr(nn, activation)())
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


def torch_cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def torch_gpt(vocabulary: int, t: int, d: int, heads: int, layers: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            parts = self.qkv(self.ln_1(x)).split(d, -1)
            q, k, v = (p.view(b, t, heads, -1).transpose(1, 2) for p in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
            return x + self.out(F.gelu(self.fc(self.ln_2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(d)

        def forward(self, tokens: Any) -> Any:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return F.linear(self.ln_f(x), self.wte.weight)

    return GPT()


def torch_llama(vocabulary: int, d: int, heads: int, groups: int, hidden: int, layers: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    size = d // heads

    def rotated(x: Any) -> Any:
        rate = 100000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * rate
        c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(d, (heads + 2 * groups) * size, bias=False)
            self.proj = nn.Linear(d, d, bias=False)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            parts = self.qkv(x).split([heads * size, groups * size, groups * size], -1)
            q, k, v = (p.view(b, t, -1, size).transpose(1, 2) for p in parts)
            mixed = F.scaled_dot_product_attention(
                rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
            )
            return self.proj(mixed.transpose(1, 2).reshape(b, t, d))

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(d, hidden, bias=False)
            self.up_proj = nn.Linear(d, hidden, bias=False)
            self.down_proj = nn.Linear(hidden, d, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
            self.attention, self.mlp = Attention(), Gated()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm_1(x))
            return x + self.mlp(self.norm_2(x))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(vocabulary, d)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.RMSNorm(d, eps=1e-5)

        def forward(self, tokens: Any) -> Any:
            x = self.wte(tokens)
            for block in self.blocks:
                x = block(x)
            return F.linear(self.norm(x), self.wte.weight)

    return Llama()


def torch_resnet(classes: int, *counts: int) -> Any:
    import torch
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            out = 4 * width
            self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
            self.downsample = None
            if stride != 1 or channels != out:
                self.downsample = nn.Sequential(
                    nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
                )

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.bn1(self.conv1(x)))
            y = torch.relu(self.bn2(self.conv2(y)))
            y = self.bn3(self.conv3(y))
            return torch.relu(y + (x if self.downsample is None else self.downsample(x)))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
            self.bn1, self.pool = nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, padding=1)
            layers, channels = [], 64
            for i, count in enumerate(counts):
                width, blocks = 64 << i, []
                for k in range(count):
                    blocks.append(Bottleneck(channels, width, 2 if i and not k else 1))
                    channels = 4 * width
                layers.append(nn.Sequential(*blocks))
            self.layers = nn.ModuleList(layers)
            self.fc = nn.Linear(channels, classes)

        def forward(self, x: Any) -> Any:
            x = self.pool(torch.relu(self.bn1(self.conv1(x))))
            for layer in self.layers:
                x = layer(x)
            return self.fc(x.mean((2, 3)))

    return ResNet()


def torch_lstm(vocabulary: int, d: int, layers: int) -> Any:
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(vocabulary, d), nn.Linear(d, vocabulary)
            self.lstm = nn.LSTM(d, d, layers)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.lstm(self.wte(tokens))[0])

    return Recurrent()


TORCH: dict[str, Callable[..., Any]] = {
    "mlp": functools.partial(torch_mlp, "ReLU"),
    "mlp_gelu": functools.partial(torch_mlp, "GELU"),
    "cnn": torch_cnn,
    "gpt": torch_gpt,
    "llama": torch_llama,
    "resnet": torch_resnet,
    "lstm": torch_lstm,
}


def torch_start(compiled: bool, work: Workload, batch: Arrays, values: Arrays) -> Running:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = TORCH[work.architecture](*work.sizes)
    model.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, BETAS, EPSILON, weight_decay=DECAY, fused=True
    )
    x, y = torch.tensor(batch["x"]), torch.tensor(batch["y"]).long().reshape(-1)

    def forward(x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x).reshape(-1, work.classes), y)

    of: Any = torch.compile(forward) if compiled else forward
    last: list[Any] = [None]

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        value = of(x, y)
        value.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        last[0] = value.detach()

    return Running(run, lambda: None, lambda: float(last[0]))


# --- JAX --------------------------------------------------------------------------------------


def jax_linear(p: Any, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def jax_mlp(activation: str, *widths: int) -> Any:
    import jax

    gelu = functools.partial(jax.nn.gelu, approximate=False)
    act = {"relu": jax.nn.relu, "gelu": gelu}[activation]

    def forward(p: Any, x: Any) -> Any:
        for i in range(len(widths) - 2):
            x = act(jax_linear(p, str(2 * i), x))
        return jax_linear(p, str(2 * (len(widths) - 2)), x)

    return forward


def jax_cnn() -> Any:
    import jax
    import jax.numpy as jnp

    def forward(p: Any, x: Any) -> Any:
        x = x.reshape(x.shape[0], 28, 28, 1)  # one channel: NCHW and NHWC are the same memory
        for name in ("0", "3"):
            x = jax.lax.conv_general_dilated(
                x, p[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + p[f"{name}.bias"])
            by = (1, 2, 2, 1)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, by, by, "VALID")
        x = jax.nn.relu(jax_linear(p, "7", x.reshape(x.shape[0], -1)))
        return jax_linear(p, "9", x)

    return forward


def jax_gpt(vocabulary: int, t: int, d: int, heads: int, layers: int) -> Any:
    import jax

    def norm(p: Any, name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def forward(p: Any, tokens: Any) -> Any:
        x = p["wte.weight"][tokens] + p["wpe.weight"]
        for i in range(layers):
            at = f"blocks.{i}"
            parts = jax.numpy.split(jax_linear(p, f"{at}.qkv", norm(p, f"{at}.ln_1", x)), 3, -1)
            q, k, v = (part.reshape(*tokens.shape, heads, -1) for part in parts)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + jax_linear(p, f"{at}.proj", mixed.reshape(x.shape))
            wide = jax_linear(p, f"{at}.fc", norm(p, f"{at}.ln_2", x))
            x = x + jax_linear(p, f"{at}.out", jax.nn.gelu(wide, approximate=False))
        return norm(p, "ln_f", x) @ p["wte.weight"].T

    return forward


def jax_lstm(vocabulary: int, d: int, layers: int) -> Any:
    import jax
    import jax.numpy as jnp

    def layer(p: Any, at: str, x: Any) -> Any:
        bias = p[f"lstm.bias_ih_{at}"] + p[f"lstm.bias_hh_{at}"]
        projected = x @ p[f"lstm.weight_ih_{at}"] + bias  # of all steps at once

        def body(carry: Any, inputs: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(inputs + h @ p[f"lstm.weight_hh_{at}"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[1], d))
        return jax.lax.scan(body, (zeros, zeros), projected)[1]

    def forward(p: Any, tokens: Any) -> Any:
        x = p["wte.weight"][tokens]
        for i in range(layers):
            x = layer(p, f"l{i}", x)
        return jax_linear(p, "head", x)

    return forward


JAX: dict[str, Callable[..., Any]] = {
    "mlp": functools.partial(jax_mlp, "relu"),
    "mlp_gelu": functools.partial(jax_mlp, "gelu"),
    "cnn": jax_cnn,
    "gpt": jax_gpt,
    "lstm": jax_lstm,
}


def jax_layout(architecture: str, name: str, value: np.ndarray) -> np.ndarray:
    """Weights as JAX's users keep them: (in, out) and HWIO; tables stay as they are."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.ndim != 2 or name in ("wte.weight", "wpe.weight"):
        return value
    if architecture == "cnn" and name == "7.weight":  # its inputs were flattened from CHW
        return value.reshape(128, 64, 7, 7).transpose(2, 3, 1, 0).reshape(3136, 128)
    return value.T


def jax_start(work: Workload, batch: Arrays, values: Arrays) -> Running:
    import jax
    import jax.numpy as jnp

    forward = JAX[work.architecture](*work.sizes)

    def loss(p: Any, x: Any, y: Any) -> Any:
        z = forward(p, x)
        picked = jnp.take_along_axis(z, y[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(z, -1) - picked)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, x: Any, y: Any) -> Any:
        p, m, v, t = state
        value, g = jax.value_and_grad(loss)(p, x, y)
        if work.clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(a * a) for a in jax.tree.leaves(g)))
            factor = jnp.minimum(1.0, work.clip / (norm + 1e-6))
            g = jax.tree.map(lambda a: a * factor, g)
        return (*jax_adamw(p, g, m, v, t + 1), t + 1), value

    p = {n: jnp.array(jax_layout(work.architecture, n, a)) for n, a in values.items()}
    zeros = [jax.tree.map(jnp.zeros_like, p) for _ in range(2)]
    x, y = jnp.array(batch["x"]), jnp.array(batch["y"])
    last: list[Any] = [(p, *zeros, jnp.float32(0)), None]

    def run() -> None:
        last[:] = train(last[0], x, y)

    return Running(run, lambda: jax.block_until_ready(last), lambda: float(last[1]))


def jax_adamw(p: Any, g: Any, m: Any, v: Any, t: Any) -> Any:
    import jax
    import jax.numpy as jnp

    a, b = BETAS
    m = jax.tree.map(lambda m, g: a * m + (1 - a) * g, m, g)
    v = jax.tree.map(lambda v, g: b * v + (1 - b) * g * g, v, g)
    rate, scale = RATE / (1 - a**t), 1 / (1 - b**t)

    def update(p: Any, m: Any, v: Any) -> Any:
        return p * (1 - RATE * DECAY) - rate * m / (jnp.sqrt(v * scale) + EPSILON)

    return jax.tree.map(update, p, m, v), m, v


def contender(name: str, modules: tuple[str, ...], start: Start) -> Contender:
    return Contender(name, modules, functools.partial(prepare, start))


CONTENDERS = {
    "treadle": contender(
        "treadle", ("treadle.backends.cpu.backend", "llvmlite.binding"), treadle_start
    ),
    "eager": contender("eager", ("torch",), functools.partial(torch_start, False)),
    "compile": contender("compile", ("torch",), functools.partial(torch_start, True)),
    "jax": contender("jax", ("jax", "jax.numpy"), jax_start),
}
