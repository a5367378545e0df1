"""How many messages a file would become, found without making them.

A message of two bytes takes some 150 in memory, so that a small file can ask for much. Large models
are large by their values, which are single fields.
"""

from __future__ import annotations

from typing import Any

from treadle.interop.onnx.library import library
from treadle.interop.onnx.reader.tensors import Folder

SMALL = 1 << 22  # bytes of a file that cannot take too much
MOST_FIELDS = 4_000_000
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def check_fields(data: bytes, folder: Folder) -> None:
    """Refuses a file of more fields than a model has. What is damaged is left to protobuf."""
    if len(data) <= SMALL:
        return
    count = 0
    stack: list[tuple[Any, int, int]] = [(library().ModelProto.DESCRIPTOR, 0, len(data))]
    while stack:
        message, at, end = stack.pop()
        fields = message.fields_by_number
        while at < end:
            count += 1
            if count > MOST_FIELDS:
                raise folder.refuse(f"it has more than {MOST_FIELDS:,} fields")
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == BYTES:
                size, at = _varint(data, at)
                field = fields.get(tag >> 3)
                if field is not None and field.message_type is not None and at + size <= end:
                    # What is inside first, and then the rest: the stack is as deep as messages are.
                    stack += [(message, at + size, end), (field.message_type, at, at + size)]
                    break
                at += size
            elif kind == VARINT:
                _, at = _varint(data, at)
            elif kind in (FIXED32, FIXED64):
                at += 4 if kind == FIXED32 else 8
            else:
                break  # a group, or no field at all


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next thing begins; the end of the data where it does not end."""
    found = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return found, at
    return 0, len(data)
