"""What every program passes through: each stage verified where that is asked, and recognition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import treadle as td
from treadle import losses, nn, optim, pipeline
from treadle.base.errors import GraphError
from treadle.ir.graph import Graph
from treadle.kernel.target import GPU
from treadle.step import programs

BATCH = {"x": td.Spec((8, 3)), "y": td.Spec((8,), td.int32)}
VERIFIED = td.CompileOptions(verify=True)
FORWARD_STAGES = ("apply_precision", "recognise", "with_eval_params", "optimize")
STEP_STAGES = ("trace_loss", "apply_precision", "recognise", "append_updates", "optimize")


def loss(model: Any, batch: Any) -> Any:
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def compiled(options: td.CompileOptions = VERIFIED) -> td.TrainStep:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5, bias=False))
    return td.compile_step(model, loss, optim.sgd(0.1), BATCH, device="oracle", options=options)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 5, 8).astype(np.int32)}


def breaks(stage: str, of: Any = pipeline) -> Any:
    """A stage whose graph has a type that no rule gives."""
    built: Callable[..., Graph] = getattr(of, stage)

    def broken(*arguments: Any) -> Graph:
        graph = built(*arguments)
        last = graph.nodes[-1]
        wrong = tuple(t.with_shape((*t.shape, 7)) for t in last.types)
        return Graph((*graph.nodes[:-1], replace(last, types=wrong)), graph.outputs, graph.name)

    return mock.patch.object(of, stage, broken)


def then(stages: tuple[str, ...], stage: str) -> Any:
    """The stage after one, watched; the first one's own stage where there is none."""
    following = stages[stages.index(stage) + 1 :][:1]
    return mock.patch.object(pipeline, *following) if following else mock.MagicMock()


@pytest.mark.parametrize("stage", STEP_STAGES)
def test_a_broken_stage_of_a_step_is_found_before_the_next(stage: str) -> None:
    with breaks(stage), then(STEP_STAGES, stage) as following:
        with pytest.raises(GraphError, match="the rule says|rejects"):
            compiled()
        following.assert_not_called()


@pytest.mark.parametrize("stage", FORWARD_STAGES)
def test_a_broken_stage_of_an_evaluation_is_found(stage: str) -> None:
    step = compiled()
    with breaks(stage), then(FORWARD_STAGES, stage) as following:
        with pytest.raises(GraphError, match="the rule says|rejects"):
            step.evaluate(arrays())
        following.assert_not_called()


@pytest.mark.parametrize("stage", FORWARD_STAGES)
def test_a_broken_stage_of_a_forward_is_found(stage: str) -> None:
    with breaks(stage), then(FORWARD_STAGES, stage) as following:
        with pytest.raises(GraphError, match="the rule says|rejects"):
            td.compile(lambda x: td.tanh(x) @ x, td.Spec((3, 3)), device="oracle", options=VERIFIED)
        following.assert_not_called()


def test_what_is_loaded_is_verified() -> None:
    """Outputs are chosen for each program, after the stages."""
    with breaks("select", programs), pytest.raises(GraphError, match="the rule says|rejects"):
        compiled()


def test_no_graph_is_verified_where_that_is_off() -> None:
    with mock.patch.object(pipeline, "verify") as verify:
        compiled(td.CompileOptions(verify="off")).evaluate(arrays())
    verify.assert_not_called()


def ops_of(graph: Graph) -> set[str]:
    return {n.op.name for n in graph.nodes}


def test_evaluations_and_forwards_are_recognised() -> None:
    """The head of an evaluation is one composite where the step's is, with the same loss."""
    plain = compiled()
    every = replace(GPU.rewriting, least_classes=1, least_head_logits=1)
    with mock.patch.object(pipeline, "target_of", return_value=replace(GPU, rewriting=every)):
        fused = compiled()
        found = fused.evaluate(arrays())
        forward = fused.attach(loss, BATCH)
    assert fused.report.rules["linear_cross_entropy"] == 2, "the step and its evaluation"
    assert forward.report.rules["linear_cross_entropy"] == 1
    assert "linear_cross_entropy_grad" in ops_of(fused.graph)
    assert "linear_cross_entropy" in ops_of(forward.graph)
    assert found.loss == pytest.approx(plain.evaluate(arrays()).loss, rel=1e-6)
    assert forward(arrays()) == pytest.approx(found.loss, rel=1e-6)
    assert "linear_cross_entropy" not in plain.report.rules
