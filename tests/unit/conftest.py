"""Unit tests: no engine, and no model but its tokenizer."""

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Folder with the tokenizer and the configuration of the random model, and no weights."""
    import small_models

    return small_models.without_weights(tmp_path_factory.mktemp("small"))
