"""Loaders: batches in an order that a seed decides, from a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.numbers import check_integer, check_whole
from treadle.base.trees import Tree
from treadle.data.consistency import Consistency, stacked
from treadle.data.shuffle import permutation
from treadle.data.sources import Arrays, Ordered, Source
from treadle.distributed.environment import launched_rank, launched_size

State = dict[str, int]


@runtime_checkable
class Loader(Protocol):
    """Batches, pass after pass, and a position that can be saved and loaded."""

    def __iter__(self) -> Iterator[Tree]: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, int]) -> None: ...


@runtime_checkable
class Rewindable(Protocol):
    """A loader whose next pass can be made a whole one."""

    def begin_again(self) -> None:
        """The next pass begins at its first batch, wherever one that was left began."""
        ...


class ArrayLoader:
    """Batches of rows of arrays (a tree of them, memory maps too) or of a `Source`.

    A `for` over it is one pass; each shuffled pass has an order of its own, which the seed and the
    number of the pass decide. `drop_last` leaves out a last batch that is not full: by default
    where rows are shuffled, which is for training, and not where they are in order. With `local`
    each of several ranks gets its own rows of every batch, as DataParallel(local=True) expects;
    `batch_size` and positions are those of the whole batch, whatever the number of ranks.
    """

    def __init__(
        self,
        data: Tree,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool | None = None,
        local: bool = False,
    ):
        self._source = data if isinstance(data, Source) else Arrays(data, "ArrayLoader")
        self._size = check_whole("ArrayLoader", "batch_size", batch_size)
        self._shuffle, self._seed = bool(shuffle), check_integer("ArrayLoader", "seed", seed)
        self._drop_last = self._shuffle if drop_last is None else bool(drop_last)
        self._epoch, self._batch = 0, 0  # what was handed over
        self._start = 0  # where a pass over this epoch begins: not 0 after load_state_dict
        if not len(self):
            raise ArgumentError(
                "ArrayLoader",
                f"{len(self._source)} rows do not fill a batch of {batch_size}",
                "Use smaller batches, or drop_last=False.",
            )
        self._rank, self._ranks = (launched_rank(), launched_size()) if local else (0, 1)
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Every rank gets rows of every batch."""
        rows, size = len(self._source), self._size
        rest = 0 if self._drop_last else rows % size
        fewest = min(rest or size, size)
        if size % self._ranks or fewest < self._ranks:
            cause = f"batches of {size} rows" if size % self._ranks else f"a last batch of {rest}"
            raise ArgumentError(
                "ArrayLoader",
                f"{cause} cannot be shared out to {self._ranks} ranks",
                f"Use a batch_size that is a multiple of {self._ranks}, and drop_last=True.",
            )

    def _own(self, rows: np.ndarray) -> np.ndarray:
        """This rank's rows of a batch."""
        start, stop = (len(rows) * (self._rank + i) // self._ranks for i in (0, 1))
        return rows[start:stop]

    def __len__(self) -> int:
        """Batches of a whole pass."""
        rows = len(self._source)
        return rows // self._size if self._drop_last else -(-rows // self._size)

    @property
    def epoch(self) -> int:
        """Passes that were finished."""
        return self._epoch

    def __iter__(self) -> Iterator[Tree]:
        """The rest of the pass. One that is left early begins again where it began."""
        self._batch = self._start
        return self._rest(self._epoch, self._start)

    def _rest(self, epoch: int, start: int) -> Iterator[Tree]:
        size, order = self._size, self._order(epoch)
        for i in range(start, len(self)):
            batch = self._source.gather(self._own(order[i * size : (i + 1) * size]))
            self._epoch, self._batch = epoch, i + 1
            yield batch
        self._epoch, self._batch, self._start = epoch + 1, 0, 0

    def _order(self, epoch: int) -> np.ndarray:
        rows = len(self._source)
        if not self._shuffle:
            return np.arange(rows)
        if isinstance(self._source, Ordered):
            return self._source.order(self._seed, epoch)
        return permutation(self._seed, epoch, rows)

    @cached_property
    def _identity(self) -> State:
        """What must be the same for a position to mean the same batches."""
        own = self._source.identity() if isinstance(self._source, Ordered) else {}
        return own | {
            "rows": len(self._source),
            "batch_size": int(self._size),
            "shuffle": int(self._shuffle),
            "drop_last": int(self._drop_last),
            "seed": int(self._seed),
        }

    def state_dict(self) -> State:
        """The position after the last batch that was handed over, and what it depends on."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass continues there."""
        epoch, batch = checked_position("ArrayLoader", state, self._identity)
        if batch > len(self):
            raise LoadError("ArrayLoader", f"the state is at batch {batch}, a pass has {len(self)}")
        self._epoch, self._batch, self._start = epoch, batch, batch

    def begin_again(self) -> None:
        """The next pass begins at its first batch, wherever one that was left began."""
        self._start = 0


def checked_position(
    operation: str, state: Mapping[str, int], identity: Mapping[str, int]
) -> tuple[int, int]:
    """Epoch and batch of a state, if it is one and of the same data."""
    found = {k: state.get(k) for k in ("epoch", "batch", *identity)}
    wrong = [k for k, v in found.items() if not isinstance(v, (int, np.integer))]
    if wrong:
        raise LoadError(
            operation,
            f"the state has no whole number as {', '.join(wrong)}",
            "Load what state_dict of such a loader gave.",
        )
    numbers = {k: int(v) for k, v in found.items() if v is not None}
    other = [f"{k} was {numbers[k]} and is {v}" for k, v in identity.items() if numbers[k] != v]
    if other:
        raise LoadError(
            operation,
            f"the state is of other data: {'; '.join(other)}",
            "A position means the same batches only with the same data, sizes and seed.",
        )
    if numbers["epoch"] < 0 or numbers["batch"] < 0:
        raise LoadError(
            operation, f"the state is at epoch {numbers['epoch']}, batch {numbers['batch']}"
        )
    return numbers["epoch"], numbers["batch"]


class IterableLoader:
    """Batches from anything that can be iterated, or from a function that makes it for an epoch.

    With `batch_size`, items are rows, which are stacked. Keys, dtypes and ranks must not change
    from batch to batch, nor sizes but the first, unless `varying=True`. Loading a position makes
    the iterable anew and skips what was handed over, so its order must not change either, nor its
    length where it has one.
    """

    def __init__(
        self,
        data: Iterable[Tree] | Callable[[int], Iterable[Tree]],
        batch_size: int | None = None,
        *,
        drop_last: bool = False,
        varying: bool = False,
    ):
        is_arrays = isinstance(data, tuple) and all(isinstance(a, np.ndarray) for a in data)
        if is_arrays or isinstance(data, (dict, str, bytes, np.ndarray)):
            raise ArgumentError(
                "IterableLoader",
                f"the data is one {type(data).__name__}, not an iterable of batches",
                "For arrays whose first axis counts rows use ArrayLoader(data, batch_size).",
            )
        if not isinstance(data, Iterable) and not callable(data):
            raise ArgumentError(
                "IterableLoader",
                f"{data!r} cannot be iterated",
                "Pass an iterable of batches, or a function of the epoch that makes one.",
            )
        if batch_size is not None:
            check_whole("IterableLoader", "batch_size", batch_size)
        self._data, self._size, self._drop_last = data, batch_size, drop_last
        self._consistency = Consistency("IterableLoader", varying)
        self._epoch, self._batch, self._start = 0, 0, 0
        self._spent: object = None  # an iterator that gives its items only once

    def __iter__(self) -> Iterator[Tree]:
        """The rest of the pass. One that is left early begins again where it began."""
        self._batch = self._start
        return self._rest(self._epoch, self._start)

    def _rest(self, epoch: int, start: int) -> Iterator[Tree]:
        count = 0
        for count, batch in enumerate(self._batches(epoch), 1):
            if count <= start:
                continue
            self._consistency.check(batch, f"epoch {epoch}, batch {count - 1}")
            self._epoch, self._batch = epoch, count
            yield batch
        if count < start or not count:
            raise ArgumentError(
                "IterableLoader",
                f"epoch {epoch} has {count} batches" + (f", {start} were taken" if start else ""),
                "The data is empty or not what it was.",
            )
        self._epoch, self._batch, self._start = epoch + 1, 0, 0

    def _batches(self, epoch: int) -> Iterator[Tree]:
        made = self._data if isinstance(self._data, Iterable) else self._data(epoch)
        items = iter(made)
        if items is self._data:
            if self._spent is items:
                raise ArgumentError(
                    "IterableLoader",
                    f"the data is a {type(items).__name__}, which gives its items once",
                    "Pass a list, or a function of the epoch that makes a new one.",
                )
            self._spent = items
        return items if self._size is None else self._stack(items, self._size)

    def _stack(self, items: Iterator[Tree], size: int) -> Iterator[Tree]:
        rows: list[Tree] = []
        for row in items:
            rows.append(row)
            if len(rows) == size:
                yield stacked("IterableLoader", rows)
                rows = []
        if rows and not self._drop_last:
            yield stacked("IterableLoader", rows)

    @cached_property
    def _identity(self) -> State:
        """What must be the same for a position to mean the same batches, where that is known."""
        found = {} if self._size is None else {"batch_size": int(self._size)}
        if isinstance(self._data, Sized):
            with suppress(TypeError):  # a torch DataLoader of a stream has no length after all
                found["items"] = len(self._data)
        return found

    def state_dict(self) -> State:
        """The position after the last batch that was handed over, and what it depends on."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass continues there."""
        known = {k: v for k, v in self._identity.items() if k in state}  # older states have none
        self._epoch, self._batch = checked_position("IterableLoader", state, known)
        self._start = self._batch

    def begin_again(self) -> None:
        """The next pass begins at its first batch, wherever one that was left began."""
        self._start = 0


def as_loader(data: object) -> Loader:
    """A loader as it is; any other iterable of batches as an `IterableLoader`."""
    return data if isinstance(data, Loader) else IterableLoader(data)  # type: ignore[arg-type]
