"""Frames come out of the library that they came in from; data sets of Hugging Face come in."""

from __future__ import annotations

from typing import Any

import narwhals
import numpy as np
import pandas
import polars
import pyarrow
import pytest

import qkv
from qkv.errors import DtypeError

TABLE = {"name": ["Li", "Hu", "Wu"], "age": [34, None, 29]}
LIBRARIES = {"pandas": pandas.DataFrame, "polars": polars.DataFrame, "pyarrow": pyarrow.table}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_came_in_comes_out(library: str, tmp_path: Any) -> None:
    frame = LIBRARIES[library](TABLE)
    D = qkv.Database.from_frame(frame, key="name", value="age", path=tmp_path / "D.qkv")
    answer = D.ask("Li")
    for result in (
        answer.to_frame(),
        answer.without(0).to_frame(),
        D.to_frame(),
        D.at(1).ask("Li").to_frame(),
        D.reindex(key="name").ask("Li").to_frame(),
    ):
        assert type(result) is type(frame)
    result = narwhals.from_native(answer.to_frame())
    assert result["name"].to_list() == result["key"].to_list() == [row.key for row in answer.rows]
    assert result["age"].to_list() == [34, 29]  # a row without a value was not asked
    assert result["weight"].to_list() == [row.weight for row in answer.rows]
    D.close()


def test_without_a_frame_it_is_whichever_is_there() -> None:
    result = qkv.Database({"Li": 34}).ask("Li").to_frame()
    assert isinstance(result, pandas.DataFrame | polars.DataFrame)


def test_a_data_set_comes_in() -> None:
    from datasets import Dataset, DatasetDict

    vectors = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    dataset = Dataset.from_dict({**TABLE, "vector": vectors, "words": [["a"], ["b", "c"], []]})
    D = qkv.Database.from_dataset(dataset, key="name", value="age")
    assert (D["Li"], D["Hu"], len(D)) == (34, None, 3)
    database = qkv.Database.from_dataset(dataset.select([2, 0]), key="vector", value="name")
    assert database[np.array([1.0, 1.0])] == "Wu" and len(database) == 2
    assert database.ask(np.array([1.0, 0.1])).rows[0].record["words"] in (["a"], [])
    streamed = qkv.Database.from_dataset(dataset.to_iterable_dataset(), key="name", value="vector")
    np.testing.assert_allclose(streamed["Hu"], [0, 1])
    with pytest.raises(DtypeError, match=r"dataset\['train'\]"):
        qkv.Database.from_dataset(DatasetDict({"train": dataset, "test": dataset}))
    with pytest.raises(DtypeError, match=r"not a list: load one with datasets\.load_dataset"):
        qkv.Database.from_dataset([1])


@pytest.mark.parametrize(
    ("zone", "text"),
    [
        (None, "2001-09-09T01:46:40.000000001"),
        ("UTC", "2001-09-09T01:46:40.000000001+00:00"),
        ("America/New_York", "2001-09-08T21:46:40.000000001-04:00"),
    ],
)
def test_nanoseconds_are_kept_by_every_library(zone, text):
    kind = pyarrow.timestamp("ns", zone)
    table = pyarrow.table({"k": ["a", "b"], "t": pyarrow.array([10**18 + 1, None], kind)})
    for frame in (table, polars.from_arrow(table), table.to_pandas()):
        result = qkv.Database.from_frame(frame, key="k", value="t")
        assert dict(result.items()) == {"a": text, "b": None}


def test_an_index_with_a_name_is_a_column(tmp_path: Any) -> None:
    """As in Parquet, where such an index is one: what a group-by gives, say."""
    places = pandas.MultiIndex.from_tuples([("x", 1), ("x", 2), ("y", 1)], names=["town", "zone"])
    prices = pandas.DataFrame({"price": [1.0, 2.0, 3.0]}, index=places)
    prices.to_parquet(tmp_path / "prices.parquet")
    options: Any = {"key": ["town", "zone"], "value": "price"}
    D = qkv.Database.from_frame(prices, **options)
    file = qkv.Database.from_source(tmp_path / "prices.parquet", **options)
    assert D[("x", 2)] == file[("x", 2)] == 2.0
    named = pandas.DataFrame({"age": [3, 4]}, index=pandas.Index(["Ann", "Bo"], name="name"))
    assert qkv.Database.from_frame(named)["Bo"] == 4
    # One without a name, or with that of a column, is none.
    for index in (None, ["a", "b"], pandas.Index([7, 8], name="age")):
        frame = pandas.DataFrame({"name": ["Ann", "Bo"], "age": [3, 4]}, index=index)
        assert qkv.Database.from_frame(frame, key="name").columns == ("name", "age")


def test_an_error_for_a_series_suggests_a_frame() -> None:
    with pytest.raises(DtypeError, match=r"not a Series: convert a single column with"):
        qkv.Database.from_frame(pandas.Series({"a": 1.0}))
