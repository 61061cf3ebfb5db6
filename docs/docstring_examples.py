"""Lets mkdocstrings show the examples in docstrings as code: griffe reads a section as code only if it is a plural."""

import re

import griffe


class PluralExamples(griffe.Extension):
    """Reads `Example:` as `Examples:`, and a `Source:` line as a paragraph of its own."""

    def on_instance(self, *, obj: griffe.Object, **others: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
