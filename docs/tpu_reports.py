"""`python docs/tpu_reports.py` writes the results of the TPU reports in `docs/reports/*.json` into README and pages.

It replaces the text between `<!-- shown: sentence -->` or `<!-- shown: table -->` and `<!-- /shown -->`. No line of
text may begin with such a mark, because Markdown would take the whole line for HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGES = [DOCS.parent / "README.md", DOCS / "pages" / "index.md", DOCS / "pages" / "how-it-works.md"]
NOTHING = "**not tested yet.**"
_PLACE = re.compile(r"(<!-- shown: (\w+) -->).*?(<!-- /shown -->)", re.S)
_FAILED = ("FAILED", "no start")

Report = dict[str, Any]


def reports(folder: Path) -> list[Report]:
    """Return the reports of TPUs in a folder, by date. Reports of virtual cores prove nothing, and are omitted."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted((one for one in found if one["machine"]["platform"] == "TPU"), key=lambda one: one["date"])


def tpu(report: Report) -> str:
    """Return the TPU of a report, e.g. `"v5e, 8 cores"`."""
    machine = report["machine"]
    chips = " and ".join(sorted(set(machine["chips"]))) or "TPU"
    return f"{chips}, {machine['cores']} core{'s' * (machine['cores'] != 1)}"


def failed(report: Report) -> list[str]:
    """Return the failed checks of a report."""
    return [check["name"] for check in report["checks"] if check["status"] in _FAILED]


def sentence(found: Sequence[Report]) -> str:
    """Return a sentence about the TPUs that have run tpufit; for each TPU the latest report counts."""
    last = {tpu(report): report for report in found}
    if not last:
        return NOTHING
    right = [name for name, report in last.items() if not failed(report)]
    wrong = [name for name, report in last.items() if failed(report)]
    said = f"**Shown on {'; '.join(right)}.**" if right else "**No TPU has passed all checks yet.**"
    return f"{said} Checks failed on {'; '.join(wrong)}." if wrong else said


def table(found: Sequence[Report]) -> str:
    """Return a table with a row for each report; "" without reports."""
    if not found:
        return ""
    rows = ["| TPU | where | torch_xla | day | checks passed | failed |", "| --- | --- | --- | --- | ---: | --- |"]
    for report in found:
        passed = sum(check["status"] == "passed" for check in report["checks"])
        asked = f"{passed} of {len(report['checks'])}{' (quick)' * report['quick']}"
        place, version = report["machine"]["place"], report["versions"]["torch_xla"]
        columns = (tpu(report), place, version, report["date"], asked, ", ".join(failed(report)))
        rows.append(f"| {' | '.join(columns)} |")
    return "\n\n" + "\n".join(rows) + "\n\n"


def updated(text: str, found: Sequence[Report]) -> str:
    """Return a page's text with the results of the reports."""
    write = {"sentence": sentence, "table": table}
    return _PLACE.sub(lambda place: place[1] + write[place[2]](found) + place[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(), reports(DOCS / "reports")))
