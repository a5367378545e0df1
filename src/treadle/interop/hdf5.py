"""The arrays of an HDF5 file, read in a process of its own.

HDF5's C library is large and was not made for files that lie: what it does with one, in memory,
time or a crash, happens in a child process with limits. `read` is what the child does; this file
is its program, and imports nothing of Treadle.
"""

import json
import sys
from typing import Any

import numpy as np

try:
    import resource
except ImportError:  # not a POSIX system: the parent's clock is all there is
    resource = None  # type: ignore[assignment]

MOST_DEPTH = 32
MOST_OBJECTS = 200_000
LONGEST_NAME = 1024  # bytes of a layer's name
FILTERS = {1, 2, 3}  # deflate, shuffle, checksum: others are libraries that HDF5 would load
KINDS = "biuf"


class RefusedError(Exception):
    """What a file has and is not read."""


def read(path: str, largest: int) -> dict[str, np.ndarray]:
    """Arrays by their paths; a group called vars that has a name goes by it, as Keras has them."""
    import h5py

    found: dict[str, np.ndarray] = {}
    seen: set[int] = set()
    with h5py.File(path, "r") as file:
        waiting: list[tuple[Any, tuple[str, ...]]] = [(file, ())]
        while waiting:
            group, parts = waiting.pop()
            address = h5py.h5o.get_info(group.id).addr
            if address in seen or len(parts) > MOST_DEPTH or len(seen) > MOST_OBJECTS:
                raise RefusedError(f"groups in groups, at {_shown(parts)}")
            seen.add(address)
            for name in sorted(group, reverse=True):
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    raise RefusedError(f"a link to elsewhere, {_shown((*parts, name))}")
                part = group[name]
                if isinstance(part, h5py.Group):
                    waiting.append((part, _path(part, parts, name)))
                elif part.shape is not None:  # an empty dataset has none
                    largest -= _checked(part, (*parts, name), largest)
                    known = "/".join((*parts, name))
                    found[part.name.strip("/") if known in found else known] = part[()]
                if len(found) > MOST_OBJECTS:
                    raise RefusedError(f"more than {MOST_OBJECTS} arrays")
    return dict(sorted(found.items()))


def _path(group: Any, parts: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Where a group is; variables of a layer are under the layer's own name."""
    own = _name(group) if name == "vars" and parts else None
    return (*parts, name) if own is None else (*parts[:-1], own)


def _name(group: Any) -> str | None:
    import h5py

    if "name" not in group.attrs:
        return None
    attribute = h5py.h5a.open(group.id, b"name")
    if attribute.get_storage_size() > LONGEST_NAME or attribute.shape != ():
        raise RefusedError("a layer with a long name")
    found = group.attrs["name"]
    return found[:LONGEST_NAME] if isinstance(found, str) and found else None


def _checked(array: Any, parts: tuple[str, ...], left: int) -> int:
    """The bytes of an array that is in this file, of numbers, and not too large."""
    import h5py

    if not isinstance(array, h5py.Dataset):
        raise RefusedError(f"{_shown(parts)}, which is no array")
    if array.is_virtual or array.external:
        raise RefusedError(f"{_shown(parts)}, whose values are in other files")
    settings = array.id.get_create_plist()
    filters = {settings.get_filter(i)[0] for i in range(settings.get_nfilters())}
    if not filters <= FILTERS or array.dtype.kind not in KINDS or array.dtype.names:
        raise RefusedError(f"{_shown(parts)}, {array.dtype} packed by {sorted(filters)}")
    nbytes = int(np.prod([int(n) for n in array.shape], dtype=object)) * array.dtype.itemsize
    if nbytes > left:
        raise RefusedError(f"{_shown(parts)}, {nbytes:,} bytes where {left:,} are allowed")
    return nbytes


def _shown(parts: tuple[str, ...]) -> str:
    return repr("/".join(parts)[-80:])


def _limit(memory: int, seconds: int) -> None:
    if resource is None:
        return
    for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(source: str, target: str, largest: int, memory: int, seconds: int) -> None:
    """Write the arrays of a file to an .npz, and their names or a refusal to the output."""
    _limit(memory, seconds)
    try:
        found = read(source, largest)
        np.savez(target, *found.values())
    except RefusedError as error:
        answer: dict[str, Any] = {"refused": str(error)}
    except MemoryError:
        answer = {"damaged": f"it takes more than {memory:,} bytes of memory to read"}
    except Exception as error:  # whatever h5py makes of a damaged file
        answer = {"damaged": f"{type(error).__name__}: {str(error)[:200]}"}
    else:
        answer = {"names": list(found)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
