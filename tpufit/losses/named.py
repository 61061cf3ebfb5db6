"""Losses by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

NAMES: dict[str, Callable[..., Tensor]] = {
    name: getattr(F, name)
    for name in (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "hinge_embedding_loss",
        "huber_loss",
        "l1_loss",
        "mse_loss",
        "multilabel_soft_margin_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    )
}
NAMES |= {"mse": F.mse_loss, "mae": F.l1_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}

_LOGITS = "PyTorch's loss takes logits, so the module must not end in softmax or sigmoid."
KERAS = {  # Keras's names mean losses of probabilities by default; PyTorch's take logits: say so, never guess
    "sparse_categorical_crossentropy": f"In PyTorch that is 'cross_entropy'. {_LOGITS}",
    "categorical_crossentropy": f"In PyTorch that is 'cross_entropy', with probabilities as targets. {_LOGITS}",
    "binary_crossentropy": f"In PyTorch that is 'binary_cross_entropy_with_logits'. {_LOGITS}",
    "mean_squared_error": "In PyTorch that is 'mse_loss'.",
    "mean_absolute_error": "In PyTorch that is 'l1_loss'.",
    "huber": "In PyTorch that is 'huber_loss'.",
    "kl_divergence": "In PyTorch that is torch.nn.KLDivLoss(reduction='batchmean'), which takes log-probabilities.",
    "poisson": "In PyTorch that is 'poisson_nll_loss', which takes log-rates.",
}
