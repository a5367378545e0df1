"""Errors a user can cause. Each says the operation, the values, the cause and the remedy."""

from __future__ import annotations

from treadle.base.origin import Origin, user_origin


class TreadleError(Exception):
    """Base of all errors that Treadle raises on purpose.

    The message reads `operation: cause. remedy [file:line in function]`; `cause` shows the values.
    """

    def __init__(
        self, operation: str, cause: str, remedy: str = "", *, origin: Origin | None = None
    ):
        self.operation = operation
        self.cause = cause
        self.remedy = remedy
        self.origin = origin or user_origin()
        sentences = [f"{operation}: {cause}" + ("" if cause.endswith((".", "?")) else ".")]
        if remedy:
            sentences.append(remedy)
        if self.origin is not None:
            sentences.append(f"[{self.origin}]")
        super().__init__(" ".join(sentences))


class ShapeError(TreadleError, ValueError):
    """Shapes do not fit the operation."""


class DTypeError(TreadleError, TypeError):
    """Element types do not fit the operation."""


class AxisError(TreadleError, IndexError):
    """An axis does not exist or is named twice."""


class IndexRangeError(TreadleError, IndexError):
    """An index lies outside the axis it indexes."""


class ArgumentError(TreadleError, ValueError):
    """An argument has a value the operation does not accept."""


class TraceError(TreadleError, TypeError):
    """A traced tensor is used where only a concrete value can be, or in the wrong trace."""


class NameTakenError(TreadleError, ValueError):
    """A name that must be unique is used twice."""


class UnknownNameError(TreadleError, AttributeError):
    """A name that is not there; the remedy says what stands in its place."""


class GradientError(TreadleError, ValueError):
    """Something cannot be differentiated, or a user-supplied gradient does not fit."""


class GraphError(TreadleError, ValueError):
    """A graph breaks an invariant of the IR."""


class ParseError(TreadleError, ValueError):
    """Text that is not a graph."""


class BatchError(TreadleError, ValueError):
    """A batch does not have the arrays, shapes or dtypes that were compiled for."""


class LoadError(TreadleError, ValueError):
    """Values that are loaded do not fit, or a file is not what it should be."""


class SaveError(TreadleError, OSError):
    """A file cannot be written; what was there before is as it was."""


class DeviceError(TreadleError, RuntimeError):
    """A device that is not there or cannot do what is asked."""


class DistributedError(TreadleError, RuntimeError):
    """Ranks that do not fit together, or one that the others wait for in vain."""


class OutOfMemoryError(DeviceError, MemoryError):
    """Something needs more memory than there is."""


class CacheWarning(UserWarning):
    """The plan cache cannot be used; everything goes on without it."""


class GradientShapeError(ShapeError):
    """A gradient has another shape than its parameter: see `parameter`, `expected`, `got`."""

    def __init__(
        self, operation: str, parameter: str, expected: tuple[int, ...], got: tuple[int, ...]
    ):
        self.parameter, self.expected, self.got = parameter, expected, got
        super().__init__(
            operation,
            f"the gradient of {parameter} has the shape {got}, expected {expected}",
            "Gradients have the shape of their parameter.",
        )


class CopyError(TreadleError, TypeError):
    """A step, program or trainer is copied or pickled."""


class UnknownParameterError(TreadleError, LookupError):
    """A gradient for a parameter that was not registered."""


class NothingAccumulatedError(TreadleError, RuntimeError):
    """Gradients are asked for before any was accumulated."""


class AccumulatorFullError(TreadleError, RuntimeError):
    """Another micro-batch where an update is due."""


class CheckpointError(TreadleError, RuntimeError):
    """A checkpoint cannot be written, is damaged, does not fit, or is not there."""


class CallbackError(TreadleError, RuntimeError):
    """A callback raised an error, which is the cause: see `callback`, `hook` and `__cause__`."""

    def __init__(self, callback: object, hook: str, error: BaseException, place: str, remedy: str):
        self.callback, self.hook = callback, hook
        name = type(callback).__name__
        super().__init__("fit", f"the callback {name} raised {error!r} in {hook}, {place}", remedy)


class NotFiniteError(TreadleError, ArithmeticError):
    """The loss or a value of a step became NaN or infinite.

    See `step`, how many updates there were; `loss`, None outside of a run; `names` of the values
    that are not finite, parameters first; and `checkpoint`, the path of the last good one.
    """

    def __init__(
        self,
        operation: str,
        cause: str,
        remedy: str,
        *,
        step: int,
        loss: float | None = None,
        names: tuple[str, ...] = (),
        checkpoint: object = None,
    ):
        self.step, self.loss, self.names, self.checkpoint = step, loss, names, checkpoint
        super().__init__(operation, cause, remedy)


class UnreachedWarning(UserWarning):
    """A gradient was asked for something that the result does not depend on."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over, or the same bits cannot be promised after loading."""
