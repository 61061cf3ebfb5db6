"""`require_vocabulary`: refuses texts that a net has no embeddings for, before anything is compiled."""

from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Subset

from ..data.texts import RowsOfTokens
from ..errors import DataError


def require_vocabulary(module: nn.Module, *data: Any) -> None:
    """Check that a net has embeddings for all tokens and positions of packed texts and token files.

    A device doesn't check this: for a number that is too large, it uses the last embedding.

    Raises:
        DataError: A token is at least the number of embeddings, or a text is longer than the number of positions.
    """
    for texts in data:
        while isinstance(texts, (DataLoader, Subset)):
            texts = texts.dataset
        if isinstance(texts, RowsOfTokens):
            named, others = find_embedding_sizes(module)
            # Other embeddings may not be for tokens, so an explicit vocab_size wins.
            sizes = [] if others and texts.vocab_size is not None else [*named, *others]
            texts.require_vocabulary(max(sizes, default=None), type(module).__name__)
            positions = count_positions(module)
            if positions is not None and texts.longest > positions:
                raise DataError(
                    f"the texts have up to {texts.longest} tokens, and {type(module).__name__} knows {positions} "
                    f"positions: pass {type(texts).__name__}(length={positions}), or build the net for longer texts"
                )


def find_embedding_sizes(module: nn.Module) -> tuple[list[int], list[int]]:
    """Return the sizes of a net's embeddings.

    Returns:
        The sizes of the embeddings that transformers models, the net or a part of it, declare as their input
        embeddings; and the sizes of all embeddings outside of transformers models.

    Example:
        >>> find_embedding_sizes(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))
        ([], [50])
    """
    find = getattr(module, "get_input_embeddings", None)
    try:
        embeddings = find() if callable(find) else None
    except NotImplementedError:  # raised by transformers models without embeddings
        embeddings = None
    embeddings = getattr(embeddings, "base_layer", embeddings)  # peft may have wrapped it
    size = getattr(embeddings, "num_embeddings", None)
    if isinstance(size, int):
        return [size], []
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [], [module.num_embeddings]
    parts = [find_embedding_sizes(child) for child in module.children()]
    return [n for named, _ in parts for n in named], [n for _, others in parts for n in others]


def count_positions(module: nn.Module) -> int | None:
    """Return the number of learned positions of a transformers model, the net or a part of it.

    None for a model that computes its position embeddings, and for any other net.
    """
    for part in module.modules():
        most = getattr(getattr(part, "config", None), "max_position_embeddings", None)
        if isinstance(most, int) and hasattr(part, "get_input_embeddings"):
            named = part.named_modules()
            learned = (n for n, layer in named if isinstance(layer, nn.Embedding) and ("pos" in n or "wpe" in n))
            return most if any(learned) else None
    return None
