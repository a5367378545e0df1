"""Arguments of PyTorch's layers that Treadle's do not have: accepted where they change nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from treadle.base.dtypes import float32
from treadle.base.errors import ArgumentError

_RECURRENT = ("LSTM", "GRU", "RNN")
_TABLES = ("Embedding", "EmbeddingBag")
_DEVICE = "Devices are chosen when a program is compiled: device= of td.compile_step."
_DTYPE = "Parameters are float32; precision= of td.compile_step computes in narrower floats."

# By name: the classes that have it (none: all), the values that change nothing, and what to do
# instead of others.
ACCEPTED: dict[str, tuple[tuple[str, ...], tuple[object, ...], str]] = {
    "device": ((), (None,), _DEVICE),
    "dtype": ((), (None, float32), _DTYPE),
    "proj_size": (_RECURRENT, (0,), "Apply nn.Linear to the output."),
    "add_bias_kv": (("MultiheadAttention",), (False,), "Append rows to the keys and values."),
    "add_zero_attn": (("MultiheadAttention",), (False,), "Append zeros to the keys and values."),
    "max_norm": (_TABLES, (None,), "Scale the rows that are read."),
    "norm_type": (_TABLES, (2, 2.0), "It is the norm of max_norm, which is not there."),
    "scale_grad_by_freq": (_TABLES, (False,), "Divide by td.bincount of the indices."),
    "sparse": (_TABLES, (False,), "Gradients of tables are dense."),
    "include_last_offset": (("EmbeddingBag",), (False,), "Bags are rows of (N, L)."),
    "enable_nested_tensor": (("TransformerEncoder",), (False, True), ""),
    "mask_check": (("TransformerEncoder",), (False, True), ""),
}


def takes_pytorchs(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that accepts arguments of PyTorch's layer with values that change nothing."""
    own = inspect.signature(init).parameters

    @functools.wraps(init)
    def call(self: Any, *arguments: Any, **keywords: Any) -> None:
        name = type(self).__name__
        for given in keywords.keys() & ACCEPTED.keys() - own.keys():
            classes, values, remedy = ACCEPTED[given]
            if classes and not any(c.__name__ in classes for c in type(self).__mro__):
                continue
            value = keywords.pop(given)
            if not any(value is v or (type(value) is type(v) and value == v) for v in values):
                raise ArgumentError(name, f"it has no argument {given}= but {values[0]}", remedy)
        init(self, *arguments, **keywords)

    return call
