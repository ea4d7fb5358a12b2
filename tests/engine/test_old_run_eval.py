"""The adapter of a run of an earlier version (tests/old_run) can be evaluated."""

import json

import commands


def test_eval_takes_the_adapter_of_an_old_run(tmp_path, capsys):
    words = f"--adapter {commands.ROOT}/tests/old_run/adapter --split dev --limit 2 --out {tmp_path}/eval".split()
    commands.here("eval.py", *words)
    figures = json.loads((tmp_path / "eval" / "eval.json").read_text())["figures"]
    assert set(figures) == {"base", "adapter", "adapter - base"}
    assert "trained on the base that an earlier version built" in capsys.readouterr().err
