"""The frameworks that the tests run on."""

from __future__ import annotations

import os

from qkv.testing import frameworks

NAMES = os.environ.get("QKV_TEST_FRAMEWORKS", "numpy,strict,torch,jax,tensorflow").split(",")
FRAMEWORKS = [frameworks.FRAMEWORKS[name] for name in NAMES]
WITH_GRADIENTS = [fw for fw in FRAMEWORKS if fw.gradients]
