"""What every optimizer must do, whichever it is. A new one is a line in `ALL`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim

SHAPES = {"bias": (4,), "kernel": (4, 2, 3), "scale": (), "w": (4, 6)}
Arrays = dict[str, np.ndarray]
Make = Callable[..., optim.Optimizer]


def around(wrap: Make, **own) -> Make:
    """A wrapper around AdamW; numbers it does not know are AdamW's."""
    known = inspect.signature(wrap).parameters

    def make(**given) -> optim.Optimizer:
        # A selector named decay is AdamW's, a number EMA's.
        outer = {k: v for k, v in given.items() if k in known and not isinstance(v, str)}
        inner = {k: v for k, v in given.items() if k not in outer}
        return wrap(optim.adamw(**({"lr": 0.02} | inner)), **(own | outer))

    return make


def muon(**given) -> optim.Optimizer:
    decay = {"weight_decay": given["weight_decay"]} if "weight_decay" in given else {}
    return optim.muon(**({"lr": 0.02} | given), others=optim.adamw(0.02, **decay))


def with_defaults(make: Make, **own) -> Make:
    return lambda **given: make(**(own | given))


# The factory, called with keywords only; rates fit the little problem below.
ALL: dict[str, Make] = {
    "sgd": with_defaults(optim.sgd, lr=0.05, momentum=0.9, nesterov=True),
    "plain sgd": with_defaults(optim.sgd, lr=0.1),
    "adam": with_defaults(optim.adam, lr=0.02),
    "adamw": with_defaults(optim.adamw, lr=0.02),
    "amsgrad": with_defaults(optim.adamw, lr=0.02, amsgrad=True),
    "adagrad": with_defaults(optim.adagrad, lr=0.1),
    "rmsprop": with_defaults(optim.rmsprop, lr=0.01, momentum=0.5, centered=True),
    "adadelta": with_defaults(optim.adadelta, lr=5.0),
    "nadam": with_defaults(optim.nadam, lr=0.02),
    "radam": with_defaults(optim.radam, lr=0.05),
    "adamax": with_defaults(optim.adamax, lr=0.02),
    "adabelief": with_defaults(optim.adabelief, lr=0.02),
    "laprop": with_defaults(optim.laprop, lr=0.02),
    "ademamix": with_defaults(optim.ademamix, lr=0.02),
    "adafactor": with_defaults(optim.adafactor, lr=0.1),
    "asgd": with_defaults(optim.asgd, lr=0.1, lambd=0.0),
    "rprop": with_defaults(optim.rprop, lr=0.01),
    "shampoo": with_defaults(optim.shampoo, lr=0.3, momentum=0.5),
    "soap": with_defaults(optim.soap, lr=0.007),
    "lbfgs": with_defaults(optim.lbfgs, lr=0.5, max_iter=3, history_size=4),
    "lbfgs with a search": with_defaults(
        optim.lbfgs, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    ),
    "lion": with_defaults(optim.lion, lr=0.01),
    "adamp": with_defaults(optim.adamp, lr=0.02),
    "lamb": with_defaults(optim.lamb, lr=0.05),
    "lars": with_defaults(optim.lars, lr=5.0),
    "sophia": with_defaults(optim.sophia, lr=0.02),
    "muon": muon,
    "galore": with_defaults(optim.galore, lr=0.05, rank=2),
    "schedule_free_adamw": with_defaults(optim.schedule_free_adamw, lr=0.05),
    "prodigy": with_defaults(optim.prodigy, d0=1e-2),
    "sam": around(optim.sam),
    "lookahead": around(optim.lookahead, k=3),
    "ema": around(optim.ema, decay=0.9),
    "swa": around(optim.swa, start=2),
    "max_norm": around(optim.max_norm, limit=50.0),
}
EVALUATES_ELSEWHERE = {"schedule_free_adamw", "lookahead", "ema", "swa"}
ASKS_FOR_GRADIENTS = {
    "sam",
    "sophia",
    "lbfgs",
    "lbfgs with a search",
}  # of the last micro-batch, under accumulation
DRAWS = {"sophia"}
SPELLED = {"plain sgd": "sgd", "amsgrad": "adamw", "lbfgs with a search": "lbfgs"}

every = pytest.mark.parametrize("name", ALL)


def model(**options) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(s, nn.init.normal(0, 0.4), **options) for n, s in SHAPES.items()}


def loss(m, b):
    x = b["x"]
    flat = td.tanh(x @ m["w"].T + m["bias"]) * m["scale"]
    error = flat + td.einsum("bcd,ocd->bo", x.reshape(-1, 2, 3), m["kernel"]) - b["y"]
    return (error * error).mean()


def batch(seed: int = 0, rows: int = 8) -> Arrays:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6))
    return {"x": x, "y": np.sin(x[:, :4]) + 0.5}


SPEC = {"x": td.Spec((8, 6)), "y": td.Spec((8, 4))}


def make(optimizer: optim.Optimizer, loss=loss, spec=SPEC, **options) -> td.TrainStep:
    return td.compile_step(model(), loss, optimizer, spec, device="oracle", **options)


def changed(before: Arrays, after: Arrays) -> set[str]:
    assert before.keys() == after.keys()
    return {n for n in before if not np.array_equal(before[n], after[n])}


def evaluated(step: td.TrainStep) -> Arrays:
    read = step.attach(lambda m, x: {n: p * 1.0 for n, p in m.items()}, td.Spec((1,)))
    return read(np.zeros(1, np.float32))


def test_all_of_them_are_here() -> None:
    """Whatever makes an optimizer is in the list, or only puts others together."""
    together = {"chain", "freeze", "groups", "only", "Optimizer"}
    found = {
        name
        for name, member in vars(optim).items()
        if inspect.isfunction(member) and inspect.signature(member).return_annotation == "Optimizer"
    }
    assert found - together <= set(ALL), found - together - set(ALL)


@every
def test_it_trains(name: str) -> None:
    step = make(ALL[name]())
    first = step.evaluate(batch()).loss
    for _ in range(80):
        out = step(batch())
    assert out.updated
    assert step.evaluate(batch()).loss < 0.6 * first
    assert step.not_finite() == ()
    assert changed(make(ALL[name]()).params, step.params) == set(SHAPES)


@every
def test_groups_are_apart(name: str) -> None:
    """One group moves as if it were alone, the other as its own optimizer has it."""
    both = make(optim.groups(("w", ALL[name]()), ("*", optim.sgd(0.05))))
    alone = make(optim.only("w", ALL[name]()))
    start, gradients = both.params, both.gradients(batch())
    both(batch())
    alone(batch())
    np.testing.assert_allclose(both.params["w"], alone.params["w"], rtol=1e-12)
    assert changed(start, alone.params) == {"w"}
    for n in set(SHAPES) - {"w"}:
        np.testing.assert_allclose(both.params[n], start[n] - 0.05 * gradients[n], rtol=1e-12)


@every
def test_a_group_is_frozen_while_it_runs(name: str) -> None:
    step = make(optim.groups(("w", ALL[name]()), ("*", optim.sgd(0.0))))
    step.hyperparameters["group0.frozen"] = True
    before = step.state_dict()
    for i in range(3):
        step(batch(i))
    compiles = step.report.compiles
    assert changed(before, step.state_dict()) == {"step:count", "step:counters"} | {
        "step:optimizer:1.updates"
    }
    step.hyperparameters["group0.frozen"] = False
    step(batch(7))
    assert changed({n: before[n] for n in SHAPES}, step.params) == {"w"}
    assert step.report.compiles == compiles
    if name not in DRAWS:  # it starts like any other: bias corrections count its own updates
        fresh = make(optim.groups(("w", ALL[name]()), ("*", optim.sgd(0.0))))
        fresh(batch(7))
        np.testing.assert_array_equal(fresh.params["w"], step.params["w"])


@every
def test_zero_gradients_change_nothing(name: str) -> None:
    step = make(ALL[name](weight_decay=0.0), lambda m, b: loss(m, b) * 0.0)
    before = step.params
    for i in range(6):
        assert step(batch(i)).grad_norm == 0
    for n, value in step.params.items():
        np.testing.assert_allclose(value, before[n], rtol=1e-14, err_msg=n)
    for n, value in step.state_dict().items():
        assert np.isfinite(value).all(), n
    for n, value in evaluated(step).items():
        np.testing.assert_allclose(value, before[n], rtol=1e-14, err_msg=n)


@every
def test_state_goes_there_and_back(name: str, tmp_path) -> None:
    step, other, third = (make(ALL[name](), seed=seed) for seed in (0, 1, 2))
    for i in range(4):
        step(batch(i))
    step.save(tmp_path / "step.safetensors")
    other.load_state_dict(step.state_dict())
    third.load(tmp_path / "step.safetensors")
    for i in range(3):
        for s in (step, other, third):
            s(batch(10 + i))
    assert not changed(step.state_dict(), other.state_dict())
    assert not changed(step.state_dict(), third.state_dict())
    assert not changed(evaluated(step), evaluated(other))


@every
def test_it_starts_again(name: str) -> None:
    step, fresh = make(ALL[name]()), make(ALL[name]())
    for i in range(3):
        step(batch(i))
    step.reset()
    assert not changed(fresh.state_dict(), step.state_dict())


@every
def test_loaded_parameters_are_where_it_starts(name: str) -> None:
    """No average and no reference point is left at the parameters that were there before."""
    loaded, fresh = make(ALL[name](), seed=1), make(ALL[name]())
    loaded.load_params(fresh.params)
    assert not changed(evaluated(fresh), evaluated(loaded))
    if name not in DRAWS:  # the seed is another
        for i in range(4):
            loaded(batch(i))
            fresh(batch(i))
        assert not changed(fresh.params, loaded.params)


@every
def test_evaluation_uses_the_right_parameters(name: str) -> None:
    step = make(ALL[name]())
    for i in range(4):
        step(batch(i))
    used = evaluated(step)
    is_elsewhere = name in EVALUATES_ELSEWHERE
    assert bool(changed(step.params, used)) == is_elsewhere
    plain = make(optim.sgd(0.0))
    plain.load_params(used)
    found, expected = step.evaluate(batch(5)).loss, plain.evaluate(batch(5)).loss
    assert found == pytest.approx(expected, rel=1e-12)
    before = step.state_dict()
    step.evaluate(batch(6))
    assert not changed(before, step.state_dict())


@every
def test_micro_batches_make_the_big_batch(name: str) -> None:
    big, small = make(ALL[name]()), make(ALL[name](), accumulate=2, spec=half_spec())
    for i in range(4):
        whole = batch(i)
        big(whole)
        assert not small({k: v[:4] for k, v in whole.items()}).updated
        assert small({k: v[4:] for k, v in whole.items()}).updated
    assert small.count == 4
    if name not in ASKS_FOR_GRADIENTS:
        for n, value in big.params.items():
            np.testing.assert_allclose(small.params[n], value, rtol=1e-9, atol=1e-12, err_msg=n)


def half_spec() -> dict[str, td.Spec]:
    return {"x": td.Spec((4, 6)), "y": td.Spec((4, 4))}


@every
def test_decay_goes_where_it_is_allowed(name: str) -> None:
    """With no gradient only the decay is left: selected parameters shrink, others stay."""
    if name == "muon":  # the others' decay is the others' matter
        optimizer = optim.muon(1e-3, 0.5, decay="w", others=optim.sgd(0.0))
    else:
        optimizer = ALL[name](lr=1e-3, weight_decay=0.5, decay="w")
    step = td.compile_step(model(), lambda m, b: loss(m, b) * 0.0, optimizer, SPEC)
    before = step.params
    for _ in range(3):  # Lookahead moves every third time
        step(batch())
    assert changed(before, step.params) == {"w"}
    assert (np.abs(step.params["w"]) < np.abs(before["w"])).all()
    assert np.abs(step.params["w"]).sum() < np.abs(before["w"]).sum() * (1 - 1e-6)
    exempt = td.compile_step(
        model(decay=False), lambda m, b: loss(m, b) * 0.0, ALL[name](weight_decay=0.5), SPEC
    )
    exempt(batch())
    for n, value in exempt.params.items():
        np.testing.assert_allclose(value, before[n], rtol=1e-6)
    with pytest.raises(td.ArgumentError, match=r"'v\*' selects no parameter"):
        make(ALL[name](weight_decay=0.5, decay="v*"))


@every
def test_an_overflow_leaves_it_as_it_was(name: str) -> None:
    step = make(ALL[name](), lambda m, b: loss(m, b) * b["x"][0, 0], precision="float16")
    good, bad = batch(), batch()
    good["x"][0, 0], bad["x"][0, 0] = 1e-2, 6e4
    for _ in range(3):
        step(good)
    before = step.state_dict()
    out = step(bad)
    assert out.skipped
    assert not out.updated
    assert changed(before, step.state_dict()) == {
        "step:loss_scale",
        "step:good_steps",
        "step:skipped",
        "step:counters",
    }
    assert step.loss_scale == before["step:loss_scale"] / 2
    assert step(good).updated


@every
def test_it_runs_with_an_empty_group_and_an_unreached_parameter(name: str) -> None:
    """A parameter that the loss does not reach is in the state, and stays as it is."""
    spare = {"spare": nn.Parameter((3, 3), nn.init.normal()), **model()}
    with pytest.warns(td.UnreachedWarning, match="spare"):
        step = td.compile_step(spare, lambda m, b: loss(m, b), ALL[name](), SPEC)
    before = step.params
    for i in range(3):
        step(batch(i))
    assert changed(before, step.params) == set(SHAPES)
    np.testing.assert_array_equal(evaluated(step)["spare"], before["spare"])


@every
def test_it_runs_natively_in_float16(name: str) -> None:
    """Every update compiles beside narrow products, and goes where the oracle's goes."""
    found = []
    for device in ("oracle", "cpu"):
        step = td.compile_step(model(), loss, ALL[name](), SPEC, device=device, precision="float16")
        while not step(batch()).updated:
            assert step.skipped < 10
        for i in range(3):
            out = step(batch(i))
        assert out.updated
        found.append(step.params)
    for n, value in found[0].items():
        np.testing.assert_allclose(found[1][n], value, atol=0.03, err_msg=n)


def test_they_go_into_each_other() -> None:
    """Wrappers around chains around groups: numbers, rates, state and evaluation stay apart."""

    def nested() -> optim.Optimizer:
        inner = optim.chain(
            optim.clip_by_value(1.0),
            optim.groups(
                ("w", optim.chain(optim.clip_by_value(0.5), optim.lion(0.01))),
                ("*", optim.lookahead(optim.schedule_free_adamw(0.05), k=2)),
            ),
        )
        return optim.swa(optim.ema(optim.max_norm(optim.sam(inner), 9.0), 0.8), start=3)

    step = make(nested(), clip_norm=5.0)
    first = step(batch()).loss
    for _ in range(40):
        step(batch())
    assert step(batch()).loss < 0.7 * first
    assert {
        "clip_by_value.0.limit",
        "group0.clip_by_value.0.limit",
        "group0.lr",
        "group0.frozen",
        "group1.lookahead.k",
        "group1.lr",
        "sam.rho",
        "max_norm.limit",
        "ema.decay",
        "swa.start",
    } <= set(step.hyperparameters)
    other = make(nested(), clip_norm=5.0, seed=3)
    other.load_state_dict(step.state_dict())
    assert not changed(evaluated(step), evaluated(other))
    assert changed(evaluated(step), step.params)
    step(batch(1))
    other(batch(1))
    assert not changed(step.state_dict(), other.state_dict())


# Wrong numbers

WRONG_NUMBERS = ["1e-3", None, math.nan, math.inf, -math.inf, True, [0.1], np.ones(2), 1 + 1j]


@every
def test_wrong_numbers_are_refused_while_it_runs(name: str) -> None:
    step = make(ALL[name]())
    before = step.state_dict()
    assert len(step.hyperparameters) > 0
    for key, domain in step.recipe.optimizer.domains.items():
        outside = [domain.low - 1] if domain.low > -math.inf else []
        outside += [domain.high + 1] if domain.high < math.inf else []
        outside += [domain.low] if domain.excludes_low else []
        outside += [domain.high] if domain.excludes_high else []
        for value in WRONG_NUMBERS + outside:
            with pytest.raises(td.ArgumentError, match=rf"{key} = .*It is|{key} = .* becomes"):
                step.hyperparameters[key] = value
    assert set(step.hyperparameters) == set(step.recipe.optimizer.domains)
    assert not changed(before, step.state_dict())


@every
def test_wrong_arguments_are_refused(name: str) -> None:
    """Every argument that is a number, a pair, a flag or a selector, by its default."""
    function = getattr(optim, SPELLED.get(name, name))
    wraps = "optimizer" in inspect.signature(function).parameters
    first = (optim.sgd(0.1),) if wraps else ()
    checked = 0
    for key, parameter in inspect.signature(function).parameters.items():
        required = {"limit": 1.0, "start": 1}
        needed = {k: v for k, v in required.items() if k != key and k in names_of(function)}
        for value in wrong_values(key, parameter.default):
            with pytest.raises(td.ArgumentError, match=key.rstrip("s")) as caught:
                function(*first, **needed, **{key: value})
            assert caught.value.operation == function.__name__
            assert caught.value.remedy
            checked += 1
    assert checked >= 5
    if wraps:
        needed = {k: v for k, v in {"limit": 1.0, "start": 1}.items() if k in names_of(function)}
        for inner in ("adam", None, optim.adam, optim.clip_by_value(1.0)):
            with pytest.raises(td.ArgumentError, match=r"it is around .*optim.adamw"):
                function(inner, **needed)
        once = function(optim.sgd(0.1), **needed)
        with pytest.raises(td.ArgumentError, match="inside it already"):
            function(once, **needed)


def test_what_is_left_of_muon_is_an_optimizer() -> None:
    with pytest.raises(td.ArgumentError, match="it is around 'adam'"):
        optim.muon(others="adam")
    with pytest.raises(td.ArgumentError, match=r"bias \(4,\), kernel .*no matrices.*others="):
        make(optim.muon())
    assert make(optim.only("w", optim.muon(0.1)))(batch()).updated


def names_of(function: Make) -> set[str]:
    return set(inspect.signature(function).parameters)


def wrong_values(key: str, default: object) -> list[object]:
    if key in ("optimizer", "others", "rho") and default is None:
        return ["adam"] if key == "rho" else []
    if key in ("decay", "adapt", "select") and default is None:
        return [3, 0.5, [], ["w", 3]]
    if isinstance(default, bool):
        return ["yes", 1, None]
    if isinstance(default, tuple):
        others = [(0.9,), "ab", 0.9, None, ("a", "b", "c"), (math.nan,) * len(default)]
        outside = [(1.0, 0.9), (0.9, 1.0)] if key == "betas" else []
        return others + ([*outside, (-0.1, 0.9)] if len(default) == 2 else [])
    if isinstance(default, str):
        return ["other", None, 3]
    if isinstance(default, (int, float)) or default is inspect.Parameter.empty:
        is_negative = isinstance(default, float) and default < 0
        return [*WRONG_NUMBERS, 1.0 if is_negative else -1.0] if key != "optimizer" else []
    return []
