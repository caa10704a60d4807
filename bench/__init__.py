"""One script per question: qkv beside what a user would pick today, as ratios in one run.

`python -m bench` runs every CPU script in one process, `python -m bench.dot` one of them, and
`python -m bench.gpu` those of a CUDA machine. `--small` shrinks the shapes to see that all runs,
and writes nothing.

A script has `rows()`, which yields what `_side_by_side.compare` returns, and ends in
`keep(name, rows())`, which writes `results/name.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench._borrow import array_api_compat

# What is measured is this checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
array_api_compat()
