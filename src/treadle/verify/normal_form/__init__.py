"""A normal form of tensor expressions that decides equality for all sizes: see `decide`."""

from treadle.verify.normal_form.decide import (
    EXACT,
    NormalForm,
    Outcome,
    Verdict,
    equal,
    of,
)
from treadle.verify.normal_form.functions import Assumption
from treadle.verify.normal_form.sizes import Sizes, generic

__all__ = [
    "EXACT",
    "Assumption",
    "NormalForm",
    "Outcome",
    "Sizes",
    "Verdict",
    "equal",
    "generic",
    "of",
]
