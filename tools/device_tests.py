"""The device's tests, many at once: on a GPU, the processes wait for each other very little.

    python tools/device_tests.py --seconds 240 --out results/

Runs in processes of their own: the tests of `tests/test_cuda_device.py` in shards, random
programs against the oracle (for all of the time), and every op under compute-sanitizer's memcheck
and racecheck where it is installed (CUDA's toolkit has it). Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARDS, RANDOM, SANITIZED = 8, 3, 2
SPARE = 20  # seconds that what counts its own time leaves to the rest


def environment(**more: str) -> dict[str, str]:
    folders = [str(ROOT / f) for f in ("src", "tests")]
    known = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([*folders, *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **more}


def commands(seconds: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Names, command lines and environments of all that is run."""
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--tb=short"]
    pytest += ["-p", "shard", "-p", "no:cacheprovider", "tests/test_cuda_device.py"]
    found = {f"tests-{i}": (pytest, environment(SHARD=f"{i}/{SHARDS}")) for i in range(SHARDS)}
    cases = [sys.executable, str(ROOT / "tools" / "device_cases.py")]
    limit = str(seconds - SPARE)
    fuzz = [sys.executable, "-m", "treadle", "fuzz", "--device", "cuda", "--seconds", limit]
    found["fuzz"] = [*fuzz, "--processes", str(RANDOM)], environment()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if Path(sanitizer).exists():
        for tool in ("memcheck", "racecheck"):
            line = [sanitizer, "--tool", tool, "--error-exitcode", "9", *cases]
            for i in range(SANITIZED):
                found[f"{tool}-{i}"] = [*line, f"{i}/{SANITIZED}", limit], environment()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    running = {}
    for name, (line, variables) in commands(given.seconds).items():
        with (given.out / f"{name}.txt").open("w") as log:
            running[name] = subprocess.Popen(
                line, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT
            )
    codes = {}
    for name, process in running.items():
        try:
            codes[name] = process.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            codes[name] = process.wait()
        lines = (given.out / f"{name}.txt").read_text().splitlines() or [""]
        print(f"{name}: exit {codes[name]}: {lines[-1][:150]}", flush=True)
    sys.exit(any(codes.values()))


if __name__ == "__main__":
    main()
