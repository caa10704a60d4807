"""The same cases on each of Keras's backends, which are chosen once, when Keras is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")

HERE = Path(__file__).parent


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("backend", "file"),
    [
        *((name, "cases.py") for name in ("tensorflow", "jax", "torch")),
        ("torch", "entry_points.py"),
    ],
)
def test_cases(backend: str, file: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{backend}\n{run.stdout[-8000:]}\n{run.stderr[-2000:]}"


def test_without_keras_one_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['keras'] = None\nimport qkv.keras"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'MissingExtraError: qkv.keras needs Keras 3: pip install "qkv[keras]"' in run.stderr
