"""`Model`: Keras's `compile`, `fit`, `evaluate` and `predict` around any `torch.nn.Module`."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import losses, optimizers
from . import metrics as metric_objects
from .callbacks import Callback, History
from .callbacks.callback_list import CallbackList
from .callbacks.progbar_logger import ProgbarLogger, resolve_verbose
from .checkpoint import (
    AsyncCheckpointWriter,
    Checkpoint,
    Score,
    begin_anew,
    find_checkpoint,
    first_broken,
    is_plain,
    match_weights,
    named_tensors,
    outside_of_fit,
    read_weights,
    take,
    write_weights,
)
from .checkpoint import save as save_checkpoint
from .data import Stream, stream, train_validation_split
from .data.batches import as_tensors
from .diagnostics.report import Pass, Report
from .diagnostics.summary import memory, noting_outputs, table
from .errors import ArgumentError, CheckpointNotWrittenError, NotCompiledError, WeightsError, require_whole
from .losses import ClassWeight, LossArgument, LossByOutput, LossWeightsArgument
from .metrics import MetricsArgument
from .optimizers import EMAConfig, GradientConfig, OptimizerArgument
from .runtime import (
    HOST,
    Cores,
    CoresArgument,
    DeviceState,
    Placement,
    available,
    copy_into,
    counts,
    metrics_report,
    platform,
    set_matmul_precision,
    settled,
    start,
    users_line,
)
from .step import StepRunner, copies, fetch
from .step import precision as precisions
from .trainer import loop
from .trainer.lr_find import LRCurve, Sweep, find
from .trainer.predictions import Predictions, as_array

Callbacks = Callback | Sequence[Callback] | None
_SCALINGS: dict[str | None, Callable[[int], float]] = {
    "linear": float,
    "sqrt": lambda cores: cores**0.5,
    None: lambda cores: 1.0,
}


class Model(loop.Trainee):
    """A `torch.nn.Module` with Keras's training methods, on one core or all of them.

    Args:
        module: Any module. It is used as it is: its parameters move to the device in place, so ties, optimizers built
            on them and your own references to them stay valid.

    Attributes:
        module: The module.
        optimizer: The optimizer of `compile`; the rates in its `param_groups` are numbers that may be set at any time.
        metrics: The metrics of `compile`.
        history: The `History` of the last `fit`.
        input_bound: The share of the last epoch's time in which the device waited for data, from 0 to 1; while one is
            under way, of its time so far.
        first_bad_step: The first training step of the last `fit`, counted from 1 over all of them, that returned a loss
            or another scalar which is not finite; None if none is known. It is found out at no cost, a few steps late.
        stop_training: Set it to True in a callback to end training after the current batch.
        out_of_time: Whether the last `fit` has ended because its `max_time` was over.

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

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"tpufit.Model wraps a torch.nn.Module (an instance), got {module!r}")
        super().__init__(module)
        self.history: History | None = None
        self.input_bound: float | None = None
        self._passes: deque[Pass] = deque(maxlen=1000)
        self._counted = counts()  # when the last fit began
        self.stop_training = self.stop_evaluating = self.stop_predicting = self.out_of_time = False
        self._batch_runs: dict[str, StepRunner] = {}
        self._scale_lr: str | None = "linear"
        self._matmul_precision = "default"
        self._compiled = self._run_eagerly = False
        self._own = {*vars(self), "_own"}

    def compile(
        self,
        optimizer: OptimizerArgument,
        loss: LossArgument | None = None,
        metrics: MetricsArgument = None,
        *,
        loss_weights: LossWeightsArgument = None,
        weighted_metrics: MetricsArgument = None,
        precision: str = "fp32",
        matmul_precision: str = "default",
        scale_lr: str | None = "linear",
        jit_compile: str | bool = "auto",
        run_eagerly: bool = False,
        steps_per_execution: int | str = 1,
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        global_clip_norm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
    ) -> None:
        """Say how to train.

        Args:
            optimizer: A name of `torch.optim` in lower case (`"adamw"`), a class, a function of the parameters
                (`lambda params: torch.optim.SGD(params, lr=0.1)`), or an optimizer built on the module's parameters.
            loss: A name of `torch.nn.functional` (`"cross_entropy"`), a loss module or a function of (prediction,
                target). For a module of several outputs a dict by their names, or a list for a tuple of outputs; None
                for an output that has no loss. It may be left out where `compute_loss` or `train_step` is overridden.
            metrics: Names (`"accuracy"`) and torchmetrics objects, in a list or by name in a dict. For several outputs,
                in the form of `loss`: `{"a": ["accuracy"], "b": "mse"}` or `[["accuracy"], "mse"]`. A dict goes by the
                outputs if `loss` is a dict or if one of its values is a list, else by the metrics' names. Labels that
                the loss leaves out (`ignore_index`) are none to `"accuracy"` and `"auroc"`, and if it is not the
                default of -100 to the other names either.
            loss_weights: What each output's loss is multiplied with in the total, in the form of `loss` (default: 1).
            weighted_metrics: Metrics that take `sample_weight` and `class_weight` into account, in the same forms:
                `"accuracy"`, `"mean_absolute_error"`, `"mean_squared_error"`, and torchmetrics objects whose `update`
                takes a weight. If one of `metrics` has the same name, theirs begins with `weighted_`.
            precision: `"fp32"` (default); `"bf16"`: the module computes in bfloat16 by autocast; weights, optimizer
                and loss stay in float32; or `"bf16-true"`: the module itself becomes bfloat16, with its optimizer.
            matmul_precision: How exactly a TPU multiplies float32 matrices: `"default"` in bfloat16, `"high"` or
                `"highest"` nearly as float32 does. A CPU is exact in any case.
            scale_lr: How the learning rate grows with the cores, as the batch does: `"linear"` (default; Goyal et al.,
                "Accurate, large minibatch SGD", 2017), `"sqrt"` or None. The rate given here is multiplied once, at the
                first `fit`; rates set later are taken as they are.
            jit_compile: `"auto"` (default): a step is traced once and then replayed, if it can be shown that this gives
                the same; else it is traced on every call, and a warning says why. True: that is an error. False: always
                trace.
            run_eagerly: Run the steps in plain PyTorch on the host, to debug them: print, breakpoints and all.
            steps_per_execution: How many steps run as one graph (default 1). More cost less of the host's time; the
                batch hooks of callbacks are then called once for so many. `"auto"`: 1 at first, then up to 16 if the
                steps are so short that starting them is what takes the time.
            accumulate_steps: How many batches make one step of the optimizer (default 1), which takes the mean gradient
                over all their rows. An epoch ends with a step, over the batches that are left.
            clip_norm: Scale each parameter's gradient to at most this norm.
            clip_value: Cut each element of the gradients off at this absolute value.
            global_clip_norm: Scale all gradients together to at most this norm, as `clip_grad_norm_` does. On any
                number of cores they are the gradients of the whole batch. At most one of the three can be given.
            use_ema: Keep an exponential moving average of the weights, which `fit` puts in their place at its end;
                `SwapEMAWeights` does it for validation too.
            ema_momentum: How much of the average each step keeps (default 0.99).
            ema_overwrite_frequency: After how many steps the weights become the average (default: never before the
                end).

        Raises:
            UnknownNameError: A name that nothing goes by; the nearest ones are suggested.
            ArgumentError: A value of the wrong kind, float16 among them.

        Source: `keras.Model.compile`.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "optimizer")}
        if scale_lr not in _SCALINGS:
            raise ArgumentError(f"scale_lr must be 'linear', 'sqrt' or None, got {scale_lr!r}")
        if jit_compile not in ("auto", True, False):
            raise ArgumentError(f"jit_compile must be 'auto', True or False, got {jit_compile!r}")
        if steps_per_execution != "auto":
            require_whole("steps_per_execution", steps_per_execution, otherwise="'auto'")
        precisions.check(precision)
        precisions.check_matmul(matmul_precision)
        gradients = GradientConfig(accumulate_steps, clip_norm, clip_value, global_clip_norm)
        ema = EMAConfig(ema_momentum, ema_overwrite_frequency) if use_ema else None
        built_loss = losses.build(loss, loss_weights)
        outputs = built_loss.outputs if isinstance(built_loss, LossByOutput) else None
        ignored = built_loss.ignored if built_loss is not None else None
        built_metrics = metric_objects.build(metrics, weighted_metrics, outputs, ignored)
        self.optimizer = optimizers.build(optimizer, self.module)
        if precision == "bf16-true":
            self.write_back()
            precisions.to_bfloat16([*self.module.parameters(), *self.module.buffers()])
            self._state = DeviceState([])
        self._matmul_precision = matmul_precision
        self._loss, self.metrics, self._precision, self._scale_lr = built_loss, built_metrics, precision, scale_lr
        self._jit_compile, self._run_eagerly, self._steps_per_execution = jit_compile, run_eagerly, steps_per_execution
        self._gradients, self._ema = gradients, ema
        self._accumulators.clear()
        self._averages.clear()
        self._rates.clear()
        self._programs.clear()
        self._chosen_steps.clear()
        self._batch_runs.clear()
        self._formats = None
        # What a checkpoint can hold of these arguments, for `tpufit.load`.
        rebuilt = type(self.optimizer).__name__.lower() in optimizers.NAMES and is_plain(given)
        self._recipe = given if rebuilt else None
        self._compiled = True

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Container[int] = 1,
        *,
        validation_step_freq: int | float | None = None,
        limit: int | float | None = None,
        max_time: float | timedelta | None = None,
        resume: bool | str | os.PathLike[str] = False,
        strict: bool = False,
        cores: CoresArgument = None,
    ) -> History:
        """Train for a number of epochs.

        Args:
            x: Arrays or tensors (or a tuple or dict of them), a map-style or iterable `Dataset`, a `DataLoader`, or
                any iterable of batches `(x, y)`.
            y: Targets, with arrays.
            batch_size: Rows per core (default 32): the global batch is `batch_size * cores`. A `DataLoader`'s batches
                are joined likewise, an iterable's too.
            epochs: The number of the last epoch: training runs from `initial_epoch` to it.
            verbose: `"auto"` (default), 0 (silent), 1 (a progress bar) or 2 (a line an epoch).
            callbacks: `Callback` objects.
            validation_split: The share of the rows, taken from the end before shuffling, to validate on (arrays and
                map-style datasets).
            validation_data: `(x, y)` or `(x, y, sample_weight)` as arrays, or a data set, loader or iterable.
            shuffle: Whether arrays and map-style datasets are shuffled anew each epoch; loaders and iterables never.
            class_weight: Weights of the rows by their class, `{0: 1.0, 1: 5.0}`, for training only; classes that are
                left out weigh 1. They are multiplied with `sample_weight`, and go with data of any form.
            sample_weight: One weight a row, with arrays, or one for each element of a sequence, shape `(rows, time)`;
                for several outputs one array for all, or one for each in the form of `y`.
            initial_epoch: The epoch to begin with, from 0.
            steps_per_epoch: Global batches an epoch; needed for endless data.
            validation_steps: Batches a validation, each time from the start of its data.
            validation_batch_size: Rows per core when validating (default: `batch_size`).
            validation_freq: Validate at the end of every so many epochs, or of the epochs (from 1) in a container.
            validation_step_freq: Validate inside each epoch too, after every so many of its steps, or as a float after
                every such share of them (`0.25`: four times an epoch). Each calls `on_test_begin` to `on_test_end`; the
                epoch's logs have the `val_*` of its last validation. With `steps_per_execution=k` they come after the
                step's group.
            limit: Train and validate on so many batches an epoch only, or as a float on such a share of them.
            max_time: Stop after the batch that is under way when so much time has passed: seconds, or a `timedelta`.
            resume: True: go on from the newest checkpoint of the `ModelCheckpoint(folder)` or `BackupAndRestore` among
                the callbacks, or begin if there is none. `"best"`: from the best one. `"next_epoch"`: from the newest,
                but leave out the rest of its epoch. A path: a run's folder, or one checkpoint, which must be whole.
                On the same number of cores it goes on bit for bit; `initial_epoch` has no effect then.
            strict: Whether what makes steps slow is an error at the user's line (default False): in training and
                validation a value read from the device, an operation that runs on the host, a step that can't be
                replayed, and after the first pass over the data a new graph. The weights stay as they were.
            cores: `"auto"` (every TPU core; one of the CPU), a count, or `[i]` for one particular core. The first call
                in a process settles it, see `tpufit.init`.

        Returns:
            The `History`: its `history` holds a list of floats for each log, one an epoch.

        Raises:
            NotCompiledError: `compile` has not been called.
            ArgumentError, DataError, CoresError: See their messages; raised before anything is compiled.
            LabelError: A class label outside the module's classes.
            CallbackError: A callback raised; the others' `on_train_end` has run.
            CheckpointError: A checkpoint to go on from is missing, damaged, or of something else; or too many could not
                be written.
            KeyboardInterrupt, SystemExit: After Ctrl-C or SIGTERM, once the step is over and saved.
            StrictError: With `strict`, see there.

        Source: `keras.Model.fit`.
        """
        self._require_compiled("fit")
        verbosity, seconds = resolve_verbose(verbose), _seconds(max_time)
        require_whole("epochs", epochs)
        require_whole("initial_epoch", initial_epoch, 0)
        if strict and self._run_eagerly:
            raise ArgumentError(
                "strict=True looks at graphs, and compile(run_eagerly=True) makes none: use one of them"
            )
        strict_at = f"at {users_line()}" if strict else ""
        weigher = None if class_weight is None else ClassWeight(class_weight)
        if weigher is not None and isinstance(self._loss, LossByOutput):
            raise ArgumentError(
                "class_weight goes with one output only, and the loss has several: pass sample_weight in the form of y"
            )
        given = _as_list(callbacks)
        resumed = find_checkpoint(resume, given)
        seed = torch.initial_seed() if resumed is None else resumed.state["model"]["seed"]
        settled_cores = start(cores, f"fit(cores={cores!r})")
        if validation_split and validation_data is None:
            x, y, sample_weight, validation_data = train_validation_split(x, y, sample_weight, validation_split)
        place = self._place_on(settled_cores)
        train = self._training_stream((x, y, sample_weight), batch_size, settled_cores, seed, shuffle, steps_per_epoch)
        validation = None
        if validation_data is not None:
            size = validation_batch_size if validation_batch_size is not None else batch_size
            held_out = self._evaluation_stream(validation_data, size, settled_cores, validation_steps)
            every = None if validation_step_freq is None else _step_freq(validation_step_freq, train.steps)
            validation = loop.Validation(held_out, validation_freq, every)
        elif validation_step_freq is not None:
            raise ArgumentError("validation_step_freq needs validation_data or validation_split to validate on")
        if limit is not None:
            for part in (train, validation.stream) if validation is not None else (train,):
                part.limit(limit)
        if resumed is not None and self._state.lost:
            begin_anew(self, resumed)
        self._move_to(place)
        params = {"epochs": epochs, "steps": train.steps, "verbose": verbosity}
        before = self._begin_training(weigher, settled_cores, seed)
        if verbosity:
            print(self._headline(settled_cores, train.batch_size, before), flush=True)
            if resumed is not None:
                print(f"going on from step {resumed.step}", flush=True)
        epochs_due = range(initial_epoch, epochs)
        return self._train(train, validation, given, params, epochs_due, seconds, strict_at, resumed)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
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
            batch_size: Rows per core (default 32).
            verbose: As in `fit`.
            sample_weight: As in `fit`.
            steps: Batches to evaluate (default: all).
            callbacks: `Callback` objects.
            return_dict: Return the values by name.
            cores: As in `fit`.

        Returns:
            The loss alone if there are no metrics, else a list `[loss, *metrics]`, with the outputs' losses after the
            total if there are several; a dict if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Source: `keras.Model.evaluate`.
        """
        self._require_compiled("evaluate")
        verbosity = resolve_verbose(verbose)
        settled_cores = start(cores, f"evaluate(cores={cores!r})")
        data = x if y is None and sample_weight is None else (x, y, sample_weight)[: 2 if sample_weight is None else 3]
        held_out = self._evaluation_stream(data, batch_size, settled_cores, steps, name="x")
        self._move_to(self._place_on(settled_cores))
        params = {"epochs": 1, "steps": held_out.steps, "verbose": verbosity}
        logs = loop.evaluate(self, held_out, self._callbacks(_as_list(callbacks), params))
        return _returned(logs, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        *,
        out: Any = None,
        cores: CoresArgument = None,
    ) -> Any:
        """The module's outputs for data, every row, in order.

        Before anything has settled the cores, a `predict` without `cores` on a machine without a TPU runs in plain
        PyTorch and settles nothing, so that a `fit(cores=8)` may follow.

        Args:
            x: As in `fit`; targets that the data yield are left aside.
            batch_size: Rows per core (default 32).
            verbose: As in `fit`.
            steps: Batches to predict (default: all).
            callbacks: `Callback` objects.
            out: For more than memory holds, the path of a `.npy` file that the rows are written to as they come; for
                several outputs a path for each, in their form: `{"a": "a.npy", "b": "b.npy"}`. A file that is there is
                replaced, once all rows are written.
            cores: As in `fit`.

        Returns:
            A NumPy array with the rows of all batches, or a nest of arrays as the module returns them; with `out`, they
            are the files, mapped into memory to be read. Beside the result a few batches are held, and no more.

        Raises:
            ArgumentError, CoresError, BatchError: As in `fit`.
            DataError: As in `fit`; or the outputs of some batches have rows of another shape than others.
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
        verbosity = resolve_verbose(verbose)
        place = self._place if cores is None and settled() is None and self._host_is_equal() else None
        if place is None:
            place = self._place_on(start(cores, f"predict(cores={cores!r})"))
        data = stream(x, batch_size=batch_size, cores=place.count, steps=steps, restart=True, places=place.places)
        predictions = Predictions(data.steps, out)
        self._move_to(place)
        params = {"epochs": 1, "steps": data.steps, "verbose": verbosity}
        with predictions.committed():
            loop.predict(self, data, self._callbacks(_as_list(callbacks), params), predictions.add)
        return predictions.result()

    def lr_find(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        sample_weight: Any = None,
        start_lr: float = 1e-7,
        end_lr: float = 10.0,
        steps: int = 100,
        stop_factor: float = 4.0,
        smoothing: float = 0.9,
        *,
        cores: CoresArgument = None,
    ) -> LRCurve:
        """Find a learning rate: train for some steps while the rate grows from tiny to too large, and undo it all.

        Each step has a rate of its own and a whole global batch of the shuffled data, which begin anew when they end; a
        short last batch is left out. The rates are inputs of the step's graph, which `fit` then finds compiled, and the
        losses are read ten steps at a time. Afterwards weights, buffers, optimizer, rates, modes and random numbers are
        to the bit what they were, also after an error or Ctrl-C. Only data that keep their own place, such as an
        iterator, have moved on, and so have lists and objects that a step's Python changes.

        Args:
            x: As in `fit`.
            y: Targets, with arrays.
            batch_size: Rows per core (default 32).
            sample_weight: One weight a row, with arrays.
            start_lr: The first rate (default 1e-7). It and `end_lr` are actual rates, which the cores don't scale; with
                several groups the first gets them, and the others theirs in proportion.
            end_lr: The last rate (default 10).
            steps: How many rates are tried (default 100), evenly on a logarithmic scale.
            stop_factor: It ends early when the smoothed loss is so many times the lowest (default 4); also when a loss
                is infinite or not a number.
            smoothing: How much of the average of the losses before is kept at each step (default 0.9).
            cores: As in `fit`.

        Returns:
            The `LRCurve`: `lrs`, `losses`, `smoothed`, `suggestion` and `plot()`. The suggestion is an actual rate, as
            `OneCycle(max_lr=...)` and `model.learning_rate` take it, or None, with a warning, if the loss never fell.

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
        self._require_compiled("lr_find")
        sweep = Sweep(start_lr, end_lr, steps, stop_factor, smoothing)
        settled_cores = start(cores, f"lr_find(cores={cores!r})")
        seed = torch.initial_seed()
        data = self._training_stream((x, y, sample_weight), batch_size, settled_cores, seed)
        self._move_to(self._place_on(settled_cores))
        return find(self, data, sweep, seed)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
        *,
        cores: CoresArgument = None,
    ) -> Any:
        """One step of training on one global batch, for a training loop of your own.

        The logs are running means over the batches since `reset_metrics`, or since `fit` or a `compile`, as in Keras.

        Args:
            x: The inputs: arrays, tensors or a nest of them, with the rows of all cores.
            y: The targets.
            sample_weight: One weight a row.
            return_dict: Return the logs by name. They wait for the device only if one is read; without this, they do.
            cores: As in `fit`.

        Returns:
            The loss alone if there are no metrics, else a list `[loss, *metrics]`; a mapping if `return_dict`.

        Raises:
            NotCompiledError, ArgumentError, DataError, CoresError, LabelError: As in `fit`.

        Source: `keras.Model.train_on_batch`.
        """
        self._require_compiled("train_on_batch")
        run, _ = self._run_on_batch("train", "train_on_batch", (x, y, sample_weight), cores)
        return _returned(run.logs(), return_dict)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
        *,
        cores: CoresArgument = None,
    ) -> Any:
        """Evaluate one global batch. Arguments, logs and errors are those of `train_on_batch`.

        Source: `keras.Model.test_on_batch`.
        """
        self._require_compiled("test_on_batch")
        run, _ = self._run_on_batch("eval", "test_on_batch", (x, y, sample_weight), cores)
        return _returned(run.logs(), return_dict)

    def predict_on_batch(self, x: Any, *, cores: CoresArgument = None) -> Any:
        """The module's outputs for one global batch.

        Args:
            x: The inputs, as in `train_on_batch`.
            cores: As in `fit`.

        Returns:
            A NumPy array, or a nest of arrays as the module returns them.

        Source: `keras.Model.predict_on_batch`.
        """
        _, outputs = self._run_on_batch("predict", "predict_on_batch", (x, None, None), cores)
        predictions = Predictions(batches=1)
        predictions.add(fetch(outputs[0], "outputs"))
        return predictions.result()

    def batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        epoch: int = 0,
        *,
        cores: CoresArgument = None,
    ) -> Iterator[Any]:
        """The global batches of one epoch, as `fit` would read them, for a training loop of your own.

        Args:
            x: As in `fit`.
            y: Targets, with arrays.
            sample_weight: One weight a row, with arrays.
            batch_size: Rows per core (default 32).
            shuffle: As in `fit`.
            epoch: The epoch's number, from 0. With PyTorch's seed it determines the order.
            cores: As in `fit`.

        Returns:
            Batches `(x, y)` or `(x, y, sample_weight)` of host tensors, or as the data yield them.

        Example:
            >>> import torch, tpufit
            >>> x, y = torch.randn(6, 2), torch.tensor([0, 0, 0, 1, 1, 1])
            >>> model = tpufit.Model(torch.nn.Linear(2, 2))
            >>> model.compile("sgd", "cross_entropy")
            >>> for epoch in range(2):
            ...     model.reset_metrics()
            ...     for batch in model.batches(x, y, batch_size=4, epoch=epoch):
            ...         logs = model.train_on_batch(*batch, return_dict=True)
            >>> sorted(logs)
            ['loss']
        """
        settled_cores, seed = start(cores, f"batches(cores={cores!r})"), torch.initial_seed()
        return self._training_stream((x, y, sample_weight), batch_size, settled_cores, seed, shuffle).epoch(epoch)

    def reset_metrics(self) -> None:
        """Begin the running means of `train_on_batch` and `test_on_batch` anew.

        Source: `keras.Model.reset_metrics`.
        """
        self._batch_runs.clear()

    @property
    def metrics_names(self) -> list[str]:
        """The names of the logs of a batch: `"loss"`, of several outputs each one's `<output>_loss`, and the metrics'.

        Source: `keras.Model.metrics_names`.
        """
        parts = self._loss.names if isinstance(self._loss, LossByOutput) else []
        return ["loss", *parts, *(metric.name for metric in self.metrics)]

    def summary(
        self,
        print_fn: Callable[[str], object] | None = None,
        *,
        input_size: Sequence[int] | None = None,
        x: Any = None,
    ) -> None:
        """Print the layers with their outputs and parameters, which of these are tied or frozen, and the totals.

        Also what training keeps in the memory of each core, and after a first step in which formats it computed. The
        outputs' shapes are those of the first batch of any step; before it they are shown as `?`, unless a batch is
        given here.

        Args:
            print_fn: What takes the text (default: `print`).
            input_size: The shape of an input, with its rows: zeros of this shape are run through the module once.
            x: A batch of inputs to run through the module instead, e.g. integers, or several inputs.

        Source: `keras.Model.summary`.
        """
        if input_size is not None:
            x = torch.zeros(*input_size)
        if x is not None:
            self._layer_outputs.clear()
            with loop.modes_kept(self), torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.module.eval()
                with noting_outputs(self.module, self._layer_outputs):
                    self(x)
        own = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        state = [t for key, t in self._state_tensors()[0].items() if key not in own]
        lines = [table(self.module, self._layer_outputs), memory(self.module, state)]
        lines += [f"precision {self._precision}: {self._formats}"] if self._formats else []
        (print_fn or print)("\n".join(lines))

    def report(self, verbose: bool = False) -> Report:
        """What the steps did since the last `fit` began, what they took, and what is wrong. It waits for nothing.

        Args:
            verbose: Also give the report of torch_xla's own, in `metrics_report` (default False).

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
        train = self._programs.get("train")
        return Report(
            passes=tuple(self._passes),
            counts=counts() - self._counted,
            traced={role: program.traced_because for role, (program, _) in self._programs.items() if program.met},
            donated=train[0].donated if train else 0,
            cores=self._place.count,
            available=available(self._place.count),
            joined=self._steps_per_execution != 1,
            metrics_report=metrics_report() if verbose else "",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The module's parameters and buffers as host tensors, by name. This waits for the device, once.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.

        Source: `torch.nn.Module.state_dict`.
        """
        self.write_back()
        own = named_tensors(self.module)
        unique = {id(tensor): tensor for tensor in own.values()}
        with self._noticing_loss():
            host = dict(zip(unique, copies(list(unique.values()), "state"), strict=True))
        return {name: host[id(tensor)] for name, tensor in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], skip_mismatch: bool = False) -> None:
        """Put weights into the module in place, wherever it is.

        If the ones there were lost with a step that failed on the device, the optimizer begins anew, with a warning.

        Args:
            state: Host tensors by name, as `state_dict` gives them.
            skip_mismatch: Load what fits and warn of the rest, instead of raising.

        Raises:
            WeightsError: A name is missing or unknown, a shape differs, or the values of tied weights do.
            StateLostError: A tensor that was lost is not among them.
        """
        own = named_tensors(self.module)
        fitting = match_weights(own, state, skip_mismatch)
        if self._state.lost:
            self.begin_anew({id(own[name]): value for name, value in fitting.items()})
            warnings.warn("the optimizer begins anew: its state was lost with a step that failed", stacklevel=2)
            return
        self.write_back()
        copy_into([own[name] for name in fitting], list(fitting.values()), self._place)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """The module's parameters and buffers as arrays, in the order of `state_dict`. This waits for the device, once.

        Source: `keras.Model.get_weights`.
        """
        return [as_array(value) for value in self.state_dict().values()]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Put arrays into the module, in the order of `get_weights`.

        Args:
            weights: One array or tensor for each.

        Raises:
            WeightsError: Too few or too many, or another shape.

        Source: `keras.Model.set_weights`.
        """
        names = list(named_tensors(self.module))
        if len(weights) != len(names):
            raise WeightsError(f"the module has {len(names)} tensors, got {len(weights)} weights: see get_weights")
        self.load_state_dict(dict(zip(names, map(torch.as_tensor, weights), strict=True)))

    def save(self, filepath: str | os.PathLike[str]) -> None:
        """Save the weights, the optimizer and the arguments of `compile`, for `tpufit.load`.

        No module is ever serialised; whoever loads it builds the net.

        Args:
            filepath: A folder, which is written as a whole or not at all; one that `save` has made is replaced.

        Raises:
            CheckpointNotWrittenError: Something else is there, the file system refused, or a weight isn't finite.
            WeightsError: The module keeps something in its state that isn't a tensor.

        Source: `keras.Model.save`.
        """
        state = outside_of_fit() | {"compile": self._recipe}
        save_checkpoint(filepath, take(self, state))
        self._last_saved = os.fspath(filepath)

    def save_checkpoint(self, writer: AsyncCheckpointWriter, metric: Score | None = None) -> None:
        """Have the whole state of training written, for callbacks: once all of them have had their turn, between steps.

        Args:
            writer: What writes it.
            metric: How good it is, if that is known.
        """
        self._wanted_saves.append((writer, metric))

    def save_weights(self, filepath: str | os.PathLike[str], *, finite_only: bool = False) -> None:
        """Save the weights as safetensors. The file is replaced in one instant, or not at all.

        Args:
            filepath: A path ending in `.safetensors`.
            finite_only: Refuse to save weights that aren't finite (default False).

        Raises:
            ArgumentError: Another suffix.
            CheckpointNotWrittenError: `finite_only`, and a weight holds NaN or infinities.
            OSError: The file system refused.

        Source: `keras.Model.save_weights`.
        """
        weights = self.state_dict()
        learned = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        bad = first_broken(weights, learned) if finite_only else None
        if bad is not None:
            raise CheckpointNotWrittenError(f"{filepath} was not written: {bad} holds NaN or infinities")
        write_weights(filepath, weights)
        self._last_saved = os.fspath(filepath)

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
        self.load_state_dict(read_weights(Path(filepath)), skip_mismatch)

    def to_cpu(self) -> nn.Module:
        """Bring the module and the optimizer's state back to the host, in place. The next `fit` moves them again.

        Returns:
            The very module that was given, now an ordinary one of PyTorch's on the CPU.
        """
        self._move_to(HOST)
        return self.module

    @property
    def learning_rate(self) -> float:
        """The actual learning rate, that of the first group; setting it keeps the groups' proportions.

        A new rate takes effect at the next step, and costs nothing: it is an input of the graph. `model.optimizer` has
        it under the same name, as in Keras's guides.
        """
        return optimizers.rates(self._require_optimizer())[0]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        optimizers.set_rate(self._require_optimizer(), float(rate))

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise NotCompiledError("there is no optimizer: call model.compile(optimizer='adamw', ...) first")
        return self.optimizer

    def higher_is_better(self, name: str) -> bool | None:
        """Whether a log gets better as it rises, for callbacks with `mode="auto"`; None if its metric doesn't say.

        Args:
            name: The log's name, with or without `val_`.
        """
        plain = name.removeprefix("val_")
        if plain == "loss":
            return False
        return next((metric.higher_is_better for metric in self.metrics if metric.name == plain), None)

    def _require_compiled(self, method: str) -> None:
        if not self._compiled:
            raise NotCompiledError(
                f"{method} needs a compiled model: call model.compile(optimizer='adamw', loss='cross_entropy') first"
            )
        default_steps = type(self).train_step is Model.train_step and type(self).compute_loss is Model.compute_loss
        if default_steps:
            losses.required(self._loss, method)

    def _begin_training(self, class_weight: ClassWeight | None, cores: Cores, seed: int) -> list[float]:
        """Take in what a `fit` is about. Returns the rates from before the cores have scaled them."""
        self._seed = seed
        self._class_weight = class_weight
        before = optimizers.rates(self._require_optimizer())
        optimizers.scale_rates(self._require_optimizer(), _SCALINGS[self._scale_lr](cores.count))
        return before

    def _train(
        self,
        train: Stream,
        validation: loop.Validation | None,
        callbacks: list[Any],
        params: dict[str, Any],
        epochs: range,
        seconds: float | None,
        strict_at: str,
        resumed: Checkpoint | None,
    ) -> History:
        history = History()
        everyone = self._callbacks([*callbacks, history], params)
        self.history = history
        self._passes.clear()
        self._counted = counts()
        self._strict_at = strict_at
        try:
            loop.fit(self, train, validation, everyone, epochs, seconds, resumed)
        finally:
            self._strict_at = ""
        return history

    def _batch_runner(self, role: str, cores: Cores) -> StepRunner:
        """The runner of single batches: a new one when another pass has begun meanwhile, or the metrics were reset."""
        place = self._place_on(cores)
        run = self._batch_runs.get(role)
        if run is None or place != self._place or not run.is_current:
            self._seed = torch.initial_seed()
            if role == "train":
                optimizers.scale_rates(self._require_optimizer(), _SCALINGS[self._scale_lr](cores.count))
            self._move_to(place)
            run = self._batch_runs[role] = StepRunner(self, role)
        return run

    def _run_on_batch(
        self, role: str, method: str, parts: tuple[Any, Any, Any], cores: CoresArgument
    ) -> tuple[StepRunner, Any]:
        """Run one batch. Returns what has run it, and the outputs of `"predict"`."""
        run = self._batch_runner(role, start(cores, f"{method}(cores={cores!r})"))
        used = max(i for i, part in enumerate(parts) if part is not None or i == 0) + 1
        with loop.modes_kept(self):
            self.module.train(role == "train")
            try:
                with self._noticing_loss():
                    return run, run([run.prepare(as_tensors(parts[:used]))])
            finally:
                self._expose()

    def _host_is_equal(self) -> bool:
        """Whether plain PyTorch on the host gives what the device would."""
        return self._place.on_host and self._precision == "fp32" and platform() == "CPU"

    def _training_stream(
        self,
        data: tuple[Any, Any, Any],
        batch_size: int | None,
        cores: Cores,
        seed: int,
        shuffle: bool = True,
        steps: int | None = None,
    ) -> Stream:
        return stream(
            *data,
            batch_size=batch_size,
            cores=cores.count,
            shuffle=shuffle,
            seed=seed,
            steps=steps,
            places=self._place_on(cores).places,
        )

    def _evaluation_stream(
        self, data: Any, batch_size: int | None, cores: Cores, steps: int | None, name: str = "validation_data"
    ) -> Stream:
        parts = data if isinstance(data, tuple) and 2 <= len(data) <= 3 else (data,)
        return stream(
            *parts,
            batch_size=batch_size,
            cores=cores.count,
            steps=steps,
            restart=True,
            places=self._place_on(cores).places,
            name=name,
        )

    def _callbacks(self, callbacks: list[Any], params: dict[str, Any]) -> CallbackList:
        # A silent one would be called for nothing, and a second one would say all twice.
        wanted = params["verbose"] and not any(isinstance(callback, ProgbarLogger) for callback in callbacks)
        progress = [ProgbarLogger()] if wanted else []
        return CallbackList([*callbacks, *progress], self, params, self._expose)

    def _place_on(self, cores: Cores) -> Placement:
        if self._run_eagerly:
            return HOST
        set_matmul_precision(self._matmul_precision)
        return Placement(cores)

    def _headline(self, cores: Cores, size: int | None, before: list[float]) -> str:
        """What is scaled and how, in one line: cores, batch, rate and precision."""
        batch = f"batch {size} x {cores.count} = {size * cores.count}" if size else f"{cores.count} batches a step"
        after = optimizers.rates(self._require_optimizer())
        rate = f"lr {after[0]:g}"
        if before != after:
            rate = f"lr {before[0]:g} x {after[0] / before[0]:.4g} = {after[0]:g} ({self._scale_lr})"
        return f"{cores} | {batch} | {rate} | {self._precision}"


def _seconds(max_time: float | timedelta | None) -> float | None:
    seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else max_time
    if seconds is not None and not seconds > 0:
        raise ArgumentError(f"max_time must be a number of seconds above 0 or a timedelta, got {max_time!r}")
    return seconds


def _step_freq(freq: int | float, steps: int | None) -> int:
    """After how many steps of an epoch to validate.

    Args:
        freq: So many, or as a float such a share of an epoch.
        steps: How many an epoch has, if that is known.
    """
    if isinstance(freq, float) and 0 < freq <= 1:
        if steps is None:
            raise ArgumentError(
                f"validation_step_freq={freq}: the data don't say how many batches they have; give a number of steps"
            )
        return max(1, round(freq * steps))
    require_whole("validation_step_freq", freq, otherwise="a share of an epoch such as 0.25")
    if steps is not None and freq > steps:
        raise ArgumentError(
            f"validation_step_freq={freq} is never reached: an epoch has {steps} steps. Use validation_freq to "
            "validate at the end of every so many epochs"
        )
    return int(freq)


def _returned(logs: Mapping[str, Any], return_dict: bool) -> Any:
    """Logs as Keras's methods return them."""
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
