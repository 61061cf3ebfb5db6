"""Nets and operations on TorchTPU: three steps have the losses of plain PyTorch on the CPU."""

import copy
from functools import partial

import pytest
import torch
from plain_steps import plain_steps
from torch import nn
from torch.nn import functional as F

import tpufit

pytestmark = [pytest.mark.runtime("torch_tpu"), pytest.mark.cores(1)]

ROWS, LENGTH, WORDS = 8, 12, 50
DRAWN = torch.Generator().manual_seed(0)
TOKENS = torch.randint(1, WORDS, (ROWS, LENGTH), generator=DRAWN)
KINDS = torch.randint(0, 4, (ROWS,), generator=DRAWN)
VECTORS = torch.randn(ROWS, 10, generator=DRAWN)
WAVES = torch.randn(ROWS, LENGTH, 6, generator=DRAWN)
PICTURES = torch.randn(ROWS, 3, 16, 16, generator=DRAWN)


class Logits(nn.Module):
    """A net of transformers."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).logits


class Seq2Seq(Logits):
    def forward(self, x):
        return self.net(input_ids=x, decoder_input_ids=x).logits


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.body, self.head = kind(6, 5, batch_first=True, bidirectional=True, **options), nn.Linear(10, 4)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WHOLE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_transformers(kind, wrapped=Logits, **options):
    """Create a net by its name, with the options of its configuration."""
    import transformers

    net = getattr(transformers, kind)
    return wrapped(net(net.config_class(**options)))


def of_tokens(y_pred, y):
    return F.cross_entropy(y_pred.flatten(0, 1), y.flatten())


def ctc(lengths, y_pred, y):
    log_probs = y_pred.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probs, y[:, :4] % 5 + 1, lengths(LENGTH), lengths(4))


def net(kind, **options):
    return partial(of_transformers, kind, **options)


LM = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "use_cache": False}
TEXT = {
    "GPT-2": net("GPT2LMHeadModel", vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                 attn_pdrop=0.0, use_cache=False),
    "Llama": net("LlamaForCausalLM", **LM),
    "Mistral": net("MistralForCausalLM", **LM, sliding_window=4),
    "T5": net("T5ForConditionalGeneration", wrapped=Seq2Seq, vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32,
              num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False),
}  # fmt: skip
CLASSIFIERS = {
    "BERT": (net("BertForSequenceClassification", **SMALL, **WHOLE, intermediate_size=32, num_labels=4), TOKENS),
    "ViT": (
        net("ViTForImageClassification", **WHOLE, image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=32, num_labels=4),
        PICTURES,
    ),
    "LSTM": (partial(Recurrent, nn.LSTM, num_layers=2), WAVES),
    "GRU": (partial(Recurrent, nn.GRU), WAVES),
}  # fmt: skip
FUNCTIONS = {
    "sort": lambda h: h.sort(1).values,
    "cumsum": lambda h: h.cumsum(1) + (h > 0).cumsum(0),
    "median": lambda h: h - h.median(1, keepdim=True).values,  # computed by the host
    "cholesky": lambda h: h + torch.linalg.cholesky(h.T @ h + torch.eye(8, device=h.device)).sum(0),  # the same
}
LENGTHS = {
    "of the host": lambda count: torch.full((ROWS,), count),
    "numbers": lambda count: (count,) * ROWS,
}
CASES = {
    **{name: (made, TOKENS, TOKENS, of_tokens) for name, made in TEXT.items()},
    **{name: (made, x, KINDS, F.cross_entropy) for name, (made, x) in CLASSIFIERS.items()},
    **{name: (partial(Between, f), VECTORS, KINDS, F.cross_entropy) for name, f in FUNCTIONS.items()},
    **{f"CTC, lengths are {name}": (partial(nn.Linear, 6, 6), WAVES, TOKENS, partial(ctc, lengths))
       for name, lengths in LENGTHS.items()},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the train step runs operation by operation")
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_plain_pytorch(cores, case):
    made, x, y, loss = CASES[case]
    torch.manual_seed(0)
    module = made()
    plain = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(plain.parameters(), 0.05)
    expected = plain_steps(plain, optimizer, loss, [(x, y)] * 3)
    model = tpufit.Model(module)
    model.compile(torch.optim.SGD(module.parameters(), 0.05), loss)
    fit = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0, "cores": cores}
    assert model.fit(x, y, **fit).history["loss"] == pytest.approx(expected, rel=1e-5)
