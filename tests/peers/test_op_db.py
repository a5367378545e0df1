"""PyTorch's own database of operators: values, dtypes and gradients, at once and compiled twice.

Each operator agrees, or differs in a way that `differences.toml` lists: absence is one.
"""

from __future__ import annotations

import pytest
from peer_calls import call_for
from peer_differences import DIFFERENCES, NUMBERS, reasons, unlisted
from peer_operators import OPERATORS, Outcome, examine, names, refusals

PRESENT = [n for n in names() if call_for(OPERATORS[n].name) is not None]
MOST = 12  # samples of an operator in each dtype
QUICK = {
    *PRESENT[::9],
    *(
        "sum",
        "prod",
        "cumsum",
        "cumprod",
        "round",
        "trunc",
        "pow",
        "linspace",
        "div.trunc_rounding",
    ),
    *("nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic", "lgamma"),
}


@pytest.mark.parametrize("name", sorted(QUICK))
def test_first_samples_agree(name: str) -> None:
    assert not unlisted(name, examine(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESENT)
def test_samples_agree_or_are_listed(name: str) -> None:
    assert not unlisted(name, examine(name, MOST))


@pytest.mark.slow
def test_what_pytorch_refuses_is_refused() -> None:
    """By a named error; in 95 of 100 calls, but for numbers in the place of tensors."""
    found = [
        (name, Outcome(f"error {o.kind}", o.sample, o.detail))
        for name in PRESENT
        for o in refusals(name)
    ]
    assert not [line for name, o in found for line in unlisted(name, [o])]
    kinds = [o.kind for name, o in found if NUMBERS not in reasons(name, o)]
    refused, accepted = kinds.count("error refused"), kinds.count("error accepted")
    assert refused >= 0.95 * (refused + accepted), (refused, accepted)


@pytest.mark.slow
def test_absent_operators_are_listed_and_absent() -> None:
    absent = {n for n in names() if n not in PRESENT}
    listed = {n for d in DIFFERENCES if "absent" in d.kinds for n in d.operators}
    assert absent == {n for n in listed if n in OPERATORS}
