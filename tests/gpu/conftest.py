"""--policy_only: leave out the tests that start vLLM, so that the trainer's tests run alone."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--policy_only", action="store_true", help="only the tests that need no vLLM")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--policy_only", default=False):
        for item in items:
            if item.path.name == "test_gpu_engine.py":
                item.add_marker(pytest.mark.skip(reason="--policy_only"))


@pytest.fixture
def gpu():
    """Skip a test that needs a GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
