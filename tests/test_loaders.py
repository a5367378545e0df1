"""Loaders: order, position, background threads, and what is wrong with the data."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import data
from treadle.data.shuffle import permutation

ROWS = 23


def _arrays() -> dict[str, np.ndarray]:
    return {"x": np.arange(ROWS * 2.0).reshape(ROWS, 2), "y": np.arange(ROWS)}


def _rows(batches: Any) -> list[list[int]]:
    return [b["y"].tolist() for b in batches]


def _flat(batches: Any) -> list[int]:
    return list(itertools.chain(*_rows(batches)))


def test_in_order() -> None:
    loader = data.ArrayLoader(_arrays(), 5)
    batches = list(loader)
    assert len(loader) == len(batches) == 5
    assert _rows(batches) == [list(range(i, min(i + 5, ROWS))) for i in range(0, ROWS, 5)]
    assert all((b["x"][:, 0] == 2 * b["y"]).all() for b in batches)
    assert _rows(loader) == _rows(batches)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**80])
def test_shuffled(seed: int) -> None:
    """Each pass has an order of its own, and the same seed the same orders."""
    loader = data.ArrayLoader(_arrays(), 5, shuffle=True, seed=seed, drop_last=False)
    passes = [_flat(loader) for _ in range(3)]
    assert all(sorted(p) == list(range(ROWS)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    again = data.ArrayLoader(_arrays(), 4, shuffle=True, seed=seed, drop_last=False)
    assert [_flat(again) for _ in range(3)] == passes
    other = data.ArrayLoader(_arrays(), 5, shuffle=True, seed=seed + 1, drop_last=False)
    assert _flat(other) != passes[0]


def _philox(key: list[int], count: int) -> list[int]:
    """Words of Philox4x64-10 as its paper defines it, with counters 1, 2, 3, …"""
    word, words = 2**64 - 1, []
    for counter in range(1, -(-count // 4) + 1):
        x, k = [counter, 0, 0, 0], list(key)
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(b >> 64) ^ x[1] ^ k[0], b & word, (a >> 64) ^ x[3] ^ k[1], a & word]
            k = [(k[0] + 0x9E3779B97F4A7C15) & word, (k[1] + 0xBB67AE8584CAA73B) & word]
        words += x
    return words[:count]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 2), (-1, 7)])
def test_the_order_is_the_same_for_ever(seed: int, epoch: int) -> None:
    """What a saved position means must not change with a version of anything."""
    words = _philox([seed % 2**64, epoch], 30)
    assert permutation(seed, epoch, 30).tolist() == sorted(range(30), key=words.__getitem__)


def test_the_tail() -> None:
    assert len(data.ArrayLoader(_arrays(), 5, shuffle=True)) == 4
    assert len(data.ArrayLoader(_arrays(), 5, drop_last=True)) == 4
    assert [len(b["y"]) for b in data.ArrayLoader(_arrays(), 5)] == [5, 5, 5, 5, 3]


def test_batches_are_copies() -> None:
    arrays = _arrays()
    for batch in data.ArrayLoader(arrays, 5):
        batch["x"][:] = -1
    assert arrays["x"].min() == 0


def test_trees_and_memory_maps(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    mapped = data.read_npy(tmp_path / "x.npy", memory_map=True)
    assert isinstance(mapped, np.memmap)
    loader = data.ArrayLoader((mapped, {"y": np.arange(6)}), 4)
    (x, rest), _ = list(loader)
    assert type(x) is np.ndarray
    assert np.array_equal(x, mapped[:4])
    assert rest["y"].tolist() == [0, 1, 2, 3]
    (alone,) = data.ArrayLoader(np.arange(3), 3)
    assert alone.tolist() == [0, 1, 2]


def test_a_pass_left_early_begins_again() -> None:
    """Looking at a batch takes nothing away, also after a position was loaded."""
    loader = data.ArrayLoader(_arrays(), 5, shuffle=True)
    first = next(iter(loader))
    batches = list(loader)
    assert np.array_equal(first["y"], batches[0]["y"])
    assert len(batches) == 4
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "batch": 2})
    next(iter(loader))
    assert _rows(loader) == _rows(batches)[2:]


Make = Callable[[], Any]


def _array_loader() -> Any:
    return data.ArrayLoader(_arrays(), 4, shuffle=True, seed=5)


def _windows() -> Any:
    source = data.TextWindows(np.arange(50), 6, stride=2)
    return data.ArrayLoader(source, 4, shuffle=True, drop_last=False)


def _iterable() -> Any:
    def make(epoch: int) -> Iterator[dict[str, np.ndarray]]:
        return ({"y": np.array([epoch, i])} for i in range(6))

    return data.IterableLoader(make)


def _stacked() -> Any:
    return data.IterableLoader([{"y": np.int32(i)} for i in range(11)], batch_size=3)


LOADERS = {
    "arrays": _array_loader,
    "windows": _windows,
    "iterable": _iterable,
    "stacked": _stacked,
    **{
        f"{name}, prefetched {depth}": (lambda make=make, depth=depth: data.Prefetch(make(), depth))
        for name, make in (("arrays", _array_loader), ("iterable", _iterable))
        for depth in (1, 3, 50)
    },
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_position_continues_exactly(name: str) -> None:
    """From every point of two passes: the same batches follow in another process."""
    make: Make = LOADERS[name]
    loader = make()
    all_batches = [[b["y"].tolist() for b in loader] for _ in range(4)]
    count = len(all_batches[0])
    states = []
    loader = make()
    states.append((0, 0, loader.state_dict()))
    for epoch in range(2):
        for i, _ in enumerate(loader, 1):
            states.append((epoch, i, loader.state_dict()))
        states.append((epoch + 1, 0, loader.state_dict()))
    assert len(states) == 2 * count + 3
    for epoch, i, state in states:
        fresh = make()
        fresh.load_state_dict(json.loads(json.dumps(state)))
        assert fresh.state_dict() == state
        assert _rows(fresh) == all_batches[epoch][i:]
        assert _rows(fresh) == all_batches[epoch + 1]


def test_a_finished_pass_is_not_the_next_one() -> None:
    """After the last batch the rest of the pass is empty: what ends an epoch is not skipped."""
    loader = data.ArrayLoader(_arrays(), 10)
    states = [loader.state_dict() for _ in loader]
    loader.load_state_dict(states[-1])
    assert list(loader) == []
    assert (loader.epoch, len(list(loader))) == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 24}, "rows was 24 and is 23"),
        ({"seed": 4}, "seed was 4 and is 5"),
        ({"batch_size": 2, "shuffle": 0}, "batch_size was 2 and is 4; shuffle was 0"),
        ({"batch": 6}, "batch 6, a pass has 5"),
        ({"epoch": -1}, "epoch -1"),
        ({"batch": "1"}, "no whole number as batch"),
        ({"batch": None}, "no whole number as batch"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    for loader in (_array_loader(), data.Prefetch(_array_loader())):
        before = loader.state_dict()
        with pytest.raises(td.LoadError, match=message):
            loader.load_state_dict(before | change)
        assert loader.state_dict() == before


def test_iterables() -> None:
    batches = [{"y": np.arange(3)}, {"y": np.arange(2)}]
    loader = data.IterableLoader(batches)
    assert _rows(loader) == _rows(loader) == [[0, 1, 2], [0, 1]]
    once = data.IterableLoader(iter(batches))
    assert len(list(once)) == 2
    with pytest.raises(td.ArgumentError, match="gives its items once"):
        list(once)
    rows = [(np.full(2, i), float(i)) for i in range(5)]
    stacked = list(data.IterableLoader(rows, batch_size=2, drop_last=True))
    assert [(x.shape, y.tolist()) for x, y in stacked] == [((2, 2), [0, 1]), ((2, 2), [2, 3])]
    assert len(list(data.IterableLoader(rows, batch_size=2))) == 3


def test_an_iterable_of_another_length_is_refused() -> None:
    rows = [{"y": np.full(2, i)} for i in range(6)]
    loader = data.IterableLoader(rows)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert state == {"epoch": 0, "batch": 1, "items": 6}
    with pytest.raises(td.LoadError, match="items was 6 and is 5"):
        data.IterableLoader(rows[:5]).load_state_dict(state)
    stacked = data.IterableLoader(rows, batch_size=2).state_dict()
    with pytest.raises(td.LoadError, match="batch_size was 2 and is 3"):
        data.IterableLoader(rows, batch_size=3).load_state_dict(stacked)
    for other in (data.IterableLoader(rows), data.IterableLoader(lambda epoch: iter(rows))):
        for known in (state, {"epoch": 0, "batch": 1}):  # of this version, and of one before
            other.load_state_dict(known)
            assert [int(b["y"][0]) for b in other] == [1, 2, 3, 4, 5]
    rows.append(rows[0])  # a list that grows between two fits is the same data
    loader.load_state_dict(state)


def test_as_loader() -> None:
    loader = _array_loader()
    assert data.as_loader(loader) is loader
    prefetched = data.Prefetch(loader)
    assert data.as_loader(prefetched) is prefetched
    assert isinstance(data.as_loader([{"y": np.zeros(1)}]), data.IterableLoader)


def test_a_source_of_ones_own() -> None:
    class Squares:
        def __len__(self) -> int:
            return 10

        def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"y": indices**2}

    assert _rows(data.ArrayLoader(Squares(), 5)) == [[0, 1, 4, 9, 16], [25, 36, 49, 64, 81]]


def test_text_windows() -> None:
    source = data.TextWindows(np.arange(10, dtype=np.uint16), 3)
    assert len(source) == 3
    batch = source.gather(np.array([0, 2]))
    assert batch["x"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert batch["y"].tolist() == [[1, 2, 3], [7, 8, 9]]
    assert batch["x"].dtype == batch["y"].dtype == np.int32
    every = data.TextWindows(np.arange(10), 3, stride=1)
    assert len(every) == 7
    assert every.gather(np.arange(7))["y"][-1].tolist() == [7, 8, 9]
    assert len(data.TextWindows(np.arange(4), 3)) == 1


# Prefetching


def _counting(made: list[int], count: int = 100) -> Iterator[dict[str, np.ndarray]]:
    for i in range(count):
        made.append(i)
        yield {"y": np.array([i])}


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):  # two minutes: other work may keep the thread waiting
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def _threads() -> int:
    return sum(t.name == "treadle-prefetch" for t in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 4])
def test_so_many_batches_wait(depth: int) -> None:
    made: list[int] = []
    batches = iter(data.Prefetch(_counting(made), depth))
    next(batches)
    _until(lambda: len(made) == depth + 1)
    time.sleep(0.05)
    assert len(made) == depth + 1  # one that was handed over, and those that wait
    assert [int(b["y"][0]) for b in batches] == list(range(1, 100))
    assert _threads() == 0


def test_errors_come_where_the_batch_was_asked_for() -> None:
    def failing() -> Iterator[dict[str, np.ndarray]]:
        yield {"y": np.zeros(1)}
        raise OSError("the disk is gone")

    batches = iter(data.Prefetch(failing(), 3))
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert _threads() == 0
    with pytest.raises(td.ArgumentError, match="gives its items once"):
        list(data.Prefetch(loader := data.IterableLoader(iter([{"y": np.zeros(1)}])))) + list(
            data.Prefetch(loader)
        )


def test_a_pass_that_is_left_ends_its_thread() -> None:
    made: list[int] = []
    batches = iter(data.Prefetch(_counting(made), 2))
    next(batches)
    assert _threads() == 1
    del batches
    gc.collect()
    assert _threads() == 0
    prefetch = data.Prefetch(_array_loader(), 50)
    for _ in itertools.islice(prefetch, 2):
        pass
    gc.collect()
    assert _threads() == 0
    assert prefetch.state_dict()["batch"] == 2
    assert _rows(prefetch) == _rows(_array_loader())  # and begins again


def test_a_pass_that_was_made_and_not_taken() -> None:
    """The thread has finished the pass, and the loader is in the next one."""
    loader = _array_loader()
    prefetch = data.Prefetch(loader, 50)
    batches = iter(prefetch)
    next(batches)
    _until(lambda: loader.epoch == 1)
    del batches
    assert prefetch.state_dict()["epoch"] == 0
    assert _rows(prefetch) == _rows(_array_loader())


def test_a_look_at_the_loader_itself() -> None:
    """Whatever was done to the loader before: passes of the prefetched one are whole."""
    loader = _array_loader()
    next(iter(loader))
    prefetch = data.Prefetch(loader)
    next(iter(prefetch))
    assert _rows(prefetch) == _rows(_array_loader())


def test_one_pass_at_a_time() -> None:
    prefetch = data.Prefetch(_array_loader())
    first = iter(prefetch)
    next(first)
    second = iter(prefetch)
    with pytest.raises(td.ArgumentError, match="ended by another one"):
        next(first)
    assert _rows(second) == _rows(_array_loader())
    third = iter(prefetch)
    next(third)
    prefetch.close()
    with pytest.raises(td.ArgumentError, match="ended"):
        next(third)
    assert _threads() == 0


def test_closing_wakes_whoever_waits() -> None:
    held = threading.Event()

    def blocked() -> Iterator[dict[str, np.ndarray]]:
        held.wait()
        yield {"y": np.zeros(1)}

    prefetch = data.Prefetch(blocked())
    batches, raised = iter(prefetch), []

    def wait() -> None:
        try:
            next(batches)
            next(batches)
        except (td.ArgumentError, StopIteration) as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Timer(0.05, held.set).start()
    prefetch.close()
    waiting.join(5)
    assert not waiting.is_alive()
    assert len(raised) == 1


def test_a_loader_without_a_position() -> None:
    prefetch = data.Prefetch([{"y": np.zeros(1)}])
    assert len(list(prefetch)) == len(prefetch) == 1
    for call in (prefetch.state_dict, lambda: prefetch.load_state_dict({})):
        with pytest.raises(td.ArgumentError, match="a list has no position"):
            call()


def _child_answer(prefetch: Any, batches: Iterator[Any]) -> str:
    try:
        next(batches)
    except td.ArgumentError as error:
        return f"{error.cause} {_rows(prefetch) == _rows(_array_loader())}"
    return "a batch came"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child() -> None:
    """The thread stays behind: the old pass says so, a new one works."""
    prefetch = data.Prefetch(_array_loader(), 3)
    batches = iter(prefetch)
    next(batches)
    reading, writing = os.pipe()
    with prefetch._run._slots._cond:  # as if the thread had it: nobody gives it back in the child
        child = os.fork()
        if not child:
            signal.alarm(20)
            with contextlib.suppress(BaseException):
                os.write(writing, _child_answer(prefetch, batches).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert "forked in the middle of a pass" in answer
    assert answer.endswith("True")
    assert len(list(batches)) == 4  # the parent goes on


_LEFT_RUNNING = """
import time, numpy as np
from treadle import data

def slow():
    for i in range(1000):
        time.sleep(0.005)
        yield {"y": np.zeros(1000)}

running = iter(data.Prefetch(slow(), 2))
next(running)
print("done")
"""


def test_the_program_ends_with_a_pass_running() -> None:
    run = [sys.executable, "-W", "error", "-c", _LEFT_RUNNING]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# Wrong data


def _wrong() -> Iterator[tuple[str, Callable[[], Any]]]:
    x = np.zeros((4, 2))
    load = data.ArrayLoader
    yield "x has 4, y has 3", lambda: load({"x": x, "y": np.zeros(3)}, 2)
    yield "no rows", lambda: load({"x": np.zeros((0, 2))}, 2)
    yield "no arrays", lambda: load({}, 2)
    yield "use np.asarray", lambda: load({"x": [1, 2, 3]}, 2)
    yield "Python objects", lambda: load({"x": np.array([{}, {}])}, 2)
    yield "batch_size = 0", lambda: load(x, 0)
    yield "batch_size = '2'", lambda: load(x, "2")  # type: ignore[arg-type]
    yield "4 rows do not fill a batch of 5", lambda: load(x, 5, shuffle=True)
    yield "depth = 0", lambda: data.Prefetch([], 0)
    yield "one dict", lambda: data.IterableLoader({"x": x})
    yield "one tuple", lambda: data.IterableLoader((x, x))
    yield "one ndarray", lambda: data.as_loader(x)
    yield "cannot be iterated", lambda: data.as_loader(3)
    yield "batch_size = 0", lambda: data.IterableLoader([], 0)
    yield "has 0 batches", lambda: list(data.IterableLoader([]))
    yield "0 batches, 2 were", lambda: _resumed([])
    yield "hold no window", lambda: data.TextWindows(np.arange(3), 3)
    yield "int64 of shape", lambda: data.TextWindows(np.zeros((3, 3), int), 2)
    yield "integers in one row", lambda: data.TextWindows(np.zeros(9), 2)
    yield "length = 0", lambda: data.TextWindows(np.arange(9), 0)
    yield "stride = 0", lambda: data.TextWindows(np.arange(9), 2, 0)


def _resumed(batches: list[Any]) -> None:
    loader = data.IterableLoader(batches)
    loader.load_state_dict({"epoch": 0, "batch": 2})
    list(loader)


@pytest.mark.parametrize(("message", "call"), list(_wrong()))
def test_mistakes(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(td.TreadleError, match=message):
        call()


FIRST = {"x": np.zeros((4, 2)), "y": np.zeros(4, int)}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": np.zeros((4, 2))}, "epoch 0, batch 1 differs from the first: y is missing"),
        (FIRST | {"z": np.zeros(4)}, "z is unexpected"),
        (FIRST | {"x": np.zeros((4, 3))}, r"x has the shape \(4, 3\), not \(4, 2\)"),
        (FIRST | {"x": np.zeros((4, 2, 1))}, r"x has the shape \(4, 2, 1\)"),
        (FIRST | {"x": np.zeros((4, 2), int)}, "x is int64, not float64"),
        (FIRST | {"x": np.zeros((3, 2))}, "x has 3 rows, y has 4"),
        (None, "no arrays"),
    ],
)
def test_inconsistent_batches(second: Any, message: str) -> None:
    loader = iter(data.IterableLoader([FIRST, second]))
    next(loader)
    with pytest.raises(td.BatchError, match=message):
        next(loader)


def test_sizes_that_vary() -> None:
    smaller = {"x": np.zeros((2, 2)), "y": np.zeros(2, int)}
    assert len(list(data.IterableLoader([FIRST, smaller, FIRST]))) == 3
    wider = {"x": np.zeros((4, 3)), "y": np.zeros(4, int)}
    assert len(list(data.IterableLoader([FIRST, wider], varying=True))) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": np.zeros(2)}, {"a": np.zeros(3)}], r"row 1 of a batch.*\(1, 3\), not \(1, 2\)"),
        ([{"a": 1}, {"b": 1}], "row 1 of a batch.*a is missing; b is unexpected"),
        ([(1, 2), [1, 2]], "its containers are others"),
    ],
)
def test_inconsistent_rows(rows: list[Any], message: str) -> None:
    with pytest.raises(td.BatchError, match=message):
        list(data.IterableLoader(rows, batch_size=2))


def test_a_step_takes_the_batches() -> None:
    """From arrays to a trained step, prefetched."""
    model = td.nn.Linear(2, 1)
    arrays = {"x": np.arange(12.0).reshape(6, 2) / 12, "y": np.ones((6, 1))}
    loader = data.Prefetch(data.ArrayLoader(arrays, 3, shuffle=True))

    def loss(model: Any, batch: Any) -> Any:
        return td.losses.mse(model(batch["x"]), batch["y"])

    example = td.data.ArrayLoader({k: v.astype(np.float32) for k, v in arrays.items()}, 3)
    step = td.compile_step(model, loss, td.optim.sgd(0.1), next(iter(example)))
    found = [step(batch).loss for _ in range(20) for batch in loader]
    assert len(found) == 40
    assert found[-1] < found[0]
