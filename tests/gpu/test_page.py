"""python -m tests.gpu, the page about a machine, runs to its end and reports figures without paths."""

import json

import commands
import pytest


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return (what the page prints, its report)."""
    report = tmp_path_factory.mktemp("page") / "gpu_report.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_GPU_REPORT", str(report))
        done = commands.command("-m", "tests.gpu")
    return done.stdout, report.read_text()


def test_every_line_with_a_limit_is_within_it(page):
    printed, report = page
    assert "all within their limits; figures: " in printed and "FAILED" not in printed
    stages = json.loads(report)["stages"]
    assert list(stages) == ["machine", "ranks", "trainer", "engine", "engine_4bit", "steps", "speed"]
    limited = [found for lines in stages.values() for found in lines if not found["least"] is found["most"] is None]
    assert len(limited) >= 15 and all(found["ok"] for found in limited)


def test_the_report_holds_no_path(page):
    assert "/" not in page[1].replace("tokens/s", "").replace("GB/s", "").replace("/dev/shm free", "")
    assert str(commands.ROOT) not in page[1]


def test_an_unknown_stage_is_refused_by_name():
    done = commands.command("-m", "tests.gpu", "enigne", check=False)
    assert done.returncode != 0 and "enigne: no stage. Stages: machine ranks trainer engine" in done.stderr
