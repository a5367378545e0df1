"""tools/replay.py: texts by stage, and what differs between two folders of them."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ["graph", "program_8", "llvm_8", "program_16", "llvm_16"]
STAGES += [
    f"{stage}_{kind}" for kind in ("bare", "full") for stage in ("gpu_program", "cuda", "hip")
]
STAGES += [
    f"{stage}_{kind}"
    for kind in ("base", "exchanging", "full")
    for stage in ("wgsl_program", "wgsl")
]


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replay", ROOT / "tools" / "replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_programs_have_equal_hashes(replay: ModuleType, tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found.append(replay.write("random3", tmp_path / name, replay.STAGES))
    assert found[0] == found[1]
    assert list(found[0]) == [f"random3.{stage}" for stage in STAGES]


def test_a_difference_names_its_kernel(
    replay: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = tmp_path / "old", tmp_path / "new"
    texts = "0: kernel a(p0) {\n  turn = 1\n}\n1: kernel b(p0) {\n  turn = 2\n}\n", ""
    texts = texts[0], texts[0].replace("turn = 2", "turn = 3")
    for folder, text in zip(folders, texts, strict=True):
        folder.mkdir()
        (folder / "mlp.program_8.txt").write_text(text)
    hashes = {"mlp.program_8": "one"}, {"mlp.program_8": "other"}
    assert replay.compare(folders, hashes, Namespace(rename=[], lines=20)) == 1
    shown = capsys.readouterr().out
    assert "in: 1: kernel b(p0) {" in shown
    assert "-  turn = 2\n+  turn = 3" in shown


def test_names_alone_are_no_difference(replay: ModuleType, tmp_path: Path) -> None:
    folders = tmp_path / "old", tmp_path / "new"
    for folder, word in zip(folders, ("turn", "iteration"), strict=True):
        folder.mkdir()
        (folder / "mlp.cuda_full.txt").write_text(f"int {word} = {word}s + 1;\n")
    hashes = {"mlp.cuda_full": "one"}, {"mlp.cuda_full": "other"}
    given = Namespace(rename=["turn=iteration"], lines=20)
    assert replay.compare(folders, hashes, given) == 1
    given.rename.append("turns=iterations")
    assert replay.compare(folders, hashes, given) == 0
