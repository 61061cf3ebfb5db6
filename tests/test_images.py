"""Image folders: the files that are found, the conversion of each kind of image, and caches of images."""

import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tpufit.data import ImageFolder, presize
from tpufit.errors import ArgumentError, CacheMismatchError, DataError

RED, GREEN, BLUE = (200, 10, 10), (10, 200, 10), (10, 10, 200)


def put(path, image=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or Image.new("RGB", (8, 6), RED)).save(path, **options)
    return path


def stripes(width=90, height=30):
    """Three equal stripes, side by side: red, green, blue."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 3, 0, width, height))
    image.paste(BLUE, (2 * width // 3, 0, width, height))
    return image


def read(path, size=None):
    """Return the single image in a folder of one class."""
    return ImageFolder(path.parent.parent, size)[0][0]


def colors(image):
    """Return all colors of an image."""
    return {tuple(pixel) for pixel in image.flatten(1).T.tolist()}


@pytest.fixture
def file(tmp_path):
    """Return the path of the single image in a folder of one class."""
    return lambda name: tmp_path / "photos" / "class" / name


def test_classes_are_folders_and_images_lie_at_any_depth(tmp_path):
    names = ["dog/1.png", "cat/b.JPG", "cat/a/z.jpeg", "cat/a/b/c.WebP", "cat/2.bmp", "emu/1.Png"]
    for name in names:
        put(tmp_path / name)
    images = ImageFolder(tmp_path)
    assert images.classes == ["cat", "dog", "emu"]
    assert images.class_to_idx == {"cat": 0, "dog": 1, "emu": 2}
    expected = [("cat/2.bmp", 0), ("cat/b.JPG", 0), ("cat/a/z.jpeg", 0), ("cat/a/b/c.WebP", 0), ("dog/1.png", 1)]
    assert [(os.path.relpath(path, tmp_path), label) for path, label in images.samples] == [*expected, ("emu/1.Png", 2)]
    assert len(images) == 6
    for image, label in images:
        assert (image.dtype, image.shape, image.is_contiguous(), type(label)) == (torch.uint8, (3, 6, 8), True, int)


def test_hidden_files_and_folders_are_skipped(tmp_path):
    for name in ("cat/1.png", "cat/._1.png", "cat/.ipynb_checkpoints/1.png", ".ipynb_checkpoints/1.png", ".1.png"):
        put(tmp_path / name)
    assert len(ImageFolder(tmp_path)) == 1


def test_a_linked_folder_is_a_class(tmp_path):
    put(tmp_path / "elsewhere" / "1.png")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere")
    assert ImageFolder(tmp_path / "photos").samples == [(str(tmp_path / "photos" / "cat" / "1.png"), 0)]
    put(tmp_path / "more" / "2.png")
    (tmp_path / "elsewhere" / "young").symlink_to(tmp_path / "more")
    found = [os.path.relpath(path, tmp_path / "photos") for path, _ in ImageFolder(tmp_path / "photos").samples]
    assert found == ["cat/1.png", "cat/young/2.png"]


def test_other_files_are_counted_in_a_warning(tmp_path):
    for name in ("cat/1.png", "2.png", "3.jpg"):
        put(tmp_path / name)
    for name in ("cat/notes.txt", "cat/Makefile", "cat/deep/notes.txt", "labels.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match="2 .txt, 2 images outside the class folders, 1 without a suffix$") as caught:
        assert len(ImageFolder(tmp_path)) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no subfolders: put the images in a folder per class"),
        (["1.png"], "has no subfolders"),
        (["cat/1.png", "dog/"], "dog has no images .files that end in .bmp, .jpeg"),
        (["cat/1.txt"], "cat has no images"),
    ],
)
def test_folders_without_images(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        ImageFolder(tmp_path)


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ImageFolder(tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "64", (4,), (4, 0), (4, 4, 3), (4, 4.0)])
def test_invalid_sizes(tmp_path, size):
    put(tmp_path / "cat" / "1.png")
    with pytest.raises(ArgumentError, match="size must be a whole number of pixels of at least 1, or .height, width."):
        presize(tmp_path, size, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@given(
    width=st.integers(1, 70),
    height=st.integers(1, 70),
    size=st.one_of(st.integers(1, 40), st.tuples(st.integers(1, 40), st.integers(1, 40))),
)
def test_images_are_resized(tmp_path_factory, width, height, size):
    folder = tmp_path_factory.mktemp("photos")
    image = read(put(folder / "cat" / "1.png", Image.new("RGB", (width, height), RED)), size)
    assert image.shape == (3, *((size, size) if isinstance(size, int) else size))
    assert colors(image) == {RED}
    shutil.rmtree(folder)


def test_aspect_ratio_and_center_are_kept(file):
    path = put(file("1.png"), stripes(90, 30))
    assert colors(read(path, 30)) == {GREEN}
    assert colors(read(path, (30, 10))) == {GREEN}
    assert colors(read(path, 90)[:, :, 3:-3]) == {GREEN}  # enlarged: at the edges it blends with cropped pixels
    whole = read(path, (10, 30))
    assert [tuple(whole[:, 5, i].tolist()) for i in (2, 15, 27)] == [RED, GREEN, BLUE]
    upright = put(file("1.png"), stripes(90, 30).transpose(Image.Transpose.ROTATE_90))
    assert colors(read(upright, 30)) == {GREEN}


def test_a_reduced_jpeg_resembles_the_full_jpeg(file):
    # Waves of 40 to 130 pixels, as coarse as most of a photo.
    y, x = np.mgrid[:600, :900]
    waves = [128 + 100 * np.sin(x / 9 + y / 20), 128 + 100 * np.cos(x / 20), 128 + 100 * np.sin(y / 7)]
    picture = Image.fromarray(np.stack(waves, -1).astype(np.uint8))
    small = read(put(file("1.jpg"), picture, quality=95), (60, 90)).float()  # decoded at a quarter of its size
    plain = np.asarray(picture.resize((90, 60), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert (small - torch.tensor(plain, dtype=torch.float32)).abs().mean() < 3


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(file, orientation, suffix):
    # The stored form of each orientation: the inverse of the rotation to apply.
    stored = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    picture = stripes(192, 96)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = put(file(f"1.{suffix}"), picture if stored is None else picture.transpose(stored), exif=exif)
    for size, shape in ((None, (96, 192)), ((24, 48), (24, 48))):
        image = read(path, size)
        assert image.shape == (3, *shape)
        middle = image[:, shape[0] // 2]
        for color, third in ((RED, 1), (GREEN, 3), (BLUE, 5)):
            assert middle[:, third * shape[1] // 6].sub(torch.tensor(color), alpha=1).abs().max() < 30


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("1.png", Image.new("RGBA", (8, 6), (*RED, 40))),
        ("1.webp", Image.new("RGBA", (8, 6), (*RED, 255))),
        ("1.png", Image.new("RGB", (8, 6), RED).quantize(4)),
        ("1.jpg", Image.new("RGB", (8, 6), RED).convert("CMYK")),
        ("1.bmp", Image.new("RGB", (8, 6), RED)),
        ("1.tif", Image.new("RGB", (8, 6), RED)),
    ],
    ids=["rgba", "webp", "palette", "cmyk", "bmp", "tif"],
)
def test_all_kinds_of_pixels_become_rgb(file, name, image):
    pixels = read(put(file(name), image))
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 6, 8))
    assert (pixels.int() - torch.tensor(RED)[:, None, None]).abs().max() < 12


def test_a_palette_with_transparency(file):
    image = Image.new("P", (8, 6), 1)
    image.putpalette([0, 0, 0, *RED, *BLUE])
    assert colors(read(put(file("1.png"), image, transparency=b"\x00\x80\xff"))) == {RED}


@pytest.mark.parametrize(
    ("mode", "value", "gray"), [("1", 1, 255), ("L", 77, 77), ("LA", (77, 10), 77), ("I;16", 77 * 256 + 200, 77)]
)
def test_gray_pixels_become_rgb(file, mode, value, gray):
    assert colors(read(put(file("1.png"), Image.new(mode, (8, 6), value)))) == {(gray,) * 3}


def test_pixels_without_a_range(file):
    path = put(file("1.tif"), Image.new("F", (8, 6), 0.5))
    with pytest.raises(DataError, match=r"1\.tif can't be decoded: its pixels \(mode F\) have no known range"):
        read(path)


def broken(path, how):
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "empty":
        path.touch()
    elif how == "text":
        path.write_text("<html>not found</html>")
    else:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        put(path, Image.fromarray(noise))
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] if how == "cut" else content[:middle] + bytes(99) + content[middle + 99 :])


@pytest.mark.parametrize("how", ["empty", "text", "cut"])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp"])
def test_a_broken_image_is_named(file, how, suffix):
    broken(file(f"broken.{suffix}"), how)
    reason = {"empty": "the file is empty", "text": "cannot identify", "cut": ""}[how]
    cure = r"Replace or delete the file; no image is skipped silently"
    with pytest.raises(DataError, match=rf"class/broken\.{suffix} can't be decoded: .*{reason}.*\. {cure}"):
        read(file(f"broken.{suffix}"), 16)


def test_a_damaged_png_is_named(file):
    broken(file("broken.png"), "damaged")
    with pytest.raises(DataError, match=r"class/broken\.png can't be decoded"):
        read(file("broken.png"))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_broken_image_stops_presize(tmp_path, workers):
    for i in range(5):
        put(tmp_path / "photos" / "cat" / f"{i}.jpg")
    broken(tmp_path / "photos" / "cat" / "3.jpg", "cut")
    with pytest.raises(DataError, match=r"cat/3\.jpg can't be decoded: .*truncated"):
        presize(tmp_path / "photos", 16, tmp_path / "cache", workers=workers, progress=False)


@pytest.fixture
def photos(tmp_path):
    for i in range(6):
        put(tmp_path / "photos" / ("cat", "dog")[i % 2] / f"{i}.png", Image.new("RGB", (40, 30), (40 * i, 0, 0)))
    return tmp_path / "photos"


@pytest.mark.parametrize("workers", [0, 2])
def test_presize_stores_the_folders_samples(photos, tmp_path, workers):
    cached = presize(photos, (16, 20), tmp_path / "cache", workers=workers, progress=False)
    plain = ImageFolder(photos, (16, 20))
    assert [label for _, label in cached] == [0, 0, 0, 1, 1, 1]
    images, labels = cached.get_batch(np.array([5, 0, 3]))
    assert (images.dtype, labels.dtype, images.shape) == (torch.uint8, torch.int64, (3, 3, 16, 20))
    for i, image, label in zip([5, 0, 3], images, labels, strict=True):
        assert torch.equal(image, plain[i][0]) and label == plain[i][1]


def test_presize_accepts_a_caches_arguments(photos, tmp_path):
    cached = presize(photos, 16, tmp_path / "cache", progress=False, transform=_halve_first, device_transform=_negative)
    assert colors(cached[1][0]) == {(40, 0, 0)}
    assert cached.device_transform is _negative


def _halve_first(sample):
    image, label = sample
    return image // 2, label


def _negative(batch):
    images, labels = batch
    return 255 - images, labels


def test_a_moved_folder_is_the_same_source(photos, tmp_path):
    presize(photos, 16, tmp_path / "cache", progress=False)
    moved = photos.rename(tmp_path / "moved")
    assert len(presize(moved, 16, tmp_path / "cache", progress=False)) == 6


@pytest.mark.parametrize("change", ["other size", "new image", "other image", "other name"])
def test_a_cache_of_another_folder_is_not_read(photos, tmp_path, change):
    presize(photos, 16, tmp_path / "cache", progress=False)
    if change == "new image":
        put(photos / "dog" / "7.png")
    elif change == "other image":
        put(photos / "cat" / "2.png", stripes(40, 30))
    elif change == "other name":
        (photos / "cat" / "2.png").rename(photos / "cat" / "20.png")
    with pytest.raises(CacheMismatchError):
        presize(photos, 17 if change == "other size" else 16, tmp_path / "cache", progress=False)


def test_without_pillow(run_python, tmp_path):
    result = run_python(
        """
        import sys
        import tpufit.data
        for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:  # matplotlib has imported it
            del sys.modules[name]
        sys.modules["PIL"] = None
        try:
            tpufit.data.ImageFolder(".")
        except ImportError as error:
            print(error)
        """
    )
    assert result.stdout.strip() == "reading images needs Pillow: pip install pillow", result.stderr


def test_torchvision_is_not_imported(run_python, photos, tmp_path):
    result = run_python(
        f"""
        import sys
        sys.modules["torchvision"] = None
        from tpufit.data import presize
        print(len(presize({str(photos)!r}, 16, {str(tmp_path / "cache")!r}, progress=False)))
        """
    )
    assert result.stdout.strip() == "6", result.stderr
