"""The reference page: every route is on it, its examples run, and text in it stays text."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import qkv
from qkv.serve import reference
from qkv.serve.route import Route
from tests.serve.process import serving


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("served") / "books.qkv"
    with qkv.open(path, key="title", value="author") as database:
        database.add({"The Alchemist": "Paulo Coelho", "Emma": "Jane Austen"})
        database.add("The Trial", "Franz Kafka")
    with serving(path, "--write") as (url, _):
        yield url


@pytest.fixture(scope="module")
def samples(url: str) -> dict[str, list[str]]:
    """The examples of each route: by curl, and in Python."""
    with urlopen(f"{url}/reference") as answer:
        text = answer.read().decode()
    result = re.findall(r"<h2><b>(\w+)</b> (.*?)</h2>(.*?)</section>", text, re.DOTALL)
    return {
        f"{method} {path}": [
            html.unescape(x) for x in re.findall(r"<code>([^<]*)</code></pre>", rest)
        ]
        for method, path, rest in result
    }


def test_every_route_has_its_examples(url: str, samples: dict[str, list[str]]) -> None:
    import json

    with urlopen(f"{url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    routes = {
        f"{method.upper()} {path}"
        for path, item in paths.items()
        for method in item
        if not path.startswith("/page/")
    }
    assert set(samples) == routes
    for curl, python in samples.values():
        assert shlex.split(curl)[0] == "curl"
        compile(python, "example", "exec")


def test_the_examples_run(
    url: str, samples: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "FILE").write_text("name,major\nAnn,art\n")
    monkeypatch.chdir(tmp_path)
    last = [route for route in samples if route.startswith("DELETE")]
    for route in [*(route for route in samples if route not in last), *last]:
        if route in ("POST /v1/databases/{name}/attend", "DELETE /v1/databases/{name}"):
            continue  # of text there is no mean; and what was not uploaded is not forgotten
        exec(samples[route][1], {})
    client = qkv.Client(url)
    assert "The Trial" not in client["books"]  # which the last example removed
    assert client.databases() == ["books", "text"]  # which one uploaded
    client.add("books", "The Trial", "Franz Kafka")
    client.close()


def test_it_is_read_in_a_browser(url: str, page: Any) -> None:
    page.goto(f"{url}/reference")
    assert page.locator("h1").inner_text().startswith("qkv ")
    page.locator("nav a", has_text="/ask").click()
    assert page.url.endswith("#post-v1-databases-name-ask")
    first = page.locator("section table").first
    assert first.evaluate("x => getComputedStyle(x).borderCollapse") == "collapse"  # its style came
    assert "α(q, k)" in page.locator("#post-v1-databases-name-ask").inner_text()


def test_text_in_a_route_stays_text() -> None:
    bad = "<script>alert(1)</script>"
    route = Route(
        "GET",
        f"/{bad}",
        lambda served, inputs: None,
        f"`{bad}`",
        {"enum": [bad]},
        query={bad: {"enum": [bad], "description": bad}},
        required_parameters=(bad,),
    )
    assert "<script" not in reference.render_reference([route], [bad], False, f"http://{bad}")
