"""How alike texts are: cosines of TF-IDF vectors, or of an embedding model's."""

import functools

import numpy

LONGEST = 512  # tokens of a text that a model embeds, where it does not say that it takes fewer


@functools.cache
def load_embedder(name):
    """(tokenizer, model in float32) of a folder or hub id, by plain transformers. Raises SystemExit when it cannot embed."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, model_max_length=LONGEST)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
        most = getattr(model.config, "max_position_embeddings", None) or LONGEST
        tokenizer.model_max_length = min(LONGEST, most - 2)  # RoBERTa's begin two later
        _embed(["one", "1 " * 2 * LONGEST], tokenizer, model)  # what cannot embed says so now, and not after a rollout
    except Exception as error:
        what = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise SystemExit(
            f"--code_embedder {name}: it cannot embed texts ({what}). Give a folder or hub id of an encoder, or leave it out: TF-IDF."
        ) from None
    return tokenizer, model


def _embed(texts, tokenizer, model):
    import torch

    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(model.device)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu().numpy()


def embed(texts, embedder):
    """Unit vectors (N, D): mean-pooled last hidden states of a model, or ("") TF-IDF of 1- to 3-grams of words and signs."""
    if not embedder:
        from sklearn.feature_extraction.text import TfidfVectorizer

        tokens = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 3), lowercase=False)
        return tokens.fit_transform(texts).toarray()
    import torch

    tokenizer, model = load_embedder(embedder)
    return _embed(texts, tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu"))


def cosines(texts, embedder=""):
    """(N, N) cosines between texts, negative ones as 0. An empty text is like no text, itself included."""
    alike = numpy.zeros((len(texts), len(texts)))
    said = [i for i, text in enumerate(texts) if text.strip()]
    if said:
        vectors = embed([texts[i] for i in said], embedder)
        alike[numpy.ix_(said, said)] = (vectors @ vectors.T).clip(0, 1)
    return alike
