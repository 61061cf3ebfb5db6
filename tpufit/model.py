"""`Model`: Keras's `compile`, `fit`, `evaluate` and `predict` around any `torch.nn.Module`, and `load`."""

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import optimizers
from .backend import HOST, Cores, CoresArgument, in_turn
from .callbacks import Callback, History
from .callbacks.base import TrainedModel
from .callbacks.progbar_logger import resolve_verbose
from .checkpoint import (
    AsyncCheckpointWriter,
    Score,
    export,
    make_state_outside_fit,
    read_checkpoint_at,
    read_weights,
    restore,
    save_weights,
    take_checkpoint,
)
from .checkpoint import save as save_checkpoint
from .data.user_data import recognize, recognize_held_out
from .diagnostics.report import Report
from .diagnostics.summary import describe_memory, format_table, record_outputs
from .errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    NotPicklableError,
    WeightsError,
    require_choice,
    require_flag,
    require_number,
    require_path,
    require_whole,
    say_count,
    short_repr,
)
from .hosts import is_first
from .losses import LossArgument, LossByOutput, LossWeightsArgument, SharedLoss
from .metrics import MetricsArgument, find_metrics
from .optimizers import ExcludeArgument, GroupConfig, OptimizerArgument
from .runtime import copy_into, copy_to_host, fetch, get_settled_cores, platform, tracing
from .step import (
    CompileConfig,
    CompileOption,
    Engine,
    RematArgument,
    ShardArgument,
    StepMethods,
    check_weights,
    explain_arguments,
    find_kept_modules,
    find_kept_parameters,
    match_weights,
    named_tensors,
    strip_prefixes,
    suggestion_for,
    unwrap_module,
    warn_of_uncalled_methods,
)
from .step.precision import to_bfloat16
from .trainer import host_consistency, on_batch, passes
from .trainer.fit_arguments import EvaluationData, Schedule, TrainingData, ValidationData
from .trainer.lr_find import LRCurve, Sweep, find
from .trainer.make_callback_list import make_callback_list
from .trainer.preconditions import require_compiled, require_gradients, require_learning
from .trainer.predictions import Predictions, as_array
from .trainer.run_fit import run_fit
from .trainer.vocabulary import require_vocabulary
from .utils.user_code import warn

Callbacks = Callback | Sequence[Callback] | None


class Model(StepMethods):
    """A `torch.nn.Module` with Keras's training methods, on one core or on all cores.

    A subclass may use any attribute names except `_engine` and the names below.

    Args:
        module: Any module. Its parameters move to the device in place, so ties, optimizers built on them and your
            references stay valid.

    Attributes:
        module: The module.
        optimizer: The optimizer of `compile`; you may set the rates in its `param_groups`, plain numbers, at any time.
        loss: The argument of `compile`. Setting it here doesn't change the training.
        loss_weights: The argument of `compile`. Setting it here doesn't change the training.
        run_eagerly: The argument of `compile`. If you set it, it applies from the next `fit`, `evaluate` or `predict`.
        steps_per_execution: The argument of `compile`. If you set it, it applies from the next `fit`, `evaluate` or
            `predict`.
        jit_compile: The argument of `compile`: `"auto"` (which Keras replaces by True or False), True or False. If you
            set it, it applies from the next `fit`, `evaluate` or `predict`.
        history: The `History` of the last `fit`.
        input_bound: The share of time, from 0 to 1, in which the device waited for data: in the current epoch or,
            between two epochs, in the previous one.
        stop_training: Set it to True in a callback to end training after the current batch.
        stop_evaluating: Set it to True in a callback to end an evaluation after the current batch.
        stop_predicting: Set it to True in a callback to end a prediction after the current batch.
        out_of_time: True if `max_time` ended the last `fit`.

    Example:
        >>> import torch, tpufit
        >>> from torch import nn
        >>> x = torch.arange(12.0).reshape(6, 2)
        >>> y = torch.tensor([0, 0, 0, 1, 1, 1])
        >>> model = tpufit.Model(nn.Linear(2, 2))
        >>> model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
        >>> history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
        >>> model.predict(x, verbose=0).shape
        (6, 2)

    Source: `keras.Model`.
    """

    loss: Any = None  # a class attribute, so that a subclass may have a method or a property of this name
    loss_weights: Any = None
    run_eagerly = CompileOption()
    steps_per_execution = CompileOption()
    jit_compile = CompileOption()

    def __init__(self, module: nn.Module) -> None:
        warn_of_uncalled_methods(type(self), Model)
        self.module = unwrap_module(module)
        self.optimizer: Optimizer | None = None
        self.history: History | None = None
        self.input_bound: float | None = None
        self.stop_training = self.stop_evaluating = self.stop_predicting = self.out_of_time = False
        self._engine = Engine(self)

    def __repr__(self) -> str:
        if "_engine" not in vars(self):
            return super().__repr__()
        how = f"compiled with {type(self.optimizer).__name__}" if self.optimizer else "not compiled"
        counts = f"{say_count(self.count_params(), 'parameter')}, {how}, {say_count(self.steps_taken, 'step')} taken"
        return f"{type(self).__name__}({type(self.module).__name__}, {counts})"

    def __reduce__(self) -> Any:
        raise NotPicklableError(
            f"a {type(self).__name__} can't be pickled or copied: use model.save(path) and tpufit.load(path, net)"
        )

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            sentence = None if hasattr(type(self), name) else suggestion_for(name)
            if sentence is None:
                return object.__getattribute__(self, name)  # raises Python's error, or the error in a user's property
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: {sentence}")

    @in_turn(exclusive=True)
    @explain_arguments
    def compile(
        self,
        optimizer: OptimizerArgument | None = "adamw",
        loss: LossArgument | None = None,
        loss_weights: LossWeightsArgument = None,
        metrics: MetricsArgument = None,
        weighted_metrics: MetricsArgument = None,
        run_eagerly: bool = False,
        steps_per_execution: int | str = 1,
        jit_compile: str | bool = "auto",
        *,
        precision: str = "fp32",
        matmul_precision: str = "default",
        attention: str = "auto",
        scale_lr: str | None = "linear",
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        global_clip_norm: float | None = None,
        exclude_from_weight_decay: ExcludeArgument = None,
        layer_decay: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        shard: ShardArgument = None,
        remat: RematArgument = None,
    ) -> None:
        """Set the optimizer, the loss, the metrics and the options of training.

        Args:
            optimizer: A name of `torch.optim` in lower case (`"adamw"`), a class, a function of the parameters
                (`lambda params: torch.optim.SGD(params, lr=0.1)`), or an optimizer built on the module's parameters.
                An optimizer by name has PyTorch's defaults; the default `"adamw"` has a rate of 0.001. (Keras's default
                is `"rmsprop"` with a rate of 0.001; PyTorch's has 0.01.) None: the model can't be trained.
            loss: A name of `torch.nn.functional` (`"cross_entropy"`), a loss module or a function of (prediction,
                target). For a module with several outputs, one name or module for all outputs, or one for each: in a
                dict by name, in a list for a tuple of outputs, or nested as the module returns them; None for an output
                without a loss. `"module"`: the loss that the module returns, as Hugging Face's modules do for batches
                with `"labels"`; this is the default for a module that takes `labels`. You may leave out the loss if
                you override `compute_loss` or `train_step`. A function returns the mean, or the losses of rows or
                elements, or a pair of losses and their weights: `lambda y_pred, y: ((y_pred - y).abs(), y != 0)`.
            loss_weights: The factor of each output's loss in the total, in the form of `loss` (default: 1); outputs
                missing in a dict have 1.
            metrics: Names (`"accuracy"`), torchmetrics objects, and functions of (prediction, target), in a list, or in
                a dict of name: metric (default: none). A function returns values for rows or for the batch, which are
                averaged over the rows, or a pair of values and their weights. A `tpufit.DatasetMetric` is computed over
                all rows at once. With several classes or labels, `"f1"`, `"precision"`, `"recall"` and `"specificity"`
                are means over the classes (macro), and `"f1_micro"` and the like count all classes together. One-hot
                targets are read as classes if the loss takes classes. For several outputs, in the form of `loss`:
                `{"a": ["accuracy"], "b": "mse"}` or `[["accuracy"], "mse"]`. The keys of a dict are outputs if `loss`
                is a dict or a value is a list, else names of metrics. Metrics of classes by name don't count labels
                that the loss ignores (`ignore_index`).
            weighted_metrics: Metrics that take `sample_weight` and `class_weight` into account, in the same forms
                (default: none): `"accuracy"`, `"mean_absolute_error"`, `"mean_squared_error"`, functions that return a
                value for each row, and torchmetrics objects whose `update` takes a weight. If `metrics` has the same
                name, the log has the prefix `weighted_`.
            run_eagerly: Run the steps in plain PyTorch on the host (default False), to debug them with prints and
                breakpoints.
            steps_per_execution: The number of steps that run as one graph (default 1). More steps take less of the
                host's time. Callbacks' batch hooks are then called once for each group of steps, and once for a shorter
                group at the end of an epoch. `"auto"`: 1 at first, then up to 16 if steps are so short that starting
                them takes most of the time.
            jit_compile: `"auto"` (default): a step is traced twice. If both graphs are equal, the compiled graph is
                replayed from then on, without the step's Python. If they differ, the step is traced on every call, and
                a warning says why. True: differing graphs are an error. False: always trace. On a GPU, True runs
                `self(x)` in steps by `torch.compile`, and the other values change nothing.
            precision: `"fp32"` (default); `"bf16"`, mixed precision: the module computes in bfloat16 by autocast, while
                weights, optimizer and loss stay in float32; or `"bf16-true"`: the module and its optimizer state become
                bfloat16.
            matmul_precision: The precision of float32 matrix products on a TPU: `"default"` (bfloat16), or `"high"` or
                `"highest"` (close to float32). A CPU always computes in float32.
            attention: How `scaled_dot_product_attention` is computed on a TPU. `"plain"`: by products, with all scores
                in memory. `"flash"`: by JAX's kernel for TPUs, which keeps no scores, so that memory grows linearly
                with the length of texts instead of quadratically. `"auto"` (default): by the kernel for at least 1,024
                positions. The kernel supports no dropout of attention weights, no float32, and only causal masks and
                masks of padding or packed texts. It needs JAX, and a TPU other than v2 and v3. Otherwise attention is
                plain, `"flash"` warns, and `report()` names the form of each layer.
            scale_lr: How the learning rate grows with the number of cores, and so with the batch: `"linear"` (default;
                Goyal et al., "Accurate, large minibatch SGD", 2017), `"sqrt"` or None (not at all). The optimizer's
                rate is multiplied once, at the first `fit`; rates set later are used unchanged.
            accumulate_steps: Gradient accumulation: the number of batches for one step of the optimizer (default 1).
                The step equals that of one batch with all their rows: a batch's weight is the denominator of its mean
                loss, such as the number of labels that aren't ignored. An epoch ends with a step over the remaining
                batches.
            clip_norm: Scale each parameter's gradient to at most this norm (default: no limit).
            clip_value: Clip each element of the gradients to this absolute value (default: no limit).
            global_clip_norm: Scale all gradients together to at most this norm, as `clip_grad_norm_` does (default: no
                limit). On any number of cores the gradients are the whole batch's. Only one of the three limits may be
                given.
            exclude_from_weight_decay: The parameters without weight decay, for an optimizer that isn't built yet. True:
                all parameters with fewer than two dimensions, such as biases and the weights of norms. Or a pattern of
                parameter names, such as `"*.bias"`, or a list of patterns (default None). They get separate groups.
            layer_decay: The factor of the learning rate from each block that the module repeats to the block before,
                for fine-tuning (default None: one rate for all). Layers after the last block have the full rate, layers
                before the first block the smallest. Each rate gets a separate group.
            use_ema: Keep an exponential moving average of the weights (default False), with which `fit` overwrites the
                weights at its end; `SwapEMAWeights` also uses it in validations.
            ema_momentum: The share of the average that each step keeps (default 0.99).
            ema_overwrite_frequency: The number of steps of the optimizer after which the average overwrites the weights
                (default: only at the end).
            shard: Which parameters are split over the cores, for a network too large for one core. None (default): each
                core has all parameters. `"fsdp"`: each large parameter is split along its best dimension, like its
                gradient, optimizer state, accumulated gradient and average; small parameters and buffers stay whole.
                A step gathers a weight when it uses it. A dict, `{"head.weight": None, "blocks.*.weight": 0}`: the
                dimension, or None, for patterns of parameter names. The first pattern that matches counts; parameters
                without a match stay whole. On one core nothing is split.
            remat: Rematerialization (activation checkpointing): compute the activations of some blocks again in the
                backward pass instead of keeping them, which takes less memory and more work (default None). True: keep
                only the inputs of the blocks that the module repeats in a `ModuleList` or `Sequential`, such as a
                transformer's. A policy recomputes less: `"attention"`, only what is inside attention; `"dots"`,
                everything except products with weights (linear layers) and the outputs of attention; `"nothing"`, the
                same as True. Or a pattern of module names, such as `"encoder.layer.*"`, a list of patterns, or a dict
                with a policy for each pattern (`{"encoder.layer.*": "dots"}`), of which the first that matches counts.
                Results stay the same; the blocks' Python runs twice when the step is traced, unless the policy is
                `"attention"`.

        Raises:
            UnknownNameError: A name is unknown; the nearest names are suggested.
            ArgumentError: A value is invalid, such as float16.

        Example:
            >>> model = Model(nn.Linear(2, 2))
            >>> model.compile("adamw", "cross_entropy", metrics=["accuracy"], precision="bf16", clip_norm=1.0)
            >>> model.metrics_names
            ['loss', 'accuracy']

        Source: `keras.Model.compile`.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "optimizer")}
        before = self._engine
        # Everything is checked and built before the model changes, so that a refused compile changes nothing.
        config = CompileConfig.of(arguments, self.module)
        groups = GroupConfig(exclude_from_weight_decay, layer_decay)
        others = [*config.loss_modules, *find_kept_modules(self).values()]
        known = [*(p for part in others for p in part.parameters()), *find_kept_parameters(self).values()]
        built = None if optimizer is None else optimizers.build(optimizer, self.module, groups, known)
        before.expose()  # before dtypes change, because held values would keep the old dtypes
        if precision == "bf16-true":
            to_bfloat16([*self.module.parameters(), *self.module.buffers()])
            before.state.forget_held()
        self.optimizer = built
        if loss is not None:
            self.loss = loss
            self.loss_weights = loss_weights
        self._engine = Engine(self, config, before)

    @in_turn(exclusive=True)
    @explain_arguments
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | str | None = None,
        epochs: int | None = None,
        verbose: str | int = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: Mapping[int, float] | str | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | str | None = None,
        validation_freq: int | Container[int] = 1,
        *,
        validation_step_freq: int | float | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        limit: int | float | None = None,
        validation_limit: int | float | None = None,
        min_epochs: int = 0,
        max_steps: int | None = None,
        max_time: float | timedelta | None = None,
        resume: bool | str | os.PathLike[str] = False,
        strict: bool = False,
        sanity_steps: int = 0,
        last_batch: str = "exact",
        cores: CoresArgument = None,
    ) -> History:
        """Train for a number of epochs.

        Args:
            x: Arrays, tensors or tables (or a tuple or dict of them), a map-style or iterable `Dataset`, a list of
                rows, a `DataLoader`, or any iterable of batches `(x, y)`. An object with `__len__` and `__getitem__`,
                such as a data set of Hugging Face, counts as map-style, as for PyTorch's `DataLoader`. A table of
                pandas, polars or pyarrow is an array of shape (rows, columns), a series an array of shape (rows,); a
                missing value is an error.
            y: Targets, with arrays (default: none).
            batch_size: Rows per core (default 32): the global batch is `batch_size * cores`. From a `DataLoader` or an
                iterable, each step takes `cores` batches, one for each core; with `batch_size="global"` each step takes
                one batch, which is split over all cores, and the learning rate isn't scaled. `"auto"`, for arrays and
                map-style datasets: the largest batch that fits into a core's memory, according to the TPU's compiler if
                `tpufit[preflight]` is installed, else by trial: a step is trained at several sizes and undone. On a CPU
                it is 32. The size is printed, and in `report()`.
            epochs: The epoch at whose end training ends, counted from 1 (default 1, or as many as `max_steps` needs; 0:
                no epoch). As in Keras, `initial_epoch=2` and `epochs=5` train three epochs.
            verbose: `"auto"` (default), 0 (silent), 1 (a progress bar) or 2 (one line per epoch).
            callbacks: `Callback` objects, or a `CallbackList` (default: none).
            validation_split: The share of the rows, taken from the end before shuffling, to validate on (default 0;
                only for arrays and map-style datasets).
            validation_data: `(x, y)` or `(x, y, sample_weight)` as arrays, or a data set, loader or iterable (default:
                none).
            shuffle: True (default) shuffles arrays and map-style datasets each epoch, `"batch"` keeps each group of
                `batch_size` rows together, and False keeps the order; loaders and iterables keep their order.
            class_weight: Weights of the rows by class, `{0: 1.0, 1: 5.0}`, for training only (default: none); missing
                classes have weight 1. They are multiplied by `sample_weight`, and work with data of any form.
                `"balanced"`, for a y in one array: rows / (classes * rows of the class), as in scikit-learn.
            sample_weight: With arrays, a weight for each row, or for each element of a sequence, shape `(rows, time)`;
                for several outputs one array for all, or one for each in the form of `y` (default: none).
            initial_epoch: The epoch to begin with, from 0 (default 0).
            steps_per_epoch: Global batches per epoch (default: all); needed for endless data. Each epoch continues
                after the last batch of the previous epoch, and ends with the data, with a warning: with 10 batches and
                `steps_per_epoch=9`, epochs have 9, 1, 9, 1, ... steps.
            validation_steps: Batches per validation (default: all), each time from the start of its data.
            validation_batch_size: Rows per core when validating, or `"global"` (default: `batch_size`).
            validation_freq: The number of epochs from one validation to the next (default 1), or a container of the
                epochs (from 1) after which to validate.
            validation_step_freq: Validate inside each epoch too (default: no): the number of steps from one validation
                to the next, or as a float a share of the epoch (`0.25`: four times an epoch). Each validation calls
                `on_test_begin` to `on_test_end`; the epoch's logs have the `val_*` of the last validation. With
                `steps_per_execution=k` the validation comes after the step's group.
            device_transform: A function of a training batch, such as a module of `tpufit.data.augment`. It runs on the
                device inside the step, after the data's own `device_transform` (default: none).
            limit: The number of batches per epoch to train and validate on, or as a float their share (default: all).
            validation_limit: The same for validation only (default: `limit`).
            min_epochs: The number of epochs before which no callback can end training (default 0); earlier requests
                are dropped.
            max_steps: The number of the optimizer's steps after which training ends, possibly inside an epoch (default:
                no limit). Steps before a `resume` count too.
            max_time: The time after which to stop, at the end of a batch: seconds, or a `timedelta` (default: no
                limit).
            resume: False (default): load no checkpoint, except a `BackupAndRestore`'s backup. True: resume from the
                newest checkpoint of the `ModelCheckpoint(folder)` or `BackupAndRestore` among the callbacks, or start
                from the beginning without a checkpoint. `"best"`: from the best checkpoint. `"next_epoch"`: from the
                newest, but skip the rest of its epoch. A path: a run's folder, or a checkpoint, which must be complete.
                On the same number of cores training resumes bit for bit; `initial_epoch` then has no effect.
            strict: True raises an error, at the user's line, for what slows down steps (default False): in training
                and validation a value read from the device, an operation that runs on the host or a step that can't be
                replayed; and a new graph after the first pass over the data. The weights don't change.
            sanity_steps: The number of batches to validate before training, to find an error in the validation now
                instead of after an epoch (default 0: none). This validation calls no callbacks, and its effects are
                undone, so training and resuming give the same numbers, to the bit. For this, the whole state is copied
                to the host.
            last_batch: What happens to an epoch's short last batch, for which each kind of step is compiled once more.
                `"exact"` (default): it stays short. `"pad"`: in training and validation it is padded with rows whose
                label the loss ignores, so that one program is enough. Results equal those of `"exact"` up to rounding,
                and the step's random numbers differ. This needs a loss of labels such as `"cross_entropy"`, metrics of
                classes by name, the default steps, and no layers that combine rows, such as batch norms that learn;
                where tpufit detects one, it is an error. `rows_seen` and samples per second include the padding.
                `"drop"`: training leaves the batch out, with different rows each epoch; validation keeps all rows.
            cores: `"auto"` (every TPU core; or the GPU; or one core of the CPU), a number of cores, or `[i]` for one
                particular core (default: the cores of the first call in this process, else `"auto"`). The first call
                settles the cores of the process, see `tpufit.init`.

        Returns:
            The `History`: its `history` has for each log a list of floats, one for each epoch.

        Raises:
            NotCompiledError: `compile` has not been called.
            ArgumentError, DataError, CoresError: See their messages. Whatever can be checked in advance is checked
                before anything is compiled.
            StartError: The runtime can't be started, another process uses the TPU, or versions are incompatible.
            BatchError: The module or the loss fails on a batch.
            OutOfMemoryError: A step doesn't fit, or with `batch_size="auto"` not even one row per core.
            ReplayError: A step can't be replayed, which `jit_compile=True` and several cores of TorchTPU require.
            DeviceError, StateLostError: A step failed on the device; then the weights may be lost.
            HostError: The hosts of a pod disagree, or a host is gone.
            LabelError: A class label is outside the module's classes.
            CallbackError: A callback raised an error; the others' `on_train_end` has run.
            CheckpointError: The checkpoint to resume from is missing, damaged, or of another model or data; or too many
                checkpoints could not be written.
            KeyboardInterrupt, SystemExit: After Ctrl-C or SIGTERM, once the step has ended and is saved.
            StrictError: See `strict`.

        Example:
            >>> import torch
            >>> x = torch.arange(12.0).reshape(6, 2)
            >>> model = Model(nn.Linear(2, 1))
            >>> model.compile("sgd", "mse")
            >>> y = x.sum(1, keepdim=True)
            >>> history = model.fit(x, y, batch_size=2, epochs=2, validation_split=1 / 3, verbose=0)
            >>> model.steps_taken, sorted(history.history)
            (4, ['loss', 'val_loss'])

        Source: `keras.Model.fit`.
        """
        data = recognize(x, y, sample_weight)
        return run_fit(
            self._engine,
            TrainingData(data, batch_size, shuffle, steps_per_epoch, class_weight, device_transform, last_batch),
            ValidationData(
                validation_split,
                None if validation_data is None else recognize_held_out(validation_data, "validation_data", data),
                validation_steps,
                validation_batch_size,
                validation_freq,
                validation_step_freq,
                validation_limit,
            ),
            Schedule(epochs, initial_epoch, min_epochs, max_steps, limit, max_time, resume, strict, sanity_steps),
            callbacks,
            verbose,
            cores,
            _by_compiler,
        )

    @in_turn(exclusive=True)
    def preflight(
        self, x: Any = None, y: Any = None, batch_size: Any = None, *, tpu: Any = "v5e-8", **others: Any
    ) -> Any:
        """Compile the steps of a `fit` for a TPU with the TPU's compiler, on any machine.

        Nothing is trained, and the model doesn't change. Of the data only the first batch is read. The steps are traced
        and compiled in separate processes, in which the weights take no memory.

        Args:
            x: As in `fit`, except iterators, which would lose a batch.
            y: As in `fit`.
            batch_size: As in `fit`; `"auto"` finds the largest that fits, within 5 %, by compiling several.
            tpu: The cloud's name of a slice, such as `"v3-8"`, `"v5litepod-8"` or `"v6e-64"` (default `"v5e-8"`), or
                several names, to compare. `"v7x-8"` and the like need TorchTPU instead of torch_xla.
            others: The other arguments of `fit`, such as `validation_data`; arguments that change no program, such as
                `epochs` and `callbacks`, have no effect. With `verbose=0` no clock is shown. `timeout` limits the
                seconds of tracing, and of compiling (default 3600). With `remat="auto"`, the policies of `compile` are
                tried, cheapest first, until all programs fit; the report's `remat` names the policy.

        Returns:
            A `PreflightReport` to print, or to read: `fits`, `seconds` per step, `warnings`, ...; for several slices
            a `Comparison`.

        Raises:
            PreflightError: A step can't be replayed, or the compiler is missing, refuses the step, or dies.
            UnknownNameError: There is no such slice.
            NotCompiledError, ArgumentError, DataError, LabelError: As in `fit`.

        Example:
            >>> import torch
            >>> model = Model(nn.Linear(2, 2))
            >>> model.compile("adamw", "mse")
            >>> x = torch.zeros(64, 2)
            >>> report = model.preflight(x, x, tpu="v5e-8", verbose=0)  # doctest: +SKIP
            >>> report.fits  # doctest: +SKIP
            True

        Source: MaxText's `train_compile.py`, which does this for JAX.
        """
        from .preflight import run_preflight  # here, because few programs need it

        return run_preflight(self._engine, tpu, {"x": x, "y": y, "batch_size": batch_size} | others)

    @in_turn()
    @torch.inference_mode(False)
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | str | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
        *,
        cores: CoresArgument = None,
    ) -> Any:
        """Compute the loss and the metrics over data; each row counts exactly once on any number of cores.

        Args:
            x: As in `fit`.
            y: Targets, with arrays (default: none).
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            verbose: As in `fit`.
            sample_weight: As in `fit`.
            steps: Batches to evaluate (default: all).
            callbacks: As in `fit`.
            return_dict: Return the values by name (default False).
            cores: As in `fit`.

        Returns:
            The loss if there are no metrics, else a list `[loss, *metrics]`, with the losses of several outputs after
            the total, and further logs of your own `test_step` last, sorted by name; a dict if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Example:
            >>> import torch
            >>> model = Model(nn.Identity())
            >>> model.compile(None, "mse", metrics=["mae"])
            >>> model.evaluate(torch.full((4, 1), 3.0), torch.zeros(4, 1), verbose=0)
            [9.0, 3.0]

        Source: `keras.Model.evaluate`.
        """
        engine = self._engine
        return_dict = require_flag("return_dict", return_dict)
        require_compiled(engine, "evaluate")
        data = recognize_held_out(x, "x") if y is None and sample_weight is None else recognize(x, y, sample_weight)
        given = EvaluationData(data, batch_size, steps)
        require_vocabulary(self.module, data.x)
        verbosity = resolve_verbose(verbose)
        now = engine.start(cores, f"evaluate(cores={cores!r})")
        placement = engine.place_on(now)
        held_out = given.stream(placement, now.count)
        host_consistency.compare_hosts(
            engine, evaluate=None if held_out.per_host else (held_out.steps, held_out.sizes())
        )
        host_consistency.move_model(engine, placement)
        params = {"epochs": 1, "steps": held_out.steps, "verbose": verbosity}
        logs = passes.evaluate(engine, held_out, make_callback_list(engine, callbacks, params))
        return _to_keras_form(logs, self.metrics_names, return_dict)

    @in_turn()
    @torch.inference_mode(False)
    def predict(
        self,
        x: Any,
        batch_size: int | str | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        *,
        out: Any = None,
        local: bool = False,
        cores: CoresArgument = None,
    ) -> Any:
        """Compute the module's outputs for all rows of data, in order.

        As long as no call has settled the cores, a `predict` without `cores` on a machine without a TPU runs in plain
        PyTorch and settles nothing, so that a `fit(cores=8)` may follow. A module that draws random numbers in `eval`
        mode draws different numbers at each call, see `tpufit.set_random_seed`.

        Args:
            x: As in `fit`; targets in the data are ignored.
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            verbose: As in `fit`.
            steps: Batches to predict (default: all).
            callbacks: As in `fit`.
            out: The path of a `.npy` file to which rows are written batch by batch, for more rows than fit into memory
                (default: none); for several outputs a path for each, in the same form: `{"a": "a.npy", "b": "b.npy"}`.
                An existing file is replaced once all rows are written.
            local: On a pod, True returns on each host the rows that it has computed (default False: process 0 returns
                all rows, the other processes None). Outputs too large for one core need it.
            cores: As in `fit`.

        Returns:
            A NumPy array with the rows of all batches, or a nest of arrays as the module returns them; with `out`, the
            files, mapped into memory for reading. Besides the result, only a few batches are in memory. None if there
            were no batches.

        Raises:
            ArgumentError, CoresError, BatchError: As in `fit`.
            DataError: As in `fit`; or the outputs' rows differ in shape from batch to batch.
            OSError: The file system refused.

        Example:
            >>> import os, tempfile, torch
            >>> model = Model(nn.Linear(2, 3))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rows = model.predict(torch.zeros(100, 2), verbose=0, out=os.path.join(folder, "rows.npy"))
            >>> type(rows).__name__, rows.shape
            ('memmap', (100, 3))

        Source: `keras.Model.predict`.
        """
        engine = self._engine
        given = EvaluationData(recognize(x), batch_size, steps)
        local = require_flag("local", local)
        verbosity = resolve_verbose(verbose)
        placement = engine.state.placement
        count = 1
        # Plain PyTorch on the host gives what the device would, and a later fit(cores=8) may still settle the cores.
        host_is_equal = placement.on_host and engine.config.precision == "fp32" and platform() == "CPU"
        if cores is not None or get_settled_cores() is not None or not host_is_equal:
            now = engine.start(cores, f"predict(cores={cores!r})")
            placement = engine.place_on(now)
            count = now.count
        data = given.stream(placement, count)
        wanted = local or is_first()
        predictions = Predictions(data.steps, out if wanted else None)
        host_consistency.compare_hosts(engine, predict=None if data.per_host else (data.steps, data.sizes()))
        host_consistency.move_model(engine, placement)
        params = {"epochs": 1, "steps": data.steps, "verbose": verbosity}
        with predictions.committed():
            all_callbacks = make_callback_list(engine, callbacks, params)
            passes.predict(engine, data, all_callbacks, predictions.add if wanted else lambda outputs: None, local)
        return predictions.result()

    @in_turn(exclusive=True)
    def lr_find(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | str | None = None,
        sample_weight: Any = None,
        start_lr: float = 1e-7,
        end_lr: float = 10.0,
        steps: int = 100,
        stop_factor: float = 4.0,
        smoothing: float = 0.9,
        *,
        cores: CoresArgument = None,
    ) -> LRCurve:
        """Find a learning rate: train for some steps while the rate grows from tiny to too large, then undo everything.

        Each step has its own rate and a full global batch of the shuffled data, which are repeated if needed, without a
        short last batch. The rates are inputs of the step's graph, so `fit` needs no new graph. Losses are read ten
        steps at a time. At the end weights, buffers, optimizer, rates, modes and random numbers are restored bit for
        bit, even after an error or Ctrl-C. Only data with their own position, such as an iterator, are not rewound, and
        lists and objects that a step's Python changes are not restored.

        Args:
            x: As in `fit`.
            y: Targets, with arrays (default: none).
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            sample_weight: A weight for each row, with arrays (default: none).
            start_lr: The first rate (default 1e-7). Both limits are actual rates, not scaled by the number of cores;
                with several groups they are the first group's, and the others' are in proportion.
            end_lr: The last rate (default 10).
            steps: The number of rates to try (default 100), evenly spaced on a logarithmic scale.
            stop_factor: End early when the smoothed loss exceeds its minimum times this factor (default 4), or a loss
                is infinite or NaN.
            smoothing: The share of the losses' running average that each step keeps (default 0.9).
            cores: As in `fit`.

        Returns:
            The `LRCurve`: `lrs`, `losses`, `smoothed`, `suggestion` and `plot()`. The suggestion is an actual rate, for
            `OneCycle(max_lr=...)` or `model.learning_rate`; or None, with a warning, if the loss never fell.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Example:
            >>> import torch, tpufit
            >>> tpufit.set_random_seed(0)
            >>> x = torch.randn(64, 4)
            >>> model = tpufit.Model(nn.Linear(4, 1))
            >>> model.compile(optimizer="sgd", loss="mse")
            >>> curve = model.lr_find(x, x.sum(1, keepdim=True), batch_size=16)
            >>> 1e-3 < curve.suggestion < 1
            True

        Source: Smith, "Cyclical learning rates for training neural networks", 2017.
        """
        engine = self._engine
        seed = torch.initial_seed()
        require_compiled(engine, "lr_find")
        require_gradients("lr_find")
        require_learning(self._engine)
        train = TrainingData(recognize(x, y, sample_weight), batch_size)
        require_vocabulary(self.module, train.data.x)
        sweep = Sweep(start_lr, end_lr, steps, stop_factor, smoothing)
        now = engine.start(cores, f"lr_find(cores={cores!r})")
        placement = engine.place_on(now)
        data = train.stream(placement, now, seed)
        host_consistency.move_model(engine, placement)
        return find(engine, data, sweep, seed)

    @in_turn(exclusive=True)
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
        *,
        cores: CoresArgument = None,
    ) -> Any:
        """Train on one global batch, for your own training loop. As in Keras, the logs are only of this batch.

        Args:
            x: The inputs: arrays, tensors or a nest of them, with the rows of all cores.
            y: The targets (default: none).
            sample_weight: A weight for each row (default: none).
            class_weight: Weights of the rows by class, as in `fit` (default: none).
            return_dict: Return the logs by name (default False), which wait for the device only when they are read.
            cores: As in `fit`.

        Returns:
            The loss if there are no metrics, else a list `[loss, *metrics]`; a mapping if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Example:
            >>> import torch
            >>> model = Model(nn.Linear(1, 1, bias=False))
            >>> model.compile("sgd", "mse")
            >>> x = torch.ones(4, 1)
            >>> losses = [float(model.train_on_batch(x, 2 * x)) for step in range(3)]
            >>> losses[0] > losses[1] > losses[2]
            True

        Source: `keras.Model.train_on_batch`.
        """
        return_dict = require_flag("return_dict", return_dict)
        require_compiled(self._engine, "train_on_batch")
        require_gradients("train_on_batch")
        require_learning(self._engine)
        parts = (x, y, sample_weight)
        runner, _ = on_batch.run_on_batch(self._engine, "train", parts, cores, "train_on_batch", class_weight)
        return _to_keras_form(runner.logs(), self.metrics_names, return_dict)

    @in_turn()
    @torch.inference_mode(False)
    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
        *,
        cores: CoresArgument = None,
    ) -> Any:
        """Evaluate one global batch. As in Keras, the logs are only of this batch.

        Args:
            x: The inputs: arrays, tensors or a nest of them, with the rows of all cores.
            y: The targets (default: none).
            sample_weight: A weight for each row (default: none).
            return_dict: Return the logs by name (default False), which wait for the device only when they are read.
            cores: As in `fit`.

        Returns:
            The loss if there are no metrics, else a list `[loss, *metrics]`; a mapping if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Example:
            >>> import torch
            >>> model = Model(nn.Identity())
            >>> model.compile(None, "mse")
            >>> float(model.test_on_batch(torch.full((4, 1), 3.0), torch.zeros(4, 1)))
            9.0

        Source: `keras.Model.test_on_batch`.
        """
        return_dict = require_flag("return_dict", return_dict)
        require_compiled(self._engine, "test_on_batch")
        runner, _ = on_batch.run_on_batch(self._engine, "eval", (x, y, sample_weight), cores, "test_on_batch")
        return _to_keras_form(runner.logs(), self.metrics_names, return_dict)

    @in_turn()
    @torch.inference_mode(False)
    def predict_on_batch(self, x: Any, *, cores: CoresArgument = None) -> Any:
        """Compute the module's outputs for one global batch.

        Args:
            x: The inputs, as in `train_on_batch`.
            cores: As in `fit`.

        Returns:
            A NumPy array, or a nest of arrays as the module returns them.

        Raises:
            ArgumentError, CoresError, BatchError: As in `fit`.

        Example:
            >>> import torch
            >>> Model(nn.Linear(2, 3)).predict_on_batch(torch.zeros(4, 2)).shape
            (4, 3)

        Source: `keras.Model.predict_on_batch`.
        """
        _, outputs = on_batch.run_on_batch(self._engine, "predict", (x, None, None), cores, "predict_on_batch")
        predictions = Predictions(batches=1)
        predictions.add(fetch(outputs[0], "outputs"))
        return predictions.result()

    @in_turn()
    def batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | str | None = None,
        shuffle: bool | str = True,
        epoch: int = 0,
        *,
        cores: CoresArgument = None,
    ) -> Iterator[Any]:
        """Iterate over the global batches of one epoch, as `fit` would, for your own training loop.

        Args:
            x: As in `fit`.
            y: Targets, with arrays (default: none).
            sample_weight: A weight for each row, with arrays (default: none).
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            shuffle: As in `fit`.
            epoch: The epoch's number, from 0 (default 0), which with PyTorch's seed determines the order.
            cores: As in `fit`.

        Returns:
            Batches `(x, y)` or `(x, y, sample_weight)` of host tensors, or in the form in which the data yield them.

        Raises:
            ArgumentError, DataError, CoresError: As in `fit`.

        Example:
            >>> import torch, tpufit
            >>> x, y = torch.randn(6, 2), torch.tensor([0, 0, 0, 1, 1, 1])
            >>> model = tpufit.Model(torch.nn.Linear(2, 2))
            >>> model.compile("sgd", "cross_entropy")
            >>> for epoch in range(2):
            ...     for batch in model.batches(x, y, batch_size=4, epoch=epoch):
            ...         logs = model.train_on_batch(*batch, return_dict=True)
            >>> sorted(logs)
            ['loss']
        """
        epoch = require_whole("epoch", epoch, 0)
        data = TrainingData(recognize(x, y, sample_weight), batch_size, shuffle)
        now = self._engine.start(cores, f"batches(cores={cores!r})")
        seed = torch.initial_seed()
        return data.stream(self._engine.place_on(now), now, seed).epoch(epoch)

    @in_turn()
    def reset_metrics(self) -> None:
        """Reset the logs of `train_on_batch` and `test_on_batch`; each call of these does so anyway.

        Example:
            >>> Model(nn.Linear(1, 1)).reset_metrics()

        Source: `keras.Model.reset_metrics`.
        """
        on_batch.reset(self._engine)

    @property
    def metrics(self) -> list[Any]:
        """The metrics of `compile`, and the torchmetrics objects among the model's attributes and in their collections.

        Your own step updates the latter, which are reset for each epoch and each evaluation.

        Example:
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("sgd", "mse", metrics=["mae"])
            >>> [metric.name for metric in model.metrics]
            ['mae']

        Source: `keras.Model.metrics`.
        """
        return [*self._engine.config.metrics, *find_metrics(vars(self)).values()]

    @property
    def metrics_names(self) -> list[str]:
        """The names of a batch's logs: `"loss"`, `<output>_loss` for each of several outputs, and the metrics' names.

        Example:
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("sgd", "mse", metrics=["mae"])
            >>> model.metrics_names
            ['loss', 'mae']

        Source: `keras.Model.metrics_names`.
        """
        loss = self._engine.config.loss
        parts = loss.names if isinstance(loss, (LossByOutput, SharedLoss)) else []
        tracked = find_metrics(vars(self))
        return ["loss", *parts, *(metric.name for metric in self._engine.config.metrics), *tracked]

    @in_turn()
    def summary(
        self,
        print_fn: Callable[[str], object] | None = None,
        *,
        input_size: Sequence[int] | None = None,
        x: Any = None,
    ) -> None:
        """Print a table of the layers, their outputs and their parameters (marked if tied or frozen), with totals.

        It also prints the memory that training takes on each core and, after the first step, the floating-point formats
        of that step. The outputs' shapes are known from the first batch of any step or from a batch given here; before,
        they are shown as `?`.

        Args:
            print_fn: A function that gets the text (default: `print`).
            input_size: The shape of an input, including rows: zeros of this shape run through the module once (default:
                none).
            x: A batch of inputs to run through the module instead, e.g. integers or several inputs (default: none).

        Raises:
            ArgumentError: `print_fn` isn't callable, or `input_size` isn't a shape.

        Example:
            >>> lines = []
            >>> Model(nn.Linear(2, 3)).summary(print_fn=lines.append, input_size=(1, 2))
            >>> "1x3" in lines[0]
            True

        Source: `keras.Model.summary`.
        """
        engine = self._engine
        seen = engine.observed
        if print_fn is not None and not callable(print_fn):
            raise ArgumentError(f"print_fn must be a function of a text, got {short_repr(print_fn)}")
        if input_size is not None:
            if not isinstance(input_size, (tuple, list)):
                raise ArgumentError(f"input_size must be a shape such as (1, 3, 32, 32), got {short_repr(input_size)}")
            x = torch.zeros([require_whole("each number of input_size", rows) for rows in input_size])
        if x is not None:
            seen.shapes.clear()
            with torch.no_grad(), torch.random.fork_rng(devices=[]), record_outputs(self.module, seen.shapes):
                self(x, training=False)
        inside = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        state = [t for key, t in engine.state.tensors()[0].items() if key not in inside]
        split = {key: sharding.axis for key, sharding in engine.state.device.shardings.items()}
        lines = [
            format_table(self.module, seen.shapes, split),
            describe_memory(self.module, state, engine.state.bytes_per_core),
        ]
        lines += [f"precision {engine.config.precision}: {seen.formats}"] if seen.formats else []
        (print_fn or print)("\n".join(lines))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the module's parameters.

        Args:
            recurse: False leaves out the parameters of its layers (default True).

        Returns:
            The parameters, each once.

        Raises:
            BusyError: Another thread is running steps, during which the tensors are empty.

        Example:
            >>> [tuple(parameter.shape) for parameter in Model(nn.Linear(2, 3)).parameters()]
            [(3, 2), (3,)]

        Source: `torch.nn.Module.parameters`.
        """
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the module's parameters with their names.

        Args:
            prefix: The beginning of each name (default: none).
            recurse: False leaves out the parameters of its layers (default True).

        Returns:
            Pairs of a name and a parameter, each parameter once.

        Raises:
            BusyError: Another thread is running steps, during which the tensors are empty.

        Example:
            >>> [name for name, _ in Model(nn.Linear(2, 3)).named_parameters("head")]
            ['head.weight', 'head.bias']

        Source: `torch.nn.Module.named_parameters`.
        """
        if not tracing():
            self._engine.require_weights("parameters")
            self._engine.expose()
        return self.module.named_parameters(prefix, recurse)

    def count_params(self) -> int:
        """Count the elements of the parameters, as `summary` does; a tied parameter counts once.

        Returns:
            The number of elements.

        Example:
            >>> Model(nn.Linear(2, 3)).count_params()
            9

        Source: `keras.Model.count_params`.
        """
        return sum(parameter.numel() for parameter in self.module.parameters())

    def report(self, verbose: bool = False) -> Report:
        """Report the steps since the last `fit` began, with their times and problems, without waiting for the device.

        Args:
            verbose: Add torch_xla's report, as `metrics_report` (default False).

        Returns:
            The `Report`: print it, or read its `problems` and `hints`.

        Raises:
            ArgumentError: `verbose` is neither True nor False.

        Example:
            >>> import torch, tpufit
            >>> model = tpufit.Model(nn.Linear(2, 2))
            >>> model.compile("sgd", "mse")
            >>> _ = model.fit(torch.zeros(64, 2), torch.zeros(64, 2), verbose=0)
            >>> report = model.report()
            >>> report.steps, report.problems
            (2, [])
        """
        return self._engine.report(require_flag("verbose", verbose))

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use; None if the runtime doesn't report it, as for several cores.

        On a GPU it is the peak so far, as `torch.cuda.max_memory_allocated` counts it.

        Example:
            >>> Model(nn.Linear(1, 1)).memory_used is None  # before training, and on a CPU
            True
        """
        return self._engine.memory_used

    def speed(self, steps_per_second: float) -> dict[str, float]:
        """Return the throughput of training steps at some pace, by the steps of the current or the last epoch.

        This doesn't wait for the device. The progress bar and `TensorBoard` show it.

        Args:
            steps_per_second: The pace, in steps per second.

        Returns:
            `tokens_per_second`, over all cores and including padding, if the rows are texts: whole numbers in two
            dimensions. `share_of_peak`, from 0 to 1, on a TPU: the operations of matrix products and convolutions,
            divided by the vendor's peak in bfloat16.

        Raises:
            ArgumentError: The pace isn't a finite number of at least 0.

        Example:
            >>> import torch, tpufit
            >>> model = tpufit.Model(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(64, 2)))
            >>> model.compile("sgd", "mse")
            >>> _ = model.fit(torch.zeros(64, 16, dtype=torch.long), torch.zeros(64, 2), batch_size=32, verbose=0)
            >>> model.speed(steps_per_second=10)
            {'tokens_per_second': 5120.0}
        """
        wanted = "a finite number of at least 0"
        pace = require_number("steps_per_second", steps_per_second, wanted, lambda pace: 0 <= pace < float("inf"))
        return self._engine.speed(pace)

    @property
    def steps_taken(self) -> int:
        """The number of training steps since the model was created.

        Example:
            >>> import torch
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("sgd", "mse")
            >>> _ = model.fit(torch.ones(64, 1), torch.ones(64, 1), epochs=3, verbose=0)
            >>> model.steps_taken, model.rows_seen
            (6, 192)
        """
        return self._engine.state.numbers.step

    @property
    def rows_seen(self) -> int:
        """The number of rows in all training, evaluation and prediction steps since the model was created.

        Example:
            >>> import torch
            >>> model = Model(nn.Identity())
            >>> model.compile(None, "mse")
            >>> _ = model.evaluate(torch.ones(64, 1), torch.ones(64, 1), verbose=0)
            >>> model.rows_seen
            64
        """
        return self._engine.state.numbers.rows_seen

    @property
    def first_bad_step(self) -> int | None:
        """The first training step of the last `fit` that returned a loss or another scalar that isn't finite.

        Steps count from 1 over all training of the model; None if no such step is known. The step is noted without
        extra cost when the host waits for the device anyway: at most 64 graphs later, and at the end of each epoch.

        Example:
            >>> import torch
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("sgd", "mse")
            >>> _ = model.fit(torch.ones(64, 1), torch.ones(64, 1), verbose=0)
            >>> model.first_bad_step is None
            True
        """
        return self._engine.log.first_bad_step

    def write_back(self) -> None:
        """Put the current weights into the module. While steps are replayed, they are kept elsewhere for speed.

        `fit` does this before it calls user code; call it only to read the weights at other times.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.
            BusyError: Another thread trains the model.

        Example:
            >>> import torch
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("sgd", "mse")
            >>> _ = model.train_on_batch(torch.ones(4, 1), torch.ones(4, 1))
            >>> model.write_back()
            >>> model.module.weight.shape
            torch.Size([1, 1])
        """
        self._engine.require_weights("write_back")
        self._engine.state.write_back()

    @in_turn()
    def swap_ema_weights(self, to: bool | None = None) -> None:
        """Swap the weights and their moving averages (`compile(use_ema=True)`). Nothing is copied.

        Args:
            to: True puts the averages into the module, False the weights (default None: swap them).

        Raises:
            ArgumentError: No averages are kept.

        Example:
            >>> import torch
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("sgd", "mse", use_ema=True)
            >>> _ = model.train_on_batch(torch.ones(4, 1), torch.ones(4, 1))
            >>> model.swap_ema_weights(to=True)  # the module has the averages
            >>> model.swap_ema_weights(to=False)
        """
        to = None if to is None else require_flag("to", to)
        if self._engine.config.ema is None and to is not False:
            raise ArgumentError(
                "there are no moving averages of the weights: call model.compile(..., use_ema=True) first"
            )
        self._engine.state.swap_ema(to)

    @in_turn()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's parameters and buffers as host tensors, by name. This waits for the device.

        Returns:
            Host tensors by name; the names of a tied tensor share one.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.
            WeightsError: The module's state has objects other than tensors.

        Example:
            >>> sorted(Model(nn.Linear(2, 3)).state_dict())
            ['bias', 'weight']

        Source: `torch.nn.Module.state_dict`.
        """
        engine = self._engine
        tensors = named_tensors(self.module)
        engine.state.write_back()
        unique = {id(tensor): tensor for tensor in tensors.values()}
        with engine.translating_device_errors():
            host = dict(zip(unique, copy_to_host(list(unique.values()), "state"), strict=True))
        return {name: host[id(tensor)] for name, tensor in tensors.items()}

    @in_turn()
    def load_state_dict(self, state: Mapping[str, Tensor], skip_mismatch: bool = False) -> None:
        """Load weights into the module in place, on the host or the device.

        If the old weights were lost with a step that failed on the device, the optimizer starts without state, with a
        warning.

        Args:
            state: Host tensors by name, as `state_dict` returns them.
            skip_mismatch: Load the weights that fit and warn about the rest, instead of raising an error (default
                False).

        Raises:
            ArgumentError: `state` isn't a dict of tensors by name.
            WeightsError: A name is missing or unknown, a shape differs, or a tied tensor has different values.
            StateLostError: A lost tensor is missing in `state`.

        Example:
            >>> net, model = nn.Linear(2, 1), Model(nn.Linear(2, 1))
            >>> model.load_state_dict(net.state_dict())
            >>> bool((model.module.weight == net.weight).all())
            True
        """
        engine = self._engine
        skip_mismatch = require_flag("skip_mismatch", skip_mismatch)
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ArgumentError(
                f"state must be a dict of tensors by name, as state_dict returns it, got {short_repr(state)}"
            )
        tensors = named_tensors(self.module)
        fitting = match_weights(tensors, state, skip_mismatch)
        if engine.state.device.lost:
            engine.reset({id(tensors[name]): value for name, value in fitting.items()})
            warn("the optimizer starts without state: it was lost with a step that failed")
            return
        engine.state.write_back()
        targets = [tensors[name] for name in fitting]
        shardings = engine.state.device.shardings
        copy_into(targets, list(fitting.values()), engine.state.placement, shardings)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the parameters and buffers as arrays, in the order of `state_dict`. This waits for the device.

        Returns:
            A NumPy array for each parameter and buffer.

        Raises:
            StateLostError, WeightsError: As in `state_dict`.

        Example:
            >>> [array.shape for array in Model(nn.Linear(2, 3)).get_weights()]
            [(3, 2), (3,)]

        Source: `keras.Model.get_weights`.
        """
        return [as_array(value) for value in self.state_dict().values()]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Load arrays into the module, in the order of `get_weights`.

        Args:
            weights: An array or tensor for each parameter and buffer.

        Raises:
            ArgumentError: `weights` isn't a list or tuple.
            WeightsError: There are too few or too many arrays, or a shape differs.
            StateLostError: As in `load_state_dict`.

        Example:
            >>> model, other = Model(nn.Linear(2, 1)), Model(nn.Linear(2, 1))
            >>> other.set_weights(model.get_weights())
            >>> bool((model.module.weight == other.module.weight).all())
            True

        Source: `keras.Model.set_weights`.
        """
        names = list(named_tensors(self.module))
        if not isinstance(weights, (list, tuple)):
            raise ArgumentError(f"weights must be a list of arrays, as get_weights returns, got {short_repr(weights)}")
        if len(weights) != len(names):
            given = say_count(len(weights), "weight")
            raise WeightsError(f"the module has {say_count(len(names), 'tensor')}, got {given}: see get_weights")
        try:
            tensors = list(map(torch.as_tensor, weights))
        except (TypeError, ValueError, RuntimeError) as error:
            raise WeightsError(f"weights must be arrays or tensors, got {short_repr(weights)}") from error
        self.load_state_dict(dict(zip(names, tensors, strict=True)))

    @in_turn()
    def save(self, filepath: str | os.PathLike[str]) -> None:
        """Save the weights, the optimizer and the arguments of `compile`, for `tpufit.load`.

        The module itself is never serialized, so build the net before you load the folder.

        Args:
            filepath: A folder, written completely or not at all; a folder that `save` made before is replaced.

        Raises:
            CheckpointNotWrittenError: Another file or folder is there, the disk refuses it, or a weight isn't finite.
            WeightsError: The module's state has objects other than tensors.

        Example:
            >>> import tempfile
            >>> model = Model(nn.Linear(2, 1))
            >>> model.compile("adamw", "mse")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.save(f"{folder}/model")
            ...     load(f"{folder}/model", nn.Linear(2, 1))
            Model(Linear, 3 parameters, compiled with AdamW, 0 steps taken)

        Source: `keras.Model.save`.
        """
        require_path("filepath", filepath)
        save_checkpoint(filepath, take_checkpoint(self._engine, make_state_outside_fit(self._engine)))
        self._engine.log.last_saved = os.fspath(filepath)

    def save_checkpoint(self, writer: AsyncCheckpointWriter, metric: Score | None = None) -> None:
        """Request a checkpoint of the whole training, for callbacks: it is saved between steps, after all callbacks.

        Args:
            writer: The writer of the checkpoint.
            metric: The score of the checkpoint, if known (default: none).
        """
        self._engine.log.wanted_saves.append((writer, metric))

    @in_turn()
    def save_weights(self, filepath: str | os.PathLike[str], *, finite_only: bool = False) -> None:
        """Save the weights as safetensors. The file is replaced atomically, or not at all.

        Args:
            filepath: A path ending in `.safetensors`.
            finite_only: Refuse to save weights that aren't finite (default False).

        Raises:
            ArgumentError: The path has another suffix.
            CheckpointNotWrittenError: `finite_only` is set, and a weight has NaN or infinities.
            OSError: The file system refused.

        Example:
            >>> import os, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Model(nn.Linear(2, 1)).save_weights(f"{folder}/last.safetensors")
            ...     os.listdir(folder)
            ['last.safetensors']

        Source: `keras.Model.save_weights`.
        """
        require_path("filepath", filepath)
        save_weights(self._engine, filepath, require_flag("finite_only", finite_only))
        self._engine.log.last_saved = os.fspath(filepath)

    @in_turn()
    def load_weights(self, filepath: str | os.PathLike[str], skip_mismatch: bool = False) -> None:
        """Load weights from a file into the module, in place.

        Prefixes that wrappers add to all names (`module.`, `model.`, `_orig_mod.`) are removed if the module's names
        lack them.

        Args:
            filepath: A path ending in `.safetensors`; or in `.pt`, `.pth`, `.ckpt` or `.bin`, of a file by `torch.save`
                with tensors by name, at the top level or under `"state_dict"`, `"model_state_dict"` or `"model"`. Code
                in the file is never run: a file that needs code is refused.
            skip_mismatch: Load the weights that fit and warn about the rest, instead of raising an error (default
                False).

        Raises:
            ArgumentError: The path has another suffix, or is a folder.
            WeightsError: The file has no weights, or they don't fit the module.
            FileNotFoundError: There is no such file.

        Example:
            >>> import os, tempfile, torch
            >>> net, model = nn.Linear(2, 1), Model(nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     torch.save({"epoch": 3, "state_dict": net.state_dict()}, os.path.join(folder, "last.ckpt"))
            ...     model.load_weights(os.path.join(folder, "last.ckpt"))
            >>> torch.equal(net.weight, model.module.weight)
            True

        Source: `keras.Model.load_weights`.
        """
        require_path("filepath", filepath)
        weights = read_weights(filepath)
        self.load_state_dict(strip_prefixes(named_tensors(self.module), weights), skip_mismatch)

    @in_turn()
    def export(self, filepath: str | os.PathLike[str], example: Any) -> None:
        """Export the module as a program that runs without tpufit and without the module's class.

        `torch.export.load(filepath).module()` for a `.pt2` file, or onnxruntime for an `.onnx` file, computes the same
        as `predict` in float32, with the current weights, for any number of rows. The model's module doesn't change.

        Args:
            filepath: A path ending in `.pt2`, or in `.onnx` with the extra `tpufit[onnx]`. The file is replaced
                atomically, or not at all.
            example: A batch of inputs: a tensor or array, or several in a tuple or dict. Only their types and shapes
                matter. After `compile(precision="bf16-true")` the program's inputs are bfloat16.

        Raises:
            ArgumentError: The path has another suffix, a package is missing, or the module can't be exported.
            OSError: The file system refused.

        Example:
            >>> import os, tempfile, torch
            >>> model = Model(nn.Linear(2, 3))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.export(os.path.join(folder, "model.pt2"), torch.zeros(1, 2))
            ...     os.listdir(folder)
            ['model.pt2']

        Source: `keras.Model.export`.
        """
        require_path("filepath", filepath)
        export(filepath, self._engine, example)

    @in_turn(exclusive=True)
    def to_cpu(self) -> nn.Module:
        """Move the module and the optimizer's state back to the host, in place. The next `fit` moves them again.

        Returns:
            The module that `Model` was made of, now an ordinary PyTorch module on the CPU.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.

        Example:
            >>> Model(nn.Linear(2, 3)).to_cpu()
            Linear(in_features=2, out_features=3, bias=True)
        """
        self._engine.move_to(HOST)
        return self.module

    @property
    def learning_rate(self) -> float:
        """The actual learning rate of the first group; setting it keeps the proportions between groups.

        A new rate takes effect at the next step and costs nothing: it is an input of the graph. `model.optimizer` has
        the same attribute, as in Keras's guides.

        Raises:
            NotCompiledError: There is no optimizer.
            ArgumentError: The new rate isn't a finite number of at least 0.

        Example:
            >>> model = Model(nn.Linear(1, 1))
            >>> model.compile("adamw")
            >>> model.learning_rate = model.learning_rate / 2
            >>> model.learning_rate
            0.0005
        """
        return optimizers.list_rates(optimizers.require_optimizer(self.optimizer))[0]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        optimizers.set_rate(optimizers.require_optimizer(self.optimizer), rate)

    def higher_is_better(self, name: str) -> bool | None:
        """Say if a log gets better as it rises, for callbacks with `mode="auto"`.

        Args:
            name: The log's name, with or without `val_`.

        Returns:
            True or False; None if unknown.

        Raises:
            ArgumentError: `name` isn't a string.

        Example:
            >>> model = Model(nn.Linear(1, 2))
            >>> model.compile("sgd", "cross_entropy", metrics=["accuracy"])
            >>> model.higher_is_better("val_accuracy"), model.higher_is_better("loss"), model.higher_is_better("other")
            (True, False, None)
        """
        if not isinstance(name, str):
            raise ArgumentError(f"name must be the name of a log, such as 'val_loss', got {short_repr(name)}")
        plain = name.removeprefix("val_")
        if plain == "loss":
            return False
        directions = {name: metric.higher_is_better for name, metric in find_metrics(vars(self)).items()}
        directions |= {metric.name: metric.higher_is_better for metric in self._engine.config.metrics}
        return directions.get(plain)


_: type[TrainedModel] = Model  # mypy proves that Model has everything that callbacks may use


def _to_keras_form(logs: Mapping[str, Any], names: Sequence[str], return_dict: bool) -> Any:
    """Return logs in the form of Keras's methods: first these names, then a step's further logs by name."""
    if return_dict:
        return logs
    values = [logs[name] for name in (*names, *sorted(logs.keys() - set(names))) if name in logs]
    return values[0] if len(values) == 1 else values


def _by_compiler(engine: Engine, train: TrainingData, cores: Cores, memory: int) -> int | None:
    """Find the largest batch by the TPU's compiler, for `batch_size="auto"`; None if the compiler is missing."""
    from .preflight import find_largest_batch  # here, because few programs need it

    return find_largest_batch(engine, train, cores, memory)


@in_turn(exclusive=True)
def load(path: str | os.PathLike[str], net: nn.Module, compile: bool = True, *, which: str = "newest") -> Model:
    """Load a model with its saved weights, optimizer and arguments of `compile`.

    A checkpoint contains no code: you build the net. If an argument of `compile` was an object, such as a loss module
    or a metric, the model isn't compiled: call `compile` as before, and `fit(resume=path)` restores the optimizer's
    state too.

    Args:
        path: The folder of `Model.save`, a run's folder, which `ModelCheckpoint` keeps, or one of a run's checkpoints.
        net: A module of the same architecture; its weights are overwritten.
        compile: True (default) compiles the model if possible.
        which: The checkpoint of a run's folder: `"newest"` (default), or `"best"`, by the log that `ModelCheckpoint`
            monitors.

    Returns:
        The model, on the host.

    Raises:
        ArgumentError: An argument is invalid, or `which="best"` is used for a folder that isn't a run's.
        CheckpointMissingError, CheckpointDamagedError: There is no checkpoint, or a file of it is damaged.
        CheckpointMismatchError: The checkpoint is of another net; the message names what differs. The net is unchanged.

    Example:
        >>> import tempfile, torch, tpufit
        >>> from torch import nn
        >>> model = tpufit.Model(nn.Linear(2, 1))
        >>> model.compile("adamw", "mse")
        >>> history = model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model")
        ...     again = tpufit.load(f"{folder}/model", nn.Linear(2, 1))
        >>> bool((again.predict(torch.ones(1, 2), verbose=0) == model.predict(torch.ones(1, 2), verbose=0)).all())
        True

    Source: `keras.saving.load_model`.
    """
    require_path("path", path)
    compile = require_flag("compile", compile)
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"net must be a torch.nn.Module, got {short_repr(net)}")
    require_choice("which", which, "newest", "best")
    checkpoint = read_checkpoint_at(path, best=which == "best")
    model = Model(net)
    tensors = named_tensors(net)
    left_out = checkpoint.state["model"].get("left_out", [])
    weights = {name: tensors[name].detach().clone() for name in left_out if name in tensors} | dict(checkpoint.weights)
    arguments = checkpoint.state.get("compile") if compile else None
    if arguments is None:
        check_weights(tensors, weights, dtypes=False)
        model.load_state_dict(weights)
        return model
    # Checked before `compile`, so that a refused net doesn't change; but "bf16-true" first has to change its dtypes.
    if arguments.get("precision") != "bf16-true":
        check_weights(tensors, weights)
    as_saved = {"exclude_from_weight_decay": None, "layer_decay": None}  # the saved groups are split already
    try:
        options = checkpoint.state["optimizers"]["optimizer"]
        model.compile(optimizer=lambda parameters: _rebuild(net, options), **(arguments | as_saved))
    except (TypeError, LookupError) as error:
        raise CheckpointDamagedError(
            f"{path} is damaged: compile refuses its arguments ({str(error)[:200]})"
        ) from error
    model.to_cpu()
    restore(model._engine, checkpoint)
    return model


def _rebuild(net: nn.Module, options: Mapping[str, Any]) -> Optimizer:
    """Build a PyTorch optimizer with the saved groups and options."""
    parameters = dict(net.named_parameters())
    unknown = [name for group in options["groups"] for name in group["params"] if name not in parameters]
    if unknown:
        raise CheckpointMismatchError(f"the checkpoint's optimizer has parameters that the net lacks: {unknown[:8]}")
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in options["groups"]]
    kind: Any = optimizers.NAMES[options["class"].lower()]
    optimizer: Optimizer = kind(groups)
    return optimizer
