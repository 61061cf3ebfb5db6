"""`nn.TransformerEncoder` with padded rows: in evaluation PyTorch makes padded positions zero, by nested tensors."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import tpufit

WORDS = torch.tensor([6, 3, 4, 1, 6, 2, 5, 5])
PADDING = torch.arange(6) >= WORDS[:, None]
GAPS = PADDING.clone()
GAPS[1, 1:3] = torch.tensor([True, False])
EMPTY = PADDING.clone()
EMPTY[2] = True
ADDED = torch.zeros(8, 6)
MASKS = {
    "padding": PADDING,
    "gaps": GAPS,  # PyTorch uses no nested tensors then
    "a row without words": EMPTY,
    "summands": ADDED.masked_fill(PADDING, float("-inf")),
    "finite summands": ADDED.masked_fill(PADDING, -0.5),
}
NESTING = {"plain": {}, "with a norm": {"norm": True}, "unchecked": {"mask_check": False}}
OTHERS = {"without nested tensors": {"enable_nested_tensor": False}, "norm first": {"norm_first": True}}
CASES = [(name, kind) for name in NESTING for kind in MASKS]
CASES.remove(("unchecked", "gaps"))  # undefined in PyTorch
# PyTorch's layers have faults in evaluation: an empty row is NaN, and finite summands count as minus infinity.
CASES += [(name, kind) for name in OTHERS for kind in ("padding", "gaps", "summands")]


class Encoder(nn.Module):
    def __init__(self, norm=False, norm_first=False, **options):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        last = nn.LayerNorm(8) if norm else None
        if norm:
            nn.init.normal_(last.bias)
        self.encoder = nn.TransformerEncoder(layer, 2, last, **options)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)


@pytest.fixture
def x():
    return torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0))


def plain_outputs(net, x, mask):
    with torch.no_grad():
        return copy.deepcopy(net).eval()(x, mask)


@pytest.mark.cores(1, 8)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_padded_positions_are_zero_as_on_the_host(cores, name, kind, x):
    mask = MASKS[kind]
    net = Encoder(**(NESTING | OTHERS)[name])
    expected = plain_outputs(net, x, mask).numpy()
    model = tpufit.Model(net)
    model.compile(jit_compile=True)
    shown = model.predict((x, mask), batch_size=8 // cores, verbose=0, cores=cores)
    np.testing.assert_allclose(shown, expected, atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(model((x, mask), training=False), expected, atol=1e-5)


@pytest.mark.cores(1)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_validation_in_a_training(cores, options, x):
    class Pooled(Encoder):
        def forward(self, x, mask):
            return super().forward(x, mask).mean((1, 2))

    y = torch.linspace(-1, 1, 8)
    plain = Pooled()
    model = tpufit.Model(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain.train()(x, PADDING), y).backward()
        optimizer.step()
        losses.append(nn.functional.mse_loss(plain_outputs(plain, x, PADDING), y).item())
    model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.1), loss="mse", scale_lr=None, **options)
    data = ((x, PADDING), y)
    history = model.fit(*data, batch_size=8, epochs=3, shuffle=False, validation_data=data, verbose=0, cores=1).history
    assert history["val_loss"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_predictions_on_the_host_before_a_training(run_python):
    """The layers' shapes are recorded from the first batch, and nested tensors have none."""
    code = """
    import torch, tpufit
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

        def forward(self, x, mask):
            return self.encoder(x, src_key_padding_mask=mask)

    model = tpufit.Model(Encoder())
    model.compile()
    mask = torch.arange(6) >= torch.tensor([[6], [3]])
    shown = model.predict((torch.randn(2, 6, 8), mask), verbose=0)
    assert (shown[1, 3:] == 0).all() and (shown[1, :3] != 0).all()
    """
    process = run_python(code)
    assert process.returncode == 0, process.stderr
