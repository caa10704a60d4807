import os
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.browser import browser, page

__all__ = ["browser", "page"]

# A busy machine is slow, and no example is wrong for it. The same are tried in every run but those
# of `make test-full`, which looks for new ones.
settings.register_profile(
    "qkv",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("QKV_FULL") != "1",
)
settings.load_profile("qkv")

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # read when JAX starts: shards need two

if find_spec("torch") is not None and find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        # Read when triton is imported, so before any test module.
        os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401  which ends the process where TensorFlow was loaded before it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws is its own, not what the tests before it have left to draw."""
    np.random.seed(0)  # noqa: NPY002  scikit-learn draws from it
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)
