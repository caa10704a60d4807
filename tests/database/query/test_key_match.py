"""A query whose words the best key lacks: the confidence is low, and a hint names the word."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import qkv
from qkv.database.encoders.text import make_typo
from qkv.database.query import key_match
from qkv.database.query.key_match import count_edits, find_edits, measure_mismatch
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.security import Access

FIRST = ["Ann", "Boris", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hassan", "Ines", "Jakob"]
LAST = ["Smithers", "Okafor", "Lindqvist", "Moreau", "Takahashi", "Petrov", "Castellano", "Baker"]
HINT = "the best key, Ann Smithers, has no word like 'Jon': check that it is what you mean"


@pytest.fixture
def staff() -> dict[str, str]:
    """Each first name with three last names."""
    names = [f"{a} {LAST[(i + k) % 8]}" for i, a in enumerate(FIRST) for k in (0, 1, 3)]
    return {name: f"room of {name}" for name in names}


def edits_by_table(a: str, b: str) -> int:
    """The textbook recurrence: insert, delete, replace, swap two neighbours."""
    d = np.zeros((len(a) + 1, len(b) + 1), int)
    d[:, 0], d[0] = range(len(a) + 1), range(len(b) + 1)
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            replaced = d[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            d[i, j] = min(d[i - 1, j] + 1, d[i, j - 1] + 1, replaced)
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                d[i, j] = min(d[i, j], d[i - 2, j - 2] + 1)
    return int(d[-1, -1])


def test_edits_are_those_of_the_recurrence() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        a, b = ("".join(rng.choice(list("abcé"), rng.integers(0, 9))) for _ in range(2))
        assert count_edits(a, b) == edits_by_table(a, b), (a, b)
    assert count_edits("a" * 200, "a" * 199 + "b") == 1


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("Jon Smithers", "Jon Smithers"),
        ("jon smithers!", "Jon Smithers"),
        ("Smithers, Jon", "Jon Smithers"),
        ("J. Smithers", "Jon Smithers"),
        ("Jon Smihters", "John Smithers"),
        ("Smithers", "Jon Smithers"),
        ("Lee", "Li"),
        ("Mr Jon Smithers", "Jon Smithers"),
        ("foot ball club", "football club"),
        ("closeBoundaryfound", "close boundary found"),
        ("multi output mixin", "MultiOutputMixin"),
        ("readcsv", "read_csv"),
        ("2011-05-03", "3.5.2011"),
        ("パスワード", "パスワードを忘れました"),
        ("李小", "李小龙"),
        ("", "tea"),
        ("!!", "tea"),
        (250, "Room 250"),
        ("tea", 7),
        ("tea " * 60, "coffee " * 30),
        (("Jon", 4.0), ("John", 5.0)),
        ("what should I read about a whale and a captain who hates it", "Moby Dick"),
    ],
)
def test_typos_order_and_missing_words_are_no_mismatch(query: object, key: object) -> None:
    assert measure_mismatch(query, key) < 0.05


@pytest.mark.parametrize(
    ("query", "key", "least"),
    [
        ("Jon Smithers", "Ann Smithers", 0.25),
        ("Jon Smithers", "Jon Petrov", 0.4),
        ("00999-Z", "00999-B", 0.25),
        ("Vitamin C", "Vitamin D", 0.2),
        ("王小明", "李小龙", 0.4),
        ("Room 7", "Room 8", 0.25),
        ("Macedonia", "Madagascar", 0.8),
        ("Divide one Laguerre series by another", "Multiply one Laguerre series by another", 0.1),
        (("Jon Smithers", "Rome"), ("Ann Smithers", "Rome"), 0.25),
    ],
)
def test_another_word_is_a_mismatch(query: object, key: object, least: float) -> None:
    assert least <= measure_mismatch(query, key) <= 1


def test_two_words_may_be_one() -> None:
    assert find_edits(["football"], ["foot", "ball"]) == [0]
    assert find_edits(["foot", "ball"], ["football"]) == [0, 0]
    assert find_edits(["7"], ["70"]) == [1]  # a digit is no initial


def test_a_name_that_is_not_listed_is_never_sure(staff: dict[str, str]) -> None:
    rng = np.random.default_rng(1)
    names = list(staff)
    lacking = [f"{a} {b}" for a in FIRST for b in LAST if f"{a} {b}" not in staff]
    D = qkv.Database(staff)

    def with_typo(text: str) -> str:
        letters = list(text)
        make_typo(letters, rng)
        return "".join(letters)

    for change in (str.lower, with_typo):
        lacked = [answer.confidence or 0 for answer in D.ask([*map(change, lacking)])]
        answers = D.ask([*map(change, names)])
        right = [
            a.confidence for a, name in zip(answers, names, strict=True) if a.value[8:] == name
        ]
        assert np.mean(lacked) < 0.4 and np.mean(np.array(lacked) >= 0.9) < 0.05
        assert len(right) > 0.9 * len(names) and np.mean(right) > 0.9


def test_every_entry_point_has_the_same_confidence_and_hint(
    tmp_path: Path, staff: dict[str, str]
) -> None:
    staff = {x: staff[x] for x in staff if x == "Ann Smithers" or "Smithers" not in x}
    memory = qkv.Database(staff)
    answer = memory.ask("Jon Smithers")
    assert answer.rows[0].key == "Ann Smithers" and answer.hint == HINT
    assert answer.confidence_text.startswith("unsure")
    answers = {"pickle": pickle.loads(pickle.dumps(answer))}
    with qkv.open(tmp_path / "staff.qkv", create=True) as store:
        store.extend({"key": key, "value": value} for key, value in staff.items())
        answers["store"] = store.ask("Jon Smithers")
    served = DatabaseRegistry()
    served.add_database("staff", memory)
    with TestClient(create_app(served, Access()), base_url="http://localhost") as client:
        body = client.post("/v1/databases/staff/ask", json={"query": "Jon Smithers"}).json()
    assert (body["hint"], body["confidence"]) == (HINT, pytest.approx(answer.confidence))
    for name, other in answers.items():
        assert other.hint == HINT, name
        assert other.confidence == pytest.approx(answer.confidence, abs=0.02), name


def test_rows_with_one_key_share_its_hint() -> None:
    """Two rows of Ann Smithers have half of the weight each."""
    names = ["Ann Smithers", "Jörg Müller", "Maria da Silva", "Ann Smithers"]
    D = qkv.Database.from_columns({"name": names, "pay": [1, 2, 3, 4]}, key="name", value="pay")
    answer = D.ask("Jon Smithers")
    assert answer.rows[0].weight < 0.5
    assert answer.hint == HINT


def test_meaning_alone_needs_no_common_letters() -> None:
    """An encoder of meaning finds other words on purpose."""
    D = qkv.Database({"automobile": 1, "banana": 2}, encoder="words")
    answer = D.ask("motorcar")
    assert "no word like" not in answer.hint


def test_the_class_of_a_sentence_needs_no_key_with_its_words() -> None:
    """Values that repeat are classes. Short queries are names all the same."""
    things = ("cat", "dog", "cow", "hen", "pig", "rat", "bee", "fox")
    keys = [f"in the old town {name} has a {x} at home" for name in FIRST for x in things]
    classes = qkv.Database([(key, key.split()[7]) for key in keys])
    rows = qkv.Database([(key, f"row {i}") for i, key in enumerate(keys)])
    query = "in the old town Olga has a small fox at home"
    assert classes.ask(query)._backend.measure_mismatch(classes.ask(query).rows) == 0
    assert rows.ask(query)._backend.measure_mismatch(rows.ask(query).rows) > 0
    teams = qkv.Database([(f"{a} {b}", b) for a in FIRST for b in LAST[1:]])
    answer = teams.ask("Olga Smithers")
    assert answer._backend.measure_mismatch(answer.rows) > 0.2


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ("Ann Lea", "Ann Lee", "letter"),
        ("Ann Lea", "ann le", "letter"),
        ("A-012", "A-0122", "digit"),
        ("A-012", "A-021", "digit"),
        ("form", "from", "letter"),
        ("abcd", "badc", ""),
        ("Ann Lee", "ann léé", ""),
        ("Ann", "Bob", ""),
        ("", "a", "letter"),
        ("", "", ""),
        ("李明", "李华", "letter"),
    ],
)
def test_one_letter_or_digit(a, b, expected):
    assert key_match.find_one_edit(a, b) == expected == key_match.find_one_edit(b, a)


def test_the_share_of_keys_that_differ_by_one_letter_is_that_of_all_pairs():
    draw = random.Random(1)
    first = ("Ann", "Anna", "Bo", "Bob", "Carl", "Dan", "Dana", "Eva", "Jon", "John", "Kim", "Tim")
    last = ("Smith", "Smyth", "Meier", "Meyer", "Li", "Lee", "Wang", "Wong", "Lopez", "Shah", "Ali")
    for count in (30, 200):
        pairs = ((draw.choice(first), draw.choice(last)) for _ in range(count))
        names = sorted({" ".join(pair) for pair in pairs})
        near = [any(key_match.find_one_edit(a, b) for b in names) for a in names]
        measured = key_match.measure_one_edit(names)
        assert measured == pytest.approx((sum(near) / len(names), 0.0), abs=0.05)
    for count in (100, 9000):
        measured = key_match.measure_one_edit([f"A{i:04}" for i in range(count)])
        assert measured == pytest.approx((0.0, 1.0), abs=0.001)
    assert key_match.measure_one_edit([]) == (0.0, 0.0)
    assert key_match.measure_one_edit(["x" * 200, "x" * 199 + "y", "a" * 30]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "keys, typo, kind",
    [
        ([f"{a}{i:02}" for a in "XY" for i in range(20)], "X077", "digit"),
        (
            ["Ann Lee", "Ann Lea", "Jan Wu", "Jon Wu", "Tim Ali", "Kim Ali", "Bo Li"],
            "Bo Lu",
            "letter",
        ),
    ],
)
def test_where_one_letter_makes_another_key_a_near_key_is_not_sure(tmp_path, keys, typo, kind):
    with qkv.open(tmp_path / "keys.qkv") as D:
        D.add(keys, [f"about {key}" for key in keys])
        assert D.ask(keys[-1]).hint == "" and D.ask(keys[-1]).confidence > 0.9
        answer = D.ask(typo)
        assert answer.confidence < 0.6
        assert kind == "digit" or f"differs by one {kind}, as 86 % of the keys do" in answer.hint
        said = answer.hint, answer.confidence
    with qkv.open(tmp_path / "keys.qkv") as D:
        assert (D.ask(typo).hint, D.ask(typo).confidence) == said
        D.encode("exact")
        assert "one_edit" not in D._view.settings
    # Where letters distinguish no keys, or digits do, a typo is a typo.
    words = ["Lipton", "Zhang", "Smola", "Li", "Cortez", "Alexander", "Hu", "Okonkwo"]
    assert qkv.Database(words, words).ask("Liptn").confidence > 0.9
    rooms = [f"Room {i}" for i in range(20)]
    assert qkv.Database(rooms, rooms).ask("Rom 12").confidence > 0.8


def test_zeros_before_a_number_are_no_other_digits():
    assert key_match.find_one_edit("A-12", "A-012") == ""
    assert key_match.find_one_edit("A-102", "A-12") == "digit"
