"""Read many mutated files of each format, in processes that may die, and say what went wrong.

    python tools/fuzz_files.py --count 100000 gguf npz torch hdf5 folder

A reader either answers or raises one of Treadle's errors, soon and in little memory. Anything else,
an exception, a crash, a file that takes seconds or a warning, is printed with the seed that makes
it, and the exit status is 1. Files of HDF5 are read by its own library, for which Treadle has a
process with limits: crashes and endless loops are counted apart there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from mutated_files import FORMATS

AT_ONCE = 1000  # files of a process
SLOW = 5.0  # seconds for one file of some kilobytes
ENDLESS = 30.0  # seconds without an answer
MEMORY = 8 << 30  # bytes of address space


def some(name: str, seed: int, count: int, answers: Any) -> None:
    """Read `count` files, the i-th made from the seed + i, and send what was refused or wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("error")
    format_ = FORMATS[name]
    refused = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        whole = format_.make(Path(folder))
        path = Path(folder) / f"mutated{format_.ending}"
        for i in range(count):
            answers.send(("at", seed + i, refused))
            refused = 0
            path.write_bytes(format_.mutate(whole, Random(seed + i)))
            start = time.process_time()
            try:
                format_.read(path)
            except format_.refusals:
                refused += 1
            except BaseException:
                answers.send(("wrong", seed + i, traceback.format_exc(limit=-4, chain=False)))
            took = time.process_time() - start  # of this process: the machine may be busy
            slowest = max(slowest, took)
            if took > SLOW:
                answers.send(("wrong", seed + i, f"took {took:.1f} s"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    answers.send(("done", refused, slowest, peak))


@dataclass
class Tally:
    """What became of the files of a format."""

    refused: int = 0
    wrong: int = 0
    ended: int = 0  # processes that crashed or went on, where those are expected
    slowest: float = 0.0
    peak: int = 0


def fuzz(name: str, count: int, seed: int) -> int:
    """How much went wrong among so many files of a format."""
    tally = Tally()
    start = time.perf_counter()
    first = seed
    while first < seed + count:
        first = batch(name, first, min(AT_ONCE, seed + count - first), tally)
    told = f"{count:,} files, {tally.refused:,} refused, {tally.wrong} wrong"
    if FORMATS[name].is_limited:
        told += f", {tally.ended} ended by limits"
    told += f", {time.perf_counter() - start:.0f} s; slowest {tally.slowest * 1e3:.0f} ms"
    print(f"{name}: {told}, at most {tally.peak} MB", flush=True)
    return tally.wrong


def batch(name: str, first: int, size: int, tally: Tally) -> int:
    """Read some files in a process, and say where to go on: behind the file at which it died."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)
    process = context.Process(target=some, args=(name, first, size, theirs))
    process.start()
    theirs.close()
    at = first
    try:
        while ours.poll(ENDLESS):
            kind, *rest = ours.recv()
            if kind == "at":
                at, tally.refused = rest[0], tally.refused + rest[1]
            elif kind == "wrong":
                tally.wrong += 1
                print(f"{name} seed {rest[0]}: {rest[1]}", flush=True)
            else:
                tally.refused += rest[0]
                tally.slowest = max(tally.slowest, rest[1])
                tally.peak = max(tally.peak, rest[2])
                process.join()
                return first + size
        how = f"took more than {ENDLESS:.0f} s"
        process.kill()
    except EOFError:
        process.join()
        how = f"ended with {process.exitcode}"
    process.join()
    print(f"{name} seed {at}: the process {how}", flush=True)
    if FORMATS[name].is_limited:
        tally.ended += 1
    else:
        tally.wrong += 1
    return at + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=list(FORMATS), help=", ".join(FORMATS))
    parser.add_argument("--count", type=int, default=1000, help="files of each format")
    parser.add_argument("--seed", type=int, default=0, help="of the first file")
    given = parser.parse_args()
    return int(sum(fuzz(name, given.count, given.seed) for name in given.formats) > 0)


if __name__ == "__main__":
    sys.exit(main())
