"""The host's side of the CUDA backend, on a driver that runs no kernels."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import treadle as td
from fake_cuda import FakeDriver, fake_gpu
from treadle import losses, nn, optim
from treadle.base.errors import BatchError, DeviceError, IndexRangeError
from treadle.runtime.cuda.arrays import DeviceArray, found
from treadle.runtime.cuda.device import Block, padded
from treadle.step.index_guard import AHEAD

SPECS = {"x": td.Spec((8, 20)), "y": td.Spec((8,), td.int32)}


def loss(m, batch):
    return losses.cross_entropy(m(batch["x"]), batch["y"])


def compiled(**options):
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    return td.compile_step(model, loss, optim.adam(1e-3), SPECS, device="cuda", **options)


def compiled_for_cpu():
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    return td.compile_step(model, loss, optim.adam(1e-3), SPECS, device="cpu")


def step_count(state: dict[str, np.ndarray]) -> int:
    return int(state["step:count"])


def batch_of(number: int) -> dict[str, np.ndarray]:
    return {"x": np.full((8, 20), number, np.float32), "y": np.full(8, number % 4, np.int32)}


class OnDevice:
    """Another framework's array, as CUDA's interface shows it."""

    def __init__(self, array: np.ndarray, stream: int | None = None):
        self.block = Block(array.nbytes)
        self.block.write(array)
        self.array, self.stream = array, stream

    @property
    def __cuda_array_interface__(self):
        found = {"shape": self.array.shape, "typestr": self.array.dtype.str, "version": 3}
        return found | {"data": (self.block.address, False), "stream": self.stream}


def program_of(step):
    (program,) = step._programs.built(step._inputs)._built.values()
    return program


def inputs_of(program, count: int = 1) -> np.ndarray:
    """What the device would compute on: the first input of each step."""
    traffic = program._traffic[count]
    whole = traffic.block.read(np.empty(traffic.size, np.uint8))
    rows = whole.reshape(count, traffic.each)
    return np.stack([r[: 8 * 20 * 4].view(np.float32) for r in rows])


def test_a_step_is_one_launch_and_nothing_is_waited_for() -> None:
    with fake_gpu() as driver:
        step = compiled()
        for i in range(4):
            step(batch_of(i))
        driver.calls.clear()
        driver.launched.clear()
        step(batch_of(9))
        once = {"cuCtxSetCurrent", "cuEventSynchronize", "cuGraphLaunch", "cuEventRecord"}
        assert driver.calls == dict.fromkeys(once, 1)
        assert [k.name for k in driver.launched] == ["cooperative_0"], "a small step is one kernel"
        np.testing.assert_array_equal(inputs_of(program_of(step)), np.full((1, 160), 9.0))


def test_steps_that_run_together_have_inputs_of_their_own() -> None:
    with fake_gpu() as driver:
        step = compiled()
        batches = [batch_of(i) for i in range(18)]
        step.run(batches)
        driver.calls.clear()
        result = step.run(batches)
        assert driver.calls["cuGraphLaunch"] == 3, "sixteen, one, and one"
        here = inputs_of(program_of(step), 16)
        np.testing.assert_array_equal(here, np.repeat(np.arange(16.0)[:, None], 160, 1))
        assert driver.calls["cuStreamSynchronize"] == 1, "of the test itself"
        assert result.losses.shape == (18,)


def test_arrays_on_the_device_that_come_again_are_read_where_they_are() -> None:
    with fake_gpu() as driver:
        step = compiled(options=td.CompileOptions(check_indices=False))
        arrays = {n: OnDevice(a) for n, a in batch_of(3).items()}
        step(arrays)
        assert driver.calls["cuMemcpyDtoDAsync"] == 2, "at first they are copied"
        np.testing.assert_array_equal(inputs_of(program_of(step)), np.full((1, 160), 3.0))
        for _ in range(6):
            step(arrays)
        assert driver.calls["cuMemcpyDtoDAsync"] == 2
        program = program_of(step)
        own = program._traffic[1].addresses(0, next(iter(program._traffic[1].slots[1].graphs)))
        assert own["batch:x"] == arrays["x"].block.address
        other = {n: OnDevice(a) for n, a in batch_of(5).items()}
        step(other)
        np.testing.assert_array_equal(inputs_of(program), np.full((1, 160), 5.0))


def test_indices_on_the_device_are_looked_at_by_the_program() -> None:
    """The fake device computes nothing, so that its flag says no."""
    with fake_gpu():
        step = compiled()
        wrong = batch_of(3)
        wrong["y"][2] = 77
        arrays = {n: OnDevice(a) for n, a in wrong.items()}
        result = step(arrays)
        assert step.report.compiles == 1, "one program, wherever the indices come from"
        assert (step._done.steps, step._done.micro) == (1, 0)
        with pytest.raises(IndexRangeError, match=r"step: y\[2\] is 77, and cross_entropy has"):
            result.loss  # noqa: B018
        assert (step._done.steps, step._done.micro) == (0, 0), "it was not made"
        with pytest.raises(IndexRangeError, match=r"evaluate: y\[2\] is 77"):
            step.evaluate(arrays)
        with pytest.raises(IndexRangeError, match=r"gradients: y\[2\] is 77"):
            step.gradients(arrays)
        with pytest.raises(IndexRangeError, match=r"run: y\[2\] is 77"):
            step.run([arrays, arrays]).losses  # noqa: B018
        step = compiled()
        for _ in range(AHEAD + 1):
            step(arrays)
        with pytest.raises(IndexRangeError, match=r"step: y\[2\] is 77"):
            step(arrays)
        with pytest.raises(IndexRangeError, match=r"step: y\[2\] is 77"):
            compiled()(wrong)


def test_a_stream_that_an_array_names_is_waited_for() -> None:
    with fake_gpu() as driver:
        step = compiled()
        before = driver.calls["cuStreamSynchronize"]
        step({n: OnDevice(a, stream=1234) for n, a in batch_of(3).items()})
        assert driver.calls["cuStreamSynchronize"] > before


def test_arrays_on_the_device_that_do_not_fit_are_named() -> None:
    with fake_gpu():
        step = compiled()
        wrong = {"x": OnDevice(np.zeros((8, 20))), "y": np.zeros(8, np.int32)}
        with pytest.raises(BatchError, match=r"x is on the device as <f8\(8, 20\), not as float32"):
            step(wrong)


def test_results_are_kept_until_they_are_looked_at() -> None:
    with fake_gpu():
        step = compiled()
        step(batch_of(0))
        program = program_of(step)
        results, told = program._traffic[1].results, []
        for i in range(7):  # more than there are slots
            results.write(np.full(results.nbytes // 4, i, np.float32))
            told.append(step(batch_of(i)))
        assert [t.loss for t in told] == [float(i) for i in range(7)]


def test_graphs_are_captured_again_when_values_move() -> None:
    with fake_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        captured = driver.calls["cuGraphInstantiate"]
        step.load_params(step.params)
        for i in range(6):
            step(batch_of(i))
        assert driver.calls["cuGraphInstantiate"] == captured + 2, "one for each slot, once"


def test_programs_compute_in_one_arena_as_large_as_the_largest_asks_for() -> None:
    with fake_gpu() as driver:
        f = td.compile(lambda x: (x @ x.T).sum(0), td.Spec((16, 8)), device="cuda")
        given = np.ones((16, 8), np.float32)
        f(given)
        first = program_of_forward(f)._arena.nbytes
        step = compiled()
        step(batch_of(0))
        step.evaluate(batch_of(0))
        captured = driver.calls["cuGraphInstantiate"]
        programs = [*step._programs.built(step._inputs)._built.values(), program_of_forward(f)]
        evaluations = step._evaluations.built(step._inputs)._built.values()
        sizes = [padded(p.plan.arena) + p._runner.workspace for p in (*programs, *evaluations)]
        arena = programs[0]._arena
        assert all(p._arena is arena for p in (*programs, *evaluations))
        assert arena.nbytes == max(sizes) > first
        f(given)  # its graph is of an arena that is gone
        assert driver.calls["cuGraphInstantiate"] == captured + 1
        assert arena.nbytes == max(sizes)
        state = step.report.state_bytes + sum(p.outside for p in step.report.programs)
        own = [p.arena + p.scratch for p in step.report.programs]
        assert step.report.peak_bytes == state + max(own), "not of both programs together"
        del step, programs, evaluations
        gc.collect()
        f(given)
        assert arena.nbytes == first, "what others asked for is given back"


def program_of_forward(forward):
    inner = forward._forward
    return inner._programs.built(inner.inputs).program


# Arrays for others


def test_parameters_are_handed_out_where_they_are() -> None:
    with fake_gpu():
        step = compiled()
        shared = step.device_params
        assert sorted(shared) == sorted(step.params)
        array = shared["0.weight"]
        interface = array.__cuda_array_interface__
        assert interface["data"][0] == step.session.values.place("0.weight").address
        assert (interface["shape"], interface["typestr"]) == ((16, 20), "<f4")
        np.testing.assert_array_equal(np.asarray(array), step.params["0.weight"])
        there = found(array, (16, 20), np.dtype(np.float32))
        assert there is not None
        assert there.address == interface["data"][0]
        assert array.__dlpack_device__() == (2, 0)


def test_results_can_stay_on_the_device() -> None:
    with fake_gpu() as driver:
        step = compiled()
        forward = step.attach(lambda m, x: (m(x), x), td.Spec((8, 20)))
        x = OnDevice(np.full((8, 20), 3, np.float32))
        for _ in range(5):  # copied at first, then read where it is
            before = driver.calls["cuStreamSynchronize"]
            made, same = forward(x, on_device=True)
            assert driver.calls["cuStreamSynchronize"] == before
            assert isinstance(made, DeviceArray)
            assert (made.shape, made.dtype) == ((8, 4), np.dtype(np.float32))
            np.testing.assert_array_equal(np.asarray(same), x.array)
        first = same.__cuda_array_interface__["data"][0]
        assert first != x.block.address, "it is memory of its own"
        np.testing.assert_array_equal(forward(x)[1], x.array)


def test_results_that_stay_are_the_memory_that_was_written() -> None:
    """A loop that drops its results copies none; those that somebody holds are left alone."""
    with fake_gpu() as driver:
        step = compiled()
        forward = step.attach(lambda m, x: (m(x), x.sum()), td.Spec((8, 20)))
        x = np.full((8, 20), 3, np.float32)
        out = forward(x, on_device=True)
        before, addresses = driver.calls["cuMemcpyDtoDAsync"], set()
        for _ in range(12):
            out = forward(x, on_device=True)  # the last one is held meanwhile
            addresses.add(out[0].address)
        assert driver.calls["cuMemcpyDtoDAsync"] == before
        assert len(addresses) == 2
        held = [forward(x, on_device=True)[0] for _ in range(5)]
        assert len({h.address for h in held} | {out[0].address}) == 6
        assert driver.calls["cuMemcpyDtoDAsync"] > before, "all blocks are held: copies"
        before = driver.calls["cuMemcpyDtoHAsync"]
        for _ in range(3):  # not by graphs that leave results where they are
            np.asarray(forward(x)[0])
        assert driver.calls["cuMemcpyDtoHAsync"] == before + 3


class ByDlpack:
    """An array that only DLPack shows."""

    def __init__(self, array: DeviceArray):
        self._array = array
        self.shape = array.shape

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__(stream=stream)


def test_dlpack_capsules_hold_memory_until_they_are_gone() -> None:
    from treadle.runtime.cuda.arrays import _kept

    with fake_gpu() as driver:
        block = Block(24)
        address = block.address
        array = ByDlpack(DeviceArray(block, (2, 3), np.dtype(np.float32)))
        there = found(array, (2, 3), np.dtype(np.float32))
        assert there is not None
        assert there.address == address
        assert len(_kept) == 1
        assert found(array, (3, 2), np.dtype(np.float32)) is None
        assert found(array, (2, 3), np.dtype(np.int32)) is None
        del array, block
        gc.collect()
        assert address in driver.memory, "the capsule still needs it"
        del there
        gc.collect()
        assert not _kept
        assert address not in driver.memory


def test_streams_that_follow_ours_are_not_made_to_wait() -> None:
    with fake_gpu() as driver:
        array = DeviceArray(Block(24), (2, 3), np.dtype(np.float32))
        before = driver.calls["cuStreamSynchronize"]
        array.__dlpack__(stream=1)  # the one that all others wait for
        array.__dlpack__(stream=-1)
        there = found(array, (2, 3), np.dtype(np.float32))  # our own, on our own stream
        assert there is not None
        assert there.address == array.address
        assert found(array, (3, 2), np.dtype(np.float32)) is None
        assert driver.calls["cuStreamSynchronize"] == before
        array.__dlpack__(stream=2)
        assert driver.calls["cuStreamSynchronize"] == before + 1
        gc.collect()


def test_parameters_of_a_step_on_the_processor_are_its_arrays() -> None:
    step = td.compile_step(
        nn.Linear(3, 2), lambda m, x: m(x).sum(), optim.sgd(0.1), td.Spec((4, 3)), device="cpu"
    )
    shared = step.device_params["weight"]
    step(np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(shared, step.params["weight"])
    assert not shared.flags.writeable


# Errors


def test_a_gpu_without_bfloat16_is_refused() -> None:
    driver = FakeDriver(chip=(7, 5))
    with fake_gpu(driver), pytest.raises(DeviceError, match=r"capability 7\.5.*device=\"cpu\""):
        compiled()


def test_too_little_memory_is_said_before_the_first_step() -> None:
    driver = FakeDriver(free=1 << 20)
    with fake_gpu(driver):
        specs = {"x": td.Spec((4096, 784)), "y": td.Spec((4096,), td.int32)}
        model = nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 4))
        with pytest.raises(DeviceError, match=r"needs .* MiB .* free.*smaller batch.*accumulate"):
            td.compile_step(model, loss, optim.adam(1e-3), specs, device="cuda")
        assert driver.calls["cuGraphLaunch"] == 0


def test_values_on_the_device_are_looked_at_before_a_checkpoint(tmp_path) -> None:
    with fake_gpu(), td.CheckpointManager(tmp_path) as checkpoints:
        step = compiled()
        good = checkpoints.save(step)
        broken = step.params["2.weight"]
        broken[1, 3] = np.nan
        step.session.values.place("2.weight").write(broken)  # as a kernel would
        assert step.not_finite() == ("2.weight",)
        with pytest.raises(td.NotFiniteError, match="not finite: 2.weight"):
            checkpoints.save(step)
        assert checkpoints.list() == (good,)
        checkpoints.restore(step)
        assert step.not_finite() == ()


def test_a_lost_device_names_the_last_checkpoint(tmp_path) -> None:
    with fake_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        saved = tmp_path / "step.safetensors"
        step.save(saved)
        state = step.state_dict()
        driver.fail("cuGraphLaunch", 700, "ILLEGAL_ADDRESS")
        with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS"):
            step(batch_of(1))
        # Whatever the driver says now, nothing that is on the device can be trusted.
        driver.failing.clear()
        for look in (lambda: step.params, step.state_dict, lambda: step(batch_of(2))):
            with pytest.raises(DeviceError, match=rf"lost.*{saved.name}"):
                look()
        other = compiled_for_cpu()
        other.load(saved)
        assert other.count == step_count(state)
        assert state["0.weight"].shape == (16, 20), "what was read stays"


def test_without_a_checkpoint_a_lost_device_says_so() -> None:
    with fake_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        driver.fail("cuEventSynchronize", 719, "LAUNCH_FAILED")
        with pytest.raises(DeviceError, match=r"LAUNCH_FAILED.*no checkpoint"):
            step.run([batch_of(i) for i in range(8)])
