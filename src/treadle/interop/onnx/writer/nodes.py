"""`Nodes`: one ONNX graph in the making; names, constants and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treadle.base.dtypes import DType
from treadle.interop.onnx.library import CODES, library
from treadle.interop.onnx.writer.sizes import Grows, Size, Sizes, is_fixed
from treadle.ir.types import TensorType


class Names:
    """Names that are used once in a file, bodies included."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def new(self, wish: str) -> str:
        count = self._used.get(wish, 0)
        self._used[wish] = count + 1
        return f"{wish}_{count}" if count else wish


class Nodes:
    """Nodes of a graph, or of the body of a loop inside one, whose constants are outside."""

    def __init__(self, opset: int, names: Names | None = None, root: Nodes | None = None):
        self.opset = opset
        self.names = names or Names()
        self.list: list[Any] = []  # NodeProto
        self.constants: list[Any] = []  # NodeProto, before all that read them
        self.root = root or self
        self.batch_source: str | None = None  # an input whose first axis is the batch
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._grown: dict[Grows, str] = {}

    def inside(self) -> Nodes:
        """The nodes of a body."""
        return Nodes(self.opset, self.names, self.root)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output."""
        (output,) = self.several(op, inputs, 1, **attributes)
        return output

    def several(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        outputs = [self.names.new(op.lower()) for _ in range(count)]
        given = list(inputs)
        while given and not given[-1]:  # optional operands that are left out at the end
            given.pop()
        node = library().helper.make_node(op, given, outputs, name=outputs[0], **attributes)
        self.list.append(node)
        return outputs

    def finished(self, outputs: Sequence[str]) -> list[Any]:
        """The nodes that some outputs depend on, in order."""
        wanted, kept = set(outputs), []
        for node in reversed([*self.constants, *self.list]):
            if not wanted.isdisjoint(node.output):
                kept.append(node)
                wanted.update(_read_by(node))
        return kept[::-1]

    def constant(self, value: object, dtype: DType | None = None) -> str:
        """An array inside the file, once for equal ones."""
        array = np.asarray(value)
        if dtype is not None:
            array = array.astype(dtype.numpy)
        root = self.root
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in root._constants:
            proto = tensor_proto("", array)
            root._constants[key] = root.add("Constant", value=proto)
            root.constants.append(root.list.pop())
        return root._constants[key]

    def integers(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, np.int64))

    def sizes(self, sizes: Sizes) -> str:
        """A vector of sizes, computed where some grow with the batch."""
        if is_fixed(sizes):
            return self.integers([n for n in sizes if isinstance(n, int)])
        parts = [self._size(n) for n in sizes]
        return parts[0] if len(parts) == 1 else self.root_node("Concat", *parts, axis=0)

    def _size(self, size: Size) -> str:
        """A vector of one size."""
        if isinstance(size, int):
            return self.integers([size])
        root = self.root
        if size not in root._grown:
            assert root.batch_source is not None
            name = root.add("Shape", root.batch_source, start=0, end=1)
            if size.times != 1:
                name = root.add("Mul", name, root.integers([size.times]))
            if size.plus:
                name = root.add("Add", name, root.integers([size.plus]))
            root._grown[size] = name
        return root._grown[size]

    def root_node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node that bodies may read too, and that depends on the batch alone."""
        return self.root.add(op, *inputs, **attributes)

    def number(self, size: Size) -> str:
        """A size as a scalar."""
        if isinstance(size, int):
            return self.constant(np.array(size, np.int64))
        return self.root_node("Reshape", self._size(size), self.integers([]))

    # Views

    def reshape(self, x: str, sizes: Sizes) -> str:
        growing = [i for i, n in enumerate(sizes) if isinstance(n, Grows)]
        if len(growing) == 1 and 0 not in sizes:
            spelled = [-1 if isinstance(n, Grows) else n for n in sizes]
            return self.add("Reshape", x, self.integers(spelled))
        return self.add("Reshape", x, self.sizes(sizes), **({"allowzero": 1} if 0 in sizes else {}))

    def permute(self, x: str, axes: Sequence[int]) -> str:
        unchanged = list(axes) == list(range(len(axes)))
        return x if unchanged else self.add("Transpose", x, perm=list(axes))

    def expand(self, x: str, sizes: Sizes) -> str:
        return self.add("Expand", x, self.sizes(sizes))

    def cast(self, x: str, dtype: DType) -> str:
        return self.add("Cast", x, to=CODES[dtype])


def _read_by(node: Any) -> Iterator[str]:
    """Names that a node reads; its bodies too, which see what is outside of them."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read_by(inner)


def tensor_proto(name: str, array: np.ndarray) -> Any:
    """An array as it is in a file, little-endian."""
    plain = np.ascontiguousarray(array)
    if plain.dtype.byteorder == ">":
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    code = next(c for d, c in CODES.items() if d.numpy == plain.dtype)
    proto = library().TensorProto(name=name, data_type=code, dims=array.shape)
    proto.raw_data = plain.tobytes()
    return proto


def value_info(name: str, type_: TensorType, sizes: Sizes | None = None) -> Any:
    """The type of an input or output; sizes that grow with the batch have a name."""
    shape = [_spelled(n) for n in (type_.shape if sizes is None else sizes)]
    return library().helper.make_tensor_value_info(name, CODES[type_.dtype], shape)


def _spelled(size: Size) -> int | str:
    if isinstance(size, int):
        return size
    times = "" if size.times == 1 else f"{size.times}*"
    plus = f" + {size.plus}" if size.plus else ""
    return f"{times}batch{plus}"
