"""Elementwise functions, alone and of two values that broadcast."""

from __future__ import annotations

from treadle.fuzz.catalogue.rules import one, pair, positive
from treadle.fuzz.forms import family

family(
    "unary",
    one,
    {
        "neg": "-{0}",
        "half": "{0} * 0.5",
        "abs": "td.abs({0})",
        "sign": "td.sign({0}) * {0}",
        "floor": "{0} - td.floor({0})",
        "ceil": "td.ceil({0}) * {0}",
        "round": "td.round({0} * 1.7)",
        "exp": "td.exp({0})",
        "square": "td.square({0})",
        "cube": "{0} ** 3",
        "sin": "td.sin({0})",
        "cos": "td.cos({0})",
        "tanh": "td.tanh({0})",
        "erf": "td.erf({0})",
        "relu": "td.relu({0})",
        "leaky_relu": "td.leaky_relu({0}, 0.2)",
        "elu": "td.elu({0})",
        "sigmoid": "td.sigmoid({0})",
        "silu": "td.silu({0})",
        "gelu": "td.gelu({0})",
        "gelu_tanh": 'td.gelu({0}, "tanh")',
        "softplus": "td.softplus({0})",
        "clamp": "td.clamp({0}, -0.5, 0.8)",
        "log_guarded": "td.log(td.abs({0}) + 0.1)",
        "sqrt_guarded": "td.sqrt(1 + {0} * {0})",
        "rsqrt_guarded": "{0} * td.rsqrt({0} * {0} + 0.5)",
        "reciprocal_guarded": "td.reciprocal(1 + {0} * {0})",
        "remainder": "td.remainder({0}, 1.7)",
        "floor_divide": "td.floor_divide({0}, 0.7) * {0}",
        "where": "td.where({0} > 0, {0}, {0} * {0})",
        "isfinite": "td.where(td.isfinite({0}), {0}, 0)",
        "through_float64": "td.cast(td.cast({0}, td.float64) * 3, {0}.dtype)",
        "through_float16": "td.cast(td.cast(td.tanh({0}), td.float16) * 2, {0}.dtype)",
        "through_bfloat16": "td.cast(td.cast({0} * 1.5, td.bfloat16) + 0.25, {0}.dtype)",
        "through_int32": "td.cast(td.cast({0} * 3, td.int32), {0}.dtype) * {0}",
        "through_int8": "td.cast(td.cast(td.clamp({0} * 3, -99, 99), td.int8), {0}.dtype) * {0}",
        "integers": "td.bitwise_xor(td.cast({0} * 3, td.int32), 3) // 2 % 5",
        "bits": "td.bitwise_and(td.cast({0} * 9, td.int32), 6) | 1",
        "stop_gradient": "td.stop_gradient({0}) * {0}",
        "checkpoint": "td.checkpoint(lambda a: td.tanh(a * a) + a)({0})",
        "iota": "{0} + td.iota({0}.shape, dtype=td.float32) * 0.1",
    },
)

family(
    "positive",
    positive,
    {
        "log": "td.log({0})",
        "log1p": "td.log1p({0})",
        "log2": "td.log2({0})",
        "sqrt": "td.sqrt({0})",
        "rsqrt": "td.rsqrt({0})",
        "reciprocal": "td.reciprocal({0})",
        "pow": "td.pow({0}, 0.7)",
    },
)

family(
    "pair",
    pair,
    {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "mul": "{0} * {1}",
        "div": "{0} / (1 + {1} * {1})",
        "maximum": "td.maximum({0}, {1})",
        "minimum": "td.minimum({0}, {1})",
        "pow": "td.pow(1.5 + td.tanh({0}), td.tanh({1}))",
        "atan2": "td.atan2({0}, 1.5 + td.tanh({1}))",
        "floor_divide": "td.floor_divide({0}, 0.7 + {1} * {1}) * {1}",
        "remainder": "td.remainder({0}, 1.3 + {1} * {1})",
        "where": "td.where({0} > {1}, {0}, {1} * 2)",
        "and": "td.where(td.logical_and({0} <= {1}, {0} > -1), {0} * {1}, {0} - {1})",
        "or": "td.where(td.logical_or(td.eq({0}, {1}), td.logical_not({0} < 0)), {0}, -{1})",
        "xor": "td.where(td.logical_xor({0} > 0, {1} > 0), {0}, {1})",
        "gate": "td.tanh({0}) * td.sigmoid({1})",
        "gaussian": "td.exp(-({0} - {1}) * ({0} - {1}))",
        "checkpoint": "td.checkpoint(lambda a, b: td.tanh(a * b) + a)({0}, {1})",
    },
)
