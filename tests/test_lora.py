"""LoRA by peft: only adapters learn, have state, and are in checkpoints; the base is unchanged."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

import tpufit
from tpufit.callbacks import ModelCheckpoint
from tpufit.errors import ArgumentError, CheckpointMismatchError

TOKENS = np.random.default_rng(0).integers(1, 40, (32, 16))


def adapted():
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora)


def fit(net, cores, epochs, folder=None, **options):
    compiling = {name: options.pop(name) for name in ("shard", "remat") if name in options}
    model = tpufit.Model(net)
    model.compile(lambda ps: optim.AdamW(ps, 0.01), "module", scale_lr=None, jit_compile=True, **compiling)
    callbacks = [] if folder is None else [ModelCheckpoint(folder, save_frozen=False, keep_last=None)]
    data = {"input_ids": TOKENS, "labels": TOKENS}
    how = {"batch_size": 8 // cores, "epochs": epochs, "verbose": 0, "shuffle": False, "cores": cores}
    model.fit(data, callbacks=callbacks, **how, **options)
    return model


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft requests it
@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("compiling", [{}, {"shard": "fsdp", "remat": True}], ids=["plain", "fsdp and remat"])
def test_only_adapters_learn_and_are_saved(cores, tmp_path, compiling):
    net = adapted()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    learn = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {p.dtype for p in net.parameters() if p.requires_grad} == {torch.float32} and len(learn) == 8
    model = fit(net, cores, 2, tmp_path / "run", **compiling)
    after = model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == learn
    names = {id(p): name for name, p in net.named_parameters()}
    assert {names[id(p)] for p in model.optimizer.state} == learn and not any(
        p.grad is not None for p in net.parameters()
    )
    assert model.history.history["loss"][1] < model.history.history["loss"][0]
    # Another net with the same base resumes from the adapters bit for bit.
    again = fit(adapted(), cores, 2, tmp_path / "again", resume=tmp_path / "run" / "step-0000000004", **compiling)
    assert all(torch.equal(after[name], value) for name, value in again.state_dict().items())

    predicted = model.predict({"input_ids": TOKENS}, batch_size=8 // cores, verbose=0)
    host = model.to_cpu()
    host.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000
    merged = tpufit.Model(host.merge_and_unload())
    merged.compile(None, "module")
    own = merged.predict({"input_ids": TOKENS}, batch_size=8 // cores, verbose=0, cores=cores)
    first, second = (np.asarray(found, dtype="float32") for found in (predicted, own))
    np.testing.assert_allclose(first, second, rtol=0, atol=0.05)  # the base is in bfloat16, and so is the merged weight


class Small(nn.Sequential):
    def __init__(self, width=3):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, width), nn.Linear(width, 2))
        self[0].requires_grad_(False)


@pytest.mark.cores(1, 8)
def test_a_checkpoint_without_frozen_weights(cores, tmp_path):
    x, y = np.ones((16, 4), "float32"), np.zeros((16, 2), "float32")

    def fit(net, folder, **options):
        model = tpufit.Model(net)
        model.compile("adamw", "mse", scale_lr=None)
        saves = ModelCheckpoint(folder, save_frozen=False)
        model.fit(x, y, 8 // cores, verbose=0, cores=cores, callbacks=[saves], **options)
        return model

    model = fit(Small(), tmp_path / "run", epochs=2)
    newest = tmp_path / "run" / "step-0000000004"
    assert {name for file in newest.glob("model*.safetensors") for name in load_file(file)} == {"1.weight", "1.bias"}
    again = fit(Small(), tmp_path / "again", epochs=3, resume=tmp_path / "run")
    assert again.steps_taken == 6
    loaded = tpufit.load(newest, Small())
    assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))
    other = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(CheckpointMismatchError, match="frozen weights that this one lacks: 0.weight, 0.bias"):
        fit(other, tmp_path / "other", resume=tmp_path / "run")


def test_files_have_all_weights():
    with pytest.raises(ArgumentError, match="save_frozen=False goes with a run directory"):
        ModelCheckpoint("best.safetensors", save_frozen=False)


LEARNS_NOT = "no weight that learns: load adapters with PeftModel.from_pretrained.*is_trainable=True"


def assert_refused(net):
    """Before anything starts on a device, which pytest's process must not do."""
    model = tpufit.Model(net)
    model.compile("adamw", "module" if hasattr(net, "generate") else "mse")
    data = {"input_ids": TOKENS, "labels": TOKENS} if hasattr(net, "generate") else (np.ones((4, 4), "float32"),) * 2
    data = data if isinstance(data, tuple) else (data,)
    for method in (model.fit, model.lr_find, model.preflight, model.train_on_batch):
        with pytest.raises(ArgumentError, match=LEARNS_NOT):
            method(*data)


def test_a_peft_module_without_trainable_weights():
    class Adapted(Small):
        peft_config: ClassVar = {}

    assert_refused(Adapted().requires_grad_(False))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft requests it
@pytest.mark.cores(1)
def test_adapters_that_were_loaded_frozen(cores, tmp_path):
    import peft

    net = adapted()
    net.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(net.unload(), tmp_path)
    assert_refused(loaded)
    assert_refused(nn.Sequential(loaded))
