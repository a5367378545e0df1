"""cuDNN's C interface: descriptors, which are objects that attributes are set of, then finalized.

Its Python frontend holds the interpreter's lock while a plan is built, which for some engines means
that kernels are compiled: 0.2 to 0.8 s each. Through ctypes several are built at a time, each by a
thread with a handle of its own: no two threads may use one at the same time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from treadle.runtime.cuda.once import once


class Kind(IntEnum):
    """Of descriptors."""

    CONVOLUTION = 1
    ENGINE = 2
    CONFIGURATION = 3
    HEURISTIC = 4
    PLAN = 5
    CONV = 10
    CONV_GRAD_W = 11
    CONV_GRAD_X = 12
    GRAPH = 15
    POINTERS = 16
    TENSOR = 17


class Type(IntEnum):
    """Of attributes."""

    HANDLE = 0
    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    POINTER = 6
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    NOTE = 11
    DESCRIPTOR = 15
    BEHAVIOUR = 19
    CHAR = 24


_AS = {
    Type.HANDLE: ctypes.c_void_p,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.POINTER: ctypes.c_void_p,
    Type.DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}  # others are enumerations


class BackendError(Exception):
    """cuDNN refuses a descriptor, or a run."""


@once
def library() -> Any:
    """cuDNN, which its frontend has found and loaded."""
    import cudnn

    cudnn.backend_version()
    found = ctypes.CDLL("libcudnn.so.9")
    found.cudnnBackendDestroyDescriptor.argtypes = [ctypes.c_void_p]
    return found


def _checked(code: int, operation: str) -> None:
    if code:
        raise BackendError(f"{operation}: cuDNN says {code}")


_here = threading.local()  # a thread's own handle, while it has one
_spare: list[ctypes.c_void_p] = []  # handles that threads had


def handle() -> ctypes.c_void_p:
    """The thread's own, or the one that all share, one at a time."""
    own: ctypes.c_void_p | None = _here.__dict__.get("handle")
    return shared_handle() if own is None else own


@once
def shared_handle() -> ctypes.c_void_p:
    return _created()


def _created() -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    _checked(library().cudnnCreate(ctypes.byref(found)), "create")
    return found


@contextmanager
def own_handle() -> Iterator[None]:
    """The thread has a handle of its own here."""
    try:
        own = _spare.pop()
    except IndexError:
        own = _created()
    _here.handle = own
    try:
        yield
    finally:
        _here.handle = None
        _spare.append(own)


def execute(plan: Descriptor, pointers: Descriptor, stream: Any) -> None:
    """Put a plan's work into a stream. The handle has one at a time: the caller has the lock."""
    lib = library()
    _checked(lib.cudnnSetStream(handle(), ctypes.c_void_p(int(stream))), "stream")
    _checked(lib.cudnnBackendExecute(handle(), plan.address, pointers.address), "execute")


class Descriptor:
    """One of cuDNN's, destroyed with it."""

    def __init__(self, kind: Kind):
        self.kind, self.address = kind, ctypes.c_void_p()
        create = library().cudnnBackendCreateDescriptor
        _checked(create(ctypes.c_int(kind), ctypes.byref(self.address)), kind.name)
        self._destroy = library().cudnnBackendDestroyDescriptor
        self._read: list[object] = []  # what it refers to stays as long as it

    def __del__(self) -> None:
        if "_destroy" in self.__dict__:
            self._destroy(self.address)

    def set(self, name: int, type_: Type, *values: Any) -> Descriptor:
        """An attribute, by its number in cuDNN's header."""
        if type_ is Type.DESCRIPTOR:
            self._read += values
            values = tuple(v.address.value for v in values)
        array = (_AS.get(type_, ctypes.c_int) * len(values))(*values)
        return self._set(name, type_, len(values), array)

    def set_text(self, name: int, text: bytes) -> Descriptor:
        return self._set(name, Type.CHAR, len(text), ctypes.create_string_buffer(text, len(text)))

    def _set(self, name: int, type_: Type, count: int, array: Any) -> Descriptor:
        setter = library().cudnnBackendSetAttribute
        code = setter(self.address, name, ctypes.c_int(type_), ctypes.c_int64(count), array)
        _checked(code, f"{self.kind.name}, attribute {name}")
        return self

    def finalized(self) -> Descriptor:
        """Complete; for a plan this compiles kernels, while other threads run."""
        _checked(library().cudnnBackendFinalize(self.address), self.kind.name)
        return self

    def numbers(self, name: int, type_: Type, most: int) -> list[int]:
        array = (_AS.get(type_, ctypes.c_int) * most)()
        return [int(x) for x in array[: self._get(name, type_, most, array)]]

    def text(self, name: int) -> bytes:
        size = self._get(name, Type.CHAR, 0, None)
        array = ctypes.create_string_buffer(size)
        count = self._get(name, Type.CHAR, size, array)
        return array.raw[:count]  # a copy, of what is there now

    def descriptors(self, name: int, kind: Kind, most: int) -> list[Descriptor]:
        """Those that an attribute is, filled in by cuDNN."""
        made = [Descriptor(kind) for _ in range(most)]
        array = (ctypes.c_void_p * most)(*(d.address.value for d in made))
        found = made[: self._get(name, Type.DESCRIPTOR, most, array)]
        for descriptor in found:
            descriptor._read.append(self)
        return found

    def _get(self, name: int, type_: Type, most: int, array: Any) -> int:
        count, getter = ctypes.c_int64(), library().cudnnBackendGetAttribute
        given = self.address, name, ctypes.c_int(type_), ctypes.c_int64(most)
        _checked(getter(*given, ctypes.byref(count), array), f"{self.kind.name}, attribute {name}")
        return count.value


def pointers(numbers: Sequence[int], addresses: Sequence[int], workspace: int) -> Descriptor:
    """Where the tensors of a run are, by their numbers."""
    return (
        Descriptor(Kind.POINTERS)
        .set(1000, Type.INT64, *numbers)
        .set(1001, Type.POINTER, *addresses)
        .set(1003, Type.POINTER, workspace)
        .finalized()
    )
