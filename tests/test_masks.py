"""The pattern that is derived from a mask's construction must equal the mask, or be None."""

import pytest
import torch

from tpufit import runtime
from tpufit.runtime.ops.masks import Masks

ROWS, TIME, KEYS = 3, 12, 12


def causal(x):
    return torch.ones(TIME, KEYS, dtype=torch.bool, device=x.device).tril()


def positions(x, size=TIME):
    return torch.arange(size, device=x.device)


def padding(x):
    return x > 0


def text_ids(x):
    return x.clamp(min=0).cumsum(-1) // 5  # words of one text have equal ids


def packed(x):
    """As transformers computes it from the positions in each text."""
    begins = torch.diff(x, prepend=x[:, :1] - 1, dim=-1)
    texts = (begins != 1).cumsum(-1)
    b, q, k = (
        positions(x, ROWS)[:, None, None, None],
        positions(x)[None, None, :, None],
        positions(x)[None, None, None, :],
    )
    mask = q.new_ones((), dtype=torch.bool) & (x[b, k] <= x[b, q])
    return (mask & (texts[b, q] == texts[b, k])).expand(ROWS, -1, TIME, KEYS)


def padded(x):
    """As transformers computes it from an attention mask."""
    b, q, k = (
        positions(x, ROWS)[:, None, None, None],
        positions(x)[None, None, :, None],
        positions(x)[None, None, None, :],
    )
    mask = q.new_ones((), dtype=torch.bool) & (k <= q) & (k > q - 4)
    return (mask & padding(x).to(torch.bool)[b, k]).expand(ROWS, -1, TIME, KEYS)


def additive(x):
    bias = torch.zeros_like(x, dtype=torch.float32).masked_fill_(x <= 0, float("-inf"))
    later = torch.full((TIME, KEYS), float("-inf"), device=x.device).triu(1)
    return bias[:, None, None] + later.masked_fill(torch.zeros(TIME, KEYS, dtype=torch.bool, device=x.device), 0)


def filled(x):
    bias = torch.zeros_like(x, dtype=torch.float32).masked_fill_(x <= 0, float("-inf"))
    seen = torch.zeros(TIME, KEYS, device=x.device).masked_fill(~causal(x), float("-inf"))
    return bias[:, None, None] + seen


def blocked(x):
    """As `PackedDataset` computes it from text ids."""
    texts = text_ids(x)
    sees = (texts[:, None, :, None] == texts[:, None, None, :]) & (positions(x)[:, None] >= positions(x))
    return torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, float("-inf"))


# All masks are made of integers, some of which are 0 or negative; `PACKED` masks of positions.
FOUND = {
    "of keys": lambda x: padding(x)[:, None, None],
    "of keys, for all rows": lambda x: padding(x)[0],
    "of queries": lambda x: padding(x)[:, None, :, None],
    "causal": causal,
    "causal, from positions": lambda x: positions(x)[None] <= positions(x)[:, None],
    "causal, from positions, query first": lambda x: positions(x)[:, None].ge(positions(x)),
    "a window": lambda x: causal(x) & (positions(x)[None] > positions(x)[:, None] - 3),
    "a window to both sides": lambda x: (positions(x)[:, None] - positions(x)).abs() <= 2,
    "causal and padding": lambda x: causal(x) & padding(x)[:, None, None],
    "made of three dimensions": lambda x: (causal(x) & padding(x)[:, None])[:, None],
    "made of three dimensions, unsqueezed": lambda x: torch.logical_and(causal(x), padding(x)[:, None]).unsqueeze(1),
    "made of two dimensions, viewed": lambda x: (causal(x) & (positions(x) > 0)).view(1, 1, TIME, KEYS),
    "padding both ways": lambda x: (padding(x)[:, :, None] & padding(x)[:, None])[:, None],
    "texts": lambda x: text_ids(x)[:, None, :, None] == text_ids(x)[:, None, None],
    "texts, causal, padding": lambda x: (
        (text_ids(x)[:, :, None] == text_ids(x)[:, None]) & causal(x) & padding(x)[:, None]
    )[:, None],
    "transformers' of padding and a window": padded,
    "added, of keys": lambda x: torch.zeros_like(x, dtype=torch.float32).masked_fill_(x <= 0, float("-inf"))[
        :, None, None
    ],
    "added, causal and padding": filled,
    "added, of texts, causal": blocked,
}
PACKED = {
    "transformers' of texts": packed,
    "transformers' of texts, from repeated positions": lambda x: packed(x[:1].expand(ROWS, -1)),
}


def changed_later(x):
    mask = causal(x) & padding(x)[:, None, None]
    mask[0] = True
    return mask


def of_changed_parts(x):
    seen = padding(x)
    mask = causal(x) & seen[:, None, None]
    seen.fill_(True)
    return mask


def of_changed_text_ids(x):
    own = text_ids(x)
    mask = own[:, None, :, None] == own[:, None, None]
    own.add_(positions(x))
    return mask


def of_changed_positions(x):
    x = x.clone()
    texts = (torch.diff(x, prepend=x[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    x.copy_(x.flip(-1))
    return (x[:, None, None] <= x[:, None, :, None]) & (texts[:, None, :, None] == texts[:, None, None])


def of_a_changed_negation(x):
    sees = (text_ids(x)[:, None, :, None] == text_ids(x)[:, None, None]) & causal(x)
    hidden = ~sees
    hidden[0] = False
    return torch.zeros_like(sees, dtype=torch.float32).masked_fill(hidden, float("-inf"))


def of_a_mask_changed_later(x):
    sees = (text_ids(x)[:, None, :, None] == text_ids(x)[:, None, None]) & causal(x)
    hidden = ~sees
    sees[0] = True
    return torch.zeros_like(sees, dtype=torch.float32).masked_fill(hidden, float("-inf"))


def in_inference_mode(x):
    """Writes into such a tensor aren't counted."""
    with torch.inference_mode():
        return causal(x) & padding(x)[:, None, None]


UNKNOWN = {
    "a negation that was changed": of_a_changed_negation,
    "a negation of a mask changed later": of_a_mask_changed_later,
    "arbitrary": lambda x: (x[:, None, :, None] * x[:, None, None] % 3) == 0,
    "different for each head": lambda x: (x > 0).view(1, ROWS, 1, KEYS),
    "either of two": lambda x: causal(x) | padding(x)[:, None, None],
    "all but causal": lambda x: ~causal(x),
    "positions that go up and down": lambda x: x[:, None, None] <= x[:, None, :, None],
    "positions of other texts": lambda x: (
        (x[:, None, None] <= x[:, None, :, None]) & (text_ids(x)[:, None, :, None] == text_ids(x)[:, None, None])
    ),
    "positions with a gap": lambda x: (
        (positions(x) % 2 == 0) & causal(x) & ((positions(x)[:, None] + positions(x)) % 3 > 0)
    ),
    "made by vmap": lambda x: torch.vmap(lambda q: q >= positions(x))(positions(x)),
    "made in inference mode": in_inference_mode,
    "a number that is added": lambda x: x.float()[:, None, None],
    "changed later": changed_later,
    "parts that were changed": of_changed_parts,
    "text ids that were changed": of_changed_text_ids,
    "positions that were changed": of_changed_positions,
}


def made(place, make, values):
    """Return a mask on the device, and its pattern."""
    (x,) = place.send([values])
    masks = Masks()
    with masks.watch():
        mask = make(x)
        found = masks.pattern(mask, ROWS, TIME, KEYS)
    return mask, found


def attended_by(pattern):
    """Return True where a query attends to a key, by a pattern."""
    query_positions, key_positions = torch.arange(TIME)[:, None], torch.arange(KEYS)
    attends = torch.ones(ROWS, TIME, KEYS, dtype=torch.bool)
    if pattern.left is not None:
        attends &= key_positions >= query_positions - pattern.left
    if pattern.right is not None:
        attends &= key_positions <= query_positions + pattern.right
    if pattern.query_segments is not None:
        queries, keys = runtime.to_host([pattern.query_segments, pattern.key_segments], "test")
        assert (
            queries.dtype is keys.dtype is torch.int32 and queries.shape == (ROWS, TIME) and keys.shape == (ROWS, KEYS)
        )
        attends &= queries[:, :, None] == keys[:, None]
    return attends


def check(place, make, values):
    mask, found = made(place, make, values)
    assert found is not None
    (mask,) = runtime.to_host([mask], "test")
    allowed = mask if mask.dtype is torch.bool else mask == 0
    allowed = allowed.expand(ROWS, 1, TIME, KEYS)[:, 0]
    assert torch.equal(attended_by(found), allowed)
    if found.knows_blind:
        hidden = ~allowed.any(-1)
        (blind,) = (torch.zeros_like(hidden),) if found.blind is None else runtime.to_host([found.blind], "test")
        assert torch.equal(blind, hidden)
    return found


@pytest.mark.cores(1, quick=True)
@pytest.mark.parametrize("name", FOUND)
def test_a_derived_pattern_equals_its_mask(place, name):
    torch.manual_seed(0)
    check(place, FOUND[name], torch.randint(-2, 9, (ROWS, TIME)))


@pytest.mark.cores(1, quick=True)
@pytest.mark.parametrize("name", PACKED)
def test_positions_of_packed_texts_are_recognized(place, name):
    found = check(
        place, PACKED[name], torch.tensor([[*range(12)], [*range(5), *range(4), *range(3)], [3, 4, 5, *range(9)]])
    )
    assert found.knows_blind and found.blind is None  # each word attends to itself


@pytest.mark.cores(1, quick=True)
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_have_no_pattern(place, name):
    torch.manual_seed(0)
    assert made(place, UNKNOWN[name], torch.randint(-2, 9, (ROWS, TIME)))[1] is None


@pytest.mark.cores(1, quick=True)
def test_a_copy_has_its_masks_pattern(place):
    (x,) = place.send([torch.ones(ROWS, TIME)])
    masks = Masks()
    with masks.watch():
        mask = causal(x)
        copy = mask.detach().logical_and(mask)
        copy[0, 0] = True
        assert masks.pattern(copy, ROWS, TIME, TIME) is None
        with masks.watch_again([(copy, mask)]):
            assert masks.pattern(copy, ROWS, TIME, TIME).right == 0
    assert masks.pattern(mask, ROWS, TIME, TIME) is None  # no record is kept
