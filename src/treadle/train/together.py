"""Checkpoints of several ranks: each writes its chunk, rank 0 what all have and the manifest."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from treadle.runtime.files import sync_folder
from treadle.step.parallel.local_state import Piece, local_state, wrong_here
from treadle.step.train_step import TrainStep
from treadle.train.chunks import chunk_name
from treadle.train.folder import WRITING, Digest, write_file
from treadle.train.manifest import MANIFEST, Chunks, Manifest, StepRecord
from treadle.train.packing import ARRAYS, file_name, pack
from treadle.train.restoring import stopped
from treadle.train.world import World

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a rank writes, and what the manifest says of it."""

    records: dict[str, StepRecord]
    files: dict[str, Arrays]  # by names without an ending
    chunks: dict[str, Chunks]
    wrong: list[tuple[str, tuple[str, ...]]]  # names of what is not finite here, by step


def contents_of(
    world: World, steps: Mapping[str, TrainStep], arrays: Mapping[str, np.ndarray]
) -> Contents:
    """This rank's part of a checkpoint."""
    files: dict[str, Arrays] = {}
    chunks: dict[str, Chunks] = {}
    wrong: list[tuple[str, tuple[str, ...]]] = []
    with stopped(steps):
        records = {name: StepRecord.of(step) for name, step in steps.items()}
        for name, step in steps.items():
            whole, rows = local_state(step)
            wrong += [(name, wrong_here(step, whole, rows))]
            if world.writes:
                files[name] = whole
            if rows:
                files[chunk_name(name, world.rank, world.size)] = {
                    n: piece.rows for n, piece in rows.items()
                }
                chunks[name] = _described(world, rows)
    if arrays and world.writes:
        files[ARRAYS] = dict(arrays)
    return Contents(records, files, chunks, wrong)


def _described(world: World, rows: Mapping[str, Piece]) -> Chunks:
    shards = next(iter(rows.values())).pieces.shards
    return Chunks(world.size, shards, {n: p.pieces.shape for n, p in rows.items()})


def write_together(
    world: World,
    folder: Path,
    name: str,
    contents: Contents,
    compress: bool,
    manifest_of: Callable[[dict[str, Digest]], Manifest],
) -> Manifest | None:
    """All ranks write into one directory aside, which rank 0 renames; its manifest there.

    If anything fails on any rank, the directory is deleted and every rank has the same error.
    """
    aside = folder / f"{WRITING}{name}"
    with _deleted_unless_done(world, aside):
        world.agreed("save", lambda: aside.mkdir() if world.writes else None)
        own = world.agreed("save", lambda: _write_files(aside, contents, compress))
        told = world.told({n: asdict(d) for n, d in own.items()})
        files = {n: Digest(**d) for each in told for n, d in each.items()}
        return world.agreed(
            "save",
            lambda: _finish(aside, folder / name, manifest_of(files)) if world.writes else None,
        )


@contextlib.contextmanager
def _deleted_unless_done(world: World, aside: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if world.writes:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_files(aside: Path, contents: Contents, compress: bool) -> dict[str, Digest]:
    found = {}
    for name, arrays in contents.files.items():
        file = file_name(name, compress)
        found[file] = write_file(aside / file, pack(name, arrays, compress))
    return found


def _finish(aside: Path, path: Path, manifest: Manifest) -> Manifest:
    write_file(aside / MANIFEST, manifest.encode())
    sync_folder(aside)
    os.rename(aside, path)
    sync_folder(path.parent)
    return manifest
