"""Attention through cuDNN: forward and backward on tensors where they lie."""

from __future__ import annotations

import functools
from typing import Any

from treadle.kernel.launch import LibraryCall, Tensor
from treadle.runtime.cuda.device import device

# Names of the operands, in the order of the composites.
FORWARD = ("q", "k", "v")
BACKWARD = ("dO", "o", "stats", "q", "k", "v")


@functools.cache
def has_dnn() -> bool:
    """Whether cuDNN and its Python frontend can be used."""
    try:
        import cudnn

        cudnn.backend_version()
    except Exception:  # not installed, or without the library it needs
        return False
    return True


@functools.cache
def dnn_version() -> str:
    if not has_dnn():
        return "no cuDNN"
    import cudnn

    return f"cuDNN {cudnn.backend_version()} {cudnn.__version__}"


@functools.cache
def handle() -> Any:
    import cudnn

    return cudnn.create_handle()


@functools.cache
def data_types() -> dict[str, Any]:
    """cuDNN's names of dtypes."""
    import cudnn

    types = cudnn.data_type
    return {"bfloat16": types.BFLOAT16, "float16": types.HALF, "float32": types.FLOAT}


class Attention:
    """One shape of attention, ready to be run on any addresses."""

    def __init__(self, call: LibraryCall, is_deterministic: bool = False):
        import cudnn

        self.call = call
        self.graph = cudnn.pygraph(
            io_data_type=data_types()[call.operands[-1].dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle(),
        )
        numbers = dict(call.numbers)
        options = {"attn_scale": numbers["scale"], "use_causal_mask": bool(numbers["causal"])}
        is_forward = len(call.operands) == len(FORWARD)
        names = FORWARD if is_forward else BACKWARD
        self.operands = {n: self._tensor(n, t) for n, t in zip(names, call.operands, strict=True)}
        if is_forward:
            self.results = self.graph.sdpa(
                name="attention", **self.operands, generate_stats=True, **options
            )
        else:
            self.results = self.graph.sdpa_backward(
                name="attention_grad",
                **self.operands,
                use_deterministic_algorithm=is_deterministic,
                **options,
            )
        for result, tensor in zip(self.results, call.results, strict=True):
            dims, steps = _dims(tensor)
            result.set_output(True).set_dim(dims).set_stride(steps)
            result.set_data_type(data_types()[tensor.dtype])
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = int(self.graph.get_workspace_size())

    def _tensor(self, name: str, tensor: Tensor) -> Any:
        dims, steps = _dims(tensor)
        return self.graph.tensor(
            name=name, dim=dims, stride=steps, data_type=data_types()[tensor.dtype]
        )

    def run(self, addresses: list[int], workspace: int) -> None:
        """Put it into the stream; addresses are those of the call's buffers."""
        import cudnn

        cudnn.set_stream(handle=handle(), stream=int(device().stream))
        places = {}
        tensors = zip(self.operands.values(), self.call.operands, strict=True)
        for made, tensor in (*tensors, *zip(self.results, self.call.results, strict=True)):
            size = 4 if tensor.dtype == "float32" else 2
            places[made] = addresses[tensor.argument] + tensor.start * size
        self.graph.execute(places, workspace, handle=handle())


def _dims(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Four axes: rows' statistics have a last one of one element."""
    dims, steps = list(tensor.shape), list(tensor.strides)
    return (dims, steps) if len(dims) == 4 else ([*dims, 1], [*steps, 1])
