"""Labels and tokens out of range: the trainer says so, where a program would hold them inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import losses, nn, optim
from treadle.train.indices import IndexRanges


class Tokens(nn.Module):
    def __init__(self) -> None:
        self.table, self.scores = nn.Embedding(7, 4), nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        return self.scores(self.table(x).mean(1))


def loss(model: Any, batch: Any) -> Any:
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(dtype: type = np.int32, **changed: int) -> dict[str, np.ndarray]:
    batch = {"x": np.full((8, 3), 6, dtype), "y": np.full(8, 4, dtype)}
    for name, value in changed.items():
        batch[name].flat[5] = value
    return batch


def trainer(step: td.TrainStep | None = None) -> td.Trainer:
    step = step or td.compile_step(Tokens(), loss, optim.sgd(0.1), batch_of())
    return td.Trainer(step, progress="off")


@pytest.mark.parametrize(("name", "value"), [("x", 7), ("x", -1), ("y", 5), ("y", -1)])
def test_what_is_out_of_range_is_named_before_anything_is_done(name: str, value: int) -> None:
    found = trainer()
    before = found.step.params
    with pytest.raises(td.IndexRangeError) as caught:
        found.fit([batch_of(), batch_of(**{name: value})], epochs=1)
    message = str(caught.value)
    place, what = ("x[1, 2]", "embedding has 7 rows") if name == "x" else ("y[5]", "5 classes")
    for part in (f"fit: {place} is {value}", what, "test_train_indices.py", "Count from 0 to"):
        assert part in message
    assert found.step.count == 1
    assert any((found.step.params[n] != v).any() for n, v in before.items())


def test_validation_is_looked_at_too() -> None:
    with pytest.raises(td.IndexRangeError, match=r"validation: y\[5\] is 9"):
        trainer().fit([batch_of()], epochs=1, validation=[batch_of(y=9)])


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8])
def test_other_integers(dtype: type) -> None:
    step = td.compile_step(Tokens(), loss, optim.sgd(0.1), batch_of(dtype))
    trainer(step).fit([batch_of(dtype)], epochs=1)
    with pytest.raises(td.IndexRangeError, match=r"y\[5\] is 5"):
        trainer(step).fit([batch_of(dtype, y=5)], epochs=1)


def test_what_is_ignored_passes() -> None:
    trainer().fit([batch_of(y=-100)], epochs=1)
    own = td.compile_step(
        Tokens(),
        lambda m, b: losses.cross_entropy(m(b["x"]), b["y"], ignore_index=9),
        optim.sgd(0.1),
        batch_of(),
    )
    trainer(own).fit([batch_of(y=9)], epochs=1)
    with pytest.raises(td.IndexRangeError, match="is -100"):
        trainer(own).fit([batch_of(y=-100)], epochs=1)


def test_batches_that_are_not_flat() -> None:
    def nested(model: Any, batch: Any) -> Any:
        return losses.cross_entropy(model(batch[0]["x"]), batch[1])

    def pair(**changed: int) -> tuple[Any, Any]:
        batch = batch_of(**changed)
        return {"x": batch["x"]}, batch["y"]

    step = td.compile_step(Tokens(), nested, optim.sgd(0.1), pair())
    trainer(step).fit([pair()], epochs=1)
    for name, shown in (("x", r"0\.x\[1, 2\]"), ("y", r"1\[5\]")):
        with pytest.raises(td.IndexRangeError, match=rf"{shown} is 50"):
            trainer(step).fit([pair(**{name: 50})], epochs=1)


def test_only_what_is_used_as_it_comes_is_looked_at() -> None:
    """A part of an array, or a number that is changed first, may be anything."""
    spec = {"x": td.Spec((8, 3), td.int32), "y": td.Spec((8, 2), td.int32)}

    def parts(model: Any, batch: Any) -> Any:
        return losses.cross_entropy(model(batch["x"] % 7), batch["y"][:, 0])

    step = td.compile_step(Tokens(), parts, optim.sgd(0.1), spec)
    assert IndexRanges(step.graph).ranges == ()
    y = np.stack([np.arange(8) % 5, np.full(8, 99)], 1).astype(np.int32)
    assert np.isfinite(step({"x": np.full((8, 3), 70, np.int32), "y": y}).loss)
