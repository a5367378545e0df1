"""Running compiled steps: threads, forks, interrupts, arrays of every kind, indices out of range."""

from __future__ import annotations

import ctypes
import json
import mmap
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from backend import THREADS, build
from treadle import losses, nn, optim
from treadle.codegen.llvm.driver import render_program
from treadle.kernel.machine import Machine
from treadle.runtime.cpu.program import NativeProgram

TESTS = str(Path(__file__).parent)
PATIENCE = 300  # seconds for a process that should take two


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", "0")
    monkeypatch.setenv("TREADLE_THREADS", "2")


class Net(nn.Module):
    """Random numbers at every step, so that a step too many or too few shows."""

    def __init__(self, width: int = 64) -> None:
        self.fc, self.drop, self.out = nn.Linear(8, width), nn.Dropout(0.3), nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.drop(td.tanh(self.fc(x))))


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def make(width: int = 64, rows: int = 16, **keywords) -> td.TrainStep:
    specs = {"x": td.Spec((rows, 8)), "y": td.Spec((rows,), td.int32)}
    return td.compile_step(Net(width), loss, optim.adamw(1e-2), specs, device="cpu", **keywords)


def batch(seed: int = 0, rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 3, rows).astype(np.int32)}


def bits(step: td.TrainStep) -> list[bytes]:
    return [a.tobytes() for a in step.state_dict().values()]


def output_of(script: str, *arguments: object) -> str:
    """What a script prints that runs in a process of its own."""
    start = f"import sys; sys.path.insert(0, {TESTS!r})\n"
    command = [sys.executable, "-c", start + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Several Python threads


def test_calls_from_several_threads_take_turns() -> None:
    step, alone = make(), make()
    data = batch()

    def train() -> None:
        for _ in range(8):
            step(data)
            step.evaluate(data)

    workers = [threading.Thread(target=train) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    for _ in range(32):
        alone(data)
    assert step.count == 32
    assert bits(step) == bits(alone)


class Twins(nn.Module):
    """Two parameters that are equal after every whole step."""

    def __init__(self) -> None:
        self.first, self.second = (nn.Parameter((300_000,)) for _ in range(2))

    def forward(self, x):
        return (self.first * x).sum() + (self.second * x).sum()


def test_nobody_sees_half_a_step() -> None:
    step = td.compile_step(
        Twins(), lambda model, x: model(x), optim.sgd(1.0), td.Spec(()), device="cpu"
    )
    is_done = threading.Event()

    def train() -> None:
        while not is_done.is_set():
            step(np.float32(1.0))

    worker = threading.Thread(target=train)
    worker.start()
    try:
        for _ in range(60):
            seen = step.params
            assert seen["first"].tobytes() == seen["second"].tobytes()
            assert np.all(seen["first"] == seen["first"][0])
    finally:
        is_done.set()
        worker.join(PATIENCE)


def test_what_is_loaded_meanwhile_is_not_lost() -> None:
    """Steps and loads in turn: whatever comes last, the values are of one of them."""
    step = td.compile_step(
        Twins(), lambda model, x: model(x), optim.sgd(1.0), td.Spec(()), device="cpu"
    )
    values = {n: np.full(300_000, 1000.0, np.float32) for n in ("first", "second")}

    def train() -> None:
        for _ in range(20):
            step(np.float32(1.0))

    worker = threading.Thread(target=train)
    worker.start()
    for _ in range(10):
        step.load_params(values)
    worker.join(PATIENCE)
    step.load_params(values)
    step(np.float32(1.0))
    assert np.all(step.params["first"] == 999.0)


# Fork


FORKED = """
import json, os
from test_backend_runtime import make, batch
step = make()
for i in range(3):
    step(batch(i))
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    losses = [step(batch(i)).loss.hex() for i in range(3)]
    os.write(writer, json.dumps(losses).encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
theirs = json.loads(os.read(reader, 1000))
print(json.dumps([theirs, [step(batch(i)).loss.hex() for i in range(3)]]))
"""


def test_a_forked_child_trains_on() -> None:
    """It has threads of its own, and the parent goes on as if nothing had been."""
    theirs, ours = json.loads(output_of(FORKED))
    assert theirs == ours


# Many steps in one call


def test_a_list_of_batches_gives_the_same_bits_as_steps() -> None:
    together, alone, iterated = make(), make(), make()
    given = [batch(i) for i in range(100)]
    ran = together.run(given)
    losses_ = [alone(b).loss for b in given]
    assert ran.losses.tolist() == losses_
    assert iterated.run(iter(given)).losses.tolist() == losses_
    assert bits(together) == bits(alone) == bits(iterated)
    assert together.count == 100
    # What follows goes on from there, whichever way.
    assert together(batch(7)).loss == alone.run([batch(7)]).loss
    assert together.run([]).updates == 0


def test_many_calls_go_to_native_code_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = make(), []
    several = NativeProgram.run_several_on

    def counted(program, *arguments):
        calls.append(len(arguments[3]))
        return several(program, *arguments)

    monkeypatch.setattr(NativeProgram, "run_several_on", counted)
    step.run([batch(i) for i in range(40)])
    assert sum(calls) == 40
    assert len(calls) < 40


def test_batches_of_other_shapes_and_kinds_among_many() -> None:
    options = td.CompileOptions(on_new_shape="specialise")
    together, alone = make(options=options), make(options=options)
    given = [batch(i, rows=8 if i % 5 == 3 else 16) for i in range(12)]
    given[6]["y"] = given[6]["y"].astype(np.int64)
    given[7]["x"] = np.asfortranarray(given[7]["x"])
    assert together.run(given).losses.tolist() == [alone(b).loss for b in given]
    assert bits(together) == bits(alone)


def test_a_bad_batch_among_many_is_refused_when_its_turn_comes() -> None:
    together, alone = make(), make()
    given = [batch(i) for i in range(6)]
    given[4] = {"x": given[4]["x"]}
    with pytest.raises(td.BatchError, match="missing"):
        together.run(given)
    for b in given[:4]:
        alone(b)
    assert bits(together) == bits(alone)
    assert together.count == 4


# Interrupts


INTERRUPTED = """
import itertools, json, os, random, signal, threading, time
from test_backend_runtime import make, batch
step = make(width=512, rows=128)
data = batch(rows=128)
step(data)
chance = random.Random(0)
arrived, apart = 0, 0
for _ in range(25):
    shot = threading.Timer(chance.uniform(0.001, 0.02), os.kill, (os.getpid(), signal.SIGINT))
    try:
        shot.start()
        step.run(itertools.repeat(data))
    except KeyboardInterrupt:
        arrived += 1
    shot.join()
    apart += int(step.state_dict()["step:counters"][2]) != step.count
count = step.count
again = make(width=512, rows=128)
for _ in range(count):
    again(data)
same = all(a.tobytes() == b.tobytes() for a, b in
           zip(step.state_dict().values(), again.state_dict().values()))
print(json.dumps([arrived, apart, same, count]))
"""


@pytest.mark.parametrize("batches", ["itertools.repeat(data)", "[data] * 2000"])
def test_an_interrupt_arrives_between_steps(batches: str) -> None:
    """The state is that of a whole number of steps, and goes on bit for bit."""
    script = INTERRUPTED.replace("itertools.repeat(data)", batches)
    arrived, apart, is_same, count = json.loads(output_of(script))
    assert arrived == 25
    assert apart == 0, "counters of the host and of the program agree"
    assert is_same
    assert count > 25


ENDLESS = """
import itertools
from test_backend_runtime import make, batch
step = make()
data = batch()
step(data)
print("ready", flush=True)
step.run(itertools.repeat(data))
"""


def test_a_run_without_end_can_be_interrupted_from_outside() -> None:
    start = f"import sys; sys.path.insert(0, {TESTS!r})\n"
    process = subprocess.Popen(
        [sys.executable, "-c", start + ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (-signal.SIGINT, 1, 130)


# Arrays


def test_arrays_of_every_kind_are_taken() -> None:
    data, step = batch(), make()
    expected = step(data).loss
    x, y = data["x"], data["y"]
    wide = np.zeros((32, 20), np.float32)
    wide[::2, 3:19:2] = x
    shifted = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    shifted[...] = x
    locked = x.copy()
    locked.flags.writeable = False
    others = {
        "every other element": wide[::2, 3:19:2],
        "in columns": np.asfortranarray(x),
        "backwards": x[::-1][::-1],
        "at an odd address": shifted,
        "read-only": locked,
        "in the other order of bytes": x.astype(x.dtype.newbyteorder()),
        "float64": x.astype(np.float64),
    }
    for name, array in others.items():
        before = array.tobytes()
        step.reset()
        assert step({"x": array, "y": y}).loss == expected, name
        assert array.tobytes() == before, name
    for dtype in (np.int64, np.uint8, np.int16):
        step.reset()
        assert step({"x": x, "y": y.astype(dtype)}).loss == expected, dtype


def test_results_are_copies() -> None:
    forward = td.compile_forward({}, lambda _, x: (x, x * 2), td.Spec((4,)), device="cpu")
    x = np.arange(4, dtype=np.float32)
    same, twice = forward(x)
    forward(x + 1)
    assert same.tolist() == [0, 1, 2, 3]
    assert twice.tolist() == [0, 2, 4, 6]
    same[...] = 9
    assert x.tolist() == [0, 1, 2, 3]


def test_nan_flows_as_on_the_oracle() -> None:
    data = batch()
    data["x"][3, 2] = np.nan
    data["x"][5, 1] = np.inf
    specs = {"x": td.Spec((16, 8)), "y": td.Spec((16,), td.int32)}

    def trained(device: str) -> td.TrainStep:
        step = td.compile_step(
            nn.Linear(8, 3), loss, optim.sgd(0.1), specs, device=device, clip_norm=1.0
        )
        assert np.isnan(step(data).loss)
        return step

    ours, exact = (trained(device).params for device in ("cpu", "oracle"))
    for name, value in exact.items():
        assert np.isnan(ours[name]).tolist() == np.isnan(value).tolist(), name


# Nothing but this process


WATCHED = """
import json, sys
events = []
names = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork")
names += ("os.forkpty", "os.startfile", "pty.spawn", "ctypes.dlopen")
sys.addaudithook(lambda event, args: events.append([event, str(args)]) if event in names else None)
import numpy as np
from test_backend_runtime import make, batch
step = make()
step(batch())
step.evaluate(batch())
step.gradients(batch())
step.attach(lambda model, b: model(b["x"]), {"x": batch()["x"]})({"x": batch()["x"]})
step.kernels[0].assembly
print(json.dumps(events))
"""


def test_no_process_is_started_and_no_compiler_loaded() -> None:
    events = json.loads(output_of(WATCHED))
    assert [e for e in events if e[0] != "ctypes.dlopen"] == []
    loaded = {e[1] for e in events}
    assert all("libllvmlite" in name or name == "(None,)" for name in loaded), loaded


def test_nothing_is_left_running_when_the_process_ends() -> None:
    """Threads that wait for work do not keep a process, nor crash it at its end."""
    script = "from test_backend_runtime import make, batch\nmake()(batch())\nprint('done')"
    assert output_of(script) == "done\n"


IDLE = """
import os, resource, time
os.environ["TREADLE_THREADS"] = "4"
from test_backend_runtime import make, batch
step = make()
losses = []
for seed in range(20):
    losses.append(step(batch(seed)).loss)
    time.sleep(0.01)
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
time.sleep(0.5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, *losses)
"""


def test_threads_that_wait_long_sleep_until_the_next_step() -> None:
    """Steps after a pause are whole, and nobody wakes up in between to look for one."""
    switches, *found = output_of(IDLE).split()
    step = make()
    assert [float(x) for x in found] == [float(step(batch(seed)).loss) for seed in range(20)]
    assert int(switches) < 100


# Labels, and steps that fail


def test_labels_are_checked_to_fit() -> None:
    step = make()
    data = batch()
    before = bits(step)
    data["y"] = data["y"].astype(np.int64)
    data["y"][3] = 2**40
    with pytest.raises(td.BatchError, match=r"y has values from 0 to 1099511627776, which int32"):
        step(data)
    assert bits(step) == before
    data["y"][3] = 1
    assert np.isfinite(step(data).loss)


WRONG = {
    "a shape": lambda b: b | {"x": b["x"][:, :5]},
    "a name": lambda b: {"x": b["x"], "z": b["y"]},
    "a dtype": lambda b: b | {"y": b["x"][:, 0]},
    "another size": lambda b: {"x": b["x"][:9], "y": b["y"][:9]},
    "a word": lambda b: b | {"x": "hello"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_changes_nothing(name: str) -> None:
    step = make(accumulate=2)
    step(batch())
    before = bits(step)
    with pytest.raises(td.BatchError):
        step(WRONG[name](batch()))
    with pytest.raises(td.BatchError):
        step.run([WRONG[name](batch())])
    assert bits(step) == before
    assert step.micro_step == 1


def test_an_anomaly_changes_nothing() -> None:
    step = make(options=td.CompileOptions(detect_anomaly=True))
    step(batch())
    before = bits(step)
    data = batch()
    data["x"][0, 0] = np.nan
    with pytest.raises(td.AnomalyError):
        step(data)
    assert bits(step) == before
    step(batch())
    assert step.count == 2


# Indices out of range


class Tokens(nn.Module):
    def __init__(self) -> None:
        self.wte, self.head = nn.Embedding(7, 12), nn.Linear(12, 7)

    def forward(self, tokens):
        return self.head(self.wte(tokens))


def tokens_step(**options) -> td.TrainStep:
    specs = {k: td.Spec((3, 4), td.int32) for k in "xy"}

    def token_loss(model, b):
        return losses.cross_entropy(model(b["x"]), b["y"], axis=-1)

    return td.compile_step(
        Tokens(), token_loss, optim.adamw(0.1), specs, device="cpu",
        options=td.CompileOptions(**options),
    )  # fmt: skip


def tokens(name: str, value: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    data = {k: rng.integers(0, 7, (3, 4)).astype(np.int32) for k in "xy"}
    data[name][1, 2] = value
    return data


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("value", [-1, 7, 2**31 - 1, -(2**31)])
def test_debugging_names_an_index_out_of_range(name: str, value: int) -> None:
    step = tokens_step(debug=True, check_indices=False)
    step(tokens(name, 3))
    before = bits(step)
    with pytest.raises(td.IndexRangeError) as caught:
        step(tokens(name, value))
    message = str(caught.value)
    assert str(value) in message
    assert "an axis of 7" in message
    assert "test_backend_runtime.py" in message, "the user's line"
    assert ("in forward" if name == "x" else "in token_loss") in message
    assert bits(step) == before
    assert np.isfinite(step(tokens(name, 0)).loss)


def test_debugging_lets_what_is_ignored_pass() -> None:
    """Targets of −100 are left out of a loss: they are no index."""
    step, plain = tokens_step(debug=True), tokens_step()
    data = tokens("y", -100)
    assert step(data).loss == plain(data).loss


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("value", [-1, 7, 10**6, 2**31 - 1, -(2**31)])
def test_otherwise_an_index_out_of_range_is_held_inside(value: int, optimize: bool) -> None:
    """Whatever is read or added to lies inside; the next step is as good as any."""
    step = tokens_step(optimize=optimize, check_indices=False)
    for name in "xy":
        assert np.isfinite(step(tokens(name, value)).loss)
    assert all(np.isfinite(v).all() for v in step.params.values())


GUARDED = """
from test_backend_runtime import read_beside_guards
read_beside_guards()
print("whole")
"""


def read_beside_guards() -> None:
    """Gather from a page between two that may not be touched."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    for at in (start, start + 2 * page):
        assert protect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    table = np.frombuffer(memory, np.float32, page // 4, page)
    table[...] = np.arange(table.size)
    last = table.size - 1
    index = np.array([0, -1, last + 1, 2**31 - 1, -(2**31), last, 10**6, -(10**6)], np.int32)

    def gathers(x, i):
        rows = x.reshape(-1, 8)
        return x[i], td.take(rows, i, 0), td.dynamic_slice(x, i[3:4], (16,)), x[::2] * 2, x[1:] + 1

    graph = td.trace(gathers, td.Spec(table.shape), td.Spec((8,), td.int32))
    for fuse in (True, False):
        found = build(graph, fuse).on(1).run({"x": table, "i": index})
        assert [found[0][k] for k in (0, 2, 3, 4, 5)] == [0, last, last, 0, last]
        assert found[2][-1] == last


def test_nothing_outside_is_read() -> None:
    assert output_of(GUARDED) == "whole\n"


def test_an_index_inside_a_scan_is_held_inside() -> None:
    def walk(table, tokens):
        return td.scan(lambda c, t: (c + table[t], c), td.zeros((4,)), tokens)[0]

    graph = td.trace(walk, td.Spec((3, 4)), td.Spec((5,), td.int32))
    values = {"table": np.ones((3, 4), np.float32), "tokens": np.array([0, 2, 10**9, -7, 1])}
    (found,) = build(graph).on(2).run(values)
    assert found.tolist() == [5.0] * 4


@pytest.mark.parametrize(("count", "rests"), [(1, 1), (16, 0), (100, 1), (96, 0), (64, 0)])
def test_tasks_of_whole_vectors_have_no_rest(count: int, rests: int) -> None:
    """Tasks begin at multiples of 16 iterations: code for a rest is there if the loop has one."""
    graph = td.trace(lambda x: [x * 3 + 1], td.Spec((count,)))
    found = build(graph, width=8, shared=True)
    assert render_program(found.program, Machine(8)).count("fmul float") == rests
    x = np.arange(count, dtype=np.float32)
    for threads in THREADS:
        (y,) = found.on(threads).run({"x": x})
        np.testing.assert_array_equal(y, x * 3 + 1)
