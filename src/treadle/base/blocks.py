"""Numbers in blocks, as GGUF files have them: few bits each, with scales that a block shares.

A row of an array is a whole number of blocks. `q8_0` and `q4_0` have one float16 scale for 32
numbers; `q4_k`, `q5_k` and `q6_k` have 256 numbers in groups whose scales share one of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treadle.base.errors import ArgumentError

Code = Callable[[np.ndarray], np.ndarray]

AT_ONCE = 1 << 19  # numbers that are decoded or encoded together: what is between stays in a cache


@dataclass(frozen=True)
class BlockFormat:
    """A format by its name in files: `size` numbers are in `nbytes` bytes.

    `decode` is from blocks, uint8 (n, nbytes), to float32 (n, size); `encode` is the way back, None
    where it is not written.
    """

    name: str
    number: int  # what files call it
    size: int
    nbytes: int
    decode: Code
    encode: Code | None = None


def decoded(format_: str, blocks: np.ndarray) -> np.ndarray:
    """float32 numbers (…, n) of blocks that are bytes, uint8 (…, n / size · nbytes)."""
    known = block_format(format_)
    *outer, width = np.shape(blocks)
    if blocks.dtype != np.uint8 or width % known.nbytes:
        cause = f"blocks of {known.name} are {known.nbytes} bytes, given {blocks.dtype} of {width}"
        raise ArgumentError("decoded", cause, "Pass rows of whole blocks, uint8.")
    rows = np.ascontiguousarray(blocks).reshape(-1, known.nbytes)
    found = np.empty((len(rows), known.size), np.float32)
    for part in _parts(len(rows), known.size):
        found[part] = known.decode(rows[part])
    return found.reshape(*outer, width // known.nbytes * known.size)


def encoded(format_: str, values: np.ndarray) -> np.ndarray:
    """The blocks of numbers (…, n), n a multiple of the format's size: uint8 (…, bytes)."""
    known = block_format(format_)
    if known.encode is None:
        can = ", ".join(n for n, f in BLOCKS.items() if f.encode is not None)
        raise ArgumentError("encoded", f"{known.name} is only read", f"Written are: {can}.")
    *outer, width = np.shape(values)
    if width % known.size:
        cause = f"rows of {width} numbers are no whole blocks of {known.size}"
        raise ArgumentError("encoded", cause, "Use a format without blocks, as f16.")
    rows = np.ascontiguousarray(values).reshape(-1, known.size)
    found = np.empty((len(rows), known.nbytes), np.uint8)
    for part in _parts(len(rows), known.size):
        given = rows[part].astype(np.float32)
        if not np.isfinite(given).all():
            raise ArgumentError("encoded", "a number is NaN or infinite", "Blocks have none.")
        found[part] = known.encode(given)
    return found.reshape(*outer, width // known.size * known.nbytes)


def block_format(name: str) -> BlockFormat:
    if name in BLOCKS:
        return BLOCKS[name]
    known = ", ".join(BLOCKS)
    raise ArgumentError("blocks", f"the format is {name!r}", f"Known are: {known}.")


def scales_and_codes(format_: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two parts of blocks of `q8_0` or `q4_0`, for a program that decodes them itself.

    Of uint8 (…, n · nbytes): scales, float16 (…, n), and int8 codes (…, n, 32) of `q8_0`, or uint8
    (…, n, 16) of `q4_0`: byte i has the numbers i and i + 16 in its low and high half, each 8 too
    great. A number is its code times its block's scale.
    """
    known = block_format(format_)
    if known.name not in ("q8_0", "q4_0"):
        raise ArgumentError("blocks", f"{known.name} has more parts", "Use q8_0 or q4_0.")
    *outer, width = blocks.shape
    each = blocks.reshape(*outer, width // known.nbytes, known.nbytes)
    scales = np.ascontiguousarray(each[..., :2]).view(np.float16)[..., 0]
    codes = np.ascontiguousarray(each[..., 2:])
    return scales, codes.view(np.int8) if known.name == "q8_0" else codes


def _parts(count: int, size: int) -> list[slice]:
    step = max(1, AT_ONCE // size)
    return [slice(i, i + step) for i in range(0, count, step)]


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at some bytes of each block: float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: np.ndarray, width: int) -> np.ndarray:
    """Low halves of `width` bytes, then their high halves, and so on: uint8 (n, 2 · bytes)."""
    runs = blocks.reshape(len(blocks), -1, 1, width)
    return np.concatenate([runs & 15, runs >> 4], 2).reshape(len(blocks), -1)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    """16 for each of 32 bits that is set, from 4 bytes: uint8 (n, 32)."""
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little") << 4


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _scale(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    codes = _nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8)
    return codes * _scale(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks[:, 4:], 16) * _scale(blocks, 0) + _scale(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return (codes.astype(np.float32) - np.float32(16)) * _scale(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes * _scale(blocks, 0) + _scale(blocks, 2)


def _group_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of 8 groups, 6 bits each in 12 bytes: uint8 (n, 8) twice."""
    scales, offsets, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    late_scales = (rest & 15) | ((scales >> 2) & 48)
    late_offsets = (rest >> 4) | ((offsets >> 2) & 48)
    return (
        np.concatenate([scales & 63, late_scales], 1),
        np.concatenate([offsets & 63, late_offsets], 1),
    )


def _grouped(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes (n, 256) with the two scales and 8 groups that begin blocks of `q4_k` and `q5_k`."""
    scales, offsets = _group_scales(blocks[:, 4:16])
    scale = (_scale(blocks, 0) * scales)[..., None]  # (n, 8, 1)
    offset = (_scale(blocks, 2) * offsets)[..., None]
    return (codes.reshape(-1, 8, 32) * scale - offset).reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _grouped(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]  # (n, 8, 32)
    codes = _nibbles(blocks[:, 48:], 32) | ((high & 1) << 4).reshape(-1, 256)
    return _grouped(blocks, codes)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """4 low bits each, then 2 high ones each, 16 scales of groups, and their scale."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3  # (n, 2, 4, 32)
    codes = _nibbles(blocks[:, :128], 64) | (high << 4).reshape(-1, 256)
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8)  # (n, 16)
    centred = codes.reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    return (centred * scales[..., None]).reshape(-1, 256)


def _to_q8_0(values: np.ndarray) -> np.ndarray:
    """The greatest magnitude is 127 steps; halves are rounded away from zero."""
    scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
    steps = values * _inverse(scale)
    whole = np.trunc(steps)
    codes = whole + np.trunc(2 * (steps - whole))
    return np.concatenate([_as_bytes(scale), codes.astype(np.int8).view(np.uint8)], 1)


def _to_q4_0(values: np.ndarray) -> np.ndarray:
    """The number of the greatest magnitude is -8 steps."""
    at = np.abs(values).argmax(1, keepdims=True)
    scale = np.take_along_axis(values, at, 1) / np.float32(-8)
    steps = np.trunc(values * _inverse(scale) + np.float32(8.5))
    codes = np.clip(steps, 0, 15).astype(np.uint8)
    return np.concatenate([_as_bytes(scale), codes[:, :16] | (codes[:, 16:] << 4)], 1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where that is not finite: such a block decodes to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        found = np.float32(1) / scale
    return np.where(np.isfinite(found), found, np.float32(0))


def _as_bytes(scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = scale.astype("<f2")
    if not np.isfinite(narrow).all():
        cause = f"a block's scale is {float(np.abs(scale).max()):.4g}, more than float16 holds"
        raise ArgumentError("encoded", cause, "Scale the values down, or use f32.")
    return narrow.view(np.uint8)


BLOCKS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("q4_0", 2, 32, 18, _q4_0, _to_q4_0),
        BlockFormat("q4_1", 3, 32, 20, _q4_1),
        BlockFormat("q5_0", 6, 32, 22, _q5_0),
        BlockFormat("q5_1", 7, 32, 24, _q5_1),
        BlockFormat("q8_0", 8, 32, 34, _q8_0, _to_q8_0),
        BlockFormat("q4_k", 12, 256, 144, _q4_k),
        BlockFormat("q5_k", 13, 256, 176, _q5_k),
        BlockFormat("q6_k", 14, 256, 210, _q6_k),
    )
}
