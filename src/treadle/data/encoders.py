"""Numbers that networks like, from numbers and names as they come; and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError, ShapeError

ROWS = 1 << 16  # rows that are taken at a time, so that a memory map need not fit


@dataclass(frozen=True, eq=False)
class Standardiser:
    """Columns with mean 0 and deviation 1. `Standardiser.fit(x)` measures them."""

    mean: np.ndarray
    scale: np.ndarray  # the deviation; 1 where a column is constant

    @classmethod
    def fit(cls, x: np.ndarray) -> Standardiser:
        """Mean and deviation over the first axis, in float64, a piece at a time."""
        array = np.asarray(x)
        if array.ndim == 0 or len(array) == 0 or array.dtype.kind not in "biuf":
            raise ArgumentError(
                "Standardiser.fit",
                f"the data is {array.dtype} of shape {array.shape}",
                "It has rows of numbers.",
            )
        count, mean, squares = 0, np.zeros(array.shape[1:]), np.zeros(array.shape[1:])
        for start in range(0, len(array), ROWS):
            part = array[start : start + ROWS].astype(np.float64)
            _refuse_gaps(part, start)
            added, own = len(part), part.mean(0)
            both = count + added
            shift = own - mean
            squares += ((part - own) ** 2).sum(0) + shift**2 * (count * added / both)
            mean += shift * (added / both)
            count = both
        deviation = np.sqrt(squares / count)
        # A constant column has a deviation of rounding errors only.
        is_constant = deviation <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return cls(mean, np.where(is_constant, 1.0, deviation))

    def transform(self, x: np.ndarray) -> np.ndarray:
        """(x − mean) / scale; float32, or float64 for float64."""
        array = self._checked("transform", x)
        return ((array - self.mean) / self.scale).astype(_float(array))

    def inverse_transform(self, x: np.ndarray) -> np.ndarray:
        """x · scale + mean."""
        array = self._checked("inverse_transform", x)
        return (array * self.scale + self.mean).astype(_float(array))

    def _checked(self, operation: str, x: np.ndarray) -> np.ndarray:
        array = np.asarray(x)
        if array.shape[1:] != self.mean.shape or not array.ndim:
            raise ShapeError(
                f"Standardiser.{operation}",
                f"rows of shape {array.shape[1:]}, fitted to {self.mean.shape}",
                "Pass the same columns in the same order.",
            )
        return array

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {"mean": self.mean.tolist(), "scale": self.scale.tolist()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Standardiser:
        """What `to_dict` gave."""
        try:
            mean = np.asarray(state["mean"], np.float64)
            scale = np.asarray(state["scale"], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise LoadError("Standardiser.from_dict", f"not a standardiser: {error!r}") from error
        if mean.shape != scale.shape or not (np.isfinite(mean) & (scale > 0)).all():
            raise LoadError("Standardiser.from_dict", "mean and scale do not fit")
        return cls(mean, scale)


def _float(array: np.ndarray) -> type:
    return np.float64 if array.dtype == np.float64 else np.float32


def _refuse_gaps(part: np.ndarray, start: int) -> None:
    if not np.isfinite(part).all():
        place = np.argwhere(~np.isfinite(part))[0]
        row, rest = start + int(place[0]), ", ".join(f"column {c}" for c in place[1:])
        raise ArgumentError(
            "Standardiser.fit",
            f"row {row}{', ' if rest else ''}{rest} is {part[tuple(place)]}",
            "Fill or drop what is missing first.",
        )


@dataclass(frozen=True)
class LabelEncoder:
    """Classes by name as 0, 1, 2, … in sorted order. `LabelEncoder.fit(values)` collects them."""

    classes: tuple[str | int | float | bool, ...]

    @classmethod
    def fit(cls, values: object) -> LabelEncoder:
        """Every value that occurs is a class."""
        array = _names("LabelEncoder.fit", values)
        if array.size == 0:
            raise ArgumentError("LabelEncoder.fit", "there are no values", "The data is empty.")
        return cls(tuple(np.unique(array).tolist()))

    def __len__(self) -> int:
        return len(self.classes)

    def transform(self, values: object) -> np.ndarray:
        """The number of each value's class, int32."""
        return self._numbers("LabelEncoder.transform", values)

    def _numbers(self, operation: str, values: object) -> np.ndarray:
        array, known = _names(operation, values), np.array(self.classes)
        if (array.dtype.kind == "U") != (known.dtype.kind == "U"):
            kinds = f"{array.dtype} among classes of {known.dtype}"
            raise ArgumentError(operation, kinds, "Use values of the same kind.")
        index = np.searchsorted(known, array).clip(0, len(known) - 1)
        is_new = known[index] != array
        if is_new.any():
            place = tuple(int(i) for i in np.argwhere(is_new)[0])
            raise ArgumentError(
                operation,
                f"{array[place].item()!r} (at {', '.join(map(str, place))}) is none of the "
                f"{len(known)} classes, such as {self.classes[0]!r}",
                "Fit on all the data, or drop such rows.",
            )
        return index.astype(np.int32)

    def inverse_transform(self, numbers: object) -> np.ndarray:
        """The class of each number."""
        index = np.asarray(numbers)
        if index.dtype.kind not in "iu" or (index < 0).any() or (index >= len(self)).any():
            raise ArgumentError(
                "LabelEncoder.inverse_transform",
                f"{index.dtype} not all from 0 to {len(self) - 1}",
                "Take the argmax of scores first.",
            )
        return np.array(self.classes)[index]

    def to_dict(self) -> dict[str, Any]:
        """A plain list, for JSON."""
        return {"classes": list(self.classes)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LabelEncoder:
        """What `to_dict` gave."""
        classes = state.get("classes")
        if not isinstance(classes, list) or not classes:
            raise LoadError("LabelEncoder.from_dict", "there is no list of classes")
        encoder = cls.fit(classes)
        if list(encoder.classes) != classes:
            raise LoadError("LabelEncoder.from_dict", "the classes are not sorted and different")
        return encoder


def _names(operation: str, values: object) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "biufU" or (array.dtype.kind == "f" and np.isnan(array).any()):
        raise ArgumentError(
            operation,
            f"values of {array.dtype}, or NaN among them, are no classes",
            "Use text or numbers.",
        )
    return array


@dataclass(frozen=True)
class OneHotEncoder:
    """Classes by name as rows of zeros with a 1. `OneHotEncoder.fit(values)` collects them."""

    labels: LabelEncoder

    @classmethod
    def fit(cls, values: object) -> OneHotEncoder:
        """Every value that occurs is a class, and has a column."""
        return cls(LabelEncoder.fit(values))

    @property
    def classes(self) -> tuple[str | int | float | bool, ...]:
        """What each column stands for."""
        return self.labels.classes

    def transform(self, values: object) -> np.ndarray:
        """float32, with one axis more than the values."""
        numbers = self.labels._numbers("OneHotEncoder.transform", values)
        return np.eye(len(self.labels), dtype=np.float32)[numbers]

    def inverse_transform(self, rows: np.ndarray) -> np.ndarray:
        """The class of the greatest in each row."""
        array = np.asarray(rows)
        if not array.ndim or array.shape[-1] != len(self.labels):
            raise ShapeError(
                "OneHotEncoder.inverse_transform",
                f"the shape {array.shape} for {len(self.labels)} classes",
            )
        return self.labels.inverse_transform(array.argmax(-1))

    def to_dict(self) -> dict[str, Any]:
        """A plain list, for JSON."""
        return self.labels.to_dict()

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> OneHotEncoder:
        """What `to_dict` gave."""
        return cls(LabelEncoder.from_dict(state))
