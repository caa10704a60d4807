import os
from importlib.util import find_spec

from hypothesis import HealthCheck, settings

from tests.browser import browser, page

__all__ = ["browser", "page"]

# A busy machine is slow, and no example is wrong for it.
settings.register_profile("qkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qkv")

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # read when JAX starts: shards need two

if find_spec("torch") is not None and find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        # Read when triton is imported, so before any test module.
        os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401  which ends the process where TensorFlow was loaded before it
