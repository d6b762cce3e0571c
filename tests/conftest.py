import pytest
import torch


def pytest_collection_modifyitems(config, items):
    """GPU tests run where there is a GPU; elsewhere they count as deselected, and the header says why."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not torch.cuda.is_available():
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)


def pytest_report_header():
    return "GPU tests: " + ("run" if torch.cuda.is_available() else "deselected, PyTorch finds no CUDA GPU here")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles anew; none inherits another's graphs, settings or seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
