"""BERT and RoBERTa, with the names of `transformers`: masked language models and classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from treadle.base import dtypes
from treadle.frontend.coerce import cast
from treadle.frontend.functions import linear
from treadle.frontend.functions.activations import gelu
from treadle.frontend.functions.arithmetic import tanh
from treadle.frontend.functions.reductions import cumsum
from treadle.frontend.functions.shaping import iota, zeros_like
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.causal import check_tokens
from treadle.models.config import Config, Json
from treadle.models.context import attend, heads_of, padding_bias
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.dropout import Dropout
from treadle.nn.layers import Embedding, LayerNorm, Linear
from treadle.nn.module import Module, Parameter


@dataclass(frozen=True)
class BertConfig(Config):
    """Sizes of BERT or RoBERTa, as `model_type` says; the defaults are those of the base model."""

    model_type: str = "bert"
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    position_embedding_type: str = "absolute"
    tie_word_embeddings: bool = True
    num_labels: int = 2

    @classmethod
    def read(cls, given: Json) -> Self:
        """The number of labels is how many names there are, where they are named."""
        names = given.get("id2label")
        found = {"num_labels": len(names), **given} if isinstance(names, dict) else given
        return super().read(found)

    def check(self) -> None:
        self.need(self.model_type in ("bert", "roberta"), "model_type", "It is bert or roberta.")
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "intermediate_size", "max_position_embeddings", "num_labels"):
            self.need(getattr(self, name) >= 1, name, "It is at least 1.")
        self.need_divisor("hidden_size", "num_attention_heads")
        self.need_layers(self.num_hidden_layers, "num_hidden_layers")
        check_activation(self, "hidden_act")
        is_absolute = self.position_embedding_type == "absolute"
        self.need(is_absolute, "position_embedding_type", "Only absolute positions are known.")

    @property
    def is_roberta(self) -> bool:
        return self.model_type == "roberta"

    @property
    def padding(self) -> int:
        return self.pad_token_id or 0

    @property
    def most_tokens(self) -> int:
        """RoBERTa counts positions from behind the padding's."""
        return self.max_position_embeddings - (self.padding + 1 if self.is_roberta else 0)


class _Embeddings(Module):
    def __init__(self, config: BertConfig):
        width, padding = config.hidden_size, config.padding
        of_positions = padding if config.is_roberta else None
        self.word_embeddings = Embedding(config.vocab_size, width, padding)
        self.position_embeddings = Embedding(config.max_position_embeddings, width, of_positions)
        self.token_type_embeddings = Embedding(config.type_vocab_size, width)
        self.LayerNorm = LayerNorm(width, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.padding = of_positions

    def forward(self, tokens: Tensor, kinds: Operand | None) -> Tensor:
        types = zeros_like(tokens) if kinds is None else kinds
        where_ = self.position_embeddings(self._positions(tokens))
        x = self.word_embeddings(tokens) + self.token_type_embeddings(types) + where_
        return self.dropout(self.LayerNorm(x))

    def _positions(self, tokens: Tensor) -> Tensor:
        if self.padding is None:
            return iota((1, tokens.shape[1]), 1)
        is_word = cast(tokens != self.padding, dtypes.int32)
        return cumsum(is_word, 1) * is_word + self.padding


class _SelfAttention(Module):
    def __init__(self, config: BertConfig):
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.dropout = Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (heads_of(f(x), self.heads) for f in (self.query, self.key, self.value))
        return attend(q, k, v, bias, False, self.dropout)


class _Output(Module):
    """A projection whose result is added to what came in, then normalised."""

    def __init__(self, inputs: int, config: BertConfig):
        self.dense = Linear(inputs, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        result: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + before)
        return result


class _Attention(Module):
    def __init__(self, config: BertConfig):
        self.self = _SelfAttention(config)
        self.output = _Output(config.hidden_size, config)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self.output(self.self(x, bias), x)
        return result


class _Intermediate(Module):
    def __init__(self, config: BertConfig):
        self.dense = Linear(config.hidden_size, config.intermediate_size)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class _Layer(Module):
    def __init__(self, config: BertConfig):
        self.attention = _Attention(config)
        self.intermediate = _Intermediate(config)
        self.output = _Output(config.intermediate_size, config)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self.attention(x, bias)
        result: Tensor = self.output(self.intermediate(x), x)
        return result


class _Encoder(Module):
    def __init__(self, config: BertConfig):
        self.layer = ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))


class _Pooler(Module):
    def __init__(self, width: int):
        self.dense = Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return tanh(self.dense(x[:, 0]))


def _start_normal(model: Module, std: float) -> None:
    """Matrices from a normal distribution, biases 0, as the reference starts."""
    for _, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.init = init.normal(std=std)
        elif parameter.init is not init.ones:
            parameter.init = init.zeros


class _Named(Model):
    """What every head has: names in files that are older, or of parts it has not."""

    config: BertConfig
    renamed = ((r"(.*)\.gamma", r"\1.weight"), (r"(.*)\.beta", r"\1.bias"))
    ignored: tuple[str, ...] = (r".*embeddings\.position_ids", r"cls\.seq_relationship\..*")

    def __init__(self, config: BertConfig):
        self.config = config
        self.architecture = self._names()[config.is_roberta]
        self.prefix = "" if type(self) is Bert else config.model_type

    def _names(self) -> tuple[str, str]:
        """The architecture for BERT and for RoBERTa."""
        raise NotImplementedError


class Bert(_Named):
    """BERT or RoBERTa without a head: tokens (B, T) → (B, T, hidden_size).

    `attention_mask` (B, T) is 0 for padding, `token_type_ids` the part that a token belongs to.
    """

    def __init__(self, config: BertConfig, has_pooler: bool = True):
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Pooler(config.hidden_size) if has_pooler else None
        _start_normal(self, config.initializer_range)

    def _names(self) -> tuple[str, str]:
        return "BertModel", "RobertaModel"

    def forward(
        self,
        tokens: Operand,
        attention_mask: Operand | None = None,
        token_type_ids: Operand | None = None,
    ) -> Tensor:
        given = check_tokens("Bert", tokens, self.config.most_tokens)
        x: Tensor = self.embeddings(given, token_type_ids)
        bias = padding_bias(attention_mask)
        for layer in self.encoder.layer:
            x = layer(x, bias)
        return x


class _Headed(_Named):
    """A body under the name of its model, and a head."""

    has_pooler = False

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.body = Bert(config, self.has_pooler and not config.is_roberta)
        self.head = self._head()
        _start_normal(self, config.initializer_range)

    def _parts(self) -> list[tuple[str, object]]:
        named = {"body": self.config.model_type, "head": self._head_name()}
        return [(named.get(n, n), part) for n, part in super()._parts()]

    def _head_name(self) -> str:
        return "classifier"

    def _head(self) -> Module:
        raise NotImplementedError

    def forward(
        self,
        tokens: Operand,
        attention_mask: Operand | None = None,
        token_type_ids: Operand | None = None,
    ) -> Tensor:
        x = self.body(tokens, attention_mask, token_type_ids)
        result: Tensor = self.head(x)
        return result


class _Transform(Module):
    def __init__(self, config: BertConfig):
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.LayerNorm(self.act(self.dense(x)))
        return result


class _Decoder(Module):
    def __init__(self, weight: Parameter, bias: Parameter):
        self.weight, self.bias = weight, bias


class _Predictions(Module):
    """BERT's head for masked tokens; its matrix is the table of embeddings."""

    def __init__(self, config: BertConfig, table: Parameter):
        self.bias = Parameter((config.vocab_size,), init.zeros)
        self.transform = _Transform(config)
        self.decoder = _Decoder(table, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear.linear(self.transform(x), self.decoder.weight, self.decoder.bias)


class _Cls(Module):
    def __init__(self, config: BertConfig, table: Parameter):
        self.predictions = _Predictions(config, table)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.predictions(x)
        return result


class _LMHead(Module):
    """RoBERTa's head for masked tokens."""

    def __init__(self, config: BertConfig, table: Parameter):
        self.bias = Parameter((config.vocab_size,), init.zeros)
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.decoder = _Decoder(table, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer_norm(gelu(self.dense(x)))
        return linear.linear(hidden, self.decoder.weight, self.decoder.bias)


class BertForMaskedLM(_Headed):
    """BERT or RoBERTa with the head for masked tokens: (B, T) → logits (B, T, vocab_size)."""

    ignored = (*_Named.ignored, r"(bert|roberta)\.pooler\..*")

    def _names(self) -> tuple[str, str]:
        return "BertForMaskedLM", "RobertaForMaskedLM"

    def _head_name(self) -> str:
        return "lm_head" if self.config.is_roberta else "cls"

    def _head(self) -> Module:
        shape = (self.config.vocab_size, self.config.hidden_size)
        is_tied = self.config.tie_word_embeddings
        table = self.body.embeddings.word_embeddings.weight if is_tied else Parameter(shape)
        kind = _LMHead if self.config.is_roberta else _Cls
        return kind(self.config, table)


class _Classifier(Module):
    """RoBERTa's: of the first token."""

    def __init__(self, config: BertConfig, p: float):
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.out_proj = Linear(config.hidden_size, config.num_labels)
        self.dropout = Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        hidden = tanh(self.dense(self.dropout(x[:, 0])))
        result: Tensor = self.out_proj(self.dropout(hidden))
        return result


class BertForSequenceClassification(_Headed):
    """BERT or RoBERTa as a classifier of texts: tokens (B, T) → logits (B, num_labels)."""

    has_pooler = True
    ignored = (*_Named.ignored, r"roberta\.pooler\..*")

    def _names(self) -> tuple[str, str]:
        return "BertForSequenceClassification", "RobertaForSequenceClassification"

    def _head(self) -> Module:
        config = self.config
        if config.is_roberta:
            return _Classifier(config, _dropped(config))
        self.dropout = Dropout(_dropped(config))
        return Linear(config.hidden_size, config.num_labels)

    def forward(
        self,
        tokens: Operand,
        attention_mask: Operand | None = None,
        token_type_ids: Operand | None = None,
    ) -> Tensor:
        x: Tensor = self.body(tokens, attention_mask, token_type_ids)
        if self.body.pooler is not None:
            x = self.dropout(self.body.pooler(x))
        result: Tensor = self.head(x)
        return result


class BertForTokenClassification(_Headed):
    """BERT or RoBERTa as a tagger: tokens (B, T) → logits (B, T, num_labels)."""

    ignored = (*_Named.ignored, r"(bert|roberta)\.pooler\..*")

    def _names(self) -> tuple[str, str]:
        return "BertForTokenClassification", "RobertaForTokenClassification"

    def _head(self) -> Module:
        self.dropout = Dropout(_dropped(self.config))
        return Linear(self.config.hidden_size, self.config.num_labels)

    def forward(
        self,
        tokens: Operand,
        attention_mask: Operand | None = None,
        token_type_ids: Operand | None = None,
    ) -> Tensor:
        x = self.body(tokens, attention_mask, token_type_ids)
        result: Tensor = self.head(self.dropout(x))
        return result


def _dropped(config: BertConfig) -> float:
    given = config.classifier_dropout
    return config.hidden_dropout_prob if given is None else given
