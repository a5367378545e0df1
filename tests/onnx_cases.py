"""The cases that come with `onnx` for each of its operators, run through `load`.

Each case has one outcome: its values agree, it is refused by name for one of the reasons in
`REFUSED`, or it is listed in `DIFFERENT` with the reason. Anything else is an error.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx.backend.test.case import node as cases_of_onnx

import treadle as td
from treadle.base import dtypes, trees
from treadle.interop.onnx import load

PASSED = "passed"
OTHER_VALUES = "strings, sequences or optional values"
OTHER_TYPES = "an element type that Treadle does not have"
# Why a case is refused: what its error says.
REFUSED = {
    "element type": OTHER_TYPES,
    "are not imported": "an operator that is not imported",
    "other definitions": "an older definition of an operator",
    "versions of ONNX": "operators of other domains alone",
    "the mask of a dropout": "the mask of a dropout in training",
    "are read": "an option of an operator",
}
# Cases whose values differ, or that give no value to compare, on some devices.
DIFFERENT = {
    r"training_dropout(_default)?$": (("oracle", "cpu"), "random numbers of another generator"),
    r"dynamicquantizelinear(_expanded)?$": (
        ("oracle",),
        "a quotient is a half in float32, and below it in the oracle's float64",
    ),
}
SAMPLE = (
    "batch_normalization bitshift causal_conv_with_state conv cumsum deformconv dft einsum "
    "gathernd gemm gru linear_attention lstm nonzero pad qlinearmatmul scatternd slice split topk "
    "where"
).split()


@cache
def every_case() -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(cases_of_onnx.collect_testcases(None))


@cache
def some_cases() -> tuple[Any, ...]:
    """Those of a few operators: importing the module of an operator makes its cases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SAMPLE:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    wanted = {name.replace("_", "") for name in SAMPLE}
    made = [c for c in cases_of_onnx._NodeTestCases if not c.name.endswith("_expanded")]
    return tuple(c for c in made if c.model.graph.node[0].op_type.lower() in wanted)


def _has_other_values(case: Any) -> bool:
    """Whether a case takes or gives something that is no tensor of numbers."""
    for info in (*case.model.graph.input, *case.model.graph.output):
        kind = info.type.WhichOneof("value")
        if kind != "tensor_type" or info.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            return True
    return False


def _array(value: Any) -> np.ndarray:
    """A value as an array."""
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    return np.asarray(value)


def outcome(case: Any, device: str = "oracle") -> str:
    """`PASSED`, or why a case does not; a wrong value or an error without a reason is raised."""
    if _has_other_values(case):
        return OTHER_VALUES
    for pattern, (devices, reason) in DIFFERENT.items():
        if device in devices and re.match(f"test_{pattern}", case.name):
            return reason
    try:
        module = load(case.model.SerializeToString(), trainable=lambda name, array: False)
        for inputs, outputs in case.data_sets:
            given, expected = [list(map(_array, values)) for values in (inputs, outputs)]
            found = _run(case.model, module, given, device)
            for ours, theirs in zip(found, expected, strict=True):
                _compare(case, ours, theirs)
    except td.LoadError as error:
        for part, reason in REFUSED.items():
            if part in str(error):
                return reason
        raise
    return PASSED


def _run(model: onnx.ModelProto, module: Any, inputs: list[Any], device: str) -> list[np.ndarray]:
    """Inputs as data; as constants where the operator needs to know them while tracing."""
    specs = [td.Spec(x.shape, x.dtype) for x in inputs]
    try:
        program = td.compile(lambda *values: module(*values), *specs, device=device)
        return trees.flatten(program(*inputs))[0]
    except td.LoadError as error:
        if "must be constants" not in str(error) and "must be known" not in str(error):
            raise
    known = onnx.ModelProto.FromString(model.SerializeToString())
    names = [i.name for i in known.graph.input]
    known.graph.initializer.extend(map(onnx.numpy_helper.from_array, inputs, names))
    del known.graph.input[:]
    constant = load(known.SerializeToString(), trainable=lambda name, array: False)
    return trees.flatten(td.compile(lambda: constant(), device=device)())[0]


def _compare(case: Any, found: np.ndarray, wanted: np.ndarray) -> None:
    is_same = found.dtype == wanted.dtype or _is_of_oracle(found, wanted)
    assert is_same, f"{case.name}: {found.dtype} for {wanted.dtype}"
    assert found.shape == wanted.shape, case.name
    is_narrow = wanted.dtype in (np.float16, ml_dtypes.bfloat16)
    bound = {"rtol": 2e-2, "atol": 1e-2} if is_narrow else {"rtol": case.rtol, "atol": 1e-5}
    ours, theirs = (x.astype(np.float64) for x in (found, wanted))
    np.testing.assert_allclose(ours, theirs, err_msg=case.name, **bound)


def _is_of_oracle(found: np.ndarray, wanted: np.ndarray) -> bool:
    """The oracle computes with float64 in place of all floats."""
    dtype = dtypes.from_numpy(wanted.dtype)
    return found.dtype == np.float64 and dtype is not None and dtype.is_float


def counted(cases: Iterable[Any], device: str = "oracle") -> Iterator[tuple[str, str]]:
    """The operator that each case is of, and what became of it."""
    for case in cases:
        yield case.model.graph.node[0].op_type, outcome(case, device)
