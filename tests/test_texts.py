"""Texts packed into rows: each is computed as if alone, each token counts once, on any number of cores."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import tpufit
from tpufit import runtime
from tpufit.callbacks import ModelCheckpoint
from tpufit.data import PackedDataset, TokenFile, stream
from tpufit.data.texts import pack
from tpufit.errors import ArgumentError, DataError
from tpufit.runtime.trace_context import tracing_with

VOCABULARY = 40


def texts(count=30, longest=16):
    draw = np.random.default_rng(0)
    return [draw.integers(1, VOCABULARY, draw.integers(2, longest + 1)) for _ in range(count)]


def test_texts_are_packed_in_order_with_little_padding():
    given = texts(300)
    data = PackedDataset(given, 16)
    found = []
    for row in range(len(data)):
        sample = data[row]
        ids, segments = sample["input_ids"].numpy(), sample["segment_ids"].numpy()
        assert not ids[segments == 0].any() and sample["input_ids"].shape == (16,)
        for number in range(1, segments.max() + 1):
            own = segments == number
            found.append(tuple(ids[own]))
            assert sample["position_ids"][torch.from_numpy(own)].tolist() == [*range(own.sum())]
            assert sample["labels"][torch.from_numpy(own)].tolist() == [-100, *ids[own][1:]]
        assert (sample["labels"][torch.from_numpy(segments == 0)] == -100).all()
    assert sorted(found) == sorted(map(tuple, given))
    tokens = sum(map(len, given))
    assert data.padding == pytest.approx(1 - tokens / (16 * len(data))) and data.padding < 0.05
    assert data.padding_before == pytest.approx(1 - tokens / (16 * 300))


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_as_full_as_by_first_fit_decreasing(seed):
    sizes = np.random.default_rng(seed).integers(1, 65, 500)
    rows = pack(sizes, 64)
    assert sorted(np.concatenate(rows)) == [*range(500)] and all(sizes[row].sum() <= 64 for row in rows)
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = next((i for i, room in enumerate(rooms) if room >= size), None)
        if fitting is None:
            rooms.append(64)
            fitting = -1
        rooms[fitting] -= size
    assert len(rows) <= len(rooms)


def test_long_texts_and_labels_of_some_tokens():
    long = {"input_ids": [*range(1, 8)], "labels": [-100, -100, 3, 4, 5, 6, 7]}
    data = PackedDataset([long, {"input_ids": torch.tensor([9, 8])}], 5)
    assert {tuple(data[i]["input_ids"].tolist()) for i in range(2)} == {(1, 2, 3, 4, 5), (9, 8, 6, 7, 0)} or {
        tuple(data[i]["input_ids"].tolist()) for i in range(2)
    } == {(1, 2, 3, 4, 5), (6, 7, 9, 8, 0)}
    assert data[0]["labels"].tolist() == [-100, -100, 3, 4, 5]
    assert len(PackedDataset([long], 5, too_long="truncate")) == 1
    x, y = PackedDataset([[4, 5, 6], [7, 8]], 6, shift=True)[0]
    assert x["input_ids"].tolist() == [4, 5, 6, 7, 8, 0] and y.tolist() == [5, 6, -100, 8, -100, -100]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PackedDataset([[1, 2]], 1), ArgumentError, "length must be a whole number of at least 2"),
        (lambda: PackedDataset([[1]], 4, too_long="drop"), ArgumentError, "'split' or 'truncate', got 'drop'"),
        (lambda: PackedDataset([], 4), DataError, "needs texts"),
        (lambda: PackedDataset([[0.5]], 4), DataError, "text 0 must be token numbers in one dimension, got float64"),
        (lambda: PackedDataset([{"input_ids": [1, 2], "labels": [1]}], 4), DataError, "2 tokens and 1 label"),
        (lambda: PackedDataset(iter([[1, 2]]), 4), DataError, "needs all texts, as a list or a data set with len"),
        (lambda: PackedDataset([[1, -100]], 4), DataError, "text 0 has token -100: tokens are whole numbers from 0"),
        (lambda: PackedDataset([{"text": "a"}], 4), DataError, "must have 'input_ids', got 'text': tokenize the texts"),
        (lambda: PackedDataset([[1], [2]], 4), DataError, "there is no next token to learn"),
        (lambda: PackedDataset([[1, 2]], 4, pad=-100), ArgumentError, "pad must be a whole number of at least 0"),
        (
            lambda: PackedDataset([[1, 2], [3, 50]], 4, vocab_size=40),
            DataError,
            "text 1 has token 50, and vocab_size is 40: the tokenizer isn't the net's",
        ),
    ],
)
def test_invalid_texts(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_file_of_tokens(tmp_path):
    tokens = np.arange(1000, dtype="uint16") % VOCABULARY
    tokens.tofile(tmp_path / "train.bin")
    np.save(tmp_path / "train.npy", tokens.astype("int32"))
    for name in ("train.bin", "train.npy"):
        data = TokenFile(tmp_path / name, 99)
        assert len(data) == 10 and data[3]["input_ids"].tolist() == tokens[297:396].tolist()
        x, y = TokenFile(tmp_path / name, 100, shift=True)[8]
        assert x.tolist() == tokens[800:900].tolist() and y.tolist() == tokens[801:901].tolist()
        assert len(TokenFile(tmp_path / name, 100, shift=True)) == 9  # nothing follows the last token
    with pytest.raises(DataError, match="isn't a multiple of uint16's 2: pass the file's dtype"):
        (tmp_path / "odd.bin").write_bytes(b"abc")
        TokenFile(tmp_path / "odd.bin", 2)
    with pytest.raises(DataError, match="1,?000 tokens, too few for a row of 2000"):
        TokenFile(tmp_path / "train.bin", 2000)
    with pytest.raises(DataError, match="has token 39, and vocab_size is 30: the tokenizer isn't the net's"):
        next(stream(TokenFile(tmp_path / "train.bin", 50, vocab_size=30), batch_size=2).epoch(0))
    np.save(tmp_path / "negative.npy", np.arange(-1, 9))
    with pytest.raises(DataError, match="has token -1: tokens are whole numbers from 0"):
        next(stream(TokenFile(tmp_path / "negative.npy", 5), batch_size=2).epoch(0))


def test_hosts_read_disjoint_rows():
    data = PackedDataset(texts(100), 16)
    whole = [batch["input_ids"] for batch in stream(data, batch_size=2, cores=4, shuffle=True).epoch(1)]
    hosts = [
        stream(data, batch_size=2, cores=4, shuffle=True, local_shards=shards).epoch(1) for shards in ((0, 1), (2, 3))
    ]
    for batch, *parts in zip(whole, *hosts, strict=True):
        assert torch.equal(torch.cat([part.batch["input_ids"] for part in parts]), batch)


def causal(kind, attention="sdpa"):
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        net = transformers.GPT2LMHeadModel
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, **sizes, num_key_value_heads=1, max_position_embeddings=16
        )
        net = transformers.LlamaForCausalLM
    config._attn_implementation = attention
    config.use_cache = False
    return net(config)


@pytest.mark.soak
@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_hugging_face_sees_each_text_alone(cores, kind, precision):
    given = texts()
    data = PackedDataset(given, 16, vocab_size=VOCABULARY)
    net, model = causal(kind), tpufit.Model(causal(kind))
    model.compile("sgd", "module", jit_compile=True, precision=precision)
    loss = model.evaluate(data, batch_size=len(data), verbose=0, cores=cores)  # of one batch, so a mean over all tokens
    with torch.no_grad():
        logits = [net(input_ids=torch.from_numpy(text)[None]).logits[0, :-1] for text in given]
    labels = torch.cat([torch.from_numpy(text[1:]) for text in given])
    expected = F.cross_entropy(torch.cat(logits), labels)
    tolerance = {"rtol": 0, "atol": 1e-5 if precision == "fp32" else 2e-2}
    torch.testing.assert_close(torch.tensor(loss), expected, **tolerance)
    before = runtime.counts()
    model.fit(data, batch_size=8 // cores, epochs=2, verbose=0)
    counts = runtime.counts() - before
    assert counts.host_reads == 0 and not counts.fallbacks and counts.graphs["train"] <= 3
    assert "padding" in str(model.report()) and f"{data.padding:.0%}, {data.padding_before:.0%} without" in str(
        model.report()
    )


@pytest.mark.soak
@pytest.mark.cores(1)
def test_eager_attention_takes_the_mask_too(cores):
    data = PackedDataset(texts(), 16)
    losses = []
    for attention in ("sdpa", "eager"):
        model = tpufit.Model(causal("gpt2", attention))
        model.compile("sgd", "module")
        losses.append(model.evaluate(data, batch_size=8, verbose=0))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class Own(nn.Module):
    """A custom net, which computes its mask from segments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(16, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, position_ids, segment_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = (segment_ids[:, :, None] == segment_ids[:, None]).tril()
        return self.head(
            x + F.scaled_dot_product_attention(q, k, v, mask)
        ).mT  # classes before positions, as in PyTorch


class Heads(nn.Module):
    """A net that uses the given mask, or computes one from segments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 64), nn.Embedding(128, 64)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, VOCABULARY)

    def forward(self, input_ids, position_ids, attention_mask=None, segment_ids=None):
        q, k, v = self.qkv(self.tokens(input_ids) + self.places(position_ids)).unflatten(-1, (3, 2, 32)).unbind(2)
        mask = attention_mask
        if mask is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            mask = (segment_ids[:, None, :, None] == segment_ids[:, None, None]) & (places <= places[:, None])
        seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.head(seen.transpose(1, 2).flatten(2)).mT


@pytest.mark.soak
@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.parametrize("mask", [True, False], ids=["mask", "segments"])
def test_packed_rows_with_flash_equal_plain_attention(cores, mask):
    pytest.importorskip("jax")
    data = PackedDataset(texts(60, longest=60), 128, shift=True, mask=mask)
    losses, ends = [], []
    for attention in ("flash", "plain"):
        model = tpufit.Model(Heads())
        model.compile(partial(torch.optim.SGD, lr=0.1), "cross_entropy", scale_lr=None, attention=attention)
        with tracing_with(interprets_flash=True):
            losses += model.fit(data, batch_size=8 // cores, verbose=0, shuffle=False, cores=cores).history["loss"]
        ends.append(model.get_weights())
        assert set(model.report().attention.values()) <= {"flash"}
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.cores(1, 8)
def test_a_custom_net_takes_pairs_and_segments_and_resumes(cores, tmp_path):
    data = PackedDataset(texts(100), 16, shift=True, mask=False)
    make = partial(torch.optim.SGD, lr=0.1)

    def fit(epochs, folder, **options):
        model = tpufit.Model(Own())
        model.compile(make, "cross_entropy", metrics=["accuracy"], scale_lr=None, jit_compile=True)
        how = {"batch_size": 8 // cores, "epochs": epochs, "verbose": 0, "cores": cores}
        model.fit(data, **how, callbacks=[ModelCheckpoint(folder, save_freq=5, keep_last=None)], **options)
        return model

    tpufit.set_random_seed(0)
    whole = fit(2, tmp_path / "a")
    again = fit(2, tmp_path / "b", resume=tmp_path / "a" / "step-0000000005")
    assert all(map(np.array_equal, whole.get_weights(), again.get_weights()))
    # A row gives the same results as its texts alone.
    row, net = data[0], Own()
    model = tpufit.Model(net)
    model.compile(make, "cross_entropy", scale_lr=None)
    loss = model.evaluate(Subset(data, [0]), batch_size=1, verbose=0)
    ids, segments = row[0]["input_ids"], row[0]["segment_ids"]
    logits, labels = [], []
    for number in range(1, int(segments.max()) + 1):
        own = ids[segments == number][None]
        with torch.no_grad():
            logits.append(Own()(own, torch.arange(own.shape[1])[None], torch.ones_like(own))[0].T[:-1])
        labels.append(own[0, 1:])
    assert loss == pytest.approx(F.cross_entropy(torch.cat(logits), torch.cat(labels)).item(), abs=1e-5)


def gpt(vocabulary):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 64, "n_embd": 4, "n_layer": 1, "n_head": 1, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary, **sizes))


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, input_ids, labels=None):
        return self.net(input_ids=input_ids, labels=labels)


@pytest.mark.cores(1)
@pytest.mark.parametrize("wrap", [nn.Identity, Wrapped])
def test_texts_of_another_tokenizer_are_refused_before_compiling(cores, wrap, tmp_path):
    net = gpt(50)
    net = Wrapped(net) if wrap is Wrapped else net  # the 64 positions aren't tokens
    name = type(net).__name__
    model = tpufit.Model(net)
    model.compile("adamw", "module")
    with pytest.raises(DataError, match=f"the texts have token 50, and {name} knows 50 tokens: the tokenizer"):
        model.fit(PackedDataset([[1, 2], [3, 50]], 8, vocab_size=60), verbose=0)
    tokens = np.arange(3_000_000, dtype="uint16") % 50
    tokens[2_999_999] = 50
    tokens.tofile(tmp_path / "train.bin")
    data = TokenFile(tmp_path / "train.bin", 8)
    for rows in (data, Subset(data, range(2)), DataLoader(data, 2)):
        with pytest.raises(DataError, match=f"train.bin has token 50, and {name} knows 50 tokens: the tokenizer"):
            model.fit(rows, verbose=0)
    with pytest.raises(DataError, match="knows 50 tokens"):
        model.evaluate(data, verbose=0)
    with pytest.raises(DataError, match=f"pad=50 isn't a token of {name}, which knows 50 tokens"):
        model.fit(PackedDataset([[1, 2]], 8, pad=50), verbose=0)
    tokens[:2_999_999].tofile(tmp_path / "good.bin")
    for rows in (PackedDataset([[1] * 65], 80), TokenFile(tmp_path / "good.bin", 65)):
        with pytest.raises(DataError, match=rf"up to 65 tokens, and {name} knows 64 positions: pass \w+\(length=64\)"):
            model.fit(rows, verbose=0)
    assert not model.report().counts.compiled


class OwnNet(nn.Module):
    def __init__(self, tokens, positions):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, 4), nn.Embedding(positions, 4)
        self.head = nn.Linear(4, tokens)

    def forward(self, x):
        return self.head(self.tokens(x) + self.positions.weight[: x.shape[1]]).mT


@pytest.mark.cores(1)
def test_a_token_beyond_the_embeddings_is_refused_when_it_is_read(cores, tmp_path, monkeypatch):
    monkeypatch.setattr("tpufit.data.texts._PIECES", 1)
    monkeypatch.setattr("tpufit.data.texts._PIECE", 80)
    tokens = np.arange(160, dtype="uint16") % 20
    tokens[100] = 30
    tokens.tofile(tmp_path / "train.bin")
    model = tpufit.Model(OwnNet(20, 30))
    model.compile("adamw", lambda y_pred, y: y_pred.square().mean())
    with pytest.raises(DataError, match="train.bin has token 30, and OwnNet knows 30 tokens"):
        model.fit(TokenFile(tmp_path / "train.bin", 8, shift=True), batch_size=2, shuffle=False, verbose=0)
    assert model.steps_taken == 6  # the 7th batch has it
    model.fit(TokenFile(tmp_path / "train.bin", 8, shift=True, vocab_size=40), batch_size=2, verbose=0)
    larger = tpufit.Model(OwnNet(31, 30))
    larger.compile("adamw", "cross_entropy")
    larger.fit(TokenFile(tmp_path / "train.bin", 8, shift=True), batch_size=2, verbose=0)


def test_the_largest_token_of_a_dtype_may_be_one_too_many(tmp_path):
    path = tmp_path / "tokens.bin"
    np.array([3, 255, 4, 5, 6, 7, 8, 9], dtype=np.uint8).tofile(path)
    TokenFile(path, 3, dtype=np.uint8).require_vocabulary(256, "a net of 256 words")
    with pytest.raises(DataError, match="255"):
        TokenFile(path, 3, dtype=np.uint8).require_vocabulary(255, "a net of 255 words")
