"""Run every check that goes over seeds, models or modes (pytest -m sweep), and write docs/checked.md: python runs/sweep.py

`make test` keeps one case of each of these checks. An issue that touches the subject of one runs it again: with words for
pytest, such as -k self_test, only the rows of the checks that ran are replaced.
"""

import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "checked.md"


def known_rows():
    """Return {property: row} of the page."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows if not row.startswith("| property")}


def main():
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-m", "sweep", f"--junitxml={report}", *sys.argv[1:]]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    made = f"{commit}{' with changes' if changed else ''}"
    rows = known_rows() if sys.argv[1:] else {}
    for case in cases:
        outcome = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}
        result = next((outcome[child.tag] for child in case if child.tag in outcome), "holds")
        name = case.get("name").removeprefix("test_").replace("_", " ").replace("[", ": ").rstrip("]")
        figures = "; ".join(each.get("value") for each in case.iter("property") if each.get("name") == "figures")
        rows[name] = f"| {name} | {result} | {float(case.get('time')):.0f} s | {figures} | {made} |"
    machine = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {platform.machine()}"
    lines = [
        "# Checked",
        "",
        f"Written by `make sweep`: {machine}. The last column is the commit that was checked.",
        "",
    ]
    lines += ["| property | result | time | figures | commit |", "|---|---|---|---|---|", *rows.values()]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(cases)} of {len(rows)} checks ran")
    return code


if __name__ == "__main__":
    sys.exit(main())
