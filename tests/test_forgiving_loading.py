"""`load_params` that takes what fits: other names, prefixes, heads of another size, dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import treadle as td
from treadle import losses, nn, optim


class Net(nn.Module):
    """An encoder, and a head of which there are many."""

    def __init__(self, classes: int = 3):
        self.encoder, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, classes)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))


class Theirs(torch.nn.Module):
    def __init__(self, classes: int = 3):
        super().__init__()
        self.encoder, self.norm = torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(5, classes)


X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def forward(classes: int = 3) -> td.Forward:
    return td.compile_forward(Net(classes), lambda m, x: m(x), X, device="oracle")


def step() -> td.TrainStep:
    def loss(model, x):
        return losses.mse(model(x), td.zeros((6, 3)))

    return td.compile_step(Net(), loss, optim.sgd(0.1), X, device="oracle")


def named(theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(theirs.state_dict())


def test_what_is_missing_and_unexpected_as_pytorch_says_it() -> None:
    """The names and the order in which PyTorch's result unpacks."""
    values = named(Theirs())
    values.pop("head.bias")
    values["other.weight"] = torch.ones(2)
    theirs = Theirs().load_state_dict(values, strict=False)
    for target in (forward(), step()):
        found = target.load_params(values, strict=False)
        assert found.missing_keys == theirs.missing_keys == ["head.bias"]
        assert found.unexpected_keys == theirs.unexpected_keys == ["other.weight"]
        missing, unexpected = found
        assert (missing, unexpected) == (("head.bias",), ("other.weight",))
        np.testing.assert_array_equal(target.params["encoder.weight"], values["encoder.weight"])


@pytest.mark.parametrize(
    ("prefix", "rename"),
    [
        ("module.", {"module": ""}),
        ("module.", {"module.": ""}),
        ("model.backbone.", {"model": "wrong", "model.backbone": ""}),  # the longest counts
        ("", {"": ""}),
        ("net_", lambda name: name.removeprefix("net_")),
    ],
)
def test_prefixes_are_renamed(prefix: str, rename: object) -> None:
    values = named(Theirs())
    view = forward()
    found = view.load_params({prefix + n: v for n, v in values.items()}, rename=rename)
    assert tuple(found) == ((), ())
    for name, value in values.items():
        np.testing.assert_array_equal(view.params[name], value)


def test_parts_are_renamed() -> None:
    """Whole parts only: "fc" is no prefix of "fc2"; a name may go by itself, or be left out."""
    values = named(Theirs())
    renamed = {n.replace("encoder", "fc").replace("head", "fc2"): v for n, v in values.items()}
    view = forward()
    assert tuple(view.load_params(renamed, rename={"fc": "encoder", "fc2": "head"})) == ((), ())
    np.testing.assert_array_equal(view.params["head.weight"], values["head.weight"])

    def without_head(name: str) -> str | None:
        return None if name.startswith("head.") else name

    found = view.load_params({n: v + 1 for n, v in values.items()}, False, rename=without_head)
    assert (found.missing, found.unexpected) == (("head.weight", "head.bias"), ())
    np.testing.assert_array_equal(view.params["head.weight"], values["head.weight"])
    one = {"encoder.weight": "encoder.bias"}
    with pytest.raises(td.LoadError, match=r"makes encoder\.bias of both encoder\.weight and enc"):
        view.load_params(values, rename=one)


def test_a_head_of_another_size_is_left_out_only_when_asked() -> None:
    values = named(Theirs(classes=7))
    for target in (forward(), step()):
        before = target.params
        for strict in (True, False):
            with pytest.raises(td.LoadError, match=r"head\.weight has the shape.*skip_mismatched"):
                target.load_params(values, strict)
        assert all((target.params[n] == v).all() for n, v in before.items())
        found = target.load_params(values, skip_mismatched=True)
        assert found.mismatched == ("head.weight", "head.bias")
        assert (found.missing, found.unexpected) == ((), ())
        np.testing.assert_array_equal(target.params["head.weight"], before["head.weight"])
        np.testing.assert_array_equal(target.params["encoder.bias"], values["encoder.bias"])
    with pytest.raises(td.LoadError, match="is not an array"):
        forward().load_params({"head.bias": [[1.0], [1.0, 2.0]]}, False, skip_mismatched=True)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floats_of_any_width(dtype: type) -> None:
    view = forward()
    values = {n: v.astype(dtype) if v.dtype.kind == "f" else v for n, v in view.params.items()}
    view.load_params(values)
    for name, value in values.items():
        np.testing.assert_array_equal(view.params[name], value.astype(view.params[name].dtype))
        assert view.params[name].dtype == forward().params[name].dtype


def test_tensors_of_pytorch_as_they_come() -> None:
    """Parameters with gradients, bfloat16, and counts."""
    theirs = Theirs().to(torch.bfloat16)
    view = forward()
    assert view.load_params(dict(theirs.named_parameters()), strict=False).unexpected == ()
    wide = theirs.encoder.weight.detach().float().numpy()
    np.testing.assert_array_equal(view.params["encoder.weight"], wide)
    view.load_params({"norm.num_batches_tracked": torch.tensor(5)}, strict=False)
    assert view.params["norm.num_batches_tracked"] == 5


def test_conversions_that_lose_are_refused() -> None:
    view = td.compile_forward(Net(), lambda m, x: m(x), X, device="cpu")
    before = view.params
    for name, value, message in (
        ("head.bias", np.full(3, 1e39), "1e[+]39"),
        ("head.bias", np.arange(3), "is int64, not a float"),
        ("norm.num_batches_tracked", np.array(1.5), "not an integer"),
    ):
        with pytest.raises(td.LoadError, match=message):
            view.load_params({name: value}, strict=False)
    assert all((view.params[n] == v).all() for n, v in before.items())


def test_a_file_with_other_names(tmp_path) -> None:
    from safetensors.numpy import save_file

    values = {f"module.{n}": v.numpy() for n, v in named(Theirs(classes=7)).items()}
    save_file(values, tmp_path / "theirs.safetensors")
    view = forward()
    found = view.load(tmp_path / "theirs.safetensors", rename={"module": ""}, skip_mismatched=True)
    assert found.mismatched == ("head.weight", "head.bias")
    np.testing.assert_array_equal(view.params["norm.weight"], values["module.norm.weight"])
