"""Layers of `td.nn`. The sizes that their constructors need are attributes."""

from __future__ import annotations

from collections.abc import Callable

from treadle.fuzz.catalogue.rules import proposal
from treadle.fuzz.chooser import SIZES, SMALL, Chooser, Proposal
from treadle.fuzz.forms import Rule, layer

MOST_WIDTH = 300


def _width(low: int, high: int = 4) -> Callable[[Chooser], str]:
    """A value whose last axis is not too long for a weight."""
    return lambda choose: choose.value(low, high, lambda array: array.shape[-1] <= MOST_WIDTH)


def _sized(low: int, high: int = 4) -> Rule:
    """The width of a value as `width`, and another as `out`."""

    def rule(choose: Chooser) -> Proposal:
        x = _width(low, high)(choose)
        return proposal(x, width=choose.shape(x)[-1], out=choose.pick(SIZES))

    return rule


layer("Linear", _sized(1, 3), "nn.Linear({width}, {out})")
layer("Linear_without_bias", _sized(1, 3), "nn.Linear({width}, {out}, bias=False)")
layer("LayerNorm", _sized(1), "nn.LayerNorm({width}, eps=1e-2)")
layer("RMSNorm", _sized(1), "nn.RMSNorm({width}, eps=1e-2)")
layer("SwiGLU", _sized(1, 3), "nn.SwiGLU({width}, {out})")
for _name in ("ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "Softmax", "Dropout", "Identity"):
    layer(_name, _sized(1), f"nn.{_name}()")


def _channels(low: int, high: int) -> Rule:
    def rule(choose: Chooser) -> Proposal | None:
        x = choose.value(low, high, lambda array: array.shape[1] <= MOST_WIDTH)
        shape = choose.shape(x)
        # A variance of few elements says nothing about rounding.
        return None if choose.known[x].size < 4 * shape[1] else proposal(x, channels=shape[1])

    return rule


layer("BatchNorm1d", _channels(2, 3), "nn.BatchNorm1d({channels}, eps=1e-2)")
layer("BatchNorm2d", _channels(4, 4), "nn.BatchNorm2d({channels}, eps=1e-2)")
layer("GroupNorm", _channels(2, 4), "nn.GroupNorm(1, {channels}, eps=1e-2)")
layer("InstanceNorm2d", _channels(4, 4), "nn.InstanceNorm2d({channels}, eps=1e-1, affine=True)")


def _image(rank: int) -> Rule:
    def rule(choose: Chooser) -> Proposal | None:
        x = choose.value(rank, rank)
        _, channels, *extents = choose.shape(x)
        kernel, padding = choose.whole(1, 3), choose.whole(0, 1)
        if channels > 33 or min(extents) + 2 * padding < kernel:
            return None
        return proposal(
            x,
            channels=channels,
            out=choose.pick((1, 2, 3, 5, 8, 16)),
            kernel=kernel,
            stride=choose.whole(1, 2),
            padding=padding,
        )

    return rule


_CONV = "({channels}, {out}, {kernel}, {stride}, {padding})"
layer("Conv1d", _image(3), f"nn.Conv1d{_CONV}")
layer("Conv2d", _image(4), f"nn.Conv2d{_CONV}")


def _pooled(choose: Chooser) -> Proposal | None:
    x = choose.value(4, 4)
    kernel = choose.whole(1, 3)
    return None if min(choose.shape(x)[2:]) < kernel else proposal(x, kernel=kernel)


layer("MaxPool2d", _pooled, "nn.MaxPool2d({kernel})")
layer("AvgPool2d", _pooled, "nn.AvgPool2d({kernel})")
layer("Flatten", lambda choose: proposal(choose.value(2, 4)), "nn.Flatten()")


def _tokens(choose: Chooser) -> Proposal:
    rows = choose.pick(SIZES)
    shape = (choose.pick(SMALL), choose.pick(SMALL)) if choose.flag() else (choose.size(),)
    return proposal(choose.integers(shape, rows), rows=rows, width=choose.pick(SMALL))


layer("Embedding", _tokens, "nn.Embedding({rows}, {width})")


def _sequence(choose: Chooser) -> Proposal | None:
    x = choose.value(3, 3, lambda array: array.shape[-1] <= 65 and array.size <= 10_000)
    shape = choose.shape(x)
    if max(shape[:2]) > 33:
        return None
    return proposal(x, width=shape[-1], hidden=choose.pick((1, 3, 4, 5, 8, 16, 17)))


_RECURRENT = "({width}, {hidden}, batch_first=True)"
layer("LSTM", _sequence, f"nn.LSTM{_RECURRENT}", "{layer}({0})[0]")
layer("GRU", _sequence, f"nn.GRU{_RECURRENT}", "{layer}({0})[0]")


def _heads(choose: Chooser) -> Proposal | None:
    found = _sequence(choose)
    if found is None:
        return None
    width = choose.shape(found.operands[0])[-1]
    heads = choose.pick([n for n in (1, 2, 3, 4) if width % n == 0])
    return proposal(*found.operands, width=width, heads=heads, causal=choose.flag())


layer(
    "MultiHeadAttention",
    _heads,
    "nn.MultiHeadAttention({width}, {heads}, batch_first=True)",
    "{layer}({0}, causal={causal})",
)
