"""Unchanged networks of Hugging Face's transformers, and the same networks written by hand.

The BERT by hand has one projection for queries, keys and values, as PyTorch's own layers have; transformers' BERT has
three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from networks import BERT, GPT2, Block, Llama, Training, ViT, of_words, rotated
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, DEPTH, LENGTH, ROWS = 8192, 512, 8, 2, 512, 4


def of_next_words(logits: Tensor, words: Tensor) -> Tensor:
    """Return the loss of transformers' causal models: of each word except the first, from the words before it."""
    return of_words(logits, F.pad(words[:, 1:], (0, 1), value=-100))


def huggingface(kind: str, **options: Any) -> nn.Module:
    """Return a model by the name of its class, with the sizes above."""
    import transformers

    config = getattr(transformers, kind).config_class
    return getattr(transformers, kind)(config(**options))


_GROUPED = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "intermediate_size": 3 * WIDTH, "max_position_embeddings": LENGTH, "use_cache": False,
}  # fmt: skip
_BERT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH, "max_position_embeddings": LENGTH,
}  # fmt: skip
_GPT2 = {
    "vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "use_cache": False,
}  # fmt: skip
_MODERN = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "intermediate_size": 3 * WIDTH, "max_position_embeddings": LENGTH, "local_attention": LENGTH // 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_layers": DEPTH,
    "num_heads": HEADS, "use_cache": False,
}  # fmt: skip
_BART = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": DEPTH, "decoder_layers": DEPTH,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH, "max_position_embeddings": LENGTH, "use_cache": False,
}  # fmt: skip


class Padded(Llama):
    """A Llama with padded sentences, whose queries may be limited to the last keys."""

    def __init__(self, window: int | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.window = window

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.words(input_ids)
        places = torch.arange(input_ids.shape[1], device=y.device, dtype=torch.int32)
        mask = places[:, None] >= places
        if self.window is not None:
            mask = mask & (places[:, None] - places < self.window)
        mask = mask & attention_mask.bool()[:, None, None]
        for block in self.blocks:
            y = block(y, (self.cos, self.sin), mask)
        return self.head(self.norm(y))


class ModernBERT(nn.Module):
    """Rotary positions, gates, a window in all blocks except every third, and a head for two classes."""

    def __init__(self, window: int = LENGTH // 4) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.LayerNorm(WIDTH, bias=False)
        self.blocks = nn.ModuleList(_ModernBlock() for _ in range(DEPTH))
        self.blocks[0].norm1 = nn.Identity()
        self.last, self.dense = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head_norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, 2)
        self.window = window
        for name, base in (("wide", 160000), ("narrow", 10000)):
            angles = torch.outer(torch.arange(LENGTH), base ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
            self.register_buffer(f"{name}_cos", angles.cos(), persistent=False)
            self.register_buffer(f"{name}_sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.norm(self.words(input_ids))
        places = torch.arange(input_ids.shape[1], device=y.device, dtype=torch.int32)
        filled = attention_mask.bool()[:, None, None]
        near = filled & ((places[:, None] - places).abs() <= self.window // 2)
        for number, block in enumerate(self.blocks):
            kind, mask = ("narrow", near) if number % 3 else ("wide", filled)
            y = block(y, (getattr(self, f"{kind}_cos"), getattr(self, f"{kind}_sin")), mask)
        return self.head(self.head_norm(F.gelu(self.dense(self.last(y)[:, 0]))))


class _ModernBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1: nn.Module = nn.LayerNorm(WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q, *turns), rotated(k, *turns), v, mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        values, gates = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.gelu(values) * gates)


class Apart(Block):
    """A block with separate projections for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        del self.qkv
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        projections = self.query, self.key, self.value
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in projections)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """Self-attention, or attention to the words of another sentence."""

    def __init__(self, bias: bool, scale: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))
        self.scale, self.dropout = scale, dropout

    def forward(self, x: Tensor, others: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
        given = ((self.query, x), (self.key, others), (self.value, others))
        q, k, v = (project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project, y in given)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, 1e-6) for _ in range(3 if crosses else 2))
        self.attends = nn.ModuleList(Attending(bias=False, scale=1.0, dropout=0.1) for _ in range(2 if crosses else 1))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor, others: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.dropout(self.attends[0](y, y, bias))
        if others is not None:
            x = x + self.dropout(self.attends[1](self.norms[1](x), others, mask))
        return x + self.dropout(self.down(self.dropout(F.relu(self.up(self.norms[-1](x))))))


class T5(nn.Module):
    """An encoder and a decoder, whose scores have a bias that depends on the distance between words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = (
            nn.ModuleList(T5Block(crosses) for _ in range(DEPTH)) for crosses in (False, True)
        )
        self.biases = nn.ModuleList(nn.Embedding(32, HEADS) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, 1e-6) for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        places = torch.arange(LENGTH)
        distances = places - places[:, None]
        self.register_buffer("both_ways", 16 * (distances > 0) + _bucket(distances.abs(), 16), persistent=False)
        self.register_buffer("before", _bucket((-distances).clamp(min=0), 32), persistent=False)
        self.register_buffer("later", distances > 0, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        filled = attention_mask.bool()[:, None, None]
        least = torch.finfo(torch.float32).min
        bias = self.biases[0](self.both_ways).permute(2, 0, 1)[None].masked_fill(~filled, least)
        x = self.dropout(self.words(input_ids))
        for block in self.encoder:
            x = block(x, bias)
        x = self.dropout(self.norms[0](x))
        bias = self.biases[1](self.before).permute(2, 0, 1)[None].masked_fill(self.later, least)
        y = self.dropout(self.words(decoder_input_ids))
        for block in self.decoder:
            y = block(y, bias, x, filled)
        return self.head(self.dropout(self.norms[1](y)) * WIDTH**-0.5)


def _bucket(distance: Tensor, count: int) -> Tensor:
    exact = count // 2
    far = exact + (torch.log(distance.clamp(min=1) / exact) / math.log(128 / exact) * (count - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=count - 1))


class BARTBlock(nn.Module):
    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3 if crosses else 2))
        self.attends = nn.ModuleList(Attending(bias=True) for _ in range(2 if crosses else 1))
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor, others: Tensor | None = None) -> Tensor:
        causal = others is not None
        x = self.norms[0](x + self.dropout(self.attends[0](x, x, None if causal else mask, is_causal=causal)))
        if others is not None:
            x = self.norms[1](x + self.dropout(self.attends[1](x, others, mask)))
        return self.norms[-1](x + self.dropout(self.down(F.gelu(self.up(x)))))


class BART(nn.Module):
    """An encoder and a decoder, with norms after the shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.positions = nn.ModuleList(nn.Embedding(LENGTH + 2, WIDTH) for _ in range(2))
        self.encoder, self.decoder = (
            nn.ModuleList(BARTBlock(crosses) for _ in range(DEPTH)) for crosses in (False, True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def embed(self, number: int, words: Tensor) -> Tensor:
        places = torch.arange(2, words.shape[1] + 2, device=words.device, dtype=torch.int32)
        return self.dropout(self.norms[number](self.words(words) + self.positions[number](places)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        filled = attention_mask.bool()[:, None, None]
        x, y = self.embed(0, input_ids), self.embed(1, decoder_input_ids)
        for block in self.encoder:
            x = block(x, filled)
        for block in self.decoder:
            y = block(y, filled, x)
        return self.head(y)


@dataclass(frozen=True)
class Beside(Training):
    """A training of a model of transformers, or of the same network by hand.

    Attributes:
        of_classes: True if a row has one label, and not one for each word.
        padded: True if it gets a mask of the words that count.
        translates: True if it has a decoder, which gets separate words.
    """

    of_classes: bool = False
    padded: bool = False
    translates: bool = False

    def batch(self, cores: int) -> tuple[Any, Any]:
        """Return a batch for a model of transformers, with labels if the model computes its own loss."""
        rows, kind = self.rows * cores, torch.long if self.words else torch.float32
        x = {"input_ids" if self.words else "pixel_values": torch.zeros(rows, *self.shape, dtype=kind)}
        if self.padded:
            x["attention_mask"] = torch.ones(rows, *self.shape, dtype=torch.long)
        if self.translates:
            x["decoder_input_ids"] = torch.zeros(rows, *self.shape, dtype=torch.long)
        labels = torch.zeros((rows,) if self.of_classes else (rows, *self.shape), dtype=torch.long)
        if self.loss == "module":
            return x | {"labels": labels}, None
        return x if self.padded else next(iter(x.values())), labels


_llama = partial(Padded, vocabulary=WORDS, length=LENGTH, width=WIDTH, depth=DEPTH)
_vit = {
    "hidden_size": 384, "num_hidden_layers": DEPTH, "num_attention_heads": 6, "intermediate_size": 1536,
    "num_labels": 1000, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_text = partial(Beside, shape=(LENGTH,), rows=ROWS, words=True, metrics=())
_padded = partial(_text, padded=True)
_translated = partial(_padded, translates=True)
_sentences = partial(_padded, of_classes=True)
_images = partial(Beside, shape=(3, 224, 224), rows=16, metrics=(), of_classes=True)
_gpt2 = partial(GPT2, vocabulary=WORDS, length=LENGTH, width=WIDTH, depth=DEPTH, approximate="tanh")
# The training, the model of transformers, and the same network by hand with its loss.
_PAIRS: dict[str, tuple[Callable[..., Beside], Callable[[], nn.Module], Callable[[], nn.Module], Any]] = {
    "Llama": (_padded, partial(huggingface, "LlamaForCausalLM", **_GROUPED), _llama, of_next_words),
    "Mistral": (
        _padded,
        partial(huggingface, "MistralForCausalLM", **_GROUPED, sliding_window=LENGTH // 4),
        partial(_llama, window=LENGTH // 4),
        of_next_words,
    ),
    "Qwen2": (
        _padded,
        partial(huggingface, "Qwen2ForCausalLM", **_GROUPED),
        partial(_llama, bias=True),
        of_next_words,
    ),
    "GPT-2": (_text, partial(huggingface, "GPT2LMHeadModel", **_GPT2), _gpt2, of_next_words),
    "BERT": (
        _sentences,
        partial(huggingface, "BertForSequenceClassification", **_BERT),
        partial(BERT, vocabulary=WORDS, width=WIDTH, depth=DEPTH),
        "cross_entropy",
    ),
    "ModernBERT": (
        _sentences,
        partial(huggingface, "ModernBertForSequenceClassification", **_MODERN),
        ModernBERT,
        "cross_entropy",
    ),
    "T5": (_translated, partial(huggingface, "T5ForConditionalGeneration", **_T5), T5, of_words),
    "BART": (_translated, partial(huggingface, "BartForConditionalGeneration", **_BART), BART, of_words),
    "ViT": (
        _images,
        partial(huggingface, "ViTForImageClassification", **_vit),
        partial(ViT, depth=DEPTH, block=Apart),
        "cross_entropy",
    ),
}
PAIRS: dict[str, Training] = {}
for _name, (_trained, _theirs, _own, _loss) in _PAIRS.items():
    PAIRS[f"{_name} of transformers"] = _trained(_theirs, loss="module")
    PAIRS[f"{_name} by hand"] = _trained(_own, loss=_loss)
