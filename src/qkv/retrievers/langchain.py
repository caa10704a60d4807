"""A LangChain retriever on a database."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from qkv.retrievers.documents import check_arguments, retrieve_documents


class LangChainRetriever(BaseRetriever):
    """A LangChain retriever that returns the heaviest rows for a question as documents.

    `content` names the column with the text, by default the value. Other keywords are options of
    `ask`: `where`, `score`, `weighting`.

    >>> from qkv import Database
    >>> from qkv.retrievers import LangChainRetriever
    >>> facts = Database({"the tallest mountain": "Everest", "the longest river": "the Nile"})
    >>> document = LangChainRetriever(facts, top=1).invoke("which mountain is tallest?")[0]
    >>> document.page_content, document.metadata["key"]
    ('Everest', 'the tallest mountain')
    """

    database: Any
    top: int = 5
    content: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, database: Any, **fields: Any) -> None:
        model_fields = type(self).model_fields
        options = {name: fields.pop(name) for name in [*fields] if name not in model_fields}
        options = fields.get("options", {}) | options
        super().__init__(database=database, **fields | {"options": options})
        check_arguments(self.database, self.top, self.options)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        rows = retrieve_documents(self.database, query, self.top, self.content, **self.options)
        return [Document(page_content=text, metadata=about) for text, about, _ in rows]
