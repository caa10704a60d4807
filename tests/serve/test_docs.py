"""docs/http.md: its code runs, against the server that it speaks of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import qkv
from tests.serve.process import serving
from tests.test_readme import BLOCK, ROOT, run


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    path, page = tmp_path / "books.qkv", ROOT / "docs" / "http.md"
    table = ROOT / "examples" / "data" / "books.csv"
    qkv.Database.from_source(table, key="title", value="author", path=path).close()
    blocks = list(BLOCK.finditer(page.read_text(encoding="utf-8")))
    assert len(blocks) == 2
    with serving(path, "--write") as (url, _):
        namespace: dict[str, Any] = {}
        for block in blocks:
            code = block["code"].replace("127.0.0.1:8000", url.removeprefix("http://"))
            run(code, page, 1, namespace)
            namespace["client"].close()
    assert namespace["answer"].value == "Paulo Coelho"
    with qkv.open(path, create=False) as database:
        assert database["The Trial"] == "Franz Kafka"
