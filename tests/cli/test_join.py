"""`qkv join`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.cli.run import data, qkv


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders.csv"
    path.write_text("id,item,count\n1,chese,3\n2,bred,1\n3,,4\n4,appels,2\n")
    return path


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text("item,price\nbread,1.5\ncheese,2.5\napples,2\n")
    return path


def test_typos_are_matched_and_a_missing_key_matches_nothing(orders: Path, prices: Path) -> None:
    joined = data("join", orders, prices)
    assert joined["matched"] == 3
    assert [row["item_right"] for row in joined["rows"]] == ["cheese", "bread", None, "apples"]
    assert [row["price"] for row in joined["rows"]] == [2.5, 1.5, None, 2]
    assert list(joined["rows"][2]) == ["id", "item", "count", "item_right", "price", "weight"]
    assert joined["rows"][2]["count"] == 4 and joined["rows"][2]["weight"] is None


def test_the_printed_table(orders: Path, prices: Path) -> None:
    ended = qkv("join", orders, prices)
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["item", "item_right", "weight", "price"]
    assert lines[1].split()[:2] == ["chese", "cheese"] and lines[1].split()[-2:] == ["%", "2.5"]
    assert lines[3].split() == ["–", "–", "–"]
    assert "1 of 4 rows have no match" in ended.stderr


def test_the_key_of_left_is_looked_up_in_the_column_of_its_name(
    orders: Path, tmp_path: Path
) -> None:
    known = tmp_path / "known.csv"
    known.write_text("code,item,weight\nA,bread,10\nB,cheese,20\n")
    rows = data("join", orders, known)["rows"]
    assert [row["item_right"] for row in rows] == ["cheese", "bread", None, rows[3]["item_right"]]
    lines = qkv("join", orders, known).stdout.splitlines()
    assert lines[0].split() == ["item", "item_right", "weight_right", "code", "weight"]
    assert data("join", orders, known, "-r", "code")["rows"][0]["weight_right"] < 0.9


def test_a_note_names_the_chosen_columns_if_their_names_differ(
    orders: Path, prices: Path, tmp_path: Path
) -> None:
    readings = tmp_path / "readings.csv"
    readings.write_text("time,site\n2024-05-03 07:00,A\n2024-05-03 08:00,B\n")
    note = "Column item is matched with site; --left-key and --right-key choose others"
    assert note in qkv("join", orders, readings).stderr
    for ended in (
        qkv("join", orders, prices),
        qkv("join", orders, readings, "-l", "item", "-r", "site"),
    ):
        assert "is matched with" not in ended.stderr


def test_other_columns_several_matches_and_a_lowest_weight(orders: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.csv"
    known.write_text("code,name,weight\nA,cheese,10\nB,bread,20\n")
    rows = data("join", orders, known, "-l", "item", "-r", "name", "--top", "2")["rows"]
    assert [(row["id"], row["name"], row["rank"]) for row in rows[:2]] == [
        (1, "cheese", 1),
        (1, "bread", 2),
    ]
    assert rows[0]["weight"] == 10 and rows[0]["weight_right"] > rows[1]["weight_right"]
    joined = data("join", orders, known, "-r", "name", "--min-weight", "0.9")["rows"]
    assert [row["name"] for row in joined] == ["cheese", "bread", None, None]
    filtered = data("join", orders, known, "-r", "name", "--where", "weight > 15")["rows"]
    assert {row["name"] for row in filtered} == {"bread", None}


def test_numbers_are_joined_by_distance(tmp_path: Path) -> None:
    left, right = tmp_path / "left.csv", tmp_path / "right.csv"
    left.write_text("x,y\n1.1,a\n5.2,b\n")
    right.write_text("x,z\n1,one\n5,five\n9,nine\n")
    rows = data("join", left, right, "-l", "x", "-r", "x")["rows"]
    assert [row["z"] for row in rows] == ["one", "five"]


def test_all_rows_are_written_to_a_file(orders: Path, prices: Path, tmp_path: Path) -> None:
    output = tmp_path / "joined.csv"
    assert data("join", orders, prices, "-o", output) == {"written": str(output), "rows": 4}
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["item_right"] for row in rows] == ["cheese", "bread", "", "apples"]
    again = qkv("join", orders, prices, "-o", output)
    assert again.exit_code == 2 and "--overwrite" in again.stderr
    assert qkv("join", orders, prices, "-o", output, "--overwrite").exit_code == 0
    wrong = qkv("join", orders, prices, "-o", tmp_path / "joined.txt")
    assert wrong.exit_code == 2 and ".parquet" in wrong.stderr


def test_databases_are_joined_and_wrong_columns_are_named(
    orders: Path, prices: Path, tmp_path: Path
) -> None:
    store = tmp_path / "prices.qkv"
    assert qkv("import", prices, store, "-k", "item").exit_code == 0
    rows = data("join", orders, store)["rows"]
    assert [row["price"] for row in rows] == [2.5, 1.5, None, 2]
    ended = qkv("join", orders, prices, "-l", "itme")
    assert ended.exit_code == 2 and "item" in ended.stderr
    blank = tmp_path / "blank.csv"
    blank.write_text("item,n\n,1\n")
    assert data("join", blank, prices, "-l", "item", code=1)["matched"] == 0


def test_notes_tell_unsure_matches_and_repeated_keys(tmp_path: Path) -> None:
    left, right, output = tmp_path / "left.csv", tmp_path / "right.csv", tmp_path / "out.csv"
    left.write_text("name,n\nAna Silva,1\nQuxly Wirp,2\n")
    right.write_text("name,city\nAnna Silva,Rome\nAnna Silva,Bonn\nTom Berg,Oslo\nJo Dahl,Bern\n")
    unsure = "1 of 2 rows have a match below 50 %: --min-weight 0.5 leaves their columns"
    repeated = "For 1 of 2 rows, more rows of RIGHT have the matched key: a larger --top joins"
    for more in ((), ("-o", output)):
        shown = qkv("join", left, right, *more).stderr
        assert unsure in shown and repeated in shown
    shown = qkv("join", left, right, "--min-weight", "0.6", "--top", "2").stderr
    assert unsure not in shown and repeated not in shown
    shown = qkv("join", left, right, "--where", "city=Paris")
    assert shown.exit_code == 1 and "No rows match where" in shown.stderr


def test_a_note_names_a_match_with_other_words(tmp_path: Path) -> None:
    """The weight of such a match is high: no other row is near."""
    left, right = tmp_path / "left.csv", tmp_path / "right.csv"
    left.write_text("name\nJon Smithers\nPetra Okafr\n", encoding="utf-8")
    right.write_text("name,room\nAnn Smithers,1\nPetra Okafor,2\nZoe Baker,3\n", encoding="utf-8")
    shown = qkv("join", left, right).output
    assert "1 of 2 rows has a match with other words, such as 'Jon Smithers' with 'Ann" in shown
