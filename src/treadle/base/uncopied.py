"""Objects that hold programs and memory of a device, which cannot be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from treadle.base.errors import CopyError

Class = TypeVar("Class", bound=type)


def uncopied(remedy: str) -> Callable[[Class], Class]:
    """Mark a class: `copy.copy`, `copy.deepcopy` and `pickle` of its objects raise `CopyError`."""

    def marked(cls: Class) -> Class:
        def refuse(self: object, protocol: int) -> NoReturn:
            cause = f"a {cls.__name__} holds compiled programs and memory of its device"
            raise CopyError("copy", f"{cause}: it cannot be copied or pickled", remedy)

        # What copy and pickle ask for. It is set on the class, so that no base class is needed.
        type.__setattr__(cls, "__reduce_ex__", refuse)
        return cls

    return marked
