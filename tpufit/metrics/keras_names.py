"""Keras's metrics that have no name here, each with an object or a function to pass instead."""

_LOSS = "The loss itself is logged as 'loss'; another loss can be a metric as a function: torch.nn.functional."
_COUNTS = "torchmetrics.StatScores(task='binary') counts true and false positives and negatives."
_LOG = "To log a number that a step computes, return it in the dict of train_step; an epoch shows its mean."
_IOU = "'mean_iou' is the mean over the classes; torchmetrics.JaccardIndex(task=..., average=None) gives each class."

NEAREST = {
    "bce": f"{_LOSS}binary_cross_entropy_with_logits.",
    "binary_crossentropy": f"{_LOSS}binary_cross_entropy_with_logits.",
    "binary_io_u": _IOU,
    "categorical_crossentropy": f"{_LOSS}cross_entropy.",
    "categorical_hinge": "Pass torchmetrics.HingeLoss(task='multiclass', num_classes=...), which takes logits.",
    "concordance_correlation": "Pass torchmetrics.ConcordanceCorrCoef(), which is over all rows.",
    "crossentropy": f"{_LOSS}cross_entropy.",
    "false_negatives": _COUNTS,
    "false_positives": _COUNTS,
    "fbeta_score": "With beta=1 that is 'f1_score'; else pass torchmetrics.FBetaScore(task=..., beta=...).",
    "hinge": "Pass torchmetrics.HingeLoss(task='binary'), which takes logits.",
    "io_u": _IOU,
    "kl_divergence": "Pass a function: lambda p, y: F.kl_div(p.log_softmax(1), y, reduction='none').sum(1), with F for "
    "torch.nn.functional, if the module returns logits.",
    "mean": _LOG,
    "mean_metric_wrapper": "Pass the function itself: metrics=[lambda y_pred, y: ...], a value for each row.",
    "one_hot_io_u": _IOU,
    "one_hot_mean_io_u": "That is 'mean_iou' with a loss of classes, by which one-hot targets are recognized.",
    "pearson_correlation": "Pass torchmetrics.PearsonCorrCoef(), which is over all rows.",
    "poisson": "Pass a function: lambda p, y: F.poisson_nll_loss(p, y, log_input=False, reduction='none'), with F for "
    "torch.nn.functional, if the module returns rates.",
    "precision_at_recall": "Pass torchmetrics.PrecisionAtFixedRecall(task='binary', min_recall=...).",
    "recall_at_precision": "Pass torchmetrics.RecallAtFixedPrecision(task='binary', min_precision=...).",
    "sensitivity_at_specificity": "Pass torchmetrics.SensitivityAtSpecificity(task='binary', min_specificity=...).",
    "sparse_categorical_crossentropy": f"{_LOSS}cross_entropy.",
    "specificity_at_sensitivity": "Pass torchmetrics.SpecificityAtSensitivity(task='binary', min_sensitivity=...).",
    "squared_hinge": "Pass torchmetrics.HingeLoss(task='binary', squared=True), which takes logits.",
    "sum": _LOG,
    "true_negatives": _COUNTS,
    "true_positives": _COUNTS,
}
