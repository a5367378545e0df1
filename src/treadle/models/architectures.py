"""What `load` knows: the architectures of config.json, and how each is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treadle.models.clip import CLIP, CLIPConfig
from treadle.models.config import Config, Json
from treadle.models.encoders import (
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from treadle.models.gpt2 import GPT2, GPT2Config
from treadle.models.llama import ARCHITECTURES as LLAMA_FAMILY
from treadle.models.llama import Llama, LlamaConfig
from treadle.models.mamba import Mamba, MambaConfig
from treadle.models.model import Model
from treadle.models.t5 import T5, T5Config
from treadle.models.unet import UNet2D, UNet2DConfig
from treadle.models.vision import ViT, ViTConfig
from treadle.models.whisper import Whisper, WhisperConfig


@dataclass(frozen=True)
class Architecture:
    """A configuration's class, and what makes a model of one."""

    config: type[Config]
    make: Callable[[Any], Model]

    def build(self, given: Json) -> Model:
        return self.make(self.config.read(given))


def _both(head: str, make: Callable[[BertConfig], Model]) -> dict[str, Architecture]:
    return {f"{family}{head}": Architecture(BertConfig, make) for family in ("Bert", "Roberta")}


ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(GPT2Config, GPT2),
    **{name: Architecture(LlamaConfig, Llama) for name in LLAMA_FAMILY.values()},
    **_both("Model", Bert),
    **_both("ForMaskedLM", BertForMaskedLM),
    **_both("ForSequenceClassification", BertForSequenceClassification),
    **_both("ForTokenClassification", BertForTokenClassification),
    "MambaForCausalLM": Architecture(MambaConfig, Mamba),
    "CLIPModel": Architecture(CLIPConfig, CLIP),
    "T5ForConditionalGeneration": Architecture(T5Config, T5),
    "UNet2DModel": Architecture(UNet2DConfig, UNet2D),
    "ViTForImageClassification": Architecture(ViTConfig, ViT),
    "WhisperForConditionalGeneration": Architecture(WhisperConfig, Whisper),
}
