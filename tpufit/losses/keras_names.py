"""Keras's losses that have no name here, each with PyTorch's name or a function to pass instead.

By default Keras's losses of classes take probabilities and PyTorch's take logits; the answers say so.
"""

_LOGITS = "PyTorch's loss takes logits, so the module must not end in softmax or sigmoid."
_F = ", with F for torch.nn.functional"
_BINARY = f"In PyTorch that is 'binary_cross_entropy_with_logits'. {_LOGITS}"
_KL = "In PyTorch that is torch.nn.KLDivLoss(reduction='batchmean'), which takes log-probabilities."
_DICE = "Pass a function of logits: lambda p, y: 1 - 2 * (p.sigmoid() * y).flatten(1).sum(1) / (p.sigmoid() + y)"
_DICE += ".flatten(1).sum(1). It gives a loss for each row; Keras's loss sums over the rows of a batch."

NEAREST = {
    "bce": _BINARY,
    "binary_crossentropy": _BINARY,
    "binary_focal_crossentropy": "Pass functools.partial(torchvision.ops.sigmoid_focal_loss, alpha=-1), which takes "
    "logits.",
    "categorical_crossentropy": f"In PyTorch that is 'cross_entropy', with probabilities as targets. {_LOGITS}",
    "categorical_focal_crossentropy": "Pass a function of logits: lambda p, y: 0.25 * (1 - (-F.cross_entropy(p, y, "
    f"reduction='none')).exp()) ** 2 * F.cross_entropy(p, y, reduction='none'){_F}, and classes as the targets.",
    "categorical_generalized_cross_entropy": "Pass a function of logits: lambda p, y: (1 - (-0.5 * F.cross_entropy(p, "
    f"y, reduction='none')).exp()) / 0.5{_F}.",
    "categorical_hinge": "Pass a function: lambda p, y: (((1 - y) * p).amax(-1) - (y * p).sum(-1) + 1).clamp(min=0), "
    "with one-hot targets. torch.nn.MultiMarginLoss() compares the label with each class.",
    "circle": "This loss compares all rows of a batch: override compute_loss, as examples/contrastive.py does.",
    "cosine_similarity": f"Pass a function: lambda p, y: -F.cosine_similarity(p, y, dim=-1){_F}.",
    "ctc": "Pass a function of logits (batch, time, classes), with class 0 as the blank and the padding: lambda p, y: "
    "F.ctc_loss(p.log_softmax(2).transpose(0, 1), y, torch.full((len(y),), p.shape[1]), (y != 0).sum(1), "
    f"reduction='none'){_F}. XLA lacks this operation, so the host computes it.",
    "dice": _DICE,
    "hinge": "Pass a function: lambda p, y: (1 - y * p).clamp(min=0), with targets of -1 and 1.",
    "kl_divergence": _KL,
    "kld": _KL,
    "poisson": "In PyTorch that is 'poisson_nll_loss', which takes log-rates.",
    "sparse_categorical_crossentropy": f"In PyTorch that is 'cross_entropy'. {_LOGITS}",
    "squared_hinge": "Pass a function: lambda p, y: (1 - y * p).clamp(min=0) ** 2, with targets of -1 and 1.",
    "tversky": f"With alpha=beta=0.5, Keras's default, it is the Dice loss. {_DICE}",
}
