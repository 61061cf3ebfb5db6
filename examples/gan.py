"""Train two networks against each other, with a custom step and a second optimizer: a GAN that draws digits.

    python examples/gan.py [--cores 8] [--epochs 40]

Before and after training it prints how far the mean and the spread of the generated images differ from the data's,
pixel by pixel, and then some generated digits.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tpufit

NOISE = 16  # numbers that an image is drawn from


class Rivals(nn.Module):
    """A generator, which draws images of shape (batch, 64) from noise, and a critic, which recognizes real ones."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 64),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Linear(64, 128),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(128, 64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, 1),
        )

    def forward(self, noise):
        return self.generator(noise)


class GAN(tpufit.Model):
    """The optimizer of `compile` is the generator's; the critic's is an attribute."""

    def __init__(self, module):
        super().__init__(module)
        self.critics_optimizer = torch.optim.Adam(module.critic.parameters(), 1e-3, betas=(0.5, 0.999))

    def train_step(self, batch):
        (real,) = batch
        critic = self.module.critic
        drawn = self(torch.randn(len(real), NOISE, device=real.device))
        on_real, on_drawn = critic(real), critic(drawn.detach())
        critics_loss = F.softplus(-on_real).mean() + F.softplus(on_drawn).mean()
        self.apply_gradients(critics_loss, self.critics_optimizer)
        loss = F.softplus(-critic(drawn)).mean()
        self.apply_gradients(loss)
        return {"loss": loss, "critics_loss": critics_loss}


parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()

tpufit.set_random_seed(0)
digits = (load_digits().data / 8 - 1).astype("float32")  # 1,797 images, values -1 to 1, as tanh gives them
noise = np.random.default_rng(0).normal(size=(1024, NOISE)).astype("float32")

model = GAN(Rivals())
# Only the rate of compile's optimizer grows with the cores. The critic's rate doesn't, so neither may the generator's.
model.compile(
    lambda parameters: torch.optim.Adam(model.module.generator.parameters(), 1e-3, betas=(0.5, 0.999)), scale_lr=None
)


def compare(when):
    """Print how far drawn images are from the data."""
    drawn = model.predict(noise, cores=args.cores, verbose=0)
    means = np.abs(drawn.mean(0) - digits.mean(0)).mean()
    spreads = np.abs(drawn.std(0) - digits.std(0)).mean()
    print(f"{when} training: means differ by {means:.3f}, standard deviations by {spreads:.3f}")
    return drawn


compare("before")
history = model.fit(digits, batch_size=8, epochs=args.epochs, verbose=2, cores=args.cores)
drawn = compare("after")
for row in range(8):
    lines = [drawn[i].reshape(8, 8)[row] for i in range(6)]
    print("   ".join("".join(" .:+#@"[int((value + 1) * 2.99)] * 2 for value in line) for line in lines))
