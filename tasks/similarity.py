"""Similarity of texts: cosines of TF-IDF vectors, or of the vectors of an embedding model."""

import functools
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 512  # tokens of a text that a model embeds, unless its configuration has a lower limit


@functools.cache
def load_embedder(name: str) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """Load (tokenizer, float32 model) of a folder or hub id with transformers. Raises SystemExit if it cannot embed."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, model_max_length=LONGEST)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
        most = getattr(model.config, "max_position_embeddings", None) or LONGEST
        tokenizer.model_max_length = min(LONGEST, most - 2)  # RoBERTa's positions begin at 2
        # A model that cannot embed fails here and not after a rollout.
        _embed(["one", "1 " * 2 * LONGEST], tokenizer, model)
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise SystemExit(
            f"--code_embedder {name}: it cannot embed texts ({reason}). Give a folder or hub id of an encoder, or "
            "omit it for TF-IDF."
        ) from None
    return tokenizer, model


def _embed(texts, tokenizer, model):
    import torch

    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(model.device)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu().numpy()


def embed(texts: list[str], embedder: str) -> numpy.ndarray:
    """Return unit vectors (N, D): mean-pooled last hidden states of a model, or (embedder "") TF-IDF.

    TF-IDF counts 1- to 3-grams of words and signs.
    """
    if not embedder:
        from sklearn.feature_extraction.text import TfidfVectorizer

        tokens = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 3), lowercase=False)
        return tokens.fit_transform(texts).toarray()
    import torch

    tokenizer, model = load_embedder(embedder)
    return _embed(texts, tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu"))


def cosines(texts: list[str], embedder: str = "") -> numpy.ndarray:
    """Return (N, N) cosines between texts, negative ones as 0. An empty text has 0 to every text, itself included."""
    matrix = numpy.zeros((len(texts), len(texts)))
    nonempty = [i for i, text in enumerate(texts) if text.strip()]
    if nonempty:
        vectors = embed([texts[i] for i in nonempty], embedder)
        matrix[numpy.ix_(nonempty, nonempty)] = (vectors @ vectors.T).clip(0, 1)
    return matrix
