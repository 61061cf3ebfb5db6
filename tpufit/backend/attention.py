"""`AttentionForms`: how attention is to be computed, and how each layer's is."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

ATTENTION = ("auto", "plain", "flash")


@dataclass
class AttentionForms:
    """How attention is to be computed, and how each layer's is."""

    asked: str = "plain"  # or "flash", or "auto": flash attention where it is worth it
    # "flash", or "plain" with the reason, by the module that called for attention.
    of_layers: MutableMapping[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    told: set[str] = field(default_factory=set)  # the reasons that were warned of

    def named(self, module: nn.Module) -> dict[str, str]:
        """What each layer has got, by its name.

        Example:
            >>> net = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
            >>> forms = AttentionForms("auto")
            >>> forms.of_layers[net["a"]] = "flash"
            >>> forms.named(net)
            {'a': 'flash'}
        """
        return {name: self.of_layers[part] for name, part in module.named_modules() if part in self.of_layers}
