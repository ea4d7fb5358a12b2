"""Make a tiny base model from scripted traces: its tokenizer, its pretraining, and its cache.

A trace has the form of a trajectory: a list of (text, kind), kind one of "prompt", "turn" (text of the model) and
"found" (a tool's output, without its tags). tiny_search.py (searching) and tiny_math.py (Python) make the traces.
"""

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common import cache, run
from tasks.wordings import Wording

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

# vLLM on a CPU needs a head size of at least 32. The small theta suits the short contexts.
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
SAMPLED = 256  # lessons hashed into the key of a base
VERSION = 1  # raise it when the tokenizer or the training changes: the key cannot see that
MUON_LR, ADAM_LR = 0.02, 0.006  # learning rates of the matrices; of embeddings, norms and biases


def make_tokenizer(texts: list[str], tags: list[str], min_frequency: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer. Pieces occur in the texts at least `min_frequency` times; each tag is a token.

    It splits text as Qwen2's tokenizer does, because transformers loads the tokenizer of any Qwen2 model as that class.
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
        unk_token="<pad>",  # never used, but the default would add a token that the model does not have
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _encode(tokenizer, traces, prefix, around):
    """Encode traces piece by piece, as in training, but in one call of the tokenizer, which is far faster.

    Return a list of (ids after the common ids `prefix`, for each of these ids whether the model writes it).
    """
    around = [tokenizer.encode(tag) for tag in around]
    encoded = iter(tokenizer([text for trace in traces for text, _ in trace])["input_ids"])
    rows = []
    for trace in traces:
        ids, own = [], []
        for _, kind in trace:
            piece = next(encoded)
            if kind == "found":  # as in tags.cut_observation, without a limit: the outputs are short
                piece = around[0] + piece + around[1]
            ids += piece
            own += [kind == "turn"] * len(piece)
        assert ids[: len(prefix)] == prefix, "the instruction must end at a token boundary"
        rows.append((ids[len(prefix) :] + [tokenizer.eos_token_id], own[len(prefix) :] + [True]))
    return rows


def _train(tokenizer, lesson, steps, wording):
    """Pretrain on scripted traces and return the model (float32, on the CPU).

    lesson(rng, done) makes a trace; `done` is the share of completed steps. The loss is on the text of the model only.
    All rows begin with the instruction, so its keys and values are computed once a step and shared.
    """
    import torch
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **SHAPE,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",  # faster than the fused kernel on a CPU at these lengths
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
    bar = run.progress(range(steps), desc="pretraining a tiny base (once)")
    for step in bar:
        done = step / steps
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / (0.03 * steps), (1 - done) / 0.3)
        traces = [lesson(rng, done) for _ in range(BATCH)]
        rows = sorted(_encode(tokenizer, traces, prefix, wording.around), key=lambda row: len(row[0]))
        loss = 0.0
        shared_prefix = model.model(torch.tensor([prefix]), use_cache=True).past_key_values
        for part in (rows[: BATCH // 2], rows[BATCH // 2 :]):  # rows of similar length need less padding
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


def muon(
    matrices: "list[torch.nn.Parameter]", lr: float, momentum: float, weight_decay: float
) -> "torch.optim.Optimizer":
    """Return the optimizer Muon (Jordan et al., 2024), with Nesterov momentum, in float32.

    torch.optim.Muon orthogonalises in bfloat16. A CPU without bfloat16 emulates it, ten times slower and with other
    results.
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
        """Return the nearest matrix with all singular values about 1, by five quintic Newton-Schulz steps."""
        x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    return Muon(matrices, dict(lr=lr))


def key(lesson: Callable, steps: int, wording: Wording) -> str:
    """Return a hash of what makes a base: VERSION, hyper-parameters, prompt texts, and lessons of every stage."""
    lessons = [lesson(random.Random(i), i / SAMPLED) for i in range(SAMPLED)]
    made_from = [VERSION, SHAPE, BATCH, MUON_LR, ADAM_LR, steps, wording.instruction, wording.around, lessons]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]


def base(name: str, tokenizer: Callable, lesson: Callable, steps: int, wording: Wording) -> Path:
    """Return the directory of a tiny base (weights, tokenizer): the shipped one if the key matches, else a cached one.

    The first call on a machine builds the cached one, in about five minutes on two cores.
    """
    wanted = key(lesson, steps, wording)
    shipped = SHIPPED / name / wanted
    path = shipped if (shipped / "model.safetensors").exists() else cache.cache_dir() / name / wanted
    with contextlib.nullcontext() if path == shipped else cache.locked(path):
        if not path.exists():
            build(path, tokenizer, lesson, steps, wording)
    return path


def build(path: Path, tokenizer: Callable, lesson: Callable, steps: int, wording: Wording) -> None:
    """Pretrain a base and save it in `path`, in float32."""
    import torch

    beside = Path(f"{path}.new")  # renamed when complete, so that a killed build leaves no base behind
    shutil.rmtree(beside, ignore_errors=True)
    made = tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # always two: another number changes the rounding of sums, and so the base
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed: it would seed the GPUs as well
        model = _train(made, lesson, steps, wording)
    torch.set_num_threads(threads)
    model.save_pretrained(beside)
    made.save_pretrained(beside)
    beside.rename(path)
