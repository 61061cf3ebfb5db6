"""`compile(remat=...)`: blocks recompute their activations in the backward pass, and training stays the same."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tpufit
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("compiles_anew")


class Block(nn.Module):
    """What a recomputation may break: random numbers, running statistics, keywords, several outputs, autocast."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        # Without a bias: batch norm would remove it, so only rounding would train it.
        self.narrow, self.batch_norm = nn.Linear(2 * width, width, bias=False), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.batch_norm(self.narrow(F.gelu(self.wide(self.norm(x)))))
        return x + self.dropout(y) * scale, y.mean(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.dropout = nn.Linear(16, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        scale = x[:, :1].sigmoid()
        for block in self.blocks:
            x, scale = block(x, scale=scale.sigmoid())
        return self.head(self.dropout(x) * scale)


class Shared(nn.Module):
    """One block called three times, as in ALBERT, with an outside tensor that trains too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), Outside()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        self.head.outside = x.mean(0)
        return self.head(x)


class Attending(nn.Module):
    """Words with self-attention, with dropout inside attention, and a write into a product."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.pooled = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.wide(x)
        y.mul_(y.sigmoid())
        return x + self.narrow(y) + self.pooled(x[:, 0]).tanh()[:, None]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 16), nn.ModuleList(Attending() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unflatten(1, (4, 4)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Outside(nn.Module):
    """A block that gets a tensor by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.outside: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        outside, self.outside = self.outside, self.outside
        return self.linear(x * outside)


class Checkpointed(nn.Module):
    """A net whose blocks are recomputed by its own code, by `torch.utils.checkpoint`."""

    def __init__(self, blocks: nn.ModuleList, **options: object) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(16, 16), blocks, nn.Linear(16, 4)
        self.checkpoint = functools.partial(checkpoint, **options) if options else None  # as transformers' layers do

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block.__call__, x)
        return self.head(x)


def dropping() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(16, 1024), nn.Tanh(), nn.Dropout(0.3), nn.Linear(1024, 16)) for _ in "ab"
    )


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(count, 16)).astype("float32"), random.integers(0, 4, count)


def trained(net: nn.Module, cores: int, remat: object, **options: object) -> tuple[dict, dict[str, Tensor], int]:
    """Return the logs, weights and number of graphs of a training with an uneven last batch."""
    tpufit.set_random_seed(1)
    model = tpufit.Model(copy.deepcopy(net))
    model.compile(**({"optimizer": "adamw", "loss": "cross_entropy"} | options), remat=remat)  # type: ignore[arg-type]
    model.fit(*rows(8 * cores * 3 + 5), batch_size=8, epochs=2, cores=cores, verbose=0)
    return model.history.history, model.state_dict(), model.report().counts.graphs


def assert_same_training(net: nn.Module, cores: int, *remats: object, atol: float = 2e-6, **options: object) -> None:
    kept = trained(net, cores, None, **options)
    for remat in remats:
        again = trained(net, cores, remat, **options)
        for name, values in kept[0].items():
            np.testing.assert_allclose(again[0][name], values, rtol=1e-6 + atol)
        for name, tensor in kept[1].items():
            torch.testing.assert_close(again[1][name], tensor, rtol=0, atol=atol, msg=f"{name} by {remat}")
        assert again[2] == kept[2]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.cores(1, 8)
def test_training_with_remat_equals_training_without(net: Net, cores: int) -> None:
    assert_same_training(net, cores, True)


@pytest.mark.soak
@pytest.mark.cores(1)
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 2},
        {"accumulate_steps": 2, "use_ema": True, "global_clip_norm": 0.1},
        {"jit_compile": False},
        {"optimizer": "sgd", "metrics": ["accuracy"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_training_is_the_same_with_other_options(net: Net, cores: int, options: dict) -> None:
    assert_same_training(net, cores, True, **options)


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8)
def test_training_is_the_same_by_each_policy(cores: int) -> None:
    torch.manual_seed(0)
    assert_same_training(Words(), cores, "attention", "dots", optimizer="sgd")


@pytest.mark.soak
@pytest.mark.cores(8)
def test_training_is_the_same_with_weights_that_are_split(cores: int) -> None:
    torch.manual_seed(0)
    net = Words()
    net.blocks[1].wide = nn.Linear(16, 1024)  # large enough to be split
    net.blocks[1].narrow = nn.Linear(1024, 16, bias=False)
    mixed = {"blocks.0": "attention", "blocks.*": "dots"}
    assert_same_training(net, cores, mixed, "nothing", optimizer="sgd", shard="fsdp")


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8)
def test_in_bfloat16_only_rounding_differs(net: Net, cores: int) -> None:
    assert_same_training(net, cores, True, atol=2e-3, precision="bf16", optimizer="sgd")


@pytest.mark.cores(1)
def test_only_the_first_layer(net: Net, cores: int) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Tanh()), nn.Linear(32, 4))
    assert_same_training(mlp, cores, "0")


@pytest.mark.cores(1)
def test_one_block_called_again_and_tensors_from_outside(cores: int) -> None:
    torch.manual_seed(0)
    assert_same_training(Shared(), cores, ["block", "head"])


@pytest.mark.cores(1)
def test_a_custom_step_with_two_forward_passes(net: Net, cores: int) -> None:
    class Own(tpufit.Model):
        def train_step(self, batch):  # type: ignore[no-untyped-def]
            x, y = batch
            with torch.no_grad():
                teacher = self(x).softmax(1)
            first, second = self(x), self(x * 0.5)
            loss = F.cross_entropy(first, y) + F.cross_entropy(second, teacher)
            self.apply_gradients(loss)
            return {"loss": loss}

    def run(remat: object) -> dict[str, Tensor]:
        tpufit.set_random_seed(2)
        model = Own(copy.deepcopy(net))
        model.compile("sgd", remat=remat)
        model.fit(*rows(40), batch_size=8, epochs=2, cores=cores, verbose=0)
        return model.state_dict()

    kept, again = run(None), run(True)
    for name, tensor in kept.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_a_net_changes_no_number(cores: int, reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(dropping())
    again = Checkpointed(copy.deepcopy(plain.blocks), use_reentrant=reentrant)
    again.load_state_dict(plain.state_dict())
    found = [trained(net, cores, None) for net in (plain, again)]
    np.testing.assert_allclose(found[1][0]["loss"], found[0][0]["loss"], rtol=3e-6)
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], tensor, rtol=0, atol=2e-6, msg=name)
    assert found[0][2] == found[1][2] and not hasattr(torch, "xla")


@pytest.mark.slow
@pytest.mark.cores(1)
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 2},
        *(pytest.param(o, marks=pytest.mark.soak) for o in ({"precision": "bf16"}, {"remat": True})),
    ],
    ids=str,
)
def test_activation_checkpointing_works_with_other_options(cores: int, options: dict) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(dropping())
    again = Checkpointed(copy.deepcopy(plain.blocks), use_reentrant=False)
    again.load_state_dict(plain.state_dict())
    kept, own = (trained(net, cores, **({"remat": None, "optimizer": "sgd"} | options)) for net in (plain, again))
    for name, tensor in kept[1].items():
        torch.testing.assert_close(own[1][name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.cores(8)
def test_activation_checkpointing_works_with_split_weights(cores: int) -> None:
    net = Checkpointed(dropping(), use_reentrant=False)
    whole, split = (trained(net, cores, None, optimizer="sgd", shard=shard) for shard in (None, "fsdp"))
    for name, tensor in whole[1].items():
        torch.testing.assert_close(split[1][name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.cores(1)
@pytest.mark.parametrize("after", [[nn.Tanh()], []], ids=["inside", "last"])
@pytest.mark.parametrize("affine", [True, False])
def test_checkpointed_batch_norms_are_as_in_pytorch(cores: int, after: list[nn.Module], affine: bool) -> None:
    torch.manual_seed(0)
    # Without a bias before the norm, whose gradient is zero except for rounding.
    block = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16, affine=affine), *after)
    net = Checkpointed(nn.ModuleList([block]), use_reentrant=False)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    x, y = map(torch.from_numpy, rows(24))
    for i in range(0, 24, 8):
        optimizer.zero_grad()
        F.cross_entropy(plain(x[i : i + 8]), y[i : i + 8]).backward()
        optimizer.step()
    model = tpufit.Model(net)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.01), "cross_entropy")
    model.fit(x, y, batch_size=8, shuffle=False, cores=cores, verbose=0)
    torch.testing.assert_close(model.predict(x, verbose=0), plain.eval()(x).detach().numpy(), rtol=0, atol=2e-6)
    torch.testing.assert_close(model(x, training=False), plain(x).detach(), rtol=0, atol=2e-6)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=0, atol=2e-6, msg=name)
    assert plain.blocks[0][1].num_batches_tracked == 6


@pytest.mark.cores(1)
def test_a_checkpoint_of_data_alone_trains_nothing_as_in_pytorch(cores: int) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=True))

    net = First()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy")
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True. Gradients will be None"):
        model.fit(*rows(16), batch_size=8, cores=cores, verbose=0)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.cores(1)
def test_selective_activation_checkpointing_equals_plain_training(cores: int) -> None:
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    net = Checkpointed(dropping(), use_reentrant=False, context_fn=context)
    plain = Checkpointed(copy.deepcopy(net.blocks))
    plain.load_state_dict(net.state_dict())
    kept, own = (trained(one, cores, None, optimizer="sgd") for one in (plain, net))
    for name, tensor in kept[1].items():
        torch.testing.assert_close(own[1][name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.cores(1)
def test_remat_changes_nothing_in_eager_steps(net: Net, cores: int) -> None:
    assert_same_training(net, cores, True, atol=0, run_eagerly=True)


@pytest.mark.parametrize(
    ("remat", "net", "words"),
    [
        (True, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "finds none: name the blocks, as in remat=\\['0'\\]"),
        (
            "dots",
            nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
            "finds none: name the blocks, as in remat=\\{'0': 'dots'\\}",
        ),
        ("dotz", nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "no such module, and isn't a policy \\(attention, dots"),
        ({"0": "dotz"}, nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "policies are 'attention', .*, got 'dotz'"),
        ({"0": ["dots"]}, nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "policies are 'attention', .*, got \\['dots'\\]"),
        ("blocks.*", nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "has no such module, .*; it has 0, 1"),
        (["0", "layers.*"], nn.Sequential(nn.Linear(2, 2)), "names 'layers"),
        (3, nn.Linear(2, 2), "must be None, True, 'attention', .* patterns of module names, .* got 3"),
        ([nn.Linear(2, 2)], nn.Linear(2, 2), "must be None, True, 'attention'"),
    ],
)
def test_missing_blocks_are_an_error(remat: object, net: nn.Module, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        tpufit.Model(net).compile("sgd", "mse", remat=remat)  # type: ignore[arg-type]


@pytest.mark.cores(1)
def test_the_blocks_python_sees_the_users_weights_afterwards(net: Net, cores: int) -> None:
    model = tpufit.Model(net)
    weights = {name: id(parameter) for name, parameter in net.named_parameters()}
    model.compile("sgd", "cross_entropy", remat=True)
    model.fit(*rows(16), batch_size=8, cores=cores, verbose=0)
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == weights
    assert all("forward" not in vars(block) for block in net.blocks)
    assert not hasattr(torch, "xla")
