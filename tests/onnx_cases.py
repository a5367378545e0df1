"""The cases that come with `onnx` for each of its operators, run through `load`."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.case import node as cases_of_onnx

import treadle as td
from treadle.base import dtypes, trees
from treadle.interop.onnx import load

# Operators, and what of them is not read: the case is refused, or differs, for this reason.
NOT_READ = {
    r"bitshift_.*_int(8|32|64)": "shifts of integers with a sign, or of 64 bits",
    r"col2im_5d": "three axes",
    r"dequantizelinear_blocked|quantizelinear_blocked": "scales of blocks",
    r"dynamicquantizelinear": "a half is rounded in float32 there, and exactly here",
    r"gridsample_bicubic": "cubic places",
    r"gridsample_volumetric": "volumes",
    r"scatter.*(mul|multiply)": "products of updates",
    r"training_dropout": "what is dropped is random",
    r"split_to_sequence": "a sequence leaves the program",
}
SAMPLE = (
    "batch_normalization conv cumsum einsum gathernd gemm gru lstm nonzero pad scatternd slice "
    "split topk where"
).split()


OTHER = "another operator, element type or opset"
ELSEWHERE = ("are not imported", "element type", "versions of ONNX", "other definitions", "type 13")


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
        before = len(cases_of_onnx._NodeTestCases)
        for name in SAMPLE:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    made = cases_of_onnx._NodeTestCases[before:]
    return tuple(c for c in made if not c.name.endswith("_expanded"))


def _array(value: Any) -> np.ndarray | None:
    """A value as an array of a dtype that Treadle has, or None."""
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    array = np.asarray(value)
    is_ours = array.dtype.kind not in "OSU" and dtypes.from_numpy(array.dtype) is not None
    return array if is_ours else None


def outcome(case: Any) -> str:
    """ "passed", or why it is not for Treadle; anything else is an error."""
    for pattern, reason in NOT_READ.items():
        if re.match(f"test_({pattern})", case.name):
            return reason
    try:
        module = load(case.model.SerializeToString(), trainable=lambda name, array: False)
    except td.LoadError as error:
        if any(part in str(error) for part in ELSEWHERE):
            return OTHER
        raise
    for inputs, outputs in case.data_sets:
        given, expected = [list(map(_array, values)) for values in (inputs, outputs)]
        if any(x is None for x in (*given, *expected)):
            return OTHER
        for found, wanted in zip(_run(case.model, module, given), expected, strict=True):
            _compare(case, found, wanted)
    return "passed"


def _run(model: onnx.ModelProto, module: Any, inputs: list[Any]) -> list[np.ndarray]:
    """Inputs as data; as constants where the operator needs to know them while tracing."""
    specs = [td.Spec(x.shape, x.dtype) for x in inputs]
    try:
        program = td.compile(lambda *values: module(*values), *specs, device="oracle")
        return trees.flatten(program(*inputs))[0]
    except td.LoadError as error:
        if "must be constants" not in str(error) and "must be known" not in str(error):
            raise
    known = onnx.ModelProto.FromString(model.SerializeToString())
    names = [i.name for i in known.graph.input]
    known.graph.initializer.extend(map(onnx.numpy_helper.from_array, inputs, names))
    del known.graph.input[:]
    constant = load(known.SerializeToString(), trainable=lambda name, array: False)
    return trees.flatten(td.compile(lambda: constant(), device="oracle")())[0]


def _compare(case: Any, found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape, case.name
    is_narrow = wanted.dtype.itemsize == 2 and wanted.dtype.kind not in "iu"
    bound = {"rtol": 2e-2, "atol": 1e-2} if is_narrow else {"rtol": case.rtol, "atol": 1e-5}
    ours, theirs = (x.astype(np.float64) for x in (found, wanted))
    np.testing.assert_allclose(ours, theirs, err_msg=case.name, **bound)


def counted(cases: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The operator that each case is of, and what became of it."""
    for case in cases:
        yield case.model.graph.node[0].op_type, outcome(case)
