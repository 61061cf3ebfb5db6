"""Models of Hugging Face's transformers: dict batches with labels, the loss that they compute, logits as outputs."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tpufit
from tpufit.errors import ArgumentError

pytestmark = [pytest.mark.cores(1, 8, quick=False), pytest.mark.soak]

GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(0, 40, (24, 6))
MASK = (np.arange(6) < GENERATOR.integers(2, 7, (24, 1))).astype("int64")
LABELS = GENERATOR.integers(0, 3, 24)
X = {"input_ids": IDS, "attention_mask": MASK}


def bert(tokens=False):
    import transformers

    kind = transformers.BertForTokenClassification if tokens else transformers.BertForSequenceClassification
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return kind(transformers.BertConfig(vocab_size=40, max_position_embeddings=6, num_labels=3, **small, **rates))


def compiled(loss, tokens=False, **arguments):
    model = tpufit.Model(bert(tokens))
    options = {"metrics": ["accuracy"], "scale_lr": None} | arguments
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5), loss, **options)
    return model


def plain_losses(batches):
    net = bert().train()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    losses = []
    for rows in batches:
        x = {name: torch.from_numpy(values[rows]) for name, values in X.items()}
        losses.append(net(**x, labels=torch.from_numpy(LABELS[rows])).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eagerly"])
def test_batches_with_labels(cores, eagerly):
    from transformers import BatchEncoding

    halves = [slice(0, 8), slice(8, 24)]
    expected = plain_losses(halves)
    with_text = [BatchEncoding({k: v[rows] for k, v in X.items()} | {"labels": LABELS[rows]}) for rows in halves]
    for loss, batches in [
        ("module", with_text),
        (None, with_text),
        ("cross_entropy", with_text),
        ("cross_entropy", [({k: v[rows] for k, v in X.items()}, LABELS[rows]) for rows in halves]),
    ]:
        model = compiled(loss, run_eagerly=eagerly)
        means = [
            model.train_on_batch(*(batch if isinstance(batch, tuple) else (batch,)), cores=cores)[0]
            for batch in batches
        ]
        assert means == pytest.approx(expected, abs=1e-5)
    model = compiled(None, run_eagerly=eagerly)
    shares = [
        {k: v[i : i + 24 // cores] for k, v in (X | {"labels": LABELS}).items()} for i in range(0, 24, 24 // cores)
    ]
    history = model.fit(shares, validation_data=shares, verbose=0, cores=cores).history
    assert list(history) == ["loss", "accuracy", "val_loss", "val_accuracy"] and model.steps_taken == 1
    assert history["loss"] == pytest.approx(plain_losses([slice(0, 24)]), abs=1e-5)


def test_outputs_are_logits(cores):
    model, net = compiled("module"), bert().eval()
    with torch.no_grad():
        logits = net(**{name: torch.from_numpy(values) for name, values in X.items()}).logits
    loss = F.cross_entropy(logits, torch.from_numpy(LABELS)).item()
    accuracy = (logits.argmax(1).numpy() == LABELS).mean()
    size = {"batch_size": 16 // cores, "verbose": 0, "cores": cores}
    with_labels = X | {"labels": LABELS}
    for x in (X, with_labels):
        np.testing.assert_allclose(model.predict(x, **size), logits, atol=1e-5)
        np.testing.assert_allclose(model.predict_on_batch(x, cores=cores), logits, atol=1e-5)
    assert model.evaluate(with_labels, **size) == pytest.approx([loss, accuracy], abs=1e-5)
    assert model.test_on_batch(with_labels, cores=cores) == pytest.approx([loss, accuracy], abs=1e-5)
    assert model(X).logits.shape == (24, 3)  # a call returns all outputs of the module


def test_ignored_tokens(cores):
    labels = np.where(MASK == 1, IDS % 3, -100)
    net = bert(tokens=True).eval()
    with torch.no_grad():
        logits = net(**{name: torch.from_numpy(values) for name, values in X.items()}).logits.numpy()
    model = compiled(None, tokens=True)
    _, accuracy = model.evaluate(X | {"labels": labels}, batch_size=24 // cores, verbose=0, cores=cores)
    assert accuracy == pytest.approx((logits.argmax(2) == labels)[MASK == 1].mean(), abs=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt", "t5"])
def test_accumulated_texts_are_weighted_by_labels(cores, name):
    """Two batches of 8 texts equal one of 16, and an evaluation is the mean over all labels, as in one batch."""
    net, rows = (
        (bert(tokens=True), {k: torch.from_numpy(v) for k, v in X.items()})
        if name == "bert"
        else (architecture(name, "eager"))
    )
    lengths = torch.tensor([1] * 8 + [6] * 8 + [2] * 8)
    labels = torch.from_numpy(IDS % 3)
    rows["labels"] = labels.masked_fill(torch.arange(6) >= lengths[:, None], -100)
    plain = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    model = tpufit.Model(net)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5), "module", scale_lr=None, accumulate_steps=2)
    whole = plain.eval()(**rows).loss.item()
    assert model.evaluate(rows, batch_size=8 // cores, verbose=0, cores=cores) == pytest.approx(whole, abs=1e-5)
    plain.train()
    for batch in (slice(0, 16), slice(16, 24)):
        optimizer.zero_grad()
        plain(**{key: value[batch] for key, value in rows.items()}).loss.backward()
        optimizer.step()
    model.fit(rows, batch_size=8 // cores, verbose=0, shuffle=False, cores=cores)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-5)


def test_tensors_that_the_module_does_not_name(cores):
    import transformers

    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=40, dim=8, n_layers=1, n_heads=2, hidden_dim=8, num_labels=3)
    model = tpufit.Model(transformers.DistilBertForSequenceClassification(config))
    model.compile("sgd", jit_compile=False)
    batch = X | {"labels": LABELS, "token_type_ids": MASK * 0, "text": ["a"] * 24}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "x has 'token_type_ids', which .* doesn't name")  # unless it accepts any
        assert np.isfinite(model.train_on_batch(batch, cores=cores))


def test_a_loss_that_the_module_does_not_compute(cores):
    for x in (X, (IDS, MASK)):
        with pytest.raises(
            ArgumentError, match="loss='module' takes the loss that the module returns.* Put the labels"
        ):
            compiled("module").fit(x, verbose=0, cores=cores)
    with pytest.raises(ArgumentError, match="sample_weight can't be applied to the loss that the module computes"):
        compiled(None).train_on_batch(X | {"labels": LABELS}, None, np.ones(24), cores=cores)


def architecture(name, attention):
    """A small model with random weights, without dropout, and a batch for it with every three rows."""
    import transformers

    ids, mask, labels = torch.from_numpy(IDS), torch.from_numpy(MASK), torch.from_numpy(LABELS)
    text = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    common = {"vocab_size": 40, "attn_implementation": attention}
    wide = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(**common, **wide, **rates, num_labels=3)
        return transformers.BertForSequenceClassification(config), text
    if name == "distilbert":
        no_dropout = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
        config = transformers.DistilBertConfig(
            **common, dim=8, n_layers=2, n_heads=2, hidden_dim=8, num_labels=3, **no_dropout
        )
        return transformers.DistilBertForSequenceClassification(config), text
    if name == "gpt":
        config = transformers.GPT2Config(
            **common, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=1
        )
        return transformers.GPT2LMHeadModel(config), text | {"labels": ids}
    if name == "t5":
        config = transformers.T5Config(
            **common, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config), text | {"labels": ids}
    config = transformers.ViTConfig(
        **wide, **rates, image_size=8, patch_size=4, num_labels=3, attn_implementation=attention
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(24, 3, 8, 8), "labels": labels}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt", "t5", "vit"])
def test_masks_of_several_lengths_are_replayed(cores, name, attention):
    net, rows = architecture(name, attention)
    plain = architecture(name, attention)[0].train()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    batches = [{key: value[i : i + 8] for key, value in rows.items()} for i in (0, 8, 16)]
    expected = []
    for _ in range(3):
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            losses.append(plain(**batch).loss)
            losses[-1].backward()
            optimizer.step()
        expected.append(torch.stack(losses).mean().item())
    model = tpufit.Model(net)
    model.compile(lambda parameters: torch.optim.AdamW(parameters, 1e-2), "module", scale_lr=None, jit_compile=True)
    shares = [{key: value[i : i + 8 // cores] for key, value in rows.items()} for i in range(0, 24, 8 // cores)]
    history = model.fit(shares, epochs=3, verbose=0, cores=cores).history
    assert history["loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_models_of_timm_are_replayed(cores, name):
    import timm

    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 32, 32), torch.from_numpy(LABELS)
    size = {"img_size": 32} if name == "test_vit" else {}
    model = tpufit.Model(timm.create_model(name, num_classes=3, **size))
    model.compile(lambda parameters: torch.optim.AdamW(parameters, 1e-2), "cross_entropy", jit_compile=True)
    losses = model.fit(images, labels, 8 // cores, 6, verbose=0, cores=cores).history["loss"]
    assert losses[-1] < losses[0]


WORDS, TIME, ROWS = 64, 64, 8
TEXTS = np.random.default_rng(0).integers(3, WORDS, (ROWS, TIME))
FILLED = (np.arange(TIME) < np.array([64, 50, 33, 64, 1, 20, 64, 64])[:, None]).astype("int64")
JOINED = np.concatenate([np.stack([np.r_[:20, :44], np.r_[:64]]) for _ in range(4)])
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# What tells texts apart, the class and its options.
MASKS = {
    "a Llama": ({}, "Llama", "ForCausalLM", LLAMA),
    "a Llama, padding": ({"attention_mask": FILLED}, "Llama", "ForCausalLM", LLAMA),
    "a Llama, joined texts": ({"position_ids": JOINED}, "Llama", "ForCausalLM", LLAMA),
    "a Mistral, padding": (
        {"attention_mask": FILLED},
        "Mistral",
        "ForCausalLM",
        LLAMA | {"sliding_window": 20},
    ),
    "a Mistral, joined texts": ({"position_ids": JOINED}, "Mistral", "ForCausalLM", LLAMA | {"sliding_window": 20}),
    "a BERT, padding": (
        {"attention_mask": FILLED},
        "Bert",
        "ForMaskedLM",
        SMALL | {"intermediate_size": 32} | WITHOUT_DROPOUT,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_transformers_fit_the_kernel(cores, name):
    """Flash attention, by an interpreter, accepts transformers' masks of padding, windows and packed texts."""
    import transformers

    from tpufit.runtime.trace_context import tracing_with

    given, family, task, options = MASKS[name]
    losses, x = {}, {"input_ids": TEXTS, "labels": TEXTS} | given
    for attention in ("flash", "plain"):
        torch.manual_seed(0)
        net = getattr(transformers, family + task)(getattr(transformers, f"{family}Config")(**options))
        model = tpufit.Model(net)
        model.compile(torch.optim.SGD(net.parameters(), 0.1), scale_lr=None, attention=attention)
        with tracing_with(interprets_flash=True):
            history = model.fit(x, batch_size=ROWS // cores, epochs=2, shuffle=False, verbose=0, cores=cores)
        losses[attention] = history.history["loss"]
        if attention == "flash":
            forms = model.report().attention
            assert len(forms) == 2 and set(forms.values()) == {"flash"}
    assert losses["flash"] == pytest.approx(losses["plain"], abs=1e-5)
