"""Image augmentation on the device, inside the step: modules for `fit(device_transform=...)`.

They have the names of torchvision's transforms, which draw on the host once per batch, so that a replayed step would
repeat the draw. These draw on the device, for each image. They never read values on the host, so every operation runs
on every image, and its result is kept only for the chosen images.

A batch is `images`, `(images, labels)` or `(images, labels, weights)`. Images have the shape `(N, C, H, W)`, are bytes
or floats from 0 to 1, and keep their dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, require_number, require_whole

# Candidates for a draw from a beta distribution. With alpha 2 all 64 fail once in 1e5 draws; with a smaller alpha, far
# more rarely.
_CANDIDATES = 64


class Augmentation(nn.Module):
    """An image augmentation; subclasses implement it for a batch of images.

    Example:
        >>> flip = RandomHorizontalFlip(p=1.0)
        >>> images, labels = flip((torch.arange(2.0).view(1, 1, 1, 2), torch.tensor([3])))
        >>> images.flatten().tolist(), labels.tolist()
        ([1.0, 0.0], [3])
    """

    def forward(self, batch: Any) -> Any:
        """Augment a batch: images, or a tuple of images, labels and optionally weights."""
        if not isinstance(batch, (tuple, list)):
            return self.images(_require_images(batch))
        return (self.images(_require_images(batch[0])), *batch[1:])

    def images(self, x: Tensor) -> Tensor:
        """Augment images independently."""
        raise NotImplementedError


class _RandomFlip(Augmentation):
    """Mirrors images along an axis."""

    axis: int

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = require_number("p", p, "a share from 0 to 1", lambda share: 0 <= share <= 1)

    def images(self, x: Tensor) -> Tensor:
        """Mirror some of the images."""
        return torch.where(_draw_chosen(x, self.p), x.flip(self.axis), x)


class RandomHorizontalFlip(_RandomFlip):
    """Mirrors images from left to right.

    Args:
        p: The share of images (default 0.5).

    Raises:
        ArgumentError: `p` isn't from 0 to 1.

    Example:
        >>> RandomHorizontalFlip(p=1.0)(torch.arange(2.0).view(1, 1, 1, 2)).flatten().tolist()
        [1.0, 0.0]

    Source: `torchvision.transforms.v2.RandomHorizontalFlip`.
    """

    axis = -1


class RandomVerticalFlip(_RandomFlip):
    """Mirrors images from top to bottom.

    Args:
        p: The share of images (default 0.5).

    Raises:
        ArgumentError: `p` isn't from 0 to 1.

    Example:
        >>> RandomVerticalFlip(p=1.0)(torch.arange(2.0).view(1, 1, 2, 1)).flatten().tolist()
        [1.0, 0.0]

    Source: `torchvision.transforms.v2.RandomVerticalFlip`.
    """

    axis = -2


class RandomCrop(Augmentation):
    """Crops each image at a random position.

    Args:
        size: The crop's height and width, or one number for both.
        padding: The black pixels to add on each side first (default 0).

    Raises:
        ArgumentError: In the step, if the images are smaller than the crop.

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
        """Crop the images."""
        padded = F.pad(x, [self.padding] * 4)
        height, width = self.size
        if height > padded.shape[-2] or width > padded.shape[-1]:
            raise ArgumentError(
                f"RandomCrop({self.size}) is larger than images of {tuple(x.shape[-2:])}: pass a smaller size, or "
                "padding"
            )
        for axis, length in ((-2, height), (-1, width)):
            first = (torch.rand(len(x), device=x.device) * (padded.shape[axis] - length + 1)).floor().long()
            where = first[:, None] + torch.arange(length, device=x.device)
            shape = (len(x), 1, length, 1) if axis == -2 else (len(x), 1, 1, length)
            whole = [*padded.shape]
            whole[axis] = length
            padded = padded.gather(axis, where.view(shape).expand(whole))
        return padded


class RandomAffine(Augmentation):
    """Rotates, moves, scales and shears images about their center; pixels from outside are black.

    Args:
        degrees: The largest angle in both directions, or the smallest and the largest angle.
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
        angle = _draw_uniform(x, *self.degrees) * (math.pi / 180)
        lean = _draw_uniform(x, -self.shear, self.shear) * (math.pi / 180)
        shrink = 1 / _draw_uniform(x, *self.scale)
        height, width = x.shape[-2:]
        rows, columns = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (height, width))
        # The source of each pixel: the inverse of rotating and shearing, then scaling, then moving.
        down = rows[None, :, None] - _draw_uniform(x, -self.translate[1], self.translate[1])[:, None, None] * height
        right = columns[None, None, :] - _draw_uniform(x, -self.translate[0], self.translate[0])[:, None, None] * width
        cos = angle.cos()[:, None, None]
        sin = angle.sin()[:, None, None]
        y = (cos * down - sin * right) * shrink[:, None, None]
        return _sample_pixels(x, y, (cos * right + sin * down) * shrink[:, None, None] - lean.tan()[:, None, None] * y)


class RandomResizedCrop(Augmentation):
    """Crops each image to a random size and aspect ratio, and resizes the crop.

    Args:
        size: The final height and width, or one number for both.
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
        """Crop and resize the images."""
        area = _draw_uniform(x, *self.scale) * (x.shape[-2] * x.shape[-1])
        wide = _draw_uniform(x, *map(math.log, self.ratio)).exp()
        coordinates = []
        for side, out, length in zip(
            x.shape[-2:], self.size, ((area / wide).sqrt(), (area * wide).sqrt()), strict=True
        ):
            cut = length.clamp(max=side)
            first = torch.rand(len(x), device=x.device) * (side - cut)
            steps = (torch.arange(out, device=x.device) + 0.5) / out
            inside = (first[:, None] + cut[:, None] * steps - 0.5).clamp(0, side - 1)
            coordinates.append(inside - (side - 1) / 2)
        return _sample_pixels(x, coordinates[0][:, :, None], coordinates[1][:, None, :])


class ColorJitter(Augmentation):
    """Changes brightness, contrast and saturation, in this order.

    Args:
        brightness: The largest change of the brightness factor from 1 (default 0).
        contrast: Likewise for the difference from the image's mean gray (default 0).
        saturation: Likewise for the difference from each pixel's gray; for images of three channels (default 0).

    Example:
        >>> ColorJitter(0.5)(torch.full((5, 3, 4, 4), 0.5)).amax() <= 1
        tensor(True)

    Source: `torchvision.transforms.v2.ColorJitter`, without hue, and in a fixed order.
    """

    def __init__(self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0) -> None:
        super().__init__()
        self.brightness = brightness
        self.contrast = contrast
        self.saturation = saturation

    def images(self, x: Tensor) -> Tensor:
        """Change the colors."""
        whole = 1.0 if x.is_floating_point() else 255.0
        out = _to_floats(x)
        if self.brightness:
            out = (out * _draw_factor(x, self.brightness)).clamp(0, whole)
        if self.contrast:
            mean = _to_gray(out).mean((1, 2, 3), keepdim=True)
            out = (mean + (out - mean) * _draw_factor(x, self.contrast)).clamp(0, whole)
        if self.saturation:
            gray = _to_gray(out)
            out = (gray + (out - gray) * _draw_factor(x, self.saturation)).clamp(0, whole)
        return _restore_dtype(out, x)


class RandomErasing(Augmentation):
    """Blackens a rectangle of images.

    Args:
        p: The share of images (default 0.5).
        scale: The smallest and the largest share of the area (default `(0.02, 0.33)`).
        ratio: The narrowest and the widest height over width (default `(0.3, 3.3)`).

    Raises:
        ArgumentError: `p` isn't from 0 to 1.

    Example:
        >>> bool((RandomErasing(p=1.0)(torch.ones(5, 3, 8, 8)) == 0).any())
        True

    Source: `torchvision.transforms.v2.RandomErasing`.
    """

    def __init__(
        self, p: float = 0.5, scale: tuple[float, float] = (0.02, 0.33), ratio: tuple[float, float] = (0.3, 3.3)
    ) -> None:
        super().__init__()
        self.p = require_number("p", p, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        self.scale = scale
        self.ratio = ratio

    def images(self, x: Tensor) -> Tensor:
        """Blacken the rectangles."""
        area = _draw_uniform(x, *self.scale) * (x.shape[-2] * x.shape[-1])
        tall = _draw_uniform(x, *map(math.log, self.ratio)).exp()
        inside = _draw_rectangles(x, (area * tall).sqrt(), (area / tall).sqrt(), whole=True)
        return torch.where(inside & _draw_chosen(x, self.p), torch.zeros_like(x), x)


class RandAugment(Augmentation):
    """Applies random operations to each image in turn, all with the same magnitude.

    The operations are torchvision's, with nearest-pixel interpolation: identity, shearing, moving, rotating,
    brightness, color, contrast, sharpness, posterizing, solarizing and autocontrast. Only equalizing is missing: its
    histograms would cost more than all other operations together.

    Args:
        num_ops: The number of operations (default 2).
        magnitude: Their strength, from 0 to below `num_magnitude_bins` (default 9).
        num_magnitude_bins: The number of strengths (default 31).

    Raises:
        ArgumentError: A number is out of range.

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
        """Draw and apply the operations."""
        for _ in range(self.num_ops):
            drawn = (torch.rand(len(x), device=x.device) * len(OPERATIONS)).floor()
            x = self.apply_operations(x, drawn, torch.where(torch.rand(len(x), device=x.device) < 0.5, -1.0, 1.0))
        return x

    def apply_operations(self, x: Tensor, which: Tensor, sign: Tensor) -> Tensor:
        """Apply one operation to each image.

        Args:
            x: The images.
            which: The index of each image's operation in `OPERATIONS`, shape `(N,)`.
            sign: 1.0 or -1.0 for each image: the direction, for operations with a direction.
        """
        share = self.magnitude / (self.num_magnitude_bins - 1)
        x = _warp(x, which, sign * share)
        whole = 1.0 if x.is_floating_point() else 255.0
        out = _to_floats(x)
        factor = (1 + 0.9 * share * sign).view(-1, 1, 1, 1)
        bits = 8 - round(self.magnitude * 4 / (self.num_magnitude_bins - 1))
        gray = _to_gray(out)
        low = out.amin((2, 3), keepdim=True)
        high = out.amax((2, 3), keepdim=True)
        results = {
            "brightness": out * factor,
            "color": gray + (out - gray) * factor,
            "contrast": gray.mean((1, 2, 3), keepdim=True) + (out - gray.mean((1, 2, 3), keepdim=True)) * factor,
            "sharpness": _blur(out) + (out - _blur(out)) * factor,
            "posterize": (out * (255 / whole) / 2 ** (8 - bits)).floor() * 2 ** (8 - bits) * (whole / 255),
            "solarize": torch.where(out >= whole * (1 - share), whole - out, out),
            "auto_contrast": torch.where(high > low, (out - low) * (whole / (high - low).clamp(min=1e-6)), out),
        }
        for name, result in results.items():
            out = torch.where((which == OPERATIONS.index(name)).view(-1, 1, 1, 1), result.clamp(0, whole), out)
        return _restore_dtype(out, x)


# The operations of `RandAugment`.
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
    """Mixes each image and its label with the previous image's in the batch.

    A batch's share is drawn from the beta distribution with `alpha`, above 0 and up to 2.
    """

    def __init__(self, num_classes: int, alpha: float = 1.0) -> None:
        super().__init__()
        if not 0 < alpha <= 2:
            raise ArgumentError(f"alpha must be above 0 and at most 2, got {alpha!r}")
        self.num_classes = num_classes
        self.alpha = alpha

    def forward(self, batch: Any) -> Any:
        """Mix a batch; labels become probabilities."""
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise ArgumentError(f"{type(self).__name__} mixes labels too: the batch must be (images, labels)")
        x, y, *rest = batch
        if y.ndim == 1:
            y = F.one_hot(y.long(), self.num_classes).float()
        mixed, share = self.mix(_require_images(x), _draw_beta(x, self.alpha))
        return (mixed, share * y + (1 - share) * y.roll(1, 0), *rest)

    def mix(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images; return them, and the remaining share of each image."""
        raise NotImplementedError


class MixUp(_Mixing):
    """Blends each image with the previous one in the batch; labels become probabilities.

    `cross_entropy` takes such targets, and `accuracy` compares with the likelier class.

    Args:
        num_classes: The number of classes.
        alpha: The parameter of the beta distribution, above 0 and up to 2, that a batch's share is drawn from (default
            1.0: all shares are equally likely).

    Example:
        >>> images, targets = MixUp(num_classes=3)((torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])))
        >>> targets.shape, bool(torch.allclose(targets.sum(1), torch.ones(4)))
        (torch.Size([4, 3]), True)

    Source: `torchvision.transforms.v2.MixUp`; Zhang et al., https://arxiv.org/abs/1710.09412.
    """

    def mix(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images."""
        out = _to_floats(x)
        return _restore_dtype(share * out + (1 - share) * out.roll(1, 0), x), share


class CutMix(_Mixing):
    """Pastes a rectangle of the previous image in the batch into each image; labels become probabilities.

    `cross_entropy` takes such targets, and `accuracy` compares with the likelier class.

    Args:
        num_classes: The number of classes.
        alpha: The parameter of the beta distribution, above 0 and up to 2, that a batch's share is drawn from (default
            1.0: all shares are equally likely).

    Example:
        >>> images, targets = CutMix(num_classes=3)((torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])))
        >>> targets.shape
        torch.Size([4, 3])

    Source: `torchvision.transforms.v2.CutMix`; Yun et al., https://arxiv.org/abs/1905.04899.
    """

    def mix(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the images. All images of a batch have the same rectangle, clipped at the edge."""
        side = (1 - share).sqrt()
        one = x[:1]
        inside = _draw_rectangles(one, side * x.shape[-2], side * x.shape[-1], whole=False)
        return torch.where(inside, x.roll(1, 0), x), 1 - inside.float().mean()


def _warp(x: Tensor, which: Tensor, share: Tensor) -> Tensor:
    """Shear, move or rotate the images with these operations, by a share of the maximum; outside is black."""

    def amount(name: str, maximum: float) -> Tensor:
        return torch.where(which == OPERATIONS.index(name), share * maximum, 0.0).view(-1, 1, 1)

    height, width = x.shape[-2:]
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)
    # Relative to the center.
    y = row - (height - 1) / 2
    z = column - (width - 1) / 2
    angle = amount("rotate", math.pi / 6)
    down = (height - 1) / 2 + angle.sin() * z + angle.cos() * y
    right = (width - 1) / 2 + angle.cos() * z - angle.sin() * y
    # Shears keep the top left corner, and moves are whole pixels.
    down = down + amount("shear_y", 0.3) * (column + 0.5) - amount("translate_y", 150 / 331 * height).trunc()
    right = right + amount("shear_x", 0.3) * (row + 0.5) - amount("translate_x", 150 / 331 * width).trunc()
    down = down.round()
    right = right.round()
    inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    place = (down.clamp(0, height - 1) * width + right.clamp(0, width - 1)).long().flatten(1)
    pixels = x.flatten(2).gather(2, place[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    return torch.where(inside[:, None], pixels, torch.zeros_like(x))


def _blur(x: Tensor) -> Tensor:
    """Smooth images like torchvision's sharpness, except at the edges."""
    height, width = x.shape[-2:]
    if height < 3 or width < 3:
        return x
    shifted = [x[:, :, i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    inner = (torch.stack(shifted).sum(0) + 4 * x[:, :, 1:-1, 1:-1]) / 13
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)
    edge = (row == 0) | (row == height - 1) | (column == 0) | (column == width - 1)
    return torch.where(edge, x, F.pad(inner, [1, 1, 1, 1]))


def _require_images(x: Any) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 4:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"images must be a tensor of shape (N, C, H, W), got {shape}")
    return x


def _draw_chosen(x: Tensor, p: float) -> Tensor:
    """Draw which images to change."""
    return torch.rand(len(x), 1, 1, 1, device=x.device) < p


def _draw_uniform(x: Tensor, low: float, high: float) -> Tensor:
    """Draw a number between two others for each image."""
    return low + (high - low) * torch.rand(len(x), device=x.device)


def _draw_factor(x: Tensor, change: float) -> Tensor:
    return _draw_uniform(x, max(0.0, 1 - change), 1 + change).view(-1, 1, 1, 1)


def _draw_beta(x: Tensor, alpha: float) -> Tensor:
    """Draw from the distribution Beta(alpha, alpha) by Jöhnk's method: the first accepted candidate.

    Source: Jöhnk, "Erzeugung von betaverteilten und gammaverteilten Zufallszahlen", Metrika 8, 1964.
    """
    if alpha == 1:
        return torch.rand((), device=x.device)
    one, other = torch.rand(2, _CANDIDATES, device=x.device).pow(1 / alpha)
    chosen = (one + other <= 1).float().argmax()
    shares: Tensor = one / (one + other).clamp(min=1e-30)
    return shares.index_select(0, chosen.view(1)).view(())


def _to_gray(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, 1)
    gray: Tensor = 0.2989 * red + 0.587 * green + 0.114 * blue
    return gray


def _to_floats(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def _restore_dtype(out: Tensor, x: Tensor) -> Tensor:
    """Convert images back to their dtype."""
    return out if x.is_floating_point() else out.round().clamp(0, 255).to(x.dtype)


def _draw_rectangles(x: Tensor, height: Tensor, width: Tensor, whole: bool) -> Tensor:
    """Draw the position of a rectangle of this height and width, in pixels, in each image: True inside.

    If `whole`, the rectangle lies inside the image. Otherwise only its center does, and the edge may clip it.
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
    both: Tensor = (rows[:, :, None] & columns[:, None, :])[:, None]
    return both


def _sample_pixels(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Sample pixels at fractional positions, with bilinear interpolation; pixels outside the image are black.

    Positions count down and right from the images' center, and their shapes broadcast to (N, height, width). The device
    doesn't support torch's `grid_sample`.
    """
    height, width = x.shape[-2:]
    down, right = torch.broadcast_tensors(down + (height - 1) / 2, right + (width - 1) / 2)
    top = down.floor()
    left = right.floor()
    flat = _to_floats(x).flatten(2)
    out = flat.new_zeros(())
    for below in (0, 1):
        for beside in (0, 1):
            row = top + below
            column = left + beside
            weight = (1 - (down - row).abs()) * (1 - (right - column).abs())
            weight = weight * ((row >= 0) & (row < height) & (column >= 0) & (column < width))
            place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long().flatten(1)
            pixels = flat.gather(2, place[:, None].expand(-1, x.shape[1], -1))
            out = out + pixels.view(*x.shape[:2], *down.shape[1:]) * weight[:, None]
    return _restore_dtype(out.to(flat.dtype), x)
