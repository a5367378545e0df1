"""Compiled programs inside of PyTorch's autograd, and state dicts both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from treadle import nn
from treadle.interop.torch.halves import halves
from treadle.interop.torch.tensors import as_tensor, host_array

as_autograd = td.interop.torch.as_autograd


def mixed(x: Any, w: Any, index: Any) -> Any:
    hidden = td.tanh(x @ w)
    return {"hidden": hidden, "rows": td.take(w, index, 0).sum(1), "counts": index + 1}


def torch_mixed(x: Any, w: Any, index: Any) -> Any:
    return {"hidden": torch.tanh(x @ w), "rows": w[index].sum(1), "counts": index + 1}


def arguments() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([2, 0])


@pytest.fixture(scope="module")
def compiled() -> Any:
    return as_autograd(mixed, device="cpu")


def test_gradients_are_pytorch_s(compiled: Any) -> None:
    given = arguments()
    found, expected = compiled(*given), torch_mixed(*given)
    assert found["counts"].tolist() == [3, 1]
    assert not found["counts"].requires_grad
    losses = [(r["hidden"] ** 2).sum() + 3 * r["rows"].sum() for r in (found, expected)]
    mine, theirs = (torch.autograd.grad(loss, given[:2]) for loss in losses)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    # A result that nothing reads has a cotangent of zeros, and a fixed input no gradient.
    x, w, index = given
    only = compiled(x, w.detach(), index)["hidden"].sum()
    (alone,) = torch.autograd.grad(only, x)
    torch.testing.assert_close(alone, torch.autograd.grad(torch.tanh(x @ w).sum(), x)[0])


def test_gradcheck_agrees(compiled: Any) -> None:
    x, w, index = arguments()
    assert torch.autograd.gradcheck(lambda a, b: tuple(compiled(a, b, index).values())[:2], (x, w))


def test_a_second_gradient_is_refused(compiled: Any) -> None:
    x, w, index = arguments()
    (first,) = torch.autograd.grad(compiled(x, w, index)["hidden"].sum(), x, create_graph=True)
    with pytest.raises(td.GradientError, match="gradient of a gradient.*td.grad"):
        first.sum().backward()


def test_memory_is_shared(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads tensors where they are, and its results are the memory it wrote."""
    x, w, index = arguments()
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []
    session = compiled.forward.session
    run_there = session.run_there

    def looked_at(program: Any, arrays: Any) -> Any:
        outputs = run_there(program, arrays)
        seen.append((dict(arrays), outputs))
        return outputs

    monkeypatch.setattr(session, "run_there", looked_at)
    result = compiled(x, w, index)["hidden"]
    result.backward(torch.ones_like(result))
    (inputs, outputs), (again, gradients) = seen

    def address(array: np.ndarray) -> int:
        return int(array.ctypes.data)

    assert address(inputs["batch:batch.0"]) == x.data_ptr()
    assert address(again["batch:batch.1"]) == w.data_ptr()
    assert address(outputs["result:0"]) == result.data_ptr()
    assert x.grad is not None
    assert address(gradients["gradient:batch:batch.0"]) == x.grad.data_ptr()
    before = result.detach().clone()
    compiled(x * 2, w, index)
    assert torch.equal(result, before)  # the next call has other memory


def test_narrow_floats_cross_by_their_bits() -> None:
    tensor = torch.randn(3).bfloat16()
    array = host_array(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert torch.equal(as_tensor(array), tensor)


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(td.relu(self.norm(self.first(x)))))


def torch_net() -> torch.nn.Sequential:
    parts = {
        "first": torch.nn.Linear(3, 6),
        "norm": torch.nn.BatchNorm1d(6),
        "relu": torch.nn.ReLU(),
        "last": torch.nn.Linear(6, 2),
    }
    module = torch.nn.Sequential()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


@pytest.fixture(scope="module")
def forward() -> Any:
    model = Net()
    model.drop.p = 0.0
    return td.compile_forward(
        model, lambda m, x: m(x), td.Spec((8, 3)), device="oracle", training=True
    )


def test_parameters_are_trained_by_pytorch_s_optimizer(forward: Any) -> None:
    torch.manual_seed(0)
    twin = torch_net()
    function = as_autograd(forward)
    params = {n: t.detach().clone() for n, t in twin.state_dict().items()}
    trained = [params[n].requires_grad_() for n, _ in twin.named_parameters()]
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    mine, theirs = (torch.optim.SGD(p, 0.1) for p in (trained, twin.parameters()))
    for _ in range(3):
        losses = [torch.nn.functional.cross_entropy(o, y) for o in (function(x, params), twin(x))]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, (mine, theirs), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(params[name].detach(), value, rtol=1e-4, atol=1e-5)
    assert function.compiles == 2  # one forward and one backward


def test_a_model_s_own_values_serve_too(forward: Any) -> None:
    function = as_autograd(forward)
    tracked = forward.params["norm.num_batches_tracked"]
    x = torch.randn(8, 3, requires_grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    assert forward.params["norm.num_batches_tracked"] == tracked + 1
    with torch.no_grad():
        assert not function(x).requires_grad


def test_dropout_draws_the_same_in_both_programs() -> None:
    def dropped(x: Any) -> Any:
        return td.dropout(x, 0.5) * td.random.uniform(x.shape)

    function = as_autograd(dropped, device="oracle")
    x = torch.ones(64, requires_grad=True)
    first = function(x)
    first.sum().backward()
    torch.testing.assert_close(x.grad, first.detach())  # it is linear in ones
    assert not torch.equal(function(x), first)


class Rescaled(nn.Module):
    """A state that the result is multiplied by, and that the next call finds doubled."""

    def __init__(self) -> None:
        self.scale = nn.State((3,), nn.init.ones)

    def forward(self, x: Any) -> Any:
        result = x * td.exp(self.scale.tensor())
        td.update(self.scale, self.scale.tensor() * 2)
        return result


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_the_backward_reads_states_as_the_forward_found_them(device: str, is_given: bool) -> None:
    forward = td.compile_forward(
        Rescaled(), lambda m, x: m(x), td.Spec((2, 3)), device=device, training=True
    )
    function = as_autograd(forward)
    states = {"scale": torch.ones(3)}
    inputs = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    results = [function(x, states) if is_given else function(x) for x in inputs]
    for i, (x, result) in enumerate(zip(inputs, results, strict=True)):
        result.sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2, 3), 2.0**i).exp())
    held = states["scale"].tolist() if is_given else forward.params["scale"].tolist()
    assert held == [4, 4, 4]


def test_wrong_arguments_are_refused(forward: Any) -> None:
    function = as_autograd(forward)
    with pytest.raises(td.BatchError, match=r"the batch is a float32\[8,3\], and was"):
        function({"a": torch.zeros(8, 3)})
    with pytest.raises(td.BatchError, match="ndarray.*PyTorch's tensors"):
        function(np.zeros((8, 3), np.float32))
    with pytest.raises(td.BatchError, match=r"float32\[9,3\].*on_new_shape"):
        function(torch.zeros(9, 3))
    with pytest.raises(td.ArgumentError, match=r"missing: \['first.weight'"):
        function(torch.zeros(8, 3), {})
    with pytest.raises(td.ArgumentError, match="3 arguments"):
        function(1, 2, 3)
    with pytest.raises(td.ArgumentError, match="compile_forward"):
        as_autograd(Net())
    with pytest.raises(td.DTypeError, match="complex64"):
        as_autograd(lambda x: x, device="oracle")(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(td.ShapeError):
        as_autograd(lambda x, y: x @ y, device="oracle")(torch.zeros(3, 2), torch.zeros(3, 2))
    assert issubclass(td.IndexRangeError, IndexError)
    with pytest.raises(td.IndexRangeError):
        as_autograd(lambda t, i: td.embedding(i, t), device="oracle")(
            torch.zeros(3, 2), torch.tensor([3])
        )


def test_what_is_cheap_is_computed_again() -> None:
    """Of x → tanh(x) → products, only values that are no cheap function of others are saved."""

    def function(x: Any, w: Any) -> Any:
        h = td.relu(x @ w) * 2 + 1
        return td.tanh(h * h) @ w

    graph = td.trace(function, td.Spec((4, 4)), td.Spec((4, 4)))
    found = halves(graph, list(graph.leaves))
    assert len(found.saved) == 1  # x @ w
    assert sorted(o.name for o in found.backward.outputs) == sorted(graph.leaves)


# State dicts


def test_state_dicts_go_both_ways(forward: Any) -> None:
    torch.manual_seed(1)
    twin = torch_net()
    loaded = td.interop.torch.load_state_dict(forward, twin.state_dict())
    assert loaded.missing == ()
    back = td.interop.torch.state_dict(forward)
    other = torch_net()
    other.load_state_dict(back)
    for name, value in twin.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_state_dicts_of_modules_are_what_they_start_from() -> None:
    twin, model = torch_net(), Net()
    td.interop.torch.load_state_dict(model, twin.state_dict())
    found = td.interop.torch.state_dict(model)
    assert list(found) == [n for n, _ in model.declarations().items()] or set(found) == set(
        twin.state_dict()
    )
    assert torch.equal(found["first.weight"], twin.first.weight)
    part = {"first.weight": torch.zeros(6, 3).bfloat16(), "extra": torch.zeros(1)}
    with pytest.raises(td.LoadError, match="unexpected: \\['extra'\\]"):
        td.interop.torch.load_state_dict(model, part)
    missing, unexpected = td.interop.torch.load_state_dict(model, part, strict=False)
    assert "last.bias" in missing
    assert unexpected == ("extra",)
    assert not model.init()["first.weight"].any()
    with pytest.raises(td.LoadError, match="first.weight has the shape"):
        td.interop.torch.load_state_dict(model, {"first.weight": torch.zeros(2)}, strict=False)
    with pytest.raises(td.ArgumentError, match="holds no values"):
        td.interop.torch.load_state_dict(3, {})  # type: ignore[arg-type]


def test_a_step_s_state_dict_is_its_memory() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return (model(batch) ** 2).mean()

    step = td.compile_step(nn.Linear(3, 1), loss, td.optim.sgd(0.1), td.Spec((2, 3)), device="cpu")
    held = td.interop.torch.state_dict(step)
    before = held["weight"].clone()
    step(np.ones((2, 3), np.float32))
    assert not torch.equal(held["weight"], before)
    np.testing.assert_array_equal(held["weight"].numpy(), step.params["weight"])
    held["weight"].zero_()
    assert not step.params["weight"].any()
    assert torch.equal(td.interop.torch.state_dict(step.params)["bias"], held["bias"])


class Tied(nn.Module):
    def __init__(self) -> None:
        self.table = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.table.weight


def test_shared_values_have_all_their_names() -> None:
    found = td.interop.torch.state_dict(Tied())
    assert set(found) == {"table.weight", "head.weight"}
    assert found["table.weight"].data_ptr() == found["head.weight"].data_ptr()
