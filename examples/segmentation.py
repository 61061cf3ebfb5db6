"""Segment images with a small U-Net: for each pixel, is it ground, a disc or a square?

    python examples/segmentation.py [--cores 8] [--epochs 6]

The images are generated: a bright disc and a dark square on noise, which may overlap. Afterwards it prints an image's
true mask next to the predicted mask.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torchmetrics import JaccardIndex

import tpufit

SIZE = 32  # pixels per side
CLASSES = ["ground", "disc", "square"]


def draw(count, seed):
    """Return images of shape (count, 1, SIZE, SIZE), and masks of shape (count, SIZE, SIZE) with a class per pixel."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    images = rng.normal(0, 0.5, (count, 1, SIZE, SIZE)).astype("float32")
    masks = np.zeros((count, SIZE, SIZE), "int64")
    for image, mask in zip(images[:, 0], masks, strict=True):
        for number, brightness in ((1, 1.0), (2, -1.0)):
            y, x = rng.integers(6, SIZE - 6, 2)
            size = rng.integers(3, 8)
            down, right = np.abs(rows - y), np.abs(columns - x)
            inside = down**2 + right**2 <= size**2 if number == 1 else np.maximum(down, right) <= size
            image[inside] += brightness
            mask[inside] = number
    return images, masks


def block(inputs, outputs):
    """Return two convolutions that keep the image's size."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Two levels down, two up; each level up also gets the output of the level of the same size on the way down."""

    def __init__(self, width=8):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1 = block(1, width)
        self.down2 = block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.grow2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = block(4 * width, 2 * width)
        self.grow1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = block(2 * width, width)
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, x):
        """Return the logits of each pixel's classes, of shape (batch, classes, height, width)."""
        large = self.down1(x)
        middle = self.down2(self.pool(large))
        small = self.bottom(self.pool(middle))
        x = self.up2(torch.cat([middle, self.grow2(small)], 1))
        x = self.up1(torch.cat([large, self.grow1(x)], 1))
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

tpufit.set_random_seed(0)
x, y = draw(512, seed=0)
x_test, y_test = draw(128, seed=1)
model = tpufit.Model(UNet())
model.compile(
    lambda parameters: torch.optim.AdamW(parameters, 3e-3),
    "cross_entropy",
    metrics={"accuracy": "accuracy", "iou": JaccardIndex(task="multiclass", num_classes=len(CLASSES))},
    scale_lr=None,  # 0.003 on any number of cores
)
history = model.fit(x, y, batch_size=4, epochs=args.epochs, validation_data=(x_test, y_test), cores=args.cores)

classes = model.predict(x_test[:1], verbose=0)[0].argmax(0)
for true, predicted in zip(y_test[0, ::2], classes[::2], strict=True):
    print("   ".join("".join(".o#"[pixel] for pixel in row) for row in (true, predicted)))
print(f"held-out images: accuracy {history.history['val_accuracy'][-1]:.1%}, IoU {history.history['val_iou'][-1]:.3f}")
