"""What the compiler makes of many programs, stage by stage, to be compared with another revision.

usage: python tools/replay.py [program ...] [--out FOLDER] [--stages cuda wgsl ...]
       python tools/replay.py [program ...] --against REVISION [--rename OLD=NEW ...] [--lines 60]

Programs are the workloads of bench/models.py, some of them in float16 too (`half_NAME`), the models
of the zoo (`zoo_NAME`, bench/families) and `--random` programs of `treadle fuzz`, by a seed. Stages
are the graph, the program of kernels, LLVM IR, CUDA C++, HIP C++ and WGSL, each for two targets,
and WGSL for a third; `--stages` names some.
Nothing is run, and no GPU is needed. The texts of each stage are written to a folder, with their
hashes.

With `--against` both revisions write their texts, each with its own compiler and its own copy of
this script. What differs is listed, and the first difference of each stage is printed with its
kernel. `--rename` says which words the other revision has others for.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEED, RANDOM = 17, 150
HALVES = ("mlp_wide", "cnn", "gpt_nano")
STAGES = ["graph", "program", "llvm", "gpu_program", "cuda", "hip", "wgsl"]
HEADS = re.compile(r"^(\d+: kernel |define |extern \"C\"|__device__ |node |kernel |Shader)")


def names(count: int) -> list[str]:
    """Of all programs: workloads, models of the zoo, and numbers of random programs."""
    from families import ZOO

    from models import WORKLOADS

    known = [*WORKLOADS, *(f"half_{n}" for n in HALVES), *(f"zoo_{n}" for n in ZOO)]
    return known + [f"random{i}" for i in range(count)]


def graphs(name: str) -> tuple[Any, Any]:
    """The graph of a program for processors and for GPUs."""
    if name.startswith("random"):
        from treadle.fuzz.cases import prepared
        from treadle.fuzz.generate import generate

        graph = prepared(replace(generate(SEED, int(name[6:])), target="native")).graph
        return graph, graph
    if name.startswith("zoo_"):
        graph = zoo_graph(name[4:])
        return graph, graph
    if name.startswith("half_"):
        graph = workload_graph(name[5:], "cuda", is_half=True)
        return graph, graph
    return workload_graph(name, "cpu"), workload_graph(name, "cuda")


def workload_graph(name: str, device: str, is_half: bool = False) -> Any:
    import treadle as td
    from models import FOR_GPUS, WORKLOADS, loss

    given = WORKLOADS[name]
    is_narrow = device == "cuda" and name in FOR_GPUS
    precision = td.float16 if is_half else td.bfloat16 if is_narrow else td.float32
    return step_graph(given.make(), loss, given.clip, precision, given.specs(), device)


def zoo_graph(name: str) -> Any:
    from families import ZOO, with_treadle

    import treadle as td

    entry = ZOO[name]
    specs = {n: td.Spec(a.shape, getattr(td, a.dtype.name)) for n, a in entry.arrays("cpu").items()}
    model = entry.make(with_treadle, **entry.cpu)
    return step_graph(model, lambda m, b: m(b), None, td.float32, specs, "cpu")


def step_graph(
    model: Any, loss: Any, clip: float | None, precision: Any, specs: Any, device: str
) -> Any:
    import treadle as td
    from treadle.nn.tracing import Inputs
    from treadle.optim.append import Mode
    from treadle.pipeline import CompileReport, StepRecipe, build_step

    recipe = StepRecipe(
        model, loss, td.optim.adamw(1e-3), "step0:", 1, clip, precision, td.CompileOptions()
    )
    report = CompileReport(device, precision.name)
    return build_step(recipe, recipe.plan(), Inputs.of(specs), report)[Mode.UPDATE]


def texts(name: str, stages: Collection[str]) -> Iterator[tuple[str, str]]:
    """Stage by stage, what the compiler makes of a program."""
    from treadle.ir.text import to_text

    graph, for_gpu = graphs(name)
    if "graph" in stages:
        yield "graph", f"{to_text(graph)}\n\n{to_text(for_gpu)}\n"
    if {"program", "llvm"} & set(stages):
        yield from cpu_texts(graph)
    if {"gpu_program", "cuda", "hip"} & set(stages):
        yield from gpu_texts(for_gpu)
    if "wgsl" in stages:
        yield from wgsl_texts(for_gpu)


def cpu_texts(graph: Any) -> Iterator[tuple[str, str]]:
    from treadle.codegen.llvm.driver import render_program
    from treadle.kernel.machine import Machine
    from treadle.kernel.text import program_text
    from treadle.schedule.schedule import schedule

    for machine in (Machine(8), Machine(16, permutes=16, registers=32)):
        program = schedule(graph, True, 2 * machine.width, in_place=True)
        yield f"program_{machine.width}", program_text(program)
        yield f"llvm_{machine.width}", render_program(program, machine)


def gpu_texts(graph: Any) -> Iterator[tuple[str, str]]:
    from treadle.codegen.cuda.driver import render_program
    from treadle.codegen.hip.driver import as_hip
    from treadle.kernel.text import program_text
    from treadle.schedule.schedule import GPU, schedule

    bare = replace(GPU, has_attention=False, has_conv=False)
    full = replace(GPU, has_attention=True, has_conv=True)
    for title, target in (("bare", bare), ("full", full)):
        program = schedule(graph, True, in_place=True, target=target)
        yield f"gpu_program_{title}", program_text(program)
        source = render_program(program)
        launches = "\n".join(map(str, (*source.launches, *source.cooperative)))
        yield f"cuda_{title}", "\n".join([*source.parts, launches])
        yield f"hip_{title}", "\n".join(as_hip(part, 32) for part in source.parts)


def wgsl_texts(graph: Any) -> Iterator[tuple[str, str]]:
    """With the least limits, without and with subgroups, and with all that an H200 offers."""
    from treadle.backends.webgpu.backend import in_words, refuse_wide
    from treadle.base.errors import DTypeError
    from treadle.codegen.wgsl.driver import render_program
    from treadle.kernel.target_webgpu import BASE, FULL, target_of
    from treadle.kernel.text import program_text
    from treadle.schedule.schedule import schedule

    try:
        refuse_wide(graph)
    except DTypeError as error:
        yield "wgsl_refused", str(error)
        return
    exchanging = replace(BASE, name="exchanging", subgroup=8)
    for title, limits in (("base", BASE), ("exchanging", exchanging), ("full", FULL)):
        program = schedule(graph, True, in_place=True, target=target_of(limits))
        yield f"wgsl_program_{title}", program_text(program)
        shaders = render_program(in_words(program, limits.has_f16), limits.has_f16)
        yield f"wgsl_{title}", "\n".join(map(str, shaders)).replace("\\n", "\n")


def write(name: str, folder: Path, stages: Collection[str]) -> dict[str, str]:
    """The texts of a program into a folder, and their hashes by file."""
    found: dict[str, str] = {}
    try:
        for stage, text in texts(name, stages):
            (folder / f"{name}.{stage}.txt").write_text(text)
            found[f"{name}.{stage}"] = hashlib.sha256(text.encode()).hexdigest()
    except Exception as error:
        found[f"{name}.error"] = f"{type(error).__name__}: {error}"
    return found


def write_all(
    wanted: list[str], folder: Path, processes: int, stages: Collection[str]
) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, str] = {}
    with ProcessPoolExecutor(processes) as pool:
        every = pool.map(write, wanted, [folder] * len(wanted), [stages] * len(wanted))
        for i, part in enumerate(every):
            found |= part
            if sys.stderr.isatty():
                told = f"\r{i + 1} of {len(wanted)} programs"
                print(told, end="", file=sys.stderr, flush=True)
    (folder / "hashes.json").write_text(json.dumps(found, indent=1))
    return found


def in_checkout(root: Path, given: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The hashes that the compiler of a checkout gives, its texts in a folder."""
    command = [sys.executable, str(root / "tools" / "replay.py"), *given.programs]
    command += ["--out", str(folder), "--random", str(given.random), "--stages", *given.stages]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root / 'bench'}"}
    subprocess.run(command, check=True, env=environment)
    found: dict[str, str] = json.loads((folder / "hashes.json").read_text())
    return found


def renamed(text: str, words: list[str]) -> str:
    for word in words:
        old, new = word.split("=")
        text = re.sub(rf"\b{re.escape(old)}\b", new, text)
    return text


def difference(old: str, new: str, lines: int) -> str:
    """The first lines that differ, and the kernel they are in."""
    a, b = old.splitlines(), new.splitlines()
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    head = next((x for x in reversed(a[: first + 1]) if HEADS.match(x)), "")
    start = max(0, first - 5)
    shown = difflib.unified_diff(a[start : first + 400], b[start : first + 400], lineterm="", n=3)
    return "\n".join([f"in: {head}", *list(shown)[2 : 2 + lines]])


def compare(folders: tuple[Path, Path], hashes: tuple[dict[str, str], ...], given: Any) -> int:
    """Print what differs; how many texts do."""
    told, count = set[str](), 0
    for key in sorted({*hashes[0], *hashes[1]}):
        if hashes[0].get(key) == hashes[1].get(key):
            continue
        paths = [folder / f"{key}.txt" for folder in folders]
        if not all(p.exists() for p in paths):
            count += 1
            print(f"{key}: {hashes[0].get(key, 'none')} → {hashes[1].get(key, 'none')}")
            continue
        old, new = renamed(paths[0].read_text(), given.rename), paths[1].read_text()
        if old == new:
            continue
        count += 1
        stage = key.split(".", 1)[1].rsplit("_", 1)[0]
        print(f"{key} differs")
        if stage not in told:
            told.add(stage)
            print(difference(old, new, given.lines))
    print(f"{count} of {len(hashes[1])} texts differ")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", metavar="program", help="all, unless some are named")
    parser.add_argument("--random", type=int, default=RANDOM, help="random programs")
    parser.add_argument("--out", type=Path, help="folder for the texts")
    parser.add_argument("--against", metavar="REVISION")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--lines", type=int, default=60, help="of each difference")
    parser.add_argument("--stages", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.against is None:
        sys.path[:0] = [str(ROOT / "bench")]
        folder = given.out or Path(tempfile.mkdtemp(prefix="replay"))
        hashes = write_all(
            given.programs or names(given.random), folder, given.processes, given.stages
        )
        wrong = [k for k in hashes if k.endswith(".error")]
        print(f"{len(hashes)} texts in {folder}", *(f"{k}: {hashes[k]}" for k in wrong), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as top:
        other, folders = Path(top) / "other", (Path(top) / "old", Path(top) / "new")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", other, given.against], check=True)
        try:
            hashes = tuple(
                in_checkout(root, given, folder)
                for root, folder in zip((other, ROOT), folders, strict=True)
            )
        finally:
            subprocess.run([*git, "remove", "--force", other], check=True)
        return 1 if compare(folders, hashes, given) else 0


if __name__ == "__main__":
    sys.exit(main())
