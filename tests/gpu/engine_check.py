"""Run by test_gpu_engine.py for each sleep mode: start the engine, self-test, sleep, wake. Prints the figures as JSON.

python tests/gpu/engine_check.py MODEL OUT --sleep full [more flags of train_grpo.py]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]


def main(model, out, *flags):
    import torch

    import tasks
    import train_grpo
    from common import run
    from common.args import parse_args
    from common.policy import Policy
    from common.rollout import Engine

    words = f"--model {model} --task tiny_search --out {out} --questions 4 --group 4 --max_context 768".split()
    words += "--max_turns 3 --max_turn_tokens 32 --max_observation_tokens 64 --lora_rank 8 --gpu_memory 0.4".split()
    args = parse_args(train_grpo.Args, [*words, *flags])
    task = tasks.load(args)
    device, _ = run.setup(args, train_grpo.__file__)
    policy = Policy(args, device)
    engine = Engine(policy, args)

    def free():
        if device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def sampled():
        engine.begin(1)
        groups = engine.rollout(task, task.held_out[:4], 1, greedy=True)
        return [turn.action_ids for group in groups for t in group.trajectories for turn in t.turns]

    seen = dict(difference=engine.self_test(policy), ids=[sampled()], awake=[free()], asleep=[])
    for _ in range(3):
        engine.sleep()
        seen["asleep"].append(free())
        seen["ids"].append(sampled())  # wakes the engine
        seen["awake"].append(free())
    seen["again"] = engine.self_test(policy)  # the adapter still applies
    seen["total"] = 0 if device.type == "cpu" else torch.cuda.mem_get_info()[1]
    seen["weights"] = sum(p.numel() * p.element_size() for p in policy.model.get_base_model().parameters())
    return seen


if __name__ == "__main__":
    print("SEEN " + json.dumps(main(*sys.argv[1:])))
