"""Named arrays in requests and answers: JSON and safetensors, read without trust."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from treadle.base import dtypes
from treadle.base.arrays import lost_range, rounded
from treadle.base.dtypes import DType
from treadle.ir.types import TensorType
from treadle.serve.request_error import RequestError, shown

JSON, SAFETENSORS = "application/json", "application/safetensors"
KINDS = (JSON, SAFETENSORS)
INPUTS, OUTPUTS = "inputs", "outputs"
LONGEST_HEADER = 1 << 16  # bytes of a safetensors header
Arrays = dict[str, np.ndarray]

_CODES = {
    "F64": dtypes.float64,
    "F32": dtypes.float32,
    "BF16": dtypes.bfloat16,
    "F16": dtypes.float16,
    "I64": dtypes.int64,
    "I32": dtypes.int32,
    "U32": dtypes.uint32,
    "I8": dtypes.int8,
    "U8": dtypes.uint8,
    "BOOL": dtypes.bool_,
}
_ELEMENTS: dict[str, tuple[set[type], str]] = {  # what JSON has for a kind of dtype
    "float": ({int, float}, "numbers"),
    "int": ({int}, "whole numbers"),
    "uint": ({int}, "whole numbers"),
    "bool": ({bool}, "true or false"),
}


@dataclass(frozen=True)
class Named:
    """An input or a result of a forward, by the name that requests and answers have for it."""

    name: str
    type: TensorType

    def described(self) -> dict[str, object]:
        return {"shape": list(self.type.shape), "dtype": self.type.dtype.name}


def decode(operation: str, kind: str, body: bytes, inputs: Sequence[Named]) -> Arrays:
    """The arrays of a request's body, of the dtypes and shapes of the inputs."""
    reading = _from_json if kind == JSON else _from_safetensors
    return reading(operation, body, inputs)


def encode(kind: str, outputs: Mapping[str, np.ndarray]) -> bytes:
    """The body of an answer."""
    return _to_json(outputs) if kind == JSON else _to_safetensors(outputs)


def read_object(operation: str, body: bytes) -> dict[str, Any]:
    """A JSON object as RFC 8259 has it: UTF-8, no NaN, and no name twice."""
    try:
        found = json.loads(
            body.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except RecursionError:
        _malformed(operation, "the JSON is nested too deep")
    except ValueError as error:  # what json and UnicodeDecodeError say, and numbers of many digits
        _malformed(operation, f"the body is no JSON: {str(error)[:200]}")
    if not isinstance(found, dict):
        _malformed(operation, f"the body is {shown(found)}, not an object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {shown(twice)} is there twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _malformed(operation: str, cause: str, values: Mapping[str, object] | None = None) -> NoReturn:
    raise RequestError(400, operation, cause, "See the service's /v1 for what it takes.", values)


def _unfit(operation: str, named: Named, cause: str) -> NoReturn:
    values = {"name": named.name, **named.described()}
    remedy = f"{named.name} is {named.type}."
    raise RequestError(422, operation, f"{named.name} {cause}", remedy, values)


def _from_json(operation: str, body: bytes, inputs: Sequence[Named]) -> Arrays:
    found = read_object(operation, body)
    if set(found) != {INPUTS}:
        names = ", ".join(map(shown, list(found)[:6])) or "nothing"
        _malformed(operation, f"the body has {names}, not {INPUTS!r} alone")
    given = found[INPUTS]
    if not isinstance(given, dict):
        _malformed(operation, f"{INPUTS!r} is {shown(given)}, not an object of arrays by name")
    _check_names(operation, given, inputs)
    return {n.name: _array(operation, n, given[n.name]) for n in inputs}


def _check_names(operation: str, given: Mapping[str, object], inputs: Sequence[Named]) -> None:
    expected = [n.name for n in inputs]
    missing = [n for n in expected if n not in given]
    extra = [n for n in given if n not in expected]
    if missing or extra:
        cause = f"the inputs are {', '.join(map(shown, list(given)[:6])) or 'none'}"
        remedy = f"Give each of these once: {', '.join(expected) or 'none'}."
        raise RequestError(422, operation, cause, remedy, {"missing": missing, "extra": extra[:6]})


def _array(operation: str, named: Named, value: object) -> np.ndarray:
    """Nested lists as an array, element types and shape as they are declared."""
    elements, dtype = _elements(operation, named, value), named.type.dtype
    allowed, text = _ELEMENTS[dtype.kind]
    if not set(map(type, elements)) <= allowed:
        wrong = next(e for e in elements if type(e) not in allowed)
        _unfit(operation, named, f"has {shown(wrong)} where {text} belong")
    if dtype.is_integer and elements:
        low, high = dtype.range()
        wrong = next((e for e in (min(elements), max(elements)) if not low <= e <= high), None)
        if wrong is not None:
            _unfit(operation, named, f"has {shown(wrong)}, which {dtype} cannot hold")
    array = _floats(operation, named, elements) if dtype.is_float else np.array(elements)
    return array.astype(dtype.numpy, copy=False).reshape(named.type.shape)


def _elements(operation: str, named: Named, value: object) -> list[Any]:
    """What nested lists hold, in order, level by level: no depth of theirs is trusted."""
    level: list[Any] = [value]
    for depth, size in enumerate(named.type.shape):
        for part in level:
            if type(part) is not list:
                cause = f"has {shown(part)} at depth {depth} where a list of {size} belongs"
                _unfit(operation, named, cause)
            if len(part) != size:
                cause = f"has a list of {len(part)} at depth {depth} where {size} belong"
                _unfit(operation, named, cause)
        level = list(chain.from_iterable(level))
    return level


def _floats(operation: str, named: Named, elements: list[Any]) -> np.ndarray:
    """Numbers in a float dtype; those that it makes infinite are refused."""
    try:
        array = np.array(elements, np.float64)
    except OverflowError:  # a whole number of more than 308 digits
        _unfit(operation, named, f"has a number that {named.type.dtype} cannot hold")
    found = rounded(array, named.type.dtype.numpy)
    is_lost = ~np.isfinite(found)  # 1e400 is infinite before it is rounded
    if is_lost.any():
        _unfit(operation, named, f"has {array[is_lost][0]}, which {named.type.dtype} cannot hold")
    return found


def _from_safetensors(operation: str, body: bytes, inputs: Sequence[Named]) -> Arrays:
    if len(body) < 8:
        _malformed(operation, f"{len(body)} bytes are no safetensors file, which has 8 at least")
    length = int.from_bytes(body[:8], "little")
    if length > min(len(body) - 8, LONGEST_HEADER):
        cause = f"the header should have {length} bytes, of {len(body) - 8} and {LONGEST_HEADER}"
        _malformed(operation, f"{cause} at most")
    header, data = read_object(operation, body[8 : 8 + length]), memoryview(body)[8 + length :]
    header.pop("__metadata__", None)
    _check_names(operation, header, inputs)
    spans = []
    arrays: Arrays = {}
    for named in inputs:
        dtype, start, end = _entry(operation, named, header[named.name], len(data))
        arrays[named.name] = _viewed(operation, named, dtype, data[start:end])
        spans.append((start, end))
    _check_spans(operation, spans, len(data))
    return arrays


def _entry(operation: str, named: Named, entry: object, most: int) -> tuple[DType, int, int]:
    """The dtype of an array and where its bytes are; other shapes and lengths are refused."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _malformed(operation, f"the header has {shown(entry)} for {named.name}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _CODES.get(code) if isinstance(code, str) else None
    if dtype is None or dtype.kind != named.type.dtype.kind:
        _unfit(operation, named, f"has the dtype {shown(code)}")
    if not _are_whole(shape) or tuple(shape) != named.type.shape:
        _unfit(operation, named, f"has the shape {shown(shape)}")
    if not _are_whole(offsets) or len(offsets) != 2:
        _malformed(operation, f"the header has the offsets {shown(offsets)} for {named.name}")
    start, end = offsets
    nbytes = math.prod(named.type.shape) * dtype.itemsize
    if not (0 <= start <= end <= most and end - start == nbytes):
        cause = f"{named.name} lies from {shown(start)} to {shown(end)} of {most} bytes"
        _malformed(operation, cause, {"bytes": nbytes})
    return dtype, start, end


def _are_whole(value: object) -> bool:
    return type(value) is list and all(type(v) is int for v in value)


def _viewed(operation: str, named: Named, dtype: DType, data: memoryview) -> np.ndarray:
    """Bytes as an array of the declared dtype; what that cannot hold is refused."""
    if dtype is dtypes.bool_ and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        _unfit(operation, named, "has bytes that are neither 0 nor 1")
    array = np.frombuffer(data, dtype.numpy.newbyteorder("<")).reshape(named.type.shape)
    wanted = named.type.dtype
    if dtype.is_integer and array.size:
        low, high = wanted.range()
        if int(array.min()) < low or int(array.max()) > high:
            cause = f"has values from {array.min()} to {array.max()}"
            _unfit(operation, named, f"{cause}, which {wanted} cannot hold")
    lost = lost_range(array, wanted) if dtype.is_float else None
    if lost is not None:
        _unfit(operation, named, lost)
    return rounded(array, wanted.numpy)  # a copy: bytes of a body lie anywhere


def _check_spans(operation: str, spans: Sequence[tuple[int, int]], size: int) -> None:
    """Arrays lie one behind the other and are all there is."""
    at = 0
    for start, end in sorted(spans):
        if start != at:
            _malformed(operation, f"the arrays overlap or leave bytes out, at {min(start, at)}")
        at = end
    if at != size:
        _malformed(operation, f"{size - at} bytes follow the last array")


def _to_json(outputs: Mapping[str, np.ndarray]) -> bytes:
    """Numbers are exact; what JSON has no number for is "NaN", "Infinity" or "-Infinity"."""
    found = {name: _lists(array) for name, array in outputs.items()}
    return json.dumps({OUTPUTS: found}, allow_nan=False, separators=(",", ":")).encode()


def _lists(array: np.ndarray) -> Any:
    is_float = dtypes.from_numpy(array.dtype) in dtypes.FLOATS
    wide = array.astype(np.float64) if is_float else array
    if not is_float or np.isfinite(wide).all():
        return wide.tolist()
    named = wide.astype(object)
    named[np.isnan(wide)] = "NaN"
    named[np.isposinf(wide)] = "Infinity"
    named[np.isneginf(wide)] = "-Infinity"
    return named.tolist()


def _to_safetensors(outputs: Mapping[str, np.ndarray]) -> bytes:
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in outputs.items()})
