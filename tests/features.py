"""Every public layer, function, loss and metric, with its rows: what is compared, and with what.

The tables of the other tests are collected here; `test_features.py` runs over them and
`tools/support_page.py` makes a page of them. What has no rows has a test of its own, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import function_rows
import public_names
import pytorch_rows
import test_fft
import test_layers
import test_linalg
import test_losses
import test_metrics
import test_more_functions
import test_more_losses
import test_sizes_layers
import test_sizes_losses
import test_sizes_metrics
import treadle as td
from layer_cases import Case
from public_names import offered
from sizes import SIZES, SOME, Problem, reference, spec_of, values_and_gradients
from treadle.base import trees
from treadle.ir.graph import Graph

LEAST = 5  # configurations of each feature
DEFINED = "its definition, written with PyTorch"


@dataclass(frozen=True)
class Feature:
    """A public name, and how to make each of its rows."""

    kind: str
    name: str
    problems: tuple[Callable[[], Problem], ...] = ()
    graphs: tuple[Callable[[], Graph], ...] = ()  # of metrics: their statistics
    exact: int = 0  # configurations that are compared on the oracle, in float64
    against: str = DEFINED

    @property
    def title(self) -> str:
        return f"{self.kind}.{self.name}"

    def rows(self) -> tuple[Callable[[], Graph], ...]:
        """Each row's graph: its values, and gradients where it has them."""
        return self.graphs or tuple(partial(_graph_of, make) for make in self.problems)


def _graph_of(make: Callable[[], Problem]) -> Graph:
    problem = make()
    known = reference(problem)
    given = [problem.floats, problem.constants, known.cotangents]
    specs = trees.map_leaves(spec_of, given)
    return td.trace(partial(values_and_gradients, problem.ours), *specs)


def grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


# Layers


def layers() -> list[Feature]:
    """Rows whose results are floats; indices of maxima are compared by the tests of layers."""
    rows = grouped((c.name, c) for c in test_layers.TABLE)
    found = []
    for name, cases in rows.items():
        shown = [c for c in cases if not getattr(c.ours(), "return_indices", False)]
        shown = [c for c in shown if is_compared(c)]
        makes = tuple(partial(test_sizes_layers.problem, c) for c in shown)
        against = f"torch.nn.{name}" if name in vars(torch.nn) else DEFINED
        count = sum(len(c.modes) for c in cases)
        found.append(Feature("nn", name, makes, exact=count, against=against))
    return found


def is_compared(c: Case) -> bool:
    """Whether a row has elements, and something to be differentiated by."""
    arrays = trees.flatten(test_layers.arrays_of(c))[0]
    has_floats = any(a.dtype.kind == "f" for a in arrays) or bool(list(c.theirs().parameters()))
    return has_floats and all(a.size for a in arrays)


# Functions


def functions() -> list[Feature]:
    table = [*function_rows.ROWS, *(r for r in pytorch_rows.ROWS if "." not in r.name)]
    rows = grouped((r.name, partial(function_rows.problem, r)) for r in table)
    more = grouped(
        (c.name, partial(test_more_functions.problem, c)) for c in test_more_functions.TABLE
    )
    found = []
    for name in sorted(rows.keys() | more.keys()):
        makes = (*rows.get(name, ()), *more.get(name, ()))
        found.append(Feature("td", name, makes, exact=len(makes), against=_torch_name(name)))
    return found


def _torch_name(name: str) -> str:
    if name in vars(torch):
        return f"torch.{name}"
    return f"torch.nn.functional.{name}" if name in vars(F) else DEFINED


def fft_features() -> list[Feature]:
    found = []
    for name in test_fft.NAMES:
        makes = tuple(partial(_given, p) for p in test_fft.every_case(name).values())
        found.append(Feature("td.fft", name, makes, exact=len(makes), against=f"torch.fft.{name}"))
    return found


# Rows of the tests of linear algebra that are about each function.
LINEAR_ALGEBRA = {
    "cholesky": ("cholesky", "upper cholesky"), "inv": ("inv",), "det": ("det",),
    "slogdet": ("slogdet",), "lu": ("lu",), "qr": ("qr",), "eigh": ("eigh",),
    "eigvalsh": ("eigvalsh",), "svd": ("svd",), "pinv": ("pinv",), "solve": ("solve", "from the right"),
    "solve_triangular": ("lower", "upper, ones"), "lstsq": ("lstsq",),
    "matrix_norm": ("norm fro", "norm nuc", "norm 2"),
}  # fmt: skip


def linalg_features() -> list[Feature]:
    found = []
    for name, rows in LINEAR_ALGEBRA.items():
        problems: list[Problem] = []
        for row in rows:
            if row in test_linalg.FUNCTIONS:
                problems += test_linalg.of_squares(row, test_linalg.SQUARES).values()
            elif row in test_linalg.TALL:
                problems += test_linalg.of_others(row, test_linalg.OTHERS).values()
            else:
                problems += test_linalg.of_systems(row, test_linalg.RIGHT).values()
        makes = tuple(partial(_given, p) for p in problems)
        against = f"torch.linalg.{name}"
        found.append(Feature("td.linalg", name, makes, exact=len(makes), against=against))
    return found


def _given(problem: Problem) -> Problem:
    return problem


def folder_features() -> list[Feature]:
    """Functions of `td.linalg` and other folders that have rows as functions have."""
    rows = grouped(
        (r.name, partial(function_rows.problem, r)) for r in pytorch_rows.ROWS if "." in r.name
    )
    found = []
    for title, makes in rows.items():
        folder, _, name = title.rpartition(".")
        found.append(
            Feature(f"td.{folder}", name, tuple(makes), exact=len(makes), against=f"torch.{title}")
        )
    return found


# Losses

PYTORCHS = {
    "mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss, "nll": F.nll_loss,
    "cross_entropy": F.cross_entropy, "bce": F.binary_cross_entropy, "kl_div": F.kl_div,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}  # fmt: skip
REDUCTIONS = ("none", "mean", "sum")


def loss_features() -> list[Feature]:
    exact = Counter(c.name for c in test_losses.TABLE)
    pairs = [(size, REDUCTIONS[i % 3]) for i, size in enumerate(SOME)]
    found = []
    for name, make in test_sizes_losses.MAKES.items():
        makes = tuple(partial(make, *size, reduction) for size, reduction in pairs)
        count = exact[name] * len(REDUCTIONS) or len(makes)
        against = _loss_name(PYTORCHS.get(name))
        found.append(Feature("losses", name, makes, exact=count, against=against))
    for name in test_more_losses.NAMES:
        cases = test_more_losses.cases_of(name)
        makes = tuple(partial(test_more_losses.problem, *c) for c in cases)
        against = _loss_name(test_more_losses.THEIRS[name])
        found.append(Feature("losses", name, makes, exact=len(makes), against=against))
    for name, makes in LOSSES_BY_DEFINITION.items():
        found.append(Feature("losses", name, makes, exact=len(makes)))
    return found


def _loss_name(function: Any) -> str:
    is_pytorchs = function is not None and function.__module__ == F.__name__
    return f"torch.nn.functional.{function.__name__}" if is_pytorchs else DEFINED


def contrasted(n: int, d: int, temperature: float) -> Problem:
    """Rows of one class against all others, by the formula of the paper."""
    rng = np.random.default_rng(n * d)
    target = rng.integers(0, 3, n)

    def theirs(floats: Any, constants: Any) -> Any:
        z, y = F.normalize(floats["x"]), constants["y"]
        scores, itself = z @ z.T / temperature, torch.eye(n, dtype=torch.bool)
        log_p = scores - scores.masked_fill(itself, -np.inf).logsumexp(1, keepdim=True)
        same = (y[None] == y[:, None]) & ~itself
        count = same.sum(1)
        rows = -(log_p * same).sum(1)[count > 0] / count[count > 0]
        return rows.mean()

    def ours(floats: Any, constants: Any) -> Any:
        given = floats["x"], constants["y"], temperature
        return td.add(td.losses.supervised_contrastive(*given), 0)

    return Problem(ours, theirs, {"x": test_more_losses.normal(n, d)}, {"y": target})


def boxes(*shape: int) -> Problem:
    floats = {"a": test_more_losses.boxes(*shape), "b": test_more_losses.boxes(*shape)}

    def theirs(given: Any, _: Any) -> Any:
        """The shared area over the union, without the small number that losses add to it."""
        share, union, _ = test_more_losses.overlap(given["a"], given["b"])
        return share * (union + 1e-7) / union

    return Problem(lambda given, _: td.losses.box_iou(given["a"], given["b"]), theirs, floats)


SIZES_OF_ROWS = ((5, 3), (17, 4), (9, 6), (33, 2), (8, 7))
LOSSES_BY_DEFINITION: dict[str, tuple[Callable[[], Problem], ...]] = {
    "supervised_contrastive": tuple(
        partial(contrasted, n, d, t)
        for (n, d), t in zip(SIZES_OF_ROWS, (0.1, 0.5, 1.0, 0.2, 0.3), strict=True)
    ),
    "box_iou": tuple(partial(boxes, *s) for s in ((7,), (5, 3), (2, 3, 4), (17, 5), (1, 1))),
}

# Metrics


def metric_features() -> list[Feature]:
    """Statistics of every size, as a program would compute them."""
    table = {**test_sizes_metrics.CLASSES, **test_sizes_metrics.TWO}
    exact = Counter(type(p.values[0]).__name__ for p in test_metrics.CLASS_METRICS)
    found = []
    for name, (metric, _) in table.items():
        is_curve = name in test_sizes_metrics.TWO
        graphs = tuple(partial(_statistics, metric, f, n, is_curve) for f, n in SIZES)
        count = exact[name] * len(test_metrics.CLASS_CASES) or len(test_metrics.BINARY_CASES)
        found.append(Feature("metrics", name, (), graphs, count, "scikit-learn"))
    return found


def _statistics(metric: Any, features: int, rows: int, is_curve: bool) -> Graph:
    scores = td.Spec((rows,) if is_curve else (rows, features))
    specs = scores, td.Spec((rows,), td.int32), td.Spec((rows,))
    return td.trace(lambda *given: metric.update(*given), *specs)


FEATURES = [
    *layers(),
    *functions(),
    *linalg_features(),
    *fft_features(),
    *folder_features(),
    *loss_features(),
    *metric_features(),
]

# What has no rows, and the test that looks at it instead: draws, containers, transformations.
TESTED = {
    "nn.Module": "test_modules.py::test_names_are_paths_in_the_order_of_attributes",
    "nn.Parameter": "test_modules.py::test_declarations",
    "nn.State": "test_modules.py::test_updates_are_for_the_next_call",
    "nn.ModuleDict": "test_modules.py::test_a_dict_of_modules",
    "nn.KVCache": "test_transformers.py::test_a_cache_decodes_as_the_whole_sequence",
    "nn.T5RelativeBias": "test_transformers.py::test_t5_buckets",
    "nn.alibi_bias": "test_transformers.py::test_alibi",
    "nn.causal_mask": "test_transformers.py::test_masks",
    "nn.sliding_window_mask": "test_transformers.py::test_masks",
    "td.dropout": "test_more_functions.py::test_dropout_scales_what_is_left",
    "td.tensor": "test_promotion.py::test_tensor_takes_the_dtype_of_its_data",
    "td.trace": "test_graph.py::test_text_reads_well_and_parses_back",
    "td.capture": "test_step.py::test_captures_and_norms_come_when_asked_for",
    "td.metric": "test_step.py::test_metrics_without_weight_are_nan",
    "td.debug_print": "test_step.py::test_debug_print_runs_with_the_step",
    "td.update": "test_modules.py::test_updates_are_for_the_next_call",
    "td.summary": "test_modules.py::test_summary",
    "td.scan": "test_transforms.py::test_scan_as_a_loop",
    "td.checkpoint": "test_transforms.py::test_checkpoint_changes_nothing",
    "td.grad": "test_transforms.py::test_gradient_of_a_tree",
    "td.value_and_grad": "test_transforms.py::test_has_aux",
    "td.vjp": "test_transforms.py::test_vjp_as_torch",
    "td.jvp": "test_transforms.py::test_jvp_as_torch",
    "td.custom_vjp": "test_transforms.py::test_custom_vjp_is_used",
    "td.compile": "test_step.py::test_compile_gives_a_program",
    "td.compile_forward": "test_step.py::test_a_forward_may_own_a_cache",
    "td.calibrate": "test_search.py::test_rates_are_measured_once",
    "td.compile_step": "test_step.py::test_a_step_learns_and_tells",
    "td.compile_manual_step": "test_step.py::test_a_backward_of_your_own_drives_the_same_step",
    "td.ensemble": "test_ensemble.py::test_each_member_is_its_own_training",
    "td.random.seed": "test_random.py::test_seed_starts_the_eager_stream_again",
    "td.random.bits": "test_random.py::test_bits_are_philox_blocks",
    "td.random.uniform": "test_random.py::test_uniform",
    "td.random.normal": "test_random.py::test_normal",
    "td.random.bernoulli": "test_random.py::test_bernoulli",
    "td.random.categorical": "test_random.py::test_categorical_frequencies",
    "td.random.multinomial": "test_random.py::test_multinomial_draws_by_weights",
    "td.random.randint": "test_random.py::test_randint_is_even",
    "td.bartlett_window": "test_pytorch_functions.py::test_windows",
    "td.blackman_window": "test_pytorch_functions.py::test_windows",
    "td.hamming_window": "test_pytorch_functions.py::test_windows",
    "td.hann_window": "test_pytorch_functions.py::test_windows",
    "td.kaiser_window": "test_pytorch_functions.py::test_windows",
    "td.random.gumbel_softmax": "test_more_functions.py::test_samples_of_classes_with_gradients",
    "td.vmap": "test_vmap.py::test_forms_are_those_of_pytorch",
    "td.associative_scan": "test_control_flow.py::test_a_linear_recurrence",
    "td.cond": "test_control_flow.py::test_a_branch_not_taken_leaves_no_trace_in_gradients",
    "td.while_loop": "test_control_flow.py::test_a_loop_runs_until_its_condition_is_false",
    "td.fft.abs": "test_fft.py::test_complex_numbers",
    "td.fft.angle": "test_fft.py::test_complex_numbers",
    "td.fft.complex": "test_fft.py::test_complex_numbers",
    "td.fft.conj": "test_fft.py::test_complex_numbers",
    "td.fft.einsum": "test_fft.py::test_a_spectral_convolution",
    "td.fft.imag": "test_fft.py::test_complex_numbers",
    "td.fft.multiply": "test_fft.py::test_complex_numbers",
    "td.fft.real": "test_fft.py::test_complex_numbers",
    "td.linalg.cond": "test_linalg.py::test_norms_of_vectors_and_of_what_the_arguments_say",
    "td.linalg.matrix_rank": "test_linalg.py::test_singular_vectors_at_a_lower_rank",
    "td.linalg.norm": "test_linalg.py::test_norms_of_vectors_and_of_what_the_arguments_say",
    "td.linalg.vector_norm": "test_linalg.py::test_norms_of_vectors_and_of_what_the_arguments_say",
    "td.linalg.svdvals": "test_linalg.py::test_gradients_at_equal_eigenvalues",
    "nn.spectral_norm": "test_spectral_norm.py::test_names_values_and_gradients",
    "nn.lora": "test_adapters.py::test_folders_of_peft_both_ways",
    "nn.merge": "test_adapters.py::test_merged_weights_give_what_adapters_gave",
    "nn.unmerge": "test_adapters.py::test_merged_weights_give_what_adapters_gave",
    "nn.bottleneck": "test_adapters.py::test_bottlenecks_begin_as_nothing_train_and_load",
    "nn.quantize": "test_adapters.py::test_blocks_are_those_of_gguf",
    "nn.dequantize": "test_adapters.py::test_a_quantized_model_computes_with_the_rounded_weights",
    "losses.uncertainty": "test_multitask.py::test_uncertainty_weighting_is_its_formula",
    "metrics.MeanAveragePrecision": "test_boxes.py::test_average_precision_is_cocos",
    "metrics.box_iou": "test_boxes.py::test_overlaps_and_matches",
    "metrics.match_boxes": "test_boxes.py::test_overlaps_and_matches",
    "losses.weighted": "test_more_losses.py::test_weighted_reports_its_parts",
    "losses.Logic": "test_more_losses.py::test_connectives_are_classical_at_0_and_1",
    "metrics.NDCG": "test_sizes_metrics.py::test_rankings_by_relevance",
    "metrics.Average": "test_sizes_metrics.py::test_averages",
    "metrics.Group": "test_metrics.py::test_group_of_some",
    "metrics.Metric": "test_metrics.py::test_statistics_must_fit",
}


def public() -> set[str]:
    """Every public name that has rows or a test: functions, layers, losses and metrics."""
    folders = {"nn": td.nn, "losses": td.losses, "metrics": td.metrics}
    found = {f"{kind}.{n}" for kind, folder in folders.items() for n in offered(folder)}
    return found | {f"td.{n}" for n in public_names.functions()}
