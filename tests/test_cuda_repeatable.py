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
from treadle.runtime.cuda import conv, dnn, dnn_backend
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import (
    ConvCall,
    NoLibraryCallError,
    PlannedConvolutions,
    unpacked_convolution,
)
from treadle.runtime.cuda.dnn_backend import Kind, Type

TENSOR_CORE, NONDETERMINISTIC = 0, 4  # cuDNN's numbers of notes
# As cuDNN proposes gradients of weights: its favourite adds in any order.
PLANS = [{NONDETERMINISTIC}, {TENSOR_CORE}, set[int](), {NONDETERMINISTIC}, set[int]()]


class Backend:
    """cuDNN's C interface: descriptors by number, with their attributes."""

    def __init__(self) -> None:
        self.known: dict[int, dict[int, list[Any]]] = {}
        self.kinds: dict[int, int] = {}
        self.finalized: set[int] = set()
        self.refused: set[int] = set()  # plans that cannot be built
        self.compiled: set[int] = set()  # plans whose kernels are compiled when they are built
        self.built: list[int] = []
        self.handles: list[int] = []
        self.is_written = True  # whether plans have a text
        self.cudnnBackendDestroyDescriptor = lambda address: self.known.pop(address.value) and 0

    def cudnnCreate(self, found: Any) -> int:
        found._obj.value = 7 + len(self.handles)
        self.handles.append(found._obj.value)
        return 0

    def cudnnBackendCreateDescriptor(self, kind: Any, found: Any) -> int:
        found._obj.value = address = 1000 + len(self.kinds)
        self.known[address], self.kinds[address] = {}, kind.value
        return 0

    def cudnnBackendSetAttribute(
        self, at: Any, name: int, type_: Any, count: Any, values: Any
    ) -> int:
        assert at.value not in self.finalized, "it is finished"
        found = list(values)
        assert len(found) == count.value
        if type_.value == Type.DESCRIPTOR:
            assert set(found) <= self.finalized, "what it refers to comes first"
        self.known[at.value][name] = found
        return 0

    def cudnnBackendFinalize(self, at: Any) -> int:
        own = self.known[at.value]
        if self.kinds[at.value] == Kind.PLAN:
            assert own[400][0] in self.handles
            own[402] = [0]  # bytes of workspace
            number = own[405][0][0] - b"0"[0] if 405 in own else self.known[own[401][0]][0][0]
            if number in self.refused or (405 in own and not self.is_written):
                return 3000
            self.built.append(number)
        self.finalized.add(at.value)
        return 0

    def cudnnBackendGetAttribute(
        self, at: Any, name: int, type_: Any, most: Any, count: Any, values: Any
    ) -> int:
        if name == 405:
            if not self.is_written:
                return 3000
            if most.value:
                values[0] = b"%d" % self.known[self.known[at.value][401][0]][0][0]
            count._obj.value = 1
            return 0
        found = self._found(at.value, name, values)
        if name not in (202, 300):
            values[: len(found)] = found
        count._obj.value = len(found)
        return 0

    def _found(self, at: int, name: int, values: Any) -> list[int]:
        """Attributes that are read; those that are descriptors are filled in."""
        own = self.known[at]
        if name == 202:  # what a heuristic proposes; fallbacks are the last one's
            every = range(len(PLANS)) if own[200] == [3] else range(len(PLANS) - 1, len(PLANS))
            for i, address in zip(every, values, strict=False):
                self.known[address][0] = [i]
                self.finalized.add(address)
            return list(every)
        if name == 300:
            self.known[values[0]][0] = own[0]
            return [0]
        if name == 1305:
            return [0] if own[0][0] in self.compiled else []
        return sorted(PLANS[own[0][0]]) if name == 1303 else own[name]

    def number_of(self, made: ConvCall) -> int:
        """Which of the plans it is."""
        (config,) = self.known[made.graph.address.value][401]
        found: int = self.known[config][0][0]
        return found


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """cuDNN's C interface; its plans are slower and slower."""
    found = Backend()
    monkeypatch.setattr(dnn_backend, "library", lambda: found)
    monkeypatch.setattr(conv, "device", lambda: SimpleNamespace(enter=lambda: None))
    monkeypatch.setattr(conv, "_time", lambda made, *_: float(found.number_of(made)))
    dnn_backend.shared_handle.cache_clear()
    dnn_backend._spare.clear()
    yield found
    dnn_backend.shared_handle.cache_clear()
    dnn_backend._spare.clear()


class Graph:
    """A description to cuDNN's frontend."""

    made: ClassVar[list[Graph]] = []

    def __init__(self, **_: object):
        self.options: dict[str, Any] = {}
        Graph.made.append(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self  # tensors, results and steps on the way: anything

    def sdpa_backward(self, **options: Any) -> list[Graph]:
        self.options = options
        return [self, self, self]

    def get_workspace_size(self) -> int:
        return 0


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN's frontend."""
    library: Any = ModuleType("cudnn")
    names = SimpleNamespace(A=0, FALLBACK=1, BFLOAT16=0, HALF=1, FLOAT=2)
    library.heur_mode = library.data_type = names
    library.pygraph, library.create_handle = Graph, object
    monkeypatch.setitem(sys.modules, "cudnn", library)
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


def planned(backend: Backend, call: LibraryLaunch, is_deterministic: bool) -> int:
    (made,) = PlannedConvolutions({3: call}, is_deterministic).fastest(lambda entry: [0]).values()
    return backend.number_of(made)


@pytest.mark.parametrize("called", ["conv", "conv_grad_x", "conv_grad_w"])
@pytest.mark.parametrize(("dtype", "fast", "same"), [("float32", 0, 2), ("bfloat16", 0, 1)])
def test_convolutions_that_repeat_take_no_plan_that_adds_in_any_order(
    backend: Backend, called: str, dtype: str, fast: int, same: int
) -> None:
    call = call_of(called, dtype)
    assert planned(backend, call, False) == fast
    assert planned(backend, call, True) == same


def test_plans_that_cannot_be_built_are_passed_over(backend: Backend) -> None:
    backend.refused = {0, 1}
    assert planned(backend, call_of("conv", "bfloat16"), False) == 2
    backend.refused = {0, 1, 2, 3}
    assert planned(backend, call_of("conv", "bfloat16"), False) == 4, "beyond those that are timed"


def test_of_plans_that_are_compiled_the_first_alone_is_built(backend: Backend) -> None:
    backend.compiled = {0, 3}
    assert planned(backend, call_of("conv", "bfloat16"), False) == 0
    assert backend.built == [0]
    backend.compiled, backend.built = {1, 2}, []
    assert planned(backend, call_of("conv", "bfloat16"), False) == 0
    assert backend.built == [0], "nor are the others beside one that is there"


def test_threads_that_build_plans_share_no_handle(backend: Backend) -> None:
    calls = dict.fromkeys(range(5), call_of("conv", "bfloat16"))
    made = PlannedConvolutions(calls, False).fastest(lambda entry: [0])
    used = [backend.known[m.graph.address.value][400][0] for m in made.values()]
    assert dnn_backend.shared_handle().value not in used


@pytest.mark.parametrize("is_written", [True, False])
def test_a_packed_plan_is_its_text_or_its_number(backend: Backend, is_written: bool) -> None:
    call = call_of("conv", "float32")
    (made,) = PlannedConvolutions({3: call}, True).fastest(lambda entry: [0]).values()
    assert made.number == 2, "the first of those that may be taken"
    backend.is_written = is_written
    packed = made.packed()
    backend.is_written, backend.built = True, []
    again = unpacked_convolution(call, packed)
    assert again is not None
    assert (again.number, backend.built) == (2, [2])


def test_a_convolution_that_cannot_repeat_is_its_definition(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PLANS", [{NONDETERMINISTIC}] * 3)
    call = call_of("conv_grad_w", "float32")
    assert planned(backend, call, False) == 0
    with pytest.raises(NoLibraryCallError, match="no plan"):
        planned(backend, call, True)


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
