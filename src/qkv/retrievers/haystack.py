"""A Haystack retriever on a database."""

from __future__ import annotations

from typing import Any

from haystack import Document, component, default_to_dict

from qkv.database import parsing
from qkv.errors import CombinationError
from qkv.retrievers.documents import check_arguments, retrieve_documents


@component
class HaystackRetriever:
    """A Haystack component that returns the heaviest rows for a question as documents.

    The score of a document is the row's weight. `content` names the column with the text, by
    default the value. `options` are those of `ask`: `where`, `score`, `weighting`.

    >>> from qkv import Database
    >>> from qkv.retrievers import HaystackRetriever
    >>> facts = Database({"the tallest mountain": "Everest", "the longest river": "the Nile"})
    >>> result = HaystackRetriever(facts, top=1).run(query="which mountain is tallest?")
    >>> result["documents"][0].content, result["documents"][0].meta["key"]
    ('Everest', 'the tallest mountain')
    """

    def __init__(
        self, database: Any, *, top: int = 5, content: str | None = None, **options: Any
    ) -> None:
        check_arguments(database, top, options)
        self.database, self.top, self.content, self.options = database, top, content, options

    @component.output_types(documents=list[Document])
    def run(self, query: str, top: int | None = None) -> dict[str, list[Document]]:
        top = self.top if top is None else top
        rows = retrieve_documents(self.database, query, top, self.content, **self.options)
        return {
            "documents": [
                Document(content=text, meta=about, score=weight) for text, about, weight in rows
            ]
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dictionary, which contains the path of the database."""
        if getattr(self.database, "path", None) is None:
            raise CombinationError(
                "a pipeline stores the path of its database, but this database is in memory: "
                "create it on disk, Database.from_columns(…, path=…)"
            )
        fields = {"database": str(self.database.path), "top": self.top, "content": self.content}
        return default_to_dict(self, **fields, **parsing.format_options(self.options))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HaystackRetriever:
        from qkv.database import open

        fields = dict(data["init_parameters"])
        return cls(open(fields.pop("database"), create=False), **parsing.parse_options(fields))
