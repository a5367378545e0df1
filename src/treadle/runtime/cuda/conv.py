"""Convolutions through cuDNN: forward, and the gradients of image and weight.

cuDNN proposes plans, its best first; the fastest of the first few is taken, by timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.kernel.launch import LibraryLaunch
from treadle.kernel.target import GPU
from treadle.runtime.cuda.device import Block, Event, device
from treadle.runtime.cuda.dnn import DnnCall, empty_graph, operands_of, set_results

TRIES, MOST_WORKSPACE = GPU.launching.conv_plans, GPU.launching.conv_workspace
REPEATS = 3
# What each call calls its operands, in their order.
_OPERANDS = {
    "conv": ("image", "weight"),
    "conv_grad_x": ("loss", "filter"),
    "conv_grad_w": ("loss", "image"),
}
_BUILDERS = {"conv": "conv_fprop", "conv_grad_x": "conv_dgrad", "conv_grad_w": "conv_wgrad"}


class NoLibraryCallError(Exception):
    """A library has no plan for a call."""

    def __init__(self, call: LibraryLaunch, cause: str):
        super().__init__(f"{call.name}: {cause}")
        self.call = call


def planned_convolution(
    call: LibraryLaunch, is_deterministic: bool, memory: Callable[[], Sequence[int]]
) -> DnnCall:
    """One convolution with the fastest of the first plans, timed on memory for its buffers.

    To give the same bits in every run it takes the first plan that runs.
    """
    try:
        graph = _described(call, is_deterministic)
    except Exception as error:  # the frontend raises errors of its own
        raise NoLibraryCallError(call, str(error)) from error
    best: tuple[float, int] | None = None
    count, tried, addresses = int(graph.get_execution_plan_count()), 0, memory()
    for i in range(count):
        if tried >= (1 if is_deterministic else TRIES):
            break
        try:
            graph.build_plan_at_index(i)
            made = DnnCall(call, graph)
            if made.workspace > MOST_WORKSPACE:
                continue
            taken = _time(made, addresses, best)
        except Exception:  # a plan that cannot be built or run: the next one
            continue
        tried += 1
        if best is None or taken < best[0]:
            best = taken, i
    if best is None:
        raise NoLibraryCallError(call, f"none of {count} plans runs")
    graph.build_plan_at_index(best[1])
    return DnnCall(call, graph)


def _described(call: LibraryLaunch, is_deterministic: bool) -> Any:
    import cudnn

    graph = empty_graph(call)
    numbers = dict(call.numbers)
    low, high, stride, dilation = (
        [int(numbers[f"{n}{i}"]) for i in range(2)] for n in ("low", "high", "stride", "dilation")
    )
    result = getattr(graph, _BUILDERS[call.name])(
        **operands_of(graph, call, _OPERANDS[call.name]),
        pre_padding=low,
        post_padding=high,
        stride=stride,
        dilation=dilation,
    )
    set_results(call, [result])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    notes = cudnn.numerical_note
    unwanted = [notes.NONDETERMINISTIC] if is_deterministic else []
    if call.operands[0].dtype == "float32":
        # 32 bits are what was asked for: not the fewer that tensor cores multiply.
        unwanted += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
    if unwanted:
        graph.deselect_numeric_notes(unwanted)
    graph.check_support()
    return graph


def _time(made: DnnCall, addresses: Sequence[int], best: tuple[float, int] | None) -> float:
    start, end = Event(timed=True), Event(timed=True)
    workspace = Block(made.workspace)
    times: list[float] = []
    for count in (1, REPEATS, REPEATS):
        start.record()
        for _ in range(count):
            made.run(addresses, workspace.address, device().stream)
        end.record()
        end.wait()
        times.append(end.milliseconds_since(start) / count)
        if best is not None and len(times) == 2 and times[-1] > 2 * best[0]:
            break
    return min(times[1:])
