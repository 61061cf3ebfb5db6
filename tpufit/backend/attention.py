"""`AttentionForms`: the requested form of attention, and each layer's actual form."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

ATTENTION = ("auto", "plain", "flash")


@dataclass
class AttentionForms:
    """The requested form of attention, and each layer's actual form."""

    requested: str = "plain"  # or "flash", or "auto": flash attention where it is faster
    # "flash", or "plain" with the reason, by the module that called attention.
    of_layers: MutableMapping[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    warned: set[str] = field(default_factory=set)  # the reasons of past warnings

    def named(self, module: nn.Module) -> dict[str, str]:
        """Return the actual form of each layer's attention, by the layer's name.

        Example:
            >>> net = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
            >>> forms = AttentionForms("auto")
            >>> forms.of_layers[net["a"]] = "flash"
            >>> forms.named(net)
            {'a': 'flash'}
        """
        return {name: self.of_layers[part] for name, part in module.named_modules() if part in self.of_layers}
