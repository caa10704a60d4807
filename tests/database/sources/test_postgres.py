"""Tables of a PostgreSQL server, which `tests/database/sources/conftest.py` starts."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from qkv.database.errors import MixedColumnWarning
from qkv.database.sources import SourceError, Table, read


def catch_source_error(source: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(source, **options)
    return str(caught.value)


def test_postgres(postgres):
    server, schema, url = postgres
    server.execute(f"""
        create table {schema}."Books %s" (
            i int, big bigint, f float8, t text, b bool, raw bytea, price numeric(10, 2),
            exact numeric, day date, moment timestamptz, j jsonb, a int[], u uuid, r int4range,
            net inet)
    """)
    server.execute("set time zone 'UTC'")
    server.execute(f"""
        insert into {schema}."Books %s" values
        (1, 9007199254740993, 'nan', 'x', true, '\\x00ff', 12.50, 0.1234567890123456789,
         '2020-01-02', '2020-01-02 03:04:05+00', '{{"a": [1]}}', '{{1,2}}',
         '00000000-0000-0000-0000-000000000001', '[1,5)', '10.0.0.1'),
        (null, null, null, null, null, null, null, null, null, null, null, null, null, null, null)
    """)
    seen: list[tuple[int, int | None]] = []
    address = f"{url}options=-ctimezone%3DUTC&table={schema}.Books%20%25s"
    with pytest.warns(MixedColumnWarning, match="'exact' is read as text: 1 of its 2 cells"):
        table = read(address, progress=lambda done, total: seen.append((done, total)))
    assert table.name == f"{schema}.Books %s"
    result = {name: cells[0] for name, cells in table.columns.items()}
    assert math.isnan(result.pop("f"))
    assert result == {
        "i": 1,
        "big": 9007199254740993,
        "t": "x",
        "b": True,
        "raw": b"\0\xff",
        "price": 12.5,
        "exact": "0.1234567890123456789",
        "day": datetime.date(2020, 1, 2),
        "moment": datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "j": {"a": [1]},
        "a": [1, 2],
        "u": "00000000-0000-0000-0000-000000000001",
        "r": "[1, 5)",
        "net": "10.0.0.1",
    }
    assert all(cells[1] is None for cells in table.columns.values())
    assert seen == [(2, 2)]


def test_postgres_tables_and_queries(postgres):
    server, schema, url = postgres
    server.execute(f"create table {schema}.a (n int)")
    server.execute(f"insert into {schema}.a select generate_series(1, 40000)")
    server.execute(f"create table {schema}.b (n int)")
    assert read(f"{url}table={schema}.a").columns == {"n": list(range(1, 40001))}
    query = f"{url}query=select n%252 as odd, count(*) from {schema}.a group by 1 order by 1"
    assert read(query) == Table("query", {"odd": [0, 1], "count": [20000, 20000]})
    path = f"{url}options=-csearch_path%3D{schema}"
    assert read(path, table="a").columns == read(path, table=f"{schema}.a").columns
    assert "choose one with table='a'" in (catch_source_error(path))
    assert "did you mean" in (catch_source_error(path, table="aa"))
    assert "no rows" in (catch_source_error(path, table="b"))
    assert "syntax error" in (catch_source_error(f"{url}query=selekt"))
    assert "syntax error" in (catch_source_error(f"{url}query=delete from {schema}.a"))
    server.execute(f"""create function {schema}.f() returns int language sql
                       as 'insert into {schema}.b values (1) returning n'""")
    assert "read-only" in (catch_source_error(f"{url}query=select {schema}.f()"))
