"""A step's state as one of several ranks holds it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.distributed.communicator import Communicator
from treadle.distributed.shards import Pieces
from treadle.step.batches import Arrays
from treadle.step.loading import COUNTERS, Counters
from treadle.step.train_step import TrainStep


class Piece(NamedTuple):
    """A rank's rows of an array, and how the whole is cut into rows."""

    rows: np.ndarray
    pieces: Pieces


def communicator_of(step: TrainStep) -> Communicator:
    """The ranks that make a step together."""
    return step._ranks.communicator


def local_state(step: TrainStep) -> tuple[Arrays, dict[str, Piece]]:
    """`state_dict` as this rank holds it: what every rank has, and its rows of the rest."""
    ranks = step._ranks
    names, sharded = {n: ranks.held_name(own) for n, own in step._names().items()}, ranks.sharded
    values = step.session.read(names.values())
    whole = {name: values[own] for name, own in names.items() if own not in sharded}
    rows = {n: Piece(values[own], sharded[own]) for n, own in names.items() if own in sharded}
    done = step._done
    counters = Counters(step._seed % 2**64, done.steps, done.micro, step._stream)
    return whole | {COUNTERS: counters.array()}, rows


def wrong_here(step: TrainStep, whole: Arrays, rows: dict[str, Piece]) -> tuple[str, ...]:
    """Names of what is not finite of a state that was just taken, on this rank."""
    return step.not_finite(whole | {n: piece.rows for n, piece in rows.items()})
