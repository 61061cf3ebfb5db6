"""Models of Hugging Face's transformers: dict batches with labels, the loss they compute, outputs that are logits."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tpufit
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.cores(1, 8, quick=False)

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
    options = {"metrics": ["accuracy"], "scale_lr": None, "jit_compile": False} | arguments
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
        assert means == pytest.approx([expected[0], (8 * expected[0] + 16 * expected[1]) / 24], abs=1e-5)
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
    assert model(X).logits.shape == (24, 3)  # a call gives all that the module returns


def test_tokens_that_are_left_out(cores):
    labels = np.where(MASK == 1, IDS % 3, -100)
    net = bert(tokens=True).eval()
    with torch.no_grad():
        logits = net(**{name: torch.from_numpy(values) for name, values in X.items()}).logits.numpy()
    model = compiled(None, tokens=True)
    _, accuracy = model.evaluate(X | {"labels": labels}, batch_size=24 // cores, verbose=0, cores=cores)
    assert accuracy == pytest.approx((logits.argmax(2) == labels)[MASK == 1].mean(), abs=1e-6)


def test_tensors_that_the_module_does_not_name(cores):
    import transformers

    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=40, dim=8, n_layers=1, n_heads=2, hidden_dim=8, num_labels=3)
    model = tpufit.Model(transformers.DistilBertForSequenceClassification(config))
    model.compile("sgd", jit_compile=False)
    batch = X | {"labels": LABELS, "token_type_ids": MASK * 0, "text": ["a"] * 24}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "x has 'token_type_ids', which .* doesn't name")  # unless it takes any
        assert np.isfinite(model.train_on_batch(batch, cores=cores))


def test_a_loss_that_the_module_does_not_compute(cores):
    for x in (X, (IDS, MASK)):
        with pytest.raises(
            ArgumentError, match="loss='module' takes the loss that the module returns.* Put the labels"
        ):
            compiled("module").fit(x, verbose=0, cores=cores)
    with pytest.raises(ArgumentError, match="sample_weight can't weigh the loss that the module computes"):
        compiled(None).train_on_batch(X | {"labels": LABELS}, None, np.ones(24), cores=cores)
