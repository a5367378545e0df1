"""Convolutions through cuDNN: forward, and the gradients of image and weight.

cuDNN proposes plans, its best first. The first few of every call are built at the same time; then
the fastest is taken, by timing. Where the first is one whose kernel cuDNN compiles, it is the only
one: that takes a third of a second, and plans without are ten times slower there (depthwise).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from treadle.kernel.launch import LibraryLaunch, Tensor
from treadle.kernel.target import GPU
from treadle.runtime.cpu.processors import default_threads
from treadle.runtime.cuda.device import Block, Event, device
from treadle.runtime.cuda.dnn_backend import (
    BackendError,
    Descriptor,
    Kind,
    Type,
    execute,
    handle,
    own_handle,
    pointers,
)
from treadle.runtime.cuda.workers import Asked, PlanWorker

TRIES, MOST_WORKSPACE = GPU.launching.conv_plans, GPU.launching.conv_workspace
REPEATS = 3
MOST_PROPOSED = 32
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}
_CROSS_CORRELATION = 1
_BEST, _FALLBACK = 3, 2  # modes of heuristics: what is likely fast, and what runs in any case
_TENSOR_CORES, _NARROWED, _VARYING = 0, 1, 4  # notes on how an engine computes
_COMPILED = 0  # and on how it behaves
# Attributes of each operation: factors of the convolution and of what was there, its description,
# and tensors in the order of operands and results.
_OPERATIONS = {
    "conv": (Kind.CONV, 700, 701, 702, (704, 703, 705)),
    "conv_grad_x": (Kind.CONV_GRAD_X, 706, 707, 708, (711, 709, 710)),
    "conv_grad_w": (Kind.CONV_GRAD_W, 712, 713, 714, (717, 716, 715)),
}


Planned = TypeVar("Planned")


class NoLibraryCallError(Exception):
    """A library has no plan for a call, and for those of `others`."""

    def __init__(self, call: LibraryLaunch, cause: str, others: Sequence[NoLibraryCallError] = ()):
        super().__init__(f"{call.name}: {cause}")
        self.causes: list[tuple[LibraryLaunch, str]] = [(call, str(self))]
        self.causes += [cause for other in others for cause in other.causes]
        self.call, self.cause = call, cause


def every_planned(
    calls: Mapping[int, LibraryLaunch], plan: Callable[[int, LibraryLaunch], Planned]
) -> dict[int, Planned]:
    """Calls with their plans. All that have none are named at once: a program that was scheduled
    again for each of them would take as often as long."""
    found, missing = dict[int, Planned](), list[NoLibraryCallError]()
    for i, call in calls.items():
        try:
            found[i] = plan(i, call)
        except NoLibraryCallError as error:
            missing.append(error)
    if missing:
        first, *others = missing
        raise NoLibraryCallError(first.call, first.cause, others) from first
    return found


class ConvCall:
    """A convolution with its plan, ready to be run on any addresses."""

    def __init__(self, call: LibraryLaunch, plan: Descriptor, number: int):
        self.call, self.graph = call, plan
        self.number = number  # among the configurations that are proposed
        (self.workspace,) = plan.numbers(402, Type.INT64, 1)

    def run(self, addresses: Sequence[int], workspace: int, stream: object) -> None:
        """Put it into a stream; addresses are those of the call's buffers."""
        tensors = (*self.call.operands, *self.call.results)
        where = [addresses[t.argument] + t.start * _itemsize(t) for t in tensors]
        given = pointers(range(1, len(tensors) + 1), where, workspace)
        execute(self.graph, given, stream)

    def packed(self) -> bytes:
        """The plan, for `unpacked_convolution`: its number, and its text if cuDNN gives one."""
        try:
            text = self.graph.text(405)
        except BackendError:
            text = b""
        return b"%d\n%s" % (self.number, text)


def unpacked_convolution(call: LibraryLaunch, plan: bytes) -> ConvCall | None:
    """The call with a plan that was packed; None if there is no such plan.

    cuDNN does not write every plan down: others are built anew, by their number.
    """
    digits, _, text = plan.partition(b"\n")
    number = int(digits)
    try:
        if text:
            # The text before the handle, as the library's own frontend has it.
            made = Descriptor(Kind.PLAN).set_text(405, text).set(400, Type.HANDLE, handle().value)
            return ConvCall(call, made.finalized(), number)
    except BackendError:
        pass  # it is of another version, say
    return numbered_convolution(call, number)


def numbered_convolution(call: LibraryLaunch, number: int) -> ConvCall | None:
    """The call with one of the plans that are proposed."""
    found = [p for p in _proposed(call, set()) if p.number == number]
    return _built(call, found[0]) if found else None


def first_call() -> LibraryLaunch:
    """A small depthwise convolution: planning it loads cuDNN's parts and starts its compiler."""
    shapes = ((1, 64, 8, 8), (64, 1, 3, 3), (1, 64, 8, 8))
    x, weight, out = (_channels_last(i, shape) for i, shape in enumerate(shapes))
    names = ("low", "high", "stride", "dilation")
    numbers = tuple((f"{n}{i}", 1.0) for n in names for i in range(2))
    return LibraryLaunch("conv", (out,), (x, weight), numbers)


def _channels_last(number: int, shape: tuple[int, int, int, int]) -> Tensor:
    _, c, h, w = shape
    return Tensor(number, "bfloat16", 0, shape, (h * w * c, 1, w * c, c))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration of an engine, and its number among all that cuDNN proposes."""

    number: int
    config: Descriptor

    def notes(self, name: int, type_: Type) -> set[int]:
        (engine,) = self.config.descriptors(300, Kind.ENGINE, 1)
        return set(engine.numbers(name, type_, 16))

    @property
    def is_compiled(self) -> bool:
        """Whether cuDNN compiles its kernel when a plan is built."""
        return _COMPILED in self.notes(1305, Type.BEHAVIOUR)


Begun = tuple[list[ConvCall | None], list[Proposal]]


class PlannedConvolutions:
    """Calls whose first plans are built at the same time, while other work goes on.

    To give the same bits in every run each takes the first plan that runs. Plans whose kernels are
    compiled are built here and by workers, whoever is free.
    """

    def __init__(
        self,
        calls: Mapping[int, LibraryLaunch],
        is_deterministic: bool,
        workers: Sequence[PlanWorker] = (),
    ):
        self._calls = calls
        handle()  # before threads make their own
        self._builders = SimpleQueue[PlanWorker | None]()
        self._builders.put(None)  # this process
        for worker in workers:
            threading.Thread(target=self._admit, args=(worker,), daemon=True).start()
        pool = ThreadPoolExecutor(max(1, min(len(calls), default_threads())))
        self._begun = {i: pool.submit(self._begin, c, is_deterministic) for i, c in calls.items()}
        pool.shutdown(wait=False)

    def _admit(self, worker: PlanWorker) -> None:
        if worker.is_ready():
            self._builders.put(worker)

    def fastest(self, memory: Callable[[int], Sequence[int]]) -> dict[int, ConvCall]:
        """Calls with the fastest of these plans, timed on memory for their buffers."""

        def fastest(i: int, call: LibraryLaunch) -> ConvCall:
            built, others = self._begun[i].result()
            rest = (_built(call, proposal) for proposal in others)
            return _fastest(call, built, rest, memory(i))

        return every_planned(self._calls, fastest)

    def _begin(self, call: LibraryLaunch, is_deterministic: bool) -> Begun:
        """The plans that are timed, and others that may be built."""
        device().enter()  # the context is a thread's
        unwanted = {_VARYING} if is_deterministic else set()
        if call.operands[0].dtype == "float32":
            # 32 bits are what was asked for: not the fewer that tensor cores multiply.
            unwanted |= {_TENSOR_CORES, _NARROWED}
        with own_handle():
            every = _proposed(call, unwanted)
            if every and every[0].is_compiled:
                return [self._compiled(call, every[0])], every[1:]
            tried = every[: 1 if is_deterministic else TRIES]
            tried = [p for p in tried if not p.is_compiled]
            return [_built(call, p) for p in tried], [p for p in every if p not in tried]

    def _compiled(self, call: LibraryLaunch, proposal: Proposal) -> ConvCall | None:
        worker = self._builders.get()
        if worker is None:
            made = _built(call, proposal)
        else:
            plan = worker.planned(Asked(call, proposal.number))
            if plan is None:  # it is gone: somebody else builds it
                return self._compiled(call, proposal)
            made = unpacked_convolution(call, plan) if plan else None
        self._builders.put(worker)
        return made


def _proposed(call: LibraryLaunch, unwanted: set[int]) -> list[Proposal]:
    """Configurations of engines that compute a call, the best first; none with some notes."""
    found: list[Descriptor] = []
    try:
        graph = _described(call)
        for mode in (_BEST, _FALLBACK):
            asked = Descriptor(Kind.HEURISTIC).set(201, Type.DESCRIPTOR, graph)
            asked.set(200, Type.HEURISTIC_MODE, mode).finalized()
            found += asked.descriptors(202, Kind.CONFIGURATION, MOST_PROPOSED)
    except BackendError as error:
        raise NoLibraryCallError(call, str(error)) from error
    every = [Proposal(i, config) for i, config in enumerate(found)]
    return [p for p in every if not unwanted or not unwanted & p.notes(1303, Type.NOTE)]


def _described(call: LibraryLaunch) -> Descriptor:
    """A graph of one operation: it reads and writes narrow floats and sums in float32."""
    low, high, stride, dilation = (_along(call, n) for n in ("low", "high", "stride", "dilation"))
    shape = Descriptor(Kind.CONVOLUTION).set(100, Type.DATA_TYPE, _DTYPES["float32"])
    shape.set(101, Type.CONVOLUTION_MODE, _CROSS_CORRELATION).set(106, Type.INT64, len(low))
    shape.set(102, Type.INT64, *dilation).set(103, Type.INT64, *stride)
    shape.set(104, Type.INT64, *high).set(105, Type.INT64, *low).finalized()
    kind, one, zero, description, attributes = _OPERATIONS[call.name]
    operation = Descriptor(kind).set(description, Type.DESCRIPTOR, shape)
    operation.set(one, Type.FLOAT, 1.0).set(zero, Type.FLOAT, 0.0)
    tensors = (*call.operands, *call.results)
    for i, (attribute, tensor) in enumerate(zip(attributes, tensors, strict=True)):
        operation.set(attribute, Type.DESCRIPTOR, _tensor(tensor, i + 1))
    graph = Descriptor(Kind.GRAPH).set(800, Type.HANDLE, handle().value)
    return graph.set(801, Type.DESCRIPTOR, operation.finalized()).finalized()


def _along(call: LibraryLaunch, name: str) -> list[int]:
    """A number of each axis in space: two at least, as the library has it."""
    numbers = dict(call.numbers)
    count = len(call.operands[0].shape) - 2
    alone = [] if count > 1 else [0 if name in ("low", "high") else 1]
    return alone + [int(numbers[f"{name}{i}"]) for i in range(count)]


def _tensor(tensor: Tensor, number: int) -> Descriptor:
    """A sequence is an image of one row."""
    shape, strides = list(tensor.shape), list(tensor.strides)
    if len(shape) == 3:
        shape.insert(2, 1)
        strides.insert(2, tensor.shape[2] * tensor.strides[2])
    made = Descriptor(Kind.TENSOR).set(906, Type.INT64, number)
    made.set(901, Type.DATA_TYPE, _DTYPES[tensor.dtype]).set(900, Type.INT64, 16)
    made.set(902, Type.INT64, *shape).set(903, Type.INT64, *strides)
    return made.finalized()


def _built(call: LibraryLaunch, proposal: Proposal) -> ConvCall | None:
    """A plan; None where this engine cannot compute it after all."""
    try:
        plan = Descriptor(Kind.PLAN).set(400, Type.HANDLE, handle().value)
        plan.set(401, Type.DESCRIPTOR, proposal.config).finalized()
        made = ConvCall(call, plan, proposal.number)
    except BackendError:
        return None
    return made if made.workspace <= MOST_WORKSPACE else None


def _fastest(
    call: LibraryLaunch,
    built: Sequence[ConvCall | None],
    rest: Iterable[ConvCall | None],
    addresses: Sequence[int],
) -> ConvCall:
    """Of those that are built and run; or else the first of the rest that does."""
    best: Timed | None = None
    for made in built:
        best = _faster(best, made, addresses)
    if best is None:  # what is proposed beside them is built only now
        best = next(filter(None, (_faster(None, made, addresses) for made in rest)), None)
    if best is None:
        raise NoLibraryCallError(call, "no plan of those that are proposed runs")
    return best[1]


Timed = tuple[float, ConvCall]  # milliseconds


def _faster(best: Timed | None, made: ConvCall | None, addresses: Sequence[int]) -> Timed | None:
    """The best so far, or a plan that is faster; one that cannot be run is not."""
    try:
        taken = _time(made, addresses, best[0] if best else float("inf")) if made else None
    except BackendError:
        return best
    return (taken, made) if made and taken is not None and (not best or taken < best[0]) else best


def _time(made: ConvCall, addresses: Sequence[int], best: float) -> float:
    """Milliseconds: after a run that loads the kernel, one, and more if it is not far slower."""
    start, end = Event(timed=True), Event(timed=True)
    workspace = Block(made.workspace)

    def taken(count: int) -> float:
        start.record()
        for _ in range(count):
            made.run(addresses, workspace.address, device().stream)
        end.record()
        end.wait()
        return end.milliseconds_since(start) / count

    taken(1)
    once = taken(1)
    return once if once > 2 * best else min(once, taken(REPEATS), taken(REPEATS))


def _itemsize(tensor: Tensor) -> int:
    return 4 if tensor.dtype == "float32" else 2
