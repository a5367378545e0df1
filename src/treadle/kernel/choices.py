"""What a measured search may try: fields of a `Target` that no model of cost settles.

The first candidates of a choice are those that changed whole steps the most when they were tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle.kernel.target import Target

Chosen = tuple[tuple[str, Any], ...]  # fields and their values, none twice


@dataclass(frozen=True, slots=True)
class Choice:
    """A field by its path, and what it may be beside what the target has."""

    name: str
    values: tuple[Any, ...]


CPU_CHOICES = (
    # Recompute or materialize: operations that are repeated rather than stored.
    Choice("materialization.most_operations", (4, 64)),
    Choice("materialization.waiting_bytes", (1 << 22, 1 << 28)),
    # Fuse or store: bytes that the iteration of a fused kernel may write.
    Choice("cache", (1 << 19, 1 << 23)),
    # Blocks of matmuls: rows, depth, and depths that are summed in parts.
    Choice("matmuls.row_blocks", (((512, 32), (0, 8)), ((512, 128), (256, 32), (0, 8)))),
    Choice("matmuls.depth", (512, 2048)),
    Choice("matmuls.few_rows", (1, 16)),
    Choice("matmuls.split_depth", (2048, 1 << 30)),
    Choice("rewriting.attention_block", (32, 128)),
    Choice("rewriting.blocks_attention", (False,)),
    Choice("tasks.operations", (1 << 13, 1 << 17)),
)
# Bytes that may wait for the backward pass: all of them, so that nothing is computed anew there.
KEEP_ALL: Chosen = (("materialization.waiting_bytes", 1 << 60),)
GPU_CHOICES = (
    Choice("materialization.most_operations", (4, 64)),
    Choice("materialization.waiting_bytes", (1 << 60,)),
    # Library or own kernel, and equal matmuls of layers in batches or one by one.
    Choice("matmuls.flops_for_library", (1 << 12, 1 << 22)),
    Choice("matmuls.busy_tiles", (0, 2048)),
    Choice("matmuls.finished_blocks", (132, 1 << 30)),
    # Column sums within the kernel that makes the rows, or in one of their own.
    Choice("fuses_column_sums", (False,)),
    Choice("mapping.threads", (128, 512)),
    Choice("mapping.few_threads", (256, 1024)),
    Choice("reductions.threads", (1 << 17, 1 << 18)),
    Choice("reductions.blocks", (256, 4096)),
    Choice("streaming.most_rows", (4096, 16384)),
    Choice("mapping.is_cooperative", (False,)),
)


def choices_of(target: Target) -> Sequence[Choice]:
    return CPU_CHOICES if target.mapping is None else GPU_CHOICES


def with_choices(target: Target, chosen: Iterable[tuple[str, Any]]) -> Target:
    """The target with some fields as they were chosen."""
    for name, value in chosen:
        section, _, field = name.rpartition(".")
        if section:
            field, value = section, replace(getattr(target, section), **{field: value})
        target = replace(target, **{field: value})
    return target


def numbered(chosen: Chosen, choices: Sequence[Choice]) -> dict[str, int]:
    """Values as their places among the candidates, for a file."""
    known = {choice.name: choice.values for choice in choices}
    return {name: known[name].index(value) for name, value in chosen}


def from_numbers(numbers: object, choices: Sequence[Choice]) -> Chosen | None:
    """What was numbered; None for anything else, as a file may hold anything."""
    if not isinstance(numbers, Mapping):
        return None
    known, found = {choice.name: choice.values for choice in choices}, []
    for name, place in numbers.items():
        values = known.get(name, ())
        if type(place) is not int or not 0 <= place < len(values):
            return None
        found.append((name, values[place]))
    return tuple(found)
