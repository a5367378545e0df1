"""cuDNN: a call of it with its plan, which may come from the plan cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.kernel.launch import LibraryLaunch, Tensor
from treadle.runtime.cuda.once import once


@once
def has_dnn() -> bool:
    """Whether cuDNN and its Python frontend can be used."""
    try:
        import cudnn

        cudnn.backend_version()
    except Exception:  # not installed, or without the library it needs
        return False
    return True


@once
def dnn_version() -> str:
    if not has_dnn():
        return "no cuDNN"
    import cudnn

    return f"cuDNN {cudnn.backend_version()} {cudnn.__version__}"


@once
def handle() -> Any:
    import cudnn

    return cudnn.create_handle()


@once
def data_types() -> dict[str, Any]:
    """cuDNN's names of dtypes."""
    import cudnn

    types = cudnn.data_type
    return {"bfloat16": types.BFLOAT16, "float16": types.HALF, "float32": types.FLOAT}


def empty_graph(call: LibraryLaunch) -> Any:
    """What a call is described in: it reads the first operand's dtype and sums in float32."""
    import cudnn

    return cudnn.pygraph(
        io_data_type=data_types()[call.operands[0].dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle(),
    )


def operands_of(graph: Any, call: LibraryLaunch, names: Sequence[str]) -> dict[str, Any]:
    """The graph's tensors for operands; numbered, as a plan that is stored has no names."""
    found = {}
    for i, (name, tensor) in enumerate(zip(names, call.operands, strict=True)):
        dims, steps = _dims(tensor)
        type_ = data_types()[tensor.dtype]
        made = graph.tensor(name=name, dim=dims, stride=steps, data_type=type_)
        found[name] = made.set_uid(i + 1)
    return found


def set_results(call: LibraryLaunch, results: Sequence[Any]) -> None:
    """Where a call's results lie; their numbers follow those of the operands."""
    for i, (result, tensor) in enumerate(zip(results, call.results, strict=True)):
        dims, steps = _dims(tensor)
        result.set_output(True).set_dim(dims).set_stride(steps)
        result.set_data_type(data_types()[tensor.dtype]).set_uid(len(call.operands) + i + 1)


class DnnCall:
    """A call with its plan, ready to be run on any addresses."""

    def __init__(self, call: LibraryLaunch, graph: Any):
        self.call, self.graph = call, graph
        self.workspace = int(graph.get_workspace_size())

    def run(self, addresses: Sequence[int], workspace: int, stream: Any) -> None:
        """Put it into a stream; addresses are those of the call's buffers.

        The handle, which all programs share, has one stream at a time: the caller has the lock.
        """
        import cudnn

        cudnn.set_stream(handle=handle(), stream=int(stream))
        pointers = {}
        for i, tensor in enumerate((*self.call.operands, *self.call.results)):
            size = 4 if tensor.dtype == "float32" else 2
            pointers[i + 1] = addresses[tensor.argument] + tensor.start * size
        self.graph.execute(pointers, workspace, handle=handle())

    def packed(self) -> bytes:
        """The plan, for `unpacked`; nothing where the library does not give it away."""
        try:
            return bytes(self.graph.serialize())
        except Exception:  # the frontend raises errors of its own
            return b""


def unpacked(call: LibraryLaunch, plan: bytes) -> DnnCall | None:
    """The call with a plan that was packed: 0.1 s where describing and planning take seconds."""
    graph = empty_graph(call)
    try:
        graph.deserialize(handle(), list(plan))
        return DnnCall(call, graph)
    except Exception:  # of another version, say: it is planned anew
        return None


def _dims(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Four axes: rows' statistics have a last one of one element."""
    dims, steps = list(tensor.shape), list(tensor.strides)
    return (dims, steps) if len(dims) == 4 else ([*dims, 1], [*steps, 1])
