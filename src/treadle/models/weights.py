"""Values in files, one or several with an index: safetensors or PyTorch's, checked first."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from treadle.base.errors import LoadError
from treadle.base.memory import refuse_beyond
from treadle.interop import torch_files
from treadle.models.config import Json
from treadle.models.model import Model, listed

STEMS = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LARGEST_CONFIG = 1 << 22  # bytes; real ones have some 2¹²
LARGEST_INDEX = 1 << 26
MOST_SHARDS = 10_000
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
PICKLED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.bin")
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of an element
INTEGERS = {"I64": 8, "I32": 4}

T = TypeVar("T")


def weights_file(stem: str) -> str:
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def read_json(path: Path, largest: int) -> Json:
    """An object in a file of bounded size; numbers that are none, as NaN, are refused."""
    try:
        size = os.stat(path).st_size
        if not path.is_file() or size > largest:
            what = f"has {size:,} bytes, more than {largest:,}" if path.is_file() else "is no file"
            raise LoadError("load", f"{path} {what}", "Use another copy.")
        text = path.read_text(encoding="utf-8")
        found = json.loads(text, parse_constant=_no_number)
    except LoadError:
        raise
    except OSError as error:
        raise LoadError("load", f"{path}: {error.strerror}", "Check the path.") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        cause = f"{path} is damaged: {str(error)[:200]}"
        raise LoadError("load", cause, "Use another copy.") from error
    if not isinstance(found, dict):
        raise LoadError("load", f"{path} holds no object", "Use another copy.")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


@dataclass(frozen=True)
class Entry:
    """An array of a file, by what the file's header says."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {**FLOATS, **INTEGERS}.get(self.dtype, 8)


def read_weights(folder: Path, model: Model) -> dict[str, np.ndarray]:
    """The values of a model's declarations; whatever does not fit is refused before reading."""
    entries = _entries(folder, STEMS[model.library])
    if entries is None:
        return _from_pickles(folder, model)
    found = named_values(model, entries)
    declared = model.declarations()
    _check_complete(folder, model, found)
    for name, entry in found.items():
        kind = FLOATS if declared[name].dtype.is_float else INTEGERS
        if entry.dtype not in kind or entry.shape != declared[name].shape:
            cause = f"{entry.file}: {entry.name} is {entry.dtype} {entry.shape}, and by the "
            cause += f"configuration {declared[name].type}"
            raise LoadError("load", cause, "Check that the configuration is that of the weights.")
    refuse_beyond("load", f"what is in {folder}", sum(e.nbytes for e in found.values()))
    return read_entries(found)


def _check_complete(folder: Path, model: Model, found: Mapping[str, object]) -> None:
    missing = [n for n in model.declarations() if n not in found]
    if missing:
        cause = f"{folder} has no values for {listed(missing)}"
        raise LoadError("load", cause, "Check that the configuration is that of the weights.")


def _from_pickles(folder: Path, model: Model) -> dict[str, np.ndarray]:
    """The values of a folder that has only PyTorch's files, which are read without executing."""
    if (folder / PICKLED).exists():
        files = [folder / PICKLED]
    else:
        names = _weight_map(folder / PICKLED_INDEX, PICKLED_NAME)
        files = [folder / name for name in sorted(set(names.values()))]
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        arrays |= torch_files.load(file)
    found = named_values(model, arrays)
    _check_complete(folder, model, found)
    return found


def named_values(model: Model, given: Mapping[str, T]) -> dict[str, T]:
    """By the names of declarations. Files of the model without its head lack the first part."""
    found: dict[str, T] = {}
    unknown = []
    declared = model.declarations()
    for name, value in given.items():
        if any(re.fullmatch(pattern, name) for pattern in model.ignored):
            continue
        now = _renamed(model, name)
        for candidate in (now, f"{model.prefix}.{now}"):
            first = candidate if candidate in declared else model.first_name(candidate)
            if first is not None:
                found[first] = value
                break
        else:
            unknown.append(name)
    if unknown:
        cause = f"{type(model).__name__} has no {listed(unknown)}"
        raise LoadError("load", cause, "Check that the configuration is that of the weights.")
    return found


def _renamed(model: Model, name: str) -> str:
    for pattern, replacement in model.renamed:
        name = re.sub(rf"{pattern}\Z", replacement, name)
    return name


def _entries(folder: Path, stem: str) -> dict[str, Entry] | None:
    """What the headers of a folder's files list; None where it has PyTorch's."""
    weights, index = weights_file(stem), index_file(stem)
    if (folder / weights).exists():
        return header(folder / weights)
    if not (folder / index).exists():
        if any((folder / n).exists() for n in (PICKLED, PICKLED_INDEX)):
            return None
        cause = f"{folder} has neither {weights} nor {index}"
        raise LoadError("load", cause, "Check the path.")
    wanted = _weight_map(folder / index, PLAIN_NAME)
    found: dict[str, Entry] = {}
    for file in sorted(set(wanted.values())):
        listed_there = header(folder / file)
        found |= {n: e for n, e in listed_there.items() if wanted.get(n) == file}
    absent = [n for n in wanted if n not in found]
    if absent:
        cause = f"{folder / index} promises {listed(absent)}, which its file does not have"
        raise LoadError("load", cause, "Use another copy.")
    return found


def _weight_map(index: Path, plain: re.Pattern[str]) -> dict[str, str]:
    """Files by name; only plain names of files beside the index."""
    found = read_json(index, LARGEST_INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise LoadError("load", f"{index} has no weight_map", "Use another copy.")
    for file in found.values():
        if not isinstance(file, str) or not plain.fullmatch(file):
            cause = f"{index} names the file {str(file)[:80]!r}"
            raise LoadError("load", cause, "Only plain names of files in the folder are read.")
    if len(set(found.values())) > MOST_SHARDS:
        raise LoadError("load", f"{index} names more than {MOST_SHARDS} files", "Merge them.")
    return found


def header(file: Path) -> dict[str, Entry]:
    """Names, dtypes and shapes; that they fit the file's length is checked by `safetensors`."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise LoadError("load", f"there is no file {file}", "Use a complete copy.")
    try:
        with safe_open(str(file), framework="numpy") as opened:
            found = {}
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                found[name] = Entry(file, name, str(part.get_dtype()), shape)
            return found
    except (SafetensorError, ValueError, OSError) as error:
        cause = f"{file} is damaged or not a safetensors file: {str(error)[:200]}"
        raise LoadError("load", cause, "Use another copy.") from error


def read_entries(entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    from safetensors import safe_open

    found: dict[str, np.ndarray] = {}
    by_file: dict[Path, list[str]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(str(file), framework="numpy") as opened:
            for name in names:
                found[name] = opened.get_tensor(entries[name].name)
    return found


def encoded(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a file that `transformers` reads."""
    from safetensors.numpy import save

    plain: Any = {n: np.ascontiguousarray(a).reshape(a.shape) for n, a in arrays.items()}
    return save(plain, {"format": "pt"})
