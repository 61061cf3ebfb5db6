"""Networks of `networks.py` in Keras, in its usual style: images have their channels last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from keras import layers

WIDTH = 224


class Positions(layers.Layer):
    """Adds its own weights to each row of a sequence; a token, if there is one, comes first."""

    def __init__(self, token: bool = False) -> None:
        super().__init__()
        self.token = token

    def build(self, shape: tuple[int | None, ...]) -> None:
        _, length, width = shape
        if self.token:
            self.first = self.add_weight(shape=(1, 1, width), initializer="zeros")
        self.table = self.add_weight(shape=(length + self.token, width), initializer="random_normal")

    def call(self, x: Any) -> Any:
        if self.token:
            first = keras.ops.broadcast_to(self.first, (x.shape[0], 1, x.shape[2]))
            x = keras.ops.concatenate([first, x], axis=1)
        return x + self.table


def mlp(rows: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,), rows),
            layers.Dense(2048, activation="relu"),
            layers.Dense(2048, activation="relu"),
            layers.Dense(10),
        ]
    )


def lstm(rows: int) -> keras.Model:
    """Unrolled, as in PyTorch, because the compiler counts a loop's body once."""
    return keras.Sequential(
        [
            keras.Input((64, 128), rows),
            layers.LSTM(256, return_sequences=True, unroll=True),
            layers.LSTM(256, unroll=True),
            layers.Dense(10),
        ]
    )


def block(x: Any, heads: int, causal: bool = False) -> Any:
    """Attention and a feed-forward net, with the norms before them."""
    width = x.shape[-1]
    y = layers.LayerNormalization(epsilon=1e-5)(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    y = layers.LayerNormalization(epsilon=1e-5)(x)
    return x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))


def gpt(rows: int) -> keras.Model:
    x = keras.Input((512,), rows, dtype="int32")
    words = layers.ReversibleEmbedding(8192, 512)
    y = Positions()(words(x))
    for _ in range(4):
        y = block(y, 8, causal=True)
    y = layers.LayerNormalization(epsilon=1e-5)(y)
    return keras.Model(x, words(y, reverse=True))


class GroupedAttention(layers.Layer):
    """Attention with shared keys and values, with rotary positions."""

    def __init__(self, heads: int, shared: int, size: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            layers.EinsumDense("btd,dnh->btnh", (None, n, size)) for n in (heads, shared, shared)
        )
        self.out = layers.EinsumDense("btnh,nhd->btd", (None, heads * size))
        self.size = size

    def build(self, shape: tuple[int | None, ...]) -> None:
        for layer in (self.query, self.key, self.value):
            layer.build(shape)
        self.out.build(self.query.compute_output_shape(shape))

    def call(self, x: Any) -> Any:
        q, k, v = self.query(x), self.key(x), self.value(x)
        positions = keras.ops.arange(x.shape[1], dtype="float32")
        rates = 10000 ** (-keras.ops.arange(0, self.size, 2, dtype="float32") / self.size)
        angles = keras.ops.tile(keras.ops.outer(positions, rates), (1, 2))[:, None]
        cos, sin = (keras.ops.cast(f(angles), q.dtype) for f in (keras.ops.cos, keras.ops.sin))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return self.out(keras.ops.dot_product_attention(q, k, v, is_causal=True))


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    first, second = keras.ops.split(x, 2, axis=-1)
    return x * cos + keras.ops.concatenate([-second, first], axis=-1) * sin


def llama(rows: int, depth: int = 8, width: int = 512) -> keras.Model:
    x = keras.Input((1024,), rows, dtype="int32")
    y = layers.Embedding(8192, width)(x)
    for _ in range(depth):
        h = layers.RMSNormalization(epsilon=1e-6)(y)
        y = y + GroupedAttention(width // 64, 2, 64)(h)
        h = layers.RMSNormalization(epsilon=1e-6)(y)
        gated = layers.Dense(3 * width, activation="silu", use_bias=False)(h)
        y = y + layers.Dense(width, use_bias=False)(gated * layers.Dense(3 * width, use_bias=False)(h))
    y = layers.RMSNormalization(epsilon=1e-6)(y)
    return keras.Model(x, layers.Dense(8192, use_bias=False)(y))


def vit(rows: int, depth: int = 12) -> keras.Model:
    x = keras.Input((WIDTH, WIDTH, 3), rows)
    y = layers.Conv2D(384, 16, 16)(x)
    y = Positions(token=True)(layers.Reshape((-1, 384))(y))
    for _ in range(depth):
        y = block(y, 6)
    y = layers.LayerNormalization(epsilon=1e-5)(y)
    return keras.Model(x, layers.Dense(1000)(y[:, 0]))


def convolution(x: Any, width: int, size: int, stride: int = 1) -> Any:
    y = layers.Conv2D(width, size, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(y)


def bottleneck(x: Any, width: int, stride: int) -> Any:
    y = layers.ReLU()(convolution(x, width, 1))
    y = layers.ReLU()(convolution(y, width, 3, stride))
    y = convolution(y, 4 * width, 1)
    changes = stride != 1 or x.shape[-1] != 4 * width
    return layers.ReLU()(y + (convolution(x, 4 * width, 1, stride) if changes else x))


def resnet50(rows: int) -> keras.Model:
    """Version 1.5: blocks downsample in their 3 x 3 convolution."""
    x = keras.Input((WIDTH, WIDTH, 3), rows)
    y = layers.ReLU()(convolution(x, 64, 7, 2))
    y = layers.MaxPooling2D(3, 2, padding="same")(y)
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            y = bottleneck(y, 64 << stage, 2 if stage and not number else 1)
    return keras.Model(x, layers.Dense(1000)(layers.GlobalAveragePooling2D()(y)))


NETWORKS: dict[str, Callable[[int], keras.Model]] = {
    "MLP": mlp,
    "LSTM": lstm,
    "GPT": gpt,
    "ResNet-50": resnet50,
    "Llama": llama,
    "Llama of 2 blocks": partial(llama, depth=2),
    "ViT-S/16": vit,
    "ViT of 2 blocks": partial(vit, depth=2),
}
