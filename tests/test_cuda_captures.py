"""Captures beside finalizers, other threads and failures, on a driver that is strict about them."""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import treadle as td
from fake_cuda import FakeDriver, fake_gpu
from test_cuda_host import batch_of, compiled, inputs_of, program_of
from treadle.base.errors import DeviceError
from treadle.runtime.cuda.device import Block, device


class Busy(FakeDriver):
    """Something happens once, in the middle of the next capture."""

    def __init__(self, free: int = 8 << 30) -> None:
        super().__init__(free=free)
        self.meanwhile: Callable[[], None] | None = None

    def cuLaunchKernelEx(self, config: Any, function: str, *_: object) -> Any:
        if self.meanwhile is not None and config.hStream in self.captures:
            happens, self.meanwhile = self.meanwhile, None
            happens()
        return super().cuLaunchKernelEx(config, function)

    def end_capture(self) -> None:
        """As when something calls what a capture must not meet."""
        for capture in self.captures.values():
            capture.ended_by = "something"


@contextmanager
def busy_gpu(free: int = 8 << 30) -> Iterator[Busy]:
    driver = Busy(free)
    with fake_gpu(driver):
        yield driver


class Cycle:
    """What only a collection finds."""

    def __init__(self, *held: object):
        self.held, self.own = held, self


@pytest.fixture(autouse=True)
def _no_collection_by_itself() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_thread(work: Callable[[], None]) -> None:
    """Done by another thread, which is waited for; its error is raised here."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


# Finalizers


def test_what_a_collection_frees_during_a_capture_waits_until_it_is_over() -> None:
    with busy_gpu() as driver:
        step = compiled()
        block = Block(64)
        address = block.address
        Cycle(block)
        del block
        seen: list[bool] = []

        def collect() -> None:
            gc.collect()
            seen.append(address in driver.memory)
            assert device().releases.waiting == 1

        driver.meanwhile = collect
        step(batch_of(1))
        assert seen == [True]
        assert "cuMemFree" not in driver.during
        assert set(driver.during) <= {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"} | {
            "cuLaunchKernelEx", "cuStreamEndCapture",
        }  # fmt: skip
        assert driver.calls["cuStreamBeginCapture"] == 1
        assert address not in driver.memory, "it went back afterwards"


def test_a_program_that_is_collected_during_a_capture_gives_everything_back() -> None:
    with busy_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        held = set(driver.memory), set(driver.events), set(driver.modules), list(driver.graphs)
        other = compiled()
        for i in range(4):
            other(batch_of(i))
        assert len(driver.modules) == len(held[2]) + 1
        Cycle(other)
        del other
        driver.meanwhile = gc.collect  # type: ignore[assignment]
        step(batch_of(1))
        assert driver.meanwhile is None
        assert not device().releases.refused
        assert set(driver.memory) == held[0]
        assert (driver.events, driver.modules) == held[1:3]
        assert len(driver.graphs) == len(held[3]) + 1, "those of the step that is left"


def test_programs_that_are_dropped_give_everything_back() -> None:
    with busy_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        held = len(driver.memory), len(driver.events), len(driver.modules), len(driver.graphs)
        for n in range(2, 6):
            f = td.compile(lambda x: (x * 2).sum(0), td.Spec((n, 3)), device="cuda")
            f(np.ones((n, 3), np.float32))
            del f
            gc.collect()
        found = len(driver.memory), len(driver.events), len(driver.modules), len(driver.graphs)
        assert found == held
        assert not device().releases.refused


def test_graphs_go_before_the_code_that_they_call() -> None:
    with busy_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        order: list[str] = []
        give = device().releases.give

        def noted(call: str, handle: object) -> None:
            order.append(call)
            give(call, handle)

        device().releases.give = noted  # type: ignore[method-assign]
        Cycle(step)
        del step
        gc.collect()
        assert driver.modules == set()
        assert order.index("cuGraphExecDestroy") < order.index("cuModuleUnload")


def test_a_thread_without_a_context_gives_memory_back_all_the_same() -> None:
    with busy_gpu() as driver:
        held = [Block(64)]
        address = held[0].address
        in_thread(held.clear)
        assert address not in driver.memory
        assert not device().releases.refused


def test_what_the_driver_refuses_to_take_back_is_counted() -> None:
    with busy_gpu() as driver:
        block = Block(64)
        driver.fail("cuMemFree", 1, "INVALID_VALUE")
        del block
        assert device().releases.refused == {"cuMemFree: CUDA_ERROR_INVALID_VALUE": 1}


def test_at_the_end_of_the_process_nothing_is_asked_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_end: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    with busy_gpu() as driver:
        block, step = Block(64), compiled()
        step(batch_of(0))
        for last in at_end:
            last()
        driver.calls.clear()
        del block, step
        gc.collect()
        assert not driver.calls


def test_results_outlive_their_program() -> None:
    with busy_gpu() as driver:
        step = compiled()
        step(batch_of(0))
        results = program_of(step)._traffic[1].results
        results.write(np.full(results.nbytes // 4, 5, np.float32))
        told = step(batch_of(1))
        pinned = next(iter(told._outputs.values()))._pending._memory.address
        del step, results
        gc.collect()
        assert pinned in driver.memory, "the device writes it, and nobody has looked"
        assert told.loss == 5.0
        del told
        gc.collect()
        assert pinned not in driver.memory


def test_memory_of_programs_nobody_has_is_collected_before_it_is_said_to_be_too_little() -> None:
    class Small(FakeDriver):
        def cuMemAlloc(self, nbytes: int) -> Any:
            self.free = (1 << 20) - sum(len(m) for m in self.memory.values())
            return super().cuMemAlloc(nbytes)

    with fake_gpu(Small()):
        Cycle(Block(600 << 10))
        second = Block(600 << 10)
        assert second.address
        with pytest.raises(DeviceError, match=r"0\.6 MiB at once"):
            Block(600 << 10)


# Other threads


def test_what_other_threads_do_meanwhile_is_neither_captured_nor_in_the_way() -> None:
    with busy_gpu() as driver:
        step, other = compiled(), compiled()
        for i in range(4):  # all of its graphs
            other(batch_of(i))
        array = np.arange(6, dtype=np.float32)

        def meanwhile() -> None:
            device().enter()
            block = Block(array.nbytes)
            block.write(array)
            np.testing.assert_array_equal(block.read(np.empty_like(array)), array)
            other(batch_of(7))
            assert other.params["0.weight"].shape == (16, 20)

        driver.meanwhile = lambda: in_thread(meanwhile)
        step(batch_of(1))
        assert driver.calls["cuStreamBeginCapture"] == 4, "none was made again"
        np.testing.assert_array_equal(inputs_of(program_of(other)), np.full((1, 160), 7.0))
        driver.launched.clear()
        for i in range(3):
            step(batch_of(i))
        assert len(driver.launched) == 3, "a kernel each: nobody else's"


def test_captures_of_several_threads_take_turns() -> None:
    with busy_gpu() as driver:
        step, other = compiled(), compiled()
        waiting: list[threading.Thread] = []

        def meanwhile() -> None:
            thread = threading.Thread(target=other, args=(batch_of(2),))
            thread.start()
            thread.join(0.2)
            assert thread.is_alive(), "it waits for this capture"
            waiting.append(thread)

        driver.meanwhile = meanwhile
        step(batch_of(1))
        waiting[0].join(60)
        assert not waiting[0].is_alive()
        assert driver.calls["cuStreamBeginCapture"] == 2
        np.testing.assert_array_equal(inputs_of(program_of(step)), np.full((1, 160), 1.0))
        np.testing.assert_array_equal(inputs_of(program_of(other)), np.full((1, 160), 2.0))


def test_threads_that_ask_at_once_share_one_device() -> None:
    class Slow(FakeDriver):
        def cuInit(self, flags: int) -> Any:
            time.sleep(0.1)
            return super().cuInit(flags)

    with fake_gpu(Slow()) as driver:
        start, found = threading.Barrier(4), list[Any]()

        def ask() -> None:
            start.wait(60)
            found.append(device())
            device().enter()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 4
        assert len({id(d) for d in found}) == 1
        assert driver.calls["cuStreamCreate"] == 2, "one for work, one to capture on"


# Failures


def test_a_capture_that_is_ended_is_made_once_more() -> None:
    with busy_gpu() as driver:
        step = compiled()
        driver.meanwhile = driver.end_capture
        step(batch_of(3))
        assert driver.calls["cuStreamBeginCapture"] == 2
        assert device().captured_again == 1
        assert driver.calls["cuGraphLaunch"] == program_of(step).runs == 1
        assert [k.name for k in driver.launched] == ["cooperative_0"]
        np.testing.assert_array_equal(inputs_of(program_of(step)), np.full((1, 160), 3.0))


def test_a_capture_that_is_ended_twice_is_an_error_and_the_next_step_works() -> None:
    with busy_gpu() as driver:
        step = compiled()

        def always() -> None:
            driver.end_capture()
            driver.meanwhile = always

        driver.meanwhile = always
        with pytest.raises(
            DeviceError, match=r"capture.*STREAM_CAPTURE_INVALIDATED \(901\), twice"
        ):
            step(batch_of(3))
        driver.meanwhile = None
        assert not driver.captures
        assert program_of(step).runs == 0
        step(batch_of(4))
        assert program_of(step).runs == 1
        np.testing.assert_array_equal(inputs_of(program_of(step)), np.full((1, 160), 4.0))


def test_a_launch_that_fails_leaves_no_capture_behind() -> None:
    with busy_gpu() as driver:
        step = compiled()
        block = Block(64)
        address = block.address
        Cycle(block)
        del block
        driver.meanwhile = gc.collect  # type: ignore[assignment]
        driver.fail("cuMemcpyDtoHAsync", 1, "INVALID_VALUE")
        with pytest.raises(DeviceError, match=r"INVALID_VALUE \(1\)"):
            step(batch_of(3))
        assert not driver.captures
        assert driver.calls["cuStreamBeginCapture"] == 1, "what is at fault is not tried again"
        assert driver.calls["cuGraphDestroy"] == 1
        assert address not in driver.memory
        driver.failing.clear()
        step(batch_of(4))
        assert program_of(step).runs == 1


def test_an_interruption_leaves_no_capture_behind() -> None:
    with busy_gpu() as driver:
        step = compiled()

        def interrupt() -> None:
            driver.end_capture()
            raise KeyboardInterrupt

        driver.meanwhile = interrupt
        with pytest.raises(KeyboardInterrupt):
            step(batch_of(3))
        assert not driver.captures
        step(batch_of(4))
        assert program_of(step).runs == 1
        np.testing.assert_array_equal(inputs_of(program_of(step)), np.full((1, 160), 4.0))


def test_a_device_that_is_lost_during_a_capture_is_lost() -> None:
    with busy_gpu() as driver:
        step = compiled()

        def lose() -> None:
            driver.end_capture()
            device().lose("ILLEGAL_ADDRESS (700)")
            raise device().lost_error("step")

        driver.meanwhile = lose
        with pytest.raises(DeviceError, match=r"lost.*ILLEGAL_ADDRESS"):
            step(batch_of(3))
        assert driver.calls["cuStreamBeginCapture"] == 1


def test_many_programs_beside_two_that_stay() -> None:
    """Shapes, threads and collections mixed; the fake ends captures for any misuse."""
    with busy_gpu() as driver:
        steps = [compiled(), compiled()]
        kept: list[object] = []
        for n in range(2, 11):
            f = td.compile(lambda x: td.softmax(x).sum(0), td.Spec((n, 3)), device="cuda")
            if n % 5 == 0:
                driver.meanwhile = gc.collect  # type: ignore[assignment]
            f(np.ones((n, 3), np.float32))
            kept = [Cycle(f), *kept[: n % 3]]
            for step in steps:
                step(batch_of(n))
        del f
        kept.clear()
        gc.collect()
        assert [program_of(s).runs for s in steps] == [9, 9]
        assert driver.calls["cuStreamBeginCapture"] == driver.calls["cuGraphInstantiate"]
        assert not device().releases.refused
        assert len(driver.modules) == 2
