"""ONNX files as modules: what they compute, that they train, and what is refused."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import treadle as td
from onnx_models import MODELS
from treadle import losses, nn, optim
from treadle.base import memory, trees
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.interop.onnx import export, load, operators
from treadle.interop.onnx.reader import run, wire
from treadle.interop.onnx.reader.checks import check
from treadle.interop.onnx.reader.program import Body, Port, Program, Step
from treadle.interop.onnx.reader.tensors import Folder

FILES = Path(__file__).parent / "onnx_files"
PAGE = Path(__file__).parent.parent / "docs" / "onnx.md"


def values_of(model: nn.Module) -> dict[str, Any]:
    return {n: td.tensor(v) for n, v in model.init(0).items()}


def outputs_of(model: nn.Module, *inputs: np.ndarray) -> list[np.ndarray]:
    found = model.apply(values_of(model), *inputs)
    return [t.numpy() for t in trees.flatten(found)[0]]


def close(found: list[np.ndarray], expected: list[np.ndarray], within: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=within, atol=within)


# What was exported here


def gradients(model: nn.Module, inputs: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    def total(values: dict[str, Any]) -> Any:
        found = trees.flatten(model.apply(values, *inputs))[0]
        return sum(sum_of(td.sin(t)) for t in found)

    names = [n for n, _ in model.named_parameters()]
    fixed = {n: v for n, v in values_of(model).items() if n not in names}
    first = {n: v for n, v in values_of(model).items() if n in names}
    found = td.grad(lambda trained: total({**fixed, **trained}))(first)
    return {n: g.numpy() for n, g in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_what_was_exported_is_read_back(name: str, tmp_path: Path) -> None:
    make, inputs = MODELS[name]
    model = make()
    export(model, inputs, tmp_path / "m.onnx")
    again = load(tmp_path / "m.onnx")
    close(outputs_of(again, *inputs), outputs_of(model, *inputs))
    names = {n for n, _ in model.named_parameters()}
    assert {n for n, _ in again.named_parameters()} == names
    if name == "cnn":
        assert [n for n, _ in again.named_states()] == ["norm.running_mean", "norm.running_var"]
    if name in ("mlp", "block"):
        ours, theirs = gradients(again, inputs), gradients(model, inputs)
        for n in names:
            np.testing.assert_allclose(ours[n], theirs[n], rtol=1e-5, atol=1e-5, err_msg=n)


# What PyTorch exported


@pytest.mark.parametrize("name", ["mlp", "cnn", "block", "lstm", "gru", "unet"])
def test_files_of_pytorch(name: str) -> None:
    x, *outputs = np.load(FILES / f"{name}.npz").values()
    close(outputs_of(load(FILES / f"{name}.onnx"), x), outputs)


def trains(name: str, target: np.ndarray, within: float, **options: Any) -> list[str]:
    """The names of the parameters that training changed, and that it made the loss smaller."""
    model, x = load(FILES / f"{name}.onnx"), np.load(FILES / f"{name}.npz")["arr_0"]
    batch = {"x": x, "y": target}
    step = td.compile_step(
        model, lambda m, b: losses.mse(m(b["x"]), b["y"]), optim.adam(2e-2), batch, **options
    )
    before, first = step.params, float(step(batch).loss)
    for _ in range(20):
        last = float(step(batch).loss)
    assert last < first * within
    return [n for n in before if not np.array_equal(before[n], step.params[n])]


def test_a_file_of_pytorch_compiles_and_trains() -> None:
    moved = trains("mlp", np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]], 0.8)
    assert moved == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.slow
def test_an_image_model_of_pytorch_compiles_and_trains() -> None:
    moved = trains("cnn", np.eye(3, dtype=np.float32), 0.5)
    assert moved == ["0.weight", "0.bias", "4.weight", "4.bias", "8.weight", "8.bias"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"opset_version": 18}, {"opset_version": 23}, {"optimize": False}]
)
@pytest.mark.parametrize("name", ["mlp", "cnn", "block", "lstm", "gru", "unet"])
def test_exports_of_pytorch_now(name: str, options: dict[str, Any]) -> None:
    from onnx_torch import exported

    model, data, x, outputs = exported(name, **options)
    module = load(data)
    close(outputs_of(module, x), outputs)
    if options == {"optimize": False}:
        ours = {n for n, _ in module.named_parameters()}
        assert {n for n, _ in model.named_parameters()} - ours <= {"1.weight", "1.bias"}


@pytest.mark.slow
def test_gradients_are_those_of_pytorch() -> None:
    import torch

    from onnx_torch import exported

    model, data, x, _ = exported("block", optimize=False)
    module = load(data)
    ours = gradients(module, (x,))
    torch.sin(model(torch.tensor(x))).sum().backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.grad, rtol=1e-4, atol=1e-4, err_msg=name)


# The page


def test_the_page_lists_the_operators() -> None:
    text = PAGE.read_text()
    assert len(operators()) >= 160
    assert [name for name in operators() if f"`{name}`" not in text] == []


# Small graphs


def tensor_info(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(
    nodes: list[Any], shape: Any = (2, 3), outputs: tuple[str, ...] = ("y",), **more: Any
) -> Any:
    arrays = more.pop("arrays", {})
    graph = helper.make_graph(
        nodes,
        "small",
        [] if shape is None else [tensor_info("x", shape)],
        [tensor_info(n, None) for n in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()],
    )
    opsets = [helper.make_opsetid("", more.pop("opset", 20)), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, **more)


def loaded(model: Any, **options: Any) -> Any:
    return load(model.SerializeToString(), **options)


node = helper.make_node
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_sizes_are_computed_while_tracing() -> None:
    """Shapes of a batch of any size, through arithmetic, into a reshape and a range."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"], axis=0),
        node("Mul", ["n", "three"], ["m"]),
        node("Unsqueeze", ["m", "first"], ["t"]),
        node("Reshape", ["x", "t"], ["flat"]),
        node("Cast", ["m"], ["wide"], to=TensorProto.FLOAT),
        node("Range", ["start", "wide", "one"], ["range"]),
        node("Add", ["flat", "range"], ["y"]),
    ]
    arrays = {
        "zero": np.array(0),
        "three": np.array(3),
        "first": np.array([0]),
        "start": np.array(0.0, np.float32),
        "one": np.array(1.0, np.float32),
    }
    module = loaded(model_of(nodes, ("batch", 3), arrays=arrays))
    assert not list(module.parameters())
    for n in (1, 4):
        x = np.ones((n, 3), np.float32)
        assert np.array_equal(outputs_of(module, x)[0], 1 + np.arange(3 * n))
    graph = td.trace(lambda x: module(x), td.Spec((2, 3)))
    assert {n.op.name for n in graph.nodes} == {"input", "reshape", "constant", "add"}


def counting_body(*, changes: bool = False) -> Any:
    """carry + x each time, and its square stacked."""
    on = node("Less", ["i", "limit"], ["on"]) if changes else node("Identity", ["go"], ["on"])
    return helper.make_graph(
        [node("Add", ["carry", "x"], ["next"]), on, node("Mul", ["next", "next"], ["row"])],
        "body",
        [
            tensor_info("i", [], TensorProto.INT64),
            tensor_info("go", [], TensorProto.BOOL),
            tensor_info("carry", [2, 3]),
        ],
        [
            tensor_info("on", [], TensorProto.BOOL),
            tensor_info("next", [2, 3]),
            tensor_info("row", [2, 3]),
        ],
    )


@pytest.mark.parametrize("count", [3, 100])
def test_loops_are_unrolled_or_scanned(count: int) -> None:
    nodes = [node("Loop", ["n", "", "x"], ["last", "rows"], body=counting_body())]
    module = loaded(model_of(nodes, outputs=("last", "rows"), arrays={"n": np.array(count)}))
    last, rows = outputs_of(module, X)
    assert np.array_equal(last, X * (count + 1))
    assert np.array_equal(rows, [(X * (k + 2)) ** 2 for k in range(count)])
    graph = td.trace(lambda x: module(x), td.Spec((2, 3)))
    assert ("scan" in {n.op.name for n in graph.nodes}) == (count > 64)


def test_a_loop_ends_by_its_condition() -> None:
    nodes = [node("Loop", ["", "yes", "x"], ["last", "rows"], body=counting_body(changes=True))]
    arrays = {"yes": np.array(True), "limit": np.array(4)}
    module = loaded(model_of(nodes, outputs=("last", "rows"), arrays=arrays))
    assert outputs_of(module, X)[1].shape == (5, 2, 3)


def test_a_choice_by_data_and_by_size() -> None:
    def branch(name: str, op: str) -> Any:
        return helper.make_graph([node(op, ["x"], [name])], name, [], [tensor_info(name, None)])

    branches = {"then_branch": branch("a", "Neg"), "else_branch": branch("b", "Relu")}
    by_data = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Less", ["s", "zero"], ["c"]),
        node("If", ["c"], ["y"], **branches),
    ]
    module = loaded(model_of(by_data, arrays={"zero": np.array(0.0, np.float32)}))
    program = td.compile(lambda x: module(x), td.Spec((2, 3)), device="oracle")
    assert np.array_equal(program(-X), X)
    assert np.array_equal(program(X), X)
    by_size = [
        node("Size", ["x"], ["s"]),
        node("Less", ["s", "nine"], ["c"]),
        node("If", ["c"], ["y"], **branches),
    ]
    module = loaded(model_of(by_size, arrays={"nine": np.array(9)}))
    assert np.array_equal(outputs_of(module, X)[0], -X)


# Operators that no case of onnx has in an opset that is read


def scan_node() -> Any:
    """Along the last axis, backwards; the rows are stacked along it again, from the end."""
    body = helper.make_graph(
        [node("Add", ["carry", "row"], ["next"]), node("Mul", ["next", "row"], ["out"])],
        "body",
        [tensor_info("carry", [2]), tensor_info("row", [2])],
        [tensor_info("next", [2]), tensor_info("out", [2])],
    )
    options = {"scan_input_axes": [1], "scan_input_directions": [1]}
    options |= {"scan_output_axes": [1], "scan_output_directions": [1]}
    return node("Scan", ["first", "x"], ["a", "y"], body=body, num_scan_inputs=1, **options)


SMALL: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "sequences": (
        [
            node("SequenceConstruct", ["x", "other"], ["s"]),
            node("SequenceInsert", ["s", "x", "one"], ["t"]),
            node("SequenceErase", ["t", "zero"], ["u"]),
            node("ConcatFromSequence", ["u"], ["b"], axis=1),
            node("SequenceAt", ["t", "last"], ["c"]),
            node("SequenceLength", ["t"], ["n"]),
            node("Cast", ["n"], ["m"], to=1),
            node("SequenceEmpty", [], ["e"]),
            node("SequenceInsert", ["e", "m"], ["f"]),
            node("SequenceAt", ["f", "zero"], ["d"]),
            node("Add", ["c", "d"], ["g"]),
            node("Concat", ["b", "g"], ["y"], axis=1),
        ],
        {
            "other": np.full((2, 3), 7, np.float32),
            "zero": np.array(0),
            "one": np.array(1),
            "last": np.array(-1),
        },
    ),
    "parts": (
        [
            node("SplitToSequence", ["x", "two"], ["s"], axis=1),
            node("SequenceAt", ["s", "one"], ["a"]),
            node("SplitToSequence", ["x"], ["t"], axis=1, keepdims=0),
            node("ConcatFromSequence", ["t"], ["b"], axis=0, new_axis=1),
            node("MatMul", ["b", "a"], ["y"]),
        ],
        {"two": np.array(2), "one": np.array(1)},
    ),
    "lp pool": (
        [node("Reshape", ["x", "s"], ["i"]), node("GlobalLpPool", ["i"], ["y"], p=3)],
        {"s": np.array([1, 2, 3])},
    ),
    "quantized": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        {},
    ),
    "scan": ([scan_node()], {"first": np.array([1, 2], np.float32)}),
}


@pytest.mark.parametrize("name", SMALL)
def test_beside_onnxruntime(name: str) -> None:
    nodes, arrays = SMALL[name]
    model = model_of(nodes, arrays=arrays, ir_version=10)
    x = X * np.float32(0.7) - 1
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    close(outputs_of(loaded(model), x), session.run(None, {"x": x}))


# Older definitions

IMAGE = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
CHANNELS = {name: np.linspace(0.5, 1, 3, dtype=np.float32) + i for i, name in enumerate("abcd")}
KERNEL = {"w": np.random.default_rng(1).normal(size=(2, 3, 3, 3)).astype(np.float32)}
HALVES = {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]}
OLD: dict[str, tuple[int, Any, dict[str, np.ndarray]]] = {
    "softmax": (7, node("Softmax", ["x"], ["y"]), {}),
    "softmax of two axes": (11, node("Softmax", ["x"], ["y"], axis=2), {}),
    "log softmax": (11, node("LogSoftmax", ["x"], ["y"], axis=-2), {}),
    "hardmax": (11, node("Hardmax", ["x"], ["y"], axis=0), {}),
    "clip": (7, node("Clip", ["x"], ["y"], min=-0.5, max=1.0), {}),
    "clip from above": (10, node("Clip", ["x"], ["y"], max=0.5), {}),
    "pad": (7, node("Pad", ["x"], ["y"], pads=[0, 0, 1, 0, 0, 1, 0, 2], value=3.0), {}),
    "slice": (7, node("Slice", ["x"], ["y"], starts=[1, -2], ends=[3, 99], axes=[1, 3]), {}),
    "split": (7, node("Split", ["x"], ["y", "z"], axis=1, split=[1, 2]), {}),
    "sum of axes": (11, node("ReduceSum", ["x"], ["y"], axes=[1, 2], keepdims=0), {}),
    "norm": (7, node("BatchNormalization", ["x", *"abcd"], ["y"], epsilon=1e-3), CHANNELS),
    "convolution": (7, node("Conv", ["x", "w"], ["y"], **HALVES), KERNEL),
    "mean pool": (7, node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1] * 4), {}),
    "dropout": (7, node("Dropout", ["x"], ["y"], ratio=0.3), {}),
    "upsample": (
        9,
        node("Upsample", ["x", "s"], ["y"], mode="linear"),
        {"s": np.array([1, 1, 2, 3], np.float32)},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_older_definitions_beside_onnxruntime(name: str) -> None:
    opset, step, arrays = OLD[name]
    model = model_of([step], IMAGE.shape, arrays=arrays, opset=opset, ir_version=8)
    del model.opset_import[1]
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    close(outputs_of(loaded(model), IMAGE)[:1], session.run(["y"], {"x": IMAGE}))


def test_older_definitions_that_mean_something_else() -> None:
    each = node("BatchNormalization", ["x", *"abcd"], ["y"], spatial=0)
    module = loaded(model_of([each], opset=7, arrays=CHANNELS))
    with pytest.raises(td.LoadError, match="statistics of each element"):
        outputs_of(module, X)
    refused(model_of([node("Add", ["x", "x"], ["y"], axis=1)], opset=6), "other definitions of Add")


# Types and sizes


def test_bits_of_floats_are_read_while_tracing() -> None:
    cast = node("BitCast", ["x"], ["y"], to=TensorProto.INT32)
    run_refused(model_of([cast], opset=26), "bits of float32 as int32", X)
    known = [node("BitCast", ["w"], ["b"], to=TensorProto.INT32), node("Cast", ["b"], ["y"], to=1)]
    model = model_of(known, None, opset=26, arrays={"w": np.array([1, -0.0], np.float32)})
    module = loaded(model, trainable=lambda name, array: False)
    assert outputs_of(module)[0].tolist() == [0x3F800000, -(2.0**31)]


@pytest.mark.parametrize("kind", [TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT64])
def test_integers_that_no_dtype_holds_are_refused(kind: int) -> None:
    message = f"element type {TensorProto.DataType.Name(kind)}, which is not read"
    inverse = model_of([node("BitwiseNot", ["x"], ["y"])])
    inverse.graph.input[0].type.tensor_type.elem_type = kind
    refused(inverse, message)
    made = tensor(dims=[1], data_type=kind, raw_data=bytes(8 if kind == TensorProto.UINT64 else 2))
    constant = model_of([node("BitwiseNot", ["w"], ["y"])], None)
    constant.graph.initializer.append(made)
    refused(constant, message)
    run_refused(model_of([node("Cast", ["x"], ["y"], to=kind)]), message[:-19], X)


def test_spectra_of_a_long_signal() -> None:
    """30 s of sound have more elements in all frames than an array that is made while tracing."""
    arrays = {"step": np.array(160), "window": np.hanning(400).astype(np.float32)}
    model = model_of([node("STFT", ["x", "step", "window"], ["y"])], (1, 480_000, 1), arrays=arrays)
    module = loaded(model)
    assert not list(module.parameters())
    graph = td.trace(lambda x: module(x), td.Spec((1, 480_000, 1)))
    assert [graph.type_of(v).shape for v in graph.results] == [(1, 2998, 201, 2)]


def function(name: str, nodes: list[Any], *attributes: str) -> Any:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, opsets, list(attributes))


def test_functions_of_a_file_with_attributes() -> None:
    leaky = node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=1))
    nodes = [node("Leaky", ["x"], ["h"], domain="own", slope=0.5), node("Neg", ["h"], ["y"])]
    module = loaded(model_of(nodes, functions=[function("Leaky", [leaky], "slope")]))
    assert np.array_equal(outputs_of(module, -X)[0], X / 2)


def test_which_initializers_are_trained() -> None:
    nodes = [
        node("MatMul", ["x", "val_1"], ["h"]),
        node("Add", ["h", "bias"], ["a"]),
        node("Mul", ["a", "val_2"], ["b"]),
        node("Add", ["b", "mask"], ["c"]),
        node("Clip", ["c", "low"], ["d"]),
        node("BatchNormalization", ["d", "scale", "shift", "mean", "var"], ["y"]),
    ]
    three = np.ones(3, np.float32)
    arrays = {
        "val_1": np.eye(3, dtype=np.float32),
        "bias": three,
        "val_2": np.array([0.5], np.float32),
        "mask": np.array([0, 0, -np.inf], np.float32),
        "low": np.array(-1e9, np.float32),
        **dict.fromkeys(("scale", "shift", "mean", "var"), three),
    }
    model = model_of(nodes, arrays=arrays)
    module = loaded(model)
    assert [n for n, _ in module.named_parameters()] == ["val_1", "bias", "scale", "shift"]
    assert [n for n, _ in module.named_states()] == ["mean", "var"]
    chosen = loaded(model, trainable=lambda name, array: name == "bias")
    assert [n for n, _ in chosen.named_parameters()] == ["bias"]
    close(outputs_of(chosen, X), outputs_of(module, X))


def test_inputs_by_name_and_of_the_wrong_kind() -> None:
    module = loaded(model_of([node("Relu", ["x"], ["y"])], ("n", 3)))
    assert (module.input_names, module.output_names) == (("x",), ("y",))
    assert np.array_equal(module(x=td.tensor(X)).numpy(), X)
    for arguments, message in (
        ((td.tensor(X), td.tensor(X)), "it takes x, and is given 2"),
        ((td.tensor(X[0]),), r"the input 'x' is float32\[3\], in the file \(n, 3\)"),
        ((td.tensor(X[:, :2]),), r"float32\[2,2\], in the file"),
        ((td.tensor(X.astype(np.int32)),), "in the file float32"),
    ):
        with pytest.raises(td.TreadleError, match=message):
            module(*arguments)


# What is refused


def refused(model: Any, message: str) -> None:
    data = model if isinstance(model, (bytes, Path)) else model.SerializeToString()
    with pytest.raises(td.LoadError, match=message) as caught:
        load(data)
    assert len(str(caught.value)) < 2000


def test_unknown_operators_are_listed_at_once() -> None:
    nodes = [
        node("StringNormalizer", ["x"], ["a"]),
        node("NonMaxSuppression", ["a"], ["b"]),
        node("Gone", ["b"], ["y"], domain="com.example"),
    ]
    refused(model_of(nodes), "3 operators.*: NonMaxSuppression, StringNormalizer, com.example.Gone")
    refused(model_of([node("Resize", ["x"], ["y"])], opset=10), "opset 10 has other .* Resize")
    refused(model_of([node("Gelu", ["x"], ["y"])], opset=18), "opset 18 has other .* Gelu")
    refused(model_of([node("Relu", ["x"], ["y"])], opset=99), "opset 99")


def chain(depth: int) -> list[Any]:
    """Functions that each call the next twice."""
    last = function("F0", [node("Neg", ["a"], ["b"])])
    calls = [
        function(
            f"F{i + 1}",
            [node(f"F{i}", ["a"], ["c"], domain="own"), node(f"F{i}", ["c"], ["b"], domain="own")],
        )
        for i in range(depth)
    ]
    return [last, *calls]


def nested(depth: int) -> Any:
    graph = least = helper.make_graph(
        [node("Neg", ["x"], ["b"])], "g", [], [tensor_info("b", None)]
    )
    for _ in range(depth):
        inner = node("If", ["c"], ["b"], then_branch=graph, else_branch=least)
        graph = helper.make_graph([inner], "g", [], [tensor_info("b", None)])
    return graph


def test_circles_and_explosions() -> None:
    first = [node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["y"])]
    refused(model_of(first), "reads 'b' before anything gives it")
    refused(model_of([node("Neg", ["y"], ["y"])]), "reads 'y' before")
    refused(model_of([node("Neg", ["x"], ["y"]), node("Abs", ["x"], ["y"])]), "two nodes give 'y'")
    refused(model_of([node("Neg", ["x"], ["z"])]), "nothing gives the output 'y'")
    itself = function("Self", [node("Self", ["a"], ["b"], domain="own")])
    refused(
        model_of([node("Self", ["x"], ["y"], domain="own")], functions=[itself]), "calls itself"
    )
    call = [node("F30", ["x"], ["y"], domain="own")]
    refused(model_of(call, functions=chain(30)), "more than 200,000 steps")
    deep = [node("If", ["c"], ["y"], then_branch=nested(18), else_branch=nested(1))]
    refused(model_of(deep, arrays={"c": np.array(True)}), "damaged|deep")


def test_names_of_bodies_are_not_copied() -> None:
    """Each of many bodies sees all names before it, in memory that grows with the names."""
    inner = Body("b", (), (Port("n0"), Port("c")), (Step("Neg", "", "", ("x",), ("c",), {}),))
    steps = [Step("If", "", "", ("x",), (f"n{i}",), {"then_branch": inner}) for i in range(1, 1001)]
    first = Step("Neg", "", "", ("x",), ("n0",), {})
    program = Program(Body("m", (Port("x"),), (Port("n9"),), (first, *steps)), 20, {})
    tracemalloc.start()
    check(program, Folder(None, "it"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_body_sees_what_was_given_before_it() -> None:
    def choice(reads: str) -> Any:
        graph = helper.make_graph([node("Neg", [reads], ["b"])], "g", [], [tensor_info("b", None)])
        return node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)

    relu, arrays = node("Relu", ["x"], ["h"]), {"c": np.array(True)}
    assert loaded(model_of([relu, choice("h")], arrays=arrays)).output_names == ("y",)
    refused(model_of([choice("h"), relu], arrays=arrays), "Neg reads 'h' before")
    refused(model_of([choice("y")], arrays=arrays), "Neg reads 'y' before")
    beside = [relu, choice("x"), node("Neg", ["b"], ["z"])]
    refused(model_of(beside, arrays=arrays), "Neg reads 'b' before")


def tensor(**fields: Any) -> Any:
    return TensorProto(name="w", data_type=fields.pop("data_type", 1), **fields)


TENSORS: dict[str, tuple[Any, str]] = {
    "no data": (tensor(dims=[10**6, 10**6]), "needs 4 TB|has 0 elements"),
    "too large for Python": (tensor(dims=[2**62] * 8), "and this machine has"),
    "negative": (tensor(dims=[-1, 3]), "the shape"),
    "many axes": (tensor(dims=[1] * 100), "the shape"),
    "short": (tensor(dims=[2, 3], raw_data=b"12345678"), "has 8 bytes, and needs 24"),
    "long": (tensor(dims=[1], raw_data=bytes(8)), "has 8 bytes, and needs 4"),
    "few numbers": (tensor(dims=[2, 3], float_data=[1.0]), "has 1 elements, not 6"),
    "text": (tensor(dims=[1], data_type=8, string_data=[b"a"]), "element type STRING"),
    "four bits": (tensor(dims=[1], data_type=22, raw_data=b"a"), "element type INT4"),
    "no type": (tensor(dims=[1], data_type=0), "element type UNDEFINED"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_lie(name: str) -> None:
    proto, message = TENSORS[name]
    model = model_of([node("Add", ["x", "w"], ["y"])])
    model.graph.initializer.append(proto)
    with pytest.raises(td.TreadleError, match=message):
        loaded(model)


@pytest.mark.parametrize("key", ["raw_data", "float_data", "int32_data", "uint64_data"])
def test_values_are_read_from_every_field(key: str) -> None:
    made = {
        "raw_data": tensor(dims=[3], raw_data=np.array([1, 2, 3], "<f4").tobytes()),
        "float_data": tensor(dims=[3], float_data=[1, 2, 3]),
        "int32_data": tensor(dims=[3], data_type=16, int32_data=[0x3F80, 0x4000, 0x4040]),
        "uint64_data": tensor(dims=[3], data_type=12, uint64_data=[1, 2, 3]),
    }[key]
    model = model_of([node("Cast", ["w"], ["y"], to=1)], None)
    model.graph.initializer.append(made)
    assert np.array_equal(loaded(model)().numpy(), [1, 2, 3])


# Values in other files


def outside(folder: Path, **entries: str) -> Path:
    model = model_of([node("Add", ["x", "w"], ["y"])])
    proto = tensor(dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "w.bin", "offset": "8", "length": "24", **entries}.items():
        proto.external_data.add(key=key, value=value)
    model.graph.initializer.append(proto)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def test_values_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(8) + X.tobytes())
    module = load(outside(tmp_path))
    assert np.array_equal(module.init(0)["w"], X)
    assert np.array_equal(outputs_of(module, X)[0], 2 * X)
    with pytest.raises(td.LoadError, match="Pass the path of the model"):
        load((tmp_path / "m.onnx").read_bytes())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "../w.bin"}, "Only plain files beside"),
        ({"location": "a/../../w.bin"}, "Only plain files beside"),
        ({"location": "/etc/passwd"}, "Only plain files beside"),
        ({"location": "C:\\w.bin"}, "Only plain files beside"),
        ({"location": ""}, "Only plain files beside"),
        ({"location": "w\0.bin"}, "Only plain files beside"),
        ({"location": "link.bin"}, "which is a link"),
        ({"location": "folder/w.bin"}, "which is a link"),
        ({"location": "pipe"}, "is no file"),
        ({"location": "absent.bin"}, "No such file"),
        ({"offset": "9"}, "which has 32 bytes"),
        ({"offset": "-1"}, "has the place '-1'"),
        ({"offset": "9" * 30}, "has the place"),
        ({"length": "8"}, "has 8 bytes, and needs 24"),
        ({"length": "1000000000000"}, "and needs 24"),
    ],
)
def test_paths_that_lead_elsewhere(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "w.bin").write_bytes(bytes(8) + X.tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    refused(outside(folder, **entries), message)


def many_outside(folder: Path, regions: list[tuple[str, int, int]], *, inner: int = 0) -> Path:
    """Tensors at (file, offset, length); the last `inner` of them as attributes."""
    model = model_of([node("Neg", ["x"], ["y"])])
    for i, (name, offset, length) in enumerate(regions):
        proto = TensorProto(name=f"w{i}", data_type=1, dims=[length // 4], data_location=1)
        for key, value in (("location", name), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        if i < len(regions) - inner:
            model.graph.initializer.append(proto)
        else:
            model.graph.node.append(node("Constant", [], [f"w{i}"], value=proto))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize("inner", [0, 38])
def test_many_tensors_of_one_region(tmp_path: Path, inner: int) -> None:
    """No more is read than the files have, whatever names and links they are read by."""
    size = 1 << 20
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(size)  # a file with a hole
    os.link(tmp_path / "w.bin", tmp_path / "again.bin")
    names = ["w.bin", "again.bin", "./w.bin"]
    path = many_outside(tmp_path, [(names[i % 3], 0, size) for i in range(40)], inner=inner)
    tracemalloc.start()
    refused(path, "which has 1,048,576 bytes: with the tensors before, more are read")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * size
    refused(many_outside(tmp_path, [("w.bin", 0, 2 * size // 3 // 4 * 4)] * 2), "are read")


def test_all_tensors_together_fit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(bytes(4000))
    regions = [("a.bin", 0, 2000), ("a.bin", 2000, 2000), ("b.bin", 0, 4000)]
    assert len(load(many_outside(tmp_path, regions)).program.body.constants) == 3
    monkeypatch.setattr(memory, "memory_there", lambda: 7000)
    with pytest.raises(td.OutOfMemoryError, match="in other files needs 8 kB"):
        load(many_outside(tmp_path, regions))


# Damaged files


def _whole() -> bytes:
    return (FILES / "unet.onnx").read_bytes()


DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "no graph"),
    "text": (lambda: b"not a model at all", "damaged|no graph"),
    "zeros": (lambda: bytes(1000), "damaged"),
    "half": (lambda: _whole()[: len(_whole()) // 2], "damaged"),
    "one byte short": (lambda: _whole()[:-1], "damaged"),
    "a length past the end": (lambda: b"\x3a\xff\xff\xff\xff\x7f", "damaged"),
    "nested": (lambda: b"\x3a\x80\x01" * 10_000, "damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    make, message = DAMAGED[name]
    (tmp_path / "m.onnx").write_bytes(make())
    refused(tmp_path / "m.onnx", message)


def test_files_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "absent.onnx", "No such file")
    refused(tmp_path, "no file")
    with (tmp_path / "huge.onnx").open("wb") as file:
        file.truncate(1 << 40)  # a file with a hole
    refused(tmp_path / "huge.onnx", "more than")


def test_a_file_of_many_empty_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes of a file are a message of 150 in memory: they are counted before."""
    monkeypatch.setattr(wire, "SMALL", 1000)
    monkeypatch.setattr(wire, "MOST_FIELDS", 2000)
    for fields in (b"\x0a\x00", b"\x2a\x00", b"\x5a\x02\x12\x00"):  # nodes, initializers, inputs
        graph = fields * 4000
        length = bytes([len(graph) & 0x7F | 0x80, len(graph) >> 7 & 0x7F | 0x80, len(graph) >> 14])
        refused(b"\x3a" + length + graph, "more than 2,000 fields")
    plain = (FILES / "unet.onnx").read_bytes()
    assert load(plain).output_names
    with pytest.raises(td.LoadError, match="damaged"):
        load(plain[:-1])


def run_refused(model: Any, message: str, *inputs: np.ndarray) -> None:
    module = loaded(model)
    with pytest.raises(td.TreadleError, match=message) as caught:
        td.trace(lambda *values: module(*values), *inputs)
    assert len(str(caught.value)) < 2000


def test_sizes_beyond_all_memory_and_time() -> None:
    huge = np.array([10**6, 10**6])
    far = np.array(10**12)
    arrays = {"s": huge, "far": far, "zero": np.array(0), "one": np.array(1)}
    run_refused(
        model_of([node("Expand", ["x", "s"], ["y"])], (1, 1), arrays=arrays),
        "needs 4 TB",
        X[:1, :1],
    )
    run_refused(
        model_of([node("ConstantOfShape", ["s"], ["y"])], None, arrays=arrays), "needs 4 TB"
    )
    run_refused(
        model_of([node("Range", ["zero", "far", "one"], ["y"])], None, arrays=arrays),
        "while tracing",
    )
    run_refused(
        model_of([node("Tile", ["x", "s"], ["y"])], arrays=arrays), "and this machine has", X
    )
    loop = node("Loop", ["far", "", "x"], ["last", "rows"], body=counting_body())
    run_refused(model_of([loop], outputs=("last", "rows"), arrays=arrays), "iterations", X)
    sizes = {"s": np.array([1, 1, 10**9, 10**9]), "r": np.array([1, 1, 2, 3])}
    resize = [node("Reshape", ["x", "r"], ["z"]), node("Resize", ["z", "", "", "s"], ["y"])]
    run_refused(model_of(resize, arrays=sizes), "while tracing", X)


def sequence_steps(op: str, count: int, *more: str, each: int = 10_000) -> list[Any]:
    """A sequence of many tensors, and what is made of it again and again."""
    made = [node(op, ["s", *more], [f"s{i}"], axis=0) for i in range(count)]
    ends = [node("SequenceLength", ["s"], ["n"]), node("Cast", ["n"], ["y"], to=1)]
    return [node("SequenceConstruct", ["x"] * each, ["s"]), *made, *ends]


def test_sequences_are_bounded_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator makes another sequence: their items grow with the square of the steps."""
    long, many = "parts, more than 10,000", "parts take more than 1,000 steps"
    assert outputs_of(loaded(model_of(sequence_steps("SequenceErase", 2))), X)[0] == 10_000
    run_refused(model_of(sequence_steps("SequenceInsert", 1, "x")), long, X)
    run_refused(model_of(sequence_steps("SequenceErase", 0, each=10_001)), long, X)
    monkeypatch.setattr(run, "MOST_STEPS", 1000)
    run_refused(model_of(sequence_steps("SequenceErase", 20)), many, X)
    run_refused(model_of(sequence_steps("ConcatFromSequence", 20, each=100)), many, X)


@pytest.mark.parametrize("op", ["Split", "SplitToSequence"])
def test_parts_are_bounded_each_and_together(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long, many = "parts, more than 10,000", "parts take more than 50 steps"
    evenly = {"num_outputs": 10_001} if op == "Split" else {}
    run_refused(model_of([node(op, ["x"], ["y"], **evenly)], (10_001, 1)), long, ones(10_001))
    monkeypatch.setattr(run, "MOST_STEPS", 50)
    parts = [node(op, ["x", "sizes"], [f"y{i}"]) for i in range(9)]
    arrays = {"sizes": np.ones(6, np.int64)}
    run_refused(model_of(parts, (6, 1), outputs=("y0",), arrays=arrays), many, ones(6))


def ones(count: int) -> np.ndarray:
    return np.ones((count, 1), np.float32)


def test_an_error_names_the_node_and_the_cause() -> None:
    wrong = model_of([node("MatMul", ["x", "x"], ["y"], name="head")])
    run_refused(wrong, "MatMul 'head': matmul: .*3 != 2", X)
    data = model_of([node("Reshape", ["x", "s"], ["y"])], outputs=("y",))
    data.graph.input.append(tensor_info("s", [1], TensorProto.INT64))
    run_refused(data, "Reshape 'y': .* is computed from the inputs", X, np.array([6]))
    missing = model_of([node("Cast", ["x"], ["y"])])
    run_refused(missing, "the attribute 'to' is missing", X)
    few = model_of([node("Gemm", ["x"], ["y"])])
    run_refused(few, "Gemm 'y' cannot be run: TypeError", X)
