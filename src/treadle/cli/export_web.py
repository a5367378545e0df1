"""`treadle export-web FILE.py --out FOLDER`: a page that trains what a file describes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from treadle.cli.explain import compiled_by
from treadle.cli.train import (
    USAGE,
    UsageError,
    check_required,
    load_function,
    parsed,
    read_source,
    report,
    settings_of,
)

EXPORT = "export_web"


def run_export_web(file: str, out: str, settings: Sequence[str] = ()) -> int:
    """Call `export_web(folder, ...)` of a file, or export the first step that it compiles."""
    try:
        folder = exported(Path(file), out, settings)
    except UsageError as error:
        print(f"treadle export-web: {error}", file=sys.stderr)
        return USAGE
    except (KeyboardInterrupt, Exception) as error:
        return report(error)
    print(f"{folder}: {_size(folder)}. To look at it: python -m http.server --directory {folder}")
    return 0


def exported(path: Path, out: str, settings: Sequence[str] = ()) -> Path:
    _, tree = read_source(path)
    if not any(isinstance(n, ast.FunctionDef) and n.name == EXPORT for n in tree.body):
        return compiled_by(path, settings)[0].export_web(out)
    export = load_function(path, EXPORT)
    parameters = settings_of(export)
    if not parameters:
        raise UsageError(f"{path}: {EXPORT} takes no folder. Write: def {EXPORT}(folder): ...")
    first = next(iter(parameters))
    values = parsed(settings, {n: p for n, p in parameters.items() if n != first}, path)
    check_required(path, parameters, {**values, first: out})
    export(out, **values)
    if not (Path(out) / "bundle.json").is_file():
        raise UsageError(f"{path}: {EXPORT} wrote no page to {out}. Let it call step.export_web.")
    return Path(out)


def _size(folder: Path) -> str:
    sizes = {p.name: p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    weights = sizes.get("weights.safetensors", 0)
    rest = sum(sizes.values()) - weights
    return f"{len(sizes)} files, {rest / 1000:,.0f} kB and {weights / 1000:,.0f} kB of weights"
