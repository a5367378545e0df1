"""Arrays of other frameworks on the device, taken where they are; ours, for them to take.

Whoever made an array may still be writing it. PyTorch and CuPy write on the stream that all others
wait for unless they are told otherwise; an array with a stream says which; DLPack is told ours.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from treadle.runtime.cuda.device import Block, checked, device
from treadle.runtime.cuda.lent import Lent
from treadle.runtime.foreign import CUDA, is_on_device

_LEGACY = 1  # the stream that others wait for
_UNASKED = -1  # DLPack's word for no wait
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_SAME: dict[tuple[Any, Any], bool] = {}  # whether PyTorch's dtypes are NumPy's
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


class Found:
    """Where an array is, and what must live as long as it is used."""

    __slots__ = ("address", "dtype", "holder", "shape")

    def __init__(self, address: int, holder: object, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.address, self.holder, self.shape, self.dtype = address, holder, shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A copy on the host, for whoever computes there."""
        device().enter()
        device().wait()
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            read = device().driver.cuMemcpyDtoH(array.ctypes.data, self.address, array.nbytes)
            checked(read, "inputs")
        return array if dtype is None else array.astype(dtype)


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_api = ctypes.pythonapi
_pointer = _api.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new = _api.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# A capsule that is being freed must not be referred to: it comes as an address.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_NAME = b"dltensor"


def _is_torch_s(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether one of PyTorch's tensors has this type, and no gaps."""
    pair = array.dtype, dtype
    is_same = _SAME.get(pair)
    if is_same is None:
        is_same = _SAME[pair] = str(pair[0]).rpartition(".")[2] == dtype.name
    return bool(is_same and array.shape == shape and array.is_contiguous())


def found(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Found | None:
    """Where an array on the device is; None if it is not there, has another type, or gaps."""
    if isinstance(array, DeviceArray):  # written on the stream that reads it
        is_same = array.shape == shape and array.dtype == dtype
        return Found(array.address, array, shape, dtype) if is_same else None
    if getattr(array, "is_cuda", False):
        is_whole = _is_torch_s(array, shape, dtype)
        return Found(array.data_ptr(), array, shape, dtype) if is_whole else None
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _by_interface(array, interface, shape, dtype)
    if is_on_device(array):
        return _by_dlpack(array.__dlpack__(stream=int(device().stream)), shape, dtype)
    return None


def _by_interface(
    array: object, interface: dict[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Found | None:
    is_same = np.dtype(interface["typestr"]) == dtype and tuple(interface["shape"]) == shape
    if not is_same or _gaps(interface.get("strides"), shape, dtype.itemsize):
        return None
    stream = interface.get("stream")
    if stream is not None and stream != _LEGACY:
        checked(device().driver.cuStreamSynchronize(stream), "inputs")
    return Found(int(interface["data"][0]), array, shape, dtype)


def _by_dlpack(capsule: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Found | None:
    tensor = ctypes.cast(_pointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    kind = _KINDS.get(tensor.type.code, "")
    name = kind if kind == "bool" else f"{kind}{tensor.type.bits}"
    here = tuple(tensor.shape[i] for i in range(tensor.rank))
    if name != dtype.name or here != shape or tensor.type.lanes != 1:
        return None
    if tensor.strides and _gaps([tensor.strides[i] for i in range(tensor.rank)], shape, 1):
        return None
    return Found(int(tensor.data or 0) + tensor.offset, capsule, shape, dtype)


def _gaps(strides: Any, shape: tuple[int, ...], step: int) -> bool:
    """Whether elements do not lie one after the other."""
    if strides is None:
        return False
    for n, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if n != 1 and stride != step:
            return True
        step *= n
    return False


_kept: dict[int, tuple[object, ...]] = {}  # what DLPack's users still use, by address


def _let_go(managed: Any) -> None:
    _kept.pop(ctypes.addressof(managed.contents), None)


_release = _Deleter(_let_go)


def _left(capsule: int) -> None:
    """A capsule that nobody took is gone: what it holds is let go."""
    if _is_valid(capsule, _NAME):
        _kept.pop(int(_raw_pointer(capsule, _NAME) or 0), None)


_unused = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_left)


class DeviceArray:
    """An array on the device that other frameworks take as it is: DLPack, and CUDA's interface.

    It is the memory itself: a step that runs later changes it. `np.asarray` copies it.
    """

    def __init__(self, block: Block | Lent, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.shape, self.dtype = shape, dtype
        self._block = block

    @property
    def address(self) -> int:
        return int(self._block.address)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype.name})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        device().enter()
        array = self._block.read(np.empty(self.shape, self.dtype))
        return array if dtype is None else array.astype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """NumPy's dtypes alone; narrow floats that it has not go through DLPack."""
        if self.dtype.name == "bfloat16":
            raise AttributeError("bfloat16 has no CUDA array interface: use DLPack")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._block.address, False),
            "strides": None,
            "version": 3,
            "stream": int(device().stream),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, int(device().handle)

    def __dlpack__(self, stream: Any = None, **options: Any) -> object:
        """A capsule; the stream that asks waits for the step that is running.

        The one that others wait for does so by itself.
        """
        device().enter()
        if stream not in (_LEGACY, _UNASKED):
            device().wait()
        rank = len(self.shape)
        sizes = (ctypes.c_int64 * max(1, rank))(*self.shape)
        managed = _Managed()
        tensor = managed.tensor
        tensor.data, tensor.rank, tensor.offset = self._block.address, rank, 0
        tensor.device = _Device(*self.__dlpack_device__())
        code = 4 if self.dtype.name == "bfloat16" else _CODES[self.dtype.kind]
        tensor.type = _Type(code, 8 * self.dtype.itemsize, 1)
        tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = _release
        where = ctypes.addressof(managed)
        _kept[where] = managed, sizes, self._block
        return _new(where, _NAME, ctypes.cast(_unused, ctypes.c_void_p))
