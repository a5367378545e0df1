"""Chunks of a checkpoint: the rows that each of several ranks had of every sharded array.

The rows of all chunks, one after the other, are those of the whole array, whatever the number of
ranks that wrote them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from treadle.base.shapes import Shape
from treadle.distributed.shards import Pieces
from treadle.train.manifest import DamagedError, Manifest
from treadle.train.packing import unpack

Arrays = dict[str, np.ndarray]


def chunk_name(step: str, rank: int, ranks: int) -> str:
    """The file of a rank, without its ending; names of steps have no dot."""
    return f"{step}.chunk-{rank:05d}-of-{ranks:05d}"


def read_state(path: Path, name: str, manifest: Manifest, most: int | None = None) -> Arrays:
    """A step's whole state, of its file and of the chunks of all ranks that wrote it.

    `most` bounds the bytes of an unpacked file.
    """
    state = unpack(path, name, manifest.files, most)
    chunks = manifest.chunks.get(name)
    if chunks is None:
        return state
    parts = [
        unpack(path, chunk_name(name, rank, chunks.ranks), manifest.files, most)
        for rank in range(chunks.ranks)
    ]
    return state | {n: _glued(n, s, chunks.shards, parts) for n, s in chunks.shapes.items()}


def _glued(name: str, shape: Shape, shards: int, parts: list[Arrays]) -> np.ndarray:
    pieces = Pieces(shape, shards)
    rows = [part[name] for part in parts if name in part]
    right = len(rows) == len(parts) and all(r.ndim == 2 and r.dtype == rows[0].dtype for r in rows)
    wanted = (shards, pieces.length)
    if not right or (sum(len(r) for r in rows), rows[0].shape[1]) != wanted:
        raise DamagedError(f"the chunks of {name} are not {wanted[0]} rows of {wanted[1]}")
    return pieces.glue(np.concatenate(rows))
