"""TensorBoard's event files, written by hand: records with checksums, messages of protobuf.

A record is its length (8 bytes), a checksum of that (4), the message, a checksum of that (4).
Numbers are little-endian, checksums CRC-32C, rotated and shifted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

VERSION = "brain.Event:2"

# Kinds of protobuf fields.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def record(message: bytes) -> bytes:
    """A message as it stands in a file."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = (crc >> 15 | crc << 17) + 0xA282EAD8
    return struct.pack("<I", rotated & 0xFFFFFFFF)


def version_event(time: float) -> bytes:
    """What a file begins with."""
    return _time(time) + _message(3, VERSION.encode())


def restart_event(time: float, step: int) -> bytes:
    """A new beginning: readers forget what earlier files have from this step on."""
    start = _varint_field(1, 1)
    return _time(time) + _varint_field(2, step) + _message(7, start)


def scalars_event(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Numbers by name at a step."""
    return _time(time) + _varint_field(2, step) + _message(5, b"".join(_values(values.items())))


def _values(items: Iterable[tuple[str, float]]) -> Iterable[bytes]:
    for name, value in items:
        number = _key(2, _FIXED32) + _float32(value)
        yield _message(1, _message(1, name.encode()) + number)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # finite, and beyond float32
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _time(time: float) -> bytes:
    return _key(1, _FIXED64) + struct.pack("<d", time)


def _message(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _varint_field(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    number &= 2**64 - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
