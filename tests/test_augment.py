"""Augmentation on the device: in replayed steps, the same on any number of cores, and true to its name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.data.augment import (
    OPERATIONS,
    ColorJitter,
    CutMix,
    MixUp,
    RandAugment,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
)
from tpufit.errors import ArgumentError

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)  # five batches of 8
LABELS = np.random.default_rng(1).integers(0, 5, 40)
ALL = [
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    RandomCrop(8, padding=2),
    RandomAffine(20, (0.1, 0.2), (0.8, 1.2), 10),
    RandomResizedCrop(8),
    ColorJitter(0.4, 0.4, 0.4),
    RandomErasing(),
    RandAugment(),
    MixUp(5, alpha=0.4),
    CutMix(5),
]


class Photos(torch.utils.data.Dataset):
    rows = len(IMAGES)

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]

    def device_transform(self, batch):
        x, y = batch
        return x.float() / 255, y


def make(**options):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], scale_lr=None, **options)
    return model


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize(
    "augmentation",
    [pytest.param(nn.Sequential(*ALL), id="all")]
    + [pytest.param(one, id=type(one).__name__, marks=pytest.mark.soak) for one in ALL],
)
def test_augmentation_is_replayed_and_equal_on_any_number_of_cores(cores, augmentation):
    data, losses = Photos(), []
    for _ in range(2):
        model, before = make(), runtime.counts()
        history = model.fit(
            data,
            None,
            8 // cores,
            3,
            0,
            cores=cores,
            device_transform=augmentation,
            validation_data=data,
            shuffle=False,
        ).history
        counts = runtime.counts() - before
        assert counts.host_reads == 0 and not counts.fallbacks and counts.graphs.get("train", 0) <= 2
        losses.append(history["loss"])
        assert all(0 <= share <= 1 for share in history["accuracy"] + history["val_accuracy"])
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    plain = make()  # the predictions for validation labels don't depend on the augmentation
    plain.set_weights(model.get_weights())
    assert plain.evaluate(data, batch_size=8 // cores, verbose=0)[1] == pytest.approx(history["val_accuracy"][-1])


@pytest.mark.soak
def test_one_core_and_eight_draw_the_same(run_python):
    """Also for a last batch of 5 images, fewer than cores, whose first image is mixed with the fifth."""
    code = """
        import sys; sys.path.insert(0, {folder!r})
        from test_augment import *
        Photos.rows = 13
        how = dict(batch_size=8 // {cores}, epochs=2, verbose=0, cores={cores}, shuffle=False)
        print(*make(jit_compile=False).fit(Photos(), device_transform=nn.Sequential(*ALL), **how).history["loss"])
    """
    said = [run_python(code.format(folder=str(Path(__file__).parent), cores=cores), timeout=300) for cores in (1, 8)]
    one, eight = ([float(loss) for loss in process.stdout.split()] for process in said)
    assert len(one) == 2 and one == pytest.approx(eight, rel=1e-5), said[0].stderr


@pytest.mark.cores(1)
def test_another_fit_with_the_same_transforms_reuses_the_graph(cores):
    model, flip, data = make(), RandomHorizontalFlip(), Photos()
    data.device_transform = data.device_transform  # an attribute returns the same object each time
    model.fit(data, None, 8, verbose=0, device_transform=flip)
    before = runtime.counts()
    model.fit(data, None, 8, verbose=0, device_transform=flip)
    assert not (runtime.counts() - before).graphs
    with pytest.raises(ArgumentError, match="device_transform must be a function of a batch, got 'flip'"):
        model.fit(data, None, 8, verbose=0, device_transform="flip")
    with pytest.raises(ArgumentError, match=r"got the class RandomCrop: pass an instance, RandomCrop\(\)"):
        model.fit(data, None, 8, verbose=0, device_transform=RandomCrop)


def of(x, augmentation, seed=0):
    torch.manual_seed(seed)
    return augmentation(x)


def test_flips_and_crops_preserve_pixels():
    x = torch.from_numpy(IMAGES)
    assert torch.equal(of(x, RandomHorizontalFlip(1.0)), x.flip(-1))
    assert torch.equal(of(x, RandomVerticalFlip(1.0)), x.flip(-2))
    some = of(x, RandomHorizontalFlip())
    kept = [torch.equal(a, b) for a, b in zip(some, x, strict=True)]
    assert 5 < sum(kept) < 35
    assert all(k or torch.equal(a, b.flip(-1)) for k, a, b in zip(kept, some, x, strict=True))
    cut, padded, places = of(x, RandomCrop((6, 7), padding=2)), F.pad(x, [2] * 4), set()
    for one, whole in zip(cut, padded, strict=True):
        found = [(i, j) for i in range(7) for j in range(6) if torch.equal(whole[:, i : i + 6, j : j + 7], one)]
        assert found
        places.add(found[0])
    assert len(places) > 15 and cut.dtype is torch.uint8


def test_crops_reach_the_last_pixels(monkeypatch):
    x = torch.rand(2, 1, 8, 8)
    for drawn, first in ((0.0, 0), (0.999, 3)):
        monkeypatch.setattr(torch, "rand", lambda *shape, drawn=drawn, **options: torch.full(shape, drawn))
        assert torch.equal(RandomCrop(5)(x), x[:, :, first : first + 5, first : first + 5])


@pytest.mark.parametrize("form", [(8, 8), (6, 10)])
def test_affine_equals_grid_sample(form):
    x = torch.rand(3, 2, *form)
    height, width = form
    angle, scale = 0.3, 1.25
    # The source of each pixel: rotated back, and then scaled back, about the center.
    turn = torch.tensor([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) / scale
    sides = torch.tensor([width / 2, height / 2], dtype=turn.dtype)
    theta = (turn * sides / sides[:, None]).float()
    grid = F.affine_grid(torch.cat([theta, torch.zeros(2, 1)], 1).expand(3, 2, 3), x.shape, align_corners=False)
    expected = F.grid_sample(x, grid, align_corners=False)
    fixed = RandomAffine((np.degrees(angle),) * 2, scale=(scale,) * 2)
    torch.testing.assert_close(fixed(x), expected, rtol=1e-4, atol=1e-5)
    whole = RandomResizedCrop(form, scale=(1.0, 1.0), ratio=(width / height, width / height))
    torch.testing.assert_close(whole(x), x, rtol=1e-5, atol=1e-5)
    half = RandomResizedCrop((height // 2, width // 2), (1.0, 1.0), (width / height, width / height))(x)
    torch.testing.assert_close(half, F.avg_pool2d(x, 2), rtol=1e-4, atol=1e-5)


def test_shear_moves_rows_along_the_width(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, 0.75))  # half of the largest angle
    x = torch.rand(2, 1, 6, 6)
    lean = np.tan(np.radians(20.0 / 2))
    # The lower a pixel, the further left is its source.
    theta = torch.tensor([[1.0, -lean, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float32).expand(2, 2, 3)
    expected = F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)
    torch.testing.assert_close(RandomAffine(0.0, shear=20.0)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("translate", "moved"), [((0.5, 0.0), (0, 2)), ((0.0, 0.5), (2, 0))])
def test_translation_is_a_fraction_of_width_and_height(translate, moved, monkeypatch):
    monkeypatch.setattr(
        torch, "rand", lambda *shape, **options: torch.full(shape, 0.75)
    )  # half of the largest distance
    x = torch.rand(3, 1, 8, 8)
    down, right = moved
    expected = F.pad(x, (right, 0, down, 0))[:, :, :8, :8]
    torch.testing.assert_close(RandomAffine(0.0, translate)(x), expected)


def test_colors_stay_in_range_and_gray_stays_gray():
    x = torch.from_numpy(IMAGES)
    for one in (x, x.float() / 255):
        out = of(one, ColorJitter(0.9, 0.9, 0.9))
        assert out.dtype is one.dtype and out.min() >= 0 and out.max() <= (255 if one is x else 1)
    gray = torch.rand(4, 1, 8, 8).expand(4, 3, 8, 8)
    torch.testing.assert_close(of(gray, ColorJitter(saturation=0.9)), gray, rtol=1e-4, atol=2e-4)
    mean = of(gray, ColorJitter(contrast=0.3)).mean((1, 2, 3))
    torch.testing.assert_close(mean, gray.mean((1, 2, 3)), rtol=1e-2, atol=1e-2)


def test_colors_change_by_the_factor(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, 0.75))  # half of the largest change
    x = torch.from_numpy(np.random.default_rng(0).random((2, 3, 4, 4), "float32"))
    gray = torch.einsum("ncyx,c->nyx", x, torch.tensor([0.2989, 0.587, 0.114]))[:, None]
    mean = gray.mean((1, 2, 3), keepdim=True)
    for name, center in (("brightness", torch.zeros(1)), ("contrast", mean), ("saturation", gray)):
        expected = (center + (x - center) * 1.2).clamp(0, 1)
        torch.testing.assert_close(ColorJitter(**{name: 0.4})(x), expected, rtol=1e-4, atol=1e-5)


def test_erasing_sets_one_rectangle_to_zero():
    out = of(torch.ones(200, 1, 16, 16), RandomErasing(scale=(0.1, 0.2)))
    black = (out == 0)[:, 0]
    share = black.flatten(1).float().mean(1)
    assert 60 < (share > 0).sum() < 140 and share[share > 0].min() > 0.05 and share.max() < 0.3
    for one in black[share > 0]:
        rows, columns = one.any(1).sum(), one.any(0).sum()
        assert rows * columns == one.sum()


def test_mixing_mixes_labels_as_it_mixes_images():
    x, y = torch.rand(8, 3, 8, 8), torch.arange(8) % 5
    for kind in (MixUp, CutMix):
        images, targets = of((x, y), kind(5, alpha=0.7), seed=3)
        share = targets[0, 0].item()  # of the first image, whose label is 0, as is the label before it 2
        assert 0 < share < 1 and targets[0, 2].item() == pytest.approx(1 - share)
        if kind is MixUp:
            torch.testing.assert_close(images, share * x + (1 - share) * x.roll(1, 0))
        else:
            own = (images == x).all(1)
            assert own.float().mean((1, 2)).tolist() == pytest.approx([share] * 8)
            assert torch.equal(images[~own[:, None].expand_as(x)], x.roll(1, 0)[~own[:, None].expand_as(x)])
    torch.testing.assert_close(of((x, y), MixUp(5))[1].sum(1), torch.ones(8))
    again = MixUp(5)((x, F.one_hot(y, 5).float(), torch.ones(8)))
    assert len(again) == 3 and again[1].shape == (8, 5)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 2.0])
def test_the_mixing_share_has_a_beta_distribution(alpha):
    from tpufit.data.augment import _draw_beta

    torch.manual_seed(0)
    drawn = torch.stack([_draw_beta(torch.zeros(1), alpha) for _ in range(4000)])
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.02)
    assert drawn.var().item() == pytest.approx(0.25 / (2 * alpha + 1), abs=0.008)  # of Beta(a, a)


def test_errors_say_what_was_expected():
    for made, said in (
        (lambda: RandomHorizontalFlip(2), "p must be a share from 0 to 1, got 2"),
        (lambda: MixUp(5, alpha=3), "alpha must be above 0 and at most 2, got 3"),
        (lambda: MixUp(5)(torch.zeros(2, 3, 4, 4)), "the batch must be .images, labels."),
        (lambda: RandomCrop(9)(torch.zeros(2, 3, 8, 8)), r"is larger than images of \(8, 8\): pass a smaller size"),
        (lambda: RandomErasing()(torch.zeros(2, 8)), r"shape \(N, C, H, W\), got \(2, 8\)"),
    ):
        with pytest.raises(ArgumentError, match=said):
            made()


@pytest.mark.soak
@pytest.mark.parametrize("magnitude", [5, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_of_rand_augment_equals_torchvisions(name, magnitude):
    from torchvision.transforms import v2 as transforms

    x = torch.from_numpy(np.random.default_rng(2).integers(20, 230, (2, 3, 17, 24), dtype=np.uint8))
    theirs, own = transforms.RandAugment(), RandAugment(magnitude=magnitude)
    called = {"shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateX", "translate_y": "TranslateY"}
    title = called.get(name, "AutoContrast" if name == "auto_contrast" else name.capitalize())
    magnitudes, signed = theirs._AUGMENTATION_SPACE[title]
    strength = magnitudes(31, 17, 24)
    strength = 0.0 if strength is None else float(strength[magnitude] if strength.dim() else strength)
    for sign in (1.0, -1.0) if signed else (1.0,):
        expected = theirs._apply_image_or_video_transform(
            x, title, sign * strength, interpolation=transforms.InterpolationMode.NEAREST, fill={}
        )
        which = torch.full((2,), float(OPERATIONS.index(name)))
        found = own.apply_operations(x, which, torch.full((2,), sign))
        differ = (found.int() - expected.int()).abs()
        assert (differ > 2).float().mean() < 0.02, (name, sign)  # a pixel half-way between two may be either
        floats = own.apply_operations(x / 255, which, torch.full((2,), sign))
        assert ((floats * 255 - found).abs() > 2).float().mean() < 0.02


def test_invalid_arguments_of_rand_augment():
    with pytest.raises(ArgumentError, match="magnitude must be below num_magnitude_bins=31, got 31"):
        RandAugment(magnitude=31)
    with pytest.raises(ArgumentError, match="num_ops must be"):
        RandAugment(0)
    with pytest.raises(ArgumentError, match="magnitude must be"):
        RandAugment(magnitude=-1)


class InWorkers(torch.utils.data.Dataset):
    """Uses torchvision's modules where they draw random numbers on the host."""

    def __init__(self):
        from torchvision.transforms import v2

        self.transform = v2.Compose(
            [v2.RandAugment(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
        )

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return self.transform(torch.from_numpy(IMAGES[index])), LABELS[index]


@pytest.mark.soak
@pytest.mark.cores(1, 8)
def test_torchvisions_transforms_in_the_workers_of_a_loader(cores):
    losses = []
    for _ in range(2):
        tpufit.set_random_seed(0)
        loader = torch.utils.data.DataLoader(InWorkers(), batch_size=8 // cores, num_workers=2)
        model = make()
        losses.append(model.fit(loader, epochs=2, verbose=0, cores=cores).history["loss"])
        assert not model.report().traced["train"]  # the step is replayed
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
