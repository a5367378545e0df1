"""Damaged Parquet files by the hundred thousand: each loads, or is refused by an error of Treadle.

    python tools/fuzz_tables.py [--files 100000] [--seed 0] [--keep FOLDER]

Files with several encodings, compressions and nested columns are changed in a few bytes, cut, or
have parts moved; a process with bounded memory and time loads each. What is neither loaded nor
refused, a crash or another exception, is written to FOLDER and makes this fail.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import treadle as td
from treadle.interop import tables

MEMORY = 6 << 30  # bytes of address space of a process; importing takes some of them
SECONDS = 10  # that one file may take
SHARE = 500  # files of a process


def originals(folder: Path) -> list[bytes]:
    """A few files that differ in how they are written."""
    rng = np.random.default_rng(0)
    rows = 40
    table = pa.table(
        {
            "n": rng.integers(0, 9, rows),
            "x": rng.normal(size=rows).astype(np.float32),
            "b": rng.integers(0, 2, rows).astype(bool),
            "l": [[i, i + 1] for i in range(rows)],
            "maybe": [None if i % 7 == 3 else float(i) for i in range(rows)],
        }
    )
    ways = [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0", "row_group_size": 15},
        {"compression": "gzip", "column_encoding": {"n": "DELTA_BINARY_PACKED"}}
        | {"use_dictionary": False},
        {"compression": "none", "column_encoding": {"x": "BYTE_STREAM_SPLIT"}}
        | {"use_dictionary": False, "write_page_checksum": True},
    ]
    found = []
    for i, way in enumerate(ways):
        path = folder / f"original{i}.parquet"
        pq.write_table(table, path, **way)
        found.append(path.read_bytes())
    return found


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """One file, changed somewhere; often in its last bytes, where a file says what it holds."""
    data = bytearray(content)
    kind = rng.integers(0, 5)
    size = len(data)
    start = size // 2 if rng.random() < 0.6 else 0
    if kind == 0:
        return bytes(data[: rng.integers(0, size)])
    if kind == 1:
        at, length = int(rng.integers(0, size)), int(rng.integers(1, 64))
        to = int(rng.integers(0, size))
        data[to : to + length] = data[at : at + length]
        return bytes(data)
    if kind == 2:
        at = int(rng.integers(start, size))
        data[at : at + 8] = rng.choice([b"\xff" * 8, b"\x00" * 8, b"\x80" * 7 + b"\x01"])
        return bytes(data)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(start, size))
        data[at] = rng.integers(0, 256) if kind == 3 else data[at] ^ (1 << rng.integers(0, 8))
    return bytes(data)


def _late(*_: object) -> None:
    raise TimeoutError


def attempt(path: Path) -> str:
    """How a file ends: "loaded", "refused", or what else was raised."""
    signal.alarm(SECONDS)
    try:
        loader = tables.loader(path, batch_size=16, shuffle=True, fill=0)
        for batch in loader:
            assert all(len(array) == 16 for array in batch.values())
        return "loaded"
    except td.TreadleError:
        return "refused"
    except BaseException as error:  # whatever it is, it is a finding
        return repr(error)[:300]
    finally:
        signal.alarm(0)


def some(
    first: int, count: int, seed: int, folder: str, results: multiprocessing.SimpleQueue
) -> None:
    """A process: files from one number on, and how each ended."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _late)
    wells = originals(Path(folder))
    path = Path(folder) / "damaged.parquet"
    for number in range(first, first + count):
        rng = np.random.default_rng([seed, number])
        path.write_bytes(damaged(wells[number % len(wells)], rng))
        results.put((number, attempt(path)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("damaged-tables"))
    asked = parser.parse_args()
    counts = {"loaded": 0, "refused": 0, "found": 0}
    start, first = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        while first < asked.files:
            count = min(SHARE, asked.files - first)
            results: multiprocessing.SimpleQueue = multiprocessing.SimpleQueue()
            arguments = (first, count, asked.seed, folder, results)
            process = multiprocessing.Process(target=some, args=arguments)
            process.start()
            last = first - 1
            while process.is_alive() or not results.empty():
                if results.empty():
                    time.sleep(0.01)
                    continue
                last, ended = results.get()
                known = ended in counts
                counts[ended if known else "found"] += 1
                if not known:
                    keep(asked.keep, Path(folder), asked.seed, last, ended)
            process.join()
            if last < first + count - 1:
                ended = f"the process ended with {process.exitcode}"
                counts["found"] += 1
                last += 1
                keep(asked.keep, Path(folder), asked.seed, last, ended)
            first = last + 1
    print(f"{counts} of {asked.files} files, {time.perf_counter() - start:.0f} s")
    sys.exit(bool(counts["found"]))


def keep(where: Path, folder: Path, seed: int, number: int, ended: str) -> None:
    where.mkdir(exist_ok=True)
    wells = originals(folder)
    rng = np.random.default_rng([seed, number])
    path = where / f"{seed}-{number}.parquet"
    path.write_bytes(damaged(wells[number % len(wells)], rng))
    print(f"{path}: {ended}", flush=True)


if __name__ == "__main__":
    main()
