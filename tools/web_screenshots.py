"""Pictures of the exported pages, for docs/images: python tools/web_screenshots.py --out FOLDER

Each demonstration is exported, trained for a while in headless Chromium, and photographed at the
width of a desk and of a phone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from PIL import Image

from browser import Page, browser, served, why_not

ROOT = Path(__file__).resolve().parent.parent
DESK, PHONE = (1040, 800), (390, 844)
# A three, as a finger draws it.
STROKES = (
    "[[.3,.25],[.42,.16],[.58,.17],[.66,.28],[.6,.4],[.46,.47],[.6,.52],[.69,.64],[.63,.78],"
    "[.48,.85],[.3,.78]]"
)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def photographed(page: Page, out: Path, name: str) -> None:
    for suffix, (width, height) in (("desk", DESK), ("phone", PHONE)):
        page.resize(width, height, mobile=suffix == "phone")
        page.run("new Promise((done) => setTimeout(done, 400))")
        file = out / f"web-{name}-{suffix}.png"
        page.screenshot(file)
        with Image.open(file) as picture:  # few colours, so that the repository stays small
            few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
        few.save(file, optimize=True)
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def digits(out: Path, folder: Path, steps: int) -> None:
    example("web_digits").export_web(str(folder))
    with served(folder) as address, browser(timeout=600) as page:
        page.open(address)
        page.wait_for("globalThis.treadle?.ready", 120)
        page.run(f"treadle.training.run({steps})")
        page.run(f"treadle.pad.strokes = [{STROKES}], treadle.pad.draw(), treadle.read()")
        photographed(page, out, "digits")
        assert not page.errors, page.errors


def text(out: Path, folder: Path, steps: int) -> None:
    # Trained in Python first: a processor's WebGPU is slow. The page goes on from there.
    example("web_text").export_web(str(folder), steps=500, width=48, heads=4, layers=2, batch=4)
    with served(folder) as address, browser(timeout=600) as page:
        page.open(address)
        page.wait_for("globalThis.treadle?.ready", 120)
        page.run(f"treadle.training.run({steps // 20})")
        page.run("document.getElementById('write').click()")
        page.wait_for("document.getElementById('write').textContent === 'Write'", 600)
        photographed(page, out, "text")
        assert not page.errors, page.errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=("digits", "text"))
    options = parser.parse_args()
    if why_not() is not None:
        raise SystemExit(why_not())
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for make in (digits, text):
            if options.only in (None, make.__name__):
                make(options.out, Path(folder) / make.__name__, options.steps)


if __name__ == "__main__":
    main()
