"""The pages of an export: HTML that is put together here, and files that go along as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from treadle.base.errors import ArgumentError

RUNTIME = ("treadle.js", "treadle.d.ts")
SHARED = ("page.js", "page.css", "chart.js", "draws.js")


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows. `settings` are for its script, as JSON."""

    name: str = "train"
    title: str = ""
    lead: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


LEADS = {
    "train": "This model trains in your browser, on your own GPU.",
    "digits": "A small network learns to read handwritten digits in your browser, on your own "
    "GPU. Start it, draw a digit, and teach it how you write.",
    "text": "A tiny GPT that learns from the text you paste, in your browser, on your own GPU.",
    "run": "This model runs in your browser, on your own GPU.",
}
TITLES = {
    "train": "A model that trains here",
    "digits": "Draw a digit",
    "text": "A tiny GPT",
    "run": "A model that runs here",
}


def page_files(page: Page) -> dict[str, bytes]:
    """The files of a page by name; a folder of one's own goes along, but for what is hidden."""
    found = {name: _static(name).encode() for name in RUNTIME}
    if page.name in LEADS:
        found |= {name: _static(name).encode() for name in (*SHARED, f"{page.name}.js")}
        return found | {"index.html": _html(page).encode()}
    own = Path(page.name)
    if not (own / "index.html").is_file():
        known = ", ".join(repr(name) for name in LEADS)
        cause = f"there is no page {page.name!r}"
        raise ArgumentError("export_web", cause, f"Use {known} or a folder with an index.html.")
    for path in sorted(own.rglob("*")):
        name = path.relative_to(own)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = path.read_bytes()
    return found


def _html(page: Page) -> str:
    main = _static(f"{page.name}.html").replace("{{training}}", _static("training.html").strip())
    filled = {
        "title": escape(page.title or TITLES[page.name]),
        "lead": escape(page.lead or LEADS[page.name]),
        "script": f"{page.name}.js",
    }
    html = _static("frame.html").replace("{{main}}", main.strip())
    for slot, text in filled.items():
        html = html.replace(f"{{{{{slot}}}}}", text)
    return html


def _static(name: str) -> str:
    return resources.files("treadle.web").joinpath("static", name).read_text(encoding="utf-8")
