"""How soon the digits page answers in headless Chromium, and how fast it trains on SwiftShader.

    python bench/web_page.py --runs 5 --steps 60

SwiftShader is WebGPU on the processor: steps a second say nothing about a GPU's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "examples")]

import web_digits  # noqa: E402

from browser import browser, served, why_not  # noqa: E402


def measured(folder: Path, steps: int) -> tuple[float, float, float]:
    """Seconds until the page is ready, until everything is compiled, and of a step."""
    with served(folder) as address, browser(timeout=600) as page:
        page.open(address)
        page.wait_for("globalThis.treadle?.ready", 60)
        ready = page.run("treadle.ready") / 1000  # since the visit began
        page.run("Promise.all(Object.values(treadle.model.programs).map((p) => p.compiled))")
        compiled = page.run("performance.now()") / 1000
        page.run("treadle.training.run(8)")
        start = time.perf_counter()
        page.run(f"treadle.training.run({steps})")
        return ready, compiled, (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if why_not() is not None:
        raise SystemExit(why_not())
    with tempfile.TemporaryDirectory() as place:
        folder = web_digits.export_web(f"{place}/digits")
        sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
        weights = sizes.pop("weights.safetensors")
        rest = sum(sizes.values())
        print(f"folder {rest / 1000:.0f} kB beside {weights / 1000:.0f} kB of weights")
        rows = [measured(folder, options.steps) for _ in range(options.runs)]
    for name, values in zip(("ready", "compiled", "step"), zip(*rows, strict=True), strict=True):
        print(f"{name:9} median {statistics.median(values):.2f} s, most {max(values):.2f} s")


if __name__ == "__main__":
    main()
