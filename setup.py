"""Creates the description for the package index from README.md. Everything else about the build is in setup.cfg.

The index shows only the description, without the files and pictures that the README links to. If setup.cfg has the
repository's address as `url`, links and pictures lead to the repository; otherwise a link becomes plain text, and
pictures are omitted.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.S)
LINK = re.compile(r"\[([^][]+)\]\((?!\w+:|#)([^)]+)\)")
# Sections for readers with a copy of the repository. The last one consists only of links.
SECTIONS = re.compile(r"^## (Try it|Documentation)\n.*?(?=^## )", re.M | re.S)


def description(readme: str, url: str = "", version: str = "") -> str:
    """Return the description for the index; `url` is the repository's address, if there is one."""
    if not url:
        return LINK.sub(r"\1", SECTIONS.sub("", PICTURE.sub("", readme)))
    files, raw = f"{url}/blob/v{version}/", f"{url}/raw/v{version}/"
    shown = LINK.sub(rf"[\1]({files}\2)", readme)
    return re.sub(r'\b(src|srcset)="(?!\w+:)', rf'\1="{raw}', shown)


if __name__ == "__main__":
    known = configparser.ConfigParser()
    known.read(ROOT / "setup.cfg")
    about = known["metadata"]
    setup(long_description=description((ROOT / "README.md").read_text(), about.get("url", ""), about["version"]))
