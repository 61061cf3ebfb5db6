"""Adds the programs and notebooks of `examples/` to the site.

The pages link to the examples by their places in the repository, so that the links also work without the site.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the examples to the site's files."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **others: object) -> str:
    """Shorten links to the examples by two folders, because `docs/pages` is the site's root."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./\.\./examples/", r"](\1examples/", markdown)
