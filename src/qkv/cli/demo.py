"""`qkv demo`: short examples of attention on built-in tables."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from qkv.cli import terminal
from qkv.cli.ask import print_answer
from qkv.cli.command import Result

if TYPE_CHECKING:
    from qkv.answer import Answer

NAMES = {
    "Zhang": "Aston",
    "Lipton": "Zachary",
    "Li": "Mu",
    "Smola": "Alex",
    "Hu": "Rachel",
    "Werness": "Brent",
}
MAJORS = {
    "John Doe": "psychology",
    "Jane Roe": "mathematics",
    "Ann Lee": "computer science",
    "Tom Hill": "engineering",
    "Mia Stone": "philosophy",
    "Raj Patel": "economics",
}
# Invented data: the grade point averages of 14 engineers, and their starting salaries in thousands.
SALARIES = {
    2.41: 61.2,
    2.58: 64.0,
    2.66: 62.1,
    2.79: 66.3,
    2.93: 65.0,
    3.02: 69.8,
    3.15: 67.4,
    3.28: 72.5,
    3.37: 71.0,
    3.46: 76.9,
    3.58: 74.2,
    3.71: 79.5,
    3.86: 83.1,
    3.97: 85.4,
}


def demo() -> Iterator[Result]:
    """Show four short examples on built-in tables.

    For a longer demo with 300 books and plots, run `make demo` in the repository.
    """
    from qkv.database import Database

    with Database(NAMES) as names:
        yield _story_result("An existing key: names['Li']", names.ask("Li", weighting="hard"))
        yield _story_result("A missing key: names.ask('Lee')", names.ask("Lee"))
    with Database(MAJORS) as majors:
        by_major = majors.reindex(key="value", value="key")
        yield _story_result(
            "Find people by major: swap key and value, ask for 'theorems and proofs'",
            by_major.ask("theorems and proofs"),
        )
    with Database(SALARIES) as salaries:
        yield _story_result("GPA 3.5: what salary, in thousands?", salaries.ask(3.5))

    steps = (
        NEXT_STEPS
        if find_spec("wordllama")
        else [*NEXT_STEPS[:-1], 'pip install "qkv[text]"', NEXT_STEPS[-1]]
    )
    yield Result(
        {"next": steps},
        lambda: terminal.print_line("Try next:\n" + "\n".join(f"  {line}" for line in steps)),
    )


NEXT_STEPS = [
    'qkv ask TABLE.csv "what you look for" --key COLUMN --value COLUMN',
    "qkv import TABLE.csv TABLE.qkv --key COLUMN",
    'qkv weights "the cat sat on the mat because it was tired"',
]


def _story_result(title: str, answer: Answer) -> Result:
    def print_story() -> None:
        terminal.print_line(title, "bold")
        print_answer(answer)
        terminal.print_line()

    return Result({"story": title, **answer.to_dict()}, print_story)
