"""qkv: attention as a database query, Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ.

>>> import qkv
>>> qkv.attend([[1.0]], key=[[1.0], [5.0]], value=[[10.0], [50.0]], score="gaussian").round(2)
array([[10.01]])
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would take longer than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from qkv import cluster, database, masks, onnx, page, plot, scores, weightings
    from qkv.answer import Answer
    from qkv.attention import attend, explain, warm, weights
    from qkv.database import Database, open
    from qkv.database.errors import MixedColumnWarning, NoHeaderWarning, SkippedRowsWarning
    from qkv.errors import QkvError
    from qkv.page import show
    from qkv.sdpa import scaled_dot_product_attention
    from qkv.serve.client import Client
    from qkv.util.caches import clear_caches

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Client",
    "Database",
    "MixedColumnWarning",
    "NoHeaderWarning",
    "QkvError",
    "SkippedRowsWarning",
    "attend",
    "clear_caches",
    "cluster",
    "database",
    "explain",
    "masks",
    "onnx",
    "open",
    "page",
    "plot",
    "scaled_dot_product_attention",
    "scores",
    "show",
    "warm",
    "weightings",
    "weights",
]

_MODULE_BY_NAME = {
    "Answer": "answer",
    "Client": "serve.client",
    "Database": "database",
    "QkvError": "errors",
    "MixedColumnWarning": "database.errors",
    "NoHeaderWarning": "database.errors",
    "SkippedRowsWarning": "database.errors",
    "open": "database",
    "attend": "attention",
    "clear_caches": "util.caches",
    "explain": "attention",
    "scaled_dot_product_attention": "sdpa",
    "show": "page",
    "warm": "attention",
    "weights": "attention",
}

_SUBMODULES = (
    "answer",
    "attention",
    "cli",
    "duckdb",
    "engines",
    "errors",
    "frameworks",
    "keras",
    "nn",
    "retrievers",
    "sklearn",
    "testing",
    "transformers",
    "util",
)


_NESTED_NAMES = {
    "Attention": "nn",
    "MultiHeadAttention": "nn",
    "TransformerBlock": "nn",
    "Memory": "nn",
    "capture": "transformers",
    "AttentionRegressor": "sklearn",
    "AttentionClassifier": "sklearn",
    "heatmaps": "plot",
    "Cluster": "cluster",
    "from_source": "Database",
    "from_frame": "Database",
}
"""Names that users may look for in `qkv`, and the submodule or class that has each."""


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULE_BY_NAME:
        value = getattr(importlib.import_module(f"qkv.{_MODULE_BY_NAME[name]}"), name)
        globals()[name] = value
        return value
    if name in __all__ or name in _SUBMODULES:
        return importlib.import_module(f"qkv.{name}")
    import difflib

    here = difflib.get_close_matches(name, __all__, n=1)
    there = difflib.get_close_matches(name, _NESTED_NAMES, n=1, cutoff=0.85)
    near = [*(f"qkv.{_NESTED_NAMES[x]}.{x}" for x in there), *map(repr, here)]
    hint = f": did you mean {near[0]}?" if near else ""
    # Without `obj`, so that Python does not append a suggestion of its own.
    raise AttributeError(f"module 'qkv' has no attribute {name!r}{hint}", name=name)


def __dir__() -> list[str]:
    # Without `_SUBMODULES`: help(qkv) reads every listed name and would import all frameworks.
    return [*__all__, "__version__"]
