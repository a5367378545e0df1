"""Writes docs/conformance.md: every op in every dtype on a device, its error beside its contract.

    python tools/conformance_page.py                  # measures on the CPU: two minutes
    python tools/conformance_page.py --rows FILE …    # what `treadle conformance --json` wrote

A test compares the rows of the page with the op table; the figures are those of the last run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "conformance.md"
sys.path.insert(0, str(ROOT / "src"))

INTRODUCTION = """\
# Conformance

Every op of the table, in every dtype that it takes, beside the float64 oracle. An op promises how
exact it is: not off at all, some units in the last place (ulp), a bound for sums and products, or
what the ops of its definition come to. A cell says which part of that an element is off by at most:
0.25 is a quarter of what is allowed, `=` is no error at all, and a dash is a dtype that the op does
not take. Samples are small, and some are as long as vectors are wide; the [fuzzer](fuzzing.md) has
larger programs.

```bash
treadle conformance --device cpu
```

`--only exp,conv` looks at some ops; `--json` also has units in the last place and the number of
elements. From Python, rows are plain data:

```python
from treadle.cli.conformance import rows_on

rows = list(rows_on("cpu", ["tanh"]))
print([(row.dtype, row.contract) for row in rows][:2])
print(all(not row.wrong and row.share <= 1 for row in rows))
```

```text
[('float64', '4 ulp'), ('float32', '4 ulp')]
True
```

This page is written by `tools/conformance_page.py`; a test compares its rows with the op table."""


def page(measured: Sequence[tuple[str, Sequence[Any]]]) -> str:
    """The page of some devices."""
    from treadle.verify.conformance import summary, table

    parts = [INTRODUCTION]
    for device, rows in measured:
        parts += [f"## On {device}", f"{summary(rows, device)}.", table(rows)]
        wrong = [f"- `{r.op}` in {r.dtype}: {r.wrong}" for r in rows if r.wrong]
        parts += ["\n".join(wrong)] if wrong else []
    return "\n\n".join(parts) + "\n"


def cells(text: str) -> dict[str, dict[str, list[str]]]:
    """The dtypes that each op has figures for, and its contract, by device, from a page."""
    found: dict[str, dict[str, list[str]]] = {}
    names: list[str] = []
    device = ""
    for line in text.splitlines():
        if line.startswith("## On "):
            device = line.removeprefix("## On ")
            found[device] = {}
        elif line.startswith("| op |"):
            names = [c.strip() for c in line.strip("|").split("|")][2:]
        elif line.startswith("| `") and device:
            row = [c.strip() for c in line.replace(r"\|", "¦").strip("|").split("|")]
            own = [n for n, c in zip(names, row[2:], strict=True) if c != "–"]
            found[device][row[0].strip("`")] = [row[1].replace("¦", "|"), *own]
    return found


def read(path: Path) -> tuple[str, list[Any]]:
    from treadle.verify.conformance import Row

    facts = json.loads(path.read_text(encoding="utf-8"))
    return facts["device"], [Row(**row) for row in facts["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    from treadle.cli.conformance import rows_on

    measured = [read(path) for path in given.rows] or [("cpu", list(rows_on("cpu")))]
    PAGE.write_text(page(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
