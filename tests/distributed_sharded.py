"""What every rank of two does with sharded parameters beside training: each as without sharding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distributed_cases as cases
import treadle as td
from treadle import optim
from treadle.distributed.launched import open_communicator

comm = open_communicator("auto", 60.0)


def step_of(shard_parameters: bool, **more: Any) -> td.TrainStep:
    options = td.CompileOptions(on_new_shape="specialise", detect_anomaly=True)
    return cases.compiled("mlp", shard_parameters=shard_parameters, options=options, **more)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(td.TreadleError, match=told):
        call()


def logits(model: Any, batch: Any) -> Any:
    return model(batch["x"]), model.fc1.weight


def main(folder: Path) -> None:
    step, plain = step_of(True), step_of(False)
    batches = list(cases.rows("rows", 6))
    for batch in batches[:3]:
        assert step(batch).loss == plain(batch).loss
    weights = {n for n, d in step.recipe.trained().items() if d.shape}
    assert weights
    assert weights.isdisjoint(step.session.values), "freed after each step"
    same(step.params, plain.params)
    same(step.state_dict(), plain.state_dict())
    same(step.gradients(batches[3]), plain.gradients(batches[3]))
    assert step.evaluate(batches[3]) == plain.evaluate(batches[3])
    assert step.not_finite() == ()
    assert step.find_anomaly(batches[3]) is None
    assert step.profile(batches[3]).kernels
    # Programs beside the step
    rows = {"x": batches[0]["x"]}
    attached, wanted = step.attach(logits, rows), plain.attach(logits, rows)
    for found, value in zip(attached(rows), wanted(rows), strict=True):
        np.testing.assert_array_equal(found, value)
    shared = td.compile_forward(cases.Classifier(), logits, rows, device="cpu", share=step)
    np.testing.assert_array_equal(shared(rows)[0], wanted(rows)[0])
    same(attached.params, wanted.params)
    # Files, and values that are given
    path = folder / "step.safetensors"
    step.save(path)
    plain.load(path)
    other = {n: np.asarray(a * 2, a.dtype) for n, a in step.params.items()}
    for each in (step, plain):
        each.load_params(other)
        each(batches[4])
    same(step.state_dict(), plain.state_dict())
    for each in (step, plain):
        each.load(path)
        each(batches[5])
        each({n: a[:8] for n, a in batches[5].items()})  # another shape
    same(step.state_dict(), plain.state_dict())
    # What is wrong changes nothing
    before, bad = step.state_dict(), {n: a.copy() for n, a in batches[0].items()}
    bad["x"][9] = np.nan
    refused(lambda: step(bad), "shard 4, on rank 1, is nan")
    assert weights.isdisjoint(step.session.values)
    same(step.state_dict(), before)
    refused(lambda: step.device_params, "device_params: parameters are sharded")
    refused(lambda: step.export_web(folder / "page"), "export_web: parameters are sharded")
    refused(lambda: attached.export_web(folder / "page"), "save and load without")
    refused(lambda: step_of(False, share=step), "share=.*parameters are sharded")
    refused(lambda: step_of(True, share=plain), "shard_parameters=True with share=")
    for each in (step, plain):
        each.reset(7)
        each(batches[0])
    same(step.state_dict(), plain.state_dict())
    oracle = cases.compiled("mlp", "oracle", shard_parameters=True, optimizer=optim.sgd(0.1))
    oracle(batches[0])
    assert oracle.attach(logits, rows)(rows)[1].any(), "results are copies"
    print("as without sharding")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
