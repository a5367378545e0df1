"""Which of a file's initializers are trained: files do not say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from treadle.interop.onnx.reader.program import Body, Step

# Operands that are weights, by operator.
WEIGHTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "CausalConvWithState": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": (0, 1, 2, 3),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
# Operands that are numbers of the operator.
SETTINGS: dict[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1, 2),
    "OneHot": (2,),
    "Pad": (2,),
    "Pow": (1,),
    "QLinearConv": (1, 4, 6),
    "QLinearMatMul": (1, 4, 6),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2),
    "RotaryEmbedding": (1, 2),
    "STFT": (2,),
    "Upsample": (1,),
}
STATISTICS = {"BatchNormalization": (3, 4)}
ARITHMETIC = ("Add", "Sub", "Mul", "Div")
VIEWS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# What exporters call constants that have no name of their own.
NAMELESS = re.compile(r"(val|_val|const|constant|_?lifted_tensor|onnx::|/).*\d")
MASKED = 1e30  # a mask has numbers beyond, or infinities

Use = tuple[Step, int]


def uses_of(body: Body) -> dict[str, list[Use]]:
    """The steps that read each name, and as which operand; views are looked through."""
    direct: dict[str, list[Use]] = {}
    for step in body.steps:
        for place, name in enumerate(step.inputs):
            direct.setdefault(name, []).append((step, place))
        for inner in step.bodies():
            for name, found in uses_of(inner).items():
                direct.setdefault(name, []).extend(found)
    return direct


def _through(name: str, uses: Mapping[str, list[Use]], depth: int = 4) -> Iterator[Use]:
    for step, place in uses.get(name, ()):
        if step.op in VIEWS and place == 0 and depth:
            for output in step.outputs:
                yield from _through(output, uses, depth - 1)
        else:
            yield step, place


def kind_of(name: str, array: np.ndarray, uses: Mapping[str, list[Use]]) -> str:
    """ "parameter", "state" (running statistics) or "constant"."""
    if array.dtype.kind not in "f" and array.dtype.name != "bfloat16":
        return "constant"
    found = [(step.op, place) for step, place in _through(name, uses)]
    if any(place in STATISTICS.get(op, ()) for op, place in found):
        return "state"
    if array.size and _is_mask(array):
        return "constant"
    if any(place in WEIGHTS.get(op, ()) for op, place in found):
        return "parameter" if array.ndim else "constant"
    if not found or all(place in SETTINGS.get(op, ()) for op, place in found):
        return "constant"
    if array.size > 1 and any(op in ARITHMETIC for op, _ in found):
        return "parameter"
    return "parameter" if array.ndim and not NAMELESS.match(name) else "constant"


def _is_mask(array: np.ndarray) -> bool:
    """Whether some numbers are no weights: beyond all of them, infinite or NaN."""
    with np.errstate(all="ignore"):
        low, high = float(array.min()), float(array.max())
    return not (low > -MASKED and high < MASKED)
