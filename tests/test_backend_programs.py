"""Random training programs compiled: forward, backward and update, as exact as their ops promise.

`treadle fuzz` runs them through the public surface. Here even the smallest kernels are cut into
tasks for all threads, updates are in place, and every tensor is kept in memory once.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from backend import THREADS, allowed, assert_within, build, rounded_inputs, same_bits
from programs import Training, random_training
from treadle.base.errors import UnreachedWarning
from treadle.domains.float64 import evaluate_float64

# A seed has nothing to shrink to.
SETTINGS = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}
LOTS, EACH = 4, 8  # in lots that several processes can share
SEEDS = st.integers(0, 2**40)


GREATEST = 1e4  # of values: larger ones say little about rounding
MOST_NOISE = 0.05  # of a tensor's largest element


def prepared(seed: int) -> tuple[Training, dict[str, np.ndarray], list[np.ndarray]]:
    """A program, values of a size that says something about rounding, and what errors may be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreachedWarning)
        training = random_training(seed)
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
@given(SEEDS)
@settings(max_examples=EACH, **SETTINGS)
def test_random_training_programs(lot: int, seed: int) -> None:
    training, values, bounds = prepared(LOTS * seed + lot)
    built = build(training.graph, in_place=True, shared=True)
    found = built.on(1).run(values)
    assert_within(training.graph, values, found, bounds=bounds)
    assert same_bits(built.on(THREADS[seed % 4]).run(values), found)


@given(SEEDS)
@settings(max_examples=4, **SETTINGS)
def test_random_training_programs_kept_in_memory(seed: int) -> None:
    training, values, bounds = prepared(seed)
    built = build(training.graph, fuse=False)
    assert_within(training.graph, values, built.on(2).run(values), bounds=bounds)
