"""Names that PyTorch has and Treadle has not, by where they are looked for: what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from treadle.base.errors import UnknownNameError

_DEVICE = "Devices are chosen when a program is compiled: device=."
_NO_GRAD = (
    "step.evaluate, step.attach and td.compile_forward record no gradients; td.stop_gradient(x) "
    "lets none pass."
)
_LOADED = "Values live in the step: step.params, step.load_params(state_dict), step.save(path)."
_DTYPE = "Parameters are float32; precision= of td.compile_step computes in narrower floats."
_HOOKS = "td.capture(name, x) in the forward: step(batch, captures=True) returns it."

# Of cos, cosh, …: PyTorch has inverses by two names.
_INVERSES = ("cos", "cosh", "sin", "sinh", "tan", "tanh")
_LAZY = tuple(
    f"{kind}{n}d" for kind in ("BatchNorm", "InstanceNorm", "Conv", "ConvTranspose")
    for n in (1, 2, 3)
)  # fmt: skip

_SPATIAL = (
    "conv", "conv_transpose", "max_pool", "avg_pool", "lp_pool", "max_unpool", "adaptive_avg_pool",
    "adaptive_max_pool",
)  # fmt: skip

_LINALG = {
    "inverse": "inv", "det": "det", "slogdet": "slogdet", "svd": "svd", "qr": "qr",
    "cholesky": "cholesky", "pinverse": "pinv", "lstsq": "lstsq",
    "matrix_power": "matrix_power", "matrix_exp": "matrix_exp", "chain_matmul": "multi_dot",
}  # fmt: skip
# Losses by PyTorch's two names: of a function before "_loss", of a module before "Loss".
_LOSSES = {
    "l1": "L1", "mse": "MSE", "nll": "NLL", "ctc": "CTC", "huber": "Huber",
    "smooth_l1": "SmoothL1", "gaussian_nll": "GaussianNLL", "poisson_nll": "PoissonNLL",
    "soft_margin": "SoftMargin", "multi_margin": "MultiMargin", "triplet_margin": "TripletMargin",
    "multilabel_margin": "MultiLabelMargin", "multilabel_soft_margin": "MultiLabelSoftMargin",
    "margin_ranking": "MarginRanking", "hinge_embedding": "HingeEmbedding",
    "cosine_embedding": "CosineEmbedding",
}  # fmt: skip

TREADLE = {
    "cat": "It is td.concat(tensors, axis).",
    "hstack": "It is td.concat(tensors, 1), of vectors td.concat(tensors).",
    "vstack": "It is td.concat(tensors), of vectors td.stack(tensors).",
    "clip": "It is td.clamp.",
    "cross_entropy": "It is td.losses.cross_entropy.",
    "kl_div": "It is td.losses.kl_div.",
    "mm": "It is td.matmul, or @.",
    "bmm": "It is td.matmul, or @.",
    "amax": "It is td.max.",
    "amin": "It is td.min.",
    "gather": "It is td.take_along_axis(x, indices, axis).",
    "index_select": "It is td.take(x, indices, axis).",
    "masked_select": "Shapes are fixed: td.where(mask, x, 0), or multiply by the mask.",
    "unbind": "It is x.unbind(axis).",
    "unflatten": "It is x.unflatten(axis, sizes).",
    "swapaxes": "It is td.transpose(x, i, j).",
    "swapdims": "It is td.transpose(x, i, j).",
    "movedim": "It is td.moveaxis.",
    "tile": "It is x.tile(times).",
    "broadcast_to": "It is td.expand(x, shape).",
    **{f"{f}{n}d": f"It is td.{f}, for any number of axes." for f in _SPATIAL for n in (1, 2, 3)},
    "batch_norm": "It is nn.BatchNorm1d, 2d or 3d, which hold running statistics.",
    "group_norm": "It is nn.GroupNorm.",
    "instance_norm": "It is nn.InstanceNorm1d, 2d or 3d.",
    "scaled_dot_product_attention": "It is td.attention(q, k, v, attn_mask, is_causal).",
    "binary_cross_entropy_with_logits": "It is td.losses.bce_with_logits.",
    "binary_cross_entropy": "It is td.losses.bce.",
    "dot": "It is (v * w).sum().",
    "mv": "It is a @ w.",
    "addmm": "It is x + a @ b.",
    "addmv": "It is v + a @ w.",
    "addr": "It is x + td.outer(v, w).",
    "ger": "It is td.outer(v, w).",
    "baddbmm": "It is x + a @ b.",
    "tensordot": "It is td.einsum('ij,jk->ik', a, b), with a label for each axis.",
    "var_mean": "They are td.var(x, axis) and td.mean(x, axis).",
    "narrow": "It is x[:, start:start + length] for axis 1.",
    "select": "It is x[:, i] for axis 1.",
    "empty": "It is td.zeros(shape).",
    "empty_like": "It is td.zeros_like(x).",
    "full_like": "It is td.full(x.shape, value, x.dtype).",
    "clone": "It is x: tensors never change.",
    "numel": "It is x.size.",
    "t": "It is x.T.",
    "column_stack": "It is td.concat(tensors, 1), of vectors td.stack(tensors, 1).",
    "row_stack": "It is td.concat(tensors), of vectors td.stack(tensors).",
    "dstack": "It is td.stack(tensors, 2) of matrices.",
    "fliplr": "It is td.flip(x, 1).",
    "flipud": "It is td.flip(x, 0).",
    "take_along_dim": "It is td.take_along_axis(x, indices, axis).",
    "bucketize": "It is td.searchsorted(boundaries, x).",
    "histc": "It is td.bincount of the bins that td.searchsorted finds.",
    "kthvalue": "They are value and index: td.sort(x, 1)[0][:, k - 1], td.sort(x, 1)[1][:, k - 1].",
    "unique": "Shapes are fixed: find what is unique with NumPy, and pass it in the batch.",
    "isclose": "It is td.abs(x - y) <= atol + rtol * td.abs(y) of finite numbers.",
    "allclose": "It is td.all(td.abs(x - y) <= atol + rtol * td.abs(y)) of finite numbers.",
    "tril_indices": "They are constants: np.tril_indices.",
    "triu_indices": "They are constants: np.triu_indices.",
    "exp2": "It is td.pow(2.0, x).",
    "softmin": "It is td.softmax(-x, axis).",
    "inner": "It is td.matmul(x, td.transpose(y, -2, -1)), of vectors v @ w.",
    "std_mean": "They are td.std(x, axis) and td.mean(x, axis).",
    "embedding_bag": "It is nn.EmbeddingBag.",
    "local_response_norm": "It is nn.LocalResponseNorm.",
    "alpha_dropout": "It is nn.AlphaDropout.",
    "bilinear": "It is nn.Bilinear.",
    "upsample": "It is td.interpolate.",
    "rand_like": "It is td.random.uniform(x.shape).",
    "randn_like": "It is td.random.normal(x.shape).",
    "normal": "It is td.random.normal(shape, mean, std).",
    "bernoulli": "It is td.random.bernoulli(p).",
    "multinomial": "It is td.random.multinomial(p, num_samples).",
    "gumbel_softmax": "It is td.random.gumbel_softmax.",
    "randperm": "It is td.argsort(td.random.uniform((n,))), or NumPy's in the batch.",
    **{f"arc{name}": f"It is td.a{name}." for name in _INVERSES},
    "arctan2": "It is td.atan2.",
    "complex": "It is td.fft.complex(v, w): pairs along a last axis of two.",
    "polar": "It is td.fft.complex(v * td.cos(w), v * td.sin(w)).",
    "dist": "It is td.norm(x - y).",
    "hsplit": "It is td.tensor_split(x, n, 1), of vectors along axis 0.",
    "vsplit": "It is td.tensor_split(x, n).",
    "dsplit": "It is td.tensor_split(x, n, 2).",
    "is_nonzero": "It is x.item() != 0 of an eager tensor.",
    "is_tensor": "It is isinstance(x, td.Tensor).",
    "logaddexp2": "It is td.logaddexp(x * math.log(2), y * math.log(2)) / math.log(2).",
    "lu": "It is td.linalg.lu.",
    "mode": "Shapes are fixed: td.argmax(td.bincount(index, size)) of small integers.",
    "msort": "It is td.sort(x, 0)[0].",
    "mvlgamma": "It is td.lgamma(x) + td.lgamma(x - 0.5) + 0.5 * math.log(math.pi) for p = 2.",
    "nanmedian": "NaN is the greatest: td.sort(x), and an index by td.count_nonzero.",
    "nanquantile": "NaN is the greatest: td.sort(x), and an index by td.count_nonzero.",
    "pdist": "It is td.cdist(x, x)[np.triu_indices(n, 1)] of n rows.",
    "range": "It is td.arange(start, end + 1).",
    "renorm": "It is x * td.clamp(most / td.norm(x, axis=1, keepdims=True), max=1.0) of rows.",
    "rsub": "It is y - x.",
    "sgn": "It is td.sign(x).",
    "sinc": "It is td.where(x == 0, 1.0, td.sin(x * math.pi) / "
    "td.where(x == 0, 1.0, x * math.pi)).",
    **{
        f"max_pool{n}d_with_indices": "It is td.max_pool_with_indices, for any number of axes."
        for n in (1, 2, 3)
    },
    "rrelu": "It is nn.RReLU.",
    "logsigmoid": "It is td.log_sigmoid(x).",
    **{f"dropout{n}d": f"It is nn.Dropout{n}d." for n in (1, 2, 3)},
    **{name: f"It is td.linalg.{ours}." for name, ours in _LINALG.items()},
    **{f"{name}_loss": f"It is td.losses.{name}." for name in _LOSSES},
    "from_numpy": "It is td.tensor; steps and forwards take NumPy arrays as they are.",
    "as_tensor": "It is td.tensor; steps and forwards take NumPy arrays as they are.",
    "randn": "It is td.random.normal(shape).",
    "rand": "It is td.random.uniform(shape).",
    "randint": "It is td.random.randint(low, high, shape).",
    "manual_seed": "A step has a seed=; td.random.seed(value) is for eager calls.",
    "no_grad": _NO_GRAD,
    "inference_mode": _NO_GRAD,
    "autocast": "It is precision= of td.compile_step.",
    "amp": "It is precision= of td.compile_step.",
    "autograd": "It is td.grad, td.vjp and td.custom_vjp.",
    "func": "td.grad, td.vjp, td.jvp and model.apply are its functions.",
    "device": _DEVICE,
    "cuda": _DEVICE,
    "save": "It is step.save(path).",
    "load": "It is step.load(path), or load_params of arrays by name.",
    "utils": "Loaders are in td.data.",
    "float": "It is td.float32.",
    "double": "It is td.float64.",
    "half": "It is td.float16.",
    "int": "It is td.int32.",
    "long": "It is td.int64.",
    "bool": "It is td.bool_.",
}
NN = {
    "functional": "Functions are in td: td.relu(x); losses in td.losses.",
    "utils": "Clipping is clip_norm= of td.compile_step; lengths= of nn.LSTM are packed sequences.",
    "Buffer": "It is nn.State.",
    "ParameterList": "A list of parameters will do.",
    "ParameterDict": "A dict of parameters will do.",
    "Transformer": "Join nn.TransformerEncoder and nn.TransformerDecoder.",
    **{f"{theirs}Loss": f"It is a function: losses.{ours}." for ours, theirs in _LOSSES.items()},
    "KLDivLoss": "It is a function: losses.kl_div.",
    "SyncBatchNorm": "It is nn.BatchNorm2d; td.DataParallel(batch_norm=) says over which rows.",
    "CosineSimilarity": "It is a function: td.cosine_similarity.",
    "PairwiseDistance": "It is a function: td.pairwise_distance.",
    "Softmax2d": "It is nn.Softmax(1).",
    **{f"Lazy{name}": f"It is nn.{name}, which is given its sizes." for name in _LAZY},
    "CrossEntropyLoss": "It is a function: losses.cross_entropy(scores, labels).",
    "BCELoss": "It is a function: losses.bce(chances, wanted).",
    "BCEWithLogitsLoss": "It is a function: losses.bce_with_logits(scores, wanted).",
}
OPTIM = {
    "lr_scheduler": "A schedule is a learning rate: optim.adam(optim.cosine(1e-3, steps=1000)).",
    "swa_utils": "They are optim.swa and optim.ema.",
}
TENSOR = {
    "backward": "Return the loss from the function that td.compile_step is given, which "
    "differentiates it; td.grad(function) does elsewhere.",
    "grad": "step.gradients(batch) has gradients by parameter; td.grad(function) elsewhere.",
    "grad_fn": "td.grad(function) differentiates functions.",
    "requires_grad": "td.grad(function) says what is differentiated by.",
    "requires_grad_": "td.grad(function) says what is differentiated by.",
    "retain_grad": "td.grad(function) says what is differentiated by.",
    "data": "td.stop_gradient(x) lets no gradient pass.",
    "device": _DEVICE,
    "is_cuda": _DEVICE,
    "cuda": _DEVICE,
    "cpu": "Steps and forwards return NumPy arrays; x.numpy() is that of an eager tensor.",
    "values": "It is the values already; argmax, argmin or argsort give indices.",
    "indices": "argmax, argmin or argsort give indices.",
    "nonzero": "Shapes are fixed: td.nonzero(x, size) of a vector.",
    "masked_select": "Shapes are fixed: td.where(mask, x, 0), or multiply by the mask.",
    "multinomial": "It is td.random.multinomial(x, num_samples).",
    "stft": "It is td.stft(x, n_fft).",
    "istft": "It is td.istft(z, n_fft).",
    "matrix_power": "It is td.linalg.matrix_power(x, n).",
    "matrix_exp": "It is td.linalg.matrix_exp(x).",
    "new_zeros": "It is td.zeros(shape, x.dtype).",
    "new_ones": "It is td.ones(shape, x.dtype).",
    "new_tensor": "It is td.tensor.",
}
MODULE = {
    "state_dict": _LOADED,
    "load_state_dict": _LOADED,
    "buffers": "It is named_states().",
    "named_buffers": "It is named_states().",
    "to": _DEVICE,
    "cuda": _DEVICE,
    "cpu": _DEVICE,
    "float": _DTYPE,
    "half": _DTYPE,
    "bfloat16": _DTYPE,
    "double": _DTYPE,
    "zero_grad": "Gradients are not kept: every step has its own.",
    "register_buffer": "Set an attribute: self.name = nn.State(shape).",
    "register_parameter": "Set an attribute: self.name = nn.Parameter(shape).",
    "add_module": "Set an attribute: self.name = module.",
    "register_module": "Set an attribute: self.name = module.",
    "register_forward_hook": _HOOKS,
    "register_forward_pre_hook": _HOOKS,
    "register_full_backward_hook": "step.gradients(batch) has gradients by parameter; "
    "td.custom_vjp changes one on its way.",
}


def unknown(
    where: str, name: str, remedies: dict[str, str], known: Iterable[str] = ()
) -> AttributeError:
    """The error for a name that is not there, with what stands in its place where that is known."""
    plain = f"{where} has no attribute {name!r}"
    if name.startswith("__"):  # asked for by Python and NumPy, which want no advice
        return AttributeError(plain)
    remedy = remedies.get(name) or _similar(name, known)
    return (
        UnknownNameError(where, f"there is no {name!r}", remedy)
        if remedy
        else AttributeError(plain)
    )


def _similar(name: str, known: Iterable[str]) -> str:
    names = {n.lower(): n for n in known if not n.startswith("_")}
    for ending in ("", "_loss"):
        exact = names.get(name.lower().removesuffix(ending))
        if exact is not None:
            return f"It is {exact}."
    close = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.8)
    return f"Is it {' or '.join(names[n] for n in close)}?" if close else ""
