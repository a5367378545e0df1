"""JAX on a GPU: one jitted step, its state donated; products in a narrow dtype, the rest wide.

Parameters are float32, cast where they are used; attention is cuDNN's where JAX offers it. Norms
and losses are computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from peers import jax_adamw, jax_layout, jax_mlp

from models import Workload


def gpu_gpt(dtype: Any, vocabulary: int, t: int, d: int, heads: int, layers: int) -> Any:
    import jax
    import jax.numpy as jnp

    def norm(p: Any, name: str, x: Any) -> Any:
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        return (scaled * p[f"{name}.weight"] + p[f"{name}.bias"]).astype(dtype)

    def linear(p: Any, name: str, x: Any) -> Any:
        return x @ p[f"{name}.weight"].astype(dtype) + p[f"{name}.bias"].astype(dtype)

    def forward(p: Any, tokens: Any) -> Any:
        x = p["wte.weight"][tokens] + p["wpe.weight"]
        for i in range(layers):
            at = f"blocks.{i}"
            parts = jnp.split(linear(p, f"{at}.qkv", norm(p, f"{at}.ln_1", x)), 3, -1)
            q, k, v = (part.reshape(*tokens.shape, heads, -1) for part in parts)
            mixed = attend(q, k, v)
            x = x + linear(p, f"{at}.proj", mixed.reshape(x.shape))
            wide = linear(p, f"{at}.fc", norm(p, f"{at}.ln_2", x))
            x = x + linear(p, f"{at}.out", jax.nn.gelu(wide, approximate=False))
        return norm(p, "ln_f", x) @ p["wte.weight"].astype(dtype).T

    return forward


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of (B, T, H, D); keys and values may have fewer heads."""
    import jax
    import jax.numpy as jnp

    how = "cudnn" if q.dtype == jnp.bfloat16 else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)


def gpu_llama(
    dtype: Any, vocabulary: int, d: int, heads: int, groups: int, hidden: int, layers: int
) -> Any:
    import jax
    import jax.numpy as jnp

    size = d // heads

    def norm(p: Any, name: str, x: Any) -> Any:
        x = x.astype(jnp.float32)
        scaled = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return (scaled * p[f"{name}.weight"]).astype(dtype)

    def linear(p: Any, name: str, x: Any) -> Any:
        return x @ p[f"{name}.weight"].astype(dtype)

    def rotated(x: Any) -> Any:
        rate = 100000.0 ** (-jnp.arange(0, size, 2) / size)
        angle = (jnp.arange(x.shape[1])[:, None] * rate)[:, None]
        c, s = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    def forward(p: Any, tokens: Any) -> Any:
        x = p["wte.weight"][tokens]
        for i in range(layers):
            at = f"blocks.{i}"
            cuts = [heads * size, (heads + groups) * size]
            mixed = linear(p, f"{at}.attention.qkv", norm(p, f"{at}.norm_1", x))
            parts = jnp.split(mixed, cuts, -1)
            q, k, v = (part.reshape(*tokens.shape, -1, size) for part in parts)
            mixed = attend(rotated(q), rotated(k), v).reshape(x.shape)
            x = x + linear(p, f"{at}.attention.proj", mixed)
            y = norm(p, f"{at}.norm_2", x)
            gate, up = (linear(p, f"{at}.mlp.{n}_proj", y) for n in ("gate", "up"))
            x = x + linear(p, f"{at}.mlp.down_proj", jax.nn.silu(gate) * up)
        return norm(p, "norm", x) @ p["wte.weight"].astype(dtype).T

    return forward


def _conv(p: Any, name: str, x: Any, dtype: Any, stride: int = 1, padding: int = 0) -> Any:
    import jax

    pads = [(padding, padding)] * 2
    weight = p[f"{name}.weight"].astype(dtype)
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, weight, (stride,) * 2, pads, dimension_numbers=names)


def gpu_cnn(dtype: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def linear(p: Any, name: str, x: Any) -> Any:
        return x @ p[f"{name}.weight"].astype(dtype) + p[f"{name}.bias"].astype(dtype)

    def forward(p: Any, x: Any) -> Any:
        x = x.reshape(x.shape[0], 28, 28, 1).astype(dtype)
        for name in ("0", "3"):
            x = jax.nn.relu(_conv(p, name, x, dtype, 1, 1) + p[f"{name}.bias"].astype(dtype))
            by = (1, 2, 2, 1)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, by, by, "VALID")
        x = jax.nn.relu(linear(p, "7", x.reshape(x.shape[0], -1)))
        return linear(p, "9", x)

    return forward


def gpu_resnet(dtype: Any, classes: int, *counts: int) -> Any:
    """Without running statistics: training does not read them."""
    import jax
    import jax.numpy as jnp

    def norm(p: Any, name: str, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        spread = jnp.square(wide - mean).mean((0, 1, 2))
        scale = jax.lax.rsqrt(spread + 1e-5) * p[f"{name}.weight"]
        return ((wide - mean) * scale + p[f"{name}.bias"]).astype(dtype)

    def block(p: Any, at: str, x: Any, stride: int, has_shortcut: bool) -> Any:
        y = jax.nn.relu(norm(p, f"{at}.bn1", _conv(p, f"{at}.conv1", x, dtype)))
        y = jax.nn.relu(norm(p, f"{at}.bn2", _conv(p, f"{at}.conv2", y, dtype, stride, 1)))
        y = norm(p, f"{at}.bn3", _conv(p, f"{at}.conv3", y, dtype))
        if has_shortcut:
            x = norm(p, f"{at}.downsample.1", _conv(p, f"{at}.downsample.0", x, dtype, stride))
        return jax.nn.relu(y + x)

    def forward(p: Any, x: Any) -> Any:
        x = x.transpose(0, 2, 3, 1).astype(dtype)
        x = jax.nn.relu(norm(p, "bn1", _conv(p, "conv1", x, dtype, 2, 3)))
        pads = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
        for i, count in enumerate(counts):
            for k in range(count):
                x = block(p, f"layers.{i}.{k}", x, 2 if i and not k else 1, not k)
        x = x.astype(jnp.float32).mean((1, 2)).astype(dtype)
        return x @ p["fc.weight"].astype(dtype) + p["fc.bias"].astype(dtype)

    return forward


FORWARD: dict[str, Callable[..., Any]] = {
    "mlp": lambda dtype, *sizes: jax_mlp("relu", *sizes),  # in float32
    "cnn": gpu_cnn,
    "gpt": gpu_gpt,
    "llama": gpu_llama,
    "resnet": gpu_resnet,
}


def jax_step(work: Workload, values: dict[str, Any], is_narrow: bool) -> tuple[Any, Any]:
    """A function that takes a step, and the last state and loss that it gave."""
    import jax
    import jax.numpy as jnp

    dtype = jnp.bfloat16 if is_narrow else jnp.float32
    forward = FORWARD[work.architecture](dtype, *work.sizes)

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        z = forward(p, x).astype(jnp.float32)
        picked = jnp.take_along_axis(z, y[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(z, -1) - picked)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, x: Any, y: Any) -> Any:
        p, m, v, t = state
        value, g = jax.value_and_grad(loss_of)(p, x, y)
        if work.clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(a * a) for a in jax.tree.leaves(g)))
            factor = jnp.minimum(1.0, work.clip / (norm + 1e-6))
            g = jax.tree.map(lambda a: a * factor, g)
        return (*jax_adamw(p, g, m, v, t + 1), t + 1), value

    trained = {n: a for n, a in values.items() if "running_" not in n and "tracked" not in n}
    p = {n: jnp.array(jax_layout(work.architecture, n, a)) for n, a in trained.items()}
    zeros = [jax.tree.map(jnp.zeros_like, p) for _ in range(2)]
    data = work.batch()
    x, y = jnp.array(data["x"]), jnp.array(data["y"])
    last: list[Any] = [(p, *zeros, jnp.float32(0)), None]

    def run() -> None:
        last[:] = train(last[0], x, y)

    return run, last
