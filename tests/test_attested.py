"""Library calls beside the oracle: what is right is attested with its deviation, what is not is refused."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treadle as td
from fake_cuda import FakeDriver, fake_gpu
from test_cuda_attention import backward, forward
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes
from treadle.base.errors import GraphError
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.kernel.launch import LibraryLaunch, MatmulCall, MatrixFacts, call_of, matmul_call_of
from treadle.runtime.cuda import program as programs
from treadle.schedule.schedule import GPU, schedule
from treadle.verify import library
from treadle.verify.library import attest

# Also where few scores would be faster by the definition.
SHORT = replace(GPU.matmuls, short_scores=1, short_biased_scores=1)
FULL = replace(GPU, has_attention=True, has_conv=True, matmuls=SHORT)


def calls_of(graph: Graph) -> dict[str, LibraryLaunch]:
    program = schedule(graph, target=FULL)
    return {f.name: f for k in program.distinct() if (f := call_of(k)) is not None}


def view(buffer: np.ndarray, tensor: Any) -> np.ndarray:
    steps = tuple(s * buffer.itemsize for s in tensor.strides)
    return np.lib.stride_tricks.as_strided(buffer[tensor.start :], tensor.shape, steps)


Routine = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def computing(call: LibraryLaunch, routine: Routine) -> library.Compute:
    """A library that computes in float64 and rounds."""

    def compute(buffers: list[np.ndarray]) -> list[np.ndarray]:
        given = [view(buffers[t.argument], t).astype(np.float64) for t in call.operands]
        for tensor, made in zip(call.results, routine(given), strict=False):
            into = view(buffers[tensor.argument], tensor)
            into[...] = np.asarray(made).reshape(into.shape).astype(into.dtype)
        return buffers

    return compute


# Matmuls


def matmul(dtype: str = "bfloat16", **changes: Any) -> MatmulCall:
    """(33, 40) · (40, 24), three of them; the right operand lies transposed."""
    target = MatrixFacts(dtype, 24, 1, 33 * 24, 0)
    left, right = MatrixFacts(dtype, 40, 1, 33 * 40, 8), MatrixFacts(dtype, 1, 40, 960, 0)
    return replace(MatmulCall(33, 24, 40, 3, target, left, right), **changes)


def multiplied(call: MatmulCall, off: float = 0.0, forgets: str = "") -> library.Compute:
    """What cuBLASLt would give, with an error if one is asked for."""

    def matrix(array: np.ndarray, facts: MatrixFacts, m: int, n: int, b: int) -> np.ndarray:
        steps = (facts.rows * array.itemsize, facts.columns * array.itemsize)
        start = array[facts.start + b * facts.batch :]
        return np.lib.stride_tricks.as_strided(start, (m, n), steps)

    def compute(arrays: list[np.ndarray]) -> list[np.ndarray]:
        left, right, *others, target = arrays
        bias = others.pop(0).astype(np.float32) if call.bias >= 0 else 0.0
        for b in range(call.batch):
            x = matrix(left, call.left, call.m, call.k, b).astype(np.float32)
            y = matrix(right, call.right, call.k, call.n, b).astype(np.float32)
            into = matrix(target, call.target, call.m, call.n, b)
            found = x @ y
            for scale in others:
                found = found * (1.0 if forgets == "scales" else scale[0])
            found = found + (0.0 if forgets == "bias" else bias) + off
            if call.adds and forgets != "adds":
                found = found + into.astype(np.float32)
            into[...] = found.astype(into.dtype)
        return arrays

    return compute


KINDS = {
    "plain": matmul(),
    "float32": matmul("float32"),
    "bias": matmul(bias=2),
    "adds": matmul("float32", adds=True),
    "scales": matmul("float16", scales=((2, 0), (3, 0))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_matmuls_are_attested(kind: str) -> None:
    claim = attest(KINDS[kind], multiplied(KINDS[kind]), "contract_1")
    assert claim.is_established
    assert str(claim) == "library contract_1: attested"
    assert "(33, 40) · (40, 24)" in claim.spec
    assert claim.measured["elements"] > 100
    assert claim.measured["share of what is allowed"] <= 1
    assert json.loads(json.dumps(claim.record))["measured"] == claim.measured


@pytest.mark.parametrize(
    ("kind", "defect"),
    [("plain", {"off": 0.5}), ("bias", {"forgets": "bias"}), ("adds", {"forgets": "adds"}),
     ("scales", {"forgets": "scales"}), ("float32", {"off": 1e-3})],
)  # fmt: skip
def test_wrong_matmuls_are_refused(kind: str, defect: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match="the library's matmul"):
        attest(KINDS[kind], multiplied(KINDS[kind], **defect), "contract_1")


def test_a_matmul_on_other_elements_is_refused() -> None:
    """Operands that lie otherwise than the call says."""
    call = matmul()
    moved = replace(call, left=replace(call.left, start=0))
    with pytest.raises(GraphError, match="not what the op is"):
        attest(call, multiplied(moved), "contract_1")


# Attention


def attention_graph(causal: bool, bias: bool) -> Graph:
    q, kv = td.Spec((2, 4, 24, 16), td.bfloat16), td.Spec((2, 2, 24, 16), td.bfloat16)

    def loss(q, k, v, b):
        found = td.attention(q, k, v, b if bias else None, causal=causal)
        return (found.astype(td.float32) ** 2).sum()

    types = q, kv, kv, td.Spec((2, 1, 1, 24), td.bfloat16)
    return differentiate(td.trace(loss, *types), list("qkv")).graph


def attending(call: LibraryLaunch, **changes: float) -> library.Compute:
    numbers = dict(call.numbers) | changes
    routine = backward if "grad" in call.name else forward
    shapes = [t.shape for t in call.results]

    def run(given: Sequence[np.ndarray]) -> Any:
        given = [g[..., 0] if i == 2 and "grad" in call.name and g.ndim == 4 else g
                 for i, g in enumerate(given)]  # fmt: skip
        return routine(numbers, shapes, *given)

    return computing(call, run)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_is_attested(causal: bool, bias: bool) -> None:
    calls = calls_of(attention_graph(causal, bias))
    assert set(calls) == {"attention", "attention_grad"}
    for name, call in calls.items():
        claim = attest(call, attending(call), name)
        assert 0 < claim.measured["share of what is allowed"] <= 1
        assert claim.spec.startswith(f"{name}(bfloat16")


@pytest.mark.parametrize("name", ["attention", "attention_grad"])
@pytest.mark.parametrize("changes", [{"scale": 0.5}, {"causal": 0.0}], ids=str)
def test_wrong_attention_is_refused(name: str, changes: dict[str, float]) -> None:
    call = calls_of(attention_graph(True, False))[name]
    with pytest.raises(GraphError, match=f"the library's {name}"):
        attest(call, attending(call, **changes), name)


# Convolutions


def conv_graph(groups: int = 1) -> Graph:
    image, weight = td.Spec((3, 8, 9, 10)), td.Spec((16, 8 // groups, 3, 3))

    def loss(x, w):
        return (td.conv(x, w, stride=(2, 1), padding=(1, 2), groups=groups) ** 2).sum()

    return differentiate(td.trace(loss, image, weight), ["x", "w"]).graph


def convolving(call: LibraryLaunch, spoiled: bool = False) -> library.Compute:
    shapes = [t.shape for t in call.operands]
    graph = library._definition(call, shapes, [t.shape for t in call.results])

    def run(given: Sequence[np.ndarray]) -> Any:
        found = evaluate_float64(graph, {str(i): g for i, g in enumerate(given)})
        return [np.flip(f, -1) for f in found] if spoiled else found

    return computing(call, run)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_attested(groups: int) -> None:
    calls = calls_of(conv_graph(groups))
    assert set(calls) == {"conv", "conv_grad_x", "conv_grad_w"}
    for name, call in calls.items():
        assert attest(call, convolving(call), name).measured["elements"] > 50
        with pytest.raises(GraphError, match=f"the library's {name}"):
            attest(call, convolving(call, spoiled=True), name)


def test_a_large_call_is_compared_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LARGE", 2**8)
    calls = calls_of(attention_graph(True, True)) | calls_of(conv_graph())
    for name, call in calls.items():
        compute = convolving(call) if "conv" in name else attending(call)
        whole = sum(int(np.prod(t.shape)) for t in call.results)
        assert 0 < attest(call, compute, name).measured["elements"] < whole


# On a device


class HostMatmul:
    """cuBLASLt on the host's memory."""

    off = 0.0

    def __init__(self, matmul: MatmulCall):
        self.matmul, self.words = matmul, [0] * 8

    def choose(self, *addresses: int) -> None: ...

    def use(self, words: Sequence[int]) -> None: ...

    def run(
        self, target: int, left: int, right: int, bias: int = 0, *scales: int, stream: Any = None
    ) -> int:
        call = self.matmul

        def at(address: int, facts: MatrixFacts, m: int, n: int) -> np.ndarray:
            dtype = dtypes.BY_NAME[facts.dtype].numpy
            count = library._reach(facts, m, n, call.batch)
            memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
            return np.frombuffer(memory, dtype)

        places = [at(left, call.left, call.m, call.k), at(right, call.right, call.k, call.n)]
        places.append(at(target, call.target, call.m, call.n))
        multiplied(call, self.off)(places)
        return 0


def step_on_the_fake(options: td.CompileOptions) -> td.TrainStep:
    specs = {"x": td.Spec((256, 512)), "y": td.Spec((256, 512))}
    return td.compile_step(
        td.nn.Linear(512, 512), lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(),
        td.optim.sgd(0.1), specs, device="cuda", options=options,
    )  # fmt: skip


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_a_step_attests_its_calls(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMatmul, "off", off)
    monkeypatch.setattr(programs, "Matmul", HostMatmul)
    monkeypatch.setattr(programs, "chosen_batches", lambda *_: {})
    with fake_gpu(FakeDriver()):
        if off:
            with pytest.raises(GraphError, match="the library's matmul"):
                step_on_the_fake(td.CompileOptions(verify="full"))
            return
        claims = step_on_the_fake(td.CompileOptions(verify="full")).report.claims
        found = [c for c in claims if c.kind == "library"]
        assert found
        assert all(0 <= c.measured["share of what is allowed"] <= 1 for c in found)
        assert all(c.lines for c in found)
        assert not step_on_the_fake(td.CompileOptions()).report.claims


def test_every_standalone_matmul_has_a_call() -> None:
    graph = td.trace(lambda x, w: x @ w, td.Spec((256, 512)), td.Spec((512, 512)))
    (kernel,) = schedule(graph, target=FULL).distinct()
    assert matmul_call_of(kernel) is not None
