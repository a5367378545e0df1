"""PyTorch's files, .pt, .pth and .bin, without PyTorch and without executing the pickle in them.

A file is a zip archive of a pickle and the bytes of storages. The pickle is a program for a stack
machine; this one knows containers, numbers, strings and the functions that make tensors of
storages, and refuses whatever else a pickle can do.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from treadle.base.errors import LoadError
from treadle.interop.archives import Archive, open_archive
from treadle.interop.opened import damaged, is_possible

LARGEST_PICKLE = 1 << 26  # bytes; a tensor takes some 200
MOST_AXES = 32
MOST_ARGUMENTS = 8  # of a call; a tensor has 7
LONGEST_NAME = 1 << 10  # characters
MOST_INSTRUCTIONS = 1 << 20  # of a pickle, each at most some 100 bytes of memory,
MOST_OF_ENTRY = 128  # and this many for each entry of the archive: a tensor takes some 35
DTYPES: dict[str, np.dtype] = {
    "Double": np.dtype("<f8"),
    "Float": np.dtype("<f4"),
    "Half": np.dtype("<f2"),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Long": np.dtype("<i8"),
    "Int": np.dtype("<i4"),
    "Short": np.dtype("<i2"),
    "Char": np.dtype("i1"),
    "Byte": np.dtype("u1"),
    "Bool": np.dtype("?"),
}
STORAGES = {f"torch.{name}Storage": dtype for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Global:
    """A function or class that a pickle names; nothing is looked up."""

    name: str


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype
    key: str
    size: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RefusedError(Exception):
    """What a pickle does and this reader does not."""


def load(path: str | Path, key: str | None = None) -> dict[str, np.ndarray]:
    """The tensors of a state dict that `torch.save` wrote, by name; arrays cannot be written to.

    `key` names the state dict in a file that has more: `load("run.pt", "model_state_dict")`.
    """
    with open_archive(path, "a file of PyTorch 1.6 or later", is_stored=True) as archive:
        root = _root(archive)
        found = _run(archive, _pickle(archive, root))
        tensors = _state_dict(archive, found, key)
        buffers: dict[str, np.ndarray] = {}
        return {n: _array(archive, root, buffers, t) for n, t in tensors.items()}


def _root(archive: Archive) -> str:
    """The folder in the archive; the file's name when it was written."""
    found = [name for name in archive.entries if name.endswith("/data.pkl")]
    if len(found) != 1 or found[0].count("/") != 1:
        raise damaged(archive.source, "it has no data.pkl, or several")
    root = found[0].removesuffix("data.pkl")
    order = f"{root}byteorder"
    if order in archive.entries and archive.read(order) != b"little":
        cause = f"{archive.source} has big-endian numbers"
        raise LoadError("load", cause, "Save it again on another machine.")
    return root


def _pickle(archive: Archive, root: str) -> bytes:
    size = archive.entries[f"{root}data.pkl"].file_size
    if size > LARGEST_PICKLE:
        raise damaged(archive.source, f"its pickle has {size:,} bytes, not {LARGEST_PICKLE:,}")
    return archive.read(f"{root}data.pkl")


def _run(archive: Archive, program: bytes) -> object:
    try:
        return _Machine(program, MOST_INSTRUCTIONS + MOST_OF_ENTRY * len(archive.entries)).run()
    except _RefusedError as error:
        cause = f"{archive.source} has a pickle that {error}"
        remedy = "Only state dicts of tensors are read, and nothing is executed: save one."
        raise LoadError("load", cause, remedy) from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        cause = f"its pickle is none: {type(error).__name__} {str(error)[:100]}"
        raise damaged(archive.source, cause) from error


def _state_dict(archive: Archive, found: object, key: str | None) -> dict[str, _Tensor]:
    if key is not None and isinstance(found, dict) and key in found:
        found = found[key]
    elif key is not None:
        raise LoadError("load", f"{archive.source} has no {key[:80]!r}", _keys(found))
    if not isinstance(found, dict):
        cause = f"{archive.source} holds a {type(found).__name__.strip('_')}, not a dict of tensors"
        raise LoadError("load", cause, "Save model.state_dict().")
    tensors = {n: t for n, t in found.items() if isinstance(t, _Tensor)}
    if not tensors and found:
        raise LoadError("load", f"{archive.source} has no tensors at its top", _keys(found))
    return tensors


def _keys(found: object) -> str:
    names = [n[:40] for n in found][:8] if isinstance(found, dict) else []
    return f"Pass key=, one of {', '.join(names)}." if names else "Save model.state_dict()."


def _array(
    archive: Archive, root: str, buffers: dict[str, np.ndarray], tensor: _Tensor
) -> np.ndarray:
    """A view of a storage's bytes, which are read once."""
    storage, dtype = tensor.storage, tensor.storage.dtype
    if storage.key not in buffers:
        buffers[storage.key] = np.frombuffer(archive.read(f"{root}data/{storage.key}"), np.uint8)
    there = buffers[storage.key]
    count = math.prod(tensor.shape)
    last = tensor.offset + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)
    )
    if storage.size * dtype.itemsize > there.size:
        cause = f"storage {storage.key} is said to have {storage.size:,} {dtype}, "
        raise damaged(archive.source, f"{cause}and has {there.size:,} bytes")
    # A stride of 0 makes elements that have no bytes of their own: no more than the storage's.
    if count and max(count, last + 1) > storage.size:
        cause = f"a tensor {tensor.shape} is not within storage {storage.key}, {there.size:,} bytes"
        raise damaged(archive.source, cause)
    first = there[tensor.offset * dtype.itemsize if count else 0 :]
    flat = first[: first.size // dtype.itemsize * dtype.itemsize].view(dtype)
    strides = [s * dtype.itemsize for s in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _named(module: object, member: object) -> _Global:
    """A function or class; its name is a copy of texts that a pickle may have kept."""
    if not isinstance(module, str) or not isinstance(member, str):
        raise _RefusedError("names a function by something else than text")
    if max(len(module), len(member)) > LONGEST_NAME:
        raise _RefusedError(f"names a function by more than {LONGEST_NAME} characters")
    return _Global(f"{module}.{member}")


def _key(key: object) -> str:
    """A key of a dict as text, whose hash a file cannot foresee: chosen integers collide."""
    if type(key) is int and key.bit_length() <= 32:
        return str(key)
    if type(key) is not str:  # others may take exponential time to hash
        raise _RefusedError(f"has a dict with a {type(key).__name__} as a key")
    if len(key) > LONGEST_NAME:  # which is compared with an equal one at every access
        raise _RefusedError(f"has a dict with a key of {len(key):,} characters")
    return key


def _storage(given: object) -> _Storage:
    """What a pickle calls a persistent id: ("storage", class, key, device, size)."""
    if not isinstance(given, tuple) or len(given) != 5 or given[0] != "storage":
        raise _RefusedError("names something that is no storage")
    _, kind, key, _, size = given
    if not isinstance(kind, _Global) or kind.name not in STORAGES:
        name = kind.name if isinstance(kind, _Global) else type(kind).__name__
        raise _RefusedError(f"has a storage of {name[:80]}, which is not one of numbers")
    is_plain = isinstance(key, str) and len(key) <= LONGEST_NAME and key.isalnum()
    if not is_plain or not _is_whole(size):
        raise _RefusedError("has a storage without a plain name and size")
    return _Storage(STORAGES[kind.name], key, size)


def _size(sizes: object) -> tuple[int, ...]:
    """A shape or strides; the length first, since a pickle may show one list many times."""
    if not isinstance(sizes, (tuple, list)) or len(sizes) > MOST_AXES:
        raise _RefusedError(f"has a shape that is no tuple of at most {MOST_AXES} whole numbers")
    if not all(map(_is_whole, sizes)):
        raise _RefusedError("has a shape of something else than whole numbers")
    return tuple(sizes)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: object) -> _Tensor:
    if not isinstance(storage, _Storage) or not _is_whole(offset):
        raise _RefusedError("makes a tensor of something else than a storage")
    shape, strides = _size(shape), _size(strides)
    if len(shape) != len(strides):
        raise _RefusedError(f"makes a tensor with {len(shape)} axes and {len(strides)} strides")
    if not is_possible(shape) or not all(is_possible((n,)) for n in strides):
        raise _RefusedError("makes a tensor with more elements than there can be")
    return _Tensor(storage, offset, shape, strides)


def _parameter(data: object, *_: object) -> _Tensor:
    if not isinstance(data, _Tensor):
        raise _RefusedError("makes a parameter of something else than a tensor")
    return data


def _ordered(*pairs: object) -> dict[object, object]:
    if pairs:
        raise _RefusedError("makes an OrderedDict in an unusual way")
    return {}


CALLS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _ordered,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
}
_MARK = object()
_PUSHED: Mapping[int, Callable[[], object]] = {
    b"}"[0]: dict,
    b"]"[0]: list,
    b")"[0]: tuple,
    b"("[0]: lambda: _MARK,
    b"N"[0]: lambda: None,
    0x88: lambda: True,
    0x89: lambda: False,
}
_NUMBERS = {b"J"[0]: "<i", b"K"[0]: "<B", b"M"[0]: "<H", b"G"[0]: ">d"}
_TEXTS = {b"X"[0]: "<I", 0x8C: "<B", 0x8D: "<Q"}  # how long they are
_LONG = 0x8A  # an integer of up to 255 bytes
_COUNTS = {0x85: 1, 0x86: 2, 0x87: 3}  # elements of tuples
_PUTS, _GETS = {b"q"[0]: "<B", b"r"[0]: "<I"}, {b"h"[0]: "<B", b"j"[0]: "<I"}
_NAMES = {op.code: op.name for op in pickletools.opcodes}
_SKIPPED = {0x80: "<B", 0x95: "<Q"}  # the protocol, and a length that is told beforehand


class _Machine:
    """The stack machine of a pickle, with few of its instructions."""

    def __init__(self, program: bytes, most: int) -> None:
        self.program, self.at, self.most = program, 0, most
        self.stack: list[Any] = []
        self.memo: list[Any] = []

    def run(self) -> object:
        for _ in range(self.most):
            code = self.take(1)[0]
            if code == b"."[0]:
                return self.stack.pop()
            if not self.literal(code):
                self.compound(code)
        raise _RefusedError(f"has more than {self.most:,} instructions")

    def take(self, count: int) -> bytes:
        if count > len(self.program) - self.at:
            raise ValueError(f"it ends at byte {len(self.program)}")
        self.at += count
        return self.program[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.program.index(b"\n", self.at)
        found = self.take(end - self.at).decode()
        self.at += 1
        return found

    def literal(self, code: int) -> bool:
        """Push what an instruction says, or hold what is pushed; False for another one."""
        if code in _PUSHED:
            self.stack.append(_PUSHED[code]())
        elif code in _NUMBERS:
            self.stack.append(self.number(_NUMBERS[code]))
        elif code in _TEXTS:
            self.stack.append(self.take(self.number(_TEXTS[code])).decode("utf-8", "surrogatepass"))
        elif code == _LONG:
            self.stack.append(int.from_bytes(self.take(self.number("<B")), "little", signed=True))
        elif code in _COUNTS:
            self.stack.append(tuple(self.popped(_COUNTS[code])))
        elif code in _PUTS:
            self.keep(self.number(_PUTS[code]))
        elif code == 0x94:
            self.keep(len(self.memo))
        elif code in _GETS:
            self.stack.append(self.memo[self.number(_GETS[code])])
        elif code in _SKIPPED:
            self.number(_SKIPPED[code])
        else:
            return False
        return True

    def compound(self, code: int) -> None:
        match bytes([code]):
            case b"t":
                self.stack.append(tuple(self.marked()))
            case b"s" | b"u":
                self.set_items(self.marked() if code == b"u"[0] else self.popped(2))
            case b"a" | b"e":
                items = self.marked() if code == b"e"[0] else self.popped(1)
                if not isinstance(self.stack[-1], list):
                    raise _RefusedError("appends to something else than a list")
                self.stack[-1].extend(items)
            case b"c":
                self.stack.append(_named(self.line(), self.line()))
            case b"\x93":
                self.stack.append(_named(*self.popped(2)))
            case b"R" | b"\x81":
                self.reduce(*self.popped(2))
            case b"Q":
                self.stack.append(_storage(self.stack.pop()))
            case b"b":
                self.build(*self.popped(1))
            case _:
                raise _RefusedError(f"has the instruction {_NAMES.get(chr(code), hex(code))}")

    def keep(self, at: int) -> None:
        """Picklers count up; numbers that a file chooses could all collide in a dict."""
        if at > len(self.memo):
            raise _RefusedError(f"keeps its value {len(self.memo):,} as {at:,}")
        self.memo[at : at + 1] = [self.stack[-1]]

    def popped(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        if len(found) < count:
            raise ValueError("the stack is empty")
        del self.stack[-count:]
        return found

    def marked(self) -> list[Any]:
        """What was pushed since the last mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                found = self.stack[at + 1 :]
                del self.stack[at:]
                return found
        raise ValueError("there is no mark")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _RefusedError("sets items of something else than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def reduce(self, function: Any, arguments: Any) -> None:
        name = function.name if isinstance(function, _Global) else type(function).__name__
        if name not in CALLS or not isinstance(arguments, tuple):
            raise _RefusedError(f"calls {name[:100]}")
        if len(arguments) > MOST_ARGUMENTS:  # which a call copies
            raise _RefusedError(f"calls {name} with {len(arguments):,} arguments")
        self.stack.append(CALLS[name](*arguments))

    def build(self, state: Any) -> None:
        """The attributes of a state dict, `_metadata`, are left out; nothing else has any."""
        if not isinstance(self.stack[-1], dict) or not isinstance(state, dict):
            raise _RefusedError("sets the state of something else than a dict")
