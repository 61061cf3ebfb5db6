"""What is found out of a mask by how it was made: it must say the same as the mask itself, or nothing."""

import pytest
import torch

from tpufit import runtime
from tpufit.runtime.ops.masks import pattern_of, seeing_again, seeing_masks

ROWS, TIME, KEYS = 3, 12, 12


def causal(x):
    return torch.ones(TIME, KEYS, dtype=torch.bool, device=x.device).tril()


def places(x, size=TIME):
    return torch.arange(size, device=x.device)


def padding(x):
    return x > 0


def numbers(x):
    return x.clamp(min=0).cumsum(-1) // 5  # those of words of one text are equal


def packed(x):
    """As transformers makes it of the places in each text."""
    begins = torch.diff(x, prepend=x[:, :1] - 1, dim=-1)
    texts = (begins != 1).cumsum(-1)
    b, q, k = places(x, ROWS)[:, None, None, None], places(x)[None, None, :, None], places(x)[None, None, None, :]
    mask = q.new_ones((), dtype=torch.bool) & (x[b, k] <= x[b, q])
    return (mask & (texts[b, q] == texts[b, k])).expand(ROWS, -1, TIME, KEYS)


def padded(x):
    """As transformers makes it of an attention mask."""
    b, q, k = places(x, ROWS)[:, None, None, None], places(x)[None, None, :, None], places(x)[None, None, None, :]
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
    """As `PackedDataset` makes it of the numbers of texts."""
    texts = numbers(x)
    sees = (texts[:, None, :, None] == texts[:, None, None, :]) & (places(x)[:, None] >= places(x))
    return torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, float("-inf"))


# Each is made of whole numbers, some of which are 0 or less; those of `PACKED` of places.
FOUND = {
    "of keys": lambda x: padding(x)[:, None, None],
    "of keys, for all rows": lambda x: padding(x)[0],
    "of queries": lambda x: padding(x)[:, None, :, None],
    "causal": causal,
    "causal, by places": lambda x: places(x)[None] <= places(x)[:, None],
    "causal, by places, turned": lambda x: places(x)[:, None].ge(places(x)),
    "a window": lambda x: causal(x) & (places(x)[None] > places(x)[:, None] - 3),
    "a window to both sides": lambda x: (places(x)[:, None] - places(x)).abs() <= 2,
    "causal and padding": lambda x: causal(x) & padding(x)[:, None, None],
    "made of three dimensions": lambda x: (causal(x) & padding(x)[:, None])[:, None],
    "made of three dimensions, unsqueezed": lambda x: torch.logical_and(causal(x), padding(x)[:, None]).unsqueeze(1),
    "made of two dimensions, viewed": lambda x: (causal(x) & (places(x) > 0)).view(1, 1, TIME, KEYS),
    "padding both ways": lambda x: (padding(x)[:, :, None] & padding(x)[:, None])[:, None],
    "texts": lambda x: numbers(x)[:, None, :, None] == numbers(x)[:, None, None],
    "texts, causal, padding": lambda x: (
        (numbers(x)[:, :, None] == numbers(x)[:, None]) & causal(x) & padding(x)[:, None]
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
    "transformers' of texts, of places that it repeats": lambda x: packed(x[:1].expand(ROWS, -1)),
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


def of_changed_numbers(x):
    own = numbers(x)
    mask = own[:, None, :, None] == own[:, None, None]
    own.add_(places(x))
    return mask


def of_changed_places(x):
    x = x.clone()
    texts = (torch.diff(x, prepend=x[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    x.copy_(x.flip(-1))
    return (x[:, None, None] <= x[:, None, :, None]) & (texts[:, None, :, None] == texts[:, None, None])


def of_a_changed_negation(x):
    sees = (numbers(x)[:, None, :, None] == numbers(x)[:, None, None]) & causal(x)
    hidden = ~sees
    hidden[0] = False
    return torch.zeros_like(sees, dtype=torch.float32).masked_fill(hidden, float("-inf"))


def of_what_changed_since(x):
    sees = (numbers(x)[:, None, :, None] == numbers(x)[:, None, None]) & causal(x)
    hidden = ~sees
    sees[0] = True
    return torch.zeros_like(sees, dtype=torch.float32).masked_fill(hidden, float("-inf"))


def in_inference_mode(x):
    """What writes into such a tensor isn't counted."""
    with torch.inference_mode():
        return causal(x) & padding(x)[:, None, None]


UNKNOWN = {
    "of a negation that has changed": of_a_changed_negation,
    "of a negation of what has changed": of_what_changed_since,
    "any": lambda x: (x[:, None, :, None] * x[:, None, None] % 3) == 0,
    "of heads": lambda x: (x > 0).view(1, ROWS, 1, KEYS),
    "either of two": lambda x: causal(x) | padding(x)[:, None, None],
    "all but causal": lambda x: ~causal(x),
    "places that go up and down": lambda x: x[:, None, None] <= x[:, None, :, None],
    "places of other texts": lambda x: (
        (x[:, None, None] <= x[:, None, :, None]) & (numbers(x)[:, None, :, None] == numbers(x)[:, None, None])
    ),
    "places with a gap": lambda x: (places(x) % 2 == 0) & causal(x) & ((places(x)[:, None] + places(x)) % 3 > 0),
    "made by vmap": lambda x: torch.vmap(lambda q: q >= places(x))(places(x)),
    "made in inference mode": in_inference_mode,
    "a number that is added": lambda x: x.float()[:, None, None],
    "changed later": changed_later,
    "of parts that were changed": of_changed_parts,
    "of numbers that were changed": of_changed_numbers,
    "of places that were changed": of_changed_places,
}


def made(place, make, values):
    """A mask on the device, and what is found out of it."""
    (x,) = place.send([values])
    query, key = (torch.empty(ROWS, 4, size, 8, device="meta") for size in (TIME, KEYS))
    with seeing_masks():
        mask = make(x)
        found = pattern_of(mask, query, key)
    return mask, found


def seen_by(pattern):
    """True where a query looks at a key, by a pattern."""
    of_query, of_key = torch.arange(TIME)[:, None], torch.arange(KEYS)
    seen = torch.ones(ROWS, TIME, KEYS, dtype=torch.bool)
    if pattern.left is not None:
        seen &= of_key >= of_query - pattern.left
    if pattern.right is not None:
        seen &= of_key <= of_query + pattern.right
    if pattern.of_queries is not None:
        queries, keys = runtime.to_host([pattern.of_queries, pattern.of_keys], "test")
        assert (
            queries.dtype is keys.dtype is torch.int32 and queries.shape == (ROWS, TIME) and keys.shape == (ROWS, KEYS)
        )
        seen &= queries[:, :, None] == keys[:, None]
    return seen


def check(place, make, values):
    mask, found = made(place, make, values)
    assert found is not None
    (mask,) = runtime.to_host([mask], "test")
    allowed = mask if mask.dtype is torch.bool else mask == 0
    allowed = allowed.expand(ROWS, 1, TIME, KEYS)[:, 0]
    assert torch.equal(seen_by(found), allowed)
    if found.tells_blind:
        hidden = ~allowed.any(-1)
        (blind,) = (torch.zeros_like(hidden),) if found.blind is None else runtime.to_host([found.blind], "test")
        assert torch.equal(blind, hidden)
    return found


@pytest.mark.cores(1, quick=True)
@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_out_of_a_mask_is_what_it_says(place, name):
    torch.manual_seed(0)
    check(place, FOUND[name], torch.randint(-2, 9, (ROWS, TIME)))


@pytest.mark.cores(1, quick=True)
@pytest.mark.parametrize("name", PACKED)
def test_places_of_joined_texts_are_understood(place, name):
    found = check(
        place, PACKED[name], torch.tensor([[*range(12)], [*range(5), *range(4), *range(3)], [3, 4, 5, *range(9)]])
    )
    assert found.tells_blind and found.blind is None  # each word looks at itself


@pytest.mark.cores(1, quick=True)
@pytest.mark.parametrize("name", UNKNOWN)
def test_of_other_masks_nothing_is_said(place, name):
    torch.manual_seed(0)
    assert made(place, UNKNOWN[name], torch.randint(-2, 9, (ROWS, TIME)))[1] is None


@pytest.mark.cores(1, quick=True)
def test_a_copy_is_known_as_the_mask_that_it_is_of(place):
    (x,) = place.send([torch.ones(ROWS, TIME)])
    query = torch.empty(ROWS, 4, TIME, 8, device="meta")
    with seeing_masks():
        mask = causal(x)
        copy = mask.detach().logical_and(mask)
        copy[0, 0] = True
        assert pattern_of(copy, query, query) is None
        with seeing_again([(copy, mask)]):
            assert pattern_of(copy, query, query).right == 0
    assert pattern_of(mask, query, query) is None  # nothing is kept
