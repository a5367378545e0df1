"""Whisper beside `transformers`: features, and the same tokens for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
import twins
from model_cases import BY_NAME, saved
from treadle import models

CASE = BY_NAME["whisper"]
FEATURES = np.random.default_rng(0).normal(size=(3, 6, 24)).astype(np.float32)


def theirs(twin: Any, features: np.ndarray, new: int, **settings: Any) -> np.ndarray:
    """What the decoder says, without what is around it there for long recordings."""
    generate = twins.transformers().GenerationMixin.generate
    settings = {"do_sample": False, **settings}
    found = generate(twin, torch.tensor(features)[None], max_new_tokens=new, **settings)
    return found[0].numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    twin: Any = CASE.twin(1)
    twin.generation_config.update(suppress_tokens=[62, 8], begin_suppress_tokens=[19, 2])
    folder = saved(twin, tmp_path_factory.mktemp("whisper"))
    return models.load(folder, device="oracle"), twin


def test_tokens_are_the_references(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    assert model.suppressed == (62, 8)
    assert model.suppressed_first == (19, 2)
    wanted = [theirs(twin, f, 6) for f in FEATURES]
    for use_cache in (True, False):
        found = model.generate(FEATURES, 6, use_cache=use_cache)
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)), use_cache
    assert list(model.stream(FEATURES[0], 6)) == wanted[0][1:].tolist()
    assert not set(np.concatenate(wanted).tolist()) & {62, 8}
    plain = theirs(twin, FEATURES[0], 6, suppress_tokens=None, begin_suppress_tokens=None)
    assert not np.array_equal(plain, wanted[0]), "nothing was suppressed"


@pytest.mark.slow
@pytest.mark.parametrize("starts", [(5,), (5, 11, 12, 13)])
def test_compiled_tokens_are_the_references(
    pair: tuple[Any, Any], starts: tuple[int, ...], tmp_path: Path
) -> None:
    twin = pair[1]
    model = models.load(saved(twin, tmp_path), device="cpu")
    model.starts = starts
    given = torch.tensor([starts])
    wanted = [theirs(twin, f, 64, decoder_input_ids=given, eos_token_id=-1) for f in FEATURES]
    for use_cache in (True, False):
        found = model.generate(FEATURES, 64, use_cache=use_cache, eos_token_id=())
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)), use_cache


def test_a_folder_says_where_the_decoder_starts(pair: tuple[Any, Any], tmp_path: Path) -> None:
    folder = saved(pair[1], tmp_path)
    file = folder / "generation_config.json"
    told = json.loads(file.read_text())
    for forced, starts in (([[1, 11], [2, 12]], (5, 11, 12)), ([[1, None], [2, 12]], (5,))):
        file.write_text(json.dumps({**told, "forced_decoder_ids": forced}))
        assert models.load(folder, device="oracle").starts == starts
    hostile = {"forced_decoder_ids": [[1, 10**9]], "suppress_tokens": [-1, 1e9, "x", 4]}
    file.write_text(json.dumps({**hostile, "begin_suppress_tokens": {"a": 1}}))
    model = models.load(folder, device="oracle")
    assert (model.starts, model.suppressed, model.suppressed_first) == ((5,), (4,), ())


def test_wrong_features(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    for wrong in (FEATURES[:, :, :-1], FEATURES[0, 0], np.zeros((6, 24), int)):
        with pytest.raises(td.ShapeError, match="models.log_mel"):
            model.generate(wrong, 2)
    with pytest.raises(td.ShapeError, match="97 tokens, and 96 positions"):
        model.apply(model.values(), FEATURES, np.zeros((3, 97), np.int32))
    with pytest.raises(td.ArgumentError, match="for 96 positions"):
        model.generate(FEATURES, 96)


@pytest.mark.parametrize("bins", [80, 128])
def test_features_are_the_references(bins: int) -> None:
    extractor = twins.transformers().WhisperFeatureExtractor(bins, chunk_length=2)
    rng = np.random.default_rng(0)
    for samples in (32_000, 9_999, 40_000):
        wave = (np.sin(np.arange(samples) * 0.05) + rng.normal(size=samples)).astype(np.float32)
        wanted = extractor(wave, sampling_rate=16_000, return_tensors="np").input_features[0]
        found = models.log_mel(wave, bins, 200)
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < 1e-4
    both = models.log_mel(np.stack([wave, -wave]), bins, 200)
    assert np.allclose(both, found, atol=1e-6)
    assert models.log_mel(np.zeros(0, np.float32), bins, 1).shape == (bins, 1)
    with pytest.raises(td.ShapeError, match="log_mel"):
        models.log_mel(np.zeros(5, np.int16))
