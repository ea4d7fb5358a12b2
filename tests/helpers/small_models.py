"""Small random models for tests, without download or pretraining."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = (
    "Answer the question. <think> I need the town of the river. </think> <search> town of the river </search>\n"
    "<information> Doc 1 (Title: Oakford) Oakford is a town by the river. </information>\n\n"
    "<think> The town is Oakford. </think> <answer> Oakford </answer>\n\nThe quick brown fox jumps over the lazy dog."
)


def tokenizer():
    """Return a byte-level BPE with Qwen2's splitting rule, of the class that AutoTokenizer picks for a Qwen2 model. The
    tags are ordinary text, so a token may reach across a closing tag (`>\\n\\n`). The end token also pads."""
    from transformers import Qwen2Tokenizer

    special = dict(unk_token="<eos>", eos_token="<eos>", pad_token="<eos>")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT] * 20, trainer)
    trained = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(vocab=trained["vocab"], merges=[tuple(m) for m in trained["merges"]], **special)


def configuration(tokenizer, **changes):
    """Return the configuration of a 2-layer Qwen2."""
    from transformers import Qwen2Config

    options = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.15,  # peaked enough that sampling is not uniform
    )
    return Qwen2Config(**(options | changes))


def without_weights(folder):
    """Save the tokenizer and the configuration of a 2-layer Qwen2 to `folder`. Returns the folder as a string."""
    made = tokenizer()
    configuration(made).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


def random_model(**changes):
    """Return a 2-layer Qwen2 of random weights."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(configuration(tokenizer(), **changes))


def random_qwen(folder, seed=0, dtype=None, **changes):
    """Save a 2-layer Qwen2 of random weights with the tokenizer above to `folder`. Returns the folder as a string."""
    import torch
    from transformers import Qwen2ForCausalLM

    made = tokenizer()
    torch.manual_seed(seed)
    Qwen2ForCausalLM(configuration(made, **changes)).to(dtype).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)
