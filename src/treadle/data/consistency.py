"""That batches of one loader have the same arrays, and rows of one batch too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.base import trees
from treadle.base.arrays import FILL, lost_mask
from treadle.base.errors import BatchError
from treadle.base.trees import Structure, Tree


@dataclass(frozen=True, slots=True)
class _Form:
    """A batch without its numbers."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    structure: Structure

    @staticmethod
    def of(batch: Tree) -> _Form:
        leaves, structure = trees.flatten(batch)
        arrays = {n or "the array": np.asarray(a) for n, a in zip(trees.paths(batch), leaves)}
        return _Form(
            {n: a.shape for n, a in arrays.items()},
            {n: a.dtype.name for n, a in arrays.items()},
            structure,
        )


class Consistency:
    """Compares each batch with the first one."""

    def __init__(self, operation: str, varying: bool = False):
        self._operation, self._varying = operation, varying
        self._first: _Form | None = None

    def check(self, batch: Tree, place: str) -> None:
        """An error that lists everything in which a batch differs from the first."""
        for name, leaf in zip(trees.paths(batch), trees.flatten(batch)[0], strict=True):
            lost = lost_mask(leaf)
            if lost is not None:
                raise BatchError(self._operation, f"{place}: {name or 'the array'} {lost}", FILL)
        form = _Form.of(batch)
        if not form.shapes:
            raise BatchError(self._operation, f"{place} is {batch!r}: no arrays", _FORMS)
        if self._first is None:
            self._first = form
            return
        wrong = _differences(self._first, form, self._varying)
        if wrong:
            raise BatchError(
                self._operation, f"{place} differs from the first: {'; '.join(wrong)}", _FORMS
            )


_FORMS = (
    "Batches are dicts (or tuples, lists) of arrays with the same keys, dtypes and sizes; "
    "only the number of rows may change. varying=True lets all sizes change."
)


def _differences(first: _Form, form: _Form, varying: bool) -> list[str]:
    wrong = [f"{n} is missing" for n in first.shapes if n not in form.shapes]
    wrong += [f"{n} is unexpected" for n in form.shapes if n not in first.shapes]
    if not wrong and first.structure != form.structure:
        wrong.append("its containers are others")
    rows: dict[int, tuple[str, int]] = {}  # what a number of rows of the first batch became
    for name, shape in form.shapes.items():
        expected = first.shapes.get(name)
        if expected is None:
            continue
        if form.dtypes[name] != first.dtypes[name]:
            wrong.append(f"{name} is {form.dtypes[name]}, not {first.dtypes[name]}")
        is_other = len(shape) != len(expected) or (not varying and shape[1:] != expected[1:])
        if is_other:
            wrong.append(f"{name} has the shape {shape}, not {expected}")
        elif shape:
            other, count = rows.setdefault(expected[0], (name, shape[0]))
            if count != shape[0]:
                wrong.append(f"{other} has {count} rows, {name} has {shape[0]}")
    return wrong


def stacked(operation: str, rows: list[Tree]) -> Tree:
    """Rows as one batch."""
    first, structure = trees.flatten(rows[0])
    consistency = Consistency(operation)
    columns: list[list[object]] = [[] for _ in first]
    for i, row in enumerate(rows):
        _check_row(consistency, row, i)
        for column, leaf in zip(columns, trees.flatten(row)[0], strict=True):
            column.append(leaf)
    return structure.rebuild(np.stack([np.asarray(v) for v in column]) for column in columns)


def _check_row(consistency: Consistency, row: Tree, number: int) -> None:
    """A row as a batch of one, so that all of its sizes are compared."""
    single = trees.map_leaves(lambda leaf: np.asanyarray(leaf)[None], row)
    consistency.check(single, f"row {number} of a batch")
