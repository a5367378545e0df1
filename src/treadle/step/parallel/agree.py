"""What all ranks must have in common, compared before anything is trained."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle.base.errors import DistributedError
from treadle.base.version import __version__
from treadle.distributed.communicator import Communicator
from treadle.distributed.config import DataParallel
from treadle.ir.graph import Graph
from treadle.ir.text import to_text
from treadle.nn.tracing import INPUT_PREFIX, Inputs
from treadle.pipeline import StepRecipe

Facts = dict[str, str]
SHOWN = 12  # digits of a hash in a message


def facts_of(recipe: StepRecipe, config: DataParallel, inputs: Inputs, seed: int) -> Facts:
    """What is known before anything is traced."""
    batch = [f"{name.removeprefix(INPUT_PREFIX)} {type_}" for name, type_ in inputs.types]
    return {
        "version of Treadle": __version__,
        "parallel": str(config),
        "batch": ", ".join(batch),
        "seed": str(seed),
        "accumulate": str(recipe.accumulate),
        "precision": recipe.precision.name,
        "options": str(recipe.options),
    }


def graph_facts(shard: Graph, update: Graph, hyper: Mapping[str, float]) -> Facts:
    """What is known when everything is traced; the update's shapes are those of the ranks."""
    return {
        "program of a shard": _digest(to_text(shard)),
        "update": _digest(to_text(update)),
        "numbers of the optimizer": str(dict(hyper)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN]


def check_facts(comm: Communicator, facts: Facts) -> None:
    """The same everywhere, or an error on every rank that says what two of them have."""
    if comm.size == 1:
        return
    told = [json.loads(text) for text in comm.texts(json.dumps(facts))]
    for what, first in told[0].items():
        for rank, other in enumerate(told):
            if other.get(what) != first:
                raise DistributedError(
                    "compile_step",
                    f"ranks 0 and {rank} differ in their {what}: {first} and {other.get(what)}",
                    "All ranks compile the same step with the same arguments.",
                )


def check_batch_digests(comm: Communicator, arrays: Mapping[str, Any]) -> None:
    """That all ranks were given the same batch."""
    digest = 0
    for name in sorted(arrays):
        digest = zlib.crc32(np.ascontiguousarray(np.asarray(arrays[name])).data, digest)
    every = np.zeros(comm.size, np.uint32)
    comm.wait([comm.all_gather(np.array([digest], np.uint32), every)])
    other = np.flatnonzero(every != every[0])
    if len(other):
        raise DistributedError(
            "step",
            f"ranks 0 and {other[0]} were given different batches (checksums {every[0]:08x} and "
            f"{every[other[0]]:08x})",
            "Give every rank the whole batch, or its own rows with DataParallel(local=True).",
        )
