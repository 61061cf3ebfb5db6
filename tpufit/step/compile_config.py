"""`CompileConfig`: the arguments of `Model.compile`, checked and built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from .. import losses
from ..backend import ATTENTION
from ..errors import UnknownNameError, require_choice, require_flag, require_whole
from ..losses import AnyLoss, LossByOutput
from ..metrics import build as build_metrics
from ..optimizers import NAMES, EMAConfig, GradientConfig
from ..utils.json_codec import is_json
from . import precision as precisions
from .remat import RematArgument, find_blocks
from .sharding import ShardConfig

if TYPE_CHECKING:
    from ..metrics import DatasetMetric
    from ..metrics.metric import Metric

_SCALINGS: dict[str | None, Callable[[int], float]] = {
    "linear": float,
    "sqrt": lambda cores: cores**0.5,
    None: lambda cores: 1.0,
}


@dataclass(frozen=True)
class CompileConfig:
    """The arguments of `Model.compile`, checked and built; the defaults are for a model that isn't compiled."""

    loss: AnyLoss | None = None  # None if a subclass computes it
    metrics: list[Metric | DatasetMetric] = field(default_factory=list)  # weighted ones last
    precision: str = "fp32"  # "fp32", "bf16" or "bf16-true"
    matmul_precision: str = "default"  # "default", "high" or "highest"
    attention: str = "auto"  # "auto", "plain" or "flash"
    scale_lr: str | None = "linear"  # "linear", "sqrt" or None
    jit_compile: str | bool = "auto"  # "auto", True or False
    run_eagerly: bool = False
    steps_per_execution: int | str = 1  # or "auto"
    gradients: GradientConfig = field(default_factory=GradientConfig)
    ema: EMAConfig | None = None
    shard: ShardConfig = field(default_factory=ShardConfig)
    arguments: dict[str, Any] | None = None  # as given

    def __post_init__(self) -> None:
        require_choice("scale_lr", self.scale_lr, *_SCALINGS)
        if not isinstance(self.attention, str) or self.attention not in ATTENTION:
            raise UnknownNameError("attention", self.attention, ATTENTION)
        require_choice("jit_compile", self.jit_compile, "auto", True, False)
        steps = self.steps_per_execution
        if not (isinstance(steps, str) and steps == "auto"):
            object.__setattr__(
                self, "steps_per_execution", require_whole("steps_per_execution", steps, otherwise="'auto'")
            )
        object.__setattr__(self, "run_eagerly", require_flag("run_eagerly", self.run_eagerly))

    @classmethod
    def of(cls, arguments: dict[str, Any], module: nn.Module) -> CompileConfig:
        """Check and build all arguments of `compile` except the optimizer.

        Raises:
            UnknownNameError, ArgumentError: See `Model.compile`.
        """
        given = arguments
        clips = {name: given[name] for name in ("accumulate_steps", "clip_norm", "clip_value", "global_clip_norm")}
        loss = losses.build(given["loss"], given["loss_weights"], module)
        outputs = loss.outputs if isinstance(loss, LossByOutput) else None
        ignored = loss.ignored if loss is not None else {}
        find_blocks(given["remat"], module)
        ema = EMAConfig(given["ema_momentum"], given["ema_overwrite_frequency"])
        return cls(
            loss=loss,
            metrics=build_metrics(given["metrics"], given["weighted_metrics"], outputs, ignored),
            precision=precisions.check(given["precision"]),
            matmul_precision=precisions.check_matmul(given["matmul_precision"]),
            attention=given["attention"],
            scale_lr=given["scale_lr"],
            jit_compile=given["jit_compile"],
            run_eagerly=given["run_eagerly"],
            steps_per_execution=given["steps_per_execution"],
            gradients=GradientConfig(**clips),
            ema=ema if require_flag("use_ema", given["use_ema"]) else None,
            shard=ShardConfig.of(given["shard"], module),
            arguments=given,
        )

    def with_option(self, name: str, value: Any) -> CompileConfig:
        """Return the same arguments with another value of `"run_eagerly"`, `"steps_per_execution"` or `"jit_compile"`.

        Raises:
            ArgumentError: The option can't have this value.
        """
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed, arguments=self.arguments and self.arguments | changed)

    @property
    def remat(self) -> RematArgument:
        """The argument `remat` as given."""
        remat: RematArgument = (self.arguments or {}).get("remat")
        return remat

    def with_remat(self, remat: RematArgument, module: nn.Module) -> CompileConfig:
        """Return the same arguments with another `remat`.

        Raises:
            ArgumentError: There are no such blocks.
        """
        find_blocks(remat, module)
        return replace(self, arguments=(self.arguments or {}) | {"remat": remat})

    @property
    def loss_modules(self) -> list[nn.Module]:
        """The losses that are modules; their tensors move and train with the module's."""
        return self.loss.modules if self.loss is not None else []

    def rate_factor(self, cores: int) -> float:
        """Return the factor by which `scale_lr` multiplies the learning rate on a number of cores."""
        return _SCALINGS[self.scale_lr](cores)

    def as_plain(self, optimizer: Optimizer | None) -> dict[str, Any] | None:
        """Return the arguments as a checkpoint keeps them for `tpufit.load`; None if an argument is an object."""
        rebuilt = type(optimizer).__name__.lower() in NAMES and is_json(self.arguments)
        return self.arguments if rebuilt else None


UNCOMPILED = CompileConfig()
