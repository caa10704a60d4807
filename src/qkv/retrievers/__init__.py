"""A database as the retriever of a framework for language models: LangChain, LlamaIndex, Haystack.

Each hands a question to `ask` and gives the heaviest rows as documents of its framework. The text
of one is the row's value, or the column `content`. Its metadata are the row's columns, its `key`,
its `weight`, and how sure the answer was: `entropy`, `effective_rows`, and of a database that is
calibrated, whether it `abstains`. A `qkv.Client`'s database does as well as one that is here.
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
