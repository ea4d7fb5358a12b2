"""runs/compare.py: the choice of runs, the page of results, and the deliberate mismatch."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import random_groups

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "runs"))

import compare  # noqa: E402
import compare_page  # noqa: E402

from common.batch import pack  # noqa: E402
from common.log import METRICS  # noqa: E402
from common.turns import Group, Question, Trajectory, Turn  # noqa: E402
from view import record  # noqa: E402

pytestmark = pytest.mark.slow

BEFORE = 0.2


def jobs_of(folder, *words):
    return compare.plan(compare.parse(["--out", str(folder / "runs"), "--docs", str(folder / "docs"), *words]))


def one_job(folder, *words, label="GRPO", part="main"):
    return next(job for job in jobs_of(folder, *words) if (job.part, job.label) == (part, label))


def begin(job):
    """Write the run directory of a started run."""
    job.folder.mkdir(parents=True)
    (job.folder / "lock").touch()
    if (ROOT / job.script).exists():
        shutil.copy(ROOT / job.script, job.folder)
    for package in record.PACKAGES:
        shutil.copytree(ROOT / package, job.folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    started = {
        "command": ["python", *job.command()],
        "commit": "0123456789abcdef",
        "uncommitted": "",
        "packages": {"torch": "2.0"},
    }
    (job.folder / "environment.json").write_text(json.dumps(started))
    (job.folder / "args.json").write_text(json.dumps({"eval_questions": 100}))


def checkpoint(job):
    (job.folder / "checkpoints" / "step-3").mkdir(parents=True)
    (job.folder / "checkpoints" / "step-3" / "state.pt").touch()


def metrics(job, ends, steps=10, rollouts=128, tokens=3000, **more):
    """Write metrics whose held-out exact match moves linearly from BEFORE to `ends`, measured every 5 steps."""
    for step in range(steps + 1):
        line = dict.fromkeys(METRICS) | {"step": step, "time/step": 4.0}
        if step % 5 == 0:
            line["eval/em"] = BEFORE + (ends - BEFORE) * step / steps
        if step:
            line |= {"rollout/trajectories": rollouts, "rollout/sampled_tokens": tokens, "optim/updates": 1.0}
            line |= {"policy/entropy": 1 / step, "loss/kl_ref": 0.01 * step, "optim/grad_norm": 1.0 + step % 3}
            line |= {"time/rollout": 2.0, "time/update": 1.0, "policy/sampler_absdiff": 5e-7} | more
        with open(job.folder / "metrics.jsonl", "a") as out:
            out.write(json.dumps(line) + "\n")


def finish(job, ends=0.9, **more):
    """Write the run directory of a finished run. Returns its Result."""
    begin(job)
    checkpoint(job)
    metrics(job, ends, **more)
    record = {"hash": compare.fingerprint(ROOT, job), "finished": "2026-01-01", "command": "made up", "machine": "toy"}
    (job.folder / "compare.json").write_text(json.dumps(record))
    return compare_page.Result(job)


# ---- the choice of runs


def test_a_finished_run_is_left_alone_until_code_or_arguments_change(tmp_path):
    job = one_job(tmp_path)
    assert compare.state(job) == "new"
    finish(job)
    assert compare.state(job) == "finished"
    assert compare.state(one_job(tmp_path, "--steps", "3")) == "stale"
    assert compare.state(one_job(tmp_path, "--", "--questions", "4")) == "stale"
    record = json.loads((job.folder / "compare.json").read_text())
    (job.folder / "compare.json").write_text(json.dumps(record | {"hash": "of other code"}))
    assert compare.state(job) == "stale"


@pytest.mark.parametrize("changed", ["train_grpo.py", "common/turns.py", "tools/search.py"])
def test_every_file_of_the_code_counts(tmp_path, changed):
    job = one_job(tmp_path)
    begin(job)
    assert compare.fingerprint(job.folder, job) == compare.fingerprint(ROOT, job)
    with open(job.folder / changed, "a") as file:
        file.write("# a comment\n")
    assert compare.fingerprint(job.folder, job) != compare.fingerprint(ROOT, job)


def test_an_interrupted_run_resumes_from_a_checkpoint_of_the_same_code(tmp_path):
    job = one_job(tmp_path)
    begin(job)
    assert compare.state(job) == "new"  # without a checkpoint the script starts it again by itself
    checkpoint(job)
    assert compare.state(job) == "resume"
    assert compare.state(one_job(tmp_path, "--steps", "3")) == "stale"
    (job.folder / "common" / "turns.py").write_text("# other code\n")
    assert compare.state(job) == "stale"


def test_an_old_run_directory_is_renamed(tmp_path):
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "kept").write_text(str(number))
        compare.retire(tmp_path / "run")
    assert (tmp_path / "run-old-1" / "kept").read_text() == "1"
    assert (tmp_path / "run-old-2" / "kept").read_text() == "2"
    assert not (tmp_path / "run").exists()


def test_both_sides_of_the_cost_are_measured_in_one_sitting(tmp_path):
    grpo, rtpo = (one_job(tmp_path, label=label, part="cost") for label in ("GRPO", "RTPO"))
    finish(grpo)
    assert compare.states([grpo, rtpo]) == {grpo: "stale", rtpo: "new"}
    finish(rtpo)
    assert compare.states([grpo, rtpo]) == {grpo: "finished", rtpo: "finished"}


def test_the_plan_has_the_same_arguments_for_every_algorithm(tmp_path):
    jobs = jobs_of(tmp_path)
    assert {part: sum(job.part == part for job in jobs) for part in compare.PARTS} == {
        "main": 24,
        "turns": 12,
        "cost": 2,
        "smollm2": 4,
    }
    asked = compare.parse(["--part", "smollm2"])
    assert compare.parse([]).part == ("main", "turns", "cost") and asked.part == ["smollm2"]
    assert len({job.folder for job in jobs}) == len(jobs)
    for part in compare.PARTS:
        words = {}
        for job in jobs:
            if job.part == part:
                words.setdefault(job.label, set()).add(job.words)
        assert len({frozenset(w) for w in words.values()}) == 1


def test_a_run_that_fails_is_reported_and_the_others_continue(tmp_path, monkeypatch, capsys):
    """Replace the training script by one that fails for one seed."""
    script = tmp_path / "train_grpo.py"
    script.write_text(
        "import os, sys\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        "os.makedirs(out)\n"
        "open(out + '/metrics.jsonl', 'w').write('{\"step\": 0}\\n')\n"
        "if '2' in sys.argv[sys.argv.index('--seed') + 1]: sys.exit('too much')\n"
    )
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    jobs = [job for job in jobs_of(tmp_path) if job.label == "GRPO" and job.at == "tiny_search"]
    failed = compare.execute_all(dict.fromkeys(jobs, "new"), at_once=2)
    assert [job.seed for job in failed] == [2]
    assert "too much" in failed[jobs[1]] and "train_grpo-s2" in capsys.readouterr().err
    assert [(job.folder / "compare.json").exists() for job in jobs] == [True, False, True]


def test_a_warm_start_that_fails_stops_only_its_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "warm_start", lambda folder, part: f"no {part} today")
    made = []
    monkeypatch.setattr(compare, "execute_all", lambda found, at_once: made.extend(found) or {})
    words = ["compare.py", "--out", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs"), "--part", "turns"]
    finish(one_job(tmp_path))
    monkeypatch.setattr(sys, "argv", [*words, "--part", "cost"])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 1 and capsys.readouterr().err.count("no turns today") == 12
    assert [job.part for job in made] == ["cost", "cost"]


def test_a_warm_start_is_made_again_when_its_code_has_changed(tmp_path, monkeypatch):
    shutil.copytree(ROOT, tmp_path / "ours", ignore=shutil.ignore_patterns(".*", "out", "tests", "docs", "__pycache__"))
    monkeypatch.setattr(compare, "ROOT", tmp_path / "ours")
    args, names = compare.parse([]), []
    for changed in (None, "tasks/tiny/tiny_search.py", "common/policy.py", "train_grpo.py", "runs/warm_start.py"):
        if changed:
            with open(tmp_path / "ours" / changed, "a") as file:
                file.write("# a comment\n")
        names.append(compare.warm_folder(args, "turns"))
    assert len(set(names)) == 5 and compare.warm_folder(args, "turns") == names[-1]


# ---- results


def test_means_and_deviations_by_hand(tmp_path):
    assert compare_page.mean_sd([0.9, 0.8, 1.0]) == "0.900 ± 0.100"
    assert compare_page.mean_sd([1200, 1300], 0) == "1,250 ± 71"
    assert compare_page.mean_sd([0.5]) == "0.500"
    assert compare_page.mean_sd([None]) == "–"
    assert compare_page.band([(1, 10, 0.2), (0, 0, 0.0), (1, 30, 0.6), (0, 0, 1.0)]) == [
        (0, 0.5, 0, 1),
        (20, 0.4, 0.2, 0.6),
    ]


def test_rollouts_and_tokens_add_up_and_exact_match_is_read_between_evaluations(tmp_path):
    result = finish(one_job(tmp_path), ends=0.8)
    assert [line["rollouts"] for line in result.evaluations] == [0, 640, 1280]
    assert [line["generated tokens"] for line in result.evaluations] == [0, 15000, 30000]
    assert result.em == pytest.approx([0.2, 0.5, 0.8])
    assert result.em_at(320) == pytest.approx(0.35) and result.em_at(1280) == pytest.approx(0.8)
    assert result.em_at(1281) is None
    assert result.total("rollout/sampled_tokens") == 30000 and result.mean("optim/grad_norm") == pytest.approx(2.0)


def results(folder, label, ends):
    found = [job for job in jobs_of(folder) if (job.at, job.label) == ("tiny_search", label)]
    return [finish(job, end) for job, end in zip(found, ends)]


def test_worse_and_better_are_beyond_one_deviation(tmp_path):
    base = results(tmp_path, "GRPO", [0.90, 0.94, 0.92])  # sd 0.02
    assert compare_page.verdict(results(tmp_path, "TSPO", [0.91, 0.91, 0.91]), base) == "−0.010, no clear difference"
    assert compare_page.verdict(results(tmp_path, "GTPO", [0.85, 0.86, 0.87]), base) == "−0.060, **worse**"
    assert compare_page.verdict(results(tmp_path, "RTPO", [0.96, 0.97, 0.98]), base) == "+0.050, better"
    # One seed: two shares of 100 answers, sd of the difference (0.09/100 + 0.16/100) ** 0.5 = 0.05
    (grpo,), (tspo,) = results(tmp_path / "one", "GRPO", [0.9]), results(tmp_path / "one", "TSPO", [0.8])
    assert compare_page.verdict([tspo], [grpo]) == "−0.100, **worse**"
    tspo.em = [0.2, 0.87]
    assert compare_page.verdict([tspo], [grpo]) == "−0.030, no clear difference"


def test_the_cost_is_a_median_of_ratios_without_the_first_step(tmp_path):
    grpo, rtpo = (finish(one_job(tmp_path, label=label, part="cost"), steps=4) for label in ("GRPO", "RTPO"))
    for step, tokens in enumerate((90_000, 6000, 9000, 3000), 1):
        rtpo.lines[step]["rollout/sampled_tokens"] = tokens
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in compare_page.cost_table(grpo, rtpo).splitlines()]
    assert rows[0][0] == "a step, median of 3"
    assert ["generated tokens", "3,000", "6,000", "**2.00**", "1.00 to 3.00"] in rows
    assert ["rollout and update, s", "3.00", "3.00", "**1.00**", "1.00 to 1.00"] in rows
    grpo.lines[2]["optim/updates"] = 0.0  # no signal
    for line in rtpo.lines.values():
        line["time/update"] = 0.0
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in compare_page.cost_table(grpo, rtpo).splitlines()]
    assert ["optimizer updates", "1", "1", "**1.00**", "1.00 to 1.00, 2 of them"] in rows
    assert ["update, s", "1.00", "0.00", "–", "–"] in rows


# ---- the page


def fill(folder):
    """Write finished runs of all parts, in which GTPO and the mismatch are worse than GRPO. Returns the jobs."""
    ends = {"GRPO": 0.9, "TSPO": 0.95, "GTPO": 0.6, "RTPO": 0.92, compare.MISMATCH: 0.5}
    jobs = jobs_of(folder)
    for job in jobs:
        more = {"credit/revived": 1.5} if job.label == "TSPO" else {}
        finish(job, ends[job.label] - 0.01 * job.seed, **more)
    return jobs


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    jobs = fill(folder)
    return folder / "docs", jobs, compare_page.write(jobs, [], folder / "docs")


def test_the_page_has_every_table_and_marks_worse_results(filled):
    docs, _, worse = filled
    text = (docs / "results.md").read_text()
    for words in (
        "## tiny_search",
        "## tiny_math",
        "## Exact match against --max_turns",
        "## What RTPO costs",
        "## smollm2",
        "0123456, clean",
    ):
        assert words in text
    rows = [row.split("|")[1:] for row in text.splitlines() if row.startswith("| GTPO")]
    assert len(rows) == 3 and all(row[4].strip() == "−0.300, **worse**" for row in rows)
    assert rows[0][1].strip() == "3" and rows[0][3].strip() == "0.580 ± 0.010"
    assert [row.split("|")[-2].strip() for row in text.splitlines() if row.startswith("| TSPO")] == [
        "1.50 ± 0.00",
        "1.50 ± 0.00",
        "1.50",
    ]
    assert len(worse) == 7 and sum(compare.MISMATCH in row for row in worse) == 4
    assert "(#remarks)" in text and "\n## Remarks\n" in text
    # the arguments that all seeds share
    assert "`train_X.py --model tiny --task tiny_search --kl_coef 1e-24 --kl k3 --steps 25`, commit 0123456." in text


def test_pictures_are_drawn_and_small(filled):
    from matplotlib import image

    docs, _, _ = filled
    for name in ("tiny_search", "tiny_math", "turns"):
        path = docs / f"compare-{name}.png"
        assert 10_000 < path.stat().st_size < 150_000
        pixels = 255 * image.imread(path)[..., :3]
        assert 700 < pixels.shape[1] < 1300
        distance = abs(pixels - (0x00, 0x9E, 0x73)).max(-1)  # from RTPO's colour: there is a line, not only axes
        assert (distance < 12).sum() > 100


def test_text_outside_of_the_marks_survives(filled, tmp_path):
    docs, jobs, _ = filled
    page = tmp_path / "results.md"
    page.write_text((docs / "results.md").read_text().replace("# Results", "# Ours").rstrip() + "\n\nBecause.\n")
    some = [job for job in jobs if job.part == "turns"]
    compare_page.write(some, [some[0]], tmp_path)
    text = page.read_text()
    assert text.startswith("# Ours") and text.endswith("\n\nBecause.\n")
    assert "## tiny_search" not in text and "## Exact match against" in text
    assert "run before the code or arguments changed** | max_turns-2/train_grpo-s1 |" in text
    assert "arguments changed** | max_turns-2 (3), max_turns-3 (2) |" in compare_page.header(
        [compare_page.Result(job) for job in some], some, sorted(some, key=lambda job: job.at)[:5]
    )
    again = compare_page.write(some, [some[0]], tmp_path)
    assert page.read_text() == text and len(again) == 4
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="nothing was written"):
        compare_page.write(some, [], tmp_path)
    assert page.read_text() == "no marks"


def test_the_header_names_unfinished_runs_and_uncommitted_code(filled):
    _, jobs, _ = filled
    some = [job for job in jobs if job.part == "turns" and job.at == 2]
    there = [compare_page.Result(job) for job in some]
    assert "0123456, clean |" in compare_page.header(there, some, [])
    there[1].environment |= {"uncommitted": "M common/turns.py\n?? docs/results.md"}
    text = compare_page.header(there[1:], some, [])
    assert "**with uncommitted changes** in common/turns.py |" in text
    assert f"**not finished** | {some[0].name} |" in text
    there[0].environment |= {"commit": None, "uncommitted": None}  # no git
    assert "| commit | unknown |" in compare_page.header(there[:1], some, [])


def test_the_page_shows_the_command_that_was_run(tmp_path):
    result = finish(one_job(tmp_path, "--steps", "50"))
    result.job = one_job(tmp_path)
    assert "--steps 50`" in compare_page.command([result]) and "--steps 25" in " ".join(result.job.words)


# ---- the mismatch


def stripped():
    """Return two turns with 7 as thinking: prompt 5 6, action 7 8 0, observation 9 9; then, without 7, action 4 0."""
    first = Turn([5, 6], [7, 8, 0], [-0.1, -0.2, -0.3], observation_ids=[9, 9])
    second = Turn([5, 6, 8, 0, 9, 9], [4, 0], [-0.4, -0.5])
    return Trajectory([first, second], outcome=1.0)


def test_the_mismatch_trains_on_the_full_history_with_the_log_probabilities_of_the_stripped_one():
    groups = [Group(Question("q", "?", ["gold"]), [stripped(), stripped()])]
    advantages = [[[1.0, 2.0], [-1.0, -2.0]]]
    batch = compare.mismatched(pack)(groups, advantages)
    assert [(s.start, s.end, s.unit) for s in batch.segments] == [(0, 9, 0), (9, 18, 1)]  # one row per trajectory
    assert batch.ids.tolist() == [5, 6, 7, 8, 0, 9, 9, 4, 0] * 2
    assert batch.mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1] * 2
    assert batch.position.tolist() == [*range(9)] * 2
    assert batch.adv.tolist() == [0, 0, 1, 1, 1, 0, 0, 2, 2, 0, 0, -1, -1, -1, 0, 0, -2, -2]
    assert batch.sampler.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5] * 2)
    assert groups[0].trajectories[0] == stripped()  # the sampled trajectory is not changed
    honest = pack(groups, advantages)
    assert len(honest.segments) == 4 and honest.sampler[honest.mask].tolist() == batch.sampler[batch.mask].tolist()


def test_without_stripping_there_is_no_mismatch():
    groups, advantages = random_groups.groups()
    batch, same = pack(groups, advantages), compare.mismatched(pack)(groups, advantages)
    assert batch.ids.tolist() == same.ids.tolist() and batch.segments == same.segments
    assert compare.with_full_history(Trajectory()) == Trajectory()
