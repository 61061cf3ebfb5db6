"""Operations that torch_xla computes differently from PyTorch, or accepts where PyTorch raises an error."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import tpufit
from tpufit import runtime
from tpufit.errors import TpufitError

TIES = torch.tensor([[1.0, 3.0, 3.0, 2.0], [3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, -1.0]])


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


COMPLEX = {
    "abs": lambda z, x: z.abs(),
    "acosh": lambda z, x: z.acosh(),
    "angle": lambda z, x: z.angle(),
    "angle of real numbers": lambda z, x: x.angle() + z.real,
    "broadcast": lambda z, x: torch.complex(x, x[:1] * 2) * z,
    "conj_physical": lambda z, x: z.conj_physical(),
    "cumulative sums of nothing": lambda z, x: z[:0].cumsum(1).sum() + z[:, :0].cumsum(1).sum() + z,
    "divided by a number": lambda z, x: z / (2 - 1j) + z / 3,
    "divided by itself": lambda z, x: z / (z.flip(0) + 2),
    "divided by real numbers": lambda z, x: z / (x.square() + 1) + z / x[0, 0],
    "inverse": lambda z, x: torch.linalg.inv_ex(z[:, :3] + torch.eye(3).to(x.device) * 4j).inverse,
    "logarithm of an exponential": lambda z, x: (z * 3).exp().log() + (z * 5).exp().log2() + (z * 7).exp().log10(),
    "logarithm of sums of exponentials": lambda z, x: (z * 9).logsumexp(1),
    "logarithm of the exponential of a number": lambda z, x: (z[0, 0] * 99).logsumexp(0),
    "mean": lambda z, x: z.mean(),
    "mean of columns": lambda z, x: z.mean(0, keepdim=True),
    "norm": lambda z, x: torch.linalg.vector_norm(z, dim=1) + z.norm(),
    "padded": lambda z, x: torch.constant_pad_nd(z, (1, 2, -1, 1), 2 - 1j) + F.pad(z, (1, 2, -1, 1), value=0.5),
    "polar": lambda z, x: torch.polar(z.abs(), x),
    "power of an exponential": lambda z, x: (z * 3).exp() ** 0.5 + (z * 2).exp() ** (z / 9),
    "product with factors": lambda z, x: torch.addmm(z[:, :3], z, z.mT, beta=2 - 1j, alpha=1j),
    "product with real factors": lambda z, x: torch.addmm(z[:, :3], z, z.mT, beta=0.3, alpha=2),
    "real number divided": lambda z, x: x / z,
    "real parts and imaginary ones, in another order": lambda z, x: torch.view_as_real(z).transpose(0, 1),
    "real powers": lambda z, x: x.exp() ** 2j + (1 + 2j) ** x + z,
    "root of a square": lambda z, x: (z * z).sqrt() + (z**2).sqrt(),
    "sgn": lambda z, x: z.sgn(),
    "sigmoid": lambda z, x: z.sigmoid(),
    "standard deviation": lambda z, x: z.std(1) + torch.std_mean(z, 0)[1].sum(),
    "tanh": lambda z, x: z.tanh(),
    "variance": lambda z, x: torch.var_mean(z, 1, correction=0)[0] + z.var(),
}


def parts(result):
    """Return real numbers, or the real and imaginary parts of complex numbers."""
    return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result


# Sums of so many elements that bfloat16 would lose most of them.
OF_MANY = {
    "averages": lambda x: F.adaptive_avg_pool2d(x, 1) + F.adaptive_avg_pool2d(x, (1, 3)).sum(-1, keepdim=True),
    "averages of windows": lambda x: F.avg_pool2d(x[None], 40) + F.avg_pool1d(x.flatten(1), 3000)[..., None],
    "bias of a convolution": lambda x: F.conv2d(x[:, None], x[:1, :1, None, :1], x[0, 1, :1]),
    "errors": lambda x: F.mse_loss(x, x.flip(0)) + F.smooth_l1_loss(x, x.flip(1), reduction="sum"),
    "gathered": lambda x: x[0].gather(1, torch.zeros(50, 60, dtype=torch.int64, device=x.device)),
    "mean and variance": lambda x: sum(torch.var_mean(x, (1, 2))) + torch.std_mean(x, (0, 1))[1].sum(),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, (1, 2)) + x.norm(),
    "number": lambda x: x * x[0, 0, 0],
    "selected": lambda x: x[0].index_select(1, torch.zeros(3000, dtype=torch.int64, device=x.device)),
    "softmax": lambda x: x * (x.detach().flatten(1).softmax(1) * 3000).reshape(x.shape),
    "sum": lambda x: x.sum((1, 2)) + x.sum() + x.float().sum((1, 2), dtype=torch.bfloat16),
    "sums of rows": lambda x: x[0].index_add(
        0, torch.zeros(100, dtype=torch.int64, device=x.device), x[1:].flatten(0, 1)
    ),
}
EQUAL = (torch.eq, torch.ne)
ODD = (torch.isnan, torch.isinf, torch.isfinite)
TENTHS = torch.tensor([0.9, 0.3, 0.0, 1.0, 200.0, 16777216.0])
RIGHT = {
    "amax of all": (lambda x: x.amax(), TIES),
    "amin of all, kept": (lambda x: x.amin(keepdim=True), TIES),
    "amax of rows": (lambda x: x.amax(1), TIES),
    "amax of a number": (lambda x: x.amax(), torch.tensor(2.0)),
    "sum over no dimension": (lambda x: x.sum(()), TIES),
    "mean over no dimension, kept": (lambda x: x.mean((), keepdim=True), TIES),
    "variance and mean over no dimension": (lambda x: torch.stack(torch.var_mean(x, (), unbiased=False)), TIES),
    "norm over no dimension": (lambda x: torch.linalg.vector_norm(x, 3, ()), TIES),
    "sum over the other dimensions of rows": (lambda x: x[0].sum(tuple(range(1, x[0].dim()))), TIES),
    "argmax of a mask": (lambda x: torch.masked.argmax(x, 1, mask=x < 3), TIES),
    "counts": (lambda x: x.count_nonzero(), TIES),
    "counts of rows": (lambda x: torch.count_nonzero(x > 0, dim=1), TIES),
    "counts of two dimensions": (lambda x: torch.count_nonzero(x, dim=(0, 1)), TIES),
    **{f"norm {p}": (lambda x, p=p: x.norm(p), TIES) for p in (0, 1, 2, 3, math.inf, -math.inf)},
    "norm of rows": (lambda x: torch.norm(x, math.inf, dim=1, keepdim=True), TIES),
    **{f"pdist {p}": (lambda x, p=p: F.pdist(x, p), images(5, 3)) for p in (0, 1.0, 2.0, math.inf)},
    "pdist of a row": (lambda x: F.pdist(x, math.inf), images(1, 3)),
    **{
        f"{mode} {factor}": (lambda x, m=mode, f=factor: F.interpolate(x, scale_factor=f, mode=m), images(2, 3, 8, 7))
        for mode in ("nearest", "bilinear")
        for factor in (0.5, 1.7, 2, (1.5, 2.3))
    },
    "bilinear, corners": (
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True),
        images(1, 2, 5, 6),
    ),
    "batch norm in evaluation": (
        lambda x, w, b: torch.native_batch_norm(x, w, b, x.detach()[0, :, 0], b.detach() + 9, False, 0.1, 1e-5)[0],
        *(images(4, 3, 5), images(1, 3)[0], images(3, 1)[:, 0]),
    ),
    "averages of windows": (lambda x: F.avg_pool2d(x, 3, 2, 1), images(2, 3, 8, 7)),
    "averages by a divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=2), images(2, 3, 8, 7)),
    "volumes by a divisor": (
        lambda x: F.avg_pool3d(x, (2, 3, 1), 1, (1, 1, 0), False, False, 5),
        images(1, 2, 4, 5, 3),
    ),
    **{
        name: (function, images(4, 3))
        for name, function in {
            "elu": lambda x: F.elu(x, 0.7),
            "celu": lambda x: F.celu(x, 0.7),
            "selu": F.selu,
            "selu in place": lambda x: F.selu(x * 1, inplace=True),
            "deviations": lambda x: x.std(0),
            "deviation": lambda x: x.std(),
            "a diagonal": torch.diag,
            "divergence": lambda x: F.kl_div(x.log_softmax(1), x.flip(0).softmax(1), reduction="batchmean"),
        }.items()
    },
    **{
        f"{name} where its pieces meet": (function, torch.arange(-14.0, 15).div(2).expand(3, 29))
        for name, function in {
            "hardsigmoid": F.hardsigmoid,
            "hardswish": F.hardswish,
            "hardtanh": F.hardtanh,
            "hardtanh of other bounds": lambda x: F.hardtanh(x, -2, 3.5),
            "relu6": F.relu6,
        }.items()
    },
    **{
        f"diagonal {offset} of dimensions {dims}": (lambda x, o=offset, d=dims: x.diagonal(o, *d), images(4, 5, 6))
        for offset, dims in ((0, (0, 1)), (-2, (0, 1)), (1, (1, 0)), (-1, (1, 2)), (2, (-3, -2)))
    },
    "a diagonal in a stack": (lambda x: torch.diagonal_scatter(x, x[0, :4] * 2, 1), images(4, 5, 4)),
    "a cube's diagonal in place": (lambda x: squared_diagonal(x * 1), images(5, 5, 5)),
    "diagonals of a stack": (lambda x: torch.diag_embed(x, -1, 0, 1), images(3, 4)),
    "larger and larger images": (
        lambda x: torch.cat([F.pixel_shuffle(x, factor).flatten() for factor in (2, 4)]),
        images(2, 16, 3, 5),
    ),
    "one larger image": (lambda x: F.pixel_shuffle(x, 2), images(4, 3, 5)),
    "complex sums of products": (
        lambda x: torch.view_as_real(torch.einsum("bi,bio->bo", x[0] + x[1] * 1j, (x * (1 - 1j)).mT)),
        images(3, 3, 3),
    ),
    **{
        f"complex: {name}": (lambda x, f=f: parts(f(torch.complex(x[0], x[1]), x[2])), images(3, 3, 4))
        for name, f in COMPLEX.items()
    },
    **{f"bfloat16: {name}": (f, (images(3, 50, 60).abs() + 1).bfloat16()) for name, f in OF_MANY.items()},
    "whole parts of quotients": (
        lambda x: torch.stack([x.detach() // 0.1, x.detach() // -0.3, 7 // x.detach()]),
        TENTHS + 1,
    ),
    "whole parts of quotients of tensors": (
        lambda x: torch.stack([y[0] // y[1] for y in (x.detach(), x.bfloat16().detach())]),
        images(2, 9) * 20,
    ),
    "logarithm of sums": (lambda x: x.logsumexp(1), images(4, 5)),
    "logarithm of a sum": (lambda x: x.logsumexp((0, 1), keepdim=True), images(4, 5)),
    "determinants": (lambda x: torch.slogdet(x @ x.mT + torch.eye(4).to(x.device))[1], images(3, 4, 4)),
    "a determinant": (lambda x: torch.logdet(x @ x.T + torch.eye(4).to(x.device)), images(4, 4)),
    **{
        f"cumulative {name}": (lambda x, f=f: f(x, 1).values, torch.cat([TIES, -TIES, TIES], 1))
        for name, f in {"maximum": torch.cummax, "minimum": torch.cummin}.items()
    },
    **{
        f"the largest of a window with holes {options}": (lambda x, o=options: F.max_pool2d(x, *o), images(2, 3, 8, 7))
        for options in ((2, 2, 0, 2), (3, None, 1, (1, 2)), (2, 1, 1, 2, True))
    },
    "the largest of a volume with holes": (lambda x: F.max_pool3d(x, 2, 1, 0, 2), images(1, 5, 4, 6)),
    "the largest of a window": (lambda x: F.max_pool2d(x, 2), images(2, 3, 8, 7)),
    **{
        f"{kind}: compared with a number": (lambda x, kind=kind: compared(x.to(kind)), TENTHS)
        for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool)
    },
    **{
        f"a number: {name}": (lambda x, f=f: f(x[0, 1], torch.zeros(1, dtype=torch.int64, device=x.device)), TIES)
        for name, f in {
            "cumulative": lambda x, at: torch.stack([x.cumsum(0), x.cumprod(-1), x.cummax(0)[0], x.cummin(0)[0]]),
            "extremes": lambda x, at: torch.stack([x.max(0)[0], x.min(-1)[0], x.topk(1, 0)[0], x.kthvalue(1, 0)[0]]),
            "gathered": lambda x, at: torch.stack([x.gather(0, at[0]), x.index_select(0, at).reshape(())]),
            "scattered": lambda x, at: torch.stack(
                [x.index_add(0, at, x), x.index_fill(0, at, 2), x.scatter(0, at, x)]
            ),
            "scattered and reduced": lambda x, at: x.scatter_reduce(0, at, x * 2, "amax") + x.scatter_add(0, at, x),
            "similarity": lambda x, at: F.cosine_similarity(x, x * 2, dim=0),
            "softmax": lambda x, at: torch.stack([x.softmax(0) * x, x.log_softmax(-1), x.logsumexp(0), x.sum(0)]),
        }.items()
    },
    "edges repeated and cut off": (lambda x: F.pad(x, (-2, 3, 1, -1), mode="replicate"), images(1, 2, 5, 6)),
    "elements set by strides": (
        lambda x: x.as_strided_scatter(x[0, :2, :2] * 2, (2, 2), (3, 2), 1),
        images(3, 4, 5),
    ),
    **{
        f"rows selected by {name}": (lambda x, f=f: x.index_select(0, f(x[:, 0])), images(4, 3))
        for name, f in {
            "their order": lambda x: x.sort()[1],
            "their rank": lambda x: x.topk(2)[1],
            "their order as integers": lambda x: (x * 100).int().argsort(stable=True),
            "their maximum": lambda x: (x * 100).int().max(0, keepdim=True)[1],
        }.items()
    },
    "floors of quotients": (lambda x: torch.stack([(x.detach() * 10) // n for n in (0.3, 0.1, 3, -0.3)]), TENTHS),
    **{
        f"{name} of {dtype}": (lambda x, f=f, dtype=dtype: divided(f, dtype), TENTHS)
        for name, f in {
            "floors of quotients": lambda a, b: torch.stack([a // b, a // 7, a // -7, torch.floor_divide(a, b)]),
            "truncated quotients": lambda a, b: torch.stack([torch.div(a, n, rounding_mode="trunc") for n in (b, 7)]),
            "quotients in place": lambda a, b: a.clone().floor_divide_(b),
        }.items()
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    },
    "no elements gathered": (lambda x: x.sum() + x.gather(0, x.new_zeros(0, 2, 3, dtype=torch.int64)).sum(), images(4)),
    "nothing repeated": (lambda x: torch.cat([x.repeat(0, 2), x.repeat(1, 2)]), images(3, 2)),
    "no matrix": (lambda x: x.sum() + x[:0, :0].matrix_exp().sum() + torch.logdet(x[:0, :0]), images(3, 3)),
    "bytes compared with a number": (lambda x: compared(x.to(torch.uint8)), TENTHS[:5]),
    "complex: infinite or NaN": (lambda x: torch.stack([f(1 / x + 0j * x) for f in ODD]), TENTHS),
    **{
        f"limited by {name}": (lambda x, f=f: f(x[0], x[:, :1]), images(4, 4, 3))
        for name, f in {"a tensor of more dimensions": torch.clamp_max, "another from below": torch.clamp_min}.items()
    },
    "inverses with their errors": (lambda x: torch.linalg.inv_ex(x).inverse, images(3, 4, 4) + 4 * torch.eye(4)),
    "errors of inverses": (lambda x: torch.linalg.inv_ex(x).info, images(3, 4, 4)),
    "complex: compared with a number": (lambda x: torch.stack([f(x + 1j * x, 0.9) for f in EQUAL]), TENTHS),
}


def compared(x):
    numbers = (0.9, 0.3, 16777216.0, 16777217, 1, True, -1, 300, 1e40, math.nan, math.inf, 2**62)
    return torch.stack([f(x, number) for f in (*EQUAL, torch.lt, torch.le, torch.gt, torch.ge) for number in numbers])


def divided(operation, dtype):
    largest = torch.iinfo(dtype).max
    tensor = torch.tensor([largest, -largest, largest - 5, -7, 7, -7, 7, 0], dtype=dtype)
    return operation(tensor, torch.tensor([1, 1, 3, 2, -2, -2, 2, 5], dtype=dtype))


def squared_diagonal(x):
    x.diagonal().square_()
    return x


MATRIX, HALF = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bfloat16)
REFUSED = {
    "mm": (torch.mm, MATRIX, HALF),
    "bmm": (torch.bmm, MATRIX[None], HALF[None]),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), MATRIX, HALF),
    "addmm": (torch.addmm, MATRIX, MATRIX, HALF),
    "baddbmm": (torch.baddbmm, MATRIX[None], MATRIX[None], HALF[None]),
    "mv": (torch.mv, MATRIX, HALF[0]),
    "dot": (torch.dot, MATRIX[0], HALF[0]),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, x, y), MATRIX[None, None], HALF[None, None]),
    "norm of integers": (lambda x: x.norm(), torch.ones(3, dtype=torch.int64)),
    "an average of too large windows": (lambda x: F.avg_pool2d(x, 5), MATRIX[None, None]),
    "too large windows": (lambda x: F.max_pool2d(x, 5), MATRIX[None, None]),
    "too large windows in three dimensions": (lambda x: F.max_pool3d(x, 5), MATRIX[None, None, None]),
    "too much padding": (lambda x: F.avg_pool2d(x, 2, padding=2), MATRIX[None, None]),
    "half of three": (lambda x: F.glu(x[:, :3]), MATRIX),
    "the best of none": (lambda x: x[:0].argmax(), MATRIX),
    "an order of complex numbers": (lambda x: (x * 1j) > 0, MATRIX),
    "too few channels": (lambda x: F.pixel_shuffle(x, 3), MATRIX[None]),
}


class Trying(tpufit.Model):
    """Computes a function in a step, and keeps its values and gradients."""

    def __init__(self, function, tensors):
        super().__init__(nn.Linear(1, 1))
        self.function, self.tensors = function, tensors
        self.found = []

    def train_step(self, batch):
        loss = self(batch[0]).mean()
        self.found = computed(self.function, [tensor.to(loss.device) for tensor in self.tensors])
        self.apply_gradients(loss)
        return {"loss": loss}


def computed(function, tensors):
    given = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]
    result = function(*given)
    if not result.requires_grad:
        return [result]
    return [result.detach(), *torch.autograd.grad(result.square().sum(), given, materialize_grads=True)]


def on_the_device(function, *tensors):
    model = Trying(function, tensors)
    model.compile("sgd")
    model.train_on_batch(torch.ones(8, 1))
    return [tensor.cpu() for tensor in model.found]


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
def test_values_and_gradients_equal_pytorchs(cores):
    tpufit.init(cores)
    for name, (function, *tensors) in RIGHT.items():
        for ours, pytorchs in zip(on_the_device(function, *tensors), computed(function, tensors), strict=True):
            assert ours.dtype is pytorchs.dtype, name
            torch.testing.assert_close(ours, pytorchs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")
def test_the_device_computes_with_complex_numbers(cores):
    tpufit.init(cores)
    before = runtime.counts()
    on_the_device(
        lambda x: torch.stack([f(torch.complex(x[0], x[1]), x[2]).abs().sum() for f in COMPLEX.values()]),
        images(3, 3, 4),
    )
    assert not (runtime.counts() - before).fallbacks


READS = {
    "cpu": lambda z: z.cpu(),
    "item": lambda z: torch.tensor([one.item() for one in z.flatten()], dtype=torch.complex128).reshape(z.shape),
    "copy_": lambda z: torch.empty(z.shape, dtype=torch.complex128).copy_(z),
    "converted": lambda z: z.to("cpu", torch.complex64).to(torch.complex128),
    "fetched": lambda z: runtime.fetch([z], "test")[0],
}


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize("read", READS)
def test_imaginary_parts_of_complex128_are_read(cores, read):
    placement = runtime.make_placement(runtime.start(cores, "test"))
    values = torch.complex(images(2, 3), images(3, 2).T).to(torch.complex128)
    for value in (placement.send([values])[0], placement.send([values.to(torch.complex64)])[0].to(torch.complex128)):
        torch.testing.assert_close(READS[read](value), values, rtol=0, atol=0)


@pytest.mark.cores(1)
def test_rows_of_complex128_become_complex64(cores):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 1)

        def forward(self, z):
            return self.last(torch.view_as_real(z).flatten(1))

    def trained(z):
        torch.manual_seed(0)
        model = tpufit.Model(Parts())
        model.compile("sgd", "mse", scale_lr=None)
        return model.fit(z, z.abs().sum(1, keepdim=True).float(), 16, 2, verbose=0, cores=cores).history

    rows = torch.complex(images(64, 3), images(3, 64).T)
    assert trained(rows.to(torch.complex128)) == trained(rows)


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
def test_arguments_that_pytorch_refuses_are_refused(cores):
    tpufit.init(cores)
    for name, (function, *tensors) in REFUSED.items():
        with pytest.raises((RuntimeError, IndexError)):
            function(*tensors)
        with pytest.raises((RuntimeError, IndexError, TpufitError)):
            on_the_device(function, *tensors)
            pytest.fail(name)


FREQUENCIES = {
    "frequencies of complex numbers": (lambda x: torch.view_as_real(torch.fft.fft(x[0] + x[1] * 1j)), images(2, 3, 7)),
    "of the other dimensions, and back": (
        lambda x: torch.view_as_real(torch.fft.ifft2(torch.fft.fft2(x, dim=(0, 2)), dim=(1, 0), norm="ortho")),
        images(3, 4, 6),
    ),
    "of an odd number, and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="forward"), n=7), images(3, 7)),
    "of three dimensions": (lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 0, 1))), images(4, 3, 6)),
    "of few": (lambda x: torch.fft.irfft(torch.fft.rfft(x, n=4), n=10), images(3, 9)),
    "of windows": (
        lambda x: torch.stft(x, 8, 4, window=torch.hann_window(8).to(x.device), return_complex=True).abs(),
        images(3, 32),
    ),
    "in 64 bits": (lambda x: torch.fft.rfft(x.double()).abs(), images(4, 6)),
    "frequencies and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=6), images(4, 6)),
    "frequencies of planes and back": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2j, s=(5, 6)), images(2, 5, 6)),
    "frequencies along columns and back": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=3, dim=1),
        images(2, 3, 4),
    ),
}


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
def test_gradients_of_fourier_transforms_equal_pytorchs(cores):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    for name, (function, x) in FREQUENCIES.items():
        for ours, pytorchs in zip(computed(function, [x.to(device)]), computed(function, [x]), strict=True):
            torch.testing.assert_close(
                ours.cpu(), pytorchs, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


class Spectral(tpufit.Model):
    """Learns a filter of frequencies."""

    def train_step(self, batch):
        signals, wanted = batch
        spectrum = torch.fft.rfft(signals) * torch.view_as_complex(self.module.weight)
        windows = torch.stft(signals, 8, 4, window=torch.ones(8, device=signals.device), return_complex=True)
        loss = (torch.fft.irfft(spectrum, n=16) - wanted).square().mean() + windows.abs().mean()
        self.apply_gradients(loss)
        return {"loss": loss}


@pytest.mark.cores(1, 8)
def test_a_step_with_fourier_transforms_is_replayed(cores):
    signals = images(61, 16)
    losses = []
    for options in ({"run_eagerly": True}, {}, {"steps_per_execution": 2}):
        model = Spectral(nn.Embedding(9, 2, _weight=torch.ones(9, 2)))
        model.compile("sgd", scale_lr=None, **options)
        history = model.fit(
            signals, signals.flip(1), batch_size=8 // cores, epochs=2, shuffle=False, verbose=0, cores=cores
        )
        losses.append(history.history["loss"])
        assert options.get("run_eagerly") or model.report().traced == {"train": ""}
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


class Twice(tpufit.Model):
    """Uses a weight after the optimizer's step, in operations whose kernels are Python."""

    def train_step(self, batch):
        words, _ = batch
        loss = self(words).square().mean()
        self.apply_gradients(loss)
        return {"loss": loss, "later": (self(words) + self.module.weight.sum(0)).mean()}


@pytest.mark.cores(1, 8)
def test_a_weight_used_after_its_step_doesnt_escape(cores):
    model = Twice(nn.Embedding(5, 4))
    model.compile("sgd", scale_lr=None)
    words = torch.arange(64) % 5
    before = runtime.counts()
    model.fit(words, words, batch_size=8 // cores, epochs=2, verbose=0, cores=cores)
    assert (runtime.counts() - before).waits["capture"] == 3


INFINITE = torch.tensor([[-math.inf] * 3, [-math.inf, 0.0, 1.0], [math.inf] * 3, [math.inf, 0.0, -math.inf]])
LEAST = torch.tensor([[torch.finfo(torch.float32).min] * 3, [torch.finfo(torch.float32).max] * 3])
WITH_INFINITE = {
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
    "max of all": lambda x: x[0].max(),
    "min of all": lambda x: x[-2].min(),
    "amax": lambda x: x.amax(1),
    "amin, kept": lambda x: x.amin(-1, keepdim=True),
    "amax of all": lambda x: x[0].amax(),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp of two dimensions": lambda x: x.logsumexp((0, 1), keepdim=True),
    "logsumexp of the least": lambda x: x[:1].logsumexp((0, 1)),
    "clamp from below": lambda x: x.clamp(min=0),
    "clamp from above": lambda x: x.clamp_max(0),
    "clamp to infinity": lambda x: x.clamp(-1, math.inf),
    "logsigmoid": lambda x: F.logsigmoid(x) + 0.0,  # zeros of both signs are equal
}


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
def test_extremes_may_be_infinite(cores):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    for name, function in WITH_INFINITE.items():
        for x in (INFINITE, LEAST, LEAST.bfloat16()):
            ours, pytorchs = (tree_leaves(function(x.to(place))) for place in (device, "cpu"))
            for one, other in zip(ours, pytorchs, strict=True):
                torch.testing.assert_close(
                    one.cpu(), other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
                )


NAN = torch.tensor([[1.0, math.nan, 3.0, 2.0, math.nan], [2.0, 1.0, 0.0, 1.0, 2.0], [0.0, -0.0, 0.0, -1.0, -0.0]])
NEGATIVE_NAN = torch.where(NAN.isnan(), -NAN.abs(), NAN)  # the NaN of 0 / 0 on many processors
WITH_NAN = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "argmax": lambda x: x.argmax(1),
    "argmax of all": lambda x: x.argmax(),
    "argmin, kept": lambda x: x.argmin(0, keepdim=True),
    "max": lambda x: x.max(1),
    "max of half the bits": lambda x: x.bfloat16().max(1),
    "min": lambda x: x.min(-1, keepdim=True),
    "max_pool1d": lambda x: F.max_pool1d(x[:, None], 5).flatten(),
    "maximum": lambda x: torch.maximum(x[:, 0], x[:, 1]),
    "sort": lambda x: x.sort(1).values,
    "sort from the largest": lambda x: x.sort(0, descending=True).values,
    "stable sort": lambda x: torch.sort(x, dim=1, stable=True),
    "stable argsort": lambda x: x.argsort(dim=1, descending=True, stable=True),
    "topk": lambda x: x.topk(3).values,
    "topk of the smallest": lambda x: x.topk(2, 0, largest=False).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "median": lambda x: x.median(1).values,
    "nanquantile": lambda x: x.nanquantile(0.3, 1),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: x.cummin(0),
    "threshold": lambda x: F.threshold(x, 0.5, 0),
    "softshrink": F.softshrink,
}


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
def test_nan_is_where_pytorch_returns_it(cores):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    for name, function in WITH_NAN.items():
        for x in (NAN, NEGATIVE_NAN):
            ours, pytorchs = (tree_leaves(function(x.to(place))) for place in (device, "cpu"))
            for one, other in zip(ours, pytorchs, strict=True):
                torch.testing.assert_close(
                    one.cpu(), other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")
def test_exponential_of_a_matrix_in_bfloat16_is_exact(cores):  # PyTorch's own is NaN, or too large
    device = runtime.make_placement(runtime.start(cores, "test")).device
    matrix = images(4, 4).mul(3).bfloat16()
    for one, exact in zip(*(computed(torch.matrix_exp, [x]) for x in (matrix.to(device), matrix.float())), strict=True):
        torch.testing.assert_close(one.cpu().float(), exact, rtol=2**-6, atol=2**-6 * float(exact.abs().max()))


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")
def test_complex_determinants_equal_pytorchs(cores):  # which come from the host
    device = runtime.make_placement(runtime.start(cores, "test")).device
    matrices = torch.complex(images(2, 3, 3), images(3, 3, 2).permute(2, 0, 1))
    ours, pytorchs = (
        computed(lambda z: parts(sum(torch.linalg.slogdet(z))), [matrices.to(place)]) for place in (device, "cpu")
    )
    for one, other in zip(ours, pytorchs, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")
def test_what_the_device_cant_compute_is_refused(cores):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    several = images(5, 5, 5).to(device)
    for function in (torch.linalg.svdvals, torch.svd, torch.linalg.pinv, lambda x: torch.norm(x, "nuc", dim=(1, 2))):
        with pytest.raises(RuntimeError, match=r"one matrix at a time.*\(5, 5, 5\)"):
            function(several)
    for function in (torch.linalg.svdvals, torch.pinverse, torch.linalg.matrix_rank):
        with pytest.raises(RuntimeError, match="singular values of a complex matrix"):
            function(several[0] * 1j)
    with pytest.raises(RuntimeError, match="no complex32.*cfloat"):
        (several * 1j).chalf()
    values = torch.stack([torch.linalg.svdvals(one) for one in several])
    torch.testing.assert_close(values.cpu(), torch.linalg.svdvals(images(5, 5, 5)))
