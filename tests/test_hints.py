"""Advice in errors is run: PyTorch's function beside the expression that stands in its place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from treadle import losses, nn
from treadle.base import elsewhere

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


MATRICES: dict[str, Any] = {
    "x": normal(3, 4), "y": normal(3, 4), "v": normal(3), "w": normal(3), "a": normal(3, 3),
    "b": normal(3, 4), "q": normal(2, 4, 5, 3), "volume": normal(2, 3, 4), "image": normal(2, 3, 8, 8),
    "line": normal(2, 3, 8), "cube": normal(2, 3, 4, 4, 4), "square": normal(3, 3) + 3 * np.eye(3),
    "chances": rng.uniform(0.1, 0.9, (3, 4)), "wanted": rng.uniform(0, 1, (3, 4)),
    "signs": np.sign(normal(3, 4)), "row_signs": np.sign(normal(3)), "labels": np.array([0, 3, 1]),
    "flags": (normal(3, 4) > 0) * 1.0, "indices": rng.integers(0, 3, (3, 4)), "place": np.array([2, 0]),
    "boundaries": np.sort(normal(5)), "classes": np.array([[1, 0, -1, -1], [2, 3, -1, -1], [0, -1, -1, -1]]),
}  # fmt: skip
NUMBERS: dict[str, Any] = {
    "axis": 1, "i": 0, "j": 1, "n": 2, "k": 2, "start": 1, "length": 2, "end": 5, "value": 2.5,
    "shape": (3, 4), "times": (2, 3), "sizes": (2, 2), "atol": 1e-8, "rtol": 1e-5, "most": 1.0,
    "math": math, "np": np,
}  # fmt: skip

# By the name of PyTorch: its call, and other values of the names in the advice, or the arguments
# of a function that the advice names alone.
CALLS: dict[str, Any] = {
    "cat": ("torch.cat(tensors, 1)", "[x, y]"),
    "hstack": ("torch.hstack(tensors)", "[x, y]"),
    "vstack": ("torch.vstack(tensors)", "[x, y]"),
    "row_stack": ("torch.vstack(tensors)", "[x, y]"),
    "column_stack": ("torch.column_stack(tensors)", "[x, y]"),
    "dstack": ("torch.dstack(tensors)", "[x, y]"),
    "clip": "(x, -0.5, 0.5)", "mm": "(a, b)", "bmm": "(volume, volume.mT)", "amax": "(x, 1)", "amin": "(x, 1)",
    "gather": "torch.gather(x, 1, indices)", "index_select": ("torch.index_select(x, 1, place)", {"indices": "place"}),
    "take_along_dim": "torch.take_along_dim(x, indices, 1)",
    "unbind": "torch.unbind(x, 1)", "unflatten": "torch.unflatten(x, 1, (2, 2))",
    "swapaxes": "torch.swapaxes(x, 0, 1)", "swapdims": "torch.swapdims(x, 0, 1)",
    "movedim": "(volume, 0, 2)", "tile": "torch.tile(x, times)", "broadcast_to": "torch.broadcast_to(x, shape)",
    "binary_cross_entropy_with_logits": "F.(x, wanted)", "binary_cross_entropy": "F.(chances, wanted)",
    "cross_entropy": "F.(x, labels)", "kl_div": "F.(x, wanted)",
    "scaled_dot_product_attention": ("F.scaled_dot_product_attention(q, q, q)", {"k": "q", "v": "q", "attn_mask": "None", "is_causal": "False"}),
    "dot": "torch.dot(v, w)", "mv": "torch.mv(a, w)", "addmm": "torch.addmm(x, a, b)",
    "addmv": "torch.addmv(v, a, w)", "addr": ("torch.addr(x, v, w)", {"x": "square"}), "ger": "torch.ger(v, w)",
    "baddbmm": ("torch.baddbmm(x, a, b)", {"x": "volume", "a": "volume[:, :, :3]", "b": "volume"}),
    "tensordot": ("torch.tensordot(a, b, 1)", {}), "inner": "torch.inner(x, y)",
    "var_mean": "torch.var_mean(x, 1)", "std_mean": "torch.std_mean(x, 1)",
    "narrow": "torch.narrow(x, 1, 1, 2)", "select": "torch.select(x, 1, 0)",
    "empty": ("torch.zeros(shape)", {}), "empty_like": ("torch.zeros_like(x)", {}),
    "full_like": "torch.full_like(x, 2.5)", "clone": "torch.clone(x)", "numel": "torch.numel(x)", "t": "torch.t(x)",
    "fliplr": "torch.fliplr(x)", "flipud": "torch.flipud(x)",
    "bucketize": "torch.bucketize(x, boundaries)",
    "kthvalue": "tuple(torch.kthvalue(x, 2, 1))",
    "isclose": ("torch.isclose(x, y)", {"y": "x * (1 + 1e-6)"}), "allclose": ("torch.tensor(torch.allclose(x, y))", {"y": "x * (1 + 1e-6)"}),
    "exp2": "torch.exp2(x)", "softmin": "F.softmin(x, 1)",
    "complex": "torch.view_as_real(torch.complex(v, w))", "polar": "torch.view_as_real(torch.polar(v, w))",
    "dist": "torch.dist(x, y)", "hsplit": "torch.hsplit(x, 2)", "vsplit": ("torch.vsplit(x, 2)", {"x": "x.T"}),
    "dsplit": ("torch.dsplit(x, 2)", {"x": "volume"}), "is_nonzero": ("torch.is_nonzero(x)", {"x": "v[0]"}),
    "is_tensor": "torch.is_tensor(x)", "logaddexp2": "torch.logaddexp2(x, y)",
    "msort": "torch.msort(x)", "mvlgamma": ("torch.mvlgamma(x, 2)", {"x": "chances + 1"}),
    "pdist": ("torch.pdist(x)", {"n": "3"}), "range": ("torch.arange(start, end + 1)", {}),
    "renorm": "torch.renorm(x, 2, 0, 1.0)", "rsub": "torch.rsub(x, y)", "sgn": "torch.sgn(x)", "sinc": "torch.sinc(x)",
    "logsigmoid": "F.logsigmoid(x)", "arctan2": "(x, y)", "pinverse": "(x)", "lu": None,
    **{f"arc{n}": "(chances)" for n in ("cos", "sin", "sinh", "tan", "tanh")}, "arccosh": "(chances + 1)",
    **dict.fromkeys(("inverse", "det", "slogdet", "matrix_exp"), "(square)"),
    "cholesky": "(square @ square.mT)", "matrix_power": "(square, 3)", "chain_matmul": ("torch.linalg.multi_dot((a, b))", "((a, b))"),
    **{f"{f}{d}": f"F.({i}, 2)" for f in ("max_pool", "avg_pool") for d, i in (("1d", "line"), ("2d", "image"), ("3d", "cube"))},
    **{f"lp_pool{d}": f"F.({i} ** 2, 2, 2)" for d, i in (("1d", "line"), ("2d", "image"), ("3d", "cube"))},
    **{f"max_pool{d}_with_indices": (f"F.max_pool{d}_with_indices({i}, 2)", f"({i}, 2)") for d, i in (("1d", "line"), ("2d", "image"), ("3d", "cube"))},
    **{f"adaptive_{k}_pool{d}": f"F.({i}, 2)" for k in ("max", "avg") for d, i in (("1d", "line"), ("2d", "image"), ("3d", "cube"))},
    **{f"conv{d}": f"F.({i}, {i}[:, :, :2])" for d, i in (("1d", "line"),)},
    "conv2d": "F.(image, image[:, :, :2, :2])", "conv3d": "F.(cube, cube[:, :, :2, :2, :2])",
    "conv_transpose1d": "F.(line, line[:1, :, :2].expand(3, -1, -1))",
    "conv_transpose2d": "F.(image, image[:1, :, :2, :2].expand(3, -1, -1, -1))",
    "conv_transpose3d": "F.(cube, cube[:1, :, :2, :2, :2].expand(3, -1, -1, -1, -1))",
    "l1_loss": "F.(x, y)", "mse_loss": "F.(x, y)", "huber_loss": "F.(x, y)", "smooth_l1_loss": "F.(x, y)",
    "nll_loss": "F.(F.log_softmax(x, 1), labels)", "gaussian_nll_loss": "F.(x, y, chances)",
    "poisson_nll_loss": "F.(x, wanted)", "soft_margin_loss": "F.(x, signs)", "multi_margin_loss": "F.(x, labels)",
    "triplet_margin_loss": "F.(x, y, b)", "multilabel_margin_loss": "F.(x, classes)",
    "multilabel_soft_margin_loss": "F.(x, flags)", "margin_ranking_loss": "F.(v, w, row_signs)",
    "hinge_embedding_loss": "F.(x, signs)", "cosine_embedding_loss": "F.(x, y, row_signs)",
    "from_numpy": None, "as_tensor": None,
}  # fmt: skip

# Advice that cannot be compared, and why.
NAMES = "It names a class, a module, a dtype or an option; other tests check that the name exists."
DRAWS = "It draws random numbers; shapes are compared below."
OTHER = "It says what to do where shapes are fixed, in words."
REASONS = {
    **dict.fromkeys(("rand_like", "randn_like", "normal", "bernoulli", "multinomial", "gumbel_softmax", "randperm", "randn", "rand", "randint"), DRAWS),
    **dict.fromkeys(("masked_select", "unique", "mode", "nanmedian", "nanquantile", "histc", "tril_indices", "triu_indices"), OTHER),
    **dict.fromkeys(("batch_norm", "group_norm", "instance_norm", "embedding_bag", "local_response_norm", "alpha_dropout", "bilinear", "rrelu", "upsample"), NAMES),
    **dict.fromkeys((f"dropout{n}d" for n in (1, 2, 3)), NAMES),
    **dict.fromkeys((f"max_unpool{n}d" for n in (1, 2, 3)), "Its indices come from a pooling; rows of td.max_unpool compare it."),
    **dict.fromkeys(("manual_seed", "no_grad", "inference_mode", "autocast", "amp", "autograd", "func", "device", "cuda", "save", "load", "utils", "float", "double", "half", "int", "long", "bool"), NAMES),
    **dict.fromkeys(("qr", "svd", "lu", "lstsq"), "Signs and orders are the algorithm's; tests of linear algebra compare products."),
    **dict.fromkeys(("from_numpy", "as_tensor"), "Both are arrays as tensors."),
    "ctc_loss": "It has four arguments of its own; rows of td.losses.ctc compare it.",
}  # fmt: skip


def expressions(remedy: str) -> list[str]:
    """The code of a remedy: "It is CODE, …." or "They are CODE and CODE."."""
    text = re.sub(r"^They are (value and index: )?", "It is ", remedy)
    text = text.removeprefix("It is ").removesuffix(".").partition(": ")[0]
    text = re.split(r", (?:or|of|for|with) | (?:of|for) (?=[a-z]+ |p |axis)| of \w+$|; ", text)[0]
    if remedy.startswith("They are"):
        return re.split(r" and |, (?=td\.)", text)
    return [text]


def variables(library: Any) -> dict[str, Any]:
    """The same arrays for both; names of functions by library."""
    return {n: library.tensor(a) for n, a in MATRICES.items()} | NUMBERS


def theirs(name: str, call: Any, other: dict[str, Any]) -> Any:
    known = variables(torch) | {"torch": torch, "F": F}
    known |= {n: eval(code, known) for n, code in other.items()}
    if call.startswith("("):
        call = f"torch.{name}{call}"
    return eval(call.replace("F.(", f"F.{name}("), known)


def ours(remedy: str, arguments: str | None, other: dict[str, Any]) -> Any:
    known = variables(td) | {"td": td, "losses": losses, "nn": nn, "F": td}
    known |= {n: eval(code, known) for n, code in other.items()}
    found = []
    for code in expressions(remedy):
        if arguments is not None and re.fullmatch(r"[\w.]+", code):
            code += arguments
        found.append(eval(code, known))
    return found[0] if len(found) == 1 else tuple(found)


def compared() -> Iterator[str]:
    for name in elsewhere.TREADLE:
        if name not in REASONS:
            yield name


@pytest.mark.parametrize("name", list(compared()))
def test_the_advice_is_what_pytorch_does(name: str) -> None:
    assert name in CALLS, f"{name}: compare it, or give a reason why that cannot be"
    entry = CALLS[name]
    call, extra = entry if isinstance(entry, tuple) else (entry, {})
    other = {"tensors": extra} if isinstance(extra, str) and extra[0] == "[" else {}
    other |= extra if isinstance(extra, dict) else {}
    arguments = None
    if isinstance(extra, str) and extra[0] == "(":
        arguments = extra
    elif "(" in call:
        plain = re.sub(r"^(F\.|torch\.\w+)?", "", call)
        arguments = plain if call[0] == "(" or call.startswith("F.(") else None
    expected = theirs(name, call, other)
    found = ours(elsewhere.TREADLE[name], arguments, other)
    same(found, expected, name)


def same(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, (tuple, list)) and not isinstance(expected, torch.Size):
        assert len(found) == len(expected), name
        for a, b in zip(found, expected, strict=True):
            same(a, b, name)
        return
    a, b = (np.asarray(v, np.float64) for v in (found, expected))
    assert a.shape == b.shape, name
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    "name", ["hstack", "vstack", "row_stack", "column_stack", "inner", "hsplit"]
)
def test_the_advice_for_vectors(name: str) -> None:
    """What follows "of vectors" in a remedy."""
    remedy = elsewhere.TREADLE[name]
    code = remedy.partition("of vectors ")[2].removesuffix(".")
    known = variables(td) | {
        "td": td,
        "tensors": [td.tensor(MATRICES["v"]), td.tensor(MATRICES["w"])],
    }
    v, w = torch.tensor(MATRICES["v"]), torch.tensor(MATRICES["w"])
    if name == "inner":
        same(eval(code, known), torch.inner(v, w), name)
    elif name == "hsplit":
        same(td.tensor_split(MATRICES["v"], 3, 0), torch.hsplit(v, 3), name)
        assert code == "along axis 0"
    else:
        same(eval(code, known), getattr(torch, name.replace("row_", "v"))((v, w)), name)


def test_reasons_are_about_advice_that_is_there() -> None:
    assert not REASONS.keys() - elsewhere.TREADLE.keys()
    assert not CALLS.keys() - elsewhere.TREADLE.keys()


@pytest.mark.parametrize(("code", "shape"), [
    ("rand_like", (3, 4)), ("randn_like", (3, 4)), ("randn", (3, 4)), ("rand", (3, 4)), ("randperm", (2,)),
])  # fmt: skip
def test_draws_have_the_shape(code: str, shape: tuple[int, ...]) -> None:
    found = ours(elsewhere.TREADLE[code], None, {})
    assert found.shape == shape
    if code == "randperm":
        np.testing.assert_array_equal(np.sort(found.numpy()), np.arange(2))


def test_losses_as_modules_are_the_functions() -> None:
    """Each module's advice names the function that its functional form is compared with."""
    for name, remedy in elsewhere.NN.items():
        if name.endswith("Loss") and "losses." in remedy:
            path = re.search(r"losses\.(\w+)", remedy)
            assert path is not None
            assert hasattr(losses, path[1]), name
    x, y = (torch.tensor(MATRICES[n]) for n in ("x", "y"))
    same(td.cosine_similarity(x.numpy(), y.numpy()), torch.nn.CosineSimilarity()(x, y), "cosine")
    same(td.pairwise_distance(x.numpy(), y.numpy()), torch.nn.PairwiseDistance()(x, y), "distance")
    image = MATRICES["image"]
    module = nn.Softmax(1)
    same(
        module.apply(module.init(0), image), torch.nn.Softmax2d()(torch.tensor(image)), "Softmax2d"
    )


def test_functions_of_one_name_and_two_meanings_say_so() -> None:
    x, index = MATRICES["x"], np.array([[5, 0], [11, 2]])
    expected = torch.take(torch.tensor(x), torch.tensor(index))
    same(td.take(x.reshape(-1), index), expected, "take")
    assert "torch.take counts" in (td.take.__doc__ or "")


# Names of PyTorch whose neighbours would be guessed, which no user of a model writes.
GUESSED = {
    "IntTensor", "LoggerBase", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "histogramdd",
    "iinfo", "indices_copy", "is_distributed", "native_channel_shuffle", "Container",
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "module"),
    [
        (td, torch),
        (td, F),
        (td.zeros((2,)), torch.Tensor),
        (nn, torch.nn),
        (td.linalg, torch.linalg),
    ],
)
def test_a_name_of_pytorch_is_never_taken_for_a_slip(place: Any, module: Any) -> None:
    """A guess at spelling leads from a function to another one: `fmax` was sent to `max`."""
    wrong = []
    for name in dir(module):
        if name[0] == "_" or name[-1] == "_" or not callable(getattr(module, name, None)):
            continue
        try:
            getattr(place, name)
        except AttributeError as error:
            if "Is it" in str(error) and name not in GUESSED:
                wrong.append(f"{name}: {error}")
    assert not wrong
