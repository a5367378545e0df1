"""Read many mutated files of each format, in processes that may die, and say what went wrong.

    python tools/fuzz_files.py --count 100000 gguf npz torch hdf5 folder

A reader either answers or raises one of Treadle's errors, soon and in little memory. Anything else,
an exception, a crash, a file that takes seconds or a warning, is printed with the seed that makes
it, and the exit status is 1.
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
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from mutated_files import FORMATS

AT_ONCE = 1000  # files of a process
SLOW = 5.0  # seconds for one file of some kilobytes
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
            answers.send(("at", seed + i))
            path.write_bytes(format_.mutate(whole, Random(seed + i)))
            start = time.perf_counter()
            try:
                format_.read(path)
            except format_.refusals:
                refused += 1
            except BaseException:
                answers.send(("wrong", seed + i, traceback.format_exc(limit=-4, chain=False)))
            slowest = max(slowest, time.perf_counter() - start)
            if time.perf_counter() - start > SLOW:
                answers.send(("wrong", seed + i, f"took {time.perf_counter() - start:.1f} s"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    answers.send(("done", refused, slowest, peak))


def fuzz(name: str, count: int, seed: int) -> int:
    """How much went wrong among so many files of a format."""
    wrong = refused = peak = 0
    slowest = 0.0
    start = time.perf_counter()
    context = multiprocessing.get_context("fork")
    first = seed
    while first < seed + count:
        ours, theirs = context.Pipe(False)
        size = min(AT_ONCE, seed + count - first)
        process = context.Process(target=some, args=(name, first, size, theirs))
        process.start()
        theirs.close()
        at, done = first, None
        while done is None:
            try:
                kind, *rest = ours.recv()
            except EOFError:
                break
            if kind == "at":
                at = rest[0]
            elif kind == "wrong":
                wrong += 1
                print(f"{name} seed {rest[0]}: {rest[1]}", flush=True)
            else:
                done = rest
        process.join()
        if done is None:  # the process died at this file: go on behind it
            wrong += 1
            print(f"{name} seed {at}: the process ended with {process.exitcode}", flush=True)
            first = at + 1
            continue
        refused, slowest, peak = refused + done[0], max(slowest, done[1]), max(peak, done[2])
        first += size
    seconds = time.perf_counter() - start
    told = f"{count:,} files, {refused:,} refused, {wrong} wrong, {seconds:.0f} s"
    print(f"{name}: {told}; slowest {slowest * 1e3:.0f} ms, at most {peak} MB", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=list(FORMATS), help=", ".join(FORMATS))
    parser.add_argument("--count", type=int, default=1000, help="files of each format")
    parser.add_argument("--seed", type=int, default=0, help="of the first file")
    given = parser.parse_args()
    return int(sum(fuzz(name, given.count, given.seed) for name in given.formats) > 0)


if __name__ == "__main__":
    sys.exit(main())
