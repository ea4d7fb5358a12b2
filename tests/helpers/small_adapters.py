"""Adapters for a small model as PEFT writes them, of many kinds."""

import peft
import small_models
import torch

SERVED = {
    "all linear layers": dict(target_modules="all-linear"),
    "two layers": dict(),
    "a pattern": dict(target_modules=r".*\.[01]\..*(up|down)_proj"),
    "rank-stabilized": dict(use_rslora=True, lora_alpha=4),
    "ranks by layer, above r": dict(
        rank_pattern={"q_proj": 20}, alpha_pattern={"v_proj": 3, "layers.1.self_attn.q_proj": 40}
    ),
    "one layer": dict(layers_to_transform=[1]),
    "all but one": dict(target_modules="all-linear", exclude_modules=["o_proj"]),
    "gaussian": dict(init_lora_weights="gaussian"),
    "dropout": dict(lora_dropout=0.3, task_type=None),
}


def write(folder, base, config=None, **changes):
    """Write an adapter of random weights for the model at `base`. config: default LoRA, with changes. Returns the folder."""
    options = dict(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") | changes
    made = peft.get_peft_model(small_models.random_model(), config or peft.LoraConfig(**options))
    made.peft_config["default"].base_model_name_or_path = str(base)
    for p in made.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.05)
    made.save_pretrained(folder, save_embedding_layers=False)
    return folder
