"""The shape of the source: imports point down, no cycles, no late imports, sizes, names, start."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "treadle"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE

# What each folder, or module beside them, may import. Folders that do not exist yet are in the
# table because the rule does not wait for them.
BASE = frozenset({"base"})
VALUES = BASE | {"ir", "kernel"}  # every value that is passed between stages
TRACED = BASE | {"ir", "domains", "frontend"}
MODELS = TRACED | {"autodiff", "batching"}
LIBRARY = MODELS | {"distributions", "fft", "linalg", "nn", "losses", "metrics", "optim"}
STAGES = frozenset({"precision", "schedule", "memory", "codegen", "runtime"})
BELOW_PIPELINE = LIBRARY | VALUES | STAGES | {"rules", "egraph"}
TOP = frozenset(
    {
        "verify",
        "recognition",
        "compile_report",
        "backends",
        "pipeline",
        "step",
        "models",
        "interop",
        "report",
        "tables",
        "web",
        "__init__",
    }
)
ALL = BELOW_PIPELINE | TOP | {"data", "distributed"}

# Parts of `interop` that know files and no models: `models` reads through them.
FILE_FORMATS = frozenset({"archives", "gguf", "npz", "opened", "torch_files"})

MAY_IMPORT: dict[str, frozenset[str]] = {
    "base": frozenset(),
    "data": BASE | {"distributed"},  # loaders give each rank its rows
    "distributed": BASE,  # how work is cut, and what processes exchange: no graphs
    "ir": BASE,
    "kernel": BASE | {"ir"},
    "domains": BASE | {"ir"},
    "frontend": BASE | {"ir", "domains"},
    "autodiff": TRACED,
    "batching": TRACED,
    "fft": TRACED,
    "distributions": MODELS | {"linalg"},
    "linalg": MODELS,
    "nn": MODELS,
    "losses": MODELS,
    "metrics": MODELS,
    "optim": MODELS | {"linalg"},  # preconditioners have eigenvectors
    "precision": VALUES | {"frontend"},
    "egraph": VALUES,
    "rules": VALUES | {"egraph"},  # rules that are data
    "td.rules": frozenset({"verify"}),  # a user's own are proved before they are used
    **dict.fromkeys(sorted(STAGES - {"precision", "schedule", "runtime"}), VALUES),
    "schedule": VALUES | {"rules"},  # graphs are expanded by rules before they are lowered
    "runtime": VALUES | {"domains"},  # the oracle is a device
    "verify": BELOW_PIPELINE | {"compile_report"},  # a certificate is of what a report has
    "tables": BELOW_PIPELINE,  # fills the tables of ops
    "compile_report": VALUES,
    # Each strings its stages together; a search draws indices that are in range.
    "backends": VALUES | STAGES | {"compile_report", "domains", "verify"},
    "recognition": VALUES | {"domains", "frontend", "rules", "verify"},
    "pipeline": BELOW_PIPELINE | {"verify", "tables", "compile_report", "backends", "recognition"},
    "step": BELOW_PIPELINE
    | {"pipeline", "backends", "compile_report", "distributed", "verify", "web"},
    "web": BELOW_PIPELINE | {"pipeline", "backends", "compile_report"},
    "file formats": BASE | {"runtime"},
    "models": MODELS
    | {"nn", "losses", "optim", "fft", "data", "runtime", "compile_report", "pipeline", "step"}
    | {"file formats"},
    "interop": BELOW_PIPELINE
    | {"pipeline", "backends", "compile_report", "data", "models", "step", "train", "file formats"},
    "report": BELOW_PIPELINE | {"pipeline"},
    "train": ALL - {"interop"},
    "fuzz": ALL,  # its programs are written with the public names
    "serve": VALUES | {"domains", "frontend", "nn", "models", "step"},
    "__init__": ALL | {"train"},
    "cli": ALL | {"train", "fuzz", "serve"},
    "__main__": frozenset({"cli"}),
}

# Third-party packages a folder may import at the top of a module, and those that are optional or
# heavy and so may also be imported inside a function.
EVERYWHERE = frozenset({"ml_dtypes", "numpy"})
# Folders that may import more: estimators derive from scikit-learn's, and are imported by name; a
# service is Starlette's application in uvicorn, and is imported by `treadle serve` alone. The checker
# of certificates is a package of its own, which imports nothing of this one.
THIRD_PARTY: dict[str, frozenset[str]] = {
    "interop": EVERYWHERE | {"sklearn"},
    "serve": EVERYWHERE | {"h11", "starlette", "uvicorn"},
    "verify": EVERYWHERE | {"treadle_checker"},
    "cli": EVERYWHERE | {"treadle_checker"},
}
LATE = frozenset(
    "cryptography cuda cudnn datasets gguf h5py llvmlite matplotlib mlflow mpi4py onnx optuna polars "
    "pyarrow ray safetensors "
    "sklearn tokenizers torch wandb wgpu z3".split()
)

# The compiler's back half, a third of the import time: a device's when it is first asked for.
LATE_OWN = frozenset(
    [
        "treadle.backends.scheduling",
        "treadle.backends.views",
        "treadle.distributed.mpi",  # it starts MPI
        "treadle.runtime.cpu.exchange",  # what ranks call while they compute
        "treadle.egraph.optimize",
        "treadle.recognition.recognise",
        "treadle.rules.from_data",
        "treadle.serve.__init__",  # what it stands on is an extra
        "treadle.verify.user_rules",
        "treadle.web.export",  # what a browser is given
    ]
    + [f"treadle.backends.{device}.backend" for device in ("oracle", "cpu", "cuda", "webgpu")]
    + ["treadle.runtime.webgpu.device"]
    # What only verify="full" asks for.
    + [f"treadle.verify.{part}" for part in ("kernels", "gradients", "library")]
    + ["treadle.step.parallel.gluing"]
    # The checker, and what only a certificate asks for.
    + [f"treadle.verify.certificate.{part}" for part in ("certificate", "left", "replay")]
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
EMPTY_WORDS = frozenset(["util", "utils", "helper", "helpers", "manager", "handler", "info"])

# What `import treadle` leaves for when it is used: what is heavy or optional, and of Treadle itself
# what compiles, trains and reads data.
NOT_AT_START = LATE | {"jax", "pandas", "rich", "scipy", "starlette", "uvicorn"}
PARTS_NOT_AT_START = tuple(
    f"treadle.{part}"
    for part in (
        "backends.cpu",
        "backends.cuda",
        "backends.webgpu",
        "cli",
        "codegen",
        "data",
        "interop",
        "memory",
        "models",
        "recognition",
        "schedule",
        "serve",
        "train",
        "verify",
        "web",
    )
)

Modules = Mapping[str, ast.Module]  # by dotted name; packages end in .__init__


@dataclass(frozen=True)
class Import:
    """One imported module, as written in one line of another."""

    importer: str
    line: int
    target: str  # a module of ours by its key in Modules, or the name of another package
    is_ours: bool
    is_late: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@cache
def source_modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def parsed(sources: Mapping[str, str]) -> dict[str, ast.Module]:
    """A made-up package, to see that each check can fail."""
    return {f"{PACKAGE}.{name}": ast.parse(text) for name, text in sources.items()}


def folder_of(module: str) -> str:
    """The folder under the package, or the module's own name beside the folders."""
    if module == "treadle.rules.__init__":
        return "td.rules"  # what users see of the folder
    _, first, *rest = module.split(".")
    return "file formats" if first == "interop" and rest[0] in FILE_FORMATS else first


def imports_of(modules: Modules) -> list[Import]:
    return own_imports() if modules is source_modules() else _imports_of(modules)


@cache
def own_imports() -> list[Import]:
    return _imports_of(source_modules())


def _imports_of(modules: Modules) -> list[Import]:
    return [i for name, tree in modules.items() for i in _imports_in(name, tree, modules)]


def _imports_in(importer: str, tree: ast.Module, modules: Modules) -> Iterator[Import]:
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, is_late = pending.pop()
        for target in _targets(importer, node, modules):
            is_ours = target == PACKAGE or target.startswith(f"{PACKAGE}.")
            name = target if is_ours else target.partition(".")[0]
            yield Import(importer, getattr(node, "lineno", 0), name, is_ours, is_late)
        is_late = is_late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
            pending += [(child, is_late) for child in ast.iter_child_nodes(node)][::-1]


def _targets(importer: str, node: ast.AST, modules: Modules) -> list[str]:
    if isinstance(node, ast.Import):
        return [_module_key(alias.name, modules) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    # `from .a import b` counts from the folder that the importer lies in.
    start = importer.rsplit(".", node.level)[0] + "." if node.level else ""
    source = (start + (node.module or "")).rstrip(".")
    # `from a import b` imports the module a.b if there is one, and otherwise a name of a.
    return [_module_key(f"{source}.{alias.name}", modules, source) for alias in node.names]


def _module_key(name: str, modules: Modules, otherwise: str | None = None) -> str:
    for candidate in (name, otherwise or name):
        for key in (candidate, f"{candidate}.__init__"):
            if key in modules:
                return key
    return otherwise or name


def dynamic_imports(modules: Modules) -> list[str]:
    """Calls that import by a computed name, which no table can see.

    The package and `interop` may: names for training, data and other libraries are imported late.
    """
    found = []
    for name, tree in modules.items():
        if name in ("treadle.__init__", "treadle.interop.__init__"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                called = getattr(function, "attr", "") or getattr(function, "id", "")
                if called == "__import__" or called.endswith("import_module"):
                    found.append(f"{name}:{node.lineno} calls {ast.unparse(function)}")
    return found


def upward_imports(modules: Modules) -> list[str]:
    found = []
    for i in imports_of(modules):
        if not i.is_ours:
            continue
        importer = folder_of(i.importer)
        target = folder_of(i.target) if "." in i.target else "__init__"
        if target != importer and target not in MAY_IMPORT.get(importer, frozenset()):
            found.append(str(i))
    return found


def unknown_folders(modules: Modules) -> list[str]:
    return sorted({folder_of(name) for name in modules} - set(MAY_IMPORT))


def import_cycles(modules: Modules) -> list[list[str]]:
    """Strongly connected sets of more than one module, or one that imports itself (Tarjan)."""
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for i in imports_of(modules):
        if i.target in modules:
            edges[i.importer].add(i.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1 or name in edges[name]:
                cycles.append(sorted(component))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return cycles


def late_imports(modules: Modules) -> list[str]:
    late = [i for i in imports_of(modules) if i.is_late]
    return [str(i) for i in late if i.target not in (LATE_OWN if i.is_ours else LATE)]


def foreign_imports(modules: Modules) -> list[str]:
    """Third-party packages at the top of a module that its folder does not depend on."""
    found = []
    for i in imports_of(modules):
        known = THIRD_PARTY.get(folder_of(i.importer), EVERYWHERE) | sys.stdlib_module_names
        if not (i.is_ours or i.is_late or i.target in known):
            found.append(str(i))
    return found


def long_functions(modules: Modules, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    found = []
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > limit:
                    found.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    return found


def empty_names(modules: Modules) -> list[str]:
    """Modules whose name says nothing about what is inside."""
    return [name for name in modules if EMPTY_WORDS & set(re.split(r"[._]", name))]


def _list(problems: list[str]) -> str:
    return "\n".join(["", *problems])


def test_every_folder_has_its_row() -> None:
    assert not unknown_folders(source_modules())


def test_imports_point_down() -> None:
    problems = upward_imports(source_modules())
    assert not problems, _list(problems)


def test_stages_meet_only_in_the_pipeline() -> None:
    for stage in STAGES:
        assert not MAY_IMPORT[stage] & STAGES


def test_nothing_imports_the_top() -> None:
    for folder, allowed in MAY_IMPORT.items():
        assert folder == "__main__" or "cli" not in allowed, folder
        if folder not in ("interop", "train", "fuzz", "__init__", "cli"):
            assert not allowed & {"train", "__init__"}, folder


def test_no_import_cycles() -> None:
    problems = [" <-> ".join(c) for c in import_cycles(source_modules())]
    assert not problems, _list(problems)


def test_no_late_imports() -> None:
    problems = late_imports(source_modules()) + dynamic_imports(source_modules())
    assert not problems, _list(problems)


def test_third_party_packages() -> None:
    problems = foreign_imports(source_modules())
    assert not problems, _list(problems)


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    problems = [
        f"{path.relative_to(SOURCE)} has {n} lines"
        for path, n in lengths.items()
        if n > MAX_FILE_LINES
    ]
    assert not problems, _list(problems)


def test_functions_are_short() -> None:
    problems = long_functions(source_modules())
    assert not problems, _list(problems)


def test_names_say_something() -> None:
    assert not empty_names(source_modules())


@pytest.mark.parametrize(
    ("check", "sources"),
    [
        (upward_imports, {"base.a": "import treadle.ir.b", "ir.b": ""}),
        (upward_imports, {"base.a": "from treadle.ir import b", "ir.b": ""}),
        (upward_imports, {"base.a": "from ..ir import b", "ir.b": ""}),
        (upward_imports, {"base.a": "from treadle import ir", "ir.__init__": ""}),
        (upward_imports, {"memory.a": "from treadle.schedule.b import c", "schedule.b": ""}),
        (upward_imports, {"domains.a": "from treadle.frontend import b", "frontend.b": ""}),
        (upward_imports, {"verify.a": "from treadle.pipeline import b", "pipeline": ""}),
        (upward_imports, {"train.a": "from treadle.cli.b import c", "cli.b": ""}),
        (upward_imports, {"ir.a": "from treadle import tables", "tables": ""}),
        (upward_imports, {"ir.a": "import treadle as td", "__init__": ""}),
        (upward_imports, {"ir.a": "from treadle import zeros", "__init__": ""}),
        (unknown_folders, {"misc.a": ""}),
        (import_cycles, {"ir.a": "import treadle.ir.b", "ir.b": "from treadle.ir import a"}),
        (import_cycles, {"ir.a": "def f():\n import treadle.ir.b", "ir.b": "from . import a"}),
        (late_imports, {"ir.a": "def f():\n    import treadle.base.b", "base.b": ""}),
        (late_imports, {"ir.a": "class C:\n    def f(self):\n        import scipy"}),
        (late_imports, {"ir.a": "async def f():\n    import json"}),
        (dynamic_imports, {"ir.a": "importlib.import_module('torch')"}),
        (dynamic_imports, {"ir.a": "__import__('torch')"}),
        (foreign_imports, {"ir.a": "from scipy import special"}),
        (foreign_imports, {"ir.a": "import rich"}),
        (long_functions, {"ir.a": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES}),
        (empty_names, {"ir.graph_utils": ""}),
    ],
)
def test_each_check_can_fail(check, sources) -> None:  # type: ignore[no-untyped-def]
    assert check(parsed(sources))


def test_what_is_allowed_passes() -> None:
    modules = parsed(
        {
            "base.a": "import json\nimport numpy as np",
            "ir.b": "from treadle.base import a\nfrom treadle.base.a import x",
            "runtime.c": "def load():\n    import cuda.bindings",
            "cli.d": "import treadle as td",
            "__init__": "from treadle.ir.b import x as x",
            "__main__": "from treadle.cli.d import main",
        }
    )
    assert not upward_imports(modules)
    assert not import_cycles(modules)
    assert not late_imports(modules)
    assert not foreign_imports(modules)


_IMPORTED = """
import sys
import treadle
print(*sorted(sys.modules))
"""


def _imported_in_fresh_process() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_is_light() -> None:
    """What is imported, not how long it takes, which is the machine's: see bench/import_time.py."""
    names = _imported_in_fresh_process()
    tops = {name.partition(".")[0] for name in names}
    assert "treadle" in tops
    assert not tops & NOT_AT_START
    assert not {n for n in names if n.startswith(PARTS_NOT_AT_START)}


def test_the_back_half_keeps_its_shape() -> None:
    """Few functions walk the loop IR by hand, and no renderer or stage asks what device it is."""
    place = SOURCE.parent.parent / "tools" / "measure_source.py"
    spec = importlib.util.spec_from_file_location("measure_source", place)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool  # dataclasses look their module up
    spec.loader.exec_module(tool)
    found = tool.modules()
    assert len(tool.walkers(found)) <= 12
    assert tool.function_median(found) <= 7
    assert not tool.uses_of_is_gpu(found)
