"""From scripted traces to a tiny base model: its tokenizer, its pretraining, and where it is kept.

A trace is what a trajectory looks like: a list of (text, kind), kind one of "prompt", "turn" (what the model writes) and "found" (a
tool's output, without its tags). What the traces say is the business of a world: tiny_search.py (searching), tiny_math.py (Python).
"""

import contextlib
import hashlib
import json
import random
import shutil
from pathlib import Path

from common import cache

# Heads of 32 are the smallest that vLLM serves on a CPU; contexts are short, hence the small theta.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
BATCH = 32
SHIPPED = Path(__file__).with_name("bases")
SAMPLED = 256  # lessons that go into the key of a base
MUON_LR, ADAM_LR = 0.02, 0.006  # of the matrices; of embeddings, norms and biases


def make_tokenizer(texts, tags, min_frequency):
    """Byte-level BPE of the pieces of wording that the texts hold at least `min_frequency` times; each of the tags is a token.

    It splits text as Qwen2's tokenizer does: transformers loads the tokenizer of any Qwen2 model as that class.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    for tag in tags:
        texts = [text.replace(tag, "\0") for text in texts]
    bpe, qwen = Tokenizer(models.BPE()), Qwen2Tokenizer().backend_tokenizer
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen.normalizer, qwen.pre_tokenizer, qwen.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=min_frequency,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((part for text in texts for part in text.split("\0")), trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",  # never needed, but the default would be one token more than the model has
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _encode(tokenizer, traces, prefix, around):
    """Traces piece by piece as the trainer will hold them, but in one call of the tokenizer, which is far faster.

    -> list of (ids after the ids `prefix` that all have in common, for each of these ids whether the model writes it).
    """
    around = [tokenizer.encode(tag) for tag in around]
    encoded = iter(tokenizer([text for trace in traces for text, _ in trace])["input_ids"])
    rows = []
    for trace in traces:
        ids, own = [], []
        for _, kind in trace:
            piece = next(encoded)
            if kind == "found":  # as tags.cut_observation: the outputs are shorter than any sensible limit
                piece = around[0] + piece + around[1]
            ids += piece
            own += [kind == "turn"] * len(piece)
        assert ids[: len(prefix)] == prefix, "the instruction must end where a token ends"
        rows.append((ids[len(prefix) :] + [tokenizer.eos_token_id], own[len(prefix) :] + [True]))
    return rows


def _train(tokenizer, lesson, steps, wording):
    """Pretrain on scripted traces -> model (float32, on the CPU).

    lesson(rng, done) makes a trace, `done` being the share of the steps that lie behind; only what the model itself writes is
    learned. All rows begin with the instruction: its keys and values are computed once a step and shared.
    """
    import torch
    from tqdm import tqdm
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **SHAPE,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",  # on a CPU and at these lengths faster than the fused kernel
    )
    model = Qwen2ForCausalLM(config).float().train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    optimizers = [
        muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    prefix = tokenizer.encode(wording.instruction)
    rng = random.Random(2)
    bar = tqdm(range(steps), desc="pretraining a tiny base (once)")
    for step in bar:
        done = step / steps
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / (0.03 * steps), (1 - done) / 0.3)
        traces = [lesson(rng, done) for _ in range(BATCH)]
        rows = sorted(_encode(tokenizer, traces, prefix, wording.around), key=lambda row: len(row[0]))
        loss = 0.0
        shared_prefix = model.model(torch.tensor([prefix]), use_cache=True).past_key_values
        for part in (rows[: BATCH // 2], rows[BATCH // 2 :]):  # alike in length: less padding
            width = max(len(ids) for ids, _ in part)
            ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in part])
            learned = torch.tensor([own[1:] + [False] * (width - len(own)) for _, own in part])
            shared = [[kv.expand(len(part), -1, -1, -1) for kv in layer[:2]] for layer in shared_prefix]
            hidden = model.model(ids[:, :-1], past_key_values=DynamicCache(shared), use_cache=True).last_hidden_state
            logits = model.lm_head(hidden[learned]).float()
            loss += torch.nn.functional.cross_entropy(logits, ids[:, 1:][learned], reduction="sum")
        loss = loss / sum(sum(own) for _, own in rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


def muon(matrices, lr, momentum, weight_decay):
    """The optimizer Muon (Jordan et al., 2024), with Nesterov momentum, in float32.

    torch.optim.Muon orthogonalises in bfloat16, which a CPU without such instructions emulates: ten times slower, and other numbers.
    """
    import torch

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - momentum)
                    update = orthogonal(p.grad.lerp(average, momentum))
                    p.mul_(1 - group["lr"] * weight_decay)
                    p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)

    def orthogonal(matrix):
        """The nearest matrix whose singular values are all about 1: five quintic Newton-Schulz steps."""
        x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    return Muon(matrices, dict(lr=lr))


def key(lesson, steps, wording):
    """A hash of what a base is made from: the hyper-parameters, the texts around questions and outputs, and lessons of every stage."""
    lessons = [lesson(random.Random(i), i / SAMPLED) for i in range(SAMPLED)]
    made_from = [SHAPE, BATCH, MUON_LR, ADAM_LR, steps, wording.instruction, wording.around, lessons]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]


def base(name, tokenizer, lesson, steps, wording):
    """Directory of a tiny base (weights, tokenizer): the one that comes with the project, or, when what it is made from has changed, one
    built at the first call on a machine, in some five minutes on two cores, and cached."""
    wanted = key(lesson, steps, wording)
    shipped = SHIPPED / name / wanted
    path = shipped if shipped.exists() else cache.cache_dir() / name / wanted
    with contextlib.nullcontext() if path == shipped else cache.locked(path):
        if not path.exists():
            build(path, tokenizer, lesson, steps, wording)
    return path


def build(path, tokenizer, lesson, steps, wording):
    """Pretrain a base and save it in `path`, in float32."""
    import torch

    beside = Path(f"{path}.new")  # renamed when whole: a killed build leaves nothing that counts
    shutil.rmtree(beside, ignore_errors=True)
    made = tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # always: with another number sums are rounded otherwise, and it is another base
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed: it would seed the GPUs as well
        model = _train(made, lesson, steps, wording)
    torch.set_num_threads(threads)
    model.save_pretrained(beside)
    made.save_pretrained(beside)
    beside.rename(path)
