"""Programs as ONNX files, run by onnxruntime beside the oracle."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import treadle as td
from onnx_models import MODELS, Mlp
from op_samples import COMPUTED, spread
from treadle import models, nn
from treadle.base import trees
from treadle.domains.float64 import evaluate_float64
from treadle.interop.onnx import export, load
from treadle.interop.onnx.library import library
from treadle.interop.onnx.writer.nodes import Nodes, value_info
from treadle.interop.onnx.writer.walk import EXPORT, REFUSED, Pair, Walk
from treadle.ir.composites import DEFINITIONS
from treadle.ir.graph import Graph
from treadle.ir.op import Op
from treadle.verify.samples import samples_of
from treadle.verify.sampling import sample_graph

Arrays = dict[str, np.ndarray]


def session(model: bytes | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ran(path: Path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    onnx.checker.check_model(str(path), full_check=True)
    opened = session(str(path))
    named = zip([i.name for i in opened.get_inputs()], inputs, strict=True)
    return opened.run(None, dict(named))


def ours(model: nn.Module, inputs: Any) -> list[np.ndarray]:
    values = {n: td.tensor(v) for n, v in model.init(0).items()}
    return [t.numpy() for t in trees.flatten(model.apply(values, *inputs))[0]]


def close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_models_give_in_onnxruntime_what_they_give_here(name: str, tmp_path: Path) -> None:
    make, inputs = MODELS[name]
    model = make()
    export(model, inputs, tmp_path / "m.onnx")
    close(ran(tmp_path / "m.onnx", list(inputs)), ours(model, inputs))
    names = {i.name for i in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert names == set(model.declarations()) - {"norm.num_batches_tracked"}  # nothing reads it


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21, 23, 25])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_opset(name: str, opset: int, tmp_path: Path) -> None:
    make, inputs = MODELS[name]
    model = make()
    export(model, inputs, tmp_path / "m.onnx", opset=opset)
    close(ran(tmp_path / "m.onnx", list(inputs)), ours(model, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_any_size(name: str, tmp_path: Path) -> None:
    make, inputs = MODELS[name]
    model = make()
    export(model, inputs, tmp_path / "m.onnx", dynamic_batch=True)
    for n in (1, 5):
        other = tuple(np.concatenate([x, x, x])[:n] for x in inputs)
        close(ran(tmp_path / "m.onnx", list(other)), ours(model, other))


def test_operators_are_those_that_onnx_has(tmp_path: Path) -> None:
    """Layers become one operator each, not their definitions."""
    found = {}
    for name, (make, inputs) in MODELS.items():
        export(make(), inputs, tmp_path / "m.onnx", opset=23)
        found[name] = [n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node]
    export(MODELS["block"][0](), MODELS["block"][1], tmp_path / "m.onnx", opset=20)
    before = [n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node]
    assert before.count("Softmax") == 1
    assert "Einsum" not in before
    assert found["mlp"] == ["Gemm", "Relu", "Gemm", "Softmax", "Identity"]
    assert [n for n in found["cnn"] if n != "Constant"] == (
        "Conv BatchNormalization Relu MaxPool Conv Gelu ReduceMean Gemm Identity".split()
    )
    assert {"Attention", "LayerNormalization", "Gather", "MatMul"} <= set(found["block"])
    assert found["lstm"].count("Scan") == 4
    assert {"ConvTranspose", "GroupNormalization", "AveragePool"} <= set(found["unet"])


def test_a_norm_along_other_axes_is_no_batch_norm(tmp_path: Path) -> None:
    """The sizes are equal, so that only the axes tell."""

    def program(x: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> Any:
        scale = td.rsqrt(variance.reshape(1, 1, 4) + 1e-3)
        channels = [t.reshape(4, 1) for t in (mean, weight, bias)]
        return (x - channels[0]) * scale * channels[1] + channels[2]

    rng = np.random.default_rng(0)
    vectors = [rng.uniform(0.5, 2.0, 4).astype(np.float32) for _ in range(4)]
    inputs = [rng.normal(size=(3, 4, 4)).astype(np.float32), *vectors]
    export(program, tuple(inputs), tmp_path / "m.onnx")
    graph = td.trace(program, *inputs)
    names = ("x", "mean", "variance", "weight", "bias")
    exact = evaluate_float64(graph, dict(zip(names, inputs, strict=True)))
    close(ran(tmp_path / "m.onnx", inputs), list(exact))
    assert "BatchNormalization" not in {
        n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node
    }


def library_models() -> dict[str, tuple[nn.Module, np.ndarray]]:
    tokens = np.arange(12).reshape(2, 6) % 7
    image = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32)
    small = {"vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = models.LlamaConfig(**small, intermediate_size=24, num_key_value_heads=2)
    gpt2 = models.GPT2Config(vocab_size=7, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    return {
        "gpt2": (models.GPT2(gpt2), tokens),
        "llama": (models.Llama(llama), tokens),
        "resnet18": (models.resnet18(), image),
    }


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet18"])
def test_models_of_the_library(name: str, opset: int, tmp_path: Path) -> None:
    model, x = library_models()[name]
    export(model, (x,), tmp_path / "m.onnx", opset=opset, dynamic_batch=True)
    expected = td.compile_forward(model, lambda m, b: m(b), x[:1])(x[:1])
    close(ran(tmp_path / "m.onnx", [x[:1]]), [np.asarray(expected)])
    again = load(tmp_path / "m.onnx")
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in model.named_parameters()}
    close([td.compile_forward(again, lambda m, b: m(b), x[:1])(x[:1])], [np.asarray(expected)])


# The op table


def graph_model(graph: Graph, opset: int) -> bytes:
    """The graph alone: inputs and outputs are its own."""
    nodes, given, inputs = Nodes(opset), {}, []
    for name, position in graph.leaves.items():
        given[position] = f"in{name}"
        inputs.append(value_info(f"in{name}", graph.nodes[position].types[0]))
    made = Walk(nodes, Pair(graph, graph), given).run()
    results = [f"out{i}" for i in range(len(made))]
    nodes.list += [
        onnx.helper.make_node("Identity", [m], [r]) for m, r in zip(made, results, strict=True)
    ]
    types = [graph.type_of(o.value) for o in graph.outputs]
    outputs = [value_info(r, t) for r, t in zip(results, types, strict=True)]
    proto = onnx.helper.make_graph(nodes.finished(results), "op", inputs, outputs)
    model = onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", opset)])
    model.ir_version = 10
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def agrees(op: Op, opset: int, most: int) -> None:
    for sample in spread(samples_of(op), most):
        types = [d.type.dtype.name for d in sample.operands]
        if "bfloat16" in types or "bfloat16" in str(sample.attributes):
            continue  # onnxruntime takes and gives none as arrays
        graph, drawn = sample_graph(op, sample), sample.arrays(0)
        arrays = {
            f"in{n}": drawn[n].astype(graph.nodes[i].types[0].dtype.numpy)
            for n, i in graph.leaves.items()
        }
        exact = evaluate_float64(graph, {n[2:]: a for n, a in arrays.items()})
        found = session(graph_model(graph, opset)).run(None, arrays)
        for a, b, output in zip(found, exact, graph.outputs, strict=True):
            assert a.dtype == graph.type_of(output.value).dtype.numpy
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=str(sample))


EXPORTED = [op for op in COMPUTED if op not in REFUSED]


def test_every_op_has_an_exporter_a_definition_or_a_refusal() -> None:
    for op in COMPUTED:
        cells = (op in EXPORT, op in DEFINITIONS and op not in EXPORT, op in REFUSED)
        lazy = op.name in ("broadcast", "constant")  # written where something reads them
        assert sum(cells) + lazy == 1, op


@pytest.mark.parametrize("op", EXPORTED, ids=str)
def test_every_op_in_onnxruntime(op: Op) -> None:
    agrees(op, 20, 2)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 19, 20, 21, 22, 23, 24, 25])
@pytest.mark.parametrize("op", EXPORTED, ids=str)
def test_every_sample_of_every_op_and_opset(op: Op, opset: int) -> None:
    agrees(op, opset, 1000)


# Sources, names and files


def test_a_function_and_a_compiled_program(tmp_path: Path) -> None:
    def rotated(x: Any, angle: Any) -> Any:
        return x * td.cos(angle), td.atan2(x, angle)

    inputs = [np.array([1.0, -2.0], np.float32), np.array([0.5, -3.0], np.float32)]
    export(rotated, tuple(inputs), tmp_path / "f.onnx")
    program = td.compile(rotated, *(td.Spec((2,)),) * 2, device="oracle")
    export(program, (td.Spec((2,)), td.Spec((2,))), tmp_path / "p.onnx")
    expected = [inputs[0] * np.cos(inputs[1]), np.arctan2(*inputs)]
    for file in ("f.onnx", "p.onnx"):
        close(ran(tmp_path / file, inputs), expected)
    graph = onnx.load(tmp_path / "f.onnx").graph
    assert [i.name for i in graph.input] == ["x", "angle"]
    assert [o.name for o in graph.output] == ["output_0", "output_1"]


def test_a_forward_has_the_values_of_its_session(tmp_path: Path) -> None:
    model = Mlp()
    batch = {"x": MODELS["mlp"][1][0]}
    forward = td.compile_forward(model, lambda m, b: m(b["x"]), batch, device="oracle", seed=7)
    export(forward, batch, tmp_path / "m.onnx")
    close(ran(tmp_path / "m.onnx", [batch["x"]]), [forward(batch)])
    assert [i.name for i in onnx.load(tmp_path / "m.onnx").graph.input] == ["x"]


def test_values_in_a_file_of_their_own(tmp_path: Path) -> None:
    model, (x,) = nn.Linear(32, 16), (np.ones((2, 32), np.float32),)
    export(model, (x,), tmp_path / "m.onnx", external_data=True)
    assert (tmp_path / "m.onnx.data").stat().st_size == 16 * 32 * 4
    assert (tmp_path / "m.onnx").stat().st_size < 1000
    close(ran(tmp_path / "m.onnx", [x]), ours(model, (x,)))
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]


def test_scans_in_reverse_of_nothing_and_without_rows(tmp_path: Path) -> None:
    def program(x: Any) -> Any:
        backwards = td.scan(lambda c, r: (c * 0.5 + r, c), x[0], x, reverse=True)
        counted = td.scan(lambda c, _: (c * 2, c), x[0], length=3)
        nothing = td.scan(lambda c, r: (c + r, c), x[0], x[:0])
        return backwards, counted, nothing

    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    export(program, (x,), tmp_path / "m.onnx")
    graph = td.trace(program, td.Spec((4, 2)))
    close(ran(tmp_path / "m.onnx", [x]), list(evaluate_float64(graph, {"x": x})))


X = td.Spec((4, 3))


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(td.ArgumentError, match="random_bits cannot be exported"):
        export(lambda x: td.dropout(x, 0.5), (X,), path)
    with pytest.raises(td.ArgumentError, match="opset = 12.*18 to 25"):
        export(lambda x: x, (X,), path, opset=12)
    with pytest.raises(td.ArgumentError, match="neither a compiled forward"):
        export(3, (X,), path)
    with pytest.raises(td.ArgumentError, match="depends on the batch: 4 and 9"):
        export(lambda x: x * x.shape[0], (X,), path, dynamic_batch=True)
    with pytest.raises(td.ArgumentError, match="another program for another size"):
        export(lambda x: x if x.shape[0] < 5 else x + 1, (X,), path, dynamic_batch=True)
    with pytest.raises(td.ArgumentError, match="no first axis of one size"):
        export(lambda x, y: x.sum() + y, (X, td.Spec(())), path, dynamic_batch=True)
    with pytest.raises(td.ArgumentError, match="1 input_names for 2 inputs"):
        export(lambda x, y: x + y, (X, X), path, input_names=["a"])
    with pytest.raises(td.NameTakenError, match="'x'"):
        export(lambda x: x * 2, (X,), path, output_names=["x"])
    with pytest.raises(td.ArgumentError, match="its value has the shape"):
        export(nn.Linear(3, 2), (X,), path, params={"weight": np.ones(3), "bias": np.ones(2)})
    with pytest.raises(td.ArgumentError, match="no value for 'bias'"):
        export(nn.Linear(3, 2), (X,), path, params={"weight": np.ones((2, 3))})
    assert not path.exists()


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_whose_heads_share_keys(opset: int, causal: bool, tmp_path: Path) -> None:
    def program(q: Any, k: Any, v: Any) -> Any:
        return td.attention(q, k, v, causal=causal, scale=0.3)

    rng = np.random.default_rng(1)
    shapes = ((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3))
    inputs = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    export(program, tuple(inputs), tmp_path / "m.onnx", opset=opset, dynamic_batch=True)
    exact = evaluate_float64(td.trace(program, *inputs), dict(zip("qkv", inputs, strict=True)))
    close(ran(tmp_path / "m.onnx", inputs), list(exact))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        td.ArgumentError, match=r'onnx is not installed.*pip install "treadle\[onnx\]"'
    ):
        export(lambda x: x, (X,), tmp_path / "m.onnx")
    with pytest.raises(td.ArgumentError, match="onnx is not installed"):
        load(b"")
