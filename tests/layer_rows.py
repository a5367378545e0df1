"""Rows of the table of layers: activations, normalisation, pooling, padding, resizing, dropout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from layer_cases import COUNTERPARTS, Case, Draw, case, floats, integers
from treadle import nn

EDGES = np.array([-1e4, -30.0, -4.0, -0.7, -1e-8, 1e-8, 0.3, 2.9, 30.0, 1e4])


class TorchDropPath(torch.nn.Module):
    """Stochastic depth is not in torch; nothing is dropped in evaluation or for p = 0."""

    def __init__(self, p=0.0):
        super().__init__()

    def forward(self, x):
        return x


class TorchDropBlock(TorchDropPath):
    def __init__(self, p=0.1, block_size=7):
        super().__init__()


class TorchHardsigmoid(torch.nn.Module):
    """torch's own backward has a sixth in 32 bits."""

    def forward(self, x):
        return torch.clamp(x / 6 + 0.5, 0, 1)


COUNTERPARTS |= {
    "Hardsigmoid": TorchHardsigmoid,
    "DropPath": TorchDropPath,
    "DropBlock2d": TorchDropBlock,
}


def activation(
    name: str, *options: dict[str, Any], modes: tuple[bool, ...] = (False,)
) -> list[Case]:
    inputs = (floats(7), floats(2, 3, 4), floats(0, 3), EDGES, floats(17, 5))
    return [case(name, o, x, modes=modes) for o in options or ({},) for x in inputs]


def images(name: str, options: list[Any], dims: int, channels: int = 2, **kw: Any) -> list[Case]:
    """Each set of options on inputs of a number of spatial axes."""
    sizes = (7, 6, 5)[:dims]
    return [case(name, o, floats(2, channels, *sizes), **kw) for o in options]


def for_dims(stem: str, options: Any, channels: int = 2, **kw: Any) -> list[Case]:
    """The layer in one, two and three dimensions; options are a function of how many."""
    return [c for d in (1, 2, 3) for c in images(f"{stem}{d}d", options(d), d, channels, **kw)]


PLAIN = "ReLU6 SELU Mish Hardsigmoid Hardswish LogSigmoid Softsign Tanhshrink".split()

ACTIVATIONS = [
    *(c for name in PLAIN for c in activation(name)),
    *activation("LeakyReLU", {}, {"negative_slope": 0.3}),
    *activation("ELU", {}, {"alpha": 0.5}),
    *activation("CELU", {}, {"alpha": 2.0}),
    *activation("Hardtanh", {}, {"min_val": -0.5, "max_val": 2.0}),
    *activation("Threshold", {"threshold": 0.2, "value": -3.0}),
    *activation("Softplus", {}, {"beta": 2.0, "threshold": 5.0}),
    *activation("Softshrink", {}, {"lambd": 0.2}),
    *activation("Hardshrink", {}, {"lambd": 1.0}),
    *activation("RReLU", {}, {"lower": 0.2, "upper": 0.2}),
    *(case("PReLU", {}, x) for x in (floats(7), floats(2, 3, 4), floats(0, 3))),
    case("PReLU", (3,), floats(2, 3)),
    case("PReLU", (3,), floats(2, 3, 4, 2)),
    *(
        case(name, (axis,), x)
        for name in ("Softmin", "LogSoftmax")
        for axis, x in ((-1, floats(3, 4)), (0, floats(3, 4)), (1, floats(2, 3, 4)))
    ),
    *(case(name, (-1,), floats(17, n)) for name in ("Softmin", "LogSoftmax") for n in (1, 33)),
    case("GLU", (), floats(3, 4)),
    case("GLU", (0,), floats(6, 4)),
    case("GLU", (1,), floats(2, 4, 3)),
    case("GLU", (-2,), floats(2, 8, 3)),
    case("GLU", (), floats(17, 34)),
]

NORMS = [
    case("GroupNorm", (2, 4), floats(3, 4, 5)),
    case("GroupNorm", (1, 3), floats(2, 3, 4, 5)),
    case("GroupNorm", (3, 3, 1e-3), floats(2, 3, 4, 5)),
    case("GroupNorm", (2, 6, 1e-5, False), floats(2, 6, 3)),
    case("GroupNorm", (4, 8), floats(5, 8)),
    case("GroupNorm", (2, 4), floats(1, 4, 2, 3, 2)),
    *for_dims(
        "InstanceNorm",
        lambda d: [
            (3,),
            (3, 1e-2),
            (3, 1e-5, 0.1, True),
            (3, 1e-5, 0.1, True, True),
            (3, 1e-5, 0.7, False, True),
        ],
        channels=3,
    ),
    case("BatchNorm3d", (3,), floats(2, 3, 2, 3, 2)),
    case("BatchNorm3d", (2, 1e-2, 0.5), floats(3, 2, 2, 2, 2)),
    case("BatchNorm3d", (2, 1e-5, None, False), floats(2, 2, 3, 2, 1)),
    case("BatchNorm3d", (2, 1e-5, 0.1, False, False), floats(2, 2, 3, 2, 2)),
    case("BatchNorm3d", {"num_features": 1, "momentum": 1.0}, floats(2, 1, 2, 2, 3)),
    case("LocalResponseNorm", (3,), floats(2, 5, 4)),
    case("LocalResponseNorm", (2, 1e-2), floats(2, 5, 4, 3)),
    case("LocalResponseNorm", (5, 0.1, 0.5, 2.0), floats(1, 3, 4, 2)),
    case("LocalResponseNorm", (1, 1.0), floats(2, 4, 3)),
    case("LocalResponseNorm", (4, 0.3, 1.0, 0.5), floats(2, 7, 3)),
]


def transposed(d: int) -> list[Any]:
    return [
        (2, 3, 3),
        (2, 4, 2, 2, 1),
        (2, 2, 3, 2, 1, 1, 2),
        {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "dilation": 2, "bias": False},
        (2, 2, 2, 3, 0, 2),
        {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "dilation": 3, "output_padding": 2},
        (2, 3, 1),
    ]


CONVOLUTIONS = for_dims("ConvTranspose", transposed)

POOLS = [
    *for_dims("MaxPool", lambda d: [(2,), (3, 2), (3, 1, 1), (2, 1, 0, 2), {"kernel_size": 2, "ceil_mode": True}]),
    *for_dims("MaxPool", lambda d: [{"kernel_size": 2, "return_indices": True}], modes=(False,)),
    *for_dims("MaxPool", lambda d: [{"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}]),
    *for_dims("AvgPool", lambda d: [(2,), (3, 2), (3, 1, 1), {"kernel_size": 2, "ceil_mode": True}]),
    *for_dims("AvgPool", lambda d: [{"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}]),
    *for_dims(
        "AvgPool",
        lambda d: [{"kernel_size": 3, "padding": 1, "count_include_pad": False, "ceil_mode": True}],
    ),
    *(
        case(name, {"kernel_size": 2, "divisor_override": 3}, floats(2, 2, *sizes))
        for name, sizes in (("AvgPool2d", (5, 4)), ("AvgPool3d", (4, 3, 2)))
    ),
    *for_dims("LPPool", lambda d: [(2, 2), (2.0, 3, 2), (4, 2, 1), (1, 2), (2, 1)]),
    *for_dims("AdaptiveAvgPool", lambda d: [(1,), (2,), (3,), ((None,) * d if d > 1 else 7,), (5,)]),
    *for_dims("AdaptiveMaxPool", lambda d: [(1,), (2,), (3,), ((None,) * d if d > 1 else 7,), (5,)]),
]  # fmt: skip


def unpool(d: int) -> list[Case]:
    """Values at distinct places, as a pool without overlap gives them."""
    rng = np.random.default_rng(d)
    found = []
    for kernel, sizes in (
        (2, (3, 2, 2)),
        (3, (2, 2, 1)),
        (1, (4, 3, 2)),
        (2, (1, 1, 1)),
        (4, (2, 1, 1)),
    ):
        shape = (2, 2, *sizes[:d])
        length = int(np.prod([n * kernel for n in sizes[:d]]))
        count = int(np.prod(sizes[:d]))
        index = np.stack([rng.permutation(length)[:count] for _ in range(4)]).reshape(shape)
        found.append(case(f"MaxUnpool{d}d", (kernel,), floats(*shape), index))
    return found


def pads(d: int) -> list[Any]:
    return [
        (1,),
        (2,),
        ((1, 2) * d,),
        (tuple(range(2 * d))[-2:] * d if d == 1 else (0, 1) * d,),
        (0,),
    ]


PADS = [
    *(c for stem in ("ZeroPad", "ReplicationPad", "CircularPad") for c in for_dims(stem, pads)),
    *for_dims("ReflectionPad", lambda d: [(1,), (2,), ((1, 2) * d,), ((0, 3) * d,), (0,)]),
    *for_dims(
        "ConstantPad", lambda d: [(1, 0.5), (2, -3.0), ((1, 2) * d, 7.0), ((-1, 2) * d, 1.0), (0, 2.0)]
    ),
]  # fmt: skip

RESIZING = [
    case("Upsample", {"scale_factor": 2}, floats(2, 3, 4)),
    case("Upsample", {"size": (7, 5)}, floats(2, 3, 4, 4)),
    case("Upsample", {"scale_factor": 1.7}, floats(1, 2, 4, 5)),
    case("Upsample", {"size": 3, "mode": "nearest-exact"}, floats(1, 2, 8)),
    case("Upsample", {"scale_factor": (0.5, 2.5), "mode": "nearest-exact"}, floats(1, 2, 6, 5)),
    case("Upsample", {"scale_factor": 2, "mode": "linear"}, floats(2, 3, 5)),
    case("Upsample", {"size": 9, "mode": "linear", "align_corners": True}, floats(2, 3, 5)),
    case("Upsample", {"scale_factor": 2, "mode": "bilinear"}, floats(2, 3, 4, 5)),
    case("Upsample", {"size": (3, 9), "mode": "bilinear"}, floats(2, 3, 4, 5)),
    case("Upsample", {"scale_factor": 1.6, "mode": "bilinear"}, floats(1, 2, 5, 7)),
    case("Upsample", {"scale_factor": 1.6, "mode": "bilinear", "recompute_scale_factor": True}, floats(1, 2, 5, 7)),
    case("Upsample", {"size": (9, 1), "mode": "bilinear", "align_corners": True}, floats(1, 2, 5, 7)),
    case("Upsample", {"scale_factor": 2, "mode": "bicubic"}, floats(2, 2, 4, 5)),
    case("Upsample", {"size": (7, 3), "mode": "bicubic", "align_corners": True}, floats(1, 2, 5, 6)),
    case("Upsample", {"scale_factor": 2, "mode": "trilinear"}, floats(1, 2, 3, 2, 4)),
    case("Upsample", {"scale_factor": (3, 2), "mode": "bilinear"}, floats(1, 2, 5, 17)),
    case("Upsample", {"size": (20, 6), "mode": "nearest-exact"}, floats(1, 2, 5, 6)),
    case("Upsample", {"scale_factor": (1, 4), "mode": "bicubic"}, floats(1, 2, 3, 4)),
    *(
        case(name, options, floats(2, 2, 4, 3))
        for name in ("UpsamplingNearest2d", "UpsamplingBilinear2d")
        for options in ((8,), ((5, 7),), {"scale_factor": 2}, {"scale_factor": 3}, ((2, 3),))
    ),
    case("PixelShuffle", (2,), floats(2, 8, 3, 4)),
    case("PixelShuffle", (3,), floats(1, 9, 2, 2)),
    case("PixelShuffle", (1,), floats(2, 3, 4, 4)),
    case("PixelShuffle", (2,), floats(4, 3, 5)),
    case("PixelShuffle", (2,), floats(2, 3, 4, 3, 2)),
    case("PixelUnshuffle", (2,), floats(2, 2, 6, 4)),
    case("PixelUnshuffle", (3,), floats(1, 1, 6, 9)),
    case("PixelUnshuffle", (1,), floats(2, 3, 4, 4)),
    case("PixelUnshuffle", (2,), floats(3, 4, 2)),
    case("PixelUnshuffle", (2,), floats(2, 3, 1, 4, 2)),
    case("ChannelShuffle", (2,), floats(2, 6, 3, 4)),
    case("ChannelShuffle", (3,), floats(1, 6, 2, 2)),
    case("ChannelShuffle", (1,), floats(2, 3, 4, 4)),
    case("ChannelShuffle", (4,), floats(2, 4, 5)),
    case("ChannelShuffle", (2,), floats(2, 4, 3, 1, 2)),
    case("Unfold", (2,), floats(2, 3, 4, 5)),
    case("Unfold", (3, 1, 1), floats(2, 2, 4, 4)),
    case("Unfold", ((2, 3), 1, (1, 0), (2, 1)), floats(1, 2, 5, 6)),
    case("Unfold", (2, 2), floats(1, 2, 5, 5)),
    case("Unfold", (1,), floats(1, 3, 2, 2)),
    case("Fold", ((4, 5), 2), floats(2, 12, 12)),
    case("Fold", ((4, 4), 3, 1, 1), floats(1, 18, 16)),
    case("Fold", ((5, 6), (2, 3), 1, (1, 0), (2, 1)), floats(1, 12, 12)),
    case("Fold", ((5, 5), 2, 2), floats(1, 8, 9)),
    case("Fold", ((2, 2), 1), floats(1, 3, 4)),
]  # fmt: skip


def dropout(name: str, x: Draw) -> list[Case]:
    """Random draws differ: what is dropped for sure, and evaluation, are compared."""
    return [
        case(name, (0.5,), x, modes=(False,)),
        case(name, (), x, modes=(False,)),
        case(name, (0.0,), x),
        case(name, (0.9,), x, modes=(False,)),
        *([] if name in ("DropPath", "DropBlock2d") else [case(name, (1.0,), x)]),
        *([case(name, (0.3,), x, modes=(False,))] if name in ("DropPath", "DropBlock2d") else []),
    ]


OTHERS = [
    *dropout("Dropout1d", floats(2, 3, 4)),
    *dropout("Dropout2d", floats(2, 3, 4, 2)),
    *dropout("Dropout3d", floats(2, 3, 4, 2, 2)),
    *dropout("AlphaDropout", floats(3, 4)),
    *dropout("FeatureAlphaDropout", floats(2, 3, 4)),
    *dropout("DropPath", floats(3, 4)),
    *dropout("DropBlock2d", floats(2, 3, 8, 9)),
    case("Unflatten", (1, (2, 3)), floats(2, 6)),
    case("Unflatten", (0, (2, -1)), floats(6, 3)),
    case("Unflatten", (-1, (3, 1, 2)), floats(2, 4, 6)),
    case("Unflatten", {"dim": 1, "unflattened_size": (4,)}, floats(2, 4, 3)),
    case("Unflatten", (-2, (1, 4)), floats(2, 4, 3)),
    case("Bilinear", (2, 3, 4), floats(5, 2), floats(5, 3)),
    case("Bilinear", (3, 1, 2, False), floats(2, 4, 3), floats(2, 4, 1)),
    case("Bilinear", (2, 2, 1), floats(2), floats(2)),
    case("Bilinear", (5, 4, 3), floats(17, 5), floats(17, 4)),
    case("Bilinear", {"in1_features": 1, "in2_features": 6, "out_features": 2}, floats(3, 1), floats(3, 6)),
    *(
        case("EmbeddingBag", {"num_embeddings": 7, "embedding_dim": 3, "mode": mode}, integers(7, 4, 5))
        for mode in ("sum", "mean", "max")
    ),
    case("EmbeddingBag", {"num_embeddings": 5, "embedding_dim": 2, "padding_idx": 1}, np.array([[1, 0, 1], [4, 2, 3]])),
    case("EmbeddingBag", {"num_embeddings": 5, "embedding_dim": 2, "mode": "sum", "padding_idx": 0}, np.array([[1, 0, 1], [4, 2, 3]])),
]  # fmt: skip


def rnn_rows(name: str) -> list[Case]:
    return [
        case(name, (3, 4), floats(5, 2, 3)),
        case(name, (3, 4, 2), floats(5, 2, 3), floats(2, 2, 4)),
        case(name, {"input_size": 2, "hidden_size": 3, "nonlinearity": "relu"}, floats(3, 2, 2)),
        case(name, {"input_size": 2, "hidden_size": 3, "bias": False, "batch_first": True}, floats(2, 4, 2)),
        case(name, {"input_size": 3, "hidden_size": 2, "bidirectional": True, "num_layers": 2}, floats(4, 17, 3)),
    ]  # fmt: skip


def cell_rows(name: str, states: int) -> list[Case]:
    def state(*shape: int) -> Any:
        return (floats(*shape), floats(*shape)) if states == 2 else floats(*shape)

    return [
        case(name, (3, 4), floats(5, 3)),
        case(name, (3, 4), floats(5, 3), state(5, 4)),
        case(name, (2, 3, False), floats(17, 2), state(17, 3)),
        case(name, (2, 3), floats(2), state(3)),
        case(name, {"input_size": 1, "hidden_size": 1}, floats(2, 1), state(2, 1)),
    ]


HIDDEN = np.array([[False, False, True, False, True], [False, True, True, True, False]])
LATER = np.triu(np.ones((5, 5), bool), 1)
BATCH_FIRST = {"embed_dim": 6, "num_heads": 2, "batch_first": True}
ENCODER = {"d_model": 6, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0}


class TorchEncoder(torch.nn.TransformerEncoder):
    """Ours takes a function that makes a layer, and gives each its own values."""

    def __init__(self, make, num_layers):
        super().__init__(make(torch.nn), num_layers, enable_nested_tensor=False)


class TorchDecoder(torch.nn.TransformerDecoder):
    def __init__(self, make, num_layers):
        super().__init__(make(torch.nn), num_layers)


def stack_rows(name: str, theirs: Any, layer: str, *inputs: Any) -> list[Case]:
    found = []
    for count, options in (
        (1, {}),
        (2, {}),
        (3, {"norm_first": True}),
        (2, {"activation": "gelu"}),
        (1, {"bias": False}),
    ):
        make = lambda m, o=options: getattr(m, layer)(**ENCODER, **o)  # noqa: E731
        ours = lambda n=count, f=make: getattr(nn, name)(lambda: f(nn), n)  # noqa: E731
        torchs = lambda n=count, f=make: theirs(f, n)  # noqa: E731
        found.append(Case(name, ours, torchs, inputs, {}, (False, True)))
    return found


SEQUENCES = [
    *rnn_rows("RNN"),
    *cell_rows("LSTMCell", 2), *cell_rows("GRUCell", 1), *cell_rows("RNNCell", 1),
    case("MultiheadAttention", (4, 2), floats(5, 2, 4), floats(3, 2, 4), floats(3, 2, 4)),
    case("MultiheadAttention", {"embed_dim": 6, "num_heads": 3, "bias": False}, floats(4, 1, 6), floats(4, 1, 6), floats(4, 1, 6), need_weights=False),
    case("MultiheadAttention", BATCH_FIRST, *[floats(2, 5, 6)] * 3, key_padding_mask=HIDDEN),
    case("MultiheadAttention", BATCH_FIRST, *[floats(2, 5, 6)] * 3, attn_mask=LATER, average_attn_weights=False),
    case("MultiheadAttention", BATCH_FIRST, *[floats(2, 5, 6)] * 3, attn_mask=np.where(LATER, -np.inf, 0.3), need_weights=False),
    case("MultiheadAttention", BATCH_FIRST, *[floats(2, 5, 6)] * 3, attn_mask=LATER, key_padding_mask=HIDDEN[::-1] & (np.arange(5) > 0), need_weights=False),
    case("MultiheadAttention", {**BATCH_FIRST, "kdim": 3, "vdim": 4}, floats(2, 5, 6), floats(2, 7, 3), floats(2, 7, 4)),
    case("TransformerEncoderLayer", ENCODER, floats(5, 2, 6)),
    case("TransformerEncoderLayer", {**ENCODER, "activation": "gelu", "norm_first": True}, floats(5, 2, 6)),
    case("TransformerEncoderLayer", {**ENCODER, "batch_first": True}, floats(2, 5, 6), src_key_padding_mask=HIDDEN),
    case("TransformerEncoderLayer", {**ENCODER, "batch_first": True, "layer_norm_eps": 1e-2}, floats(2, 5, 6), src_mask=LATER),
    case("TransformerEncoderLayer", {**ENCODER, "bias": False}, floats(17, 1, 6)),
    case("TransformerDecoderLayer", ENCODER, floats(5, 2, 6), floats(3, 2, 6)),
    case("TransformerDecoderLayer", {**ENCODER, "activation": "gelu", "norm_first": True}, floats(5, 2, 6), floats(3, 2, 6)),
    case("TransformerDecoderLayer", {**ENCODER, "batch_first": True}, floats(2, 4, 6), floats(2, 5, 6), memory_key_padding_mask=HIDDEN),
    case("TransformerDecoderLayer", {**ENCODER, "batch_first": True}, floats(2, 5, 6), floats(2, 3, 6), tgt_mask=LATER),
    case("TransformerDecoderLayer", {**ENCODER, "bias": False}, floats(4, 1, 6), floats(17, 1, 6)),
    *stack_rows("TransformerEncoder", TorchEncoder, "TransformerEncoderLayer", floats(5, 2, 6)),
    *stack_rows("TransformerDecoder", TorchDecoder, "TransformerDecoderLayer", floats(5, 2, 6), floats(3, 2, 6)),
]  # fmt: skip

UNPOOLS = [c for d in (1, 2, 3) for c in unpool(d)]
ROWS = [
    *ACTIVATIONS,
    *NORMS,
    *CONVOLUTIONS,
    *POOLS,
    *UNPOOLS,
    *PADS,
    *RESIZING,
    *OTHERS,
    *SEQUENCES,
]
