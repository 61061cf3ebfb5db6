"""The record of the tensors that all cores of TorchTPU have, and the numbers that the cores forget."""

import weakref

import torch

from tpufit.drivers.torchtpu.core_tensors import CorePart, CoreTensors


def note(known, *numbers, **options):
    tensors = [torch.zeros(2, 3) for _ in numbers]
    known.note(tensors, numbers, **options)
    return tensors


def test_a_tensor_is_known_until_it_changes():
    known = CoreTensors()
    kept, changed = note(known, 7, 8)
    changed.add_(1)
    assert known.find(kept).number == known.find(kept.detach()).number == 7
    assert known.find(kept).stand_in(kept) is kept and known.find(kept).axis is None
    assert known.find(changed) is None and known.find(torch.zeros(2, 3)) is None


def test_views_of_one_storage_have_their_own_numbers():
    known = CoreTensors()
    whole = torch.zeros(4, 3)
    known.note([whole, whole[:2]], [1, 2])
    assert known.find(whole).number == 1 and known.find(whole[:2]).number == 2
    assert known.find(whole[1:]) is None and known.find(whole.t()) is None
    known.drop(whole[1:])
    assert known.find(whole) is None and sorted(known.forgotten) == [1, 2]


def test_a_tensor_that_is_sent_again_gets_the_new_number():
    known = CoreTensors()
    (tensor,) = note(known, 1)
    tensor.add_(1)
    known.note([tensor], [2])
    assert known.find(tensor).number == 2 and known.forgotten == [1]


def test_freed_tensors_are_forgotten_and_the_rest_stay():
    known = CoreTensors()
    first, second, third = note(known, 1, 2, 3)
    del second
    known.forget_freed()
    assert known.forgotten == [2]
    assert known.find(first).number == 1 and known.find(third).number == 3
    del first, third
    known.forget_freed()
    assert sorted(known.forgotten) == [1, 2, 3]
    for number in range(100):  # tensors that may get the addresses
        assert known.find(torch.zeros(2, 3)) is None
        note(known, number)
    for _ in range(100):
        known.forget_freed()
    assert len(known.forgotten) == 103


def test_a_tensor_that_outlives_the_rest_of_many_batches_stays_known():
    known = CoreTensors()
    (kept,) = note(known, 0)
    for step in range(50):
        state = note(known, 2 * step + 1, 2 * step + 2)
        known.forget_freed()
        assert known.find(kept).number == 0 and known.find(state[1]).number == 2 * step + 2
    assert 0 not in known.forgotten
    assert len(known.forgotten) > 90  # nearly all of the freed tensors


def test_the_part_of_a_split_tensor_is_freed_with_the_tensor():
    known = CoreTensors()
    parts = [torch.ones(1, 3), torch.ones(1, 3)]
    first, second = note(known, 1, 2, axes=[0, 0], parts=[CorePart([part]) for part in parts])
    first.add_(1)  # a split tensor is only a placeholder
    assert known.find(first).axis == 0 and known.find(first).stand_in(first) is parts[0]
    freed, kept = map(weakref.ref, parts)
    del parts, first
    known.forget_freed()
    assert freed() is None and known.find(second).stand_in(second) is kept()
