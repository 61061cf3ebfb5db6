"""Fine-tune a small BERT of Hugging Face's transformers to distinguish praise from complaint, with attention masks.

    python examples/bert.py [--cores 2] [--epochs 10]

Nothing is downloaded: the net has random weights, a word is a token, and the 480 sentences are generated from a few
patterns. Half of them are negated ("not a dull film"), so that counting good and bad words isn't enough.
"""

import argparse
import itertools
import random

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import tpufit
from tpufit.data import PadToBuckets

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="auto", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

THINGS = ("film", "book", "meal", "hotel", "concert", "phone", "game", "lecture", "garden", "train")
JUDGED = [
    ("lovely", 1),
    ("clever", 1),
    ("great", 1),
    ("careful", 1),
    ("dull", 0),
    ("awful", 0),
    ("broken", 0),
    ("noisy", 0),
]
PATTERNS = [
    ("a {word} {thing}", True),
    ("not a {word} {thing}", False),
    ("i think that the {thing} was {word} from the first minute to the last", True),
    ("the {thing} was not {word} , whatever my friends say", False),
    ("we came home late because the {thing} turned out to be {word}", True),
    ("nobody can call this {thing} {word}", False),
]
texts, labels = [], []
for (pattern, as_it_says), (word, good), thing in itertools.product(PATTERNS, JUDGED, THINGS):
    texts.append(pattern.format(word=word, thing=thing))
    labels.append(good if as_it_says else 1 - good)

words = sorted({word for text in texts for word in text.split()})
token_of = {word: number for number, word in enumerate(["[PAD]", "[CLS]", *words])}
samples = []
for text, label in zip(texts, labels, strict=True):
    tokens = torch.tensor([token_of["[CLS]"], *(token_of[word] for word in text.split())])
    samples.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": label, "text": text})
random.Random(0).shuffle(samples)
train, test = samples[:384], samples[384:]


# Pad to two lengths, so that few graphs are compiled. The texts stay in the batch, but the net doesn't get them.
collate = PadToBuckets([8, 16])

tpufit.set_random_seed(0)
config = BertConfig(
    vocab_size=len(token_of),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=16,
    num_labels=2,
)
model = tpufit.Model(BertForSequenceClassification(config))
model.compile(
    lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    loss="module",
    metrics=["accuracy"],
    accumulate_steps=2,  # an optimizer step per two batches of 16
)
history = model.fit(
    DataLoader(train, 16, shuffle=True, collate_fn=collate),
    epochs=args.epochs,
    validation_data=DataLoader(test, 32, collate_fn=collate),
    cores=args.cores,
)
loss, accuracy = model.evaluate(DataLoader(test, 32, collate_fn=collate), verbose=0)
print(f"{len(test)} sentences that it has not read: loss {loss:.4f}, accuracy {accuracy:.1%}")
logits = model.predict(DataLoader(test[:4], 4, collate_fn=collate), verbose=0)
for sample, row in zip(test, logits, strict=False):
    print(f"{'praise' if row.argmax() else 'complaint':9} {sample['text']}")
