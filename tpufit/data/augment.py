"""Augmentation of images on the device, inside the step: modules for `fit(device_transform=...)`.

They bear the names of torchvision's, whose own draw on the host once a batch: a replayed step would repeat that draw.
These draw on the device, for each image anew, and read nothing. They look for no value, so every operation is done to
every image, and an image that it isn't meant for keeps what it had.

A batch is images, or `(images, labels)`, or `(images, labels, weights)`. Images are `(N, C, H, W)`, bytes or floats
from 0 to 1, and keep their dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, require_whole

# Candidates of a draw from a beta distribution. At alpha 2 all of 64 fail once in 1e5 draws, and far more seldom below.
_CANDIDATES = 64


class Augmentation(nn.Module):
    """An augmentation of images; a subclass says what is done to a batch of them.

    Example:
        >>> flip = RandomHorizontalFlip(p=1.0)
        >>> images, labels = flip((torch.arange(2.0).view(1, 1, 1, 2), torch.tensor([3])))
        >>> images.flatten().tolist(), labels.tolist()
        ([1.0, 0.0], [3])
    """

    def forward(self, batch: Any) -> Any:
        """Augment a batch: images, or a tuple of images, labels and perhaps weights."""
        if not isinstance(batch, (tuple, list)):
            return self.images(_checked(batch))
        return (self.images(_checked(batch[0])), *batch[1:])

    def images(self, x: Tensor) -> Tensor:
        """Augment images, each by itself."""
        raise NotImplementedError


class _RandomFlip(Augmentation):
    """Mirrors images along an axis."""

    axis: int

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = _share("p", p)

    def images(self, x: Tensor) -> Tensor:
        """Mirror some of the images."""
        return torch.where(_some(x, self.p), x.flip(self.axis), x)


class RandomHorizontalFlip(_RandomFlip):
    """Mirrors images from left to right.

    Args:
        p: The share of images (default 0.5).

    Source: `torchvision.transforms.v2.RandomHorizontalFlip`.
    """

    axis = -1


class RandomVerticalFlip(_RandomFlip):
    """Mirrors images from top to bottom.

    Args:
        p: The share of images (default 0.5).

    Source: `torchvision.transforms.v2.RandomVerticalFlip`.
    """

    axis = -2


class RandomCrop(Augmentation):
    """Cuts a part out of each image, at a place of its own.

    Args:
        size: The part's height and width, or one number for both.
        padding: The black pixels that are added on each side before (default 0).

    Example:
        >>> RandomCrop(4, padding=2)(torch.zeros(5, 3, 4, 4)).shape
        torch.Size([5, 3, 4, 4])

    Source: `torchvision.transforms.v2.RandomCrop`.
    """

    def __init__(self, size: int | tuple[int, int], padding: int = 0) -> None:
        super().__init__()
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.padding = padding

    def images(self, x: Tensor) -> Tensor:
        """Cut out the parts."""
        padded = F.pad(x, [self.padding] * 4)
        height, width = self.size
        if height > padded.shape[-2] or width > padded.shape[-1]:
            raise ArgumentError(f"RandomCrop({self.size}) cuts out more than images of {tuple(x.shape[-2:])} have")
        for axis, length in ((-2, height), (-1, width)):
            first = (torch.rand(len(x), device=x.device) * (padded.shape[axis] - length + 1)).floor().long()
            where = first[:, None] + torch.arange(length, device=x.device)
            shape = (len(x), 1, length, 1) if axis == -2 else (len(x), 1, 1, length)
            whole = [*padded.shape]
            whole[axis] = length
            padded = padded.gather(axis, where.view(shape).expand(whole))
        return padded


class RandomAffine(Augmentation):
    """Turns, moves, scales and shears images about their middle; what comes in from outside is black.

    Args:
        degrees: The largest angle, in both directions, or the smallest and the largest.
        translate: The largest moves, as shares of width and height (default: none).
        scale: The smallest and the largest scale (default: none).
        shear: The largest shear along the width, in degrees (default: none).

    Example:
        >>> RandomAffine(15, translate=(0.1, 0.1))(torch.zeros(5, 3, 4, 6)).shape
        torch.Size([5, 3, 4, 6])

    Source: `torchvision.transforms.v2.RandomAffine`, with bilinear interpolation.
    """

    def __init__(
        self,
        degrees: float | tuple[float, float],
        translate: tuple[float, float] | None = None,
        scale: tuple[float, float] | None = None,
        shear: float | None = None,
    ) -> None:
        super().__init__()
        self.degrees = (-degrees, degrees) if isinstance(degrees, (int, float)) else degrees
        self.translate = translate or (0.0, 0.0)
        self.scale = scale or (1.0, 1.0)
        self.shear = shear or 0.0

    def images(self, x: Tensor) -> Tensor:
        """Warp the images."""
        angle = _between(x, *self.degrees) * (math.pi / 180)
        lean = _between(x, -self.shear, self.shear) * (math.pi / 180)
        shrink = 1 / _between(x, *self.scale)
        height, width = x.shape[-2:]
        rows, columns = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (height, width))
        # Where each pixel comes from: the inverse of turning and shearing, then scaling, then moving.
        down = rows[None, :, None] - _between(x, -self.translate[1], self.translate[1])[:, None, None] * height
        right = columns[None, None, :] - _between(x, -self.translate[0], self.translate[0])[:, None, None] * width
        cos = angle.cos()[:, None, None]
        sin = angle.sin()[:, None, None]
        y = (cos * down - sin * right) * shrink[:, None, None]
        return _sampled(x, y, (cos * right + sin * down) * shrink[:, None, None] - lean.tan()[:, None, None] * y)


class RandomResizedCrop(Augmentation):
    """Cuts a part of some size and shape out of each image, and resizes it.

    Args:
        size: The height and width that it is resized to, or one number for both.
        scale: The smallest and the largest share of the area (default `(0.08, 1.0)`).
        ratio: The narrowest and the widest width over height (default `(3 / 4, 4 / 3)`).

    Example:
        >>> RandomResizedCrop(4)(torch.zeros(5, 3, 8, 6)).shape
        torch.Size([5, 3, 4, 4])

    Source: `torchvision.transforms.v2.RandomResizedCrop`, without antialiasing.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        super().__init__()
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.scale = scale
        self.ratio = ratio

    def images(self, x: Tensor) -> Tensor:
        """Cut out the parts, and resize them."""
        area = _between(x, *self.scale) * (x.shape[-2] * x.shape[-1])
        wide = _between(x, *map(math.log, self.ratio)).exp()
        coordinates = []
        for side, out, length in zip(
            x.shape[-2:], self.size, ((area / wide).sqrt(), (area * wide).sqrt()), strict=True
        ):
            cut = length.clamp(max=side)
            first = torch.rand(len(x), device=x.device) * (side - cut)
            steps = (torch.arange(out, device=x.device) + 0.5) / out
            inside = (first[:, None] + cut[:, None] * steps - 0.5).clamp(0, side - 1)
            coordinates.append(inside - (side - 1) / 2)
        return _sampled(x, coordinates[0][:, :, None], coordinates[1][:, None, :])


class ColorJitter(Augmentation):
    """Changes brightness, contrast and saturation, in this order.

    Args:
        brightness: The largest change of the factor 1 (default 0).
        contrast: The same for the distance from the image's mean grey (default 0).
        saturation: The same for the distance from each pixel's grey; for images of three channels (default 0).

    Example:
        >>> ColorJitter(0.5)(torch.full((5, 3, 4, 4), 0.5)).amax() <= 1
        tensor(True)

    Source: `torchvision.transforms.v2.ColorJitter`, without hue, and in one order.
    """

    def __init__(self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0) -> None:
        super().__init__()
        self.brightness = brightness
        self.contrast = contrast
        self.saturation = saturation

    def images(self, x: Tensor) -> Tensor:
        """Change the colours."""
        whole = 1.0 if x.is_floating_point() else 255.0
        out = _as_floats(x)
        if self.brightness:
            out = (out * _factor(x, self.brightness)).clamp(0, whole)
        if self.contrast:
            mean = _grey(out).mean((1, 2, 3), keepdim=True)
            out = (mean + (out - mean) * _factor(x, self.contrast)).clamp(0, whole)
        if self.saturation:
            grey = _grey(out)
            out = (grey + (out - grey) * _factor(x, self.saturation)).clamp(0, whole)
        return _as_before(out, x)


class RandomErasing(Augmentation):
    """Blackens a rectangle of images.

    Args:
        p: The share of images (default 0.5).
        scale: The smallest and the largest share of the area (default `(0.02, 0.33)`).
        ratio: The narrowest and the widest height over width (default `(0.3, 3.3)`).

    Example:
        >>> bool((RandomErasing(p=1.0)(torch.ones(5, 3, 8, 8)) == 0).any())
        True

    Source: `torchvision.transforms.v2.RandomErasing`.
    """

    def __init__(
        self, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33), ratio: tuple[float, float] = (0.3, 3.3)
    ) -> None:
        super().__init__()
        self.p = _share("p", p)
        self.scale = scale
        self.ratio = ratio

    def images(self, x: Tensor) -> Tensor:
        """Blacken the rectangles."""
        area = _between(x, *self.scale) * (x.shape[-2] * x.shape[-1])
        tall = _between(x, *map(math.log, self.ratio)).exp()
        inside = _rectangles(x, (area * tall).sqrt(), (area / tall).sqrt(), whole=True)
        return torch.where(inside & _some(x, self.p), torch.zeros_like(x), x)


class RandAugment(Augmentation):
    """Does some operations to each image, drawn for each anew, one after the other, all with one magnitude.

    They are torchvision's, with pixels of the nearest place: none, shearing, moving and turning, brightness, colour,
    contrast, sharpness, posterizing, solarizing, and stretching each channel. Only equalizing isn't among them: its
    histograms would cost more than all others together.

    Args:
        num_ops: The number of operations (default 2).
        magnitude: How strong they are, from 0 to below `num_magnitude_bins` (default 9).
        num_magnitude_bins: The number of strengths (default 31).

    Raises:
        ArgumentError: A number is out of its range.

    Example:
        >>> RandAugment(num_ops=2, magnitude=9)(torch.zeros(5, 3, 4, 4, dtype=torch.uint8)).shape
        torch.Size([5, 3, 4, 4])

    Source: `torchvision.transforms.v2.RandAugment`; Cubuk et al., https://arxiv.org/abs/1909.13719.
    """

    def __init__(self, num_ops: int = 2, magnitude: int = 9, num_magnitude_bins: int = 31) -> None:
        super().__init__()
        require_whole("num_ops", num_ops)
        require_whole("num_magnitude_bins", num_magnitude_bins, 2)
        require_whole("magnitude", magnitude, 0)
        if magnitude >= num_magnitude_bins:
            raise ArgumentError(f"magnitude must be below num_magnitude_bins={num_magnitude_bins}, got {magnitude}")
        self.num_ops = num_ops
        self.magnitude = magnitude
        self.num_magnitude_bins = num_magnitude_bins

    def images(self, x: Tensor) -> Tensor:
        """Draw the operations, and do them."""
        for _ in range(self.num_ops):
            drawn = (torch.rand(len(x), device=x.device) * len(OPERATIONS)).floor()
            x = self.applied(x, drawn, torch.where(torch.rand(len(x), device=x.device) < 0.5, -1.0, 1.0))
        return x

    def applied(self, x: Tensor, which: Tensor, sign: Tensor) -> Tensor:
        """Do one operation to each image.

        Args:
            x: The images.
            which: The number of each image's operation in `OPERATIONS`, shape `(N,)`.
            sign: 1.0 or -1.0 for each image: the direction, for those that have one.
        """
        share = self.magnitude / (self.num_magnitude_bins - 1)
        x = _warped(x, which, sign * share)
        whole = 1.0 if x.is_floating_point() else 255.0
        out = _as_floats(x)
        factor = (1 + 0.9 * share * sign).view(-1, 1, 1, 1)
        bits = 8 - round(self.magnitude * 4 / (self.num_magnitude_bins - 1))
        grey = _grey(out)
        low = out.amin((2, 3), keepdim=True)
        high = out.amax((2, 3), keepdim=True)
        made = {
            "brightness": out * factor,
            "color": grey + (out - grey) * factor,
            "contrast": grey.mean((1, 2, 3), keepdim=True) + (out - grey.mean((1, 2, 3), keepdim=True)) * factor,
            "sharpness": _blurred(out) + (out - _blurred(out)) * factor,
            "posterize": (out * (255 / whole) / 2 ** (8 - bits)).floor() * 2 ** (8 - bits) * (whole / 255),
            "solarize": torch.where(out >= whole * (1 - share), whole - out, out),
            "auto_contrast": torch.where(high > low, (out - low) * (whole / (high - low).clamp(min=1e-6)), out),
        }
        for name, own in made.items():
            out = torch.where((which == OPERATIONS.index(name)).view(-1, 1, 1, 1), own.clamp(0, whole), out)
        return _as_before(out, x)


# Those of `RandAugment`.
OPERATIONS = [
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "auto_contrast",
]


class _Mixing(Augmentation):
    """Mixes each image with the one before it in the batch, and their labels.

    A batch's share is drawn from the beta distribution of `alpha`, above 0 and up to 2.
    """

    def __init__(self, num_classes: int, alpha: float = 1.0) -> None:
        super().__init__()
        if not 0 < alpha <= 2:
            raise ArgumentError(f"alpha must be above 0 and at most 2, got {alpha!r}")
        self.num_classes = num_classes
        self.alpha = alpha

    def forward(self, batch: Any) -> Any:
        """Mix a batch; its labels become probabilities."""
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise ArgumentError(f"{type(self).__name__} mixes labels too: the batch must be (images, labels)")
        x, y, *rest = batch
        if y.ndim == 1:
            y = F.one_hot(y.long(), self.num_classes).float()
        mixed, share = self.mixed(_checked(x), _beta(x, self.alpha))
        return (mixed, share * y + (1 - share) * y.roll(1, 0), *rest)

    def mixed(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images; return them with the share that is left of each."""
        raise NotImplementedError


class MixUp(_Mixing):
    """Lays each image over the one before it in the batch; labels become probabilities.

    `cross_entropy` takes such targets, and `accuracy` compares with the likelier class.

    Args:
        num_classes: The number of classes.
        alpha: The parameter of the beta distribution, above 0 and up to 2, that a batch's share is drawn from (default
            1.0: all shares are alike).

    Example:
        >>> images, targets = MixUp(num_classes=3)((torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])))
        >>> targets.shape, bool(torch.allclose(targets.sum(1), torch.ones(4)))
        (torch.Size([4, 3]), True)

    Source: `torchvision.transforms.v2.MixUp`; Zhang et al., https://arxiv.org/abs/1710.09412.
    """

    def mixed(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images."""
        out = _as_floats(x)
        return _as_before(share * out + (1 - share) * out.roll(1, 0), x), share


class CutMix(_Mixing):
    """Puts a rectangle of the image before it in the batch into each image; labels become probabilities.

    `cross_entropy` takes such targets, and `accuracy` compares with the likelier class.

    Args:
        num_classes: The number of classes.
        alpha: The parameter of the beta distribution, above 0 and up to 2, that a batch's share is drawn from (default
            1.0: all shares are alike).

    Example:
        >>> images, targets = CutMix(num_classes=3)((torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])))
        >>> targets.shape
        torch.Size([4, 3])

    Source: `torchvision.transforms.v2.CutMix`; Yun et al., https://arxiv.org/abs/1905.04899.
    """

    def mixed(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images. All of a batch have the same rectangle, cut off at their edge."""
        side = (1 - share).sqrt()
        one = x[:1]
        inside = _rectangles(one, side * x.shape[-2], side * x.shape[-1], whole=False)
        return torch.where(inside, x.roll(1, 0), x), 1 - inside.float().mean()


def _warped(x: Tensor, which: Tensor, share: Tensor) -> Tensor:
    """Shear, move or turn those images that this is drawn for, by a share of the most; outside they are black."""

    def of(name: str, most: float) -> Tensor:
        return torch.where(which == OPERATIONS.index(name), share * most, 0.0).view(-1, 1, 1)

    height, width = x.shape[-2:]
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)
    # From the middle.
    y = row - (height - 1) / 2
    z = column - (width - 1) / 2
    angle = of("rotate", math.pi / 6)
    down = (height - 1) / 2 + angle.sin() * z + angle.cos() * y
    right = (width - 1) / 2 + angle.cos() * z - angle.sin() * y
    # Shears keep the corner at the top left, and moves are whole pixels.
    down = down + of("shear_y", 0.3) * (column + 0.5) - of("translate_y", 150 / 331 * height).trunc()
    right = right + of("shear_x", 0.3) * (row + 0.5) - of("translate_x", 150 / 331 * width).trunc()
    down = down.round()
    right = right.round()
    inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    place = (down.clamp(0, height - 1) * width + right.clamp(0, width - 1)).long().flatten(1)
    pixels = x.flatten(2).gather(2, place[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    return torch.where(inside[:, None], pixels, torch.zeros_like(x))


def _blurred(x: Tensor) -> Tensor:
    """Smooth images as torchvision's sharpness does, but for their edges."""
    height, width = x.shape[-2:]
    if height < 3 or width < 3:
        return x
    shifted = [x[:, :, i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    inner = (torch.stack(shifted).sum(0) + 4 * x[:, :, 1:-1, 1:-1]) / 13
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)
    edge = (row == 0) | (row == height - 1) | (column == 0) | (column == width - 1)
    return torch.where(edge, x, F.pad(inner, [1, 1, 1, 1]))


def _checked(x: Any) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 4:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"images must be a tensor of shape (N, C, H, W), got {shape}")
    return x


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be from 0 to 1, got {value!r}")
    return value


def _some(x: Tensor, p: float) -> Tensor:
    """Draw which images are meant."""
    return torch.rand(len(x), 1, 1, 1, device=x.device) < p


def _between(x: Tensor, low: float, high: float) -> Tensor:
    """Draw a number for each image."""
    return low + (high - low) * torch.rand(len(x), device=x.device)


def _factor(x: Tensor, change: float) -> Tensor:
    return _between(x, max(0.0, 1 - change), 1 + change).view(-1, 1, 1, 1)


def _beta(x: Tensor, alpha: float) -> Tensor:
    """Draw a number of the distribution Beta(alpha, alpha), by Jöhnk's method: the first candidate that will do.

    Source: Jöhnk, "Erzeugung von betaverteilten und gammaverteilten Zufallszahlen", Metrika 8, 1964.
    """
    if alpha == 1:
        return torch.rand((), device=x.device)
    one, other = torch.rand(2, _CANDIDATES, device=x.device).pow(1 / alpha)
    chosen = (one + other <= 1).float().argmax()
    shares: Tensor = one / (one + other).clamp(min=1e-30)
    return shares.index_select(0, chosen.view(1)).view(())


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, 1)
    grey: Tensor = 0.2989 * red + 0.587 * green + 0.114 * blue
    return grey


def _as_floats(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def _as_before(out: Tensor, x: Tensor) -> Tensor:
    """Give images the dtype that they had."""
    return out if x.is_floating_point() else out.round().clamp(0, 255).to(x.dtype)


def _rectangles(x: Tensor, height: Tensor, width: Tensor, whole: bool) -> Tensor:
    """Draw where a rectangle of this height and width, in pixels, lies in each image: True inside.

    It lies wholly inside of the image, or else its middle does, and the edge may cut it off.
    """
    inside = []
    for side, length in zip(x.shape[-2:], (height, width), strict=True):
        drawn = torch.rand(len(x), device=x.device)
        fits = length.round().clamp(max=side)
        first = drawn * (side - fits + 1) if whole else drawn * side - fits / 2
        place = torch.arange(side, device=x.device)
        first = first.floor()[:, None]
        inside.append((place >= first) & (place < first + fits.view(-1, 1)))
    rows, columns = inside
    found: Tensor = (rows[:, :, None] & columns[:, None, :])[:, None]
    return found


def _sampled(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Look up pixels at places between pixels, with bilinear interpolation; outside of the image they are black.

    The places go down and right from the images' middle, and are of a shape that broadcasts to (N, height, width).
    Torch's own `grid_sample` is none of the device's operations.
    """
    height, width = x.shape[-2:]
    down, right = torch.broadcast_tensors(down + (height - 1) / 2, right + (width - 1) / 2)
    top = down.floor()
    left = right.floor()
    flat = _as_floats(x).flatten(2)
    out = torch.zeros((), device=x.device)
    for below in (0, 1):
        for beside in (0, 1):
            row = top + below
            column = left + beside
            weight = (1 - (down - row).abs()) * (1 - (right - column).abs())
            weight = weight * ((row >= 0) & (row < height) & (column >= 0) & (column < width))
            place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long().flatten(1)
            pixels = flat.gather(2, place[:, None].expand(-1, x.shape[1], -1))
            out = out + pixels.view(*x.shape[:2], *down.shape[1:]) * weight[:, None]
    return _as_before(out.to(flat.dtype), x)
