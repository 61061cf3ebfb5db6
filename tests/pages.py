"""Parses the documentation's pages for tests: their code blocks, links, and programs."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "docs" / "pages"
_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: `python` is run; `py`, for another library or a TPU, is only parsed; or `sh`, `text`, ...
        title: Its title; a title that ends in `.py` is the file in which a reader saves it. "" without a title.
        code: The text.
    """

    language: str
    title: str
    code: str


@dataclass(frozen=True)
class Page:
    """A page, such as `docs/pages/index.md`."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT if self.path.parent == ROOT else SITE))

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def blocks(self) -> list[Block]:
        found = []
        for indent, language, rest, code in _FENCE.findall(self.text):
            title = _TITLE.search(rest)
            dedented = textwrap.dedent(code) if indent else code
            found.append(Block(language, title[1] if title else "", dedented))
        return found

    @property
    def prose(self) -> str:
        """The text without code blocks."""
        return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", self.text))

    @property
    def program(self) -> str:
        """The `python` blocks that aren't files, joined, as a reader types them."""
        return "\n".join(b.code for b in self.blocks if b.language == "python" and not b.title.endswith(".py"))

    @property
    def files(self) -> dict[str, str]:
        """The `python` blocks that are files; each is a separate script."""
        return {b.title: b.code for b in self.blocks if b.language == "python" and b.title.endswith(".py")}

    @property
    def printed(self) -> list[str]:
        """The printed lines in the `text` blocks right after `python` blocks; `...` stands for any other lines."""
        shown = re.findall(r"```python[^\n]*\n(?:(?!```).)*```\n\n```text\n(.*?)```", self.text, re.S)
        return [line for block in shown for line in block.splitlines() if line.strip() not in ("", "...")]

    @property
    def links(self) -> list[str]:
        """The targets of links and pictures, in Markdown and in HTML."""
        return re.findall(r"\]\(([^)\s]+)[^)]*\)", self.prose) + re.findall(
            r'(?:src|href|srcset)="([^"]+)"', self.prose
        )

    @property
    def anchors(self) -> set[str]:
        """The headings, in the form of link targets."""
        headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", self.text), re.M)
        return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def pages() -> list[Page]:
    """The README and all pages of the site."""
    return [Page(ROOT / "README.md"), *map(Page, sorted(SITE.rglob("*.md")))]
