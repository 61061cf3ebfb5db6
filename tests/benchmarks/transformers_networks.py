"""Networks of Hugging Face's transformers as they come, and the same ones by hand.

Those by hand have one projection for queries, keys and values where the others have three, as PyTorch's own layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from networks import BERT, GPT2, Llama, Training, ViT, of_words
from torch import Tensor, nn

WORDS, WIDTH, HEADS, DEPTH, LENGTH, ROWS = 8192, 512, 8, 2, 512, 4


def of_next_words(logits: Tensor, words: Tensor) -> Tensor:
    """What transformers' causal models compute: the loss of each word but the first, by those before it."""
    return of_words(logits[:, :-1], words[:, 1:])


def huggingface(kind: str, **options: Any) -> nn.Module:
    """A model by the name of its class, of the sizes above."""
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


class Padded(Llama):
    """A Llama whose sentences are filled up, and whose queries may be limited to the last keys."""

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


@dataclass(frozen=True)
class Beside(Training):
    """A training of a model of transformers, or of the same network by hand.

    Attributes:
        of_classes: True if a row has one label, and not one for each word.
        padded: True if it is given a mask of the words that count.
    """

    of_classes: bool = False
    padded: bool = False

    def batch(self, cores: int) -> tuple[Any, Any]:
        """As a model of transformers takes it, with the labels if it computes its own loss."""
        rows, kind = self.rows * cores, torch.long if self.words else torch.float32
        x = {"input_ids" if self.words else "pixel_values": torch.zeros(rows, *self.shape, dtype=kind)}
        if self.padded:
            x["attention_mask"] = torch.ones(rows, *self.shape, dtype=torch.long)
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
_sentences = partial(_padded, of_classes=True)
_images = partial(Beside, shape=(3, 224, 224), rows=16, metrics=(), of_classes=True)
_gpt2 = partial(GPT2, vocabulary=WORDS, length=LENGTH, width=WIDTH, depth=DEPTH, approximate="tanh")
# How each is trained, the model of transformers, and the same network by hand, with its loss.
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
    "ViT": (
        _images,
        partial(huggingface, "ViTForImageClassification", **_vit),
        partial(ViT, depth=DEPTH),
        "cross_entropy",
    ),
}
PAIRS: dict[str, Training] = {}
for _name, (_trained, _theirs, _own, _loss) in _PAIRS.items():
    PAIRS[f"{_name} of transformers"] = _trained(_theirs, loss="module")
    PAIRS[f"{_name} by hand"] = _trained(_own, loss=_loss)
