"""Modules as descriptions: names, sharing, values bound from outside, states, text."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import treadle as td
from refusals import refused
from treadle import nn

V = td.Spec((3,))


class Block(nn.Module):
    def __init__(self, width: int = 2) -> None:
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.fc(self.norm(x))


class Net(nn.Module):
    """Parts in every kind of container."""

    def __init__(self) -> None:
        self.width = 2
        self.blocks = [Block(), Block()]
        self.heads = {"left": nn.Linear(2, 1), "right": (nn.Linear(2, 1, bias=False),)}
        self.scale = nn.Parameter((2,), nn.init.ones, decay=False)
        self.nested = [[nn.Parameter(())], {"deep": [nn.ReLU(), nn.BatchNorm1d(2)]}]
        self.nothing = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.nested[1]["deep"][1](x * self.scale) + self.nested[0][0]
        return self.heads["left"](x) + self.heads["right"][0](x)


NET_PARAMETERS = {
    "blocks.0.fc.weight": (2, 2),
    "blocks.0.fc.bias": (2,),
    "blocks.0.norm.weight": (2,),
    "blocks.0.norm.bias": (2,),
    "blocks.1.fc.weight": (2, 2),
    "blocks.1.fc.bias": (2,),
    "blocks.1.norm.weight": (2,),
    "blocks.1.norm.bias": (2,),
    "heads.left.weight": (1, 2),
    "heads.left.bias": (1,),
    "heads.right.0.weight": (1, 2),
    "scale": (2,),
    "nested.0.0": (),
    "nested.1.deep.1.weight": (2,),
    "nested.1.deep.1.bias": (2,),
}
NET_STATES = [
    f"nested.1.deep.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
]


def compiled(model: Any, forward: Any = None, shape: Any = (3,), **options: Any) -> td.Forward:
    return td.compile_forward(
        model, forward or (lambda m, b: m(b)), td.Spec(shape), device="oracle", **options
    )


# Names


def test_names_are_paths_in_the_order_of_attributes() -> None:
    assert {n: p.shape for n, p in Net().named_parameters()} == NET_PARAMETERS
    assert [n for n, _ in Net().named_parameters()] == list(NET_PARAMETERS)
    assert [n for n, _ in Net().named_states()] == NET_STATES
    assert list(Net().declarations()) == [*NET_PARAMETERS, *NET_STATES]
    assert len(list(Net().parameters())) == len(NET_PARAMETERS)


def test_names_of_sequences() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 1)))
    names = [n for n, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    layers = nn.ModuleList([nn.Linear(1, 1)])
    assert layers.append(nn.Linear(1, 1, bias=False)) is layers
    assert [n for n, _ in layers.named_parameters()] == ["0.weight", "0.bias", "1.weight"]


def test_sequences_are_containers() -> None:
    first, second = nn.ReLU(), nn.Tanh()
    for model in (nn.Sequential(first, second), nn.ModuleList([first, second])):
        assert len(model) == 2
        assert list(model) == [first, second]
        assert model[0] is first
        assert model[-1] is second


def test_a_prefix_goes_before_every_name() -> None:
    model = nn.Linear(1, 1)
    assert [n for n, _ in model.named_parameters("net")] == ["net.weight", "net.bias"]
    assert [n for n, _ in model.named_modules("net")] == ["net"]


def test_named_modules() -> None:
    model = Net()
    found = dict(model.named_modules())
    assert list(found) == [
        "", "blocks.0", "blocks.0.fc", "blocks.0.norm", "blocks.1", "blocks.1.fc", "blocks.1.norm",
        "heads.left", "heads.right.0", "nested.1.deep.0", "nested.1.deep.1",
    ]  # fmt: skip
    assert found[""] is model
    assert found["blocks.1"] is model.blocks[1]


def test_an_attribute_that_is_replaced_is_gone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    setattr(model, "0", nn.Linear(2, 2, bias=False))
    assert [n for n, _ in model.named_parameters()] == ["0.weight"]
    assert len(model) == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.again = self.body
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.again(self.body(self.embed(tokens))))


def test_shared_parameters_are_there_once_under_their_first_name() -> None:
    model = Tied()
    assert [n for n, _ in model.named_parameters()] == ["embed.weight", "body.weight", "body.bias"]
    assert [n for n, _ in model.named_modules()] == ["", "embed", "body", "head"]
    assert model.init().keys() == model.declarations().keys()


def test_the_gradient_of_a_shared_parameter_is_the_sum_of_its_uses() -> None:
    model = Tied()
    values = {n: v.astype(np.float64) for n, v in model.init(1).items()}
    tokens = np.array([0, 3, 3])

    def apart(table, head):
        h = td.embedding(tokens, table)
        for _ in range(2):
            h = td.linear(h, values["body.weight"], values["body.bias"])
        return td.linear(h, head).sum()

    def tied(table):
        return model.apply({**values, "embed.weight": table}, tokens).sum()

    table = values["embed.weight"]
    parts = td.grad(apart, (0, 1))(table, table)
    expected = parts[0].numpy() + parts[1].numpy()
    np.testing.assert_allclose(td.grad(tied)(table).numpy(), expected, rtol=1e-12)


def test_a_model_may_refer_to_its_parent() -> None:
    parent, child = Block(), Block()
    parent.child, child.parent = child, parent
    assert [n for n, _ in parent.named_modules()] == [
        "", "fc", "norm", "child", "child.fc", "child.norm",
    ]  # fmt: skip
    assert "parent: ..." in repr(parent)


def test_requires_grad() -> None:
    model = Net()
    assert model.blocks[0].requires_grad_(False) is model.blocks[0]
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in NET_PARAMETERS if n.startswith("blocks.0.")}
    model.requires_grad_()
    assert all(p.requires_grad for p in model.parameters())


def test_declarations() -> None:
    parameter = nn.Parameter((2, 3), nn.init.ones, requires_grad=False, decay=False)
    assert (parameter.shape, parameter.ndim, parameter.dtype) == ((2, 3), 2, td.float32)
    assert (parameter.requires_grad, parameter.decay) == (False, False)
    state = nn.State((), dtype=td.int32)
    assert (state.shape, state.ndim, state.dtype) == ((), 0, td.int32)
    assert repr(parameter) == "Parameter(float32[2,3])"
    assert repr(state) == "State(int32[])"


class Clash(nn.Module):
    def __init__(self, parts: dict) -> None:
        self.parts = parts


def parameter_and(other: type) -> Clash:
    return Clash({"a.b": nn.Parameter((1,)), "a": {"b": other((2,))}})


@pytest.mark.parametrize("other", [nn.Parameter, nn.State])
def test_equal_names_are_refused(other: type) -> None:
    model = parameter_and(other)
    refused(
        lambda: model.declarations(), td.NameTakenError, "Module", "Clash", "'parts.a.b'", "Rename"
    )
    refused(lambda: model.init(), td.NameTakenError, "Module", "'parts.a.b'")
    refused(lambda: td.compile_forward(model, twice, V), td.NameTakenError, "Module", "'parts.a.b'")


# Text


def test_repr() -> None:
    assert repr(nn.ReLU()) == "ReLU()"
    assert repr(nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU())) == (
        "Sequential(\n  0: Linear(\n    weight: Parameter(float32[3,2])\n  )\n  1: ReLU()\n)"
    )


def test_repr_shows_what_is_in_containers() -> None:
    assert repr(Clash({"x": [nn.ReLU(), nn.Parameter((2,))], "y": 3, "z": {}})) == (
        "Clash(\n"
        "  parts.x.0: ReLU()\n"
        "  parts.x.1: Parameter(float32[2])\n"
        ")"
    )  # fmt: skip


SUMMARY = """\
Net
  blocks.0: Block
    fc: Linear
    norm: LayerNorm
  blocks.1: Block
    fc: Linear
    norm: LayerNorm
  heads.left: Linear
  heads.right.0: Linear
  nested.1.deep.0: ReLU
  nested.1.deep.1: BatchNorm1d
parameter                            shape      count
blocks.0.fc.weight                   (2, 2)         4
blocks.0.fc.bias                     (2,)           2
blocks.0.norm.weight                 (2,)           2  frozen
blocks.0.norm.bias                   (2,)           2  frozen
blocks.1.fc.weight                   (2, 2)         4
blocks.1.fc.bias                     (2,)           2
blocks.1.norm.weight                 (2,)           2
blocks.1.norm.bias                   (2,)           2
heads.left.weight                    (1000, 2)  2,000
heads.left.bias                      (1000,)    1,000
heads.right.0.weight                 (1, 2)         2
scale                                (2,)           2
nested.0.0                           ()             1
nested.1.deep.1.weight               (2,)           2
nested.1.deep.1.bias                 (2,)           2
nested.1.deep.1.running_mean         (2,)           2  state
nested.1.deep.1.running_var          (2,)           2  state
nested.1.deep.1.num_batches_tracked  ()             1  state
3,029 parameters, 3,025 trained"""


def test_summary() -> None:
    model = Net()
    model.blocks[0].norm.requires_grad_(False)
    model.heads["left"] = nn.Linear(2, 1000)
    assert td.summary(model) == SUMMARY


def test_summary_of_a_tree() -> None:
    model = {"net": [nn.Linear(2, 3, bias=False)], "scale": np.ones(3, np.float32)}
    assert td.summary(model).splitlines()[1:] == [
        "  net.0: Linear",
        "parameter     shape   count",
        "net.0.weight  (3, 2)      6",
        "scale         (3,)        3",
        "9 parameters, 9 trained",
    ]


# Values from outside


def test_init_and_apply() -> None:
    model = Net()
    values = model.init(3)
    assert {n: v.shape for n, v in values.items()} == NET_PARAMETERS | {
        n: model.declarations()[n].shape for n in NET_STATES
    }
    x = np.random.default_rng(0).standard_normal((4, 2))
    eager = model.apply(values, td.tensor(x, td.float32))
    assert isinstance(eager, td.Tensor)
    np.testing.assert_allclose(eager.numpy(), compiled(model, shape=(4, 2), seed=3)(x), rtol=1e-5)


def test_apply_takes_what_forward_takes() -> None:
    model = nn.MultiHeadAttention(2, 1)
    x = td.ones((3, 1, 2))
    causal = model.apply(model.init(), x, causal=True)
    assert causal.shape == (3, 1, 2)


def test_values_keep_their_dtype_in_apply() -> None:
    model = nn.Linear(2, 2)
    wide = {n: v.astype(np.float64) for n, v in model.init().items()}
    assert model.apply(wide, np.ones((1, 2))).dtype is td.float64


def test_modules_in_transformations() -> None:
    model, x = nn.Linear(3, 1), np.arange(3.0)
    values = {n: v.astype(np.float64) for n, v in model.init().items()}

    def loss(values, x):
        return (model.apply(values, x) ** 2).sum()

    value, gradient = td.value_and_grad(loss)(values, x)
    output = values["weight"] @ x + values["bias"]
    np.testing.assert_allclose(value.item(), output**2, rtol=1e-12)
    assert gradient.keys() == values.keys()
    np.testing.assert_allclose(gradient["weight"].numpy(), 2 * output[:, None] * x, rtol=1e-12)
    np.testing.assert_allclose(gradient["bias"].numpy(), 2 * output, rtol=1e-12)
    direction = {n: np.ones_like(v) for n, v in values.items()}
    _, slope = td.jvp(loss, (values, x), (direction, np.zeros(3)))
    expected = sum(g.numpy().sum() for g in gradient.values())
    np.testing.assert_allclose(slope.item(), expected, rtol=1e-12)
    twice = td.grad(lambda x: td.grad(loss, 1)(values, x).sum())(x)
    weight = values["weight"][0]
    np.testing.assert_allclose(twice.numpy(), 2 * weight * weight.sum(), rtol=1e-12)


def test_apply_inside_of_a_step_binds_other_values() -> None:
    """A target network: the same module with values of its own, in one program."""
    model = nn.Linear(2, 1, bias=False)
    other = {"weight": np.array([[10.0, 0.0]])}
    forward = compiled(model, lambda m, b: (m(b), m.apply(other, b)), (2,))
    forward.load_params({"weight": np.array([[1.0, 2.0]])})
    own, fixed = forward(np.array([1.0, 1.0]))
    assert (own.item(), fixed.item()) == (3, 10)


class Mode(nn.Module):
    def __init__(self) -> None:
        self.inner = nn.Identity()

    def forward(self, x):
        return x + (10 if self.training else 0) + (100 if self.inner.training else 0)


def test_the_mode_is_the_traces() -> None:
    model = Mode()
    assert not model.training
    assert model.apply({}, 0) == 0
    assert model.apply({}, 0, training=True) == 110
    assert compiled(model, shape=())(0.0) == 0
    assert compiled(model, shape=(), training=True)(0.0) == 110
    mixed = compiled(model, lambda m, b: m(b) + m.apply({}, b), (), training=True)
    assert mixed(0.0) == 110
    assert not model.training


def test_a_part_of_a_model_in_another_mode() -> None:
    """Its own values, which follow the step's, and evaluation inside of a training trace."""
    model = nn.Sequential(nn.BatchNorm1d(3))

    def both(m, b):
        return m(b), m[0].apply(m[0].declarations(), b)

    forward = compiled(model, both, (4, 3), training=True)
    forward.load_params({**forward.params, "0.bias": np.full(3, 5.0)})
    x = np.random.default_rng(0).standard_normal((4, 3))
    trained, still = forward(x)
    np.testing.assert_allclose(still, x / np.sqrt(1 + 1e-5) + 5, rtol=1e-12)
    assert not np.allclose(trained, still)
    assert forward.params["0.num_batches_tracked"] == 1


def test_a_copy_is_another_model() -> None:
    model = Tied()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    assert twin.embed.weight is not model.embed.weight
    for name, value in model.init(2).items():
        np.testing.assert_array_equal(value, twin.init(2)[name])
    pair = compiled({"a": model, "b": twin}, lambda m, b: m["a"].embed(np.array([0])), ())
    assert set(pair.params) == {f"{k}.{n}" for k in "ab" for n in model.declarations()}


def test_trees_of_arrays_are_models() -> None:
    forward = compiled(
        {"w": np.full(3, 2.0), "n": [np.arange(3)]}, lambda m, b: b * m["w"] + m["n"][0]
    )
    assert set(forward.params) == {"w", "n.0"}
    np.testing.assert_array_equal(forward(np.ones(3)), [2, 3, 4])
    single = compiled(np.full(3, 2.0), lambda m, b: b * m)
    np.testing.assert_array_equal(single(np.ones(3)), [2, 2, 2])


# States


class Counter(nn.Module):
    def __init__(self) -> None:
        self.count = nn.State((), dtype=td.int32)
        self.last = nn.State((3,), nn.init.constant(-1.0))
        self.weight = nn.Parameter((3,), nn.init.ones)

    def forward(self, x):
        td.update(self.count, self.count + 1)
        td.update(self.last, x)
        return x * self.weight + self.last  # the old value


def test_updates_are_for_the_next_call() -> None:
    forward = compiled(Counter())
    np.testing.assert_array_equal(forward(np.full(3, 5.0)), [4, 4, 4])
    np.testing.assert_array_equal(forward(np.full(3, 7.0)), [12, 12, 12])
    assert forward.params["count"] == 2
    np.testing.assert_array_equal(forward.params["last"], [7, 7, 7])
    np.testing.assert_array_equal(forward.params["weight"], [1, 1, 1])


def test_an_update_takes_the_states_dtype() -> None:
    model = Counter()
    forward = compiled(model, lambda m, b: td.update(m.count, b.sum()))
    forward(np.array([1.0, 2.0, 3.0]))
    assert forward.params["count"] == 6
    assert forward.params["count"].dtype == np.int32


def test_updates_inside_of_a_checkpoint() -> None:
    model = Counter()
    forward = compiled(model, lambda m, b: td.checkpoint(lambda x: m(x))(b))
    forward(np.full(3, 5.0))
    assert forward.params["count"] == 1
    np.testing.assert_array_equal(forward.params["last"], [5, 5, 5])


def test_updates_inside_of_a_gradient() -> None:
    model = Counter()
    forward = compiled(model, lambda m, b: td.grad(lambda x: m(x).sum())(b))
    np.testing.assert_array_equal(forward(np.full(3, 5.0)), [1, 1, 1])
    assert forward.params["count"] == 1


def test_updates_under_apply_are_dropped() -> None:
    model = Counter()
    values = model.init()
    model.apply(values, np.ones(3))
    assert values["count"] == 0
    td.grad(lambda x: model.apply(values, x).sum())(np.ones(3))
    graph = td.trace(lambda x: model.apply(values, x), td.Spec((3,)))
    assert len(graph.outputs) == 1
    # A teacher in training mode, and twice: neither it nor the model has an update.
    student = nn.BatchNorm1d(3)
    teacher = nn.BatchNorm1d(3)
    fixed = teacher.init()

    def distil(m, b):
        return m(b) + sum(teacher.apply(fixed, b, training=True) for _ in range(2))

    forward = compiled(student, distil, (4, 3), training=True)
    forward(np.random.default_rng(0).standard_normal((4, 3)))
    assert forward.params["num_batches_tracked"] == 1


# Mistakes

x3 = td.ones((3,))
linear, counter, outside = nn.Linear(3, 2), Counter(), nn.Parameter((3,))
values = linear.init()


class Hidden(nn.Module):
    """A parameter where nothing looks for it."""

    def __init__(self) -> None:
        self.parts = {nn.Parameter((3,))}

    def forward(self, x):
        return x * next(iter(self.parts))


def twice(m, b):
    td.update(m.last, b)
    td.update(m.last, b + 1)


def in_a_scan(m, b):
    def body(carry, x):
        td.update(m.count, 1)
        return carry + x, None

    return td.scan(body, td.zeros(()), b)[0]


def once_in_a_checkpoint(m, b):
    td.update(m.count, 1)
    return td.checkpoint(lambda x: m(x))(b)


MISTAKES = [
    (lambda: outside + 1, td.TraceError, "parameter", "float32[3]", "compile_step", "apply"),
    (lambda: np.ones(3) * outside, td.TraceError, "parameter", "float32[3]", "compile_step"),
    (lambda: linear(x3), td.TraceError, "parameter", "float32[2,3]", "model.init(seed)"),
    (lambda: td.update(counter.last, x3), td.TraceError, "state", "float32[3]", "apply"),
    (lambda: td.compile_forward(linear, lambda m, b: b * outside, V), td.TraceError, "parameter", "attribute"),
    (lambda: td.trace(lambda x: linear(x), td.Spec((3,))), td.TraceError, "parameter", "apply"),
    (lambda: linear.apply({}, x3), td.ArgumentError, "apply", "missing ['weight', 'bias']", "Linear"),
    (
        lambda: linear.apply({"weight": values["weight"], "b": 0}, x3),
        td.ArgumentError, "apply", "missing ['bias']", "unexpected ['b']", "init(seed)",
    ),
    (
        lambda: linear.apply({**values, "weight": values["weight"].T}, x3),
        td.ShapeError, "apply", "weight is float32[2,3]", "float32[3,2]", "init(seed)",
    ),
    (
        lambda: td.compile_forward(counter, lambda m, b: td.update(m.weight, b), V),
        td.ArgumentError, "update", "Parameter(float32[3])", "optimizer",
    ),
    (
        lambda: td.compile_forward(counter, lambda m, b: td.update(b, b), V),
        td.ArgumentError, "update", "not an nn.State",
    ),
    (
        lambda: td.compile_forward(counter, lambda m, b: td.update(m.last, b[:2]), V),
        td.ShapeError, "update", "last is float32[3]", "float32[2]",
    ),
    (
        lambda: nn.Parameter((3,), dtype=td.int32),
        td.ArgumentError, "Parameter", "int32[3]", "nn.State",
    ),
    (lambda: td.summary(nn.Linear), td.ArgumentError, "model", "Linear", "modules"),
    (lambda: td.compile_forward({"a": "x"}, twice, V), td.ArgumentError, "model", "a is 'x'"),
    (lambda: td.compile_forward({"a": object()}, twice, V), td.ArgumentError, "model", "a is <object"),
]  # fmt: skip


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda m: f"{m[2]}-{m[0].__code__.co_firstlineno}"
)
def test_mistakes(mistake: tuple) -> None:
    refused(*mistake)


# The line these name is in the function, not in the test.
@pytest.mark.parametrize(
    ("forward", "error", "fragments"),
    [
        (twice, td.NameTakenError, ("'last'", "twice", "Combine", "in twice")),
        (once_in_a_checkpoint, td.NameTakenError, ("'count'", "twice", "in forward")),
        (in_a_scan, td.TraceError, ("'count'", "td.scan", "last carry", "in body")),
    ],
)
def test_updates_that_are_refused(forward: Any, error: type, fragments: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        compiled(Counter(), forward)
    for fragment in ("update: ", "test_modules.py", *fragments):
        assert fragment in str(caught.value)


def test_a_parameter_that_the_model_does_not_hold() -> None:
    with pytest.raises(td.TraceError, match="in no model that is being traced.*attribute"):
        compiled(Hidden())


def test_an_update_of_another_shape_under_apply() -> None:
    with pytest.raises(td.ShapeError, match=r"update: the state is float32\[3\].*float32\[2,3\]"):
        counter.apply(counter.init(), td.ones((2, 3)))


def test_a_module_without_forward() -> None:
    with pytest.raises(NotImplementedError, match="ModuleList has no forward"):
        nn.ModuleList()(x3)


def test_an_error_in_forward_leaves_no_binding_behind() -> None:
    with pytest.raises(td.ShapeError):
        linear.apply(values, td.ones((4,)), training=True)
    assert not linear.training
    with pytest.raises(td.TraceError):
        linear(x3)


def test_a_parameter_named_random_is_a_parameter() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            self.random = nn.Parameter((6,), nn.init.ones)

        def forward(self, x):
            return x * self.random + td.random.uniform((6,)) * 0

    forward = td.compile_forward(Odd(), lambda m, x: m(x), td.Spec((6,)))
    np.testing.assert_array_equal(forward(np.full(6, 3.0)), np.full(6, 3.0))


def test_branching_on_a_parameter_is_refused() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter((), nn.init.ones)

        def forward(self, x):
            return x if self.w else -x

    with pytest.raises(td.TraceError, match="bool"):
        td.compile_forward(Branch(), lambda m, x: m(x), td.Spec(()))


def test_attention_with_dropout_of_its_weights() -> None:
    model = nn.MultiHeadAttention(4, 2, dropout=0.5, batch_first=True)
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    plain, dropped = (
        td.compile_forward(model, lambda m, b: m(b, causal=True), td.Spec((2, 3, 4)), training=t)
        for t in (False, True)
    )
    assert not np.allclose(plain(x), dropped(x))
    model.dropout.p = 0.0
    same = td.compile_forward(
        model, lambda m, b: m(b, causal=True), td.Spec((2, 3, 4)), training=True
    )
    np.testing.assert_allclose(plain(x), same(x), rtol=1e-5, atol=1e-6)


# Habits of PyTorch's users


def test_a_sequential_by_names_and_by_slices() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 3), act=nn.ReLU(), last=nn.Linear(3, 1)))
    assert list(model.init(0)) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    part = model[:2]
    assert isinstance(part, nn.Sequential)
    assert list(part.init(0)) == ["first.weight", "first.bias"]
    assert part[0] is model[0]
    assert len(model[3:]) == 0
    assert isinstance(nn.ModuleList([nn.ReLU(), nn.Tanh()])[1:], nn.ModuleList)


def test_a_dict_of_modules() -> None:
    heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 3)})
    assert list(heads) == ["a", "b"]
    assert "a" in heads
    assert heads["b"].out_features == 3
    assert list(heads.init(0)) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    refused(lambda: heads["c"], td.ArgumentError, "ModuleDict", "There are: a, b")
    refused(lambda: nn.ModuleDict({"x.y": nn.ReLU()}), td.ArgumentError, "ModuleDict", "dots")


def test_children_and_paths() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 1)))
    assert [n for n, _ in model.named_children()] == ["0", "1"]
    assert len(list(model.modules())) == 5
    assert model.get_submodule("1.1") is model[1][1]
    refused(lambda: model.get_submodule("1.7"), td.ArgumentError, "get_submodule", "1.7")


def test_a_part_in_evaluation_keeps_its_statistics() -> None:
    backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.9)).eval()
    model = nn.Sequential(backbone.requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 1))
    batch = {"x": np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)}
    step = td.compile_step(
        model, lambda m, b: (m(b["x"]) ** 2).mean(), td.optim.sgd(0.1), batch, device="cpu"
    )
    before = {n: v.copy() for n, v in step.state_dict().items()}
    step(batch)
    changed = {n for n, v in step.state_dict().items() if not np.array_equal(v, before[n])}
    assert not any(n.startswith("0.") for n in changed)
    assert {"1.running_mean", "1.running_var", "2.weight"} <= changed
    backbone.train()
    step = td.compile_step(
        model, lambda m, b: (m(b["x"]) ** 2).mean(), td.optim.sgd(0.1), batch, device="cpu"
    )
    before = {n: v.copy() for n, v in step.state_dict().items()}
    step(batch)
    assert not np.array_equal(step.state_dict()["0.1.running_mean"], before["0.1.running_mean"])
