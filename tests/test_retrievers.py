"""A database as the retriever of others' frameworks, each the real one."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import scores, weightings
from qkv.errors import CombinationError, DtypeError
from qkv.retrievers.documents import retrieve_documents

BOOKS = {
    "title": ["Moby-Dick", "Emma", "Dune", "Ulysses"],
    "summary": ["A captain hunts a whale.", "A matchmaker errs.", "Sand and spice.", "One day."],
    "year": [1851, 1815, 1965, 1922],
    "weight": [900, 400, 600, 800],
}
# Warnings of the frameworks' own making.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("books") / "books.qkv"
    with qkv.Database.from_columns(BOOKS, key="title", value="summary", path=path) as D:
        yield D


def checked(books: qkv.Database, documents: list[tuple[str, dict[str, Any], float | None]]) -> None:
    """Documents for "moby dick" as the answer itself tells them."""
    answer = books.ask("moby dick", top=2)
    assert [text for text, _, _ in documents] == [row.value for row in answer.rows]
    for (_, about, score), row in zip(documents, answer.rows, strict=True):
        assert about["key"] == row.key and about["index"] == row.index
        assert score is None or score == pytest.approx(row.weight)
        assert about["weight"] == pytest.approx(row.weight)
        assert about["entropy"] == pytest.approx(answer.entropy)
        assert about["confidence"] == pytest.approx(answer.confidence)
        assert about["effective_rows"] == pytest.approx(math.exp(answer.entropy))
        assert about["year"] == row.record["year"] and about["weight_"] == row.record["weight"]
    assert documents[0][1]["key"] == "Moby-Dick"


def test_langchain(books: qkv.Database) -> None:
    from langchain_core.retrievers import BaseRetriever

    from qkv.retrievers import LangChainRetriever

    retriever = LangChainRetriever(database=books, top=2)
    assert isinstance(retriever, BaseRetriever)
    documents = retriever.invoke("moby dick")
    checked(books, [(x.page_content, x.metadata, None) for x in documents])
    assert asyncio.run(retriever.ainvoke("moby dick")) == documents
    late = LangChainRetriever(books, content="title", where="year > 1900", tags=["mine"])
    assert late.tags == ["mine"]
    assert {x.page_content for x in late.invoke("moby dick")} == {"Dune", "Ulysses"}


def test_llama_index(books: qkv.Database) -> None:
    from llama_index.core.retrievers import BaseRetriever

    from qkv.retrievers import LlamaIndexRetriever

    retriever = LlamaIndexRetriever(books, top=2)
    assert isinstance(retriever, BaseRetriever)
    nodes = retriever.retrieve("moby dick")
    checked(books, [(x.text, x.metadata, x.score) for x in nodes])
    again = asyncio.run(retriever.aretrieve("moby dick"))
    assert [x.text for x in again] == [x.text for x in nodes]
    late = LlamaIndexRetriever(books, content="title", where="year > 1900")
    assert {x.text for x in late.retrieve("moby dick")} == {"Dune", "Ulysses"}


def test_haystack(books: qkv.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Pipeline

    from qkv.retrievers import HaystackRetriever

    pipeline = Pipeline()
    pipeline.add_component("rows", HaystackRetriever(books, top=2))
    documents = pipeline.run({"rows": {"query": "moby dick"}})["rows"]["documents"]
    checked(books, [(x.content, x.meta, x.score) for x in documents])
    again = asyncio.run(pipeline.run_async({"rows": {"query": "moby dick"}}))
    assert again["rows"]["documents"] == documents
    late = HaystackRetriever(books, content="title", where="year > 1900")
    assert {x.content for x in late.run("moby dick", top=3)["documents"]} == {"Dune", "Ulysses"}
    loaded = Pipeline.loads(pipeline.dumps(), allowed_modules=["qkv.retrievers.haystack"])
    assert loaded.run({"rows": {"query": "moby dick"}})["rows"]["documents"] == documents
    sharp = HaystackRetriever(books, score=scores.Cosine(0.1), weighting=weightings.TopK(2))
    loaded = Pipeline()
    loaded.add_component("rows", sharp)
    loaded = Pipeline.loads(loaded.dumps(), allowed_modules=["qkv.retrievers.haystack"])
    assert loaded.run({"rows": {"query": "moby dick"}})["rows"] == sharp.run("moby dick")
    with pytest.raises(qkv.QkvError, match="top must be a number of rows"):
        late.run("moby dick", top=0)
    with pytest.raises(CombinationError, match="this database is in memory"):
        HaystackRetriever(qkv.Database({"a": "b"})).to_dict()


def test_a_calibrated_database_says_when_nothing_fits() -> None:
    D = qkv.Database({"Moby-Dick": "Melville", "Emma": "Austen"})
    D.calibrate([(key, key) for key in D] * 10)
    assert retrieve_documents(D, "Emma", 1)[0].metadata["abstains"] is False
    reported = retrieve_documents(D, "zzz", 1)[0].metadata
    assert reported["abstains"] is True and reported["coverage"] == 0.9


def test_values_of_all_kinds_are_text() -> None:
    D = qkv.Database.from_columns({"name": ["Li"], "age": [34], "born": [None]}, key="name")
    assert retrieve_documents(D, "Li", 1)[0].text == "age: 34"
    vectors = qkv.Database.from_columns({"x": ["Li"], "v": [[0.5, 1.0]]}, key="x", value="v")
    assert retrieve_documents(vectors, "Li", 1)[0].text == "[0.5, 1.0]"


def test_what_is_refused(books: qkv.Database) -> None:
    from qkv.retrievers import LangChainRetriever

    with pytest.raises(DtypeError, match=r"database must be a qkv\.Database"):
        LangChainRetriever(database="books.qkv")
    with pytest.raises(ValueError, match="top must be a number of rows"):  # pydantic's own
        LangChainRetriever(database=books, top=0)
    with pytest.raises(qkv.QkvError, match=r"option of a retriever 'wher'.*'where'"):
        LangChainRetriever(books, wher="year > 1900")
    with pytest.raises(qkv.QkvError, match=r"column 'titel'.*'title'"):
        retrieve_documents(books, "Emma", 1, "titel")


@pytest.mark.parametrize(
    "name, package, extra",
    [
        ("LangChainRetriever", "langchain_core", "langchain"),
        ("LlamaIndexRetriever", "llama_index", "llama-index"),
        ("HaystackRetriever", "haystack", "haystack"),
    ],
)
def test_a_missing_extra_is_named(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(qkv.QkvError, match=rf'{package}: pip install "qkv\[{extra}\]"'):
        getattr(qkv.retrievers, name)


def test_nothing_is_loaded_before_it_is_named(tmp_path: Path) -> None:
    code = (
        "import sys, qkv.retrievers; print([x for x in sys.modules if 'lang' in x or 'llama' in x])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"
