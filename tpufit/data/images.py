"""Image folders, and their decoding and resizing into a cache, once and in parallel.

They need no torchvision, whose version must match torch's.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ArgumentError, DataError
from ..utils.urls import Mirror
from ..utils.user_code import warn
from .cache import CachedDataset

if TYPE_CHECKING:
    import PIL.Image

Size = int | tuple[int, int]

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")  # torchvision's


def presize(
    folder: str | os.PathLike[str],
    size: Size,
    cache_dir: str | os.PathLike[str],
    *,
    progress: bool = True,
    version: str = "1",
    **options: Any,
) -> CachedDataset:
    """Decode and resize a folder of images into a cache, once and in parallel.

    Args:
        folder: The folder, with a subfolder of images per class, see `ImageFolder`.
        size: The side of a square, or `(height, width)`, in pixels.
        cache_dir: The cache's folder. Cached images are not decoded again. It is an error if the files' names or sizes
            have changed since.
        progress: True (default) to show a bar.
        version: As in `CachedDataset` (default `"1"`).
        options: Further arguments of `CachedDataset`: `device_transform`, `workers`, ...

    Returns:
        The complete cache of `(image, label)`: uint8 of shape `(3, height, width)`, and int64, in the order of
        `ImageFolder(folder).samples`. The labels' names are `ImageFolder(folder).classes`.

    Raises:
        ArgumentError: `size` is invalid.
        DataError: There are no images, or an image can't be decoded. Finished files of the cache are kept.
        ImportError: Pillow is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("cat", "dog"):
        ...         Path(folder, "photos", name).mkdir(parents=True)
        ...         Image.new("RGB", (40, 30)).save(Path(folder, "photos", name, "1.jpg"))
        ...     cached = presize(Path(folder, "photos"), 16, Path(folder, "cache"), progress=False)
        ...     image, label = cached[1]
        >>> tuple(image.shape), int(label)
        ((3, 16, 16), 1)
    """
    source = ImageFolder(folder, _height_and_width(size))
    cached = CachedDataset(source, cache_dir, version=f"{version}, files {_hash_files(source)}", **options)
    cached.warm_up(progress=progress)
    return cached


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of a folder with a subfolder per class, as `(image, label)`.

    Images may be at any depth in their class's folder. Names that begin with a dot (`.ipynb_checkpoints`) are skipped,
    and a warning counts other files without an image's suffix. Images are rotated by their EXIF data, and converted to
    RGB: transparency is dropped, and 16-bit grays keep their upper 8 bits.

    Args:
        folder: The folder.
        size: The side of a square, or `(height, width)`, in pixels: each image is scaled to cover it, and cropped
            around its center. None (default) keeps each image's size.

    Attributes:
        folder: The folder.
        size: `(height, width)`, or None.
        classes: The class folders' names, sorted.
        class_to_idx: The label of each name.
        samples: The path and the label of each image, sorted.

    Raises:
        ArgumentError: `size` is invalid.
        DataError: There are no class folders, or one has no images. When indexed: the image can't be decoded.
        ImportError: Pillow is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("cat", "dog"):
        ...         Path(folder, name).mkdir()
        ...         Image.new("RGB", (40, 30)).save(Path(folder, name, "1.jpg"))
        ...     images = ImageFolder(folder)
        ...     image, label = images[1]
        >>> images.class_to_idx, tuple(image.shape), image.dtype, label
        ({'cat': 0, 'dog': 1}, (3, 30, 40), torch.uint8, 1)

    Source: `torchvision.datasets.ImageFolder`; its `Resize` and `CenterCrop`.
    """

    def __init__(self, folder: str | os.PathLike[str], size: Size | None = None) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError("reading images needs Pillow: pip install pillow") from error
        mirror = Mirror(folder, kept=True)
        mirror.pull()
        self.folder = mirror.path.absolute()
        self.size = None if size is None else _height_and_width(size)
        self.classes, self.samples = _find_samples(self.folder)
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        pixels = np.asarray(_read_image(path, self.size))
        return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C")), label


def _height_and_width(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise ArgumentError(f"size must be a whole number of pixels of at least 1, or (height, width), got {size!r}")
    return sides


def _hash_files(images: ImageFolder) -> str:
    """Hash the files' names and sizes, but not their times, which change when the folder is copied."""
    digest = hashlib.sha256()
    for path, label in images.samples:
        digest.update(os.fsencode(os.path.relpath(path, images.folder)))
        digest.update(f"\0{label}\0{os.path.getsize(path)}\0".encode())
    return digest.hexdigest()[:16]


def _find_samples(folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Find the names of the classes, and the images with their labels."""
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        raise DataError(f"{folder} has no subfolders: put the images in a folder per class, as {folder}/cat/1.jpg")
    ignored = Counter("images outside the class folders" for entry in entries if entry.is_file() and _is_image(entry))
    samples = []
    for label, name in enumerate(classes):
        files = list(_list_files(folder / name))
        images = [path for path in files if _is_image(path)]
        if not images:
            cure = f"(files that end in {', '.join(SUFFIXES)}). Remove the folder, or add images"
            raise DataError(f"the class folder {folder / name} has no images {cure}")
        samples += [(path, label) for path in images]
        ignored.update(os.path.splitext(path)[1] or "without a suffix" for path in files if not _is_image(path))
    if ignored:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(ignored.items()))
        warn(f"{folder} has files that are ignored: {counts}")
    return classes, samples


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the files in a folder at any depth, in an order independent of the file system."""

    def fail(error: OSError) -> NoReturn:
        raise error  # os.walk would skip a folder that can't be read

    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(root, name) for name in sorted(names) if not name.startswith("."))


def _is_image(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).lower().endswith(SUFFIXES)


def _read_image(path: str, size: tuple[int, int] | None) -> PIL.Image.Image:
    """Read an image: upright, RGB, of the given size."""
    import PIL.Image
    import PIL.ImageOps

    content = Path(path).read_bytes()
    try:
        image: PIL.Image.Image = PIL.Image.open(io.BytesIO(content))
        if size is not None:
            # A JPEG can be decoded at a half, a quarter or an eighth of its size. The filter needs twice the final
            # size, and both sides use the larger side, since EXIF data may rotate the image.
            image.draft(None, (2 * max(size), 2 * max(size)))
        PIL.ImageOps.exif_transpose(image, in_place=True)
        image = _to_rgb(image)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        reason = error if content else "the file is empty"
        cure = "Replace or delete the file; no image is skipped silently"
        raise DataError(f"the image {path} can't be decoded: {reason}. {cure}") from error
    return image if size is None else _cover(image, *size)


def _to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    import PIL.Image

    if image.mode.startswith("I;16"):  # convert() would turn all but the darkest pixels white
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels (mode {image.mode}) have no known range to map to 0 to 255")
    elif "transparency" in image.info:  # in a palette: converting it to RGB directly would warn
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _cover(image: PIL.Image.Image, height: int, width: int) -> PIL.Image.Image:
    """Scale an image to cover the size, cropped around its center; only the kept part is scaled."""
    import PIL.Image

    scale = max(height / image.height, width / image.width)
    kept_width = min(width / scale, image.width)
    kept_height = min(height / scale, image.height)
    left = (image.width - kept_width) / 2
    top = (image.height - kept_height) / 2
    box = (left, top, left + kept_width, top + kept_height)
    return image.resize((width, height), PIL.Image.Resampling.BILINEAR, box, reducing_gap=2.0)
