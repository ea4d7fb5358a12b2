"""What a run shows at its end: a before/after table, a learning curve, and one trajectory turn by turn."""

import json
import sys
from pathlib import Path

from common import run

TABLE = (("exact match", "eval/em"), ("F1", "eval/f1"), ("turns", "eval/turns"), ("tool calls", "eval/tool_calls"))


def stream(path):
    """The objects of a JSONL file, one after the other: samples.jsonl may be larger than memory."""
    with open(path, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def summary(folder, tokenizer):
    """Print the table, the path of the curve, and the tutorial trajectory with its tokens (rank 0)."""
    if run.rank() > 0:
        return
    folder = Path(folder)
    metrics = list(stream(folder / "metrics.jsonl"))
    evals = [line for line in metrics if line["eval/em"] is not None]
    first, last = evals[0], evals[-1]
    print(f"\nHeld-out questions, greedy        before   after step {last['step']}")
    for name, key in TABLE:
        print(f"  {name:<30}{first[key]:8.3f}{last[key]:8.3f}")
    print(f"\nLearning curve: {curve(metrics, folder / 'curve.png')}")
    chosen = tutorial(stream(folder / "samples.jsonl"))
    if chosen:
        print(f"\nOne trajectory of step {chosen['step']}:")
        print(describe(chosen, tokenizer))
    print(f"\nMetrics, samples and adapter: {folder}/")
    sys.stdout.flush()


def curve(metrics, path):
    """Draw held-out exact match and training reward over steps. Returns the path of the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, style in (
        ("reward/mean", "mean outcome of samples", "-"),
        ("eval/em", "held-out exact match, greedy", "o-"),
    ):
        points = [(line["step"], line[key]) for line in metrics if line[key] is not None]
        axes.plot(*zip(*points), style, label=label)
    axes.set(xlabel="step", ylim=(0, 1), title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def tutorial(samples):
    """A training sample that shows the most: right, with tool calls, in a group that also failed; the latest such one."""
    trained = (s for s in samples if s["kind"] == "train" and s["turns"])

    def worth(s):
        signal = any(t["advantage"] for t in s["turns"])
        calls = sum(t["tool_status"] == "ok" for t in s["turns"])
        return signal, s["outcome"], min(calls, 2), s["step"]

    return max(trained, key=worth, default=None)


def tokens(text, count, tokenizer):
    """A turn's text with a bar between its tokens; as it is when the tokenizer splits it into another number than was sampled."""
    ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer else []
    return "|".join(tokenizer.decode([i]) for i in ids) if len(ids) == count else text


def describe(sample, tokenizer=None):
    """A line of samples.jsonl as text, turn by turn; with a tokenizer a bar stands between the sampled tokens."""
    lines = [f"  question: {sample['question']}   gold: {' | '.join(sample['golds'])}"]
    for k, turn in enumerate(sample["turns"], 1):
        adv = turn["advantage"]
        credit = (
            "not trained" if adv is None else f"advantage {adv:+.2f}" if isinstance(adv, float) else f"advantage {adv}"
        )
        lines.append(f"  turn {k}   {turn['tokens']} tokens   {credit}")
        lines += [f"    {line}" for line in tokens(turn["text"], turn["tokens"], tokenizer).strip().splitlines()]
        if turn["tool_status"]:
            what = f"{turn['tool']}({turn['tool_input']!r})" if turn["tool"] else "no action"
            lines.append(f"    {what}: {turn['tool_status']}, {turn['observation_tokens']} tokens")
            lines += [f"    > {line}" for line in turn["tool_output"].strip().splitlines()]
    lines.append(f"  answer: {sample['answer']}   outcome {sample['outcome']:g}   stop: {sample['stop']}")
    return "\n".join(lines)
