"""WGSL without a run: texts that are valid within the least limits, records, errors by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from refusals import refused
from trajectories import TRAJECTORIES
from treadle import losses, nn, optim
from treadle.backends.registry import choose_device
from treadle.backends.webgpu.backend import WebGpuToolchain
from treadle.backends.webgpu.bundles import bundle_of
from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DeviceError, DTypeError, OutOfMemoryError
from treadle.base.words import as_words, from_words
from treadle.codegen.wgsl.prelude import FUNCTIONS, called
from treadle.codegen.wgsl.scalars import literal
from treadle.fuzz.cases import prepared
from treadle.fuzz.generate import generate
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Tiled
from treadle.kernel.mapped import geometry_of, shared_bytes
from treadle.kernel.nodes import Literal
from treadle.kernel.shaders import Shader, module
from treadle.kernel.target_webgpu import BASE, FULL, WebGpuLimits, asked_of, target_of
from treadle.runtime.cpu.targets import named_target
from treadle.runtime.webgpu import device as devices
from treadle.step.programs import UNWATCHED
from webgpu_backend import needs_adapter, on_adapter, rendered, scheduled
from webgpu_bundle import Page

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from families import ZOO, with_treadle

_SHARED = re.compile(r"var<workgroup> \w+: array<\w+, (\d+)>")


def assert_valid(shaders: tuple[Shader, ...]) -> None:
    """Naga takes every text, and it needs no more than every device has."""
    here = devices.device()
    for shader in shaders:
        text = module(shader, [0] * shader.buffers)
        assert 4 * sum(map(int, _SHARED.findall(text))) + 8 <= BASE.workgroup_bytes
        assert int(re.findall(r"workgroup_size\((\d+)\)", text)[0]) <= BASE.invocations
        with here.checked("compile"):
            here.device.create_shader_module(code=text)


def graph_of(step: td.TrainStep) -> Graph:
    return step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph


QUICK = ("pinn",)


@needs_adapter
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ZOO]
)
@pytest.mark.filterwarnings("ignore::treadle.base.errors.UnreachedWarning")
def test_every_model_of_the_zoo_is_valid_within_the_least_limits(name: str) -> None:
    entry = ZOO[name]
    specs = {n: td.Spec(a.shape, getattr(td, a.dtype.name)) for n, a in entry.arrays("cpu").items()}
    model = entry.make(with_treadle, **entry.cpu)
    step = td.compile_step(model, lambda m, b: m(b), optim.adamw(1e-3), specs, device="webgpu")
    assert_valid(rendered(graph_of(step)))


# Texts


def small(x, y):
    return [td.softmax(x @ y.T), (x * y).sum(0), td.exp(x)]


SQUARE = TensorType((64, 64))


def test_groups_are_workgroups_where_nothing_is_exchanged() -> None:
    program = scheduled(td.trace(small, SQUARE, SQUARE))
    for kernel in program.distinct():
        geometry = geometry_of(kernel)
        if geometry.template is None and geometry.share > 1 and "column" not in kernel.name:
            assert geometry.warp == 1
    assert all("subgroup" not in s.text for s in rendered(td.trace(small, SQUARE, SQUARE)))
    assert any("subgroup" in s.text for s in rendered(td.trace(small, SQUARE, SQUARE), FULL))


def test_a_module_has_the_functions_that_it_calls() -> None:
    (shader,) = rendered(td.trace(lambda x: [td.exp(x)], SQUARE))
    assert "fn f_exp" in shader.text
    assert "fn f_log" not in shader.text
    assert called("f_rsqrt(x)").index("fn f_div") < called("f_rsqrt(x)").index("fn f_rsqrt")
    assert all(text.count("{") == text.count("}") for text in FUNCTIONS.values())


def test_numbers_whose_text_no_compiler_takes_are_bits() -> None:
    most = float(np.finfo(np.float32).max)
    texts = [literal(Literal(x, dtypes.float32)) for x in (most, -most, 1e-40, -0.0, np.inf)]
    assert all(text.startswith("number(0x") for text in texts)
    assert [literal(Literal(x, dtypes.float32)) for x in (0.0, -3.4e38)] == ["0.0f", "-3.4e+38f"]


def test_buffers_of_one_arena_are_one_binding() -> None:
    shader = Shader("memory0[p0] = memory1[p1] + memory0[p0];", 1, 2, 1)
    assert module(shader, [0, 0]).count("@binding") == 1
    assert "arena0[p0] = arena1[p1]" in module(shader, [0, 1])


def test_products_of_float16_are_matrices_where_a_target_has_them() -> None:
    def products(x, y):
        return [x @ y.T]

    narrow = TensorType((64, 64), dtypes.float16)
    (shader,) = rendered(td.trace(products, narrow, narrow), FULL)
    assert "coopMultiplyAdd" in shader.text
    assert shader.text.startswith("enable f16;\nenable wgpu_cooperative_matrix;\n")
    assert module(shader, [0, 0, 1]).startswith("enable f16;\n")
    assert "coop_mat" not in rendered(td.trace(products, SQUARE, SQUARE), FULL)[0].text


def test_sums_of_matrices_are_stored_by_the_device_s_own_rounding() -> None:
    """One conversion an element where it rounds to nearest, which a number tells; else by bits."""
    narrow = TensorType((256, 64), dtypes.float16)
    (shader,) = rendered(td.trace(lambda x, y: [x @ y.T], narrow, narrow), FULL)
    text = re.sub(r"\s+", " ", shader.text)
    quick = "fn nearest_float16(x: f32) -> f16 { if (rounds_as_device) { return f16(x); }"
    assert f"{quick} return f16(round_float16(x)); }}" in text
    assert "override rounds_as_device: bool = false;" in text
    stores = re.findall(r"\] = vec4<f16>\((.+?)\);", text[text.index("fn main") :])
    assert stores
    assert all(s.count("nearest_float16(") == 4 and "round_float16" not in s for s in stores)


@pytest.mark.parametrize("sizes", [(512, 384, 1000), (8192, 64, 1024), (96, 70, 33), (64, 64, 16)])
def test_matrices_are_multiplied_under_no_condition(sizes: tuple[int, int, int]) -> None:
    """As wgpu's compiler wants it, which takes no variable for the same in all threads."""
    m, n, k = sizes
    types = TensorType((m, k), dtypes.float16), TensorType((n, k), dtypes.float16)
    graph = td.trace(lambda x, y: [td.relu(x @ y.T), x.T @ x], *types)
    texts = [s.text for s in rendered(graph, FULL) if "coop_mat" in s.text]
    assert texts
    for text in texts:
        around = list[str]()  # what opened each block that a line is in
        for line in text.splitlines():
            if "coop" in line:
                assert all(re.match(r"\s*(for|fn|@builtin|\{|$)", head) for head in around), line
            around += [line] * line.count("{")
            del around[len(around) - line.count("}") :]


def test_operands_of_matrices_are_copied_in_packs_where_they_lie_so() -> None:
    def text(k: int) -> str:
        types = TensorType((256, k), dtypes.float16), TensorType((128, k), dtypes.float16)
        (shader,) = rendered(td.trace(lambda x, y: [x @ y.T], *types), FULL)
        assert len(shader.elements) == 3
        return shader.text + " ".join(shader.elements)

    assert text(64).count("array<vec4<f16>") == 2
    assert text(64).endswith("vec4<f16> vec4<f16> vec4<f16>")
    assert text(66).endswith("f16 f16 f16")  # rows do not start at whole packs


def tile_of(m: int, n: int, k: int, limits: WebGpuLimits = FULL) -> Tiled:
    types = TensorType((m, k), dtypes.float16), TensorType((n, k), dtypes.float16)
    program = scheduled(td.trace(lambda x, y: [x @ y.T], *types), limits=limits)
    (kernel,) = program.distinct()
    template = geometry_of(kernel).template
    assert isinstance(template, Tiled)
    assert shared_bytes(kernel) <= limits.workgroup_bytes
    return template


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((8192, 1536, 576), (128, 256)),
        ((8192, 576, 1536), (192, 192)),  # one for each of 129 multiprocessors
        ((1024, 1024, 1024), (128, 64)),
        ((64, 64, 64), (64, 64)),
    ],
)
def test_tiles_of_matrices_follow_the_sizes(
    sizes: tuple[int, int, int], tile: tuple[int, int]
) -> None:
    found = tile_of(*sizes)
    assert (found.left.length, found.right.length) == tile
    small = replace(FULL, workgroup_bytes=16 << 10)
    assert tile_of(*sizes, limits=small).tile_depth == 16


def test_tiles_go_along_the_larger_operand_one_after_the_other() -> None:
    assert tile_of(512, 4096, 64).is_by_columns
    assert not tile_of(4096, 512, 64).is_by_columns


def test_loads_of_a_tile_have_no_branches_where_its_rows_end() -> None:
    types = TensorType((200, 64), dtypes.float16), TensorType((328, 64), dtypes.float16)
    (shader,) = rendered(td.trace(lambda x, y: [x @ y.T], *types), FULL)
    loads, _, _ = shader.text.partition("coopStoreT")
    assert "if (" not in loads[loads.index("fn main") :]
    assert "min(first_row + " in loads
    assert "min(first_column + " in loads


def test_whole_parts_of_a_depth_are_loaded_without_branches() -> None:
    types = TensorType((256, 200), dtypes.float16), TensorType((384, 200), dtypes.float16)
    (shader,) = rendered(td.trace(lambda x, y: [x @ y.T], *types), FULL)
    _, _, loop = shader.text.partition("for (var start")
    inside, _, after = loop.partition("\n  }\n")
    assert "memory0[" in inside
    assert "if (" not in inside
    assert re.search(r"if \(192 \+ near_\d+ \* 4 < 200\)", after)


def test_elements_are_tested_in_tiles_alone_that_reach_beyond_the_result() -> None:
    types = TensorType((8192, 576), dtypes.float16), TensorType((1536, 576), dtypes.float16)
    (shader,) = rendered(td.trace(lambda x, y: [x @ y.T], *types), FULL)
    rows = tile_of(8192, 1536, 576).left.length
    tested, whole = ("if (row < 8192)" in shader.text), ("if (is_whole)" in shader.text)
    assert tested == whole == (8192 % rows != 0)


_COPIES = re.compile(
    r"let (row_\d+) = (.*);\n *let far_\d+ = i32\((.*)\);\n *let near_\d+ = i32\((.*)\);"
)


def test_neighbours_store_to_other_banks() -> None:
    """Of 32 banks of four bytes each, which 16 threads fill with eight bytes each."""
    tile = tile_of(8192, 1536, 576)
    types = TensorType((8192, 576), dtypes.float16), TensorType((1536, 576), dtypes.float16)
    (shader,) = rendered(td.trace(lambda x, y: [x @ y.T], *types), FULL)
    copies = _COPIES.findall(shader.text)
    assert len(copies) == tile.left.batch + tile.right.batch
    first = copies[: tile.left.batch]
    places = list[tuple[int, int]]()
    for name, number, row, column in first:
        texts = [re.sub(r"(\d)u\b", r"\1", t).replace("/", "//") for t in (number, row, column)]
        for index in range(256):
            known = {"index": index, "u32": int}
            known[name] = eval(texts[0], {}, known)
            places.append((eval(texts[1], {}, known), eval(texts[2], {}, known)))
    assert sorted(places) == [(i, j) for i in range(128) for j in range(8)]
    words = [(row * tile.left.step + near * 4) // 2 for row, near in places]
    for start in range(0, len(words), 16):
        banks = [(w + u) % 32 for w in words[start : start + 16] for u in range(2)]
        assert len(set(banks)) == 32


def test_short_sums_have_several_loads_under_way() -> None:
    graph = td.trace(
        lambda x: [x.astype(td.float32).max()], TensorType((4096, 512), dtypes.float16)
    )
    parts, _ = (s.text for s in rendered(graph, FULL))
    assert parts.count("memory0[") == 4


def test_extremes_are_found_as_numbers_in_order() -> None:
    def text(function: Callable[..., list]) -> str:
        (shader, *_) = rendered(td.trace(function, TensorType((64, 512))))
        return shader.text

    assert "max(part_" in text(lambda x: [x.max(1)])
    assert "ordered_down(" in text(lambda x: [x.min(1)])
    assert "ordered(" not in text(lambda x: [x.sum(1)])


def test_long_computations_are_made_once_and_where_they_are_wanted() -> None:
    def body(function: Callable[..., list]) -> str:
        (shader,) = rendered(td.trace(function, TensorType((4096,)), TensorType((4096,))))
        return shader.text.partition("@compute")[2]

    twice = body(lambda x, y: [td.sigmoid(x) * y, td.sigmoid(x) + y])
    assert twice.count("f_exp(") == twice.count("f_div(") == 1
    hidden = body(lambda x, y: [td.where(x > 0, td.exp(y), 2.0)])
    assert re.search(r"if \(.*\) \{\n.*f_exp\(", hidden)


@needs_adapter
def test_float16_is_rounded_alike_by_the_device_and_by_the_shader() -> None:
    here = devices.device()
    if not here.limits.has_f16:
        pytest.skip("the adapter has no float16")
    given = devices.rounding_cases()
    graph = td.trace(lambda x: [x.astype(td.float16)], TensorType(given.shape))
    limits = replace(BASE, has_f16=True)
    text = rendered(graph, limits)[0].text
    assert "override rounds_as_device" in text
    # By way of bits that a compiler does not know: a conversion there and back it may leave away.
    assert "pack2x16float(vec2<f32>(x, 0.0f)) ^ zero" in text
    assert "zero = p0 >> 31u" in text
    with np.errstate(over="ignore"):
        expected = given.astype(np.float16)
    before, pipelines = here.rounds_halves, dict(here._pipelines)
    try:
        for rounds in {before, False}:
            here._pipelines.clear()
            here.__dict__["rounds_halves"] = rounds
            (found,) = on_adapter(graph, limits=limits).run(dict.fromkeys(graph.leaves, given))
            np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
    finally:
        here.__dict__["rounds_halves"] = before
        here._pipelines.clear()
        here._pipelines.update(pipelines)


def test_groups_of_a_workgroup_are_as_many_as_its_memory_holds() -> None:
    """A program of `treadle fuzz` whose groups of eight threads have nine rows of scratch each."""
    graph = prepared(generate(17, 35)).graph

    def most(limits: WebGpuLimits) -> int:
        return max(shared_bytes(k) for k in scheduled(graph, limits=limits).distinct())

    exchanging = replace(BASE, subgroup=8)
    room = target_of(exchanging).mapping.shared_limit
    assert most(exchanging) <= room < most(replace(exchanging, workgroup_bytes=48 << 10))


def test_limits_are_data_of_a_target() -> None:
    base, full = target_of(BASE), target_of(FULL)
    assert base.mapping is not None
    assert full.mapping is not None
    assert base.mapping.shared_limit < BASE.workgroup_bytes
    assert base.mapping.threads <= BASE.invocations
    assert (base.mapping.exchanges, full.mapping.exchanges) == (False, True)


def test_matrices_are_asked_for_by_the_target() -> None:
    asked = td.CompileOptions(target="native+cooperative-matrix").target
    assert asked_of(FULL, asked).has_matrices
    assert not asked_of(FULL, "native").has_matrices
    with pytest.raises(DeviceError, match="there is no cooperative-matrix"):
        asked_of(BASE, asked)
    with pytest.raises(ArgumentError, match="is no target"):
        td.CompileOptions(target="native+nonsense")
    with pytest.raises(DeviceError, match="features of WebGPU"):
        named_target(asked, {})


# Records


@needs_adapter
def test_a_page_that_has_the_record_alone_trains_as_the_step_does() -> None:
    trajectory = TRAJECTORIES["mlp-adamw"]
    step = trajectory.compiled("webgpu")
    page = Page(bundle_of({"step": graph_of(step)}))
    for name, value in page.bundle["values"].items():
        if value["role"] in ("parameter", "state"):
            page.write(name, step.session.values[name])
    names = {f"batch:{n}": n for n in ("x", "y")}
    for batch in trajectory.batches(3):
        found = page.run("step", {leaf: batch[n] for leaf, n in names.items()})
        assert float(found["result:loss"]) == pytest.approx(float(step(batch).loss), rel=1e-6)
    for name in page.bundle["programs"]["step"]["updates"]:
        np.testing.assert_allclose(page.read(name), step.session.values[name], atol=1e-6)


def test_a_record_is_made_without_an_adapter() -> None:
    graph = td.trace(lambda x: [td.tanh(x)], TensorType((5, 7)))
    found = bundle_of({"forward": graph})
    (launch,) = found["programs"]["forward"]["launches"]
    assert launch["workgroups"] == [1, 1, 1]
    assert set(launch["arenas"]) <= {a["name"] for a in found["arenas"]}
    roles = sorted(v["role"] for v in found["values"].values())
    assert roles == ["input", "output"]
    with pytest.raises(OutOfMemoryError, match="a binding has at most"):
        bundle_of({"forward": td.trace(lambda x: [x + 1], TensorType((1 << 26,)))})


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "bool", "int8", "uint8"])
def test_words_hold_every_dtype(dtype: str) -> None:
    array = (np.arange(12).reshape(3, 4) - 5).astype(dtype)
    assert as_words(array).dtype == np.uint32
    np.testing.assert_array_equal(from_words(as_words(array), (3, 4), array.dtype), array)


def test_narrow_floats_and_counters_are_words_too() -> None:
    for dtype in (dtypes.bfloat16.numpy, dtypes.float16.numpy):
        array = np.array([1.5, -2.25, np.inf, 0.0]).astype(dtype)
        assert from_words(as_words(array), (4,), dtype).tobytes() == array.tobytes()
    counted = np.array([3, -4])
    np.testing.assert_array_equal(from_words(as_words(counted), (2,), counted.dtype), counted)
    with pytest.raises(DTypeError, match="does not fit 32 bits"):
        as_words(np.array([1 << 40]))


# The plan cache, errors, and who is asked


def test_shaders_are_stored_and_found_again() -> None:
    toolchain = WebGpuToolchain()
    shaders = rendered(td.trace(small, SQUARE, SQUARE))
    parts = toolchain.pack(shaders, None)

    class Plan:
        entries = shaders

    assert toolchain.unpack(parts, Plan) == shaders
    assert toolchain.unpack({"shaders": b"[]"}, Plan) is None


def test_counts_are_taken_and_other_values_of_64_bits_refused() -> None:
    """Sums of integers are int64: those that 32 bits hold are computed in 32 bits."""
    flags, bytes_, words = (td.Spec((3, 40), d) for d in (td.bool_, td.uint8, td.int32))
    for function, spec in (
        (lambda x: x.sum(), flags),
        (lambda x: td.cumsum(x, 1).reshape(120).astype(td.float32), bytes_),
        (lambda x: td.where(x.sum(0) > 3, x.sum(0), 0) + 1, flags),
        (lambda x: x.sum(dtype=td.int32), words),
    ):
        assert rendered(td.trace(function, spec))
    refused(
        lambda: rendered(td.trace(lambda x: x.sum(), words)),
        td.DTypeError,
        "webgpu",
        "int64",
        "dtype=td.int32",
    )
    many = td.Spec((2**24, 2**8), td.bool_)
    refused(lambda: rendered(td.trace(lambda x: x.sum(), many)), td.DTypeError, "webgpu", "int64")


@needs_adapter
def test_counts_in_32_bits_are_int64_to_their_readers() -> None:
    x = np.random.default_rng(0).integers(0, 256, (30, 40)).astype(np.uint8)
    spec = td.Spec(x.shape, td.uint8)
    graph = td.trace(lambda x: (x.sum(), td.cumsum(x > 99, 0), (x > 5).sum(1) * 0.5), spec)
    found = on_adapter(graph).run({"x": x})
    for one, expected in zip(
        found, (x.sum(), np.cumsum(x > 99, 0), (x > 5).sum(1) * 0.5), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), expected)
    assert [np.asarray(one).dtype.name for one in found] == ["int64", "int64", "float32"]


@needs_adapter
def test_what_wgpu_refuses_is_an_error_that_says_so() -> None:
    here = devices.device()
    with pytest.raises(DeviceError, match="wgpu says"):
        here.pipelines({"fn main() { nonsense }": 0})
    with pytest.raises(OutOfMemoryError, match="needs .* bytes in one buffer"):
        here.buffer(here.limits.binding_bytes + 1)


@needs_adapter
def test_a_lost_device_says_from_where_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = devices.device()
    monkeypatch.setattr(here, "lost", "")
    monkeypatch.setattr(here, "checkpoint", "run/7, a minute ago")
    with pytest.raises(DeviceError, match="the last is run/7"), here.checked("step"):
        raise here.wgpu.GPUError("Parent device is lost")
    with pytest.raises(DeviceError, match="lost to this process"):
        here.read(None, 0, 4)


@needs_adapter
def test_results_that_cannot_be_mapped_are_an_error() -> None:
    here = devices.device()
    good, bad = here.staging(256), here.buffer(256)
    assert (here.mapped(good) == 0).all()
    assert (here.mapped(good) == 0).all()  # it was unmapped again
    with pytest.raises(DeviceError, match="not mapped"):
        here.mapped(bad)


@needs_adapter
def test_profiles_and_kernels_are_there_to_look_at() -> None:
    step = td.compile_step(
        nn.Linear(8, 3),
        lambda m, x: losses.mse(m(x), m(x) * 0),
        optim.sgd(0.1),
        td.Spec((4, 8)),
        device="webgpu",
    )
    x = np.ones((4, 8), np.float32)
    first = step.params["weight"].copy()
    assert len(str(step.profile(x))) > 100
    np.testing.assert_array_equal(step.params["weight"], first)
    assert "@compute" in step.kernels[0].wgsl
    assert len(step.run([x] * 3).losses) == 3


def test_a_processor_s_adapter_is_used_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: ["there"])
    monkeypatch.setattr(devices, "why_not", lambda: None)

    class Adapter:
        is_processor = True

    monkeypatch.setattr(devices, "device", Adapter)
    assert choose_device("auto") in ("cpu", "cuda")
    Adapter.is_processor = False
    assert choose_device("auto") in ("webgpu", "cuda")


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"treadle\[webgpu\]"):
        devices.bindings()
