"""A step is traced as one of its shards: the graphs of a data-parallel step."""

from __future__ import annotations

from treadle.backends.passing import Passing
from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape
from treadle.frontend.binding import summing_over
from treadle.ir.graph import Graph
from treadle.nn.tracing import Inputs
from treadle.optim.append import UpdatePlan, trace_eval_params
from treadle.pipeline import CompileReport, StepRecipe, build_gradients, check_of, trace_loss
from treadle.step.parallel.programs import Parallel, ParallelPrograms
from treadle.step.parallel.random import as_of_shard, sites
from treadle.step.parallel.stages import refuse_single_norms


def build_programs(
    recipe: StepRecipe, plan: UpdatePlan, parallel: Parallel, given: Inputs, report: CompileReport
) -> ParallelPrograms:
    """The programs for what a call is given on this rank."""
    config, shard = parallel.config, parallel.shard_inputs(given)
    with recipe.naming():
        _refuse_evaluation(plan, parallel)
        with summing_over(config.shards if config.synchronises else 1):
            passed = Passing(report, recipe.options, check_of(recipe.options))
            graph, _ = build_gradients(recipe, plan, shard, report, passed)
            passed.finish()
        if config.synchronises:
            refuse_single_norms(graph)
        if sites(graph):
            whole = _whole_sites(recipe, plan, parallel.whole_inputs(shard), graph)
            graph = as_of_shard(graph, whole, config.shards)
        found = ParallelPrograms(graph, recipe, plan, parallel, given, report)
        _ = found.update_graph  # an optimizer that cannot be sharded is refused here
        return found


def _whole_sites(
    recipe: StepRecipe, plan: UpdatePlan, whole: Inputs, shard: Graph
) -> dict[int, Shape]:
    """Shapes of random numbers in the whole batch; where that cannot be traced, longer rows."""
    try:
        return sites(trace_loss(recipe, plan, whole))
    except Exception:  # a loss that is one of shards alone
        shards = recipe.shards
        return {s: (n[0] * shards, *n[1:]) if n else n for s, n in sites(shard).items()}


def _refuse_evaluation(plan: UpdatePlan, parallel: Parallel) -> None:
    """Evaluation with other parameters reads all of the optimizer's state."""
    if parallel.config.shard_optimizer and trace_eval_params(plan) is not None:
        raise ArgumentError(
            "compile_step",
            f"the optimizer {plan.optimizer.name} evaluates with parameters of its own, which it "
            "makes of its whole state",
            "Compile with DataParallel(shard_optimizer=False).",
        )
