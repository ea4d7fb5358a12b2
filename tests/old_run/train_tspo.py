"""TSPO for language models that search over several turns: train_grpo.py, and a reward for the turn that finds the answer.

Turn-level stage-aware policy optimisation (TSPO, arXiv:2601.22776v2) looks at groups in which every trajectory is wrong. GRPO learns
nothing from them. TSPO rewards the turn whose retrieved text first holds a gold answer (FOLR, first-occurrence latent reward), so that
a near miss counts for more than a failure, and compares these rewards turn by turn within the group. It needs no reward model and
no further samples: the gold answer of the question is enough. All other groups are trained as in GRPO.

    python train_tspo.py --model tiny --task tiny_search             # a laptop without a GPU, minutes
    torchrun --nproc_per_node 8 train_tspo.py --model Qwen2.5-3B --task questions.jsonl --corpus documents.jsonl

Diff it against train_grpo.py. Overrides: imports, compute_advantages.

What the public sources of the paper leave open, and what stands here (docs/tspo.md says why):
  1. Which turns are rewarded: the one of the first occurrence (--folr_scope at), not those before it.
  2. What a turn is compared with: the same turn of the group's other trajectories (--norm_set turn_index), as far as they have one.
  3. How a gold is found: as a substring in normal form (--match), golds of any kind (--trivial_golds).
  4. The size of the reward (--folr_alpha): without effect as long as advantages are divided by their deviation.
Departures from the paper: those of train_grpo.py (its DEPARTS 1 to 3).

Shapes: G trajectories of a group, K turns of a trajectory, T tokens of a batch, laid end to end without padding.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from common import run, scores
from tools.search import documents_in


@dataclass
class Args:
    model: str = "Qwen2.5-3B"
    """a folder, a hub id, a short name such as Qwen2.5-7B-Instruct, or an embedded model: tiny, smollm2"""
    adapter: str = ""
    """start from this LoRA adapter instead of a fresh one; it keeps its own rank and scale"""
    task: str = "hotpotqa"
    """a data set (docs/data.md), tiny_search, tiny_math, reasoning_gym:<name>, or a JSONL file of {"question", "answers"} lines"""
    task_kind: Literal["search", "math"] = "search"
    """of a JSONL file: search (with --corpus or --retriever; exact match) or math (with Python; answers compared by value)"""
    corpus: str = ""
    """JSONL file of documents {"id", "title", "text"} to search in"""
    retriever: str = ""
    """search with a server instead of a corpus: the address of a Search-R1 compatible one, such as http://127.0.0.1:8000/retrieve,
    or llm:<OpenAI-compatible address>#<model>, a language model that plays the search engine (ZeroSearch)"""
    topk: int = 3
    """documents a search returns"""
    limit: int = 0
    """train on the first so many questions only (0: all)"""
    shots: int = 0
    """worked examples in the prompt, at most 2: for models that do not know the tags"""
    template: Literal["auto", "on", "off"] = "auto"
    """put the prompt through the tokenizer's chat template (auto: when it has one)"""
    protocol: Literal["tags", "chat"] = "tags"
    """how a tool is called: by tags in the text, or as the model's own chat template has it"""
    tools: Literal["on", "off"] = "on"
    """whether the model has a tool; off: it answers by itself"""
    answer: Literal["tags", "boxed"] = "tags"
    """where its answer stands: in <answer> tags, or in \\boxed{} as in most work on mathematics"""
    context: Literal["full", "strip_think", "window"] = "full"
    """what of its earlier turns the model sees again: all, all but its thinking, or the last --window turns"""
    window: int = 2
    """turns that --context window keeps"""
    out: str = ""
    """run directory (default: out/<script>-<model>-<task>-s<seed>)"""
    resume: bool = False
    """go on with the run in that directory where it stopped; what is not given here is as it was"""
    seed: int = 1
    """of adapter, data order and sampling"""
    steps: int = 200
    """rounds of sampling and training"""
    save_every: int = 50
    """steps between checkpoints (0: only at the end); an evaluation better than all before it is saved too"""
    keep: int = 1
    """checkpoints kept: the last so many (0: all), and always the best by held-out exact match"""
    eval_every: int = 20
    """steps between greedy evaluations on held-out questions (0: only before and after)"""
    eval_questions: int = 200
    """held-out questions"""
    questions: int = 64
    """questions a step, over all ranks"""
    group: int = 8
    """trajectories per question"""
    max_turns: int = 5
    """generations per trajectory; the last one runs no tool"""
    max_turn_tokens: int = 512
    """tokens per generation"""
    max_observation_tokens: int = 512
    """tokens per tool output, its tags included"""
    max_context: int = 4096
    """tokens of context and generation together; a trajectory that reaches it ends"""
    temperature: float = 1.0
    """of sampling; log-probabilities are taken at the same temperature"""
    tool_workers: int = 16
    """tool calls at once (0: one after the other, without a time limit)"""
    tool_timeout: float = 30.0
    """seconds until a tool call is given up"""
    unsafe_python: bool = False
    """run the model's Python where no sandbox works; limits on time, memory and output remain"""
    lr: float = 1e-5
    """learning rate of the LoRA weights (ours; the papers' 1e-6 is for full fine-tuning)"""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """optimizer"""
    grad_clip: float = 1.0
    """largest gradient norm, over all ranks (0: no limit)"""
    epochs: int = 1
    """passes over the samples of a phase"""
    minibatches: int = 1
    """optimizer steps per pass"""
    micro_tokens: int = 4096
    """tokens per forward pass: a memory knob that cannot change a gradient"""
    grad_checkpoint: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    lora_rank: int = 32
    """rank of the adapter"""
    lora_alpha: float = 64
    """scale of the adapter, divided by its rank"""
    load_4bit: bool = False
    """NF4 base (bitsandbytes) in trainer and engine"""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """of the base (auto: bfloat16 on a GPU, float32 on a CPU)"""
    sleep: Literal["full", "kv", "none"] = "full"
    """while training the engine parks its weights and frees its KV pages (full), frees the pages (kv), or keeps all (none)"""
    gpu_memory: float = 0.5
    """share of a GPU's memory for the engine while it is awake"""
    wandb: bool = False
    """mirror metrics to Weights & Biases"""
    tensorboard: bool = False
    """mirror metrics to TensorBoard files in the run directory"""
    dry_run: bool = False
    """load the task, print the memory plan and the first prompt, and stop: no model is loaded"""
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
    folr_alpha: float = 0.5
    """reward of the first occurrence; cancels out where advantages are divided by their deviation"""
    folr_scope: Literal["at", "upto"] = "at"
    """turns that get it: that of the first occurrence, or all up to it"""
    match: Literal["substring", "word"] = "substring"
    """how a gold is looked for in retrieved text, both in normal form: anywhere, or as whole words"""
    trivial_golds: Literal["count", "skip"] = "count"
    """whether golds that any document may hold count: yes, no, and what stands in the question"""
    turn_level: Literal["all_wrong", "all"] = "all_wrong"
    """groups with turn-level advantages (all: in the others they are added to GRPO's)"""
    norm_set: Literal["turn_index", "pooled", "padded"] = "turn_index"
    """what a turn is compared with: the same turn of the others, all turns, or the same turn with 0 for those that had ended"""


def collect(engine, task, args):
    """Yield the groups of each phase. main updates the policy between two yields, and the engine then samples with the newest."""
    yield engine.rollout(task, task.take(args.questions), args.group, progress="rollouts")


def normalise(values, std):
    """Standard scores (ddof 1, as Search-R1), or differences from the mean; zeros where there is nothing to compare."""
    mean = sum(values) / len(values)
    centered = [v - mean for v in values]
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    if not std:
        return centered
    deviation = (sum(c * c for c in centered) / (len(values) - 1)) ** 0.5
    return [c / (deviation + 1e-6) for c in centered]


def first_occurrence(trajectory, golds, match):
    """(turn, gold): the first turn whose tool output holds a gold, and which; (None, None) where none does. All in normal form."""
    edge = {"substring": "", "word": " "}[match]
    for k, turn in enumerate(trajectory.turns):
        text = edge + scores.normalise(documents_in(turn.tool_output)) + edge
        if turn.tool_status == "ok" and (held := [gold for gold in golds if edge + gold + edge in text]):
            return k, held[0]
    return None, None


def normalise_turns(values_GK, norm_set, std):
    """One number per turn as standard scores over the group's same turns (padded: 0 for those that had ended), or pooled over all."""
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


def compute_advantages(group, args):
    """adv_GK: GRPO's where an answer was right; where all are wrong, first-occurrence rewards compared turn by turn.  TSPO sec. 3"""
    adv_G = normalise([t.outcome for t in group.trajectories], args.adv_std)
    adv_GK = [[adv] * len(t.turns) for adv, t in zip(adv_G, group.trajectories)]
    question = scores.normalise(group.question.text)
    golds = [gold for gold in map(scores.normalise, group.question.golds) if gold]
    trivial = {gold for gold in golds if gold in ("yes", "no") or f" {gold} " in f" {question} "}
    golds = sorted(set(golds) - trivial) + sorted(trivial if args.trivial_golds == "count" else ())
    hits = [first_occurrence(t, golds, args.match) for t in group.trajectories]
    all_wrong = max(t.outcome for t in group.trajectories) <= 0  # by outcome alone: FOLR does not make an answer right
    if all_wrong or args.turn_level == "all":
        reached = {"at": lambda k, hit: k == hit, "upto": lambda k, hit: k <= hit}[args.folr_scope]
        reward_GK = [
            [args.folr_alpha * (hit is not None and reached(k, hit)) for k in range(len(t.turns))]
            for t, (hit, _) in zip(group.trajectories, hits)
        ]
        turn_GK = normalise_turns(reward_GK, args.norm_set, args.adv_std)
        adv_GK = [[a + b for a, b in zip(*both)] for both in zip(adv_GK, turn_GK)]
    found = [gold for _, gold in hits if gold]
    stats = {
        "near_miss": fmean(t.outcome <= 0 and hit is not None for t, (hit, _) in zip(group.trajectories, hits)),
        "revived": float(any(map(any, adv_GK))) if all_wrong else None,
        "trivial_hits": fmean(gold in trivial for gold in found) if found else None,
        "short_hits": fmean(len(gold) <= 3 for gold in found) if found else None,
    }
    for k in range(args.max_turns):
        stats[f"hit_turn_{k + 1}"] = fmean(hit == k for hit, _ in hits)
    return adv_GK, stats


def prepare(batch, policy, args):
    """Fill batch.old where the policy moves within a phase, and batch.ref where there is a KL term; before any update."""
    if args.epochs * args.minibatches > 1:
        batch.old = policy.logps(batch, grad=False)
    if args.kl_coef:  # DEPARTS 1
        batch.ref = policy.logps(batch, adapter=False, grad=False)


def token_weights(batch, total, args):
    """weight (T,) of each trained token in the loss of one optimizer step; total(x) sums a number over ranks.

    Fixed before the step is split into micro-batches. Tokens without signal (advantage 0) stay in the denominator.
    """
    mask = batch.mask.float()
    if args.average == "token":  # DEPARTS 2
        return mask / max(total(mask.sum()), 1)
    if args.average == "constant":
        longest = args.max_turns * args.max_turn_tokens
        return mask / max(total((mask / batch.trained_in("trajectory").clamp(min=1)).sum()) * longest, 1)
    share = mask / batch.trained_in(args.average).clamp(min=1)  # sums to 1 in each turn or trajectory
    return share / max(total(share.sum()), 1)


def policy_loss(logp, batch, args):
    """Clipped surrogate, eq. (3), plus KL to the reference, eq. (4). Returns the weighted sum over tokens, and sums to log."""
    old = logp.detach() if batch.old is None else batch.old
    log_ratio = (logp - old) * batch.mask
    if args.ratio != "token":
        log_ratio = batch.mean_by(log_ratio, {"sequence": "trajectory"}.get(args.ratio, args.ratio))
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss = -(ratio * batch.adv).minimum(clipped * batch.adv)  # eq. (3)
    if args.tis_cap:  # DEPARTS 3
        tis = ((old - batch.sampler) * batch.mask).exp()
        loss = loss * tis.clamp(max=args.tis_cap)
    policy = (batch.weight * loss).sum()
    stats = {
        "policy": policy,
        "clip_frac": (batch.weight * (ratio * batch.adv > clipped * batch.adv)).sum(),
    }
    if args.kl_coef:
        gap = (batch.ref - logp) * batch.mask
        kl = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - gap - 1}[args.kl]  # k3: eq. (4)
        stats["kl_ref"] = (batch.weight * kl).sum()
        policy = policy + args.kl_coef * stats["kl_ref"]
    return policy, stats


def evaluate(engine, task, args, log, step):
    """One greedy trajectory for each held-out question, shared out over ranks."""
    with log.timed("evaluate"):
        held_out = task.held_out[run.rank() :: run.world_size()]
        groups = engine.rollout(task, held_out, 1, greedy=True, progress="evaluation")
    log.evaluation(groups)
    log.samples(step, "eval", groups)


def main(args):
    from common import checkpoint, show, tasks, turns  # here and not above: --help answers without torch
    from common.log import Log
    from common.policy import Policy
    from common.rollout import Engine

    # ---- 1. setup
    task = tasks.load(args)
    device = run.setup(args, __file__)
    policy = Policy(args, device)
    log = Log(args)
    saver = checkpoint.Saver(args, policy, task, log)  # --resume: all is as it was, before the engine takes the adapter
    engine = Engine(policy, args)
    engine.self_test(policy)
    if saver.done is None:
        evaluate(engine, task, args, log, step=0)
        saver.save(log.write(0, task.position))
    for step in saver.steps():
        # ---- 2. rollout
        engine.begin(step)
        phases = collect(engine, task, args)
        while True:
            with log.timed("rollout"):
                groups = next(phases, None)
            if groups is None:
                break
            engine.sleep()
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
                batch = turns.pack(groups, advantages)
                prepare(batch, policy, args)
                for _ in range(args.epochs):
                    for minibatch in batch.minibatches(args.minibatches, args.questions):
                        minibatch.weight = token_weights(minibatch, run.total, args)
                        for micro in minibatch.micro(args.micro_tokens):
                            logp, entropy, _ = policy.logps(micro, moments=True)
                            loss, stats = policy_loss(logp, micro, args)
                            loss.backward()
                            log.losses(micro, logp, entropy, stats)
                        log.optim(policy.step(batch.lr_scale))
                engine.publish(policy)
        # ---- 5. evaluate, log, save
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            evaluate(engine, task, args, log, step)
        saver.save(log.write(step, task.position))
    if run.rank() == 0:
        show.summary(run.directory(args), policy.tokenizer)


if __name__ == "__main__":
    run.launch(main, run.parse(Args))
