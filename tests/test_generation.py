"""Generation beside `transformers`: the same tokens, with and without a cache, alone and in batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
import twins
from model_cases import BY_NAME, DECODER, GPT2, T5, Case, saved
from treadle import models, nn
from treadle.cli.main import main
from treadle.models import sampling
from treadle.models.decoding import BLOCK, bucket, slots_for

PROMPTS = [np.random.default_rng(n).integers(3, 23, n) for n in (3, 11, 20, 1)]
SMALL = {**DECODER, "vocab_size": 23, "eos_token_id": 2, "bos_token_id": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model whose texts end now and then, and its twin."""
    case = Case("small", "LlamaForCausalLM", "LlamaConfig", SMALL)
    twin = case.twin(3)
    folder = saved(twin, tmp_path_factory.mktemp("llama"))
    return models.load(folder, device="cpu"), twin


def theirs(twin: Any, prompt: np.ndarray, new: int, **settings: Any) -> np.ndarray:
    given = torch.tensor(prompt)[None]
    defaults = {"do_sample": False, "pad_token_id": 0}
    found = twin.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=new, **defaults, **settings
    )
    return found[0].numpy()


def same_tokens(
    name: str, tmp_path: Path, device: str, new: int = 64, without_cache: bool = True
) -> None:
    case = BY_NAME[name]
    twin = case.twin()
    model = models.load(saved(twin, tmp_path), device=device)
    prompt = case.batch()[0][0][0]
    wanted = theirs(twin, prompt, new, eos_token_id=-1)
    for use_cache in (True, False) if without_cache else (True,):
        found = model.generate(prompt, new, eos_token_id=(), use_cache=use_cache)
        assert np.array_equal(found, wanted), use_cache


def test_greedy_tokens_are_the_references(tmp_path: Path) -> None:
    same_tokens("gpt2", tmp_path, "cpu", without_cache=False)


def test_greedy_tokens_on_the_oracle(tmp_path: Path) -> None:
    same_tokens("mistral", tmp_path, "oracle", 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "llama-yarn", "mistral", "qwen2", "qwen3", "mixtral", "mamba"]
)
def test_compiled_greedy_tokens_are_the_references(name: str, tmp_path: Path) -> None:
    same_tokens(name, tmp_path, "cpu")


def test_unequal_prompts_go_on_as_alone(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    found = model.generate(PROMPTS, 30)
    wanted = [theirs(twin, p, 30) for p in PROMPTS]
    assert any(len(w) < len(p) + 30 for w, p in zip(wanted, PROMPTS)), "none of them ends"
    for ours, reference in zip(found, wanted, strict=True):
        assert np.array_equal(ours, reference)


def test_a_state_is_carried_as_there(tmp_path: Path) -> None:
    """Without keys: prompts of unequal lengths, and a second generation from the same programs."""
    twin = BY_NAME["mamba"].twin()
    model = models.load(saved(twin, tmp_path), device="oracle")
    for prompts in (PROMPTS[:2], PROMPTS[1::-1]):
        found = model.generate(prompts, 6, eos_token_id=())
        for prompt, ours in zip(prompts, found, strict=True):
            assert np.array_equal(ours, theirs(twin, prompt, 6, eos_token_id=-1))
    settings = {"num_beams": 2, "eos_token_id": ()}
    ours = model.generate(PROMPTS[1], 4, **settings)
    assert np.array_equal(ours, model.generate(PROMPTS[1], 4, use_cache=False, **settings))


@pytest.mark.parametrize("has_bias", [False, True], ids=["without-bias", "with-bias"])
@pytest.mark.parametrize("seed", range(3))
def test_states_of_padded_rows_are_those_of_rows_alone(
    seed: int, has_bias: bool, tmp_path: Path
) -> None:
    """Random Mambas: rows of unequal lengths, with a cache, without, and under a mask."""
    rng = np.random.default_rng(seed)
    config = {
        "vocab_size": 31,
        "hidden_size": int(rng.integers(5, 12)),
        "state_size": int(rng.integers(1, 6)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "conv_kernel": int(rng.integers(2, 6)),
        "expand": int(rng.integers(1, 4)),
        "time_step_rank": int(rng.integers(1, 4)),
        "use_conv_bias": bool(rng.integers(2)),
        "use_bias": has_bias,
    }
    twin = Case("random", "MambaForCausalLM", "MambaConfig", config).twin(seed)
    with torch.no_grad():  # so that a bias in the place of padding moves the likeliest tokens
        for name, value in twin.named_parameters():
            if name.endswith("proj.bias"):
                value.normal_(0, 2)
    model = models.load(saved(twin, tmp_path), device="oracle")
    prompts = [rng.integers(3, 31, n) for n in (2, 7, 1, 12)]
    settings = {"eos_token_id": ()}
    with_cache = model.generate(prompts, 6, **settings)
    without = model.generate(prompts, 6, use_cache=False, **settings)
    tokens, mask = np.zeros((4, 12), np.int64), np.zeros((4, 12), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, 12 - len(prompt) :], mask[row, 12 - len(prompt) :] = prompt, 1
    padded = model(tokens, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        wanted = theirs(twin, prompt, 6, eos_token_id=-1)
        assert np.array_equal(with_cache[row], wanted)
        assert np.array_equal(without[row], wanted)
        with torch.no_grad():
            alone = twin(torch.tensor(prompt)[None]).logits[0].numpy()
        assert np.abs(padded[row, 12 - len(prompt) :] - alone).max() < 1e-4


def test_no_program_is_compiled_for_a_token(pair: tuple[Any, Any]) -> None:
    """Nor for another prompt or number of tokens that fit the cache."""
    model, _ = pair
    model.generate(PROMPTS, 30)
    before = model._programs[-1]
    greedy = dict(before._programs)
    model.generate([p[::-1] for p in PROMPTS], 3)
    assert before._programs == greedy
    model.generate(PROMPTS, 25, temperature=1.0)
    drawn = dict(before._programs)
    model.generate(PROMPTS, 25, temperature=0.5, seed=1)
    assert model._programs[-1] is before
    assert before._programs == drawn
    assert all(program.report.compiles == 1 for program in drawn.values())


def tiny_gpt2() -> Any:
    config = models.GPT2Config(vocab_size=23, n_positions=64, n_embd=8, n_layer=1, n_head=2)
    model = models.GPT2(config)
    model.device = "oracle"
    return model


def test_runs_that_are_open_together_go_on_as_alone() -> None:
    """Of one batch and length, which have the same programs one after the other."""
    model, prompts = tiny_gpt2(), ([3, 4, 5], [9, 8, 7, 6])
    alone = [model.generate(p, 6, eos_token_id=())[len(p) :].tolist() for p in prompts]
    never = model.stream(prompts[0], 6)
    both = [model.stream(p, 6, eos_token_id=()) for p in prompts]
    assert [list(row) for row in zip(*both, strict=True)] == [list(r) for r in zip(*alone)]
    for settings in ({}, {"use_cache": False}, {"temperature": 1.0}):
        first = model.stream(prompts[0], 6, **settings)
        next(first)
        second = model.stream(prompts[1], 6, **settings)
        next(second)
        assert sum(p.is_lent for p in model._programs) == 2
        first.close()
        del second
        assert not any(p.is_lent for p in model._programs)
    names = {n.partition(".")[0] for n in model._held(None).session.types}
    assert {n for n in names if n.startswith("cache_")} == {"cache_1x64", "cache_1x64_2"}
    del never


def test_another_precision_and_device_take_effect() -> None:
    """Also after the first use; a run that is open goes on as it began."""
    model, tokens = tiny_gpt2(), np.array([[3, 4, 5]])
    before = model(tokens)
    begun = model.stream([3, 4, 5], 3, eos_token_id=())
    first = next(begun)
    model.precision = "bfloat16"
    rounded = model(tokens)
    assert not np.array_equal(rounded, before)
    assert np.allclose(rounded, before, atol=0.05)
    model.generate([3, 4, 5], 2, eos_token_id=())
    (programs,) = model._programs
    assert {p.report.precision for p in programs._programs.values()} == {"bfloat16"}
    model.precision = "float32"
    assert np.array_equal(model(tokens), before)
    assert [3, 4, 5, first, *begun] == model.generate([3, 4, 5], 3, eos_token_id=()).tolist()
    model.device = "cpu"
    assert model._held(None).session.device == "cpu"


def test_threads_generate_with_one_model() -> None:
    """From the first use on: values are there for all of them, or for none."""
    model = tiny_gpt2()
    prompts = [p for p in PROMPTS if len(p) <= 11]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda p: model.generate(p, 6, eos_token_id=()), prompts))
    for ours, prompt in zip(found, prompts, strict=True):
        assert np.array_equal(ours, model.generate(prompt, 6, eos_token_id=()))
    assert len(model._programs) <= 3


def test_old_caches_are_given_back() -> None:
    model = tiny_gpt2()
    for count in (1, 2, 3, 4, 1, 5, 6):
        model.generate([PROMPTS[0]] * count, 2)
    types = model._programs[-1].session.types
    names = {n.partition(".")[0] for n in types if n.startswith("cache_")}
    assert names == {"cache_4x64", "cache_1x64", "cache_5x64", "cache_6x64"}


@pytest.mark.parametrize(
    ("beams", "penalty", "early"),
    [
        (3, 0.5, True),
        pytest.param(3, 1.0, False, marks=pytest.mark.slow),
        pytest.param(2, 2.0, "never", marks=pytest.mark.slow),
    ],
)
def test_beams_are_the_references(
    pair: tuple[Any, Any], beams: int, penalty: float, early: object
) -> None:
    model, twin = pair
    settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
    model.device = "oracle"
    found = model.generate(PROMPTS[:2], 8, **settings)
    for prompt, ours in zip(PROMPTS, found, strict=False):
        assert np.array_equal(ours, theirs(twin, prompt, 8, **settings))
    model.device = "cpu"


@pytest.mark.slow
def test_compiled_beams_are_the_references(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    for use_cache in (True, False):
        settings: dict[str, Any] = {"num_beams": 5, "repetition_penalty": 1.3}
        found = model.generate(PROMPTS, 12, use_cache=use_cache, **settings)
        for prompt, ours in zip(PROMPTS, found, strict=True):
            assert np.array_equal(ours, theirs(twin, prompt, 12, **settings))


def test_repetition_is_penalised_as_there(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    found = model.generate(PROMPTS, 12, repetition_penalty=1.7)
    wanted = [theirs(twin, p, 12, repetition_penalty=1.7) for p in PROMPTS[:2]]
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=False))
    plain = model.generate(PROMPTS, 12)
    assert not all(np.array_equal(a, b) for a, b in zip(found, plain, strict=True))


def test_filters_are_the_references() -> None:
    library = twins.transformers()
    scores = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 3
    tokens = np.random.default_rng(1).integers(0, 50, (4, 9))

    def reference(processor: Any) -> np.ndarray:
        return processor(torch.tensor(tokens), torch.tensor(scores)).numpy()

    for k in (1, 7, 50, 99):
        wanted = reference(library.TopKLogitsWarper(k))
        assert np.array_equal(sampling.keep_greatest(scores, k), wanted)
    for p in (0.1, 0.5, 0.93):
        wanted = reference(library.TopPLogitsWarper(p))
        assert np.array_equal(sampling.keep_share(scores, p), wanted)
    for p in (0.02, 0.3, 0.9):
        wanted = reference(library.MinPLogitsWarper(p))
        assert np.array_equal(sampling.keep_likely(scores, p), wanted)
    wanted = reference(library.RepetitionPenaltyLogitsProcessor(1.4))
    assert np.allclose(sampling.penalised(scores, tokens, 1.4), wanted)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1]))[None]
    choice = sampling.Choice(temperature=1.0, top_p=0.85, seed=5)
    sources = choice.sources(1)
    drawn = [int(choice.choose(logits, [np.array([0])], sources)[0]) for _ in range(4000)]
    shares = np.bincount(drawn, minlength=4) / 4000
    assert shares[3] == 0
    assert np.abs(shares[:3] - np.array([5, 2, 2]) / 9).max() < 0.03


def test_a_seed_says_it_all(pair: tuple[Any, Any]) -> None:
    """The same tokens again, whatever the other rows are; other ones for another seed."""
    model, _ = pair
    settings = {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "min_p": 0.01}
    first, again, other = (model.generate(PROMPTS, 15, seed=seed, **settings) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    fewer = model.generate([PROMPTS[0], *PROMPTS[2:], PROMPTS[1]], 15, seed=3, **settings)
    assert np.array_equal(fewer[0], first[0])


def test_tokens_are_told_when_they_are_chosen(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    told: list[tuple[int, int]] = []
    found = model.generate(PROMPTS, 6, on_token=lambda row, token: told.append((row, token)))
    for row, (prompt, ours) in enumerate(zip(PROMPTS, found, strict=True)):
        assert [t for r, t in told if r == row] == ours[len(prompt) :].tolist()
    stream = model.stream(PROMPTS[0], 6)
    assert [next(stream), *stream] == found[0][len(PROMPTS[0]) :].tolist()


def _write_tokenizer(folder: Path) -> None:
    """Letters as tokens; 0 is a space."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {" ": 0, **{chr(ord("a") + i): i + 1 for i in range(22)}}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    found.decoder = tokenizers.decoders.Fuse()
    found.save(str(folder / "tokenizer.json"))


def test_text_and_stop_strings(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = pair
    models.save(model, tmp_path)
    _write_tokenizer(tmp_path)
    text_model = models.load(tmp_path, device="oracle")
    whole = text_model.generate("bcd", 12, eos_token_id=())
    assert whole.startswith("bcd")
    assert len(whole) == 15
    tokens = [ord(c) - ord("a") + 1 if c != " " else 0 for c in "bcd"]
    assert text_model.tokenizer.decode(model.generate(tokens, 12, eos_token_id=())) == whole
    stop = whole[7:9]
    end = whole.index(stop, 3) + 2
    assert text_model.generate("bcd", 12, eos_token_id=(), stop_strings=stop) == whole[:end]
    pieces = list(text_model.stream("bcd", 12, eos_token_id=()))
    assert "".join(pieces) == whole[3:]
    assert text_model.generate(["bcd", "e"], 12, eos_token_id=())[0] == whole
    models.save(text_model, tmp_path / "again")
    assert models.load(tmp_path / "again").tokenizer.decode([1, 2]) == "ab"


def test_a_steps_values_generate(tmp_path: Path) -> None:
    """Those that it has at the time, without copying them."""
    config = models.GPT2Config(vocab_size=11, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = models.GPT2(config)

    def loss(m: Any, batch: dict[str, td.Tensor]) -> td.Tensor:
        logits = m(batch["tokens"][:, :-1]).reshape(-1, 11)
        return td.losses.cross_entropy(logits, batch["tokens"][:, 1:].reshape(-1))

    spec = {"tokens": td.Spec((4, 12), td.int32)}
    step = td.compile_step(model.eval(), loss, td.optim.adam(3e-2), spec, device="oracle")
    tokens = (np.arange(12)[None] + np.arange(4)[:, None]).astype(np.int32) % 11
    for _ in range(60):
        step({"tokens": tokens})
    model.device = "oracle"
    found = model.generate([3, 4, 5], 6, eos_token_id=(), share=step)
    assert found.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 0]
    model.start_from(step.params)
    assert model.generate([3, 4, 5], 6, eos_token_id=()).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 3}, "top_k with temperature 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "temperature": 1.0}, "Beams are searched"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"beams": 2}, "there is no setting 'beams'"),
        ({"stop_strings": "x"}, "no tokenizer"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_wrong_settings(pair: tuple[Any, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(td.ArgumentError, match=message):
        pair[0].generate([3, 4], **{"max_new_tokens": 2, **settings})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is"),
        ([[]], "at least one"),
        (None, "the prompt is"),
        ([99], "from 99 to 99"),
        ([-1], "from -1"),
        (np.zeros((2, 2)), "dtype float64"),
        ("text", "no tokenizer"),
    ],
)
def test_wrong_prompts(pair: tuple[Any, Any], prompt: Any, message: str) -> None:
    with pytest.raises(td.TreadleError, match=message):
        pair[0].generate(prompt, 2)


def test_positions_end(tmp_path: Path) -> None:
    model = models.gpt2(
        "small", **{k: v for k, v in GPT2.items() if k != "n_positions"}, n_positions=8
    )
    model.device = "oracle"
    assert len(model.generate([1, 2, 3], 5, eos_token_id=())) == 8
    assert len(model.generate([1, 2, 3], 5, eos_token_id=(), use_cache=False)) == 8
    with pytest.raises(td.ArgumentError, match="for 8 positions"):
        model.generate([1, 2, 3], 6)
    assert model.generate([1, 2, 3], 0).tolist() == [1, 2, 3]


def test_lengths_of_programs() -> None:
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 48, 49, 64, 65, 600)] == [
        *(16, 16, 24, 24, 32, 48, 48, 64, 64, 96, 768)
    ]
    for prompt in range(1, 300, 7):
        assert slots_for(prompt, 5) >= bucket(prompt) + 5
        assert slots_for(prompt, 5) % BLOCK == 0


def test_a_model_is_still_a_module() -> None:
    """Inside of another model it is traced with it."""
    inner = models.MLP([3, 2])
    outer = nn.Sequential(inner, nn.ReLU())
    x = np.ones((1, 3), np.float32)
    values = outer.init(0)
    assert set(values) == {"0.0.weight", "0.0.bias"}
    assert np.asarray(outer.apply(values, x)).shape == (1, 2)


def test_the_command(
    pair: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.save(pair[0], tmp_path)
    given = ["--device", "oracle", "--max-new-tokens", "5"]
    assert main(["generate", str(tmp_path), "3, 4 5", "--tokens", *given]) == 0
    tokens = [int(word) for word in capsys.readouterr().out.split()]
    model = models.load(tmp_path, device="oracle")
    assert tokens == model.generate([3, 4, 5], 5).tolist()
    assert main(["generate", str(tmp_path), "text", *given]) == 1
    assert "no tokenizer" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "3 x", "--tokens", *given]) == 1
    assert main(["generate", str(tmp_path / "nowhere"), "3", *given]) == 1
    _write_tokenizer(tmp_path)
    assert main(["generate", str(tmp_path), "bcd", "--temperature", "1", *given]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path), "bcd", "--beams", "2", *given]) == 0
    assert capsys.readouterr().out.startswith("bcd")
    models.save(models.Bert(models.BertConfig(**TINY_BERT)), tmp_path / "bert")
    assert main(["generate", str(tmp_path / "bert"), "3", "--tokens", *given]) == 1
    assert "does not generate" in capsys.readouterr().err


TINY_BERT: dict[str, Any] = {
    "vocab_size": 5,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 4,
    "max_position_embeddings": 4,
}


EQUAL = Case(  # the reference's cache counts the encoder's layers
    "t5", "T5ForConditionalGeneration", "T5Config", {**T5, "num_decoder_layers": 2}
)


def answers(twin: Any, prompt: np.ndarray, new: int, **settings: Any) -> np.ndarray:
    found = twin.generate(
        torch.tensor(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new,
        do_sample=False,
        **settings,
    )
    return found[0].numpy()


def compare_answers(tmp_path: Path, device: str, new: int, **settings: Any) -> None:
    twin = EQUAL.twin(2)
    model = models.load(saved(twin, tmp_path), device=device)
    prompts = [np.random.default_rng(n).integers(2, 97, n) for n in (5, 18, 1)]
    wanted = [answers(twin, p, new, **settings) for p in prompts]
    for use_cache in (True, False):
        found = model.generate(prompts, new, use_cache=use_cache, **settings)
        for ours, reference in zip(found, wanted, strict=True):
            assert np.array_equal(ours, reference), use_cache
    assert list(model.stream(prompts[0], new)) == model.generate(prompts[0], new)[1:].tolist()


def test_a_source_is_answered_as_there(tmp_path: Path) -> None:
    compare_answers(tmp_path, "oracle", 5)


@pytest.mark.slow
def test_compiled_answers_are_the_references(tmp_path: Path) -> None:
    compare_answers(tmp_path / "greedy", "cpu", 64)


@pytest.mark.slow
def test_answers_by_beams(tmp_path: Path) -> None:
    twin = EQUAL.twin(2)
    model = models.load(saved(twin, tmp_path), device="oracle")
    prompts = [np.random.default_rng(n).integers(2, 97, n) for n in (5, 11)]
    found = model.generate(prompts, 6, num_beams=3)
    for prompt, ours in zip(prompts, found, strict=True):
        assert np.array_equal(ours, answers(twin, prompt, 6, num_beams=3))
