"""A LlamaIndex retriever on a database."""

from __future__ import annotations

from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from qkv.retrievers.documents import check_arguments, retrieve_documents


class LlamaIndexRetriever(BaseRetriever):
    """A LlamaIndex retriever that returns the heaviest rows for a question as nodes.

    The score of a node is the row's weight. `content` names the column with the text, by default
    the value. `options` are those of `ask`: `where`, `score`, `weighting`.

    >>> from qkv import Database
    >>> from qkv.retrievers import LlamaIndexRetriever
    >>> facts = Database({"the tallest mountain": "Everest", "the longest river": "the Nile"})
    >>> node = LlamaIndexRetriever(facts, top=1).retrieve("which mountain is tallest?")[0]
    >>> node.text, node.metadata["key"]
    ('Everest', 'the tallest mountain')
    """

    def __init__(
        self, database: Any, *, top: int = 5, content: str | None = None, **options: Any
    ) -> None:
        check_arguments(database, top, options)
        self.database, self.top, self.content, self.options = database, top, content, options
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query = query_bundle.query_str
        return [
            NodeWithScore(node=TextNode(text=text, metadata=about), score=weight)
            for text, about, weight in retrieve_documents(
                self.database, query, self.top, self.content, **self.options
            )
        ]
