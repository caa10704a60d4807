"""Benchmarks, one script per question: qkv and its alternatives, timed in the same run.

`python -m bench` runs every CPU script in one process, `python -m bench.dot` one of them, and
`python -m bench.gpu` those for a CUDA machine. `--small` uses small shapes, to check that
everything runs, and writes nothing.

A script has `rows()`, which yields results of `_side_by_side.compare`, and ends with
`save_results(name, rows())`, which writes `results/name.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench._borrow import array_api_compat

# What is measured is this checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
array_api_compat()
