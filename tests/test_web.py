"""What `export_web` writes: files by themselves, the runtime under node, and pages in Chromium."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file

import browser
import treadle as td
from treadle import losses, nn, optim
from treadle.cli.main import main
from treadle.domains.philox import make_key, philox4x32, random_bits
from treadle.web import export
from treadle.web.export import MOST_ROWS, _evaluations
from treadle.web.folder import write_folder
from treadle.web.pages import LEADS, Page, page_files
from treadle.web.rows import packed

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "src" / "treadle" / "web" / "static"
needs_chromium = pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


class Net(nn.Module):
    def __init__(self) -> None:
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: td.Tensor) -> Any:
        return self.fc2(self.dropout(td.tanh(self.fc1(x))))


def net_loss(model: Any, batch: Any) -> Any:
    scores = model(batch["x"])
    td.metric("accuracy", (scores.argmax(-1) == batch["y"]).astype(td.float32).mean())
    return losses.cross_entropy(scores, batch["y"])


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 6)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)}


def net_step(**options: Any) -> td.TrainStep:
    specs = {"x": td.Spec((8, 6)), "y": td.Spec((8,), td.int32)}
    return td.compile_step(Net(), net_loss, optim.adamw(1e-2), specs, device="cpu", **options)


# Without a browser


def test_a_folder_is_whole_and_replaces_only_exports(tmp_path: Path) -> None:
    there = tmp_path / "a" / "page"
    bundle = json.dumps({"treadle": "0", "programs": {}}).encode()
    assert write_folder(there, {"bundle.json": bundle, "old.js": b"1"}) == there
    write_folder(there, {"bundle.json": bundle, "new.js": b"2"})
    assert sorted(p.name for p in there.iterdir()) == ["bundle.json", "new.js"]
    assert [p.name for p in there.parent.iterdir()] == ["page"]  # nothing is left beside it
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(td.TreadleError, match="has other files in it"):
        write_folder(tmp_path / "mine", {"bundle.json": bundle})
    (tmp_path / "file").write_text("x")
    with pytest.raises(td.TreadleError, match="is not a folder"):
        write_folder(tmp_path / "file", {"bundle.json": bundle})
    with pytest.raises(td.TreadleError, match="cannot be written: embedded null byte"):
        write_folder("a\0b", {"bundle.json": bundle})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file", "mine"]


def test_what_others_put_beside_an_export_is_not_deleted(tmp_path: Path) -> None:
    bundle = {"treadle": "0", "programs": {}, "folder": ["bundle.json", "img/a.png"]}
    files = {"bundle.json": json.dumps(bundle).encode(), "img/a.png": b"1"}
    there = write_folder(tmp_path / "page", files)
    assert write_folder(there, files) == there
    (there / "img" / "own.txt").write_text("mine")
    with pytest.raises(td.TreadleError, match=r"other files in it: img/own\.txt"):
        write_folder(there, files)
    assert (there / "img" / "own.txt").read_text() == "mine"


def test_an_export_into_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = json.dumps({"treadle": "0", "programs": {}}).encode()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_folder(".", {"bundle.json": bundle})
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["bundle.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_an_export_that_cannot_be_put_in_place_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = json.dumps({"treadle": "0", "programs": {}}).encode()
    there = write_folder(tmp_path / "page", {"bundle.json": bundle, "old.js": b"1"})
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if Path(target) == there and (Path(source) / "new.js").exists():
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(td.TreadleError, match="No space left"):
        write_folder(there, {"bundle.json": bundle, "new.js": b"2"})
    assert (there / "old.js").read_bytes() == b"1"
    assert [p.name for p in tmp_path.iterdir()] == ["page"]


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (np.arange(17, dtype=np.float32) / 16, 1),
        (np.arange(256, dtype=np.float32) / np.float32(255), 1),
        (np.array([0, 1, 255], np.int32), 1),
        (np.array([-1, 1], np.int32), 4),
        (np.array([0.1, np.nan, np.inf], np.float32), 4),
        (np.array([-0.0, 1.0], np.float32), 4),
    ],
)
def test_rows_are_packed_without_loss(array: np.ndarray, size: int) -> None:
    facts, file = packed({"train": {"x": array}})
    found, divisor = (
        load(gzip.decompress(file))["train/x"],
        facts["splits"]["train"]["x"]["divisor"],
    )
    assert found.dtype.itemsize == size
    again = found if divisor is None else (found.astype(np.float64) / divisor)
    assert again.astype(array.dtype).tobytes() == array.tobytes()


def test_pages_are_complete_and_ask_nobody_else() -> None:
    for name in LEADS:
        files = {n: data.decode() for n, data in page_files(Page(name, title="<b>&")).items()}
        html = files["index.html"]
        assert "{{" not in html
        assert "&lt;b&gt;&amp;" in html
        ids = set(re.findall(r'\bid="([\w-]+)"', html))
        asked = re.findall(r'\$\("([\w-]+)"\)', files[f"{name}.js"])
        assert set(asked) <= ids, set(asked) - ids
        linked = re.findall(r'(?:href|src)="([\w.-]+\.\w+)"', html)
        linked += re.findall(r'from "\./([\w.]+)"', "".join(files.values()))
        assert set(linked) - {"bundle.json"} <= set(files)
        for text in files.values():
            assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert len((STATIC / "treadle.js").read_text().splitlines()) <= 500


def test_a_page_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "index.html").write_text("mine")
    files = page_files(Page(str(own)))
    assert files["index.html"] == b"mine"
    assert "treadle.js" in files
    (own / "img").mkdir()
    (own / "img" / "a.png").write_bytes(b"1")
    (own / ".git").mkdir()
    (own / ".git" / "config").write_bytes(b"2")
    assert page_files(Page(str(own))).keys() - files.keys() == {"img/a.png"}
    with pytest.raises(td.TreadleError, match="there is no page 'nothing'"):
        page_files(Page("nothing"))


@needs_node
def test_the_runtime_under_node(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": np.array(-7, np.int32),
        "c": np.array([True, False, True]),
        "d": np.arange(-2, 3, dtype=np.int64),
        "é": np.array([1, 2**32 - 1], np.uint32),
        "f": np.zeros((0, 4), np.float32),
        "g": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
        "h": np.array([[-128, 127]], np.int8),
    }
    save_file(arrays, tmp_path / "python.safetensors", {"made": "here"})
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for name in ("treadle.js", "chart.js", "draws.js", "page.js"):
        shutil.copy(STATIC / name, tmp_path)
    told = subprocess.run(
        ["node", str(ROOT / "tests" / "web_runtime.mjs"), str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    again = load_file(tmp_path / "node.safetensors")
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (again[name].dtype, again[name].shape) == (array.dtype, array.shape)
        assert again[name].tobytes() == array.tobytes()
    found = json.loads(told.stdout)
    assert found["key"] == [5, 6, 7, 8, 0, 0]
    key = make_key(123 + (456 << 32), 7, 3)
    key[4] = 2
    assert found["bits"] == random_bits(key, 9, (12,)).tolist()
    assert sorted(found["order"]) == list(range(10))
    blocks = np.arange(2, dtype=np.uint64)
    fixed = [np.full_like(blocks, w) for w in (3, 0, 0)]
    words = np.stack(philox4x32((blocks, *fixed), (7, 0)), -1).reshape(-1)  # type: ignore[arg-type]
    assert found["uniforms"] == (words[:5] / 2**32).tolist()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "line.py"
    file.write_text(
        "import treadle as td\n"
        "from treadle import losses, nn, optim\n"
        "def loss(m, b): return losses.mse(m(b['x']), b['y'])\n"
        "def train(lr: float = 0.1):\n"
        "    spec = td.Spec((4, 2))\n"
        "    step = td.compile_step(nn.Linear(2, 2), loss, optim.sgd(lr), {'x': spec, 'y': spec},"
        " device='cpu')\n"
        "    step({})\n"
    )
    out = str(tmp_path / "page")
    assert main(["export-web", str(file), "--out", out, "--set", "lr=0.5"]) == 0
    assert "kB of weights" in capsys.readouterr().out
    bundle = json.loads((tmp_path / "page" / "bundle.json").read_text())
    assert set(bundle["programs"]) == {"step"}
    state = load_file(tmp_path / "page" / "state.safetensors")
    assert 0.5 in [float(v) for v in state.values()]
    file.write_text(file.read_text() + "def export_web(folder, size: int): pass\n")
    assert main(["export-web", str(file), "--out", out]) == 2
    assert "needs size" in capsys.readouterr().err
    assert main(["export-web", str(file), "--out", f"{out}2", "--set", "size=1"]) == 2
    assert "wrote no page" in capsys.readouterr().err


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    step, other = net_step(), net_step(seed=1)
    foreign = other.attach(lambda model, x: model(x), td.Spec((1, 6)))
    with pytest.raises(td.TreadleError, match="which has other parameters"):
        step.export_web(tmp_path / "page", forwards={"predict": foreign})
    with pytest.raises(td.TreadleError, match="data has the arrays x, the batch x, y"):
        step.export_web(tmp_path / "page", data={"x": rows(9)["x"]})
    with pytest.raises(td.TreadleError, match="differ in the first axis"):
        step.export_web(tmp_path / "page", data=rows(9) | {"x": np.zeros((9, 7), np.float32)})
    assert not (tmp_path / "page").exists()


def test_every_held_out_row_is_evaluated() -> None:
    assert _evaluations(0) == {}
    for count in range(1, 3000):
        sizes = _evaluations(count)
        assert all(0 < size <= MOST_ROWS for size in sizes.values())
        assert count % sizes["evaluate"] == sizes.get("evaluate_rest", 0)
    assert _evaluations(1000) == {"evaluate": 500}
    assert _evaluations(1021) == {"evaluate": 512, "evaluate_rest": 509}  # a prime


def test_what_a_browser_would_find_wrong_is_said_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = net_step()
    predict = step.attach(lambda model, x: model(x), td.Spec((1, 6)))
    both = {"data": rows(9), "held_out": rows(9)}
    few, large = rows(7), rows(9) | {"y": np.full(9, 2**40)}
    floats = rows(9) | {"y": np.zeros(9, np.float32)}
    masked = rows(9) | {"x": np.ma.masked_less(rows(9)["x"], 0)}
    for given, told in [
        ({"data": few}, "data has 7 rows, and a batch has 8"),
        ({"held_out": {k: v[:0] for k, v in few.items()}}, "held_out has no rows"),
        ({"data": large}, "data y has values from 1099511627776 to 1099511627776, which int32"),
        ({"data": floats}, "data y is float32, not an integer"),
        ({"held_out": masked}, "held_out x is a masked array"),
        ({"settings": {"rate": float("nan")}}, "settings are no JSON"),
        ({"settings": {"rows": np.zeros(2)}}, "settings are no JSON"),
        ({"page": "digits", **both}, "the page 'digits' needs predict in forwards"),
        ({"page": "digits"}, "the page 'digits' needs data, held_out"),
        ({"page": "text"}, "the page 'text' needs letters, context in settings"),
        ({"heldout": rows(9)}, "there is no argument heldout. There are: data, held_out"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(export, "web_program", None)
            with pytest.raises(td.TreadleError, match=told):
                step.export_web(tmp_path / "page", **given)
    for given in ({"page": "train"}, {"data": rows(9)}):
        with pytest.raises(td.TreadleError, match="a forward cannot train"):
            predict.export_web(tmp_path / "page", **given)
    state = td.compile_forward(
        {"n": nn.State((), nn.init.constant(2**40), td.int64)},
        lambda model, x: x + model["n"].astype(td.float32),
        td.Spec((2,)),
        device="oracle",
    )
    with pytest.raises(td.TreadleError, match="n has values from 1099511627776"):
        state.export_web(tmp_path / "page")
    assert not (tmp_path / "page").exists()


# In Chromium


@contextmanager
def opened(folder: Path, timeout: float = 120) -> Iterator[browser.Page]:
    """The page of a folder when its model is there; it must not complain, then or later."""
    with browser.served(folder) as address, browser.browser(timeout=timeout) as page:
        page.open(address)
        page.wait_for("globalThis.treadle?.ready || globalThis.treadle?.failed", timeout)
        assert page.run("globalThis.treadle.failed ?? null") is None
        yield page
        assert page.errors == []


def saved(page: browser.Page, what: str) -> dict[str, np.ndarray]:
    return load(bytes(page.run(f"treadle.model.{what}().then((b) => [...b])")))


def js(batch: dict[str, np.ndarray]) -> str:
    return json.dumps({name: array.reshape(-1).tolist() for name, array in batch.items()})


@needs_chromium
def test_a_step_trains_in_chromium_as_here(tmp_path: Path) -> None:
    """Dropout too, and both go on from each other's files."""
    step = net_step(clip_norm=1.0)
    batches = [{k: v[8 * i : 8 * i + 8] for k, v in rows(80).items()} for i in range(10)]
    step(batches[9])  # the page begins where Python is
    held_out = rows(16, 1)
    predict = step.attach(lambda model, x: {"best": model(x).argmax(-1)}, td.Spec((2, 6)))
    step.export_web(tmp_path / "p", data=rows(80), held_out=held_out, forwards={"predict": predict})
    expected = [step(b) for b in batches[:6]]
    with opened(tmp_path / "p") as page:
        found = page.run(
            f"(async () => {{ const outs = []; for (const b of [{','.join(map(js, batches[:6]))}])"
            " outs.push(await treadle.model.step(b)); return outs; })()"
        )
        for here, there in zip(expected, found, strict=True):
            assert abs(here.loss - there["loss"]) < 1e-4
            assert abs(here.grad_norm - there["grad_norm"]) < 1e-3
            assert here.metrics["accuracy"] == pytest.approx(there["metric:accuracy"])
        weights, state = saved(page, "saveWeights"), saved(page, "saveState")
        step.load_params(weights)
        for name, array in step.params.items():
            assert array.tobytes() == weights[name].tobytes()
        best = page.run(f"treadle.model.run('predict', {held_out['x'][:2].reshape(-1).tolist()})")
        np.testing.assert_array_equal(
            list(best["best"].values()), predict(held_out["x"][:2])["best"]
        )
        told = page.run(f"treadle.model.run('evaluate', {js(held_out)})")
        assert told["loss"] == pytest.approx(step.evaluate(held_out).loss, abs=1e-4)
        # Bad input is an error in words, and changes nothing.
        wrong = js(batches[0] | {"y": np.full(8, 7, np.int32)})
        with pytest.raises(browser.BrowserError, match="step: y has 7, and -100, 0 to 2 are"):
            page.run(f"treadle.model.step({wrong})")
        with pytest.raises(browser.BrowserError, match="x is missing or unknown"):
            page.run("treadle.model.step({y: []})")
        for name, array in saved(page, "saveWeights").items():
            assert array.tobytes() == weights[name].tobytes()
        # Python goes on from the page's state; the page from Python's.
        step.load_state_dict(state)
        there = page.run(f"treadle.model.step({js(batches[7])})")
        assert abs(step(batches[7]).loss - there["loss"]) < 1e-4
        step.save(tmp_path / "step.safetensors")
        file = list((tmp_path / "step.safetensors").read_bytes())
        page.run(f"treadle.model.load(new Uint8Array({file}))")
        there = page.run(f"treadle.model.step({js(batches[8])})")
        assert abs(step(batches[8]).loss - there["loss"]) < 1e-4
        page.run("treadle.training.run(3)")
        assert page.run("document.getElementById('score').textContent").endswith("%")
        # Reset in the middle of training: steps that were on their way leave nothing behind.
        page.run("treadle.training.run(), 0")
        page.run("treadle.training.reset()")
        assert page.run("[treadle.training.losses.length, treadle.model.counters.steps]") == [0, 1]
        shipped = load_file(tmp_path / "p" / "weights.safetensors")
        found = saved(page, "saveWeights")
        assert all(found[n].tobytes() == a.tobytes() for n, a in shipped.items())
        page.resize(320, 640, mobile=True)  # nothing sticks out of a phone
        assert page.run("document.documentElement.scrollWidth") <= 320
        _saves_and_loads(page, tmp_path, step)
        _says_what_is_wrong(page)


def _saves_and_loads(page: browser.Page, folder: Path, step: td.TrainStep) -> None:
    """As a visitor does it: a click is a file, and a file that is chosen is loaded."""
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.run("document.getElementById('save').click()")
    page.wait_for("document.getElementById('status').textContent.startsWith('Saved')")
    file = folder / "weights.safetensors"
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    step.load_params(load_file(file))
    before = {name: array.tobytes() for name, array in load_file(file).items()}
    page.run("treadle.training.run(1)")
    assert saved(page, "saveWeights")["fc1.weight"].tobytes() != before["fc1.weight"]
    root = page.send("DOM.getDocument")["root"]["nodeId"]
    field = page.send("DOM.querySelector", nodeId=root, selector="#load")["nodeId"]
    page.send("DOM.setFileInputFiles", nodeId=field, files=[str(file)])
    page.wait_for("document.getElementById('status').textContent.endsWith('is loaded.')")
    found = saved(page, "saveWeights")
    assert {name: array.tobytes() for name, array in found.items()} == before


MESSAGE = "document.getElementById('message').textContent"


def _says_what_is_wrong(page: browser.Page) -> None:
    """A lost GPU, a small one, none, and no WebGPU."""
    page.run("treadle.model.device.destroy(), treadle.model.device.lost.then(() => 0)")
    page.run("document.getElementById('start').click()")
    page.wait_for(f"{MESSAGE}.includes('the GPU was lost')")
    with pytest.raises(browser.BrowserError, match="maxBufferSize is [0-9]+, and 10+ is needed"):
        page.run("import('./treadle.js').then((m) => m.openDevice({ maxBufferSize: 1e15 }))")
    for script, told in (
        ("GPU.prototype.requestAdapter = async () => null", "WebGPU found no GPU to use"),
        ("Object.defineProperty(navigator, 'gpu', { value: undefined })", "has no WebGPU here"),
    ):
        page.send("Page.addScriptToEvaluateOnNewDocument", source=script)
        page.send("Page.reload")
        page.wait_for(f"globalThis.treadle?.failed?.includes('{told}') && {MESSAGE}")
        assert told in page.run(MESSAGE)
        assert page.run("document.getElementById('start').disabled")


class Odd(nn.Module):
    """Running statistics, a parameter that nothing uses, a constant, a scan."""

    def __init__(self) -> None:
        self.norm, self.rnn, self.out = nn.BatchNorm1d(4), nn.LSTM(4, 5), nn.Linear(5, 1)
        self.spare = nn.Parameter((3,), nn.init.ones, requires_grad=False)

    def forward(self, x: td.Tensor) -> Any:
        x = self.norm(x.reshape(-1, 4)).reshape(x.shape) * td.tensor([1.0, 1.25, 1.5, 2.0])
        return self.out(self.rnn(x)[0][-1])


@pytest.mark.slow
@needs_chromium
def test_states_scans_and_accumulation_in_chromium(tmp_path: Path) -> None:
    def loss(model: Any, x: Any) -> Any:
        return (model(x) ** 2).mean()

    spec = td.Spec((6, 3, 4))
    step = td.compile_step(Odd(), loss, optim.sgd(0.1), spec, device="cpu", accumulate=2)
    step.export_web(tmp_path / "p")
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal(spec.shape).astype(np.float32) for _ in range(5)]
    expected = [step(b).loss for b in batches]
    with opened(tmp_path / "p") as page:
        for batch, here in zip(batches, expected, strict=True):
            there = page.run(f"treadle.model.step({batch.reshape(-1).tolist()})")
            assert abs(there["loss"] - here) < 1e-4
        assert page.run("treadle.model.counters") == {"steps": 2, "micro": 1}
        weights = saved(page, "saveWeights")
        for name, array in step.params.items():
            np.testing.assert_allclose(weights[name], array, atol=1e-4)
        step.load_state_dict(saved(page, "saveState"))
        there = page.run(f"treadle.model.step({batches[0].reshape(-1).tolist()})")
        assert abs(step(batches[0]).loss - there["loss"]) < 1e-4


@pytest.mark.slow
@needs_chromium
def test_a_forward_runs_in_chromium(tmp_path: Path) -> None:
    """By its page: numbers are typed, and results are shown."""
    forward = td.compile_forward(
        Net(), lambda model, b: {"y": model(b["x"])}, {"x": td.Spec((2, 6))}
    )
    forward.export_web(tmp_path / "p", title="Six numbers")
    x = np.arange(12, dtype=np.float32).reshape(2, 6) / 10
    with opened(tmp_path / "p") as page:
        assert page.run("document.title") == "Six numbers"
        page.run(
            f"document.getElementById('input-x').value = '{' '.join(map(str, x.reshape(-1)))}'"
        )
        found = page.run("treadle.run().then((out) => [...out.y])")
        np.testing.assert_allclose(found, forward({"x": x})["y"].reshape(-1), atol=1e-5)
        assert page.run("document.getElementById('outputs').textContent").startswith("y: ")
        page.run("document.getElementById('input-x').value = '1 2 three'")
        page.run("document.getElementById('run').click()")
        page.wait_for(f"{MESSAGE}.includes('Number 3 of x is none')")
