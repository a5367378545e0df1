"""Convolutions through cuDNN: forward, and the gradients of image and weight.

cuDNN proposes plans, its best first; the fastest of the first few is taken, by timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.kernel.launch import LibraryCall, Tensor
from treadle.runtime.cuda.device import Event, device
from treadle.runtime.cuda.dnn import data_types, handle

TRIES = 12  # plans that are timed
REPEATS = 3
MOST_WORKSPACE = 1 << 30  # bytes
# What each routine calls its operands, in their order.
_OPERANDS = {
    "conv": ("image", "weight"),
    "conv_grad_x": ("loss", "filter"),
    "conv_grad_w": ("loss", "image"),
}
_BUILDERS = {"conv": "conv_fprop", "conv_grad_x": "conv_dgrad", "conv_grad_w": "conv_wgrad"}


class NoRoutineError(Exception):
    """A library has no plan for a call."""

    def __init__(self, call: LibraryCall, cause: str):
        super().__init__(f"{call.name}: {cause}")
        self.call = call


class Convolution:
    """One convolution, ready to be run on any addresses once a plan is chosen."""

    def __init__(self, call: LibraryCall, is_deterministic: bool = False):
        import cudnn

        self.call = call
        try:
            self._describe(call)
            self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            notes = cudnn.numerical_note
            unwanted = [notes.NONDETERMINISTIC] if is_deterministic else []
            if call.operands[0].dtype == "float32":
                # 32 bits are what was asked for: not the fewer that tensor cores multiply.
                unwanted += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
            if unwanted:
                self.graph.deselect_numeric_notes(unwanted)
            self.graph.check_support()
        except Exception as error:  # the frontend raises errors of its own
            raise NoRoutineError(call, str(error)) from error
        self.workspace, self.chosen = 0, -1

    def _describe(self, call: LibraryCall) -> None:
        import cudnn

        types = data_types()
        self.graph = cudnn.pygraph(
            io_data_type=types[call.operands[0].dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle(),
        )
        names = _OPERANDS[call.name]
        self.operands = {n: self._tensor(n, t) for n, t in zip(names, call.operands, strict=True)}
        numbers = dict(call.numbers)
        low, high, stride, dilation = (
            [int(numbers[f"{n}{i}"]) for i in range(2)]
            for n in ("low", "high", "stride", "dilation")
        )
        build = getattr(self.graph, _BUILDERS[call.name])
        self.result = build(
            **self.operands, pre_padding=low, post_padding=high, stride=stride, dilation=dilation
        )
        (tensor,) = call.results
        self.result.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.strides))
        self.result.set_data_type(types[tensor.dtype])
        self.graph.validate()
        self.graph.build_operation_graph()

    def _tensor(self, name: str, tensor: Tensor) -> Any:
        dims, steps = list(tensor.shape), list(tensor.strides)
        type_ = data_types()[tensor.dtype]
        return self.graph.tensor(name=name, dim=dims, stride=steps, data_type=type_)

    def use(self, words: Sequence[int]) -> None:
        """The plan that was chosen before."""
        try:
            self.graph.build_plan_at_index(words[0])
        except Exception as error:
            raise NoRoutineError(self.call, str(error)) from error
        self.chosen = words[0]
        self.workspace = int(self.graph.get_workspace_size())

    @property
    def words(self) -> list[int]:
        return [self.chosen] + [0] * 7

    def choose(self, addresses: Sequence[int], workspace: Any) -> None:
        """The fastest of the first plans; `workspace` gives memory of a size."""
        best: tuple[float, int] | None = None
        count, tried = int(self.graph.get_execution_plan_count()), 0
        for i in range(count):
            if tried >= TRIES:
                break
            try:
                self.use([i])
                if self.workspace > MOST_WORKSPACE:
                    continue
                taken = self._time(addresses, workspace(self.workspace), best)
            except Exception:  # a plan that cannot be built or run: the next one
                continue
            tried += 1
            if best is None or taken < best[0]:
                best = taken, i
        if best is None:
            raise NoRoutineError(self.call, f"none of {count} plans runs")
        self.use([best[1]])

    def _time(self, addresses: Sequence[int], workspace: int, best: Any) -> float:
        start, end = Event(timed=True), Event(timed=True)
        times: list[float] = []
        for count in (1, REPEATS, REPEATS):
            start.record()
            for _ in range(count):
                self.run(addresses, workspace)
            end.record()
            end.wait()
            times.append(end.milliseconds_since(start) / count)
            if best is not None and len(times) == 2 and times[-1] > 2 * best[0]:
                break
        return min(times[1:])

    def run(self, addresses: Sequence[int], workspace: int) -> None:
        """Put it into the stream; addresses are those of the call's buffers."""
        import cudnn

        cudnn.set_stream(handle=handle(), stream=int(device().stream))
        places = {}
        tensors = zip(self.operands.values(), self.call.operands, strict=True)
        for made, tensor in (*tensors, (self.result, self.call.results[0])):
            size = 4 if tensor.dtype == "float32" else 2
            places[made] = addresses[tensor.argument] + tensor.start * size
        self.graph.execute(places, workspace, handle=handle())
