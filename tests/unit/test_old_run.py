"""A run directory of an earlier version (tests/old_run, begun at commit db947c9): it can be looked at, and not be resumed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import train_tspo
from common import models, policy
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


@pytest.mark.parametrize("base, notices", [("shipped", 0), ("2ea0066892c7011b", 1)])
def test_an_adapter_is_noticed_only_if_an_earlier_version_built_its_base(tmp_path, monkeypatch, base, notices):
    """2ea0066892c7011b: the hash under which an earlier version cached the base of tiny."""
    shipped, printed = models.resolve("tiny"), []
    monkeypatch.setattr(policy.run, "notice", printed.append)
    named = {"base_model_name_or_path": shipped if base == "shipped" else f"/home/user/.cache/turnwise/tiny/{base}"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    policy.refuse_other_base(str(tmp_path), shipped)
    assert len(printed) == notices


def test_an_adapter_of_the_other_base_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": models.resolve("tiny-math")}))
    with pytest.raises(SystemExit, match="tiny-math/.*, not on"):
        policy.refuse_other_base(str(tmp_path), models.resolve("tiny"))
