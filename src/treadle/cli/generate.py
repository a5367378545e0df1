"""`treadle generate DIR "prompt"`: continues a text with a model of `transformers`."""

from __future__ import annotations

import argparse
import sys

import treadle as td
from treadle.base.errors import ArgumentError


def run_generate(options: argparse.Namespace) -> int:
    """Print the prompt and what follows, as it is chosen."""
    model = td.models.load(options.folder, device=options.device, precision=options.precision)
    if not isinstance(model, td.models.CausalModel):
        cause = f"{type(model).__name__} of {options.folder} does not generate"
        raise ArgumentError("generate", cause, "Use a decoder: GPT-2, Llama, Mistral, Qwen.")
    settings = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "num_beams": options.beams,
        "stop_strings": tuple(options.stop),
        "seed": options.seed,
    }
    prompt = options.prompt
    if options.tokens:
        found = model.generate(_tokens(prompt), options.max_new_tokens, **settings)
        print(" ".join(map(str, found.tolist())))
        return 0
    if options.beams > 1:
        print(model.generate(prompt, options.max_new_tokens, **settings))
        return 0
    pieces = model.stream(prompt, options.max_new_tokens, **settings)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0


def _tokens(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ArgumentError("generate", f"the prompt is {text!r}", 'Tokens are numbers: "1 2 3".')
    return [int(word) for word in words]
