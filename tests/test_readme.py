"""Every ```python block of README.md and docs/*.md runs, in order, in one namespace per page.

A block right after the comment <!-- no-run --> is skipped. One with prompts (>>>) is a doctest.
"""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from qkv import scores, weightings
from qkv.database import encoders

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs").glob("how/*.md")),
]
BLOCK = re.compile(
    r"(?P<skip>^<!-- no-run -->[ \t]*\n)?^```python[ \t]*\n(?P<code>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> list[tuple[int, str]]:
    """The code that is to run, each with the number of its first line."""
    return [
        (text.count("\n", 0, match.start("code")) + 1, match["code"])
        for match in BLOCK.finditer(text)
        if not match["skip"]
    ]


def run(code: str, page: Path, line: int, namespace: dict[str, Any]) -> None:
    if code.lstrip().startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(
            code, namespace, page.name, str(page), line - 1
        )
        flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.FAIL_FAST
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=flags)
        runner.run(example, out=report.append, clear_globs=False)
        assert not runner.summarize(verbose=False).failed, "".join(report)
        namespace.update(example.globs)
    else:
        # The empty lines make a traceback name the page's own line.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    tables: list[dict[str, Any]] = [scores.NAMES, weightings.NAMES, encoders.ENCODERS]
    known = [dict(table) for table in tables]
    try:
        for line, code in blocks(page.read_text(encoding="utf-8")):
            run(code, page, line, namespace)
    finally:  # a page may register a name of its own
        for table, names in zip(tables, known, strict=True):
            table.clear()
            table.update(names)


def test_readme_has_code_to_run() -> None:
    assert blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def test_blocks_are_found_with_their_lines() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- no-run -->\n```python\ny\n```\n```bash\nls\n```\n"
    assert blocks(text) == [(3, "x = 1\n")]


def test_a_wrong_block_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        run("1 / 0\n", Path("page.md"), 1, {})
    with pytest.raises(AssertionError, match="Expected"):
        run(">>> 1 + 1\n3\n", Path("page.md"), 1, {})
