"""`shape_last_batch`: pads or drops an epoch's short last batch, which would need another program."""

from torch.nn.modules.batchnorm import _BatchNorm

from ..data import Stream, unpack
from ..data.padding import require_labels
from ..errors import ArgumentError, join_few
from ..losses import Loss
from ..step import Engine
from ..step.step_methods import uses_default

CHOICES = ("exact", "pad", "drop")


def shape_last_batch(how: str, engine: Engine, data: Stream, training: bool) -> None:
    """Keep a short last batch (`"exact"`), pad it with rows that don't count (`"pad"`), or drop it (`"drop"`).

    An evaluation counts every row, so `"drop"` does nothing there. Data without a short batch don't change.

    Raises:
        ArgumentError: The number of rows is unknown, or padding would change results.
        DataError: The targets aren't labels.
    """
    if how == "exact" or (how == "drop" and not training):
        return
    sizes = data.sizes()
    if sizes is None:
        if training:
            raise ArgumentError(
                f"last_batch={how!r} needs data with a known number of rows: arrays, a map-style dataset or its "
                "DataLoader. Give the batches of other data one size yourself"
            )
        return
    if not sizes[1]:
        return
    if how == "drop":
        data.drop_short()
        return
    label = _find_ignored_label(engine, data, training)
    first = data.read_first()
    if first is not None:
        require_labels(unpack(first)[1])
    data.pad(label)


def shape_last_batches(how: str, engine: Engine, data: Stream, held_out: Stream | None) -> None:
    """Call `shape_last_batch` for the training data and the validation data."""
    shape_last_batch(how, engine, data, training=True)
    if held_out is not None:
        shape_last_batch(how, engine, held_out, training=False)


def _find_ignored_label(engine: Engine, data: Stream, training: bool) -> int:
    """Find the label that neither the loss nor the metrics count.

    Raises:
        ArgumentError: There is no such label, or padded rows would change the results of other rows.
    """
    model = engine.model
    loss = engine.config.loss
    counting = [metric.name for metric in engine.config.metrics if not metric.leaves_out]
    norms = [name for name, part in model.module.named_modules() if training and _mixes_rows(part)]
    methods = "train_step", "test_step", "__call__", "compute_loss", "update_metrics", "compute_metrics"
    why = ""
    if not uses_default(model, *methods):
        why = f"{type(model).__name__} overrides a part of the step, which may count every row"
    elif not isinstance(loss, Loss) or not loss.ignored:
        why = "the loss must ignore a label, as 'cross_entropy' does"
    elif counting:
        why = f"these metrics count every row: {join_few(counting)}. Metrics of classes by name don't"
    elif norms:
        why = f"batch norms use all rows of a batch, here {join_few([repr(name) for name in norms])}"
    elif data.device_transform is not None:
        why = "the device_transform may mix rows"
    elif engine.state.placement.hosts > 1:
        why = "the hosts of a pod split batches differently"
    if why or not isinstance(loss, Loss):
        raise ArgumentError(f"last_batch='pad' would change results: {why}. Pass last_batch='exact' or 'drop'")
    return next(iter(loss.ignored.values()))


def _mixes_rows(part: object) -> bool:
    """True for a batch norm, unless it is frozen and in eval mode, which `fit` keeps."""
    return isinstance(part, _BatchNorm) and (part.training or any(p.requires_grad for p in part.parameters()))
