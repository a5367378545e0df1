"""Weights of Keras: `.weights.h5`, `.h5` and `.keras` files by name, and into a module."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.interop import hdf5, npz
from treadle.interop.archives import ALWAYS, MOST_TIMES, open_archive
from treadle.interop.opened import check_file, damaged
from treadle.models.model import Model, listed
from treadle.nn.layers import Embedding
from treadle.nn.module import Module, held
from treadle.runtime.files import as_path
from treadle.step.loading import Loaded

IN_ARCHIVE = "model.weights.h5"
PROGRAM = 1 << 30  # bytes of memory for Python, NumPy and HDF5 themselves
SECONDS = 20  # of a processor, and one more for each SPEED bytes
SPEED = 50_000_000
SKIPPED = ("layers", "model_weights", "_layer_checkpoint_dependencies")  # groups of no meaning


def load(path: str | Path, *, largest: int | None = None) -> dict[str, np.ndarray]:
    """The weights of a file by name: `dense/kernel` of `.h5`, `dense/0` of `.weights.h5`, `.keras`.

    The latter number the weights of a layer in the order of `layer.weights`: kernel, bias. Links,
    values in other files, and archives that unpack to more than `largest` bytes are refused.
    """
    source = as_path("load", path)
    check_file(source)
    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        place = source
        if source.suffix == ".keras":
            place = Path(folder) / IN_ARCHIVE
            with open_archive(source, "a .keras file", largest=largest) as archive:
                place.write_bytes(archive.read(IN_ARCHIVE))
        allowed = max(ALWAYS, MOST_TIMES * os.stat(source).st_size)
        return _short(_read(source, place, allowed if largest is None else largest, Path(folder)))


def _read(source: Path, place: Path, largest: int, folder: Path) -> dict[str, np.ndarray]:
    """What a child process finds in an HDF5 file."""
    if importlib.util.find_spec("h5py") is None:
        cause = f"{source} needs the package h5py, which is not installed"
        raise LoadError("load", cause, 'pip install "treadle[keras]"')
    target, seconds = folder / "arrays.npz", SECONDS + largest // SPEED
    limits = [str(n) for n in (largest, PROGRAM + 3 * largest, seconds)]
    # -P: the folder of this file has modules with the names of the libraries that they are for.
    command = [sys.executable, "-P", hdf5.__file__, str(place.absolute()), str(target), *limits]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "HDF5_PLUGIN_PATH": ""}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=2 * seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise damaged(source, f"it takes more than {2 * seconds} s to read") from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        is_long = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        how = f"took more than {seconds} s" if is_long else f"ended with {done.returncode}"
        cause = f"HDF5's library {how} at it"
        raise damaged(source, cause) from error
    if "refused" in answer:
        cause = f"{source} has {answer['refused']}"
        raise LoadError("load", cause, "Save plain arrays in one file.")
    if "damaged" in answer:
        raise damaged(source, answer["damaged"])
    arrays = npz.load(target, largest=largest + (1 << 24))
    return {name: arrays[f"arr_{i}"] for i, name in enumerate(answer["names"])}


def _short(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By a layer's name and a weight's, where that is not the name of two; else by all of it."""
    names: dict[str, list[str]] = {}
    for full in found:
        parts = [p.removesuffix(":0") for p in full.split("/") if p not in SKIPPED]
        is_legacy = len(parts) > 2 and not parts[-1].isdigit()
        names.setdefault("/".join((parts[0], parts[-1]) if is_legacy else parts), []).append(full)
    short = {full: name for name, those in names.items() for full in those if len(those) == 1}
    return {short.get(full, full): array for full, array in found.items()}


def load_into(
    module: Module,
    path: str | Path,
    names: Mapping[str, str],
    *,
    transpose: bool | Collection[str] = True,
    largest: int | None = None,
) -> Loaded:
    """Start a module from weights: `names` says which of the file's is which of the module's.

    Kernels of Keras have the outputs last. With `transpose` the weights of two and more axes, but
    for those of embeddings, are turned to have them first, as `nn.Linear` and `nn.Conv2d` do; or
    those with the names that it lists. What `names` leaves out stays. All or nothing.
    """
    arrays = load(path, largest=largest)
    declared = module.declarations()
    plain = {id(m.weight) for _, m in module.named_modules() if isinstance(m, Embedding)}
    given: dict[str, np.ndarray] = {}
    for theirs, ours in names.items():
        first = ours if ours in declared else module.first_name(ours)
        if theirs not in arrays or first is None:
            known = listed(list(arrays if theirs not in arrays else declared))
            cause = f"there is no {theirs!r}" if theirs not in arrays else f"there is no {ours!r}"
            raise LoadError("load_into", f"{path}: {cause}", f"There are: {known}.")
        is_turned = id(declared[first]) not in plain if transpose is True else False
        if not isinstance(transpose, bool):
            is_turned = ours in transpose
        array = outputs_first(arrays[theirs]) if is_turned else arrays[theirs]
        if array.shape != declared[first].shape:
            cause = f"{theirs} {arrays[theirs].shape} is {array.shape} here, and {ours} is "
            remedy = "See the argument transpose, and which of them it is."
            raise LoadError("load_into", f"{path}: {cause}{declared[first].type}", remedy)
        given[first] = array
    _start(module, given)
    missing = tuple(n for n in declared if n not in given)
    return Loaded(missing, tuple(n for n in arrays if n not in names))


def outputs_first(kernel: np.ndarray) -> np.ndarray:
    """(…, in, out) → (out, in, …): a kernel of a dense or convolutional layer, also transposed."""
    if kernel.ndim < 2:
        return kernel
    axes = range(kernel.ndim - 2)
    return kernel.transpose(kernel.ndim - 1, kernel.ndim - 2, *axes)


def _start(module: Module, given: Mapping[str, np.ndarray]) -> None:
    if isinstance(module, Model):
        module.start_from({**module.values(), **given})
        return
    if not isinstance(module, Module):
        raise ArgumentError("load_into", f"{module!r} is no module", "Pass an nn.Module.")
    declared = module.declarations()
    for name, array in given.items():
        declared[name].init = held(array)
