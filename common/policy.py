"""The policy: a frozen base model with a LoRA adapter. Log-probabilities, and optimizer steps on all ranks' gradients.

The reference policy is the base with the adapter switched off, so there is no second copy. Each rank holds the whole
base; only the adapter's gradients are exchanged.
"""

import contextlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from common import adapters, models, ranks, run
from common.args import Sampling
from common.attention import register_segment_attention, token_logps
from common.batch import Batch

MICRO_TOKENS = 4096  # tokens per forward pass without training
BLANK_RANK = 8  # rank of the zero adapter when nothing is trained


class Policy:
    """The model, its tokenizer and its optimizer."""

    def __init__(self, args: Sampling, device: torch.device | str = "cpu", last: Path | None = None, train=True):
        """last: the checkpoint to resume from. train=False: without an optimizer, for the args of eval.py."""
        self.device = torch.device(device)
        self.path = models.resolve(args.model)
        self.dtype = pick_dtype(args.dtype, self.device)
        self.temperature, self.micro_tokens = args.temperature, args.micro_tokens if train else MICRO_TOKENS
        self.tokenizer = models.load_tokenizer(self.path)
        adapter = str(last / "adapter") if last else args.adapter
        if adapter:
            refuse_other_base(adapter, self.path)
            adapters.refuse_unfit(adapter, self.path)
        register_segment_attention()
        quantization = None
        if args.load_4bit:  # as vLLM quantizes at loading: NF4, its constants quantized too
            quantization = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=self.dtype,
            )
        if self.device.type == "cuda" and ranks.rank() == 0:
            run.notice(f"loading the trainer's copy of the base: {self.path}")
        base = AutoModelForCausalLM.from_pretrained(
            self.path,
            dtype=self.dtype,
            attn_implementation="segments",
            quantization_config=quantization,
            device_map={"": self.device},
        )
        refuse_unsupported(base, args.max_context)
        base.requires_grad_(False)
        if adapter:
            self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        else:
            rank, alpha = (args.lora_rank, args.lora_alpha) if train else (BLANK_RANK, BLANK_RANK)
            lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(base, lora)  # float32 even on a bf16 base: keeps small updates
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer):
                # Else PEFT casts every input of a layer to float32 and saves it; see `hidden`. Not as PEFT's context
                # manager: checkpointing recomputes layers after its end.
                module.cast_input_dtype_enabled = False
            if isinstance(module, torch.nn.Dropout):  # from an adapter that was trained with dropout
                module.p = 0.0
        recompute = train and args.grad_checkpoint
        if recompute:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # Checkpointing works only in training mode, and in evaluation mode bitsandbytes repacks a 4-bit base on a CPU
        # into a form without backward. The mode changes nothing else: no dropout is left.
        self.model.train(recompute or args.load_4bit)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        lora = self.model.peft_config["default"]
        self.lora_rank = max(lora.r, *lora.rank_pattern.values(), 0)
        self.optimizer = None
        if train:
            self.lr, self.grad_clip = args.lr, args.grad_clip
            self.optimizer = make_optimizer(args.optim, self.parameters, args.lr)

    def adapted_layers(self) -> list[str]:
        """Return the names of the layers that have an adapter, such as q_proj, without their place in the model."""
        layers = (name for name, module in self.model.named_modules() if isinstance(module, BaseTunerLayer))
        return sorted({name.rpartition(".")[2] for name in layers})

    @property
    def head(self) -> Tensor:
        """Return the weight (V, hidden) of the output layer."""
        return self.model.get_base_model().get_output_embeddings().weight

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states (T, hidden) of a batch's tokens; each token attends to its own segment only."""
        decoder = self.model.get_base_model().get_decoder()
        # Over a bf16 base the adapter computes in bf16, as in the engine; its weights and gradients are float32.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            output = decoder(
                input_ids=batch.ids[None].to(self.device),
                position_ids=batch.position[None].to(self.device),
                attention_mask=None,
                use_cache=False,
                segments=[(s.start, s.end) for s in batch.segments],
            )
        return output.last_hidden_state[0]

    def logps(
        self,
        batch: Batch,
        positions: Tensor | None = None,
        adapter: bool = True,
        grad: bool = True,
        moments: Sequence[str] = (),
    ) -> Tensor | tuple[Tensor, ...]:
        """Return log-probabilities (T,) float32 at sampling temperature, 0 outside `positions` (default: batch.mask).

        adapter   False: of the reference policy
        grad      False: without gradient; the batch may have any size
        moments   "entropy" in nats, "squares" (sum of squared probabilities): returns a tuple, log-probabilities first,
                  then these, each (T,) without gradient
        """
        positions = batch.mask if positions is None else positions
        if grad or not bool(positions.any()):
            outputs = self._logps(batch, positions, adapter, moments)
        else:
            with torch.no_grad():
                batch = batch.select(range(len(batch.segments)))
                batch.extra = {"positions": positions}
                parts = [
                    self._logps(micro, micro.extra["positions"], adapter, moments)
                    for micro in batch.micro(self.micro_tokens)
                ]
                outputs = [torch.cat(columns) for columns in zip(*parts)]
        return tuple(outputs) if moments else outputs[0]

    def _logps(self, batch, positions, adapter, moments):
        at = positions.nonzero()[:, 0]
        columns = [torch.zeros(len(batch))] * (1 + len(moments))
        if len(at):
            assert not positions[[s.start for s in batch.segments]].any(), "a first token has no log-probability"
            with contextlib.nullcontext() if adapter else self.model.disable_adapter():
                hidden = self.hidden(batch)
            ids = batch.ids[at].to(self.device)
            before = hidden[(at - 1).to(self.device)]  # the previous token predicts this one
            values = token_logps(before, self.head, ids, self.temperature, moments)
            columns = [torch.zeros(len(batch)).index_copy(0, at, value.cpu()) for value in values]
        return columns

    def gradient(self) -> Tensor:
        """Return the accumulated gradient summed over ranks, flat, float32. A rank without tokens contributes zeros."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([g.reshape(-1).float() for g in grads])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        return flat

    def step(self, lr_scale: float = 1.0) -> dict[str, float]:
        """Sum gradients over ranks, clip once, step. Returns grad_norm, lr, skipped and updates, equal on all ranks.

        A sum that is not finite skips the step on all ranks. So does a sum of zero, as in a phase without signal: the
        optimizer's momentum alone would move the policy.
        """
        flat = self.gradient()
        norm = float(flat.norm())
        finite = norm < float("inf")  # False for nan too
        moves = finite and norm > 0
        if moves:
            if self.grad_clip and norm > self.grad_clip:
                flat *= self.grad_clip / norm
            for p, g in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
                p.grad = g.view_as(p).to(p.dtype)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * lr_scale
            # vLLM moves this thread to a CUDA stream, and bitsandbytes' kernels run on the default one.
            separate = self.device.type == "cuda" and not isinstance(self.optimizer, torch.optim.AdamW)
            if separate:
                torch.cuda.synchronize()
            self.optimizer.step()
            if separate:
                torch.cuda.synchronize()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "lr": self.lr * lr_scale, "skipped": float(not finite), "updates": float(moves)}

    def canary(self, strength: float) -> AbstractContextManager[None]:
        """Add noise to the adapter within the block, to tell the policy from its base (for the self-test).

        strength: standard deviation of what is added to lora_B, times the adapter's scale.
        """
        generator = torch.Generator().manual_seed(0)
        scale = strength * self.lora_rank / (self.model.peft_config["default"].lora_alpha or 1)
        return self._changed(lambda weight: weight + scale * torch.randn(weight.shape, generator=generator).to(weight))

    def blank(self) -> AbstractContextManager[None]:
        """Zero the adapter within the block: the policy equals its base, as before the first step of training."""
        return self._changed(torch.zeros_like)

    @contextlib.contextmanager
    def _changed(self, change):
        layers = [module for name, module in self.model.named_modules() if name.endswith("lora_B.default")]
        saved = [layer.weight.detach().clone() for layer in layers]
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(change(layer.weight))
        try:
            yield
        finally:
            with torch.no_grad():
                for layer, weight in zip(layers, saved):
                    layer.weight.copy_(weight)

    def adapter_state(self) -> dict[str, Tensor]:
        """Return a copy of the adapter in host memory: {name: tensor}."""
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return {name: p.detach().to("cpu", copy=True) for name, p in trained}

    def save_adapter(self, path: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write a normal PEFT adapter: the current one, or an earlier adapter_state()."""
        self.model.save_pretrained(path, state_dict=state, save_embedding_layers=False)
        mode = (Path(path) / "adapter_config.json").stat().st_mode  # safetensors ignores the umask: 0600
        (Path(path) / "adapter_model.safetensors").chmod(mode & 0o777)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type that --dtype names; auto: bfloat16 on a GPU, float32 on a CPU."""
    return getattr(torch, {"auto": "bfloat16" if device.type == "cuda" else "float32"}.get(name, name))


def make_optimizer(name: str, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return AdamW in float32, or adamw_8bit (bitsandbytes; a quarter of the optimizer memory)."""
    if name == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=lr, weight_decay=0.0)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


def refuse_other_base(adapter: str, path: str) -> None:
    """Raise SystemExit if an adapter was trained on another base: it would make nonsense even if its shapes fit."""
    try:
        base = json.loads((Path(adapter) / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"--adapter {adapter}: its adapter_config.json cannot be read ({error})") from None

    def name(of):
        """Return the name in a hub id, a folder, or the hub's cache: .../models--Qwen--Qwen2.5-3B/snapshots/1234."""
        cached = [part for part in Path(of).parts if part.startswith("models--")]
        return (cached[0].split("--")[-1] if cached else Path(of).name).lower()

    if not base or name(base) == name(path):
        return
    embedded = models.EMBEDDED.get(Path(path).parent.name)  # .../tiny/<hash>
    if not embedded or name(base) not in embedded.former:
        raise SystemExit(
            f"--adapter {adapter}: trained on {base}, not on {path}. If they are the same model under another name, "
            "change base_model_name_or_path in its adapter_config.json."
        )
    if ranks.rank() == 0:
        run.notice(
            f"--adapter {adapter}: trained on the base that an earlier version built; figures can differ on this one"
        )


def refuse_unsupported(base: PreTrainedModel, max_context: int = 0) -> None:
    """Raise SystemExit if our head or attention would silently differ from the model's, or contexts outgrow it."""
    config = base.config.get_text_config()
    head = base.get_output_embeddings()
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or max_context
    sliding = "sliding_attention" in layers if layers else window < max_context
    for found, feature in (
        (head is None or getattr(head, "bias", None) is not None, "an output layer with a bias"),
        (getattr(config, "final_logit_softcapping", None), "soft-capped logits"),
        (getattr(config, "attn_logit_softcapping", None), "soft-capped attention"),
        (getattr(config, "logit_scale", None) or getattr(config, "logits_scaling", None), "scaled logits"),
        (sliding, "sliding-window attention"),
        (not getattr(base, "_supports_attention_backend", False), "an attention that cannot be replaced"),
    ):
        if found:
            raise SystemExit(f"{config.model_type} models have {feature}, which the trainer does not support.")
    if max_context > (limit := config.max_position_embeddings):
        raise SystemExit(f"--max_context {max_context}: this model takes {limit} tokens at most.")
