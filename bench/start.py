"""How long does a warm `import qkv` take, against NumPy's import?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench._side_by_side import compare, save_results

SRC = Path(__file__).resolve().parent.parent / "src"


def start(code: str) -> None:
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )


def rows():
    yield compare(
        "a process that starts and imports",
        {
            "qkv": lambda: start("import qkv"),
            "NumPy": lambda: start("import numpy"),
            "nothing": lambda: start("pass"),
        },
        repeats=15,
    )


if __name__ == "__main__":
    save_results("start", rows())
