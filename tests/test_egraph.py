"""The e-graph: rules of the file hold, cheaper graphs are found, and proofs can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import treadle as td
from proof_replay import Wrong, replay
from treadle import nn, optim
from treadle.backends.scheduling import is_leaner
from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.domains.field import equal_graphs
from treadle.egraph.attributes import attributes_of
from treadle.egraph.expressions import evaluate
from treadle.egraph.graph import Application, EGraph
from treadle.egraph.language import DataRule, applied, own_rules, parse, rules_of, to_text
from treadle.egraph.optimize import Optimised, load, optimise
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import OPS
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.ops.shaping import CONCAT, PAD
from treadle.ir.text import to_text as graph_text
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.kernel.costs import Costs
from treadle.kernel.target import CPU, GPU
from treadle.pipeline import optimize
from treadle.rules.canonical import canonicalise

RULES = {rule.name: rule for rule in own_rules()}
SIZES = {"n": 2, "m": 3, "k": 4, "h": 5, "j": 2, "s": 1, "t": 2}
# Launches are dear and copies are free: whatever can be joined is.
JOINING = replace(GPU, costs=Costs(flop=1, narrow_flop=1, byte=0, element=0, launch=1e6))
SPEC = td.Spec((3, 4))


# --- rules ------------------------------------------------------------------------------------


class Instance:
    """A case of a rule with sizes put in: both sides as graphs over the same inputs."""

    def __init__(self, rule: DataRule, case: Any):
        self.rule, self.case = rule, case
        self.builder = GraphBuilder()
        self.names: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        fields = {t for use in self.uses(rule.sources[0]) for _, t in use.fields}
        for name, given in case.items():
            if name in self.tensors(rule.sources[0]) or name == f"{rule.member}...":
                self.bind(name, given)
            else:
                value = self.sized(given) if name not in fields or self.is_size(name) else given
                self.names[name] = value

    def is_size(self, name: str) -> bool:
        found = [f for use in self.uses(self.rule.sources[0]) for f, t in use.fields if t == name]
        return not any(f in ("x", "y", "out", "dtype") for f in found)

    def uses(self, pattern: Any) -> list[Any]:
        use = applied(pattern)
        return [] if use is None else [use, *(u for t in use.operands for u in self.uses(t))]

    def tensors(self, pattern: Any) -> set[str]:
        plain = {t for u in self.uses(pattern) for t in u.operands if isinstance(t, str)}
        inner = (t for u in self.uses(pattern) for t in u.operands if isinstance(t, tuple))
        return plain | {t[1] for t in inner if t[0] == "number"}

    def sized(self, given: Any) -> Any:
        if isinstance(given, tuple) and given and given[0] in ("+", "-", "*"):
            return evaluate((given[0], *map(self.sized, given[1:])), {})
        if isinstance(given, tuple):
            return tuple(map(self.sized, given))
        return SIZES.get(given, given)

    def tensor(self, name: str, given: Any) -> Value:
        dtype = dtypes.float32
        if given and given[0] in dtypes.BY_NAME:
            dtype, given = dtypes.BY_NAME[given[0]], given[1:]
        type_ = TensorType(self.sized(given), dtype)
        if f"(number {name})" in to_text(self.rule.sources[0]):
            number = {"a": 3, "b": 5}.get(name, 7)
            self.names[name] = number
            return self.builder.add(CONSTANT, Constant(number, type_), ())[0]
        return self.builder.add(INPUT, Leaf(f"{name}{len(self.builder.nodes)}", type_), ())[0]

    def bind(self, name: str, given: Any) -> None:
        if name.endswith("..."):
            self.values[name] = tuple(self.tensor(name, g) for g in given)
        else:
            self.values[name] = self.tensor(name, given)
            self.names.setdefault(name, self.builder.type_of(self.values[name]))

    def build(self, term: Any, is_source: bool) -> Value:
        if isinstance(term, str):
            return self.values[term]
        if not isinstance(term, tuple):
            raise AssertionError(term)
        if term[0] == "number":
            return self.values[term[1]]
        use = applied(term)
        assert use is not None
        operands: list[Value] = []
        types: list[TensorType] = []
        for t in use.operands:
            if isinstance(t, str) and t.endswith("..."):
                operands += self.values[t]
            elif isinstance(t, int):
                shape = types[0] if types else self.builder.type_of(self.values["x"])
                operands += self.builder.add(CONSTANT, Constant(t, shape), ())
            else:
                operands.append(self.build(t, is_source))
                types.append(self.builder.type_of(operands[-1]))
        op = OPS[use.op]
        given = {f: self.case.get(f) for f in op.attributes.__dataclass_fields__}
        given = {f: self.sized(v) for f, v in given.items() if v is not None}
        given |= {f: evaluate(t, self.names) for f, t in use.fields}
        return self.builder.add(op, attributes_of(op, given), operands)[0]

    def graphs(self) -> list[tuple[Graph, Graph]]:
        member = self.rule.member
        every = self.values.get(f"{member}...", ())
        if not member:
            return [self.sides()]
        found = []
        types = tuple(map(self.builder.type_of, every))
        for i, value in enumerate(every):
            self.values[member], self.names[member] = value, types[i]
            self.names |= {f"{member}...": types, f"{member}.before": types[:i]}
            found.append(self.sides())
        return found

    def sides(self) -> tuple[Graph, Graph]:
        left = self.build(self.rule.sources[0], True)
        self.names["root"] = self.builder.type_of(left)
        for name, term in self.rule.lets:
            self.names[name] = evaluate(term, self.names)
        assert all(evaluate(t, self.names) for t in self.rule.when), self.rule.name
        right = self.build(self.rule.targets[0], False)
        assert self.builder.type_of(left) == self.builder.type_of(right)
        graphs = [
            self.builder.build([Output(OutputKind.RESULT, "0", v)], "side") for v in (left, right)
        ]
        return graphs[0], graphs[1]


@pytest.mark.parametrize("name", RULES)
def test_both_sides_of_each_rule_are_equal(name: str) -> None:
    rule = RULES[name]
    assert rule.cases, "a rule without a case cannot be proved"
    for case in rule.cases:
        for left, right in Instance(rule, case).graphs():
            assert equal_graphs(left, right, indices(left)), (graph_text(left), graph_text(right))


def indices(graph: Graph) -> dict[str, np.ndarray]:
    """Values of leaves that are whole numbers: rows that are there, some of them twice."""
    rng = np.random.default_rng(0)
    types = {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}
    return {n: rng.integers(0, 2, t.shape) for n, t in types.items() if not t.is_float}


def test_a_rule_that_is_wrong_is_seen() -> None:
    rule = replace(RULES["permute_of_permute"], targets=(("permute", ":axes", "p", "x"),))
    sides = Instance(rule, {"x": ("n", "n", "n"), "q": (1, 2, 0), "p": (0, 2, 1)}).graphs()
    assert not any(equal_graphs(*pair) for pair in sides)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("(rule a", "not closed"),
        ("(rule a))", "not opened"),
        ('(rule a "x" (class exact) (from (neg x)))', "needs class, from and to"),
        ('(rule a "x" (class fine) (from (neg x)) (to x))', "Use one of exact"),
        ('(rule a "x" (class exact) (from (neg x)) (to x) (maybe x))', "needs class"),
        ('(rule a "x" (class exact) (from (neg x) (neg y)) (to x))', "2 from, 1 to"),
        ('(rule a "unended', "do not end"),
        ("(rules)", "is no rule"),
    ],
)
def test_a_wrong_text_is_refused(text: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        rules_of(text)


def test_a_name_is_used_once() -> None:
    one = '(rule a "x" (class exact) (from (neg (neg x))) (to x))'
    with pytest.raises(ArgumentError, match="twice"):
        rules_of(one + one)


def test_text_is_read_back() -> None:
    for rule in own_rules():
        for term in (*rule.sources, *rule.targets, *rule.when):
            assert parse(to_text(term)) == (term,)


# --- what is found ------------------------------------------------------------------------------


def found(function: Callable[..., Any], *types: TensorType, target: Any = CPU) -> Any:
    """The graph before, and what the e-graph makes of it: verified, equal, with a proof."""
    graph = td.trace(function, *types)
    result = optimise(graph, target)
    verify(result.graph)
    assert equal_graphs(graph, result.graph)
    assert result.after <= result.before
    replay(graph, result, RULES)
    return graph, result


def count(graph: Graph, op: Any) -> int:
    return sum(node.op is op for node in graph.nodes)


def test_a_chain_of_matmuls_begins_with_the_vector() -> None:
    types = td.Spec((64, 64)), td.Spec((64, 64)), td.Spec((64, 1))
    _, result = found(lambda a, b, x: (a @ b) @ x, *types)
    assert result.fired == {"chain_to_right": 1}
    sizes = [prod(n.types[0].shape) for n in result.graph.nodes if n.op is CONTRACT]
    assert sizes == [64, 64]
    assert result.after < result.before / 2


def test_a_chain_that_is_best_as_it_is_stays_the_same_object() -> None:
    types = td.Spec((64, 64)), td.Spec((64, 64)), td.Spec((64, 1))
    before, result = found(lambda a, b, x: a @ (b @ x), *types)
    assert result.graph is before
    assert not result.steps


def test_products_with_one_weight_are_added_before() -> None:
    types = td.Spec((32, 64)), td.Spec((32, 64)), td.Spec((64, 64))
    _, result = found(lambda x, y, w: x @ w + y @ w, *types)
    assert count(result.graph, CONTRACT) == 1
    assert result.fired == {"factor_contraction": 1}


def test_matmuls_of_one_operand_are_one_where_that_pays() -> None:
    types = td.Spec((8, 16)), td.Spec((16, 4)), td.Spec((16, 8)), td.Spec((16, 8))

    def function(x: td.Tensor, *weights: td.Tensor) -> list[td.Tensor]:
        return [td.tanh(x @ w) for w in weights]

    _, joined = found(function, *types, target=JOINING)
    assert count(joined.graph, CONTRACT) == 1
    assert joined.fired == {"products_of_left": 1}
    graph, apart = found(function, *types)  # a copy of the weights costs more than it saves
    assert apart.graph is graph


def test_what_depends_on_itself_is_not_joined() -> None:
    types = td.Spec((8, 8)), td.Spec((8, 8))
    _, result = found(lambda x, a: x @ (x @ a), *types, target=JOINING)
    assert count(result.graph, CONTRACT) == 2


def test_pads_of_a_gradient_are_joined_where_that_pays() -> None:
    def gradient(x: td.Tensor) -> td.Tensor:
        return td.grad(lambda x: td.sin(x[:, :3]).sum() + td.cos(x[:, 3:]).sum())(x)

    graph = td.trace(gradient, td.Spec((4, 8)))
    assert count(graph, PAD) == 2
    free = replace(CPU, costs=replace(CPU.costs, byte=0, launch=0))
    _, result = found(gradient, td.Spec((4, 8)), target=free)
    assert count(result.graph, PAD) == 0
    assert count(result.graph, CONCAT) == 1
    assert result.fired == {"pads_to_concat": 1, "identity_pad": 1}


def test_a_number_goes_to_the_smaller_operand() -> None:
    def outer(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        return (x @ y) * 3

    _, result = found(outer, td.Spec((64, 1)), td.Spec((1, 64)))
    assert result.fired == {"number_into_left": 1}


def test_sums_of_the_same_thing_are_one() -> None:
    _, result = found(lambda x: [x.sum(0).sum(0), x.sum((0, 1))], td.Spec((5, 6, 7)))
    assert result.fired == {"sum_of_sum": 1}
    assert len(result.graph.nodes) == 2


def test_the_same_graph_gives_the_same_result() -> None:
    types = td.Spec((8, 16)), td.Spec((16, 4)), td.Spec((16, 8))

    def function(x: td.Tensor, a: td.Tensor, b: td.Tensor) -> list[td.Tensor]:
        return [x @ a, x @ b, (x @ a).sum(0).sum(0)]

    texts = {graph_text(found(function, *types, target=JOINING)[1].graph) for _ in range(2)}
    assert len(texts) == 1


def test_results_of_one_node_stay_apart() -> None:
    def function(x: td.Tensor) -> list[td.Tensor]:
        values, index = td.sort(x)
        return [values.sum(0).sum(0), values.sum((0, 1)), index]

    any_gain = replace(CPU, costs=replace(CPU.costs, least_move=0, least_gain=0))
    _, result = found(function, td.Spec((5, 6)), target=any_gain)
    assert result.fired == {"sum_of_sum": 1}


# --- proofs -------------------------------------------------------------------------------------


def chain() -> tuple[Graph, Optimised]:
    types = td.Spec((64, 64)), td.Spec((64, 64)), td.Spec((64, 1))
    graph = td.trace(lambda a, b, x: (a @ b) @ x + (a @ x) * 1.5, *types)
    return graph, optimise(graph, CPU)


def test_a_proof_needs_its_steps() -> None:
    graph, result = chain()
    replay(graph, result, RULES)
    with pytest.raises(Wrong, match="not in the proof"):
        replay(graph, replace(result, steps=()), RULES)


def test_a_proof_by_another_rule_is_refused() -> None:
    graph, result = chain()
    step = result.steps[0]
    wrong = Application("chain_to_left", step.roots, step.results, step.matched, step.sides)
    with pytest.raises(Wrong):
        replay(graph, replace(result, steps=(wrong, *result.steps[1:])), RULES)


def test_a_proof_under_a_condition_that_does_not_hold_is_refused() -> None:
    graph, result = chain()
    rules = RULES | {"chain_to_right": replace(RULES["chain_to_right"], when=(("=", 1, 2),))}
    with pytest.raises(Wrong, match="condition"):
        replay(graph, result, rules)


def test_congruence_follows_from_equal_operands() -> None:
    egraph, nodes = load(td.trace(lambda x, y: [td.exp(x) + y, y + td.exp(y)], SPEC, SPEC))
    x, y = nodes[0][0], nodes[1][0]
    egraph.merge(x, y, Application("given", (x,), (y,), (), ()))
    egraph.rebuild()
    sums = [n for n in range(len(egraph)) if egraph.heads[egraph.head[n]].op.name == "add"]
    assert len({egraph.find(n) for n in sums}) == 1


def test_an_e_graph_interns_commutative_operands_in_either_order() -> None:
    egraph: EGraph = load(td.trace(lambda x, y: [x * y, y * x, x - y, y - x], SPEC, SPEC))[0]
    assert len(egraph) == 2 + 1 + 2


# --- steps --------------------------------------------------------------------------------------


class Low(nn.Module):
    """A product of three matrices, in the dear order."""

    def __init__(self) -> None:
        self.a, self.b = nn.Linear(48, 48, bias=False), nn.Linear(48, 48, bias=False)

    def forward(self, x: td.Tensor) -> td.Tensor:
        return x @ (self.a.weight @ self.b.weight)


def test_a_step_says_what_was_rewritten() -> None:
    batch = np.linspace(-1, 1, 2 * 48, dtype=np.float32).reshape(2, 48)

    def loss(model: Any, x: td.Tensor) -> td.Tensor:
        return (model(x) ** 2).mean()

    given: list[float] = []
    for rewrite in (True, False):
        options = td.CompileOptions(rewrite=rewrite)
        step = td.compile_step(Low(), loss, optim.sgd(0.1), batch, device="cpu", options=options)
        given.append([step(batch).loss for _ in range(3)][-1])
        told = {r.rule for r in step.report.rewritten}
        assert told == ({"chain_to_left", "chain_to_right"} if rewrite else set())
        assert all(r.after < r.before for r in step.report.rewritten)
        assert (step.report.rules["chain_to_left"] > 0) is rewrite
    assert given[0] == pytest.approx(given[1], rel=1e-5)


def test_a_graph_is_taken_if_its_program_is_leaner() -> None:
    """Whatever nodes cost: by calls and bytes of kernels, or by much less of everything."""
    types = td.Spec((64, 4096)), td.Spec((4096,))
    once = td.trace(lambda x, y: (x * y).sum(1), *types)
    stored = td.trace(lambda x, y: (x * y, (x * y).sum(1)), *types)
    dear = td.trace(lambda x, y: ((x @ x.T) @ x).sum(1) + (x * y).sum(1), *types)
    options = td.CompileOptions()
    for target in (CPU, GPU):
        assert is_leaner(once, once, options, target)
        assert is_leaner(once, stored, options, target)
        assert not is_leaner(stored, once, options, target)
        assert is_leaner(stored, dear, options, target)

    taken: list[bool] = []

    def never(found: Graph, canonical: Graph) -> bool:
        taken.append(found != canonical)
        return False

    chain = td.trace(lambda a, b, x: (a @ b) @ x, *[td.Spec((64, 64))] * 2, td.Spec((64, 1)))
    assert optimize(chain, CPU, pays=never) == canonicalise(chain)
    assert optimize(chain, CPU, pays=lambda *_: True) != canonicalise(chain)
    assert taken == [True]


def test_float16_is_not_scaled_elsewhere() -> None:
    """A sum of products may overflow where that of scaled ones does not."""
    types = [td.Spec((64, 1), dtype) for dtype in (td.float32, td.float16)]
    for type_, fires in zip(types, (True, False), strict=True):
        back = td.Spec((1, 64), type_.dtype)
        _, result = found(lambda x, y: (x @ y) * 3, type_, back)
        assert bool(result.fired) is fires


def test_strict_numerics_leave_what_would_round_differently() -> None:
    types = td.Spec((64, 64)), td.Spec((64, 64)), td.Spec((64, 1))
    graph = td.trace(lambda a, b, x: (a @ b) @ x, *types)
    assert optimise(graph, CPU).fired == {"chain_to_right": 1}
    assert optimise(graph, CPU, only_exact=True).graph is graph
    assert optimize(graph, CPU, numerics="strict") == graph


class Tokens(nn.Module):
    """An embedding that a linear layer reads, as a recurrent network's first does."""

    def __init__(self, rows: int):
        self.table, self.inner = nn.Embedding(rows, 32), nn.Linear(32, 96)

    def forward(self, x):
        return td.tanh(self.inner(self.table(x)))


@pytest.mark.parametrize(("rows", "is_rewritten"), [(7, True), (64, False)])
def test_rows_that_tokens_choose_are_multiplied_once(rows: int, is_rewritten: bool) -> None:
    """Forward and both gradients: the table has fewer rows than the batch has tokens."""
    tokens = np.random.default_rng(0).integers(0, rows, (16, 4)).astype(np.int32)

    def gradients(device: str) -> tuple[dict[str, np.ndarray], set[str]]:
        step = td.compile_step(
            Tokens(rows), lambda m, b: (m(b["x"]) ** 2).mean(), optim.sgd(0.1),
            {"x": td.Spec((16, 4), td.int32)}, device=device,
        )  # fmt: skip
        found = step.gradients({"x": tokens})
        return found, {r.rule for r in step.report.rewritten}

    ours, rules = gradients("cpu")
    exact, _ = gradients("oracle")
    wanted = {"product_of_embedding", "sum_over_chosen_rows", "product_of_added_rows"}
    assert (wanted <= rules) == is_rewritten
    assert bool(wanted & rules) == is_rewritten
    for name, value in exact.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
