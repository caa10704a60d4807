"""Retrievers on a database, for LangChain, LlamaIndex and Haystack.

Each retriever passes a question to `ask` and returns the heaviest rows as documents of its
framework. The text of a document is the row's value, or the column `content`. Its metadata contains
the row's columns, its `key` and `weight`, and the certainty of the answer: `entropy`,
`effective_rows`, and for a calibrated database `abstains`. A database of a `qkv.Client` works too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qkv.errors import require_extra

if TYPE_CHECKING:
    from qkv.retrievers.haystack import HaystackRetriever
    from qkv.retrievers.langchain import LangChainRetriever
    from qkv.retrievers.llama_index import LlamaIndexRetriever

__all__ = ["HaystackRetriever", "LangChainRetriever", "LlamaIndexRetriever"]

_MODULE_BY_NAME = {
    "LangChainRetriever": ("langchain", "langchain_core"),
    "LlamaIndexRetriever": ("llama_index", "llama_index"),
    "HaystackRetriever": ("haystack", "haystack"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'qkv.retrievers' has no attribute {name!r}")
    home, package = _MODULE_BY_NAME[name]
    with require_extra(home.replace("_", "-"), f"{name} needs {package}"):
        importlib.import_module(package)
    return getattr(importlib.import_module(f"qkv.retrievers.{home}"), name)


def __dir__() -> list[str]:
    return __all__
