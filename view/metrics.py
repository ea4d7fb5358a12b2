"""The meaning of each metric, for the report page and docs/metrics.md."""

# key -> (formula and unit, healthy values, meaning of a bad value)
MEANINGS = {
    "step": ("rounds of sampling and training so far", "", ""),
    "questions": ("questions taken from the training data so far, over all ranks", "", ""),
    "reward/mean": ("mean outcome of the sampled trajectories, 0 to 1", "rises", "flat: see the next three rows"),
    "reward/std": (
        "standard deviation (ddof 0) within a group, mean over groups",
        "0.2 to 0.5",
        "near 0: the samples of a question agree, and nothing can be learned from them",
    ),
    "reward/all_right": (
        "share of groups whose trajectories all have outcome 1",
        "below 0.7",
        "near 1: the questions have become too easy",
    ),
    "reward/all_wrong": (
        "share of groups whose trajectories all have outcome 0",
        "below 0.7",
        "near 1: too hard, or the answer is never parsed; GRPO learns nothing from them",
    ),
    "credit/adv_abs": (
        "mean absolute advantage of a trained turn",
        "0.3 to 1",
        "0: no group has signal, and the update is skipped (without `--kl_coef`)",
    ),
    "credit/zero_frac": (
        "share of the trained groups in which every advantage is 0",
        "below 0.7",
        "near 1: most rollouts are wasted; for GRPO it equals all_right + all_wrong",
    ),
    "rollout/trajectories": (
        "trajectories sampled in this step, over all ranks, forked ones included",
        "`--questions` × `--group`",
        "lower: RTPO had fewer boundaries than its budget",
    ),
    "rollout/sampled_tokens": ("tokens sampled in this step, over all ranks", "", ""),
    "rollout/turns": (
        "generations per trajectory",
        "between 1 and `--max_turns`",
        "1: the model answers without the tool; at the limit: it never answers",
    ),
    "rollout/action_tokens": (
        "sampled tokens per turn",
        "well below `--max_turn_tokens`",
        "at the limit: turns are cut, see `rollout/stop_length`",
    ),
    "rollout/observation_tokens": (
        "tokens per tool output, including tags; the message after an invalid turn does not count",
        "up to `--max_observation_tokens`",
        "at the limit: outputs are cut",
    ),
    "rollout/tool_calls": (
        "tool calls that ran, per trajectory",
        "depends on the task",
        "0 for 3 steps: a warning; the policy learns to avoid the tool",
    ),
    "rollout/tool_used": (
        "share of trajectories with at least one tool call",
        "above 0.8 on search tasks",
        "falls towards 0: the tool does not help, or is broken",
    ),
    "rollout/tool_success": (
        "share of tool calls that neither failed nor timed out",
        "above 0.98",
        "below 0.8 for 3 steps: a warning",
    ),
    "rollout/stop_answer": ("share of trajectories that ended with an answer", "rises towards 1", ""),
    "rollout/stop_max_turns": (
        "share of trajectories that ended with a tool call in the last allowed turn",
        "low",
        "high: raise `--max_turns`, or the model loops",
    ),
    "rollout/stop_length": (
        "share of trajectories that ended with a turn cut at `--max_turn_tokens`",
        "below 0.05",
        "high: raise the limit, or the model rambles",
    ),
    "rollout/stop_context": (
        "share of trajectories that ended because the context is full",
        "below 0.05",
        "high: raise `--max_context`, cut `--max_observation_tokens`",
    ),
    "rollout/stop_invalid": (
        "share of trajectories whose last turn was neither a tool call nor an answer",
        "below 0.05",
        "high: the model does not know the tags; try `--shots`",
    ),
    "loss/policy": (
        "weighted sum of token losses over all ranks, mean over the step's updates",
        "near 0 for one update per phase",
        "not a progress measure: see `reward/mean`",
    ),
    "loss/clip_frac": (
        "weight of the tokens whose clipped term is the smaller one",
        "0 with one update per phase, else below 0.2",
        "high: too many updates on the same samples, or `--lr` is too high",
    ),
    "loss/kl_ref": (
        "estimate of KL(policy ‖ reference) by `--kl`, nats per token",
        "grows slowly",
        "jumps: the policy diverges; null without `--kl_coef`",
    ),
    "policy/entropy": (
        "−Σ p log p over the vocabulary, nats per trained token",
        "falls slowly",
        "near 0: the samples of a group become equal; growing without bound: the policy degenerates",
    ),
    "policy/ratio_max": (
        "largest ratio of p to p before the phase, over the trained tokens of the step",
        "1 with one update per phase",
        "far above 1 + `--clip_high`: updates too large",
    ),
    "policy/sampler_absdiff": (
        "mean of |d|, nats per trained token",
        "float32: below 2e-5; bf16: below 0.02",
        "trainer and engine disagree: wrong adapter version, tokenizer, precision",
    ),
    "policy/sampler_maxdiff": ("largest |d| of the step", "float32: below 1e-4", "as above; a single token is enough"),
    "policy/sampler_kl": (
        "mean of e^d − d − 1, nats per trained token: KL(engine ‖ trainer)",
        "below 0.01",
        "as above",
    ),
    "policy/sampler_ratio": ("mean of e^d", "0.99 to 1.01", "as above; `--tis_cap` truncates e^d"),
    "policy/sampler_nonfinite": (
        "share of trained tokens whose log-probability the engine gave as nan or infinite: they have weight 1 and are left out of the rows above",
        "0",
        "above 0: a fault of the engine; please report it",
    ),
    "optim/lr": ("learning rate applied", "", ""),
    "optim/grad_norm": (
        "Euclidean norm of the gradient summed over ranks, before clipping",
        "steady",
        "spikes: try `--grad_clip` or a lower `--lr`; 0: no group has signal, and the update is skipped (without `--kl_coef`)",
    ),
    "optim/skipped": (
        "updates skipped because the gradient was not finite",
        "0",
        "more than a rare one: check `policy/sampler_maxdiff` and `--dtype`",
    ),
    "optim/updates": (
        "optimizer steps of this step that moved the policy",
        "epochs × minibatches × phases",
        "less: phases without signal or without a finite gradient",
    ),
    "time/rollout": (
        "seconds of sampling and tools, slowest rank",
        "",
        "far above the time for the same tokens without tools: slow tools",
    ),
    "time/update": ("seconds of packing, forward, backward and publishing, slowest rank", "", ""),
    "time/evaluate": ("seconds of evaluation, slowest rank", "", "high: raise `--eval_every`"),
    "time/step": ("seconds since the previous line", "", ""),
    "time/rank_spread": (
        "seconds of sampling and tools, slowest rank minus fastest: the others wait for so long",
        "far below `time/rollout`",
        "high: one rank has the longest trajectories or the slowest tools",
    ),
    "perf/tokens_per_s": ("sampled tokens of all ranks / `time/rollout`", "", ""),
    "perf/trained_tokens_per_s": (
        "tokens through forward and backward, including context, of all ranks / `time/update`",
        "",
        "",
    ),
    "perf/peak_gb": (
        "GiB: peak GPU allocation of the step without what the engine allocated at its start (rank 0); on a CPU, peak resident size so far",
        "flat",
        "grows: a leak",
    ),
    "perf/free_gb": (
        "GiB: least free memory of the GPU, seen before and after sampling and at the end of the step (rank 0); null on a CPU",
        "some GiB",
        "near 0: the next long trajectory may run out of memory",
    ),
    "perf/rss_gb": ("GiB: resident size now (rank 0)", "flat after some steps", "grows: a leak"),
    "perf/open_files": ("open file descriptors (rank 0)", "constant", "grows: something is not closed"),
    "perf/threads": (
        "threads (rank 0)",
        "constant",
        "grows: hanging tool calls were abandoned, and their threads remain",
    ),
    "eval/em": (
        "mean outcome: the share of answers that equal a gold, after SQuAD normalisation or, on math tasks, by value; other tasks have their own scores",
        "rises",
        "falls while `reward/mean` rises: overfitting, or sampling and greedy decoding diverge",
    ),
    "eval/f1": ("mean word-level F1 with the best gold; null on math tasks", "rises", ""),
    "eval/turns": ("generations per trajectory", "as `rollout/turns`", ""),
    "eval/tool_calls": ("tool calls per trajectory", "as `rollout/tool_calls`", ""),
    "eval/tool_used": ("share of trajectories with a tool call", "as `rollout/tool_used`", ""),
}


def row(key: str) -> str:
    """Return the row of docs/metrics.md for a metric."""
    cells = (cell.replace("|", "\\|") for cell in MEANINGS[key])
    return f"| `{key}` | " + " | ".join(cells) + " |"


def hint(key: str) -> str:
    """Return the meaning of a metric in up to three lines, or "" if it is unknown: algorithms add their own."""
    titles = ("", "healthy: ", "otherwise: ")
    return "\n".join(title + cell for title, cell in zip(titles, MEANINGS.get(key, ())) if cell)
