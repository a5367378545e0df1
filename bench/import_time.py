"""How long `import treadle` takes in a fresh process, and which modules take most of it.

usage: python bench/import_time.py [--runs 9] [--top 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

# Of the thread: other work on the machine counts less than by the clock on the wall.
TIMED = """
import time
start = time.thread_time()
import {}
print(time.thread_time() - start)
"""


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter. An installed package has its bytecode: the first run writes it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = [sys.executable, *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=True, env=environment)


def seconds(module: str, runs: int) -> list[float]:
    return sorted(float(fresh("-c", TIMED.format(module)).stdout) for _ in range(runs))


def slowest(count: int) -> list[tuple[float, str]]:
    """Milliseconds that modules take by themselves, without what they import."""
    found = []
    for line in fresh("-X", "importtime", "-c", "import treadle").stderr.splitlines():
        own, _, name = line.removeprefix("import time:").split("|")
        if own.strip().isdigit():
            found.append((int(own) / 1000, name.strip()))
    return sorted(found, reverse=True)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--top", type=int, default=8, help="modules to list")
    options = parser.parse_args()
    fresh("-c", "import treadle")
    for module in ("numpy", "treadle"):
        times = seconds(module, options.runs)
        print(f"{module:<8} median {statistics.median(times):.3f} s, best {times[0]:.3f} s")
    for own, name in slowest(options.top):
        print(f"{own:>8.1f} ms  {name}")


if __name__ == "__main__":
    main()
