"""The page as a server gives it, used in a browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

import qkv
from qkv.page import to_html
from qkv.serve import limits
from qkv.serve.app import create_app
from qkv.serve.databases import DatabaseRegistry
from qkv.serve.security import Access
from qkv.serve.server import bind_socket
from tests.browser import fill_query, wait_until
from tests.page import test_regression, test_scores, test_sentence
from tests.serve.conftest import serving

EVIL = "<img src=x onerror=\"document.title='owned'\">"
CSV = f"name,major,year\nAnn,art,1\nBo,law,2\nCy,{EVIL.replace(chr(34), chr(39))},3\n"
TOKEN = "a-token-that-writes"


@contextmanager
def at_work(served: DatabaseRegistry, access: Access) -> Iterator[str]:
    """A real server in a thread: its address."""
    with bind_socket("127.0.0.1", 0) as place:
        server = uvicorn.Server(uvicorn.Config(create_app(served, access), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(300)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> DatabaseRegistry:
    served = serving(tmp_path_factory.mktemp("page"))
    database = served.databases["books"].database
    database.extend([{"title": EVIL, "genre": EVIL, "year": 2000}])
    return served


@pytest.fixture(scope="module")
def url(own: DatabaseRegistry) -> Iterator[str]:
    with at_work(own, Access()) as url:
        yield url


def read_number(page: Any, test: str) -> float:
    return float(page.get_by_test_id(test).get_attribute("data-value"))


def test_the_served_databases_are_shown(page: Any, url: str, own: DatabaseRegistry) -> None:
    """Each table has one view, which opens on a fuzzy question and says how sure the answer is."""
    page.goto(url)
    page.get_by_test_id("data-value-found").wait_for()
    tabs = page.get_by_role("tab").all_inner_texts()
    assert tabs == ["Your data", "Sentence", "Regression", "Scores", "Model"]
    options = page.get_by_test_id("data-table").locator("option").all_inner_texts()
    assert options[:4] == ["books", "grades", "vectors", "places"]
    query = page.get_by_test_id("data-query").input_value()
    books = own.databases["books"].database
    assert query not in list(books) and query
    answer = books.ask(query)
    assert page.get_by_test_id("data-value-found").inner_text() == answer.value
    sure = f"How sure: {answer.confidence_text}"
    assert page.get_by_test_id("data-confidence").inner_text() == sure


def test_the_rows_of_a_served_table_are_edited(page: Any, url: str, own: DatabaseRegistry) -> None:
    page.goto(url)
    page.get_by_test_id("data-value-found").wait_for()
    fill_query(page, "Ulises")
    live = page.get_by_test_id("data-live")
    live.click()
    value = page.get_by_test_id("answer-value")
    value.wait_for()
    books = own.databases["books"].database
    assert page.get_by_test_id("query").input_value() == "Ulises"
    assert value.inner_text() == books.ask("Ulises").value
    assert page.get_by_test_id("data-query").is_hidden()
    assert "How sure: " in page.get_by_test_id("note").inner_text()
    live.click()
    page.get_by_test_id("data-value-found").wait_for()
    assert page.get_by_test_id("data-live-view").is_hidden()
    live.click()
    value.wait_for()
    page.get_by_test_id("data-table").select_option("grades")
    page.get_by_text("grades: ").wait_for()
    assert page.get_by_test_id("data-live-view").is_hidden()


def test_a_served_database_is_asked(page: Any, url: str, own: DatabaseRegistry) -> None:
    page.goto(url)
    books = own.databases["books"].database
    first = next(books.rows())
    page.get_by_test_id("data-first-0-title").wait_for()
    assert page.get_by_test_id("data-first-0-title").inner_text() == first["title"]
    query = page.get_by_test_id("data-query")
    assert first["title"] in query.get_attribute("placeholder")
    assert query.evaluate("it => it.getRootNode().activeElement === it")
    page.get_by_test_id("data-where").fill("year < 1850")
    early = next(books.rows(where="year < 1850"))["title"]
    page.get_by_test_id("data-first-0-title").filter(has_text=early).wait_for()
    page.get_by_test_id("data-where").fill("")
    fill_query(page, "Ulises")
    page.get_by_test_id("data-row-0-weight").wait_for()
    expected = own.databases["books"].database.ask("Ulises", top=10)
    assert page.get_by_test_id("data-value-found").inner_text() == expected.value
    for i, row in enumerate(expected.rows):
        assert page.get_by_test_id(f"data-row-{i}-key").inner_text() == row.key
        assert read_number(page, f"data-row-{i}-weight") == pytest.approx(row.weight, rel=1e-4)
    assert page.get_by_test_id("data-explained").inner_text() == expected.explain()
    sure = f"How sure: {expected.confidence_text}"
    assert page.get_by_test_id("data-confidence").inner_text() == sure
    assert page.get_by_test_id("data-hint").count() == 0
    # Only some rows, then an older version, then nonsense.
    page.get_by_test_id("data-where").fill("year < 1850")
    page.get_by_text("of 2", exact=False).last.wait_for()
    actual = own.databases["books"].database.ask("Ulises", where="year < 1850")
    assert page.get_by_test_id("data-row-0-key").inner_text() == actual.rows[0].key
    page.get_by_test_id("data-where").fill("yaer < 1850")
    page.expected.append("422")
    page.get_by_test_id("data-error").wait_for()
    assert "year" in page.get_by_test_id("data-error").inner_text()
    page.get_by_test_id("data-where").fill("")
    page.get_by_test_id("data-version").select_option("1")
    page.get_by_text("of 5", exact=False).last.wait_for()
    assert page.get_by_test_id("data-error").is_hidden()


def test_a_new_table_is_asked_a_fuzzy_question(page: Any, tmp_path: Path) -> None:
    to_html({"view": "data"}, tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    answer = page.get_by_test_id("data-answer")
    for name, csv, question, value in (
        ("books", "id,title,year\nB-1,The Alchemist,1988\nB-2,Ulysses,1922\n", "B-1", None),
        ("titles", "title,id,year\nThe Alchemist,B-1,\nUlysses,B-2,1922\n", "the alchmist", "B-1"),
        ("pay", "gpa,salary\n3.1,70\n3.5,82\n", "3.3", "76"),
    ):
        page.get_by_test_id("data-file").set_input_files(
            {"name": f"{name}.csv", "mimeType": "text/csv", "buffer": csv.encode()}
        )
        page.get_by_text(f"{name}: 2 rows").wait_for()
        wait_until(page, lambda question=question: answer.get_attribute("data-query") == question)
        assert page.get_by_test_id("data-query").input_value() == question
        if value is not None:
            assert value in page.get_by_test_id("data-value-found").inner_text()
        assert page.get_by_test_id("data-first-1-" + csv.split(",")[0]).count() == 1
        if name == "titles":
            assert page.get_by_test_id("data-first-0-year").inner_text() == ""
    fill_query(page, "3.4")
    assert page.get_by_test_id("data-first-1-gpa").count() == 0


def test_a_narrow_page_breaks_no_word_that_fits(page: Any, tmp_path: Path) -> None:
    to_html({"view": "data"}, tmp_path / "p.html")
    page.set_viewport_size({"width": 380, "height": 800})
    page.goto((tmp_path / "p.html").as_uri())
    csv = "about,title\n" + "a rebellious girl grows up through revolution " * 4 + ",Persepolis\n"
    page.get_by_test_id("data-file").set_input_files(
        {"name": "books.csv", "mimeType": "text/csv", "buffer": csv.encode()}
    )
    fill_query(page, "a girl")
    value = page.get_by_test_id("data-row-0-value")
    value.wait_for()
    lines = """it => {
        const all = document.createRange();
        all.selectNodeContents(it);
        return all.getClientRects().length;
    }"""
    assert value.inner_text() == "Persepolis" and value.evaluate(lines) == 1
    assert page.evaluate("document.documentElement.scrollWidth") == 380


def test_text_that_runs_from_right_to_left_is_laid_out_so(page: Any, tmp_path: Path) -> None:
    to_html({"view": "data"}, tmp_path / "p.html")
    page.goto((tmp_path / "p.html").as_uri())
    csv = "hello,world\nשלום!,مرحبا!\n"
    page.get_by_test_id("data-file").set_input_files(
        {"name": "words.csv", "mimeType": "text/csv", "buffer": csv.encode()}
    )
    query = page.get_by_test_id("data-query")
    fill_query(page, "שלום")  # the page has asked for the key itself
    page.get_by_test_id("data-row-0-key").wait_for()
    left = """it => {
        const one = document.createRange(), text = it.firstChild, end = text.data.length;
        const place = (from) => {
            one.setStart(text, from);
            one.setEnd(text, from + 1);
            return one.getBoundingClientRect().x;
        };
        return place(end - 1) < place(0);
    }"""
    for shown in ("data-row-0-key", "data-row-0-value", "data-value-found"):
        assert page.get_by_test_id(shown).evaluate(left), shown
    assert query.evaluate("it => getComputedStyle(it).unicodeBidi") == "plaintext"


def test_a_late_error_does_not_replace_a_newer_answer(page: Any, url: str) -> None:
    page.add_init_script("""
        const ask = fetch;
        window.refused = 0;  // and what the page makes of it is done
        window.fetch = async (...given) => {
          const answer = await ask(...given);
          if (answer.status === 422) setTimeout(() => window.refused++, 100);
          return answer;
        };
    """)
    page.goto(url)
    page.get_by_test_id("tab-data").click()
    page.get_by_test_id("data-first-0-title").wait_for()
    held: list[Any] = []
    page.route(
        "**/page/call/ask",
        lambda way: held.append(way) if "yaer" in way.request.post_data else way.continue_(),
    )
    fill_query(page, "Emma")
    answer = page.get_by_test_id("data-answer")
    last = answer.get_attribute("data-request")
    page.get_by_test_id("data-where").fill("yaer < 1850")
    wait_until(page, lambda: held)
    page.get_by_test_id("data-where").fill("")
    wait_until(page, lambda: answer.get_attribute("data-request") != last)
    page.expected.append("422")
    held[0].continue_()
    wait_until(page, lambda: page.evaluate("window.refused"))
    assert page.get_by_test_id("data-error").is_hidden()


def test_an_error_for_a_limit_names_the_next_step(
    page: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.goto(url)
    page.get_by_test_id("tab-data").click()
    page.get_by_test_id("data-first-0-title").wait_for()
    monkeypatch.setattr(limits, "REQUEST_TIMEOUT_SECONDS", 0)
    page.expected.append("503")
    fill_query(page, "Emma")
    page.get_by_test_id("data-error").filter(has_text="qkv.open(PATH)").wait_for()


@pytest.mark.parametrize("served", [True, False])
def test_a_long_cell_leaves_space_for_the_others(page: Any, tmp_path: Path, served: bool) -> None:
    text = "who is at the door, and why " * 70
    csv = f'question,answer\n"{text}",nobody\n{"x" * 300},somebody\n'
    to_html({"view": "data"}, tmp_path / "p.html")
    with at_work(DatabaseRegistry(), Access()) as url:
        page.goto(url if served else (tmp_path / "p.html").as_uri())
        if served:
            page.get_by_test_id("tab-data").click()
        page.get_by_test_id("data-file").set_input_files(
            {"name": "faq.csv", "mimeType": "text/csv", "buffer": csv.encode()}
        )
        first = page.get_by_test_id("data-first-1-answer")
        first.wait_for()
        box = first.bounding_box()
        assert box["x"] + box["width"] < 1280
        fill_query(page, text)
        key = page.get_by_test_id("data-row-0-key")
        key.wait_for()
        assert key.inner_text() == text.strip()  # all of it is there
        short = key.bounding_box()["height"]
        assert short < 120
        explanation = page.get_by_test_id("data-explained").inner_text()
        assert "who is at the door, and why who is at t…" in explanation and len(explanation) < 500
        key.locator("div").click()
        assert key.bounding_box()["height"] > 2 * short
        page.goto("about:blank")


def test_a_condition_is_of_the_table_that_is_open(page: Any, tmp_path: Path) -> None:
    served = DatabaseRegistry()
    served.add_database(
        "prices", qkv.Database.from_columns({"what": ["a", "b"], "net price": [3.5, 4]})
    )
    served.add_database("names", qkv.Database({"Li": "Mu", "Hu": "Rachel"}))
    with at_work(served, Access()) as url:
        page.goto(url)
        page.get_by_test_id("tab-data").click()
        where = page.get_by_test_id("data-where")
        for table, column, example in [
            ("prices", "what", "`net price` <= 3.5"),
            ("names", "key", 'key == "Li"'),
        ]:
            page.get_by_test_id("data-table").select_option(table)
            page.get_by_test_id(f"data-first-1-{column}").wait_for()
            assert not where.input_value() and where.get_attribute("placeholder") == example
            where.fill(example)
            page.get_by_test_id(f"data-first-1-{column}").wait_for(state="detached")
            assert page.get_by_test_id(f"data-first-0-{column}").count() == 1
        page.goto("about:blank")


def test_another_table_is_asked_its_own_question(page: Any) -> None:
    """The query and the filter of the previous table are not sent to one with other columns."""
    served = DatabaseRegistry()
    titles = {"title": ["The Alchemist", "Ulysses"], "year": [1988, 1922]}
    served.add_database("books", qkv.Database.from_columns(titles, value="year"))
    pay = {"grade": [3.0, 3.5], "salary": [70.0, 82.0]}
    served.add_database("pay", qkv.Database.from_columns(pay, value="salary"))
    with at_work(served, Access()) as url:
        page.goto(url)
        page.get_by_test_id("data-value-found").wait_for()
        fill_query(page, "Ulises")
        where = page.get_by_test_id("data-where")
        where.fill("year > 1900")
        query = page.get_by_test_id("data-query")
        answer = page.get_by_test_id("data-answer")
        for table, question in [("pay", "3.25"), ("books", "the alchmist")]:
            page.get_by_test_id("data-table").select_option(table)
            wait_until(page, lambda asked=question: answer.get_attribute("data-query") == asked)
            assert query.input_value() == question and not where.input_value()
        where.fill("year > 1900")
        page.get_by_test_id("data-key").select_option("year")
        wait_until(page, lambda: answer.get_attribute("data-query") == "1955")
        assert where.input_value() == "year > 1900"
        assert page.get_by_test_id("data-error").is_hidden()
        page.goto("about:blank")


def test_keys_of_the_same_name_and_another_kind_are_asked_their_own_question(
    page: Any, tmp_path: Path
) -> None:
    """A table whose keys are numbers refuses a query that was text, with and without Python."""
    served, paths = DatabaseRegistry(), []
    for name, keys in (("names", ["Ulm", "Basel"]), ("numbers", [3.0, 4.0])):
        columns = {"code": keys, "price": [5.0, 6.0]}
        served.add_database(name, qkv.Database.from_columns(columns, value="price"))
        paths.append(tmp_path / f"{name}.csv")
        lines = [f"{key},{price}" for key, price in zip(*columns.values(), strict=True)]
        paths[-1].write_text("\n".join(["code,price", *lines]), encoding="utf-8")
    to_html([{"view": "data"}], tmp_path / "page.html")
    query, answer = page.get_by_test_id("data-query"), page.get_by_test_id("data-answer")
    with at_work(served, Access()) as url:
        for address in (url, (tmp_path / "page.html").as_uri()):
            page.goto(address)
            for path in paths if address != url else []:
                page.get_by_test_id("data-file").set_input_files(path)
                page.get_by_text(f"{path.stem}: 2 rows").wait_for()
            page.get_by_test_id("data-table").select_option("names")
            page.get_by_text("names: 2 rows").wait_for()
            fill_query(page, "Bsel")
            page.get_by_test_id("data-table").select_option("numbers")
            wait_until(page, lambda: answer.get_attribute("data-query") == "3.5")
            assert query.input_value() == "3.5"
            assert page.get_by_test_id("data-error").is_hidden()
        page.goto("about:blank")


def test_a_server_that_is_gone_is_reported(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_test_id("tab-data").click()
    page.get_by_test_id("data-first-0-title").wait_for()
    page.route("**/page/call/ask", lambda way: way.abort("connectionrefused"))
    page.expected.append("ERR_CONNECTION_REFUSED")
    fill_query(page, "Emma")
    page.get_by_test_id("data-error").filter(has_text="the server does not answer").wait_for()
    page.unroute("**/page/call/ask")
    fill_query(page, "Ulysses")
    page.get_by_test_id("data-row-0-weight").wait_for()
    assert page.get_by_test_id("data-error").is_hidden()


def test_a_page_that_cannot_start_says_why_and_starts_again(page: Any, url: str) -> None:
    refused = {"error": "this exceeded the limit of 60 seconds"}
    page.route("**/page/call/views", lambda way: way.fulfill(status=503, json=refused))
    page.expected.append("503")
    page.goto(url)
    page.get_by_role("alert").filter(has_text=refused["error"]).wait_for()
    page.unroute("**/page/call/views")
    page.get_by_role("button", name="Start again").click()
    page.get_by_test_id("data-value-found").wait_for()
    assert page.get_by_role("button", name="Start again").is_hidden()


def test_a_file_is_uploaded_and_asked_by_other_columns(
    page: Any, url: str, own: DatabaseRegistry
) -> None:
    page.goto(url)
    page.get_by_test_id("tab-data").click()
    page.get_by_test_id("data-file").set_input_files(
        {"name": "my students.csv", "mimeType": "text/csv", "buffer": CSV.encode()}
    )
    page.get_by_text("my_students: 3 rows").wait_for()
    page.get_by_test_id("data-value").select_option("major")
    page.get_by_text("name → major").wait_for()
    fill_query(page, "Bo")
    page.get_by_test_id("data-row-0-weight").wait_for()
    assert page.get_by_test_id("data-value-found").inner_text() == "law"
    database = own.databases["my_students"].database
    expected = database.ask("Bo").rows[0].weight
    assert read_number(page, "data-row-0-weight") == pytest.approx(expected, rel=1e-4)
    page.get_by_test_id("data-key").select_option("year")
    page.get_by_text("year → major").wait_for()
    fill_query(page, "1.2")
    page.get_by_test_id("data-row-0-key").wait_for()
    assert page.get_by_test_id("data-value-found").inner_text() == "art"
    assert own.databases["my_students"].database.info()["key"] == ["year"]
    page.get_by_test_id("data-file").set_input_files(
        {"name": "holes.csv", "mimeType": "text/csv", "buffer": b"name,age\nAnn,1\n,2\nBo,3\n"}
    )
    page.get_by_text("holes: 2 rows").wait_for()
    assert page.get_by_test_id("data-about").inner_text().endswith(": skipped: row 2")
    page.expected.append("422")
    page.get_by_test_id("data-file").set_input_files(
        {"name": "empty.csv", "mimeType": "text/csv", "buffer": b""}
    )
    page.get_by_test_id("data-error").wait_for()
    assert "empty" in page.get_by_test_id("data-error").inner_text()
    assert page.get_by_test_id("data-about").inner_text().startswith("holes: 2 rows")


def test_a_folder_of_a_database_is_opened(
    page: Any, url: str, own: DatabaseRegistry, tmp_path: Path
) -> None:
    with qkv.open(tmp_path / "names.qkv", encoder="characters") as database:
        database.add("Li", "Mu")
        database.add("Hu", "Rachel")
    page.goto(url)
    page.get_by_test_id("tab-data").click()
    page.get_by_test_id("data-folder").set_input_files(tmp_path / "names.qkv")
    page.get_by_text("names: 2 rows").wait_for()
    fill_query(page, "Hu")
    page.get_by_test_id("data-row-1-weight").wait_for()
    assert page.get_by_test_id("data-value-found").inner_text() == "Rachel"
    page.get_by_test_id("data-version").select_option("1")
    page.get_by_text("of 1", exact=False).last.wait_for()
    assert page.get_by_test_id("data-value-found").inner_text() == "Mu"
    assert not own.databases["names"].is_durable


def test_text_in_the_data_is_no_markup(page: Any, url: str) -> None:
    page.goto(url)
    title = page.title()
    page.get_by_test_id("tab-data").click()
    fill_query(page, EVIL)
    page.get_by_test_id("data-row-0-key").wait_for()
    assert page.get_by_test_id("data-row-0-key").inner_text() == EVIL
    assert page.get_by_test_id("data-value-found").inner_text() == EVIL
    page.get_by_test_id("data-file").set_input_files(
        {"name": f"{EVIL}.csv", "mimeType": "text/csv", "buffer": CSV.encode()}
    )
    page.get_by_test_id("data-about").filter(has_text="3 rows").wait_for()
    fill_query(page, "Cy")  # the new table has cleared the query of the old one
    page.get_by_test_id("data-row-0-key").wait_for()
    assert page.locator("img").count() == 0 and page.title() == title


def test_the_views_that_need_no_database(page: Any, url: str) -> None:
    """Those of the file host, whose numbers are tested there, show the same here."""
    page.goto(url)
    page.get_by_test_id("tab-sentence").click()
    row = test_sentence.weights(page, 9)
    assert row.sum() == pytest.approx(1, abs=5e-3) and row.argmax() == 0
    page.get_by_test_id("tab-regression").click()
    view = page.get_by_test_id("view-regression")
    view.get_by_text("as numbers").click()
    view.get_by_test_id("regression-kernel").select_option("gaussian")
    test_regression.type_number(page, "regression-bandwidth", 0.4)
    test_regression.type_number(page, "regression-query", 2.5)
    test_regression.check(page, 2.5, test_regression.kernel("gaussian", 0.4))
    page.get_by_test_id("tab-scores").click()
    page.get_by_test_id("view-scores").get_by_text("as numbers").click()
    page.get_by_test_id("score-gaussian").click()
    test_scores.type_number(page, "scores-q", 0.9)
    score = test_scores.SIMILARITIES["gaussian"]
    alpha = qkv.weights(np.array([[0.9]]), test_scores.KEYS[:, None], score=score)[0]
    np.testing.assert_allclose(test_scores.column(page, "weight"), alpha, atol=6e-4)


def test_inline_script_is_refused_by_the_policy(page: Any, url: str) -> None:
    page.expected.append("Content Security Policy")
    page.goto(url)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.owned = 1';"
        " document.body.append(s); }"
    )
    assert page.evaluate("() => window.owned") is None


def test_the_page_asks_for_a_token(page: Any, tmp_path: Path) -> None:
    page.expected.append("401")
    with at_work(serving(tmp_path), Access(TOKEN)) as url:
        page.goto(url)
        page.get_by_label("Token").fill("not-the-right-token")
        page.get_by_role("button", name="Show the page").click()
        page.get_by_text("Try again").wait_for()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Show the page").click()
        page.get_by_test_id("tab-data").click()
        fill_query(page, "Emma")
        page.get_by_test_id("data-row-0-key").wait_for()
        assert page.get_by_test_id("data-row-0-key").inner_text() == "Emma"
        assert page.get_by_test_id("token-form").is_hidden()
        page.goto("about:blank")


def test_a_file_in_the_page_alone(page: Any, tmp_path: Path) -> None:
    """Without Python: the twin's numbers are those of a database of the same rows."""
    to_html({"view": "data", "title": "Your data"}, tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    text = 'gpa;salary\n3.1;70\n3.5;82\n3.6;86\n4.0;95\n"";1\n'
    page.get_by_test_id("data-file").set_input_files(
        {"name": "gpa.csv", "mimeType": "text/csv", "buffer": text.encode()}
    )
    fill_query(page, "3.55")
    page.get_by_test_id("data-row-3-weight").wait_for()
    expected = qkv.Database([(3.1, 70), (3.5, 82), (3.6, 86), (4.0, 95)]).ask(3.55, top=10)
    for i, row in enumerate(expected.rows):
        assert read_number(page, f"data-row-{i}-weight") == pytest.approx(row.weight, abs=1e-6)
    shown = float(page.get_by_test_id("data-value-found").inner_text())
    assert shown == pytest.approx(expected.value, rel=1e-4)
    fill_query(page, "much")
    page.get_by_test_id("data-error").wait_for()
    assert "must be a number" in page.get_by_test_id("data-error").inner_text()
    # The answer was to another question, so it is greyed.
    assert page.get_by_test_id("data-answer").get_attribute("class") == "stale"
