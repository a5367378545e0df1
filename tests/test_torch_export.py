"""PyTorch modules through torch.export: every row, whole models, training, what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_rows
import treadle as td
import twins
from torch_rows import Sample
from treadle.interop.torch.exported import LEFT_OUT, dtype_of
from treadle.interop.torch.program import Call, Known, Program, Ref
from treadle.interop.torch.rows.all import ROWS

SAMPLES = list(torch_rows.samples())
PYTHON = ("operator.", "python.")  # rows that are Python's own functions


def treadle_s(value: Any) -> Any:
    """An argument as rows take it."""
    if isinstance(value, torch.Tensor):
        plain = value.float() if value.dtype is torch.bfloat16 else value
        return td.tensor(plain.numpy(), dtype_of(value.dtype))
    if isinstance(value, torch.dtype):
        return dtype_of(value)
    if isinstance(value, (list, tuple)):
        return [treadle_s(v) for v in value]
    return None if isinstance(value, torch.device) else value


def known(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Known(tuple(value.shape), dtype_of(value.dtype))
    return tuple(map(known, value)) if isinstance(value, (list, tuple)) else None


def torch_s(sample: Sample, arguments: Any) -> Any:
    name, _, overload = sample.op.partition(".")
    op = getattr(getattr(torch.ops.aten, name), overload)
    return op(*arguments, **sample.keywords)


def by_row(sample: Sample, arguments: Any, expected: Any) -> Any:
    keywords = {k: treadle_s(v) for k, v in sample.keywords.items() if k not in LEFT_OUT}
    call = Call(sample.op, ROWS[sample.op], tuple(arguments), keywords, known(expected))
    return Program(0, (call,), (Ref(0),)).run([])[0]


def compare(found: Any, expected: Any, sample: Sample) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        chosen = sample.compared or range(len(expected))
        for i in chosen:
            compare(found[i], expected[i], sample)
    elif isinstance(expected, torch.Tensor):
        assert found.shape == tuple(expected.shape)
        assert found.dtype is dtype_of(expected.dtype)
        if not sample.is_random:
            narrow = expected.dtype in (torch.bfloat16, torch.float16)
            plain = expected.detach().double() if expected.is_floating_point() else expected
            given = found.numpy().astype(plain.numpy().dtype)
            np.testing.assert_allclose(given, plain.numpy(), 1e-2 if narrow else 2e-5, 2e-6)
    else:
        assert found == expected


def test_every_row_has_a_sample() -> None:
    sampled = {s.op for s in SAMPLES}
    assert [op for op in ROWS if op not in sampled and not op.startswith(PYTHON)] == []
    assert len(sampled) >= 150


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rows_are_pytorch_s_ops(sample: Sample) -> None:
    expected = torch_s(sample, sample.arguments)
    td.random.seed(3)
    compare(by_row(sample, treadle_s(list(sample.arguments)), expected), expected, sample)


def differentiable(sample: Sample) -> bool:
    return not sample.is_random and any(
        isinstance(a, torch.Tensor) and a.is_floating_point() for a in sample.arguments
    )


def first_float(value: Any) -> Any:
    """The first result that has a gradient."""
    found = value if isinstance(value, (list, tuple)) else [value]
    for i, one in enumerate(found):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            return i if isinstance(value, (list, tuple)) else None
    return "none"


def torch_gradients(sample: Sample, at: list[int]) -> Any:
    """(results, which of them, weights of its elements, gradients); None where it has none."""
    arguments = list(sample.arguments)
    for i in at:
        arguments[i] = arguments[i].clone().requires_grad_()
    expected = torch_s(sample, arguments)
    chosen = first_float(expected)
    if chosen == "none":
        return None
    result = expected if chosen is None else expected[chosen]
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    total = (result.float() * weights).sum()
    grads = torch.autograd.grad(total, [arguments[i] for i in at], allow_unused=True)
    return expected, chosen, weights, grads


@pytest.mark.slow
@pytest.mark.parametrize("sample", [s for s in SAMPLES if differentiable(s)], ids=str)
def test_rows_have_pytorch_s_gradients(sample: Sample) -> None:
    floats = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in sample.arguments]
    at = [i for i, is_float in enumerate(floats) if is_float]
    try:
        try:
            theirs = torch_gradients(sample, at)
        except RuntimeError as error:  # for some arguments, as running statistics
            if "not differentiable with respect to" not in str(error):
                raise
            at = at[:1]
            theirs = torch_gradients(sample, at)
    except RuntimeError as error:
        # Its derivative is missing, or is for a source of the shape of the index alone.
        has_none = "scatter_add" in sample.op or "forward_only" in sample.op
        assert "not implemented" in str(error) or has_none  # noqa: PT017
        return
    if theirs is None:
        return
    expected, chosen, weights, grads = theirs

    def loss(*floats: Any) -> Any:
        given = treadle_s([None if i in at else a for i, a in enumerate(sample.arguments)])
        for i, x in zip(at, floats, strict=True):
            given[i] = x
        found = by_row(sample, given, expected)
        one = found if chosen is None else found[chosen]
        return (one * td.tensor(weights.numpy())).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", td.UnreachedWarning)
        inputs = [treadle_s(sample.arguments[i]) for i in at]
        found = td.grad(loss, range(len(at)))(*inputs)
    result = expected if chosen is None else expected[chosen]
    narrow = result.dtype in (torch.bfloat16, torch.float16)
    for mine, other, x in zip(found, grads, inputs, strict=True):
        all_of_it = np.zeros(x.shape) if other is None else other.numpy(force=True)
        np.testing.assert_allclose(mine.numpy(), all_of_it, 5e-3 if narrow else 2e-4, 2e-5)


# Whole modules


class Tagger(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8, padding_idx=0)
        self.lstm = torch.nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.out = torch.nn.Linear(12, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(tokens))[0])


class Net(torch.nn.Module):
    """Shapes that are computed, in-place ops, a view that is written to, buffers of all kinds."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 6, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(6),
            torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2),
        )
        self.drop = torch.nn.Dropout(p)
        self.head = torch.nn.Linear(6, 5)
        self.tied = self.head.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]), persistent=False)

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> dict[str, torch.Tensor]:
        self.seen += x.shape[0]
        y = x * self.scale[:, None, None] + shift
        y[:, 0] += 1
        with torch.no_grad():
            centre = y.mean()
        pooled = self.features(y - centre).mean((2, 3))
        return {"scores": self.drop(self.head(pooled)), "pooled": pooled}


def trained(
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    classes: int,
    steps: int = 3,
    rate: float = 0.05,
    device: str = "cpu",
) -> tuple[Any, torch.nn.Module]:
    """A module trained by both, which must agree in losses, outputs and values; the two steps."""
    imported = td.interop.torch.from_module(module, inputs)
    module.eval()
    with torch.no_grad():
        before = module(*inputs)
    module.train()
    target = torch.randint(0, classes, before.shape[:-1])
    batch = {"x": tuple(x.numpy() for x in inputs), "y": target.numpy()}

    def loss(model: Any, given: Any) -> Any:
        return td.losses.cross_entropy(model(*given["x"]), given["y"], axis=-1)

    step = td.compile_step(imported, loss, td.optim.sgd(rate, momentum=0.9), batch, device=device)
    predict = step.attach(lambda m, x: m(*x), batch["x"])
    np.testing.assert_allclose(predict(batch["x"]), before.numpy(), 1e-4, 1e-4)
    optimizer = torch.optim.SGD(module.parameters(), rate, momentum=0.9)
    for _ in range(steps):
        scores = module(*inputs)
        expected = torch.nn.functional.cross_entropy(
            scores.reshape(-1, scores.shape[-1]), target.reshape(-1)
        )
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert step(batch).loss == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)
    values = step.params
    for name, value in module.state_dict().items():
        if name in values:
            np.testing.assert_allclose(values[name], value.numpy(), 1e-2, 2e-3, err_msg=name)
    return step, module


@pytest.mark.slow
def test_a_tagger_trains_as_pytorch_s() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (3, 5))
    step, _ = trained(Tagger(), (tokens,), 4, device="oracle")
    assert not step.params["embed.weight"][0].any()  # the padding's row has no gradient


@pytest.mark.slow
def test_an_nn_transformer_trains_as_pytorch_s() -> None:
    torch.manual_seed(0)
    module = torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    trained(module, (torch.randn(2, 5, 16), torch.randn(2, 4, 16)), 16, device="oracle")


@pytest.mark.slow
def test_compiled_programs_train_as_pytorch_s() -> None:
    torch.manual_seed(0)
    trained(Tagger(), (torch.randint(0, 11, (3, 5)),), 4)
    module = torch.nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    trained(module, (torch.randn(3, 7, 32), torch.randn(3, 6, 32)), 32)


@pytest.mark.slow
def test_torchvision_s_networks_train_as_pytorch_s() -> None:
    torch.manual_seed(0)
    models = twins.torchvision()
    trained(models.resnet18(num_classes=7), (torch.randn(4, 3, 64, 64),), 7, rate=0.01)
    small = models.mobilenet_v3_small(num_classes=7, dropout=0.0)
    trained(small, (torch.randn(8, 3, 64, 64),), 7, rate=0.01)
    # The configuration of ViT-B/16, over four patches and their class token.
    vit = models.VisionTransformer(32, 16, 12, 12, 768, 3072, num_classes=7)
    torch.nn.init.normal_(vit.heads.head.weight, std=0.1)
    trained(vit, (torch.randn(2, 3, 32, 32),), 7, rate=0.001)


@pytest.fixture(scope="module")
def net() -> tuple[Any, Net]:
    torch.manual_seed(0)
    module = Net(0.5)
    return td.interop.torch.from_module(module, (torch.randn(4, 3, 6, 6),)), module


def test_names_and_values_are_the_module_s(net: tuple[Any, Net]) -> None:
    imported, module = net
    values = imported.init()
    assert set(values) | {"head.weight"} == set(module.state_dict())
    assert imported.first_name("head.weight") == "tied"
    theirs = {n for n, _ in module.named_parameters()}
    assert {n for n, _ in imported.named_parameters()} == theirs
    np.testing.assert_array_equal(values["features.0.weight"], module.features[0].weight.detach())
    assert values["seen"].dtype == np.int64
    assert "features" in repr(imported)
    assert imported.get_submodule("features.1").running_var.shape == (6,)


def test_buffers_change_and_dropout_draws_in_training_alone(net: tuple[Any, Net]) -> None:
    imported, module = net
    x = torch.randn(4, 3, 6, 6)

    def both(model: Any, given: Any) -> Any:
        found = model(given)
        return found["scores"], found["pooled"]

    train = td.compile_forward(imported, both, x.numpy(), training=True, device="oracle")
    first, pooled = train(x.numpy())
    second, _ = train(x.numpy())
    module.train()
    module(x)
    theirs = module(x)
    np.testing.assert_allclose(pooled, theirs["pooled"].detach().numpy(), 1e-4, 1e-5)
    assert (first != second).any()
    zeros = np.concatenate([first, second]) == 0
    assert 0.2 < zeros.mean() < 0.8
    kept = ~zeros[:4]
    for name in ("seen", "features.1.running_mean", "features.1.num_batches_tracked"):
        np.testing.assert_allclose(train.params[name], module.state_dict()[name].numpy(), 1e-4)
    held = td.compile_forward(imported, both, x.numpy(), device="oracle", share=train)
    module.eval()
    expected = module(x)["scores"].detach().numpy()
    np.testing.assert_allclose(held(x.numpy())[0], expected, 1e-4, 1e-5)
    assert kept.any()
    module.train()


def test_parts_follow_the_whole(net: tuple[Any, Net]) -> None:
    imported, _ = net
    with pytest.raises(td.ArgumentError, match="no mode of its own"):
        imported.features.eval()
    with pytest.raises(td.ArgumentError, match="cannot be called"):
        imported.features(np.zeros((4, 3, 6, 6), np.float32))
    imported.features.requires_grad_(False)
    assert [n for n, p in imported.named_parameters() if p.requires_grad] == [
        "tied",
        "head.bias",
    ]
    imported.requires_grad_(True)


def test_wrong_calls_are_refused(net: tuple[Any, Net]) -> None:
    imported, _ = net
    values = imported.init()
    with pytest.raises(
        td.ShapeError, match=r"x is float32\[2,3,6,6\].*float32\[4, 3, 6, 6\].*dynamic"
    ):
        imported.apply(values, np.zeros((2, 3, 6, 6), np.float32))
    with pytest.raises(td.ShapeError, match="x is int32"):
        imported.apply(values, np.zeros((4, 3, 6, 6), np.int32))
    with pytest.raises(td.ArgumentError, match="as the example inputs were given"):
        imported.apply(values, np.zeros((4, 3, 6, 6), np.float32), 1.0)


@pytest.mark.slow
def test_modes_of_parts_are_exported_as_they_are() -> None:
    """What a module in training holds in evaluation stays there, and the module is left as it was."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    module[0].eval()
    imported = td.interop.torch.from_module(module, torch.randn(4, 3))
    assert [m.training for m in module.modules()] == [True, False, True]
    assert imported.modes[True].updates == (
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    )
    assert imported.modes[False].updates == ()
    held = td.interop.torch.from_module(module, torch.randn(4, 3), mode="eval")
    assert held.modes[True] is held.modes[False]
    assert held.modes[True].updates == ()
    with pytest.raises(td.ArgumentError, match="mode"):
        td.interop.torch.from_module(module, torch.randn(4, 3), mode="test")


class Sized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        heads = self.linear(x).view(n, t, 2, -1).transpose(1, 2)
        rows = torch.arange(t)
        seen = rows[:, None] >= rows
        scores = torch.where(seen & mask[:, None, None], heads @ heads.mT, float("-inf"))
        flat = (scores.softmax(-1) @ heads).flatten(2).sum(1)
        return flat.view(n, t, -1) / t


@pytest.mark.slow
def test_sizes_may_be_dynamic() -> None:
    torch.manual_seed(0)
    module = Sized()
    dims = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    imported = td.interop.torch.from_module(
        module,
        (torch.randn(2, 3, 4),),
        {"x": dims, "mask": dims},
        keywords={"mask": np.ones((2, 3), np.bool_)},
    )
    values = imported.init()
    for n, t in ((2, 3), (5, 7)):
        x, mask = torch.randn(n, t, 4), torch.ones(n, t, dtype=torch.bool)
        found = imported.apply(values, x.numpy(), mask=mask.numpy())
        with torch.no_grad():
            np.testing.assert_allclose(found.numpy(), module(x, mask=mask).numpy(), 1e-4, 1e-5)
    with pytest.raises(td.ShapeError):
        imported.apply(values, np.zeros((2, 3, 4), np.float32), mask=np.ones((3, 3), np.bool_))


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.fft(x).abs() + torch.special.bessel_j0(x) + torch.special.bessel_j0(x + 1)
        return y.to(torch.int16)


def test_what_is_missing_is_listed_at_once() -> None:
    with pytest.raises(td.ArgumentError) as raised:
        td.interop.torch.from_module(Odd(), torch.randn(4))
    told = str(raised.value)
    assert "special_bessel_j0.default (4 ×)" in told  # twice in each of both programs
    assert "_fft_r2c.default (2 ×)" in told
    assert "int16" in told
    with pytest.raises(td.ArgumentError, match="not a torch.nn.Module"):
        td.interop.torch.from_module(torch.relu, torch.randn(4))
    with pytest.raises(td.ArgumentError, match="torch.export refused Net in training"):
        td.interop.torch.from_module(Net(), torch.randn(4, 7, 6, 6))


class Changing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


@pytest.mark.slow
def test_inputs_are_not_changed() -> None:
    with pytest.raises(td.ArgumentError, match="changes .* in place"):
        td.interop.torch.from_module(Changing(), torch.randn(4))


class Branching(torch.nn.Module):
    """Ops that take programs, and ops that PyTorch decomposes for lack of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        self.bag = torch.nn.EmbeddingBag(5, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda a: self.linear(a), lambda a: a * 2, (x,))
        again = checkpoint(lambda a: torch.relu(self.linear(a)), x, use_reentrant=False)
        with torch.no_grad():
            fixed = self.linear(x)
        grid = torch.tanh(torch.stack([chosen, again], -1))[None]
        image = fixed[None, None]
        sampled = torch.nn.functional.grid_sample(image, grid, align_corners=False)[0, 0]
        return sampled + again + self.bag(index)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_programs_inside_of_programs(sign: float) -> None:
    torch.manual_seed(0)
    module = Branching()
    x, index = sign * torch.rand(3, 4), torch.randint(0, 5, (3, 6))
    imported = td.interop.torch.from_module(module, (x, index))
    values = {n: td.tensor(v) for n, v in imported.init().items()}

    def loss(given: Any) -> Any:
        return (imported.apply(given, x.numpy(), index.numpy()) ** 2).sum()

    value, gradients = td.value_and_grad(loss)(values)
    expected = (module(x, index) ** 2).sum()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(
            gradients[name].numpy(), parameter.grad.numpy(), 1e-4, 1e-5, err_msg=name
        )
