"""Writes the zoo's part of docs/performance.md, and its pictures, from bench/results/zoo.json.

    python tools/performance_page.py
    python tools/performance_page.py --add zoo_gpu.json    # first adds the rows of another file

A test compares the page with what this writes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from families import ZOO
from zoo_rows import Row, added, first_figure, of_best, ours, stored, summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "zoo.json"
PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "images"
BEGIN, END = "<!-- the zoo: written by tools/performance_page.py -->", "<!-- end of the zoo -->"
PEERS = {
    "eager": "eager",
    "channels-last": "channels last",
    "compile": "compile",
    "reduce-overhead": "reduce-overhead",
}


@dataclass(frozen=True)
class Section:
    """Rows that were measured in one manner: a title, a picture, a table."""

    device: str
    target: str
    title: str
    rows: tuple[Row, ...]

    @property
    def picture(self) -> str:
        return f"zoo-{self.device}-{self.target}.svg"

    @property
    def peers(self) -> list[str]:
        return [n for n in PEERS if any(n in r["contenders"] for r in self.rows)]


PLACES = {
    ("cuda", "native"): "On a GPU",
    ("cpu", "native"): "On the CPU",
    ("cpu", "x86-64-v4"): "On the CPU, in AVX-512",
    ("cpu", "x86-64-v3"): "On the CPU, in AVX2",
}


def sections(rows: list[Row]) -> list[Section]:
    """Those that there are rows of; entries that are no longer in the zoo are left out."""
    order = {name: i for i, name in enumerate(ZOO)}
    known = sorted((r for r in rows if r["workload"] in ZOO), key=lambda r: order[r["workload"]])
    found = []
    for (device, target), title in PLACES.items():
        some = tuple(r for r in known if (r["device"], r["target"]) == (device, target))
        if some:
            found.append(Section(device, target, title, some))
    return found


# --- words and tables -------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """Some digits, not in powers of ten."""
    if value is None:
        return "–"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:.{max(0, digits - whole)}f}"


def listed(names: list[str]) -> str:
    return ", ".join(ZOO[n].title if n in ZOO else n for n in names)


def manner(section: Section) -> str:
    """Where, when and by which command."""
    row = section.rows[-1]
    dates = sorted({r["date"] for r in section.rows if "date" in r})
    command = ["python bench/zoo.py", *(() if section.device == "cpu" else ("--device cuda",))]
    if section.target != "native":
        command.append(f"--target {section.target}")
    if section.device == "cpu":
        command.append(f"--threads {row['threads']}")
    if row["clock"] != "perf_counter":
        command.append(f"--clock {row['clock']}")
    if row.get("together", 1) > 1:
        command.append(f"--together {row['together']}")
    command += [f"--rounds {row['rounds']}", f"--peers {','.join(section.peers)}"]
    where = row.get("gpu") or f"{row['processor']} processor"
    torch = row["versions"].get("torch", "?").split("+")[0]
    facts = [where, f"PyTorch {torch}", *dates[-1:]]
    return f"{', '.join(facts)}: `{' '.join(command)}`."


def shared(section: Section) -> str:
    """How much the figures are worth."""
    lines = []
    if section.rows[-1]["clock"] == "process_time":
        lines.append(
            " The machine was shared with much else, so one thread was used and processor time"
            " counted: ratios are worth more than milliseconds, and first steps are in seconds of a"
            " processor."
        )
    if not {"compile", "reduce-overhead"} & {*section.peers}:
        lines.append(" `torch.compile` was no peer there.")
    return "".join(lines)


def verdict(section: Section) -> list[str]:
    """Means, and plainly what is slower."""
    facts, rows = summary(list(section.rows)), section.rows
    if facts["ratio"] is None:
        return [f"{len(rows)} entries, no peer to compare with."]
    lines = [
        f"{len(rows)} entries. Treadle's time over the best peer's: geometric mean "
        f"**{facts['ratio']:.2f}**, that is {1 / facts['ratio']:.2f} × as fast; the worst is "
        f"{facts['worst_ratio']:.2f} ({listed([facts['worst']])})."
    ]
    ratios = {r["workload"]: r["ratio"] for r in rows if "ratio" in r}
    slower = [f"{listed([n])} {ratios[n]:.2f}" for n in facts["slower"]]
    lines.append(f"**Slower than a peer: {'; '.join(slower)}.**" if slower else "None is slower.")
    rough = " (several at once, so rough)" if rows[-1].get("together", 1) > 1 else ""
    if facts["first_s"] is not None:
        name, seconds = facts["slowest_first"]
        lines.append(
            f"First step with empty caches{rough}: geometric mean {number(facts['first_s'], 2)} s,"
            f" at most {number(seconds, 2)} s ({listed([name])}); the best peers' "
            f"{number(facts['first_peer_s'], 2)} s (eager ones compile nothing)."
        )
    if facts["memory"] is not None:
        lines.append(f"Memory over the best peer's: geometric mean {facts['memory']:.2f}.")
    if facts["differ"]:
        lines.append(f"**Losses differ, ignore: {listed(facts['differ'])}.**")
    return lines


def left_out(section: Section) -> list[str]:
    """Contenders that could not run, or not in time."""
    found: dict[str, list[str]] = {}
    for row in section.rows:
        for name, facts in row["contenders"].items():
            if "error" in facts:
                why = "not ready in time" if "not ready" in facts["error"] else "fails"
                found.setdefault(f"{PEERS.get(name, 'Treadle')} {why}", []).append(row["workload"])
    return [f"Left out: {what} for {listed(names)}." for what, names in sorted(found.items())]


def table(section: Section) -> list[str]:
    figure = first_figure(list(section.rows))
    heads = ["entry", "Treadle ms", *(f"{PEERS[p]} ms" for p in section.peers)]
    heads += ["ratio to the best", "first step s, best peer's", "memory MiB, best peer's"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in section.rows:
        times = [row["contenders"].get(n, {}).get("ms") for n in ("treadle", *section.peers)]
        ratio = "–"
        if "ratio" in row:
            spread = row["ratios"][row["best_peer"]]
            mark = "**" if row["ratio"] > 1 else ""
            ratio = f"{mark}{row['ratio']:.2f}{mark} ({spread['low']:.2f}–{spread['high']:.2f})"
        cells = [ZOO[row["workload"]].title, *(number(t, 4) for t in times), ratio]
        for name, digits in ((figure, 2), ("steps_mib", 3)):
            cells.append(f"{number(ours(row, name), digits)}, {number(of_best(row, name), digits)}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def text(found: list[Section]) -> str:
    """The page's part, without its marks."""
    lines = []
    for section in found:
        says = " ".join([*verdict(section), *left_out(section)])
        lines += [
            f"### {section.title}", "",
            manner(section) + shared(section), "",
            says, "",
            f"![Treadle's time over the best peer's, entry by entry](images/{section.picture})", "",
            *table(section), "",
        ]  # fmt: skip
    missing = [title for place, title in PLACES.items() if place[1] != "x86-64-v4"]
    missing = [t for t in missing if t not in {s.title for s in found}]
    lines += [f"{t}: not measured yet.\n" for t in missing]
    return "\n".join(lines)


# --- pictures ---------------------------------------------------------------------------------

LEFT, WIDTH, BAR, TOP = 260, 420, 18, 48  # pixels: labels, the axis to 1, a bar, the title
FASTER, SLOWER, LINE = "#00695c", "#c62828", "#616161"


def picture(section: Section) -> str:
    """A bar for each entry, the slowest on top; the line is the best peer."""
    ratios = {r["workload"]: r["ratio"] for r in section.rows if "ratio" in r}
    names = sorted(ratios, key=lambda n: -ratios[n])
    longest = max([1.2, *ratios.values()])
    width, height = LEFT + int(WIDTH * longest) + 60, TOP + BAR * len(names) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _words(LEFT, 20, f"{section.title}: Treadle's time, the best peer's being 1", size=14),
        *_grid(longest, height),
        *(part for i, n in enumerate(names) for part in _bar(i, ZOO[n].title, ratios[n])),
        f'<line x1="{LEFT + WIDTH}" x2="{LEFT + WIDTH}" y1="{TOP - 4}" y2="{height - 8}" '
        f'stroke="{LINE}" stroke-width="1.5"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _words(
    x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = "#212121"
) -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"


def _grid(longest: float, height: int) -> list[str]:
    found = []
    for i in range(int(longest / 0.25) + 1):
        x = LEFT + WIDTH * 0.25 * i
        found.append(
            f'<line x1="{x:g}" x2="{x:g}" y1="{TOP - 4}" y2="{height - 8}" stroke="#e0e0e0"/>'
        )
        found.append(_words(x, TOP - 8, f"{0.25 * i:g}", "middle", 10))
    return found


def _bar(place: int, title: str, ratio: float) -> list[str]:
    y, colour = TOP + BAR * place, SLOWER if ratio > 1 else FASTER
    length = WIDTH * ratio
    return [
        _words(LEFT - 8, y + 13, title, "end"),
        f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}" fill="{colour}"/>',
        _words(round(LEFT + length - 4, 1), y + 13, f"{ratio:.2f}", "end", 11, "#ffffff")
        if 40 < length <= WIDTH
        else _words(round(LEFT + length + 4, 1), y + 13, f"{ratio:.2f}", size=11),
    ]


# --- files ------------------------------------------------------------------------------------


def page(before: str, found: list[Section]) -> str:
    """The page with its part replaced."""
    head, rest = before.split(BEGIN)
    return f"{head}{BEGIN}\n\n{text(found)}\n{END}{rest.split(END)[1]}"


def compact(row: Row) -> Row:
    """Without what no figure needs."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items() if k != "round_ms"}
        return [short(v) for v in value] if isinstance(value, list) else value

    found: Row = short(row)
    for facts in found["contenders"].values():
        if "error" in facts:
            facts["error"] = facts["error"].splitlines()[0][:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="files of bench/zoo.py")
    for path in parser.parse_args().add:
        added(RESULTS, *map(compact, stored(path)))
    found = sections(stored(RESULTS))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    for section in found:
        (PICTURES / section.picture).write_text(picture(section), encoding="utf-8")


if __name__ == "__main__":
    main()
