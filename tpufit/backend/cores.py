"""`Cores`: the cores that a process computes on."""

from dataclasses import dataclass

CoresArgument = int | str | list[int] | None
"""The values of `cores=`: `"auto"` or `None`, a count such as `8` or `"8"`, or `[i]` for one particular core."""


@dataclass(frozen=True)
class Cores:
    """The cores that this process computes on."""

    count: int  # at least 1
    index: int  # of a single core, from 0; several cores are always all cores of the host
    platform: str  # "CPU", "TPU" or "CUDA"; "host": the processor, without a runtime
    settled_by: str  # the call that settled the cores, and its line, for messages
    hosts: int = 1

    @property
    def spmd(self) -> bool:
        """True if one program runs on several cores; one core is driven without SPMD."""
        return self.count > 1

    def __str__(self) -> str:
        if self.platform == "CUDA":
            return f"1 GPU (cuda:{self.index})"
        which = f" (number {self.index})" if self.index else ""
        if self.platform == "host":
            return "the host's processor, without a runtime"
        virtual = ", virtual" if self.platform == "CPU" and self.spmd else ""
        on = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.count} core{'s' * self.spmd}{which}{on} (XLA:{self.platform}{virtual})"
