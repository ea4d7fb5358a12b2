"""The card of a trained adapter, README.md beside its weights: what it is, how good, how to prompt and load it."""

import json
from pathlib import Path

from view import show

CARD = """---
base_model: {base}
library_name: peft
tags: [lora, reinforcement-learning, tool-use, turnwise]
---
# {name}

A LoRA adapter (rank {rank}) for `{model}`, trained with Turnwise: `{script}` on `{task}`, {steps} steps, seed {seed}.
All flags are in `args.json` of the run directory, versions and machine in `environment.json`.

## Results

{questions} held-out questions, greedy, with the same prompt and tool:

| | before | after step {step} |
|---|---|---|
{rows}

## Prompt

The first context of question {question}, as the model sees it:

~~~
{prompt}
~~~

A generation ends at: {stop}, or an end token. The tool's output then follows as in training (`--protocol {protocol}`).

## Use

~~~python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "THIS_FOLDER")
~~~

~~~
vllm serve {base} --enable-lora --max-lora-rank {slot} --lora-modules agent=THIS_FOLDER
~~~
"""


def write(folder: Path, task, evaluations: list[dict]) -> None:
    """Write the card and the tokenizer beside the weights of a run's adapters.

    task: of the run. evaluations: the lines of metrics.jsonl that have an evaluation, the first from before training.
    """
    from common.rollout import lora_slot  # not at module level: a look at a run needs no torch

    args = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    command = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["command"]
    question = task.held_out[0]
    for adapter in (folder / "adapter", folder / "adapter-best"):
        if not (adapter / "adapter_config.json").exists():
            continue
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        step = int(adapter.resolve().parent.name.removeprefix("step-"))
        first, last = evaluations[0], [line for line in evaluations if line["step"] <= step][-1]
        rows = [
            f"| {name} | {first[key]:.3f} | {last[key]:.3f} |"
            for name, key in show.TABLE
            if first.get(key) is not None and last.get(key) is not None
        ]
        values = args | dict(
            base=config["base_model_name_or_path"],
            name=folder.resolve().name,
            rank=config["r"],
            slot=lora_slot(config["r"]),
            script=Path(command[1]).name,
            questions=len(task.held_out),
            step=last["step"],
            rows="\n".join(rows),
            question=question.id,
            prompt=task.decode(task.prompt_ids(question)),
            stop=", ".join(f"`{text}`" for text in task.limits.stop) or "nothing else",
        )
        task.tokenizer.save_pretrained(adapter)
        (adapter / "README.md").write_text(CARD.format_map(values), encoding="utf-8", errors="replace")
