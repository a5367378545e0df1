"""Small models as plain functions of explicit parameters, for snapshots, precision and benchmarks."""

from __future__ import annotations

import treadle as td
from treadle.frontend.functions.activations import cross_entropy_rows

Spec = td.Spec


def linear_specs(outputs: int, inputs: int) -> dict[str, td.Spec]:
    return {"weight": Spec((outputs, inputs)), "bias": Spec((outputs,))}


def mlp_loss(params, x, y):
    h = td.relu(td.linear(x, params["fc1"]["weight"], params["fc1"]["bias"]))
    logits = td.linear(h, params["fc2"]["weight"], params["fc2"]["bias"])
    return cross_entropy_rows(logits, y).mean()


def mlp_specs(batch: int = 8, inputs: int = 6, hidden: int = 5, classes: int = 3):
    params = {"fc1": linear_specs(hidden, inputs), "fc2": linear_specs(classes, hidden)}
    return params, Spec((batch, inputs)), Spec((batch,), td.int32)


def cnn_loss(params, x, y):
    h = td.relu(td.conv(x, params["conv"]["weight"], params["conv"]["bias"], padding=1))
    h = td.max_pool(h, 2)
    logits = td.linear(td.flatten(h, 1), params["fc"]["weight"], params["fc"]["bias"])
    return cross_entropy_rows(logits, y).mean()


def cnn_specs(batch: int = 2, size: int = 6, channels: int = 3, classes: int = 4):
    conv = {"weight": Spec((channels, 1, 3, 3)), "bias": Spec((channels,))}
    params = {"conv": conv, "fc": linear_specs(classes, channels * (size // 2) ** 2)}
    return params, Spec((batch, 1, size, size)), Spec((batch,), td.int32)


def layer_norm(x, p):
    return td.layer_norm(x, p["weight"], p["bias"])


def linear(x, p):
    return td.linear(x, p["weight"], p["bias"])


def gpt_block(x, p, heads: int):
    b, t, d = x.shape
    qkv = linear(layer_norm(x, p["ln_1"]), p["qkv"])  # (B, T, 3D)
    q, k, v = (
        part.reshape(b, t, heads, d // heads).permute(0, 2, 1, 3) for part in td.chunk(qkv, 3, -1)
    )
    mixed = td.attention(q, k, v, causal=True).permute(0, 2, 1, 3).reshape(b, t, d)
    x = x + linear(mixed, p["proj"])
    hidden = td.gelu(linear(layer_norm(x, p["ln_2"]), p["fc"]), approximate="tanh")
    return x + linear(hidden, p["out"])


def gpt_loss(params, tokens, targets, heads: int):
    x = td.embedding(tokens, params["wte"]) + params["wpe"]
    for block in params["blocks"]:
        x = gpt_block(x, block, heads)
    logits = td.linear(layer_norm(x, params["ln_f"]), params["wte"])
    return cross_entropy_rows(logits, targets).mean()


def norm_specs(d: int) -> dict[str, td.Spec]:
    return {"weight": Spec((d,)), "bias": Spec((d,))}


def block_specs(d: int):
    return {
        "ln_1": norm_specs(d),
        "qkv": linear_specs(3 * d, d),
        "proj": linear_specs(d, d),
        "ln_2": norm_specs(d),
        "fc": linear_specs(4 * d, d),
        "out": linear_specs(d, 4 * d),
    }


def gpt_specs(layers: int, d: int, t: int, batch: int, vocabulary: int):
    params = {
        "wte": Spec((vocabulary, d)),
        "wpe": Spec((t, d)),
        "blocks": [block_specs(d) for _ in range(layers)],
        "ln_f": norm_specs(d),
    }
    return params, Spec((batch, t), td.int32), Spec((batch, t), td.int32)
