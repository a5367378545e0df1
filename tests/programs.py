"""Training steps of random programs, as graphs with values for their leaves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.base.errors import IndexRangeError
from treadle.domains.philox import make_key
from treadle.frontend.scopes import RANDOM_STATE
from treadle.fuzz.cases import TrainingCase
from treadle.fuzz.generate import generate
from treadle.fuzz.program import TRAINING
from treadle.ir.graph import Graph


@dataclass(frozen=True)
class Training:
    """A whole step as a graph, and values for its leaves."""

    graph: Graph
    values: dict[str, np.ndarray]


def random_training(seed: int) -> Training:
    """A training step of a random model with a random optimizer, after one step was done."""
    case = TrainingCase(generate(seed, seed, mode=TRAINING))
    step = case.compiled("oracle")
    try:
        step(case.batches[0])
    except IndexRangeError:  # an input that serves as indices of two axes: the next program
        return random_training(seed + 1)
    values = {f"batch:{name}": array for name, array in case.batches[1].items()}
    values |= step.session.values | {RANDOM_STATE: make_key(seed, 1)}
    return Training(step.graph, {name: values[name] for name in step.graph.leaves})
