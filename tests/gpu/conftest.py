"""Fixtures of the tests that also run on a GPU."""

import pytest


@pytest.fixture
def gpu():
    """Skip a test that needs a GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return the path of a random Qwen2 whose head_dim of 64 has a kernel everywhere."""
    import small_models
    import torch

    width = 512 if torch.cuda.is_available() else 128  # many CPUs compute bfloat16 slowly
    sizes = dict(hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 64)
    return small_models.random_qwen(tmp_path_factory.mktemp("model"), initializer_range=0.03, **sizes)
