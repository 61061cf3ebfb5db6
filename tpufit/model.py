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
    named_checkpoint,
    outside_of_fit,
    read_weights,
    restore,
    save_weights,
    take_checkpoint,
)
from .checkpoint import save as save_checkpoint
from .data import stream
from .diagnostics.report import Report
from .diagnostics.summary import memory, noting_outputs, table
from .errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    NotPicklableError,
    WeightsError,
    counted,
    require_flag,
    require_number,
    require_path,
    require_whole,
    short_repr,
)
from .hosts import is_first
from .losses import LossArgument, LossByOutput, LossWeightsArgument, SharedLoss
from .metrics import MetricsArgument, metrics_in
from .optimizers import ExcludeArgument, GroupConfig, OptimizerArgument
from .runtime import copies, copy_into, fetch, platform, settled, start, tracing
from .step import (
    CompileConfig,
    CompileOption,
    Engine,
    RematArgument,
    ShardArgument,
    StepMethods,
    check_weights,
    explaining,
    kept_modules,
    kept_parameters,
    match_weights,
    named_tensors,
    suggestion_for,
    usable,
    warn_of_uncalled_methods,
)
from .step.precision import to_bfloat16
from .trainer import consistency, on_batch, passes
from .trainer.arguments import (
    Schedule,
    TrainingData,
    ValidationData,
    callback_list,
    evaluation_stream,
    require_compiled,
    require_gradients,
    require_learning,
)
from .trainer.fitting import run_fit
from .trainer.lr_find import LRCurve, Sweep, find
from .trainer.predictions import Predictions, as_array
from .trainer.vocabulary import require_vocabulary
from .utils.users_code import warn

Callbacks = Callback | Sequence[Callback] | None


class Model(StepMethods):
    """A `torch.nn.Module` with Keras's training methods, on one core or all of them.

    A subclass may use any attribute names but those below and `_engine`.

    Args:
        module: Any module. Its parameters move to the device in place, so ties, optimizers built on them and your own
            references stay valid.

    Attributes:
        module: The module.
        optimizer: The optimizer of `compile`; the rates in its `param_groups` are numbers that may be set at any time.
        loss: The argument of `compile`. Setting it here doesn't change the training.
        loss_weights: The argument of `compile`. Setting it here doesn't change the training.
        run_eagerly: The argument of `compile`. If you set it, the next `fit`, `evaluate` or `predict` follows it.
        steps_per_execution: The argument of `compile`. If you set it, the next `fit`, `evaluate` or `predict`
            follows it.
        jit_compile: The argument of `compile`: `"auto"` (which Keras replaces by True or False), True or False. If you
            set it, the next `fit`, `evaluate` or `predict` follows it.
        history: The `History` of the last `fit`.
        input_bound: The share of time, from 0 to 1, in which the device waited for data: in the epoch under way, or in
            the last one.
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

    loss: Any = None  # of the class, so that a subclass may have a method or a property of this name
    loss_weights: Any = None
    run_eagerly = CompileOption()
    steps_per_execution = CompileOption()
    jit_compile = CompileOption()

    def __init__(self, module: nn.Module) -> None:
        warn_of_uncalled_methods(type(self), Model)
        self.module = usable(module)
        self.optimizer: Optimizer | None = None
        self.history: History | None = None
        self.input_bound: float | None = None
        self.stop_training = self.stop_evaluating = self.stop_predicting = self.out_of_time = False
        self._engine = Engine(self)

    def __repr__(self) -> str:
        if "_engine" not in vars(self):
            return super().__repr__()
        how = f"compiled with {type(self.optimizer).__name__}" if self.optimizer else "not compiled"
        counts = f"{counted(self.count_params(), 'parameter')}, {how}, {counted(self.steps_taken, 'step')} taken"
        return f"{type(self).__name__}({type(self.module).__name__}, {counts})"

    def __reduce__(self) -> Any:
        raise NotPicklableError(
            f"a {type(self).__name__} can't be pickled or copied: model.save(path) and tpufit.load(path, net) do that"
        )

    if not TYPE_CHECKING:  # else it would pass any name

        def __getattr__(self, name: str) -> Any:
            sentence = None if hasattr(type(self), name) else suggestion_for(name)
            if sentence is None:
                return object.__getattribute__(self, name)  # raises Python's own error, or that of a user's property
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: {sentence}")

    @in_turn(alone=True)
    @explaining
    def compile(
        self,
        optimizer: OptimizerArgument | None = "rmsprop",
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
                By name it has PyTorch's defaults: `"rmsprop"`, the default, a rate of 0.01 (Keras's has 0.001). None
                for a model that isn't trained.
            loss: A name of `torch.nn.functional` (`"cross_entropy"`), a loss module or a function of (prediction,
                target). For a module of several outputs, one name or module for all of them, or one for each: in a dict
                by their names, in a list for a tuple of outputs, or nested as the module returns them; None for an
                output that has no loss. `"module"`: the loss that the module returns, as Hugging Face's do for batches
                with `"labels"`; this is the default for a module that takes `labels`. You may leave the loss out if
                you override `compute_loss` or `train_step`. A function returns the mean, or the losses of rows or
                elements; with a mask or weights, a pair of both: `lambda y_pred, y: ((y_pred - y).abs(), y != 0)`.
            loss_weights: The factor of each output's loss in the total, in the form of `loss` (default: 1); a dict may
                leave outputs out.
            metrics: Names (`"accuracy"`), torchmetrics objects, and functions of (prediction, target), as a loss is,
                whose values for each row, or for a batch, are averaged over the rows, or by the weights that it returns
                with them; in a list, or by name in a dict.
                With several classes or labels, `"f1"`, `"precision"`, `"recall"` and `"specificity"` are means over the
                classes (macro), and `"f1_micro"` and the like count all together. One-hot targets are read as classes
                if the loss takes classes. For several outputs, in the form of `loss`: `{"a": ["accuracy"], "b": "mse"}`
                or `[["accuracy"], "mse"]`. The keys of a dict are outputs if `loss` is a dict or one of the values is a
                list, else names of metrics. Labels that the loss ignores (`ignore_index`) don't count in metrics of
                classification given by name either.
            weighted_metrics: Metrics that take `sample_weight` and `class_weight` into account, in the same forms:
                `"accuracy"`, `"mean_absolute_error"`, `"mean_squared_error"`, functions that return a value for each
                row, and torchmetrics objects whose `update` takes a weight. One with the same name as one of `metrics`
                is logged with the prefix `weighted_`.
            run_eagerly: Run the steps in plain PyTorch on the host (default False), to debug them with prints and
                breakpoints.
            steps_per_execution: The number of steps that run as one graph (default 1). More steps take less of the
                host's time. Callbacks' batch hooks are then called once for each group of steps, and once for a shorter
                group at the end of an epoch. `"auto"`: 1 at first, then up to 16 if the steps are so short that
                starting them takes most of the time.
            jit_compile: `"auto"` (default): a step is traced twice. If both graphs are equal, the compiled graph is
                started from then on, without the step's Python (a replay). If not, the step is traced on every call,
                and a warning says why. True: that is an error. False: always trace.
            precision: `"fp32"` (default); `"bf16"`: the module computes in bfloat16 by autocast; weights, optimizer
                and loss stay in float32; or `"bf16-true"`: the module itself becomes bfloat16, with its optimizer.
            matmul_precision: The precision of float32 matrix products on a TPU: `"default"` (bfloat16), or `"high"` or
                `"highest"` (close to float32). A CPU is exact in any case.
            attention: How `scaled_dot_product_attention` is computed on a TPU. `"plain"`: by products, with all scores
                in memory. `"flash"`: by JAX's kernel for TPUs, which keeps none of them, so that memory grows with the
                length of texts and not with its square. `"auto"` (default): by the kernel where it is worth it. What it
                doesn't do stays plain: dropout, float32, masks but causal ones and those of padding or joined texts, a
                v2 or v3, a CPU, or no JAX; `"flash"` then warns, and `report()` says it for each layer.
            scale_lr: How the learning rate grows with the number of cores, as the batch does: `"linear"` (default;
                Goyal et al., "Accurate, large minibatch SGD", 2017), `"sqrt"` or None (not at all). The rate given here
                is multiplied once, at the first `fit`; rates set later are used as they are.
            accumulate_steps: The number of batches for one step of the optimizer (default 1). It is the step that one
                batch of all their rows would make: each counts by what its loss is the mean over, such as the labels
                that aren't ignored. An epoch ends with a step over the remaining batches.
            clip_norm: Scale each parameter's gradient to at most this norm (default: no limit).
            clip_value: Clip each element of the gradients to this absolute value (default: no limit).
            global_clip_norm: Scale all gradients together to at most this norm, as `clip_grad_norm_` does (default: no
                limit): the gradients of the whole batch, on any number of cores. Only one of the three may be given.
            exclude_from_weight_decay: The parameters without weight decay, of an optimizer that isn't built yet. True:
                all of fewer than two dimensions, such as biases and the weights of norms. Or a pattern of parameter
                names, such as `"*.bias"`, or a list of them (default None). They make groups of their own.
            layer_decay: The factor from the learning rate of each block that the module repeats to that of the one
                before, for fine-tuning (default None: one rate for all). The layers after the last block have the whole
                rate, and those before the first the least. They make groups of their own, too.
            use_ema: Keep an exponential moving average of the weights (default False), which `fit` puts in their place
                at its end; `SwapEMAWeights` does so for validation too.
            ema_momentum: The share of the average that each step keeps (default 0.99).
            ema_overwrite_frequency: The number of steps of the optimizer after which the average replaces the weights
                (default: only at the end).
            shard: Which parameters are split over the cores, for a network too large for one core. None (default): each
                core has all of them. `"fsdp"`: each large parameter is split along its best dimension, and so are its
                gradient, its part of the optimizer's state, and its accumulated sums and averages; small parameters and
                buffers stay whole. A step gathers a weight when it computes with it. A dict,
                `{"head.weight": None, "blocks.*.weight": 0}`: the dimension, or None, for patterns of parameter names.
                The first pattern that matches counts; a parameter that none matches stays whole. On one core nothing is
                split.
            remat: Compute activations of these blocks again in the backward pass, instead of keeping them from the
                forward pass, which takes less memory and more work (default None). True: all but the inputs of the
                blocks that the module repeats in a `ModuleList` or `Sequential`, such as a transformer's. By a policy,
                named as JAX names some, less is computed again: `"attention"`, what is inside of attention; `"dots"`,
                all but the products with weights (linear layers) and what attention has come to; `"nothing"` is True.
                Or a pattern of module names, such as `"encoder.layer.*"`, a list of them, or a dict of a policy for
                each (`{"encoder.layer.*": "dots"}`), of which the first that matches counts. Results stay the same;
                the blocks' Python runs twice when the step is traced, unless the policy is `"attention"`.

        Raises:
            UnknownNameError: A name is unknown; the nearest ones are suggested.
            ArgumentError: A value is of the wrong kind, such as float16.

        Source: `keras.Model.compile`.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "optimizer")}
        before = self._engine
        # Everything is checked and built before the model changes, which a refused compile leaves as it was.
        config = CompileConfig.of(arguments, self.module)
        groups = GroupConfig(exclude_from_weight_decay, layer_decay)
        others = [*config.loss_modules, *kept_modules(self).values()]
        known = [*(p for part in others for p in part.parameters()), *kept_parameters(self).values()]
        built = None if optimizer is None else optimizers.build(optimizer, self.module, groups, known)
        before.expose()  # before dtypes change: held values would keep the old ones
        if precision == "bf16-true":
            to_bfloat16([*self.module.parameters(), *self.module.buffers()])
            before.state.renew()
        self.optimizer = built
        if loss is not None:
            self.loss = loss
            self.loss_weights = loss_weights
        self._engine = Engine(self, config, before)

    @in_turn(alone=True)
    @explaining
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
        cores: CoresArgument = None,
    ) -> History:
        """Train for a number of epochs.

        Args:
            x: Arrays, tensors or tables (or a tuple or dict of them), a map-style or iterable `Dataset`, a list of
                rows, a `DataLoader`, or any iterable of batches `(x, y)`. What has `__len__` and `__getitem__`, such
                as a data set of Hugging Face, counts as map-style, as for PyTorch's `DataLoader`. A table of pandas,
                polars or pyarrow is an array of shape (rows, columns), a series one of shape (rows,); a missing value
                in one is an error.
            y: Targets, with arrays.
            batch_size: Rows per core (default 32): the global batch is `batch_size * cores`. From a `DataLoader` or an
                iterable, `cores` batches are joined row by row to one step's, a batch for each core; with
                `batch_size="global"` each of its batches is for all cores together, which it is split over, and the
                learning rate isn't scaled. `"auto"`, for arrays and map-style datasets: the most that
                fit into a core's memory, by the TPU's compiler if `tpufit[preflight]` is installed, else by trial,
                which trains a step at several sizes and puts everything back. On a CPU, which has no memory of its own
                to fill, that is 32. It is printed, and in `report()`.
            epochs: The number of the last epoch: training runs from `initial_epoch` to it (default 1, or with
                `max_steps` as many as these need; 0: no epoch).
            verbose: `"auto"` (default), 0 (silent), 1 (a progress bar) or 2 (a line an epoch).
            callbacks: `Callback` objects, or a `CallbackList`.
            validation_split: The share of the rows, taken from the end before shuffling, to validate on (arrays and
                map-style datasets).
            validation_data: `(x, y)` or `(x, y, sample_weight)` as arrays, or a data set, loader or iterable.
            shuffle: True (default) to give arrays and map-style datasets a new order each epoch, `"batch"` to give it
                only to each `batch_size` rows among themselves, or False; loaders and iterables keep theirs.
            class_weight: Weights of the rows by class, `{0: 1.0, 1: 5.0}`, for training only; classes left out weigh 1.
                They are multiplied with `sample_weight`, and work with data of any form. `"balanced"`, for a y in one
                array: rows / (classes * rows of the class), as in scikit-learn.
            sample_weight: One weight a row, with arrays, or one for each element of a sequence, shape `(rows, time)`;
                for several outputs one array for all, or one for each in the form of `y`.
            initial_epoch: The epoch to begin with, from 0 (default 0).
            steps_per_epoch: Global batches an epoch (default: all); needed for endless data. Each epoch goes on where
                the last one left off, and ends with the data, with a warning: 10 batches give epochs of 9, 1, 9, 1,
                ... steps if 9 are asked for.
            validation_steps: Batches a validation (default: all), each time from the start of its data.
            validation_batch_size: Rows per core when validating, or `"global"` (default: `batch_size`).
            validation_freq: The number of epochs from one validation to the next (default 1), or a container of the
                epochs (from 1) after which to validate.
            validation_step_freq: Validate inside each epoch too: the number of its steps from one validation to the
                next, or as a float their share (`0.25`: four times an epoch). Each validation calls `on_test_begin` to
                `on_test_end`; the epoch's logs have the `val_*` of the last one. With `steps_per_execution=k` it comes
                after the step's group.
            device_transform: A function of a batch to train on, such as a module of `tpufit.data.augment`. It is run on
                the device inside the step, after the data's own (default: none).
            limit: The number of batches per epoch to train and validate on, or as a float their share (default: all).
            validation_limit: The same for validation alone (default: `limit`).
            min_epochs: The number of epochs before which no callback ends training (default 0): one that wants to must
                want it again.
            max_steps: The number of the optimizer's steps after which training ends, maybe inside an epoch (default: no
                limit). With `resume` those before it count too.
            max_time: The time after which to stop, at the end of a batch: seconds, or a `timedelta`.
            resume: True: resume from the newest checkpoint of the `ModelCheckpoint(folder)` or `BackupAndRestore` among
                the callbacks, or start from the beginning if there is none. `"best"`: from the best one.
                `"next_epoch"`: from the newest, without the rest of its epoch. A path: a run's folder, or one
                checkpoint, which must be complete. On the same number of cores training goes on bit for bit;
                `initial_epoch` has no effect then.
            strict: True raises an error, at the user's line, for whatever makes steps slow (default False): in training
                and validation a value read from the device, an operation that runs on the host or a step that can't be
                replayed, and after the first pass over the data a new graph. The weights stay as they were.
            cores: `"auto"` (every TPU core; one of the CPU), a count, or `[i]` for one particular core. The first call
                in a process settles it, see `tpufit.init`.

        Returns:
            The `History`: its `history` holds a list of floats for each log, one an epoch.

        Raises:
            NotCompiledError: `compile` has not been called.
            ArgumentError, DataError, CoresError: See their messages; raised before anything is compiled.
            OutOfMemoryError: A step doesn't fit, or with `batch_size="auto"` not even one row a core.
            LabelError: A class label is outside the module's classes.
            CallbackError: A callback raised; the others' `on_train_end` has run.
            CheckpointError: The checkpoint to resume from is missing, damaged, or of another model or data; or too many
                could not be written.
            KeyboardInterrupt, SystemExit: After Ctrl-C or SIGTERM, once the step is over and saved.
            StrictError: See `strict`.

        Source: `keras.Model.fit`.
        """
        return run_fit(
            self._engine,
            TrainingData(x, y, sample_weight, batch_size, shuffle, steps_per_epoch, class_weight, device_transform),
            ValidationData(
                validation_split,
                validation_data,
                validation_steps,
                validation_batch_size,
                validation_freq,
                validation_step_freq,
                validation_limit,
            ),
            Schedule(epochs, initial_epoch, min_epochs, max_steps, limit, max_time, resume, strict),
            callbacks,
            verbose,
            cores,
            _by_compiler,
        )

    @in_turn(alone=True)
    def preflight(
        self, x: Any = None, y: Any = None, batch_size: Any = None, *, tpu: Any = "v5e-8", **others: Any
    ) -> Any:
        """Compile the steps of a `fit` for a TPU, by the TPU's own compiler, on a machine that needs none.

        Nothing is trained, and the model stays as it is. Of the data only a first batch is read. The steps are traced
        and compiled in processes of their own, in which the weights take no memory.

        Args:
            x: As in `fit`, but no iterator, of which a batch would be used up.
            y: As in `fit`.
            batch_size: As in `fit`; `"auto"` finds the largest that fits, within 5 %, by compiling several.
            tpu: The cloud's name of a slice, such as `"v3-8"`, `"v5litepod-8"` or `"v6e-64"` (default `"v5e-8"`), or
                several, to compare.
            others: The other arguments of `fit`, such as `validation_data`; those that change no program, such as
                `epochs` and `callbacks`, have no effect. With `verbose=0` there is no clock. `timeout` is the seconds
                that tracing may take, and compiling (default 3600). With `remat="auto"`, the policies of `compile` are
                compiled one after the other, what costs the least first, until all fits; `remat` of the report says
                which it was.

        Returns:
            A `PreflightReport`, to be printed, or read: `fits`, `seconds` a step, `warnings`, ...; for several slices
            a `Comparison`.

        Raises:
            PreflightError: A step can't be replayed, or the compiler is missing, refuses it, or ends.
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
        from .preflight import run_preflight  # here, because few who import tpufit will

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
        """Compute the loss and the metrics over data, each row counted exactly once on any number of cores.

        Args:
            x: As in `fit`.
            y: Targets, with arrays.
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            verbose: As in `fit`.
            sample_weight: As in `fit`.
            steps: Batches to evaluate (default: all).
            callbacks: `Callback` objects.
            return_dict: Return the values by name (default False).
            cores: As in `fit`.

        Returns:
            The loss alone if there are no metrics, else a list `[loss, *metrics]`, with the outputs' losses after the
            total if there are several, and the own logs of a `test_step` last, sorted by name; a dict if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Source: `keras.Model.evaluate`.
        """
        engine = self._engine
        return_dict = require_flag("return_dict", return_dict)
        require_compiled(engine, "evaluate")
        require_vocabulary(self.module, x)
        verbosity = resolve_verbose(verbose)
        now = start(cores, f"evaluate(cores={cores!r})")
        placement = engine.place_on(now)
        data = x if y is None and sample_weight is None else (x, y, sample_weight)[: 2 if sample_weight is None else 3]
        held_out = evaluation_stream(data, batch_size, placement, now, steps, name="x")
        consistency.check(engine, evaluate=None if held_out.per_host else (held_out.steps, held_out.sizes()))
        consistency.move(engine, placement)
        params = {"epochs": 1, "steps": held_out.steps, "verbose": verbosity}
        logs = passes.evaluate(engine, held_out, callback_list(engine, callbacks, params))
        return _returned(logs, self.metrics_names, return_dict)

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

        Before anything has settled the cores, a `predict` without `cores` on a machine without a TPU runs in plain
        PyTorch and settles nothing, so that a `fit(cores=8)` may follow. A module that draws random numbers in `eval`
        mode draws new ones at each call, see `tpufit.set_random_seed`.

        Args:
            x: As in `fit`; targets in the data are ignored.
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            verbose: As in `fit`.
            steps: Batches to predict (default: all).
            callbacks: `Callback` objects.
            out: The path of a `.npy` file to write the rows to as they come, for more rows than memory holds (default:
                none); for several outputs a path for each, in their form: `{"a": "a.npy", "b": "b.npy"}`. An existing
                file is replaced once all rows are written.
            local: On a pod, True to return on each host the rows that it has computed (default False: process 0 returns
                all rows, the others None). Outputs too large for one core need it.
            cores: As in `fit`.

        Returns:
            A NumPy array with the rows of all batches, or a nest of arrays as the module returns them; with `out`, they
            are the files, mapped into memory for reading. Beside the result, only a few batches are in memory. None if
            there were no batches.

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
        local = require_flag("local", local)
        verbosity = resolve_verbose(verbose)
        placement = engine.state.placement
        count = 1
        # Plain PyTorch on the host gives what the device would, and a later fit(cores=8) may still settle the cores.
        host_is_equal = placement.on_host and engine.config.precision == "fp32" and platform() == "CPU"
        if cores is not None or settled() is not None or not host_is_equal:
            now = start(cores, f"predict(cores={cores!r})")
            placement = engine.place_on(now)
            count = now.count
        shards = placement.local_shards
        data = stream(x, batch_size=batch_size, cores=count, steps=steps, restart=True, local_shards=shards)
        wanted = local or is_first()
        predictions = Predictions(data.steps, out if wanted else None)
        consistency.check(engine, predict=None if data.per_host else (data.steps, data.sizes()))
        consistency.move(engine, placement)
        params = {"epochs": 1, "steps": data.steps, "verbose": verbosity}
        with predictions.committed():
            all_callbacks = callback_list(engine, callbacks, params)
            passes.predict(engine, data, all_callbacks, predictions.add if wanted else lambda outputs: None, local)
        return predictions.result()

    @in_turn(alone=True)
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
        """Find a learning rate: train for some steps while the rate grows from tiny to too large, then undo it all.

        Each step has a rate of its own and a whole global batch of the shuffled data, which start over when they end; a
        short last batch is left out. The rates are inputs of the step's graph, which `fit` then finds compiled, and the
        losses are read ten steps at a time. Afterwards weights, buffers, optimizer, rates, modes and random numbers are
        bit for bit what they were, also after an error or Ctrl-C. Only data that keep their own position, such as an
        iterator, have moved on, and lists and objects that a step's Python changes stay changed.

        Args:
            x: As in `fit`.
            y: Targets, with arrays.
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            sample_weight: One weight a row, with arrays.
            start_lr: The first rate (default 1e-7). Both limits are actual rates, which the cores don't scale; with
                several groups the first group gets them, and the others theirs in proportion.
            end_lr: The last rate (default 10).
            steps: The number of rates to try (default 100), evenly spaced on a logarithmic scale.
            stop_factor: End early when the smoothed loss exceeds so many times the lowest one (default 4), or a loss is
                infinite or not a number.
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
        require_vocabulary(self.module, x)
        sweep = Sweep(start_lr, end_lr, steps, stop_factor, smoothing)
        now = start(cores, f"lr_find(cores={cores!r})")
        placement = engine.place_on(now)
        data = TrainingData(x, y, sample_weight, batch_size).stream(placement, now, seed)
        consistency.move(engine, placement)
        return find(engine, data, sweep, seed)

    @in_turn(alone=True)
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
        """Train on one global batch, for a training loop of your own. As in Keras, the logs are of this batch alone.

        Args:
            x: The inputs: arrays, tensors or a nest of them, with the rows of all cores.
            y: The targets.
            sample_weight: One weight a row.
            class_weight: Weights of the rows by class, as in `fit`.
            return_dict: Return the logs by name (default False): they wait for the device only if one is read.
            cores: As in `fit`.

        Returns:
            The loss alone if there are no metrics, else a list `[loss, *metrics]`; a mapping if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Source: `keras.Model.train_on_batch`.
        """
        return_dict = require_flag("return_dict", return_dict)
        require_compiled(self._engine, "train_on_batch")
        require_gradients("train_on_batch")
        require_learning(self._engine)
        parts = (x, y, sample_weight)
        run, _ = on_batch.run_on_batch(self._engine, "train", parts, cores, "train_on_batch", class_weight)
        return _returned(run.logs(), self.metrics_names, return_dict)

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
        """Evaluate one global batch. Arguments, logs and errors are those of `train_on_batch`, but for `class_weight`.

        Source: `keras.Model.test_on_batch`.
        """
        return_dict = require_flag("return_dict", return_dict)
        require_compiled(self._engine, "test_on_batch")
        run, _ = on_batch.run_on_batch(self._engine, "eval", (x, y, sample_weight), cores, "test_on_batch")
        return _returned(run.logs(), self.metrics_names, return_dict)

    @in_turn()
    @torch.inference_mode(False)
    def predict_on_batch(self, x: Any, *, cores: CoresArgument = None) -> Any:
        """Compute the module's outputs for one global batch.

        Args:
            x: The inputs, as in `train_on_batch`.
            cores: As in `fit`.

        Returns:
            A NumPy array, or a nest of arrays as the module returns them.

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
        """Iterate over the global batches of one epoch, as `fit` would, for a training loop of your own.

        Args:
            x: As in `fit`.
            y: Targets, with arrays.
            sample_weight: One weight a row, with arrays.
            batch_size: Rows per core (default 32), or `"global"`, as in `fit`.
            shuffle: As in `fit`.
            epoch: The epoch's number, from 0 (default 0). With PyTorch's seed it determines the order.
            cores: As in `fit`.

        Returns:
            Batches `(x, y)` or `(x, y, sample_weight)` of host tensors, or as the data yield them.

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
        now = start(cores, f"batches(cores={cores!r})")
        seed = torch.initial_seed()
        data = TrainingData(x, y, sample_weight, batch_size, shuffle)
        return data.stream(self._engine.place_on(now), now, seed).epoch(epoch)

    @in_turn()
    def reset_metrics(self) -> None:
        """Forget the logs of `train_on_batch` and `test_on_batch`, as each call of these does anyway.

        Source: `keras.Model.reset_metrics`.
        """
        on_batch.reset(self._engine)

    @property
    def metrics(self) -> list[Any]:
        """The metrics of `compile`, and the torchmetrics objects among the model's attributes and in their collections.

        The latter are updated in a step of your own, and reset for each epoch and each evaluation.

        Source: `keras.Model.metrics`.
        """
        return [*self._engine.config.metrics, *metrics_in(vars(self)).values()]

    @property
    def metrics_names(self) -> list[str]:
        """The names of a batch's logs: `"loss"`, `<output>_loss` for each of several outputs, and the metrics' names.

        Source: `keras.Model.metrics_names`.
        """
        loss = self._engine.config.loss
        parts = loss.names if isinstance(loss, (LossByOutput, SharedLoss)) else []
        own = metrics_in(vars(self))
        return ["loss", *parts, *(metric.name for metric in self._engine.config.metrics), *own]

    @in_turn()
    def summary(
        self,
        print_fn: Callable[[str], object] | None = None,
        *,
        input_size: Sequence[int] | None = None,
        x: Any = None,
    ) -> None:
        """Print the layers with their outputs and parameters, marked if tied or frozen, and the totals.

        It also prints the memory that training takes on each core and, after the first step, the formats in which that
        computed. The outputs' shapes are those of the first batch of any step; before it they are shown as `?`, unless
        a batch is given here.

        Args:
            print_fn: The function that takes the text (default: `print`).
            input_size: The shape of an input, rows included: zeros of this shape run through the module once.
            x: A batch of inputs to run through the module instead, e.g. integers, or several inputs.

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
            with torch.no_grad(), torch.random.fork_rng(devices=[]), noting_outputs(self.module, seen.shapes):
                self(x, training=False)
        own = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        state = [t for key, t in engine.state.tensors()[0].items() if key not in own]
        split = {key: sharding.axis for key, sharding in engine.state.device.shardings.items()}
        lines = [table(self.module, seen.shapes, split), memory(self.module, state, engine.state.of_a_core)]
        lines += [f"precision {engine.config.precision}: {seen.formats}"] if seen.formats else []
        (print_fn or print)("\n".join(lines))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the module's parameters.

        Args:
            recurse: False leaves out those of its layers (default True).

        Source: `torch.nn.Module.parameters`.
        """
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the module's parameters with their names.

        Args:
            prefix: The beginning of each name (default: none).
            recurse: False leaves out those of its layers (default True).

        Source: `torch.nn.Module.named_parameters`.
        """
        if not tracing():
            self._engine.require_weights("parameters")
            self._engine.expose()
        return self.module.named_parameters(prefix, recurse)

    def count_params(self) -> int:
        """Count the elements of the parameters, as `summary` does: those of a tied parameter once.

        Source: `keras.Model.count_params`.
        """
        return sum(parameter.numel() for parameter in self.module.parameters())

    def report(self, verbose: bool = False) -> Report:
        """Report the steps since the last `fit` began, their times and their problems. This waits for nothing.

        Args:
            verbose: Add torch_xla's own report, as `metrics_report` (default False).

        Returns:
            The `Report`: print it, or read its `problems` and `hints`.

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
        """The bytes of a core's memory that are in use; None where the runtime doesn't tell, as for several cores."""
        return self._engine.memory_used

    def speed(self, steps_per_second: float) -> dict[str, float]:
        """Say what training steps at some pace come to, by the steps of the epoch under way or of the last one.

        This waits for nothing. The progress bar and `TensorBoard` show it.

        Args:
            steps_per_second: The pace, in steps a second.

        Returns:
            `tokens_per_second`, over all cores, padding included, if the rows are texts: whole numbers in two
            dimensions. `share_of_peak`, from 0 to 1, on a TPU: the operations of the matrix products and convolutions
            over the peak in bfloat16 that the vendor states.

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
        """The number of training steps since the model was made."""
        return self._engine.state.numbers.step

    @property
    def rows_seen(self) -> int:
        """The number of rows in all steps since the model was made: of training, evaluation and prediction."""
        return self._engine.state.numbers.rows_seen

    @property
    def first_bad_step(self) -> int | None:
        """The first training step of the last `fit` that returned a loss or another scalar which is not finite.

        Steps count from 1 over all training of the model; None if none is known. The step is noted at no cost, where
        the host waits for the device anyway: at most 64 graphs later, and at the end of each epoch.
        """
        return self._engine.log.first_bad_step

    def write_back(self) -> None:
        """Put the current weights into the module. While steps are replayed they are held elsewhere, for speed.

        `fit` does this before it calls user code; call it only to look at the weights at another moment.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.
            BusyError: Another thread trains the model.
        """
        self._engine.require_weights("write_back")
        self._engine.state.write_back()

    @in_turn()
    def swap_ema_weights(self, to: bool | None = None) -> None:
        """Swap the weights and their moving averages (`compile(use_ema=True)`). Nothing is copied.

        Args:
            to: True puts the averages into the module, False the weights (default: whichever it doesn't have).

        Raises:
            ArgumentError: No averages are kept.
        """
        to = None if to is None else require_flag("to", to)
        if self._engine.config.ema is None and to is not False:
            raise ArgumentError("there are no moving averages of the weights: model.compile(..., use_ema=True)")
        self._engine.state.swap_ema(to)

    @in_turn()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's parameters and buffers as host tensors, by name. This waits for the device, once.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.

        Source: `torch.nn.Module.state_dict`.
        """
        engine = self._engine
        own = named_tensors(self.module)
        engine.state.write_back()
        unique = {id(tensor): tensor for tensor in own.values()}
        with engine.noticing_loss():
            host = dict(zip(unique, copies(list(unique.values()), "state"), strict=True))
        return {name: host[id(tensor)] for name, tensor in own.items()}

    @in_turn()
    def load_state_dict(self, state: Mapping[str, Tensor], skip_mismatch: bool = False) -> None:
        """Load weights into the module in place, wherever it is.

        If the old weights were lost with a step that failed on the device, the optimizer starts without state, with a
        warning.

        Args:
            state: Host tensors by name, as `state_dict` gives them.
            skip_mismatch: Load what fits and warn of the rest, instead of raising.

        Raises:
            WeightsError: A name is missing or unknown, a shape differs, or the values of tied weights do.
            StateLostError: A lost tensor is not among the given ones.
        """
        engine = self._engine
        skip_mismatch = require_flag("skip_mismatch", skip_mismatch)
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ArgumentError(
                f"state must be a dict of tensors by name, as state_dict gives it, got {short_repr(state)}"
            )
        own = named_tensors(self.module)
        fitting = match_weights(own, state, skip_mismatch)
        if engine.state.device.lost:
            engine.reset({id(own[name]): value for name, value in fitting.items()})
            warn("the optimizer starts without state: it was lost with a step that failed")
            return
        engine.state.write_back()
        targets = [own[name] for name in fitting]
        shardings = engine.state.device.shardings
        copy_into(targets, list(fitting.values()), engine.state.placement, shardings)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the parameters and buffers as arrays, in the order of `state_dict`. This waits for the device, once.

        Source: `keras.Model.get_weights`.
        """
        return [as_array(value) for value in self.state_dict().values()]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Load arrays into the module, in the order of `get_weights`.

        Args:
            weights: An array or tensor for each parameter and buffer.

        Raises:
            WeightsError: There are too few or too many, or a shape differs.

        Source: `keras.Model.set_weights`.
        """
        names = list(named_tensors(self.module))
        if not isinstance(weights, (list, tuple)):
            raise ArgumentError(f"weights must be a list of arrays, as get_weights gives it, got {short_repr(weights)}")
        if len(weights) != len(names):
            given = counted(len(weights), "weight")
            raise WeightsError(f"the module has {counted(len(names), 'tensor')}, got {given}: see get_weights")
        try:
            tensors = list(map(torch.as_tensor, weights))
        except (TypeError, ValueError, RuntimeError) as error:
            raise WeightsError(f"weights must hold arrays or tensors, got {short_repr(weights)}") from error
        self.load_state_dict(dict(zip(names, tensors, strict=True)))

    @in_turn()
    def save(self, filepath: str | os.PathLike[str]) -> None:
        """Save the weights, the optimizer and the arguments of `compile`, for `tpufit.load`.

        The module itself is never serialised: whoever loads the folder builds the net.

        Args:
            filepath: A folder, written as a whole or not at all; one that `save` made before is replaced.

        Raises:
            CheckpointNotWrittenError: Something else is there, the file system refused, or a weight isn't finite.
            WeightsError: The module keeps something in its state that isn't a tensor.

        Source: `keras.Model.save`.
        """
        require_path("filepath", filepath)
        save_checkpoint(filepath, take_checkpoint(self._engine, outside_of_fit(self._engine)))
        self._engine.log.last_saved = os.fspath(filepath)

    def save_checkpoint(self, writer: AsyncCheckpointWriter, metric: Score | None = None) -> None:
        """Request a checkpoint of the whole training, for callbacks: it is taken between steps, after all callbacks.

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

        Source: `keras.Model.save_weights`.
        """
        require_path("filepath", filepath)
        save_weights(self._engine, filepath, require_flag("finite_only", finite_only))
        self._engine.log.last_saved = os.fspath(filepath)

    def load_weights(self, filepath: str | os.PathLike[str], skip_mismatch: bool = False) -> None:
        """Load weights from a safetensors file into the module, in place.

        Args:
            filepath: A path ending in `.safetensors`.
            skip_mismatch: Load what fits and warn of the rest, instead of raising.

        Raises:
            WeightsError: The file is no safetensors file, or doesn't fit the module.
            FileNotFoundError: There is no such file.

        Source: `keras.Model.load_weights`.
        """
        require_path("filepath", filepath)
        self.load_state_dict(read_weights(filepath), skip_mismatch)

    @in_turn()
    def export(self, filepath: str | os.PathLike[str], example: Any) -> None:
        """Write the module as a program that runs without tpufit and without the module's class.

        `torch.export.load(filepath).module()` of a `.pt2` file, or onnxruntime with an `.onnx` file, computes what
        `predict` does in float32, with the weights of this moment, for any number of rows. The model's own module stays
        where and as it is.

        Args:
            filepath: A path ending in `.pt2`, or in `.onnx` with the extra `tpufit[onnx]`. The file is replaced
                atomically, or not at all.
            example: A batch of inputs: a tensor or array, or several of them in a tuple or dict. Only their types and
                shapes count. After `compile(precision="bf16-true")` the program's inputs are bfloat16.

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

    @in_turn(alone=True)
    def to_cpu(self) -> nn.Module:
        """Move the module and the optimizer's state back to the host, in place. The next `fit` moves them again.

        Returns:
            The very module that was given, now an ordinary PyTorch module on the CPU.
        """
        self._engine.move_to(HOST)
        return self.module

    @property
    def learning_rate(self) -> float:
        """The actual learning rate of the first group; setting it keeps the groups' proportions.

        A new rate takes effect at the next step and costs nothing: it is an input of the graph. `model.optimizer` has
        the same attribute, as in Keras's guides.
        """
        return optimizers.rates(optimizers.required(self.optimizer))[0]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        optimizers.set_rate(optimizers.required(self.optimizer), rate)

    def higher_is_better(self, name: str) -> bool | None:
        """Say if a log gets better as it rises, for callbacks with `mode="auto"`.

        Args:
            name: The log's name, with or without `val_`.

        Returns:
            True or False; None if its metric doesn't say.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"name must be the name of a log, such as 'val_loss', got {short_repr(name)}")
        plain = name.removeprefix("val_")
        if plain == "loss":
            return False
        found = {name: metric.higher_is_better for name, metric in metrics_in(vars(self)).items()}
        found |= {metric.name: metric.higher_is_better for metric in self._engine.config.metrics}
        return found.get(plain)


_: type[TrainedModel] = Model  # mypy proves that it has all that callbacks may touch


def _returned(logs: Mapping[str, Any], names: Sequence[str], return_dict: bool) -> Any:
    """Return logs in the form of Keras's methods: those with these names, then a step's own by name."""
    if return_dict:
        return logs
    values = [logs[name] for name in (*names, *sorted(logs.keys() - set(names))) if name in logs]
    return values[0] if len(values) == 1 else values


def _by_compiler(engine: Engine, train: TrainingData, cores: Cores, memory: int) -> int | None:
    """Find the largest batch by the TPU's compiler, for `batch_size="auto"`; None where that is missing."""
    from .preflight import largest_batch  # here, because few who import tpufit will need it

    return largest_batch(engine, train, cores, memory)


@in_turn(alone=True)
def load(path: str | os.PathLike[str], net: nn.Module, compile: bool = True) -> Model:
    """Load a model with the weights, the optimizer and the arguments of `compile` that it was saved with.

    A checkpoint contains no code: you build the net. If an argument of `compile` was an object, such as a loss module
    or a metric, the model is not compiled: call `compile` as before, and `fit(resume=path)` restores the optimizer's
    state too.

    Args:
        path: The folder of `Model.save`, or that of a `ModelCheckpoint`, whose newest checkpoint is loaded.
        net: A module of the same architecture; its weights are overwritten.
        compile: True (default) compiles the model if possible.

    Returns:
        The model, on the host.

    Raises:
        CheckpointMissingError, CheckpointDamagedError: There is nothing to load, or a file isn't what was written.
        CheckpointMismatchError: The checkpoint is of another net; the message names what differs. The net is as it was.

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
    checkpoint = named_checkpoint(path)
    model = Model(net)
    own = named_tensors(net)
    left_out = checkpoint.state["model"].get("left_out", [])
    weights = {name: own[name].detach().clone() for name in left_out if name in own} | dict(checkpoint.weights)
    arguments = checkpoint.state.get("compile") if compile else None
    if arguments is None:
        check_weights(own, weights, dtypes=False)
        model.load_state_dict(weights)
        return model
    # Before `compile`, so that a refused net is as it was; "bf16-true" has to change its dtypes first.
    if arguments.get("precision") != "bf16-true":
        check_weights(own, weights)
    as_saved = {"exclude_from_weight_decay": None, "layer_decay": None}  # the saved groups are split already
    try:
        options = checkpoint.state["optimizers"]["optimizer"]
        model.compile(optimizer=lambda parameters: _rebuilt(net, options), **(arguments | as_saved))
    except (TypeError, LookupError) as error:
        raise CheckpointDamagedError(
            f"{path} can't be what was written: compile refuses its arguments ({str(error)[:200]})"
        ) from error
    model.to_cpu()
    restore(model._engine, checkpoint)
    return model


def _rebuilt(net: nn.Module, options: Mapping[str, Any]) -> Optimizer:
    """Build a PyTorch optimizer with the saved groups and options."""
    parameters = dict(net.named_parameters())
    unknown = [name for group in options["groups"] for name in group["params"] if name not in parameters]
    if unknown:
        raise CheckpointMismatchError(f"the checkpoint's optimizer has parameters that the net lacks: {unknown[:8]}")
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in options["groups"]]
    kind: Any = optimizers.NAMES[options["class"].lower()]
    optimizer: Optimizer = kind(groups)
    return optimizer
