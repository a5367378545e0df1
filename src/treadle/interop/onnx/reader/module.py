"""`load`: an ONNX file as a module whose parameters have the names of its initializers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError, ShapeError
from treadle.base.memory import refuse_beyond
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.scopes import at_one_line
from treadle.frontend.tensor import Operand, Tensor
from treadle.interop.onnx.library import library
from treadle.interop.onnx.reader.calls import OPERATORS, Value
from treadle.interop.onnx.reader.checks import check
from treadle.interop.onnx.reader.operators import attention as attention  # fill the table
from treadle.interop.onnx.reader.operators import control as control
from treadle.interop.onnx.reader.operators import elementwise as elementwise
from treadle.interop.onnx.reader.operators import indexing as indexing
from treadle.interop.onnx.reader.operators import linear as linear
from treadle.interop.onnx.reader.operators import pooling as pooling
from treadle.interop.onnx.reader.operators import quantized as quantized
from treadle.interop.onnx.reader.operators import recurrent as recurrent
from treadle.interop.onnx.reader.operators import reductions as reductions
from treadle.interop.onnx.reader.operators import resizing as resizing
from treadle.interop.onnx.reader.operators import sampling as sampling
from treadle.interop.onnx.reader.operators import sequences as sequences
from treadle.interop.onnx.reader.operators import shaping as shaping
from treadle.interop.onnx.reader.operators import signals as signals
from treadle.interop.onnx.reader.operators import stateful as stateful
from treadle.interop.onnx.reader.program import Body, Port, Program, Reading
from treadle.interop.onnx.reader.run import Run
from treadle.interop.onnx.reader.tensors import Folder
from treadle.interop.onnx.reader.trained import kind_of, uses_of
from treadle.interop.onnx.reader.wire import check_fields
from treadle.ir.types import TensorType
from treadle.nn.init import literal
from treadle.nn.module import Declaration, Module, Parameter, State
from treadle.runtime.files import as_path

LARGEST = (1 << 31) - 1  # bytes: the most that a protobuf message has
Trainable = Callable[[str, np.ndarray], bool]


class OnnxModule(Module):
    """A file's graph: called with its inputs, in order or by name; several outputs are a tuple.

    Shapes are those of the inputs it is called with, where the file leaves them open.
    """

    def __init__(self, program: Program, declared: Mapping[str, Declaration]):
        self.program = program
        self._declared = dict(declared)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.program.body.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.program.body.outputs)

    def forward(self, *inputs: Operand, **named: Operand) -> Tensor | tuple[Tensor, ...]:
        given = self._given(inputs, named)
        body = self.program.body
        ports = zip(body.inputs, given, strict=True)
        values: list[Value] = [_checked(p, as_tensor(v)) for p, v in ports]
        constants: dict[str, Any] = dict(body.constants)
        constants.update({n: d.tensor() for n, d in self._declared.items()})
        whole = Body(body.name, body.inputs, body.outputs, body.steps, constants)
        with at_one_line():
            results = [_tensor(v) for v in Run(self.program).body(whole, values, None)]
        return results[0] if len(results) == 1 else tuple(results)

    def _given(self, inputs: tuple[Operand, ...], named: Mapping[str, Operand]) -> list[Operand]:
        names = self.input_names
        found = {**dict(zip(names, inputs, strict=False)), **named}
        if len(inputs) > len(names) or set(found) != set(names) or len(found) < len(inputs):
            cause = f"it takes {', '.join(names) or 'nothing'}"
            cause += f", and is given {len(inputs)} values and {', '.join(named) or 'no names'}"
            raise ArgumentError("onnx", cause, "Give each input once.")
        return [found[n] for n in names]

    def _parts(self) -> list[tuple[str, Any]]:
        return list(self._declared.items())


def _tensor(value: Value) -> Tensor:
    if isinstance(value, (Tensor, np.ndarray)):
        return as_tensor(value)
    raise LoadError("onnx", "an output is a sequence or nothing", "Only tensors leave a program.")


def _checked(port: Port, tensor: Tensor) -> Tensor:
    """An input of the type that the file says."""
    if port.shape is not None:
        fits = len(port.shape) == tensor.ndim and all(
            not isinstance(n, int) or n == m for n, m in zip(port.shape, tensor.shape, strict=False)
        )
        if not fits:
            shown = ", ".join("any" if n is None else str(n) for n in port.shape)
            cause = f"the input {port.name!r} is {tensor.type}, in the file ({shown})"
            raise ShapeError("onnx", cause[:500])
    if port.dtype is None or port.dtype is tensor.dtype:
        return tensor
    if port.dtype.kind != tensor.dtype.kind and not {port.dtype.kind, tensor.dtype.kind} <= {
        "int",
        "uint",
    }:
        cause = f"the input {port.name!r} is {tensor.type}, in the file {port.dtype}"
        raise ArgumentError("onnx", cause, "Cast it first.")
    return cast_to(tensor, port.dtype)


def load(source: str | Path | bytes, *, trainable: Trainable | None = None) -> OnnxModule:
    """An ONNX file, or its bytes, as a module that runs, compiles and trains as any other.

    Initializers that are weights become parameters with their names, running statistics states,
    and others constants; `trainable(name, array)` decides otherwise. Operators that are not known
    are listed all at once.
    """
    folder, model = _parsed(source)
    try:
        program = Reading(folder).program(model)
    except RecursionError as error:
        raise folder.refuse("it is nested too deeply") from error
    del model
    check(program, folder)
    return _module(program, trainable)


def _parsed(source: str | Path | bytes) -> tuple[Folder, Any]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        folder, data = Folder(None, "the model"), bytes(source)
    else:
        path = as_path("load", source)
        folder = Folder(path.parent, str(path))
        data = _read(path, folder)
    check_fields(data, folder)
    model = library().ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's own, which has no public name in all its versions
        cause = f"it is damaged or no ONNX file: {str(error)[:200]}"
        raise folder.refuse(cause) from error
    if not model.HasField("graph"):
        raise folder.refuse("it has no graph: it is damaged or no ONNX file")
    return folder, model


def _read(path: Path, folder: Folder) -> bytes:
    try:
        size = os.stat(path).st_size
        if not path.is_file() or size > LARGEST:
            what = f"it has {size:,} bytes, more than {LARGEST:,}" if path.is_file() else "no file"
            raise folder.refuse(what)
        refuse_beyond("load", str(path), 2 * size)
        return path.read_bytes()
    except OSError as error:
        raise LoadError("load", f"{path}: {error.strerror}", "Check the path.") from error
    except ValueError as error:  # a path with a zero byte
        if isinstance(error, LoadError):
            raise
        raise LoadError("load", f"{str(path)[:200]!r}: {error}", "Check the path.") from error


def _module(program: Program, trainable: Trainable | None) -> OnnxModule:
    body = program.body
    uses = uses_of(body)
    declared: dict[str, Declaration] = {}
    constants: dict[str, np.ndarray] = {}
    for name, array in body.constants.items():
        kind = kind_of(name, array, uses)
        type_ = TensorType(array.shape, as_type(array))
        if trainable is not None and kind != "state" and type_.is_float:
            kind = "parameter" if trainable(name, array) else "constant"
        if kind == "parameter":
            declared[name] = Parameter(array.shape, literal(array), dtype=type_.dtype)
        elif kind == "state":
            declared[name] = State(array.shape, literal(array), dtype=type_.dtype)
        else:
            constants[name] = array
    kept = Body(body.name, body.inputs, body.outputs, body.steps, constants)
    return OnnxModule(Program(kept, program.opset, program.functions), declared)


def as_type(array: np.ndarray) -> Any:
    return TensorType((), array.dtype).dtype  # type: ignore[arg-type]


def operators() -> tuple[str, ...]:
    """The names of ONNX's operators that `load` reads."""
    return tuple(sorted(OPERATORS))
