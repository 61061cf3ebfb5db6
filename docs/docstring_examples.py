"""Lets mkdocstrings show the examples in docstrings as code, which griffe does only for the heading `Examples:`."""

import re

import griffe


class PluralExamples(griffe.Extension):
    """Reads `Example:` as `Examples:`, and a `Source:` line as a separate paragraph."""

    def on_instance(self, *, obj: griffe.Object, **others: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
