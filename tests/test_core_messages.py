"""The shared memory by which the user's process sends tensors to the processes of TorchTPU's other cores."""

import pytest
import torch

from tpufit.drivers.torchtpu.messages import Block, Part

TENSORS = {
    "bfloat16": torch.randn(5, 3).bfloat16(),
    "number": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(12).view(3, 4).t(),
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
    "trained": torch.nn.Parameter(torch.randn(3, 2)),
    "large": torch.arange(3 << 20),
    "bool": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_another_mapping_of_a_block_reads_what_was_written(name):
    tensor = TENSORS[name]
    block = Block(64 + tensor.nbytes)
    part = Part(0, 64, tuple(tensor.shape), tensor.dtype, None)
    block.write(part, tensor.detach())
    read = Block(block.nbytes, block.descriptor).tensor(part)
    assert read.dtype is tensor.dtype and torch.equal(read, tensor.detach().resolve_conj().resolve_neg())
    assert not block.bytes[:64].any()
