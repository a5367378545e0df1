"""The same bits in every run: which plans of a library may be taken, and where they are kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

import treadle as td
from fake_cuda import fake_gpu
from treadle.backends.cuda import backend as cuda_backend
from treadle.backends.stored import key_of
from treadle.kernel.launch import LibraryLaunch, Tensor
from treadle.runtime.cuda import conv, dnn
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import NoLibraryCallError, planned_convolution

NONDETERMINISTIC, TENSOR_CORE, DOWN_CONVERT = "NONDETERMINISTIC", "TENSOR_CORE", "DOWN_CONVERT"
# As cuDNN proposes gradients of weights: its favourite adds in any order.
PLANS = [{NONDETERMINISTIC}, {TENSOR_CORE}, set[str](), {NONDETERMINISTIC}, set[str]()]


class Graph:
    """A description to cuDNN: a plan with a note that is deselected cannot be built."""

    made: ClassVar[list[Graph]] = []

    def __init__(self, **_: object):
        self.barred: set[str] = set()
        self.plan: int | None = None
        self.options: dict[str, Any] = {}
        Graph.made.append(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self  # tensors, results and steps on the way: anything

    def sdpa_backward(self, **options: Any) -> list[Graph]:
        self.options = options
        return [self, self, self]

    def get_execution_plan_count(self) -> int:
        return len(PLANS)

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.barred |= set(notes)

    def build_plan_at_index(self, i: int) -> None:
        if PLANS[i] & self.barred:
            raise RuntimeError("deselected")
        self.plan = i

    def get_workspace_size(self) -> int:
        return 0


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN's frontend; plans are slower and slower."""
    library: Any = ModuleType("cudnn")
    names = SimpleNamespace(A=0, FALLBACK=1, BFLOAT16=0, HALF=1, FLOAT=2)
    library.heur_mode = library.data_type = names
    library.numerical_note = SimpleNamespace(
        NONDETERMINISTIC=NONDETERMINISTIC, TENSOR_CORE=TENSOR_CORE, DOWN_CONVERT_INPUTS=DOWN_CONVERT
    )
    library.pygraph, library.create_handle = Graph, object
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setattr(conv, "_time", lambda made, *_: float(made.graph.plan))
    Graph.made.clear()
    known = dnn.handle, dnn.data_types
    for cached in known:
        cached.cache_clear()
    yield
    for cached in known:
        cached.cache_clear()


def call_of(name: str, dtype: str, operands: int = 2, results: int = 1) -> LibraryLaunch:
    tensors = [Tensor(i, dtype, 0, (2, 3, 4, 4), (48, 16, 4, 1)) for i in range(operands + results)]
    numbers = {f"{n}{i}": 1.0 for n in ("low", "high", "stride", "dilation") for i in range(2)}
    numbers |= {"scale": 1.0, "causal": 0.0}
    return LibraryLaunch(
        name, tuple(tensors[operands:]), tuple(tensors[:operands]), tuple(numbers.items())
    )


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("called", ["conv", "conv_grad_x", "conv_grad_w"])
@pytest.mark.parametrize(("dtype", "fast", "same"), [("float32", 0, 2), ("bfloat16", 0, 1)])
def test_convolutions_that_repeat_take_no_plan_that_adds_in_any_order(
    called: str, dtype: str, fast: int, same: int
) -> None:
    call = call_of(called, dtype)
    assert planned_convolution(call, False, list).graph.plan == fast
    assert planned_convolution(call, True, list).graph.plan == same


@pytest.mark.usefixtures("cudnn")
def test_a_convolution_that_cannot_repeat_is_its_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PLANS", [{NONDETERMINISTIC}] * 3)
    call = call_of("conv_grad_w", "float32")
    assert planned_convolution(call, False, list).graph.plan == 0
    with pytest.raises(NoLibraryCallError, match="none of 3 plans"):
        planned_convolution(call, True, list)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_attention_that_repeats_is_asked_for(is_deterministic: bool) -> None:
    planned_attention(call_of("attention_grad", "bfloat16", 6, 3), is_deterministic)
    assert Graph.made[-1].options["use_deterministic_algorithm"] is is_deterministic


def test_plans_that_repeat_are_kept_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("compiler_version", "blas_version", "dnn_version"):
        monkeypatch.setattr(cuda_backend, version, lambda: "1")
    graph = td.trace(lambda x: x + 1, td.Spec((2,)))
    with fake_gpu():
        options = [td.CompileOptions(deterministic=d) for d in (True, False, True)]
        keys = [key_of(graph, o, cuda_backend.CUDA.toolchain(o)) for o in options]
    assert keys[0] == keys[2] != keys[1]
