"""The two demonstrations in Chromium: digits are learned, text is written; slow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import browser
import treadle as td
from test_web import needs_chromium, opened, saved

ROOT = Path(__file__).resolve().parent.parent
FEW = 50  # steps that Python and the browser are compared for
WANTED = 0.97  # of held-out digits

pytestmark = [pytest.mark.slow, needs_chromium]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_digits_are_learned_as_in_python(tmp_path: Path) -> None:
    digits = example("web_digits")
    folder = digits.export_web(str(tmp_path / "digits"))
    sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
    assert sum(sizes.values()) - sizes["weights.safetensors"] <= 300_000
    step, (rows, held_out) = digits.compiled(), digits.rows()
    with opened(folder, 600) as page:
        # The page's own loop, and the rows that it drew.
        page.run(
            "treadle.chosen = [], treadle.batches.take = function (chosen) {"
            " treadle.chosen.push([...chosen]);"
            " return Object.getPrototypeOf(this).take.call(this, chosen); }, 0"
        )
        page.run(f"treadle.training.run({FEW})")
        losses, chosen = page.run("[treadle.training.losses, treadle.chosen]")
        assert len(losses) == FEW
        for loss, drawn in zip(losses, chosen, strict=True):
            here = step({name: array[drawn] for name, array in rows.items()})
            assert abs(here.loss - loss) < 1e-3
        weights = saved(page, "saveWeights")
        for name, array in step.params.items():
            np.testing.assert_allclose(weights[name], array, atol=2e-3, rtol=0)
        accuracy = 0.0
        for _ in range(10):
            if accuracy >= WANTED:
                break
            page.run("treadle.training.run(44)")
            accuracy = page.run("treadle.training.lastScore.accuracy")
        assert accuracy >= WANTED
        # What was learned there is known here, bit for bit.
        weights = saved(page, "saveWeights")
        step.load_params(weights)
        assert all(a.tobytes() == weights[n].tobytes() for n, a in step.params.items())
        assert step.evaluate(held_out).metrics["accuracy"] == pytest.approx(accuracy, abs=3e-3)
        _teach(page)
        assert _width(page) <= 320


def _width(page: browser.Page) -> int:
    """Of the page on a small phone: nothing sticks out."""
    page.resize(320, 640, mobile=True)
    return int(page.run("document.documentElement.scrollWidth"))


def _teach(page: browser.Page) -> None:
    """A sign that is no digit is learned as the one that the visitor says it is."""
    page.run(
        "treadle.pad.strokes = [[[.2, .2], [.8, .8]], [[.8, .2], [.2, .8]]], treadle.pad.draw(),"
        " treadle.read()"
    )
    page.run("treadle.teach(7)")
    page.wait_for("!treadle.training.running", 120)
    for _ in range(3):
        if page.run("document.getElementById('answer').textContent") == "7":
            break
        page.run("treadle.training.run(40)")
    assert page.run("document.getElementById('answer').textContent") == "7"
    # Start, pause and reset, as a visitor clicks them.
    page.run("document.getElementById('start').click()")
    page.wait_for("treadle.training.running")
    page.run("document.getElementById('start').click()")
    page.wait_for("!treadle.training.running", 60)
    page.run("document.getElementById('reset').click()")
    page.wait_for("document.getElementById('steps').textContent === '0'", 60)


def test_text_is_written_over_a_cache(tmp_path: Path) -> None:
    """Letter by letter in the browser as Python's whole forward; the step trains; so does a page
    that only runs."""
    text = example("web_text")
    small = {"width": 16, "heads": 2, "layers": 1, "batch": 2}
    folder = text.export_web(str(tmp_path / "gpt"), **small)
    step, _ = text.compiled(**small)
    letters = [text.LETTERS.index(c) for c in "The loom"]

    def whole(model: Any, tokens: Any) -> Any:
        return model(tokens, td.arange(len(letters)))[0]

    with opened(folder, 600) as page:
        page.run("treadle.training.run(12)")
        found = page.run("treadle.training.losses")
        assert np.mean(found[-3:]) < np.mean(found[:3])
        step.load_params(saved(page, "saveWeights"))
        forward = step.attach(whole, td.Spec((1, len(letters)), td.int32))
        expected = forward(np.array([letters], np.int32))
        rows = page.run(
            "(async () => { const rows = []; let at = 0;"
            f" for (const token of {letters}) rows.push([...await treadle.scores(token, at++)]);"
            " return rows; })()"
        )
        np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=0)
        # Further than the cache is long.
        written = page.run(
            "(async () => { let all = ''; for await (const letter of"
            f" treadle.write('The', {text.CONTEXT + 4}, 0.8)) all += letter; return all; }})()"
        )
        assert len(written) == text.CONTEXT + 4
        assert set(written) <= set(text.LETTERS)
        assert _width(page) <= 320
    _, decode = text.compiled(**small)
    settings = {"letters": text.LETTERS, "context": text.CONTEXT}
    decode.export_web(tmp_path / "run", page="text", settings=settings)
    with opened(tmp_path / "run", 600) as page:
        assert page.run("document.querySelector('.training').hidden")
        page.run("document.getElementById('write').click()")
        page.wait_for("document.getElementById('written').textContent.length > 5", 60)
