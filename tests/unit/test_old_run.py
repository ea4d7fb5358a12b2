"""A run directory of an earlier version (tests/old_run, begun at commit db947c9): it can be looked at, and not be resumed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import train_tspo
from common.args import parse_args
from view import report
from view.__main__ import look

OLD = Path(__file__).resolve().parents[1] / "old_run"


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(p.relative_to(folder)).encode() + p.read_bytes() for p in files)).hexdigest()


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "old", symlinks=True))


def test_show_prints_its_trajectories(capsys):
    look(["show", str(OLD)])
    assert "turn 1" in capsys.readouterr().out


def test_the_report_has_its_curves_samples_and_flags(old):
    report.write(old, old / "report.html")
    page = (old / "report.html").read_text()
    assert "rollout/stop_tool_error" in page  # a metric that is not measured any more
    begun = json.loads((old / "args.json").read_text())
    rows = {name: (default, meaning) for name, _, default, meaning in report.arguments(old, begun)}
    assert set(rows) == set(begun) and rows["folr_alpha"][0] == 0.5 and rows["max_turns"][1]


def test_resume_is_refused_in_one_sentence_and_touches_nothing(old):
    before = digest(old)
    with pytest.raises(SystemExit, match="begun by an older version") as refused:
        parse_args(train_tspo.Args, ["--out", str(old), "--resume", "--steps", "9"])
    assert "\n" not in str(refused.value) and digest(old) == before
