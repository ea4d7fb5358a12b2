"""GTPO for language models that use tools over several turns: train_grpo.py, and a return for each turn.

Group turn policy optimisation (GTPO, arXiv:2511.14846) treats each turn as one action. Each turn has a reward: the outcome for the last
turn, a penalty for a tool call that cannot be parsed and for a first turn without a call. Returns are discounted, so a turn is also credited
with the rewards after it, and are compared with those of the same turn in the group's other trajectories. A trajectory that fails gets
partial credit for how much its code resembles that of the group's correct ones: self-supervised reward shaping.

    python train_gtpo.py --model tiny-math                           # a laptop without a GPU, minutes
    torchrun --nproc_per_node 8 train_gtpo.py --model Qwen2.5-7B --task problems.jsonl --task_kind math

Diff it against train_grpo.py. Overrides: imports, collect, compute_advantages.

What the public sources of the paper leave open, and our choice (reasons in docs/gtpo.md):
  1. What a return is compared with: the same turn of the group's other trajectories (--norm_set turn_index).
  2. Ratio, clip and KL: those of train_grpo.py.
Departures from the paper: those of train_grpo.py (its DEPARTS 1 to 3), and
  4. Code is compared by TF-IDF of token n-grams, or by a model of your choice (--code_embedder); the paper embeds with a commercial one.
  5. If the tool is search, queries are compared instead of code (ours).

Shapes: G trajectories of a group, K turns of a trajectory, T tokens of a batch, laid end to end without padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tasks
from common import ranks, run
from common.args import Shared, parse_args
from common.turns import Group, Trajectory
from tasks import similarity

if TYPE_CHECKING:  # torch is imported in main: --help answers without it
    from torch import Tensor

    from common.batch import Batch
    from common.log import Log
    from common.policy import Policy
    from common.rollout import Engine
    from tasks.task import Task


@dataclass
class Args(Shared):
    """The flags that this script reads. The others are in common/args.py."""

    questions: int = 64
    """questions a step, over all ranks"""
    group: int = 8
    """trajectories per question"""
    steps: int = 200
    """rounds of sampling and training"""
    eval_every: int = 20
    """steps between greedy evaluations on held-out questions (0: only before and after)"""
    epochs: int = 1
    """passes over the samples of a phase"""
    minibatches: int = 1
    """optimizer steps per pass"""
    micro_tokens: int = 4096
    """tokens per forward pass: a memory knob that cannot change a gradient"""
    clip_low: float = 0.2
    """the ratio is clipped below 1 - clip_low"""
    clip_high: float = 0.2
    """the ratio is clipped above 1 + clip_high (DAPO: 0.28)"""
    ratio: Literal["token", "turn", "sequence"] = "token"
    """importance ratio of each token, or the geometric mean over its turn or trajectory (GSPO)"""
    average: Literal["token", "turn", "trajectory", "constant"] = "token"
    """how token losses are averaged (constant: sums divided by the longest trajectory possible, Dr. GRPO)"""
    adv_std: bool = True
    """divide advantages by the group's standard deviation"""
    kl_coef: float = 0.0
    """weight of the KL to the reference, the base without adapter"""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """estimator of that KL; in the loss k1 only measures: its gradient is zero on average"""
    tis_cap: float = 2.0
    """largest weight by the ratio of trainer to engine (0: no weight)"""
    # ---- algorithm
    gamma: float = 0.9
    """discount per turn (the paper's best)"""
    format_penalty: float = 0.1
    """taken from a turn that neither calls as it should nor answers, and from a first turn without a call (paper: 0.1)"""
    shaping: float = 0.5
    """partial credit of a failed trajectory whose code equals that of the correct ones (paper: 0.5; 0: none)"""
    code_embedder: str = ""
    """model that embeds code for its similarity, a folder or hub id (default: no model, TF-IDF of token n-grams)"""
    norm_set: Literal["turn_index", "pooled", "padded"] = "turn_index"
    """what a turn is compared with: the same turn of the others, all turns, or the same turn with 0 for those that had ended"""

    def __post_init__(self):
        if self.code_embedder:  # at start-up: a name that is wrong must not cost a rollout
            similarity.load_embedder(self.code_embedder)


def collect(engine: "Engine", task: "Task", args: Args) -> Iterator[list[Group]]:
    """Yield the groups; info["similarity"] is that of a trajectory's code to the code of the correct ones, 0 to 1.  GTPO sec. 3.4"""
    groups = engine.rollout(task, task.take(args.questions), args.group, progress="rollouts")
    for group in groups:
        code_G = ["\n".join(turn.tool_input for turn in t.turns if turn.tool) for t in group.trajectories]  # DEPARTS 5
        right = [g for g, t in enumerate(group.trajectories) if t.outcome > 0]
        if 0 < len(right) < len(code_G):
            for t, alike in zip(group.trajectories, similarity.cosines(code_G, args.code_embedder)[:, right].mean(1)):
                t.info["similarity"] = float(alike)  # DEPARTS 4
    yield groups


def normalise(values: list[float], std: bool) -> list[float]:
    """Return standard scores (ddof 1, as in Search-R1), or without std differences from the mean; zeros if all values are equal."""
    mean = sum(values) / len(values)
    centered = [v - mean for v in values]
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    if not std:
        return centered
    deviation = (sum(c * c for c in centered) / (len(values) - 1)) ** 0.5
    return [c / (deviation + 1e-6) for c in centered]


def normalise_turns(values_GK: list[list[float]], norm_set: str, std: bool) -> list[list[float]]:
    """Return standard scores of turns over the group's same turns (padded: 0 for those that had ended), or pooled over all turns."""
    standard_GK = [[0.0] * len(values_K) for values_K in values_GK]
    places = [(g, k) for g, values_K in enumerate(values_GK) for k in range(len(values_K))]
    longest = max(map(len, values_GK))
    sets = [places] if norm_set == "pooled" else [[place for place in places if place[1] == k] for k in range(longest)]
    for chosen in filter(None, sets):
        ended = [0.0] * (len(values_GK) - len(chosen)) if norm_set == "padded" else []
        standard = normalise([values_GK[g][k] for g, k in chosen] + ended, std)
        for (g, k), value in zip(chosen, standard):
            standard_GK[g][k] = value
    return standard_GK


def turn_rewards(trajectory: Trajectory, args: Args) -> list[float]:
    """Return one reward per turn: penalties, and in the last turn the outcome or partial credit.  GTPO sec. 3.3, 3.4"""
    reward_K = [
        -args.format_penalty if turn.tool_status == "invalid" or (k == 0 and turn.tool is None) else 0.0
        for k, turn in enumerate(trajectory.turns)  # a call that fails or times out is not invalid
    ]
    if reward_K:  # the similarity is a mean already: it is not divided by the number of correct trajectories again
        reward_K[-1] += trajectory.outcome or args.shaping * trajectory.info.get("similarity", 0.0)
    return reward_K


def compute_advantages(group: Group, args: Args) -> tuple[list[list[float | None]], dict[str, float | None]]:
    """Return adv_GK: discounted returns of turn rewards, normalised over the group.  GTPO sec. 3"""
    return_GK = [turn_rewards(t, args) for t in group.trajectories]
    for return_K in return_GK:
        for k in reversed(range(len(return_K) - 1)):
            return_K[k] += args.gamma * return_K[k + 1]
    return normalise_turns(return_GK, args.norm_set, args.adv_std), return_stats(group)


def return_stats(group: Group) -> dict[str, float | None]:
    """Return numbers to log: the share of invalid turns, and how similar the code of failed trajectories is to that of correct ones."""
    invalid = [turn.tool_status == "invalid" for t in group.trajectories for turn in t.turns]
    alike = [t.info["similarity"] for t in group.trajectories if t.outcome <= 0 and "similarity" in t.info]
    return {
        "invalid": sum(invalid) / max(len(invalid), 1),
        "similarity": sum(alike) / len(alike) if alike else None,
        "similarity_range": max(alike) - min(alike) if alike else None,
    }


def prepare(batch: "Batch", policy: "Policy", args: Args) -> None:
    """Fill batch.old if the policy is updated more than once in a phase, and batch.ref if there is a KL term; before any update."""
    if args.epochs * args.minibatches > 1:
        batch.old = policy.logps(batch, grad=False)
    if args.kl_coef:  # DEPARTS 1
        batch.ref = policy.logps(batch, adapter=False, grad=False)


def token_weights(batch: "Batch", total: Callable, args: Args) -> "Tensor":
    """Return the weight (T,) of each trained token in the loss of one optimizer step; total(x) sums a number over ranks.

    Tokens without signal (advantage 0) stay in the denominator.
    """
    mask = batch.mask.float()
    if args.average == "token":  # DEPARTS 2
        return mask / max(total(mask.sum()), 1)
    if args.average == "constant":
        longest = args.max_turns * args.max_turn_tokens
        return mask / max(total((mask / batch.trained_in("trajectory").clamp(min=1)).sum()) * longest, 1)
    share = mask / batch.trained_in(args.average).clamp(min=1)  # sums to 1 in each turn or trajectory
    return share / max(total(share.sum()), 1)


def policy_loss(logp: "Tensor", batch: "Batch", args: Args) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Return the clipped surrogate, eq. (3), plus KL to the reference, eq. (4), as a weighted sum over tokens, and sums to log."""
    old = logp.detach() if batch.old is None else batch.old
    log_ratio = (logp - old) * batch.mask
    if args.ratio != "token":
        log_ratio = batch.mean_by(log_ratio, {"sequence": "trajectory"}.get(args.ratio, args.ratio))
    ratio = log_ratio.clamp(-20, 20).exp()  # finite for every token; a clip by 20 nats changes no ordinary step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss = -(ratio * batch.adv).minimum(clipped * batch.adv)  # eq. (3)
    if args.tis_cap:  # DEPARTS 3
        # A log-probability of the engine that is not finite must not make the whole loss nan: its token has weight 1.
        tis = ((old - batch.sampler) * batch.mask).nan_to_num(0.0, 0.0, 0.0).exp()
        loss = loss * tis.clamp(max=args.tis_cap)
    policy = (batch.weight * loss).sum()
    stats = {
        "policy": policy,
        "clip_frac": (batch.weight * (ratio * batch.adv > clipped * batch.adv)).sum(),
    }
    if args.kl_coef:
        gap = ((batch.ref - logp) * batch.mask).clamp(-20, 20)
        kl = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - gap - 1}[args.kl]  # k3: eq. (4)
        stats["kl_ref"] = (batch.weight * kl).sum()
        policy = policy + args.kl_coef * stats["kl_ref"]
    return policy, stats


def evaluate(engine: "Engine", task: "Task", args: Args, log: "Log", step: int) -> None:
    """Sample one greedy trajectory for each held-out question, divided among the ranks, and log them."""
    with log.timed("evaluate"):
        held_out = task.held_out[ranks.rank() :: ranks.world_size()]
        groups = engine.rollout(task, held_out, 1, greedy=True, progress="evaluation")
    log.evaluation(groups)
    log.samples(step, "eval", groups)


def main(args: Args) -> None:
    # ---- 1. setup
    task = tasks.load(args)
    # Here and not above: --help and a wrong --task are answered without torch.
    from common import checkpoint
    from common.batch import pack
    from common.log import Log
    from common.policy import Policy
    from common.rollout import Engine
    from view import plan, record, report, self_test

    args = plan.fit(args, task)  # before any model is loaded; --dry_run ends here
    device, last = run.setup(args)  # last: the checkpoint to resume from, or None
    record.write(args, __file__, last)
    policy = Policy(args, device, last)
    log = Log(args, last)
    # Restores adapter, optimizer and random states; must come before Engine(), which publishes the adapter.
    saver = checkpoint.Saver(args, policy, task, log, last)
    engine = Engine(policy, args)
    self_test.check(
        engine, policy
    )  # else an engine that samples from another policy would only look like slow learning
    if saver.done is None:
        evaluate(engine, task, args, log, step=0)
        saver.save(log.write(0, task.position))
    for step in saver.steps():
        # ---- 2. rollout
        engine.begin(step)
        for groups in log.time_each("rollout", collect(engine, task, args)):
            engine.sleep()  # the update needs the memory of its KV pages; sampling wakes it
            # ---- 3. credit
            advantages = []
            for group in groups:
                adv_GK, stats = compute_advantages(group, args)
                advantages.append(adv_GK)
                for key, value in stats.items():
                    log.mean(f"credit/{key}", value)
            log.rollouts(groups, advantages)
            log.samples(step, "train", groups, advantages)
            # ---- 4. update
            with log.timed("update"):
                batch = pack(groups, advantages)
                prepare(
                    batch, policy, args
                )  # once for all epochs: the old policy must be that of before the first step
                for _ in range(args.epochs):
                    for minibatch in batch.minibatches(args.minibatches, args.questions):
                        # Weights come before the split: their denominators are of the whole step, on all ranks, so
                        # --micro_tokens cannot change a gradient.
                        minibatch.weight = token_weights(minibatch, ranks.total, args)
                        for micro in minibatch.micro(args.micro_tokens):
                            logp, entropy = policy.logps(micro, moments=["entropy"])
                            loss, stats = policy_loss(logp, micro, args)
                            loss.backward()
                            log.losses(micro, logp, entropy, stats)
                        log.optim(policy.step(batch.lr_scale))
                engine.publish(policy)  # saves the adapter; the engine loads the newest when it next samples
        # ---- 5. evaluate, log, save
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            evaluate(engine, task, args, log, step)
        saver.save(log.write(step, task.position))
    if ranks.rank() == 0:
        report.summary(run.directory(args), task)


if __name__ == "__main__":
    run.launch(main, parse_args(Args))
