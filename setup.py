"""Makes the description for the package index out of README.md. All else about the build is in setup.cfg.

The index shows the description alone, without the files that the README links to and without its pictures. If setup.cfg
names the repository's address as `url`, they lead there; if not, links are their words, and pictures are left out.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.S)
LINK = re.compile(r"\[([^][]+)\]\((?!\w+:|#)([^)]+)\)")
# These are for whoever has a copy of the repository. The last of them is nothing but links.
SECTIONS = re.compile(r"^## (Try it|Documentation)\n.*?(?=^## )", re.M | re.S)


def description(readme: str, url: str = "", version: str = "") -> str:
    """The README for the index, with the repository's address if there is one."""
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
