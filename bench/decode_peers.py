"""Contenders that generate: a step is one more token of a text, greedy, batch 1.

A text that has grown by as many tokens as it may begins again: its prompt is part of that step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import ceilings
import numpy as np
from turns import Contender, Running

PROMPT = np.arange(1, 17)
NEW = 112  # tokens of a text: with the prompt 128 slots


def shape() -> Any:
    """SmolLM2-135M's configuration."""
    from treadle import models

    return models.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )


def running(texts: Callable[[], Iterator[int]]) -> Running:
    """One token after the other, of one text after the other."""
    state: dict[str, Any] = {"text": iter(()), "token": -1}

    def step() -> None:
        token = next(state["text"], None)
        if token is None:
            state["text"] = texts()
            token = next(state["text"])
        state["token"] = token

    return Running(step, lambda: None, lambda: float(state["token"]))


def prepare_treadle(task: dict[str, Any]) -> Callable[[], Running]:
    def start() -> Running:
        from treadle import models

        given = {n: task[n] for n in ("device", "precision", "dtype")}
        model = models.load(task["folder"], **given)
        return running(lambda: model.stream(PROMPT, NEW, eos_token_id=()))

    return start


def prepare_transformers(dtype: str, is_static: bool) -> Callable[[Any], Callable[[], Running]]:
    def start(task: dict[str, Any]) -> Running:
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # its wheel may not fit
        import torch
        import transformers

        torch.set_num_threads(ceilings.threads())
        chosen = getattr(torch, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(task["folder"], dtype=chosen)

        def texts() -> Iterator[int]:
            room = {"max_cache_len": len(PROMPT) + NEW} if is_static else {}
            kind = transformers.StaticCache if is_static else transformers.DynamicCache
            cache = kind(config=model.config, **room)
            tokens = torch.tensor(PROMPT)[None]
            for _ in range(NEW):
                with torch.inference_mode():
                    given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
                    logits = model(tokens, **given).logits
                    tokens = logits[:, -1:].argmax(-1)
                yield int(tokens)

        return running(texts)

    return lambda task: lambda: start(task)


def prepare_compiled(task: dict[str, Any]) -> Callable[[], Running]:
    """The twin with a static cache, compiled: what `transformers` compiles, without it."""

    def start() -> Running:
        import decoding_torch
        import torch

        from treadle import models

        model = models.load(task["folder"], device="cpu")
        values, device = model.values(), task["device"]
        kind = torch.bfloat16 if task["precision"] == "bfloat16" else torch.float32
        twin = decoding_torch.decoder(shape(), values, len(PROMPT) + NEW, device, kind)
        step = torch.compile(twin, mode="reduce-overhead", fullgraph=True)

        def texts() -> Iterator[int]:
            found = torch.tensor([[int(PROMPT[0])]], device=device)
            at = torch.zeros(1, dtype=torch.long, device=device)
            for i in range(len(PROMPT) + NEW - 1):
                is_given = i < len(PROMPT)
                tokens = torch.tensor([[int(PROMPT[i])]], device=device) if is_given else found
                with torch.inference_mode():
                    torch.compiler.cudagraph_mark_step_begin()
                    found = step(tokens, at).clone()
                at = at + 1
                if i >= len(PROMPT) - 1:
                    yield int(found)

        return running(texts)

    return start


CONTENDERS = {
    "treadle": Contender("treadle", ("treadle",), prepare_treadle),
    "bfloat16": Contender("bfloat16", (), prepare_transformers("bfloat16", False)),
    "float32": Contender("float32", (), prepare_transformers("float32", False)),
    "float32 static": Contender("float32 static", (), prepare_transformers("float32", True)),
    "compiled": Contender("compiled", (), prepare_compiled),
    "read": ceilings.CONTENDERS["read"],
}
