"""Unit tests: no engine, and of models only the tokenizer."""

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Return a folder with the tokenizer and the configuration of the random model, without weights."""
    import small_models

    return small_models.without_weights(tmp_path_factory.mktemp("small"))
