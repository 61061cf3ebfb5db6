"""`require_vocabulary`: texts that a net has no embeddings for are refused, before anything is compiled."""

from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Subset

from ..data.texts import RowsOfTokens
from ..errors import DataError


def require_vocabulary(module: nn.Module, *data: Any) -> None:
    """Check that a net knows the tokens and positions of packed texts and of files of tokens, also in a `DataLoader`.

    A device doesn't: it takes the last embedding for any larger number.

    Raises:
        DataError: A token is larger than the net's embeddings are many, or a text longer than its positions are.
    """
    for texts in data:
        while isinstance(texts, (DataLoader, Subset)):
            texts = texts.dataset
        if isinstance(texts, RowsOfTokens):
            named, others = known_tokens(module)
            # Of other embeddings none may be that of the tokens: who says how many tokens the net knows is believed.
            sizes = [] if others and texts.vocab_size is not None else [*named, *others]
            texts.require_known(max(sizes, default=None), type(module).__name__)
            positions = known_positions(module)
            if positions is not None and texts.longest > positions:
                raise DataError(
                    f"the texts have up to {texts.longest} tokens, and {type(module).__name__} knows {positions} "
                    f"positions: pass {type(texts).__name__}(length={positions}), or build the net for longer texts"
                )


def known_tokens(module: nn.Module) -> tuple[list[int], list[int]]:
    """The numbers of tokens that a net's embeddings know.

    Returns:
        Those of the embeddings that models of transformers, the net or a part of it, name as that of the tokens; and
        those of all embeddings outside of such models.

    Example:
        >>> known_tokens(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))
        ([], [50])
    """
    find = getattr(module, "get_input_embeddings", None)
    try:
        own = find() if callable(find) else None
    except NotImplementedError:  # as models of transformers say that have none
        own = None
    size = getattr(getattr(own, "base_layer", own), "num_embeddings", None)  # which peft may have wrapped
    if isinstance(size, int):
        return [size], []
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [], [module.num_embeddings]
    parts = [known_tokens(child) for child in module.children()]
    return [n for named, _ in parts for n in named], [n for _, others in parts for n in others]


def known_positions(module: nn.Module) -> int | None:
    """The number of positions that a model of transformers, the net or a part of it, has learnt.

    None for one that computes them, and for any other net.
    """
    for part in module.modules():
        most = getattr(getattr(part, "config", None), "max_position_embeddings", None)
        if isinstance(most, int) and hasattr(part, "get_input_embeddings"):
            named = part.named_modules()
            learnt = (name for name, own in named if isinstance(own, nn.Embedding) and ("pos" in name or "wpe" in name))
            return most if any(learnt) else None
    return None
