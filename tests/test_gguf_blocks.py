"""Blocks of few bits: bit for bit as the `gguf` package has them."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from treadle.interop.gguf import blocks

gguf = pytest.importorskip("gguf")


def reference(name: str) -> object:
    return getattr(gguf.GGMLQuantizationType, name.upper())


def random_blocks(name: str, rows: int, count: int, seed: int = 0) -> np.ndarray:
    """Any bytes, but scales that are finite: the fields that are float16 get small numbers."""
    known = blocks.BLOCKS[name]
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (rows, count, known.nbytes)).astype(np.uint8)
    scales = {"q6_k": (208,), "q4_0": (0,), "q5_0": (0,), "q8_0": (0,)}.get(name, (0, 2))
    for at in scales:
        some = rng.normal(size=(rows, count, 1)).astype(np.float16)
        found[..., at : at + 2] = some.view(np.uint8)
    return found.reshape(rows, count * known.nbytes)


@pytest.mark.parametrize("name", blocks.BLOCKS)
def test_decoded_as_the_reference(name: str) -> None:
    known = blocks.BLOCKS[name]
    assert gguf.GGML_QUANT_SIZES[reference(name)] == (known.size, known.nbytes)
    assert int(reference(name)) == known.number  # type: ignore[call-overload]
    for rows, count in ((1, 1), (3, 2), (17, 5)):
        given = random_blocks(name, rows, count, rows)
        found = blocks.decoded(name, given)
        wanted = gguf.quants.dequantize(given, reference(name))
        assert found.dtype == np.float32
        assert found.shape == (rows, count * known.size)
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), name


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_encoded_as_the_reference(name: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(37, 96)).astype(np.float32)
    values[3], values[4, :32], values[5] = 0, -0.0, 2.5
    values[6] *= 1e-3
    values[7] = np.round(values[7] * 4) / 4  # ties
    found = blocks.encoded(name, values)
    assert np.array_equal(found, gguf.quants.quantize(values, reference(name)))
    back = blocks.decoded(name, found)
    step = np.abs(values).reshape(37, 3, 32).max(-1) / (127 if name == "q8_0" else 8)
    # A half, and 127 roundings of the float16 scale, which is subnormal in row 6.
    error = np.abs(back - values).reshape(37, 3, 32).max(-1)
    assert (error <= step * (0.75 if name == "q8_0" else 1.01)).all()


def test_parts_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = random_blocks("q4_k", 3, 5)
    wanted = blocks.decoded("q4_k", given)
    monkeypatch.setattr("treadle.base.blocks.AT_ONCE", 700)
    assert np.array_equal(blocks.decoded("q4_k", given), wanted)


def test_scales_and_codes() -> None:
    values = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    eight = blocks.encoded("q8_0", values)
    scales, codes = blocks.scales_and_codes("q8_0", eight)
    assert scales.shape == (3, 2)
    assert codes.shape == (3, 2, 32)
    assert codes.dtype == np.int8
    product = codes * scales.astype(np.float32)[..., None]
    assert np.array_equal(product.reshape(3, 64), blocks.decoded("q8_0", eight))
    four = blocks.encoded("q4_0", values)
    scales, codes = blocks.scales_and_codes("q4_0", four)
    assert codes.shape == (3, 2, 16)
    each = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - 8
    product = each * scales.astype(np.float32)[..., None]
    assert np.array_equal(product.reshape(3, 64), blocks.decoded("q4_0", four))


def test_extremes() -> None:
    empty = np.zeros((0, 64), np.float32)
    assert blocks.decoded("q8_0", blocks.encoded("q8_0", empty)).shape == (0, 64)
    assert blocks.encoded("q4_0", np.zeros((2, 0))).shape == (2, 0)
    small = np.full((1, 32), 1e-42, np.float32)  # the scale is 0 in float16
    for name in ("q8_0", "q4_0"):
        assert not blocks.decoded(name, blocks.encoded(name, small)).any()
        with pytest.raises(td.ArgumentError, match="float16 holds"):
            blocks.encoded(name, np.full((1, 32), 1e30, np.float32))
        with pytest.raises(td.ArgumentError, match="NaN"):
            blocks.encoded(name, np.full((1, 32), np.nan, np.float32))
        with pytest.raises(td.ArgumentError, match="no whole blocks"):
            blocks.encoded(name, np.zeros((2, 33), np.float32))
    with pytest.raises(td.ArgumentError, match="only read"):
        blocks.encoded("q6_k", np.zeros((1, 256), np.float32))
    with pytest.raises(td.ArgumentError, match="whole blocks"):
        blocks.decoded("q6_k", np.zeros((1, 209), np.uint8))
    with pytest.raises(td.ArgumentError, match="Known are"):
        blocks.decoded("iq1_s", np.zeros((1, 209), np.uint8))
