"""Random training programs compiled: forward, backward and update, as exact as their ops promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from backend import THREADS, allowed, assert_within, build, rounded_inputs, same_bits
from programs import GREATEST, Training, random_training
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import OutputKind
from treadle.ir.op import OPS
from treadle.ir.ops.leaves import NAMED_LEAVES

# A seed has nothing to shrink to.
SETTINGS = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}
LOTS, EACH = 4, 80  # at least 300 together, in lots that several processes can share
SEEDS = st.integers(0, 2**40)


MOST_NOISE = 0.05  # of a tensor's largest element


def prepared(seed: int, steps: int) -> tuple[Training, dict[str, np.ndarray], list[np.ndarray]]:
    """A program, values of a size that says something about rounding, and what errors may be."""
    training = random_training(seed, steps)
    values = rounded_inputs(training.graph, training.values)
    found = evaluate_float64(training.graph, values)
    sizes = [np.abs(x).max(initial=0) for x in found]
    assume(max(sizes) < GREATEST)
    # Where rounding is much of a result (a maximum of what a narrow dtype makes equal, say), how
    # far what follows may be off is not known either.
    bounds = allowed(training.graph, values)
    assume(all(np.all(b <= MOST_NOISE * (s + 0.1)) for b, s in zip(bounds, sizes, strict=True)))
    return training, values, bounds


@pytest.mark.parametrize("lot", range(LOTS))
@given(SEEDS, st.integers(1, 6))
@example(2_270_233_552, 4)  # with lot 3: sorts values that float32 makes equal
@settings(max_examples=EACH, **SETTINGS)
def test_random_training_programs(lot: int, seed: int, steps: int) -> None:
    training, values, bounds = prepared(LOTS * seed + lot, steps)
    built = build(training.graph, in_place=True, shared=True)
    found = built.on(1).run(values)
    assert_within(training.graph, values, found, bounds=bounds)
    assert same_bits(built.on(THREADS[seed % 4]).run(values), found)


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=15, **SETTINGS)
def test_random_training_programs_kept_in_memory(seed: int, steps: int) -> None:
    training, values, bounds = prepared(seed, steps)
    built = build(training.graph, fuse=False)
    assert_within(training.graph, values, built.on(2).run(values), bounds=bounds)


def test_the_programs_are_made_of_every_op() -> None:
    used: set[str] = set()
    for seed in range(150):
        graph = random_training(seed, 6).graph
        used.update(n.op.name for n in graph.nodes)
        kinds = {o.kind for o in graph.outputs}
        assert {OutputKind.UPDATE, OutputKind.METRIC, OutputKind.RESULT} <= kinds
    wanted = {op.name for op in OPS.values() if op not in NAMED_LEAVES}
    assert wanted <= used
