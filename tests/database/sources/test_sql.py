"""PostgreSQL URLs, without a server."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from qkv.database.sources import SourceError, read
from qkv.database.sources.sql import mask_password
from qkv.errors import MissingExtraError


def catch_source_error(source: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(source, **options)
    return str(caught.value)


def test_postgres_with_a_date_that_python_has_not(monkeypatch):
    psycopg = pytest.importorskip("psycopg")

    def connect(*_, **__):
        raise psycopg.DataError("date too large (after year 10K): 'infinity'")

    monkeypatch.setattr(psycopg, "connect", connect)
    assert "'infinity': convert that column to text" in (
        catch_source_error("postgresql://host/shop")
    )


def test_postgres_that_does_not_answer():
    pytest.importorskip("psycopg")
    error = catch_source_error("postgresql://li:secret@127.0.0.1:1/shop?connect_timeout=2&table=a")
    assert "PostgreSQL reports" in error and "secret" not in error
    assert "PostgreSQL reports" in (catch_source_error("postgresql://127.0.0.1:1/shop?what=1"))


def test_missing_psycopg_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"qkv\[postgres\]"):
        read("postgresql://127.0.0.1:1/shop")


def test_passwords_are_not_shown():
    assert mask_password("postgres://li:p@ss:w@host/a") == "postgres://li:…@host/a"
    assert mask_password("postgres://host/a?password=x&b=1") == "postgres://host/a?password=…&b=1"
    assert mask_password("postgres://li@host:5432/a") == "postgres://li@host:5432/a"
