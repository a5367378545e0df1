"""`td.rules`: rules of a user's own are proved, used, listed and removed, or refused with reasons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import treadle as td
from treadle.domains.field import equal_graphs
from treadle.egraph.added import added_rules
from treadle.egraph.language import own_rules
from treadle.egraph.optimize import optimise
from treadle.kernel.target import CPU
from treadle.rules.catalogue import every_rule
from treadle.verify.rule_catalogue import BY_DEFINITION, standing
from treadle.verify.rule_proofs import Status
from treadle.verify.rule_samples import SAMPLES

# A product with all of a big matrix, where one row of it is wanted.
ROW = "(slice :starts a :stops b :strides e (contract :x l :y r :out o :dtype d x y))"
OF_ROW = "(contract :x l :y r :out o :dtype d (slice :starts f :stops g :strides e x) y)"
BOUNDS = {
    "f": "(set a 1 0)",
    "g": "(set b 1 (at (shape x) 1))",
}
WHERE = [
    "(= l (list (at o 0) (at r 0)))",
    "(= r (list (at l 1) (at o 1)))",
    "(= (at a 1) 0)",
    "(= (at b 1) (at (shape y) 1))",
    "(= e (list 1 1))",
]
CASE = (
    "(x ((+ n m) k)) (y (k h)) (a (n 0)) (b ((+ n m) h)) (e (1 1)) "
    "(l (i j)) (r (j s)) (o (i s)) (d float32)"
)


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    for name in td.rules.added():
        td.rules.remove(name)


def test_a_rule_is_proved_and_used() -> None:
    def function(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        return (x @ y)[2:3]

    types = td.Spec((64, 64)), td.Spec((64, 64))
    graph = td.trace(function, *types)
    assert "row_of_product" not in optimise(graph, CPU).fired
    proof = td.rules.add("row_of_product", ROW, OF_ROW, WHERE, let=BOUNDS, cases=CASE)
    assert proof.status is Status.PROVED
    found = optimise(graph, CPU)
    assert found.fired["row_of_product"] == 1
    assert equal_graphs(graph, found.graph)


def test_rules_are_listed_and_removed() -> None:
    td.rules.add("two_exps", "(mul (exp x) (exp y))", "(exp (add x y))", statement="One exp.")
    assert td.rules.added() == {"two_exps": "One exp."}
    assert [r.name for r in added_rules()] == ["two_exps"]
    with pytest.raises(td.NameTakenError, match="there is a rule two_exps"):
        td.rules.add("two_exps", "(neg (neg x))", "x")
    td.rules.remove("two_exps")
    assert td.rules.added() == {}
    with pytest.raises(td.UnknownNameError, match="no rule two_exps was added"):
        td.rules.remove("two_exps")


def test_a_wrong_rule_is_refused_with_shapes_and_values() -> None:
    with pytest.raises(td.ArgumentError, match=r"x: float32\[2.*they are .* and ") as caught:
        td.rules.add("wrong", "(reduce_sum :axes a (mul x y))",
                     "(mul (reduce_sum :axes a x) (reduce_sum :axes a y))")  # fmt: skip
    assert "wrong is refused" in str(caught.value)
    assert td.rules.added() == {}


def test_what_is_not_decided_must_be_asked_for() -> None:
    rule = (
        "maxima",
        "(reduce_max :axes a (max x y))",
        "(max (reduce_max :axes a x) (reduce_max :axes a y))",
    )
    with pytest.raises(td.ArgumentError, match="unproved=True"):
        td.rules.add(*rule)
    assert td.rules.add(*rule, unproved=True).status is Status.UNDECIDED
    assert "maxima" in td.rules.added()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("one", "(swirl x)", "x"), "is no pattern"),
        (("one", "(neg x", "x"), "not closed"),
        (("one", "(neg x)", "(swirl x)"), "in to"),
        (("one", "(neg x)", "(neg x)", "(prime (rank x))"), "has no meaning"),
        (("no name", "(neg x)", "(neg x)"), "is no name"),
        (("one", "(sort :axis 0 x)", "x"), "no instance was found"),
    ],
)
def test_what_is_no_rule_is_refused(arguments: tuple[str, ...], cause: str) -> None:
    with pytest.raises(td.ArgumentError, match=cause):
        td.rules.add(*arguments)


def test_every_rule_in_python_has_its_sample_and_holds() -> None:
    """Rules that are data have tests of their own, and so has the page."""
    rules = every_rule()
    data = {r.name for r in own_rules()}
    assert set(SAMPLES) == set(rules) - data - BY_DEFINITION
    for name in ("scatter_in_order", "scatter_to_few", "max_of_windows", "chosen_gradient"):
        assert standing(rules[name]).is_proved
    assert standing(rules["scatter_in_runs"]).status.startswith("tested")
