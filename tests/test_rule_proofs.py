"""Proofs of rules: every rule that is data is proved, and rules that are subtly wrong are refused."""

from __future__ import annotations

import pytest

from treadle.egraph.language import DataRule, own_rules, rules_of
from treadle.verify.rule_proofs import Status, prove


@pytest.mark.parametrize("rule", own_rules(), ids=lambda r: r.name)
def test_every_rule_of_the_file_is_proved_for_all_sizes(rule: DataRule) -> None:
    proof = prove(rule)
    assert proof.status is Status.PROVED, proof.reason
    assert proof.proved >= 2
    assert proof.tested >= 3


def rule_of(body: str) -> DataRule:
    (rule,) = rules_of(f'(rule wrong "A rule that does not hold." (class rounding) {body})')
    return rule


MATMUL = "(l (i j)) (r (j h)) (o (i h)) (d float32)"
PRODUCT = ":x l :y r :out o :dtype d"

# Each is a rule of the file, or one like it, with one thing wrong.
WRONG = {
    "permutations composed the other way round": """
        (from (permute :axes p (permute :axes q x))) (to (permute :axes (take p q) x))""",
    "a permutation that is not undone": """
        (from (permute :axes p (permute :axes p x))) (to x)""",
    "the axes of the second sum are not moved": """
        (from (reduce_sum :axes a (reduce_sum :axes b x)))
        (to (reduce_sum :axes (sorted (unique (join b a))) x))""",
    "a factor along the summed axis is taken out": """
        (from (reduce_sum :axes a (mul x (broadcast :shape s :axes b y))))
        (to (mul (reduce_sum :axes a x) (broadcast :shape (shape root) :axes b y)))
        (case (x (n n)) (y (n)) (b (0)) (s (n n)) (a (0)))""",
    "the sum of a product is the product of the sums": """
        (from (reduce_sum :axes a (mul x y)))
        (to (mul (reduce_sum :axes a x) (reduce_sum :axes a y)))""",
    "the maximum of a sum is the sum of the maxima": """
        (from (reduce_max :axes a (add x y)))
        (to (add (reduce_max :axes a x) (reduce_max :axes a y)))""",
    "a negative scale moves out of a maximum": """
        (from (reduce_max :axes a (neg x))) (to (neg (reduce_max :axes a x)))""",
    "a maximum of negated numbers": """
        (from (max (neg x) (neg y))) (to (neg (max x y)))""",
    "a scale of a contraction is taken twice": f"""
        (from (contract {PRODUCT} (mul x (broadcast :axes () s)) (mul y (broadcast :axes () s))))
        (to (mul (contract {PRODUCT} x y) (broadcast :shape (shape root) :axes () s)))
        (case (x (n m)) (s ()) (shape (n n)) (y (m n)) {MATMUL})""",
    "rows of the left operand's factor become columns": f"""
        (from (contract {PRODUCT} (mul x (broadcast :shape s :axes a w)) y))
        (to (mul (contract {PRODUCT} x y) (broadcast :shape (shape root) :axes (list 1) w)))
        (case (x (n m)) (w (n)) (s (n m)) (a (0)) (y (m n)) {MATMUL})""",
    "the wrong operand of a contraction is permuted": f"""
        (from (contract {PRODUCT} (permute :axes p x) y))
        (to (contract :x (take l p) :y r :out o :dtype d x y))
        (case (x (n n n)) (p (1 2 0)) (y (n n n)) (l (i j s)) (r (j s h)) (o (i h)) (d float32))""",
    "operands of a contraction change places, its labels do not": f"""
        (from (contract {PRODUCT} x y)) (to (contract {PRODUCT} y x))
        (case (x (n n)) (y (n n)) {MATMUL})""",
    "products are joined in another order than their operands": f"""
        (from (add (contract {PRODUCT} x a) (contract {PRODUCT} y b)))
        (to (contract {PRODUCT} (concat :axis 1 x y) (concat :axis 0 b a)))
        (case (x (n m)) (y (n m)) (a (m h)) (b (m h)) {MATMUL})""",
    "the part of a joined product is the other one": f"""
        (from (contract {PRODUCT} x (concat :axis 1 a b)))
        (to (concat :axis 1 (contract {PRODUCT} x b) (contract {PRODUCT} x a)))
        (case (x (n m)) (a (m k)) (b (m k)) {MATMUL})""",
    "a slice of the second part does not start there": """
        (from (slice :starts a :stops b :strides e (concat :axis k x y)))
        (to (slice :starts a :stops b :strides e y))
        (case (x (n m)) (y (n m)) (k 1) (a (0 0)) (b (n m)) (e (1 1)))""",
    "a slice of a slice forgets where the first one starts": """
        (from (slice :starts a :stops b :strides e (slice :starts f :stops g :strides e x)))
        (to (slice :starts a :stops b :strides e x)) (when (= e (fill (rank x) 1)))""",
    "a slice of a slice whose strides are not 1": """
        (from (slice :starts a :stops b :strides e (slice :starts f :stops g :strides e x)))
        (to (slice :starts (add a f) :stops (add b f) :strides e x))
        (case (x (9)) (f (0)) (g (9)) (a (1)) (b (5)) (e (2)))
        (case (x (9)) (f (0)) (g (9)) (a (2)) (b (5)) (e (2)))""",
    "pads that lie one off": """
        (from (add (pad :low a :high b :interior i :value 0 x)
                   (pad :low e :high f :interior i :value 0 y)))
        (to (concat :axis 0 x y))
        (case (x (n)) (y (n)) (i (0)) (a (n)) (b (0)) (e (0)) (f (n)))""",
    "a pad of ones counts as one of zeros": """
        (from (reduce_sum :axes a (pad :low l :high h :interior i :value 1 x)))
        (to (reduce_sum :axes a x))
        (case (x (n m)) (a (1)) (l (0 k)) (h (0 0)) (i (0 0)))""",
    "a broadcast of a broadcast along the outer axes": """
        (from (broadcast :shape s :axes a (broadcast :axes b x)))
        (to (broadcast :shape s :axes b x))
        (case (x (n)) (b (0)) (shape (n n)) (a (1 2)) (s (n n n)))""",
    "a sum of a broadcast is what was spread": """
        (from (reduce_sum :axes a (broadcast :shape s :axes b x))) (to x)
        (case (x (n)) (a (1)) (s (n m)) (b (0)))""",
    "the sign of a difference": "(from (sub x y)) (to (sub y x))",
    "a quotient turned over": "(from (div x y)) (to (div y x))",
    "the factor 2 of a square is lost": """
        (from (mul (add x y) (add x y))) (to (add (add (mul x x) (mul x y)) (mul y y)))""",
    "a sum under a root": "(from (sqrt (add x y))) (to (add (sqrt x) (sqrt y)))",
    "the root of a square without its sign": "(from (sqrt (mul x x))) (to x)",
    "exp of a product": "(from (exp (mul x y))) (to (mul (exp x) (exp y)))",
    "log of a sum": "(from (log (add x y))) (to (add (log x) (log y)))",
    "an inverted mask": "(from (where c x y)) (to (where c y x))",
    "the wrong branch under a comparison": "(from (where (lt x y) x y)) (to (max x y))",
    "an even function taken for an odd one": "(from (abs (neg x))) (to (neg (abs x)))",
    "a flip along another axis": """
        (from (flip :axes a x)) (to (flip :axes (list 1) x)) (case (x (n n)) (a (0)))""",
    "a reshape in place of a transpose": """
        (from (permute :axes p x)) (to (reshape :shape (shape root) x))""",
    "a sum over all axes but one": """
        (from (reduce_sum :axes a x)) (to (reduce_sum :axes (without (range (rank x)) a) x))
        (case (x (n n)) (a (1)))""",
    "x − x = x": "(from (sub x x)) (to x)",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_refused(name: str) -> None:
    proof = prove(rule_of(WRONG[name]))
    assert proof.status is Status.REFUSED
    assert "differ" in proof.reason, proof.reason


def test_there_are_enough_wrong_rules() -> None:
    assert len(WRONG) >= 25


def test_a_counterexample_names_shapes_and_values() -> None:
    reason = prove(rule_of("(from (sub x y)) (to (sub y x))")).reason
    assert "x: float32[" in reason
    assert "y: float32[" in reason
    assert "they are" in reason


def test_what_is_true_but_not_decided_is_tested_and_not_proved() -> None:
    """A cumulative sum is linear; the normal form writes it as a masked sum, max is beyond it."""
    proof = prove(
        rule_of("(from (reduce_max :axes a (max x y)))"
                "(to (max (reduce_max :axes a x) (reduce_max :axes a y)))")
    )  # fmt: skip
    assert proof.status is not Status.PROVED


def test_a_rule_without_any_instance_is_refused() -> None:
    proof = prove(rule_of("(from (neg x)) (to (neg x)) (when (= (rank x) 99))"))
    assert proof.status is Status.REFUSED
    assert "case" in proof.reason


def test_a_case_that_breaks_the_condition_is_refused() -> None:
    proof = prove(rule_of("(from (neg x)) (to (neg x)) (when (= (rank x) 1)) (case (x (n m)))"))
    assert proof.status is Status.REFUSED
    assert "does not hold" in proof.reason


def test_proofs_are_the_same_again() -> None:
    rule = own_rules()[0]
    assert prove(rule) == prove(rule)
