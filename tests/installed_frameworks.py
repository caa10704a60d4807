"""The frameworks that the tests run on."""

from __future__ import annotations

import os

from qkv.testing import frameworks

DEFAULT = "numpy,array_api_strict,torch,jax,tensorflow"
NAMES = os.environ.get("QKV_TEST_FRAMEWORKS", DEFAULT).split(",")
FRAMEWORKS = [frameworks.FRAMEWORKS[name] for name in NAMES]
WITH_GRADIENTS = [fw for fw in FRAMEWORKS if fw.has_gradients]
