"""The documentation runs: every Python block of every page, and what it prints.

Each page is run in a process of its own, by this file as a script: a page may declare ops. Blocks with a
title, as the columns of a comparison have, share what other blocks of that title define, and what
untitled blocks before the first of them did; two columns side by side that both end with a `result`
must agree on it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FOLDERS = (ROOT / "src").rglob("README.md")  # pages inside the folders that they are about
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *FOLDERS])

# Blocks run as this file, with lines counted from the top of the block: what they print about
# their own lines does not change when the page around them does.
BLOCK_FILE = "example.py"

RUN_THE_DEMO = "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/treadle demo"
RUN_THE_TESTS = (
    "tools/system_packages.sh && "
    'python3 -m venv .venv && .venv/bin/pip install -q -e ".[test,dev]" '
    "&& .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy "
    "&& .venv/bin/pytest -n 2"
)

_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?[^\n]*\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # results of two columns, in float32


@dataclass(frozen=True)
class Block:
    """A fenced block; `expected` is the text block right after it, if there is one."""

    language: str
    line: int  # of its first line, in the page
    text: str
    expected: str | None = None
    title: str | None = None


def blocks_of(page: str) -> list[Block]:
    found = list(_FENCE.finditer(page))
    blocks = []
    for i, match in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        is_answer = after is not None and after["language"] == "text"
        expected = None
        if after is not None and is_answer and not page[match.end() : after.start()].strip():
            expected = after["text"]
        line = page.count("\n", 0, match.start("text")) + 1
        blocks.append(Block(match["language"], line, match["text"], expected, match["title"]))
    return blocks


def failures_of(name: str, page: str) -> list[str]:
    """Run the Python blocks of a page in one namespace, or one for each title; what went wrong,
    with file and line."""
    namespace: dict[str, Any] = {"__name__": "example"}
    titled: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {}  # of the columns since the last untitled block or pair
    failures = []
    for block in blocks_of(page):
        if block.language != "python":
            continue
        own = namespace if block.title is None else titled.setdefault(block.title, dict(namespace))
        problem = _run(block, own)
        if block.title is None or block.title in results:
            results.clear()
        if block.title is not None:
            results[block.title] = own.pop("result", None)
            problem = problem or _difference(block, results)
        if problem is not None:
            line, cause = problem
            failures.append(f"{name}:{line}: {cause}")
    return failures


def _difference(block: Block, results: dict[str, Any]) -> tuple[int, str] | None:
    """Where the columns of a comparison do not agree."""
    if len(results) < 2:
        return None
    given = [r for r in results.values() if r is not None]
    try:
        for other in given[1:]:
            np.testing.assert_allclose(np.asarray(other), np.asarray(given[0]), **CLOSE)
        assert len(given) in (0, len(results)), "one column has a result, another none"
    except AssertionError as error:
        return block.line, f"{' and '.join(results)} differ: {error}"
    return None


def _run(block: Block, namespace: dict[str, Any]) -> tuple[int, str] | None:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, BLOCK_FILE, "exec", dont_inherit=True), namespace)
    except SyntaxError as error:
        return block.line + (error.lineno or 1) - 1, repr(error)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = next(f.lineno or 1 for f in frames if f.filename == BLOCK_FILE)
        return block.line + inside - 1, repr(error)
    if block.expected is not None and printed.getvalue().rstrip() != block.expected.rstrip():
        return block.line, f"printed\n{printed.getvalue()}instead of\n{block.expected}"
    return None


def pytest_generate_tests(metafunc) -> None:  # type: ignore[no-untyped-def]
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def test_page_runs(page: Path) -> None:
    run = [sys.executable, "-W", "error", __file__, str(page)]
    environment = os.environ | {"PYTHONUTF8": "1"}
    done = subprocess.run(run, capture_output=True, text=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def prose_of(page: str) -> str:
    """A page without its fenced blocks: `models["g"](x)` is no link."""
    return _FENCE.sub("", page)


def anchors_of(page: str) -> set[str]:
    """What a link may name after #: headings, as mkdocs and GitHub spell them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for target, anchor in re.findall(
        r"\]\(([^)#:]*)(?:#([^)]*))?\)", prose_of(page.read_text(encoding="utf-8"))
    ):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text("utf-8"))):
            missing.append(f"{target}#{anchor}")
    assert not missing, f"{page.name}: {missing}"


MADE_UP = """\
Text.

```python
x = 1
print(x)
```

```text
1
```

```python
def f():
    raise ValueError("no")

f()
```

```python
print(x + 1)
```
```text
3
```

```python
x = = 2
```

```text
Not compared: the block before it did not run.
```

Words between a block and a text block part them.

```python
print(x)
```

So this is not compared:

```text
nothing
```

```bash
not python
```
"""

COLUMNS = """\
```python
x = 2
```

```python title="one"
y = x + 1
result = [y, 1.0]
```

```python title="other"
result = [3, 1.0]
```

```python title="one"
result = y
```

```python title="other"
result = x
```

```python title="one"
x = 5
```

```python title="other"
result = x
```

```python
assert x == 2
y
```
"""


def test_columns_have_names_of_their_own_and_are_compared() -> None:
    failures = failures_of("PAGE.md", COLUMNS)
    assert [f.partition(" ")[0] for f in failures] == ["PAGE.md:19:", "PAGE.md:27:", "PAGE.md:32:"]
    assert "one and other differ" in failures[0]
    assert "one column has a result" in failures[1]
    assert "NameError" in failures[2]


def test_the_runner_finds_what_is_wrong() -> None:
    failures = failures_of("PAGE.md", MADE_UP)
    assert [f.partition(" ")[0] for f in failures] == ["PAGE.md:16:", "PAGE.md:20:", "PAGE.md:27:"]
    assert "ValueError('no')" in failures[0]
    assert "printed\n2\ninstead of\n3" in failures[1]
    assert "SyntaxError" in failures[2]


def test_readme_begins_with_the_two_commands() -> None:
    first = blocks_of(README.read_text(encoding="utf-8"))[:2]
    assert [b.text.strip() for b in first] == [RUN_THE_DEMO, RUN_THE_TESTS]
    assert RUN_THE_TESTS in README.read_text(encoding="utf-8").splitlines()


def test_ci_runs_the_second_command() -> None:
    script = ROOT / ".ci" / "run"
    lines = [line for line in script.read_text().splitlines() if line and line[0] != "#"]
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', RUN_THE_TESTS]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_names_page_is_up_to_date() -> None:
    tool = _tool("names_page")
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run tools/names_page.py"


def test_the_reference_is_complete() -> None:
    """Every public name has shapes, a meaning for each argument, and an example."""
    tool = _tool("reference_pages")
    assert not tool.missing()
    assert not tool.unused(), "rows about no public name"


def test_the_reference_is_up_to_date() -> None:
    """Signatures and docstrings; that examples print what is written, test_page_runs finds out."""
    tool = _tool("reference_pages")
    for page in tool.pages():
        text = (DOCS / page.path).read_text(encoding="utf-8")
        assert text == tool.page_text(page, tool.known_outputs(text)), (
            "run tools/reference_pages.py"
        )


def test_rules_page_is_up_to_date() -> None:
    tool = _tool("rules_page")
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run tools/rules_page.py"


def test_every_public_name_is_in_the_docs() -> None:
    tree = ast.parse((ROOT / "src" / "treadle" / "__init__.py").read_text(encoding="utf-8"))
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    public = {alias.asname or alias.name for n in imports for alias in n.names}
    public.discard("__version__")
    assert public <= set(_tool("public_names").public_names())
    text = "\n".join(p.read_text(encoding="utf-8") for p in PAGES)
    assert not public - set(re.findall(r"\btd\.(\w+)", text))


def test_navigation_lists_every_page() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: a link, an anchor or a page of the navigation that is not there is an error."""
    if importlib.util.find_spec("material") is None:
        raise SkipTest("mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "tutorial/index.html", "images/vae.png"):
        assert (tmp_path / page).is_file()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    problems = failures_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    print("\n".join(problems))
    sys.exit(1 if problems else 0)
