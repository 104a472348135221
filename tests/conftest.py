"""What holds for every test: small thread counts, no network, deterministic hypothesis, skips for what is not here."""

import importlib.util
import os
import signal

# Before anything imports numpy or torch: two test processes share two cores, and threads that spin starve the servers.
for _variable, _value in {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(_variable, _value)

# A job in the background of a script starts with Ctrl-C ignored, and so would every process the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# No deadline: a test never depends on how fast the machine is. Derandomized: the same examples on every run.
hypothesis.settings.register_profile("worldserve", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("worldserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests whose machine or software is not here, and says which."""
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("robotwin") and not os.environ.get("ROBOTWIN_ROOT"):
            item.add_marker(pytest.mark.skip(reason="set ROBOTWIN_ROOT to an installed RoboTwin 2.0"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
