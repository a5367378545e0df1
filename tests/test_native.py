"""Programs compiled to machine code: within their contracts of the oracle, on any number of threads."""

from __future__ import annotations

import platform
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from graphs import random_graph
from test_trajectories import CASES as TRAJECTORIES
from treadle.autodiff.backward import differentiate
from treadle.codegen.llvm.driver import render_parts, render_program
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.ir.op import OPS, Op
from treadle.ir.ops.leaves import NAMED_LEAVES
from treadle.kernel.machine import NATIVE, Machine, target_name
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cpu.native import compile_object, compile_objects, processor
from treadle.runtime.cpu.program import NativeProgram
from treadle.runtime.cpu.targets import target_of
from treadle.schedule.schedule import schedule
from treadle.verify.samples import samples_of
from treadle.verify.sampling import Sample, sample_graph


def native(
    graph: Graph, threads: int = 1, fuse: bool = True, width: int | None = None
) -> NativeProgram:
    target = target_of(target_name(width or NATIVE), processor())
    program = schedule(graph, fuse, 2 * target.width)
    plan = assemble(program, plan_buffers(program))
    objects = [compile_object(render_program(program, target.machine), target)]
    return NativeProgram(graph, plan, objects, dict(program.constants), threads)


def rounded_inputs(graph: Graph, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    return {n: np.asarray(a).astype(types[n].dtype.numpy) for n, a in arrays.items()}


def check(
    graph: Graph, arrays: dict[str, np.ndarray], scale: float = 1.0, **keywords
) -> list[np.ndarray]:
    inputs = rounded_inputs(graph, arrays)
    expected = evaluate_float64(graph, inputs)
    found = native(graph, **keywords).run(inputs)
    for ours, theirs, type_ in zip(found, expected, graph.output_types, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == type_.dtype.numpy
        if type_.is_float:
            bound = 200 * type_.dtype.unit_roundoff * scale
            np.testing.assert_allclose(ours.astype(np.float64), theirs, rtol=bound, atol=bound)
        else:
            np.testing.assert_array_equal(ours, theirs)
    return list(found)


CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in OPS.values()
    if op not in NAMED_LEAVES
    for i, sample in enumerate(samples_of(op))
]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_every_op_equals_the_oracle(op: Op, sample: Sample) -> None:
    check(sample_graph(op, sample), sample.arrays(4))


@given(st.integers(0, 2**32), st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_random_programs_with_gradients(seed: int, steps: int) -> None:
    graph = random_graph(seed, steps)
    types = [graph.nodes[i].types[0] for i in graph.inputs]
    rng = np.random.default_rng(seed)
    arrays = {n: rng.uniform(-1, 1, graph.nodes[i].types[0].shape) for n, i in graph.leaves.items()}

    def loss(a, b, v):
        from treadle.frontend.tracing import emit

        return sum((r * 0.1).sum() for r in emit(graph, {"a": a, "b": b, "v": v}))

    both = differentiate(td.trace(loss, *types), ["a", "b", "v"]).graph
    if all(np.abs(x).max(initial=0) < 50 for x in evaluate_float64(both, arrays)):
        check(both, arrays, scale=50)


def network(x, w, v):
    h = td.gelu(x @ w)
    p = td.softmax(td.layer_norm(h) @ v)
    return (p * p).sum(), td.sort(p, -1)[0], td.cumsum(h, 0)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    graph = td.trace(network, td.Spec((67, 33)), td.Spec((33, 49)), td.Spec((49, 21)))
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=graph.nodes[i].types[0].shape) for n, i in graph.leaves.items()}
    inputs = rounded_inputs(graph, arrays)
    expected = check(graph, arrays, scale=20)
    program = native(graph, threads)
    for _ in range(3):
        for ours, theirs in zip(program.run(inputs), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("width", [1, 4, 8])
def test_elementwise_bits_do_not_depend_on_the_width(width: int) -> None:
    graph = td.trace(lambda x: td.tanh(x) * td.exp(x) + td.sin(x) / (1 + x * x), td.Spec((13, 7)))
    x = {"x": np.random.default_rng(0).normal(size=(13, 7))}
    np.testing.assert_array_equal(check(graph, x, width=width)[0], check(graph, x)[0])


def test_equal_kernels_are_compiled_once() -> None:
    def layers(x, w):
        for _ in range(5):
            x = td.tanh(x @ w)
        return x

    graph = td.trace(layers, td.Spec((4, 8)), td.Spec((8, 8)))
    program = schedule(graph, fuse=False)
    source = render_program(program, Machine(8))
    assert len(list(program.calls())) == 10
    assert source.count("define  void @kernel.") == 2


def test_parts_of_a_program_call_one_another() -> None:
    """Tiles of matmuls are shared by kernels of several texts, compiled at the same time."""
    graph = td.trace(network, td.Spec((67, 33)), td.Spec((33, 49)), td.Spec((49, 21)))
    target = target_of(target_name(NATIVE), processor())
    program = schedule(graph, True, 2 * target.width)
    texts = render_parts(program, replace(target.machine, lines_at_once=200))
    assert len(texts) > 3
    assert any("declare  void @tile" in text for text in texts)
    for text in texts:  # nothing is told to a text that it does not use
        named = re.findall(r"@[\w.]+", text)
        told = re.findall(r"^(?:declare  void )?(@(?:tile|body|table)[\w.]+)", text, re.MULTILINE)
        assert all(named.count(name) > 1 for name in told)
    whole = replace(target.machine, lines_at_once=10_000)
    assert render_parts(program, whole) == [render_program(program, whole)]
    constants, plan = dict(program.constants), assemble(program, plan_buffers(program))
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=graph.nodes[i].types[0].shape) for n, i in graph.leaves.items()}
    inputs, expected = (
        rounded_inputs(graph, arrays),
        native(graph).run(rounded_inputs(graph, arrays)),
    )
    for threads in (1, 3):
        objects = compile_objects(texts, target, threads)
        found = NativeProgram(graph, plan, objects, constants, 1).run(inputs)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_temporary_memory_is_shared() -> None:
    def chain(x, w):
        for _ in range(8):
            x = td.tanh(x @ w)
        return x.sum()

    graph = td.trace(chain, td.Spec((64, 64)), td.Spec((64, 64)))
    plan = plan_buffers(schedule(graph, fuse=False))
    assert plan.size == 2 * 64 * 64 * 4
    assert plan_buffers(schedule(graph)).size < plan.size


def test_nan_and_infinities_flow_as_ieee() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1.0, 3e38], np.float32)
    graph = td.trace(
        lambda x: (td.maximum(x, 0.0), td.exp(x), td.sqrt(x), x / x, td.relu(x), x > 0, td.max(x)),
        td.Spec((8,)),
    )
    check(graph, {"x": values})


def test_an_index_out_of_range_reads_inside() -> None:
    graph = td.trace(lambda x, i: x[i], td.Spec((3,)), td.Spec((2,), td.int32))
    (found,) = native(graph).run({"x": np.array([1.0, 2.0, 3.0]), "i": np.array([2, 10**6])})
    assert found.tolist() == [3.0, 3.0]


def test_non_contiguous_and_read_only_inputs() -> None:
    graph = td.trace(lambda x: x * 2, td.Spec((3, 4)))
    x = np.arange(24.0).reshape(4, 6).T[::2]
    x.flags.writeable = False
    np.testing.assert_array_equal(native(graph).run({"x": x})[0], x * 2)


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_training_natively_follows_the_oracle(name: str) -> None:
    model, _, x_shape, y_shape, classes, optimizer, _, clip, _ = TRAJECTORIES[name]
    rng = np.random.default_rng(0)
    y = td.Spec(y_shape, td.int32)
    specs = {"x": y if x_shape is None else td.Spec(x_shape), "y": y}

    def loss(model, batch):
        return td.losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)

    steps = {
        device: td.compile_step(model(), loss, optimizer(), specs, clip_norm=clip, device=device)
        for device in ("oracle", "cpu")
    }
    for _ in range(20):
        data = {"y": rng.integers(0, classes, y_shape)}
        data["x"] = (
            rng.integers(0, classes, y_shape) if x_shape is None else rng.normal(size=x_shape)
        )
        exact, native_ = (steps[d](data) for d in ("oracle", "cpu"))
        assert native_.loss == pytest.approx(exact.loss, rel=2e-4)
        assert native_.grad_norm == pytest.approx(exact.grad_norm, rel=2e-3)
    assert steps["cpu"].params.keys() == steps["oracle"].params.keys()
    assert all(v.dtype != np.float64 for v in steps["cpu"].params.values())


def test_a_native_step_resumes_bit_for_bit(tmp_path) -> None:
    def make():
        net = td.nn.Sequential(td.nn.Linear(5, 9), td.nn.Dropout(0.3), td.nn.Linear(9, 2))

        def loss(model, x):
            return (model(x) ** 2).mean()

        return td.compile_step(
            net, loss, td.optim.adamw(1e-2), td.Spec((4, 5)), device="cpu", accumulate=2
        )

    rng = np.random.default_rng(0)
    batches = rng.normal(size=(12, 4, 5))
    step = make()
    for b in batches[:5]:
        step(b)
    step.save(tmp_path / "state")
    expected = [step(b).loss for b in batches[5:]]
    other = make()
    other.load(tmp_path / "state")
    assert [other(b).loss for b in batches[5:]] == expected


def test_sharing_needs_one_device() -> None:
    step = td.compile_step(
        td.nn.Linear(2, 2),
        lambda m, x: (m(x) ** 2).mean(),
        td.optim.sgd(0.1),
        td.Spec((3, 2)),
        device="cpu",
    )
    with pytest.raises(td.DeviceError, match="'cpu', the program on 'oracle'"):
        td.compile_forward(
            td.nn.Linear(2, 2), lambda m, x: m(x), td.Spec((1, 2)), share=step, device="oracle"
        )
    predict = step.attach(lambda m, x: m(x), td.Spec((1, 2)))
    assert predict(np.ones((1, 2))).dtype == np.float32


@pytest.mark.skipif(platform.machine() != "x86_64", reason="relocations of x86-64")
def test_code_reaches_its_constants_wherever_they_are() -> None:
    """Distances have 64 bits: pages of code and of constants may be far apart."""
    text = """
    declare <4 x float> @llvm.sqrt.v4f32(<4 x float>)
    define internal <4 x float> @inner(<4 x float> %x) noinline {
      %y = fadd <4 x float> %x, <float 1.5, float 2.5, float 3.5, float 4.5>
      ret <4 x float> %y
    }
    define <4 x float> @outer(<4 x float> %x) {
      %y = call <4 x float> @inner(<4 x float> %x)
      %z = call <4 x float> @llvm.sqrt.v4f32(<4 x float> %y)
      ret <4 x float> %z
    }
    """
    code = compile_object(text)
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    kinds = set()
    for i in range(count):
        _, type_, _, _, at, nbytes = struct.unpack_from("<IIQQQQ", code, start + i * size)
        if type_ == 4:  # relocations with addends
            infos = (
                struct.unpack_from("<Q", code, at + 24 * k + 8)[0] for k in range(nbytes // 24)
            )
            kinds |= {info & 0xFFFFFFFF for info in infos}
    assert kinds, "constants are in memory"
    assert kinds <= {1, 24, 25, 29}  # R_X86_64_64, PC64, GOTOFF64, GOTPC64
