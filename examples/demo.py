"""Five short demonstrations of a database with attention: Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ.

    python examples/demo.py                 run all; writes pictures and books.qkv to demo/
    python examples/demo.py --out DIR       writes to DIR instead

This command makes a picture of the README:

    python examples/demo.py --only scores --out docs/pictures
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while loading there is nothing to clean up

import numpy as np
import pictures

import qkv
from qkv import scores, weightings
from qkv.util.formatting import format_bar

BOOKS_CSV = Path(__file__).parent / "data" / "books.csv"

# 1. Books: type a title and find the author, or describe the plot and find the title.


def books(out: Path) -> None:
    heading("1. Three hundred books")
    with qkv.Database.from_source(
        BOOKS_CSV, key="title", value="author", path=out / "books.qkv"
    ) as B:
        say(f"B has {len(B)} rows of {', '.join(B.columns)}; a key is a title, a value its author.")

        say("\nHard attention is the classical database query: one row gets all the weight.")
        show(f'{B.ask("war", weighting="hard") = }')
        say("\nSoft attention gives every row a weight: the more similar its key, the larger.")
        show(f'{B.ask("war") = }')
        say("\nA temperature above 1 gives the other rows more weight.")
        warm = weightings.Softmax(temperature=2)
        say("  warm = weightings.Softmax(temperature=2)")
        show(f'{B.ask("war", weighting=warm) = }')
        say("\nTypos are tolerated: a query with one still finds its title.")
        show(f'{B.ask("the alchmist") = }')

        say("\nThe same rows, with summaries as keys and titles as values:")
        by_summary = B.reindex(key="summary", value="title")
        idea = "a boy seeks treasure near the pyramids"
        say(f'  by_summary = B.by(key="summary", value="title")\n  idea = "{idea}"')
        show(f"{by_summary.ask(idea) = }")
        show(f"{by_summary.ask(idea).explain() = !s}")
        show(f'{by_summary.ask("why countries are rich") = }')
        say("\nA vague query spreads the weight over many rows. `where` filters the rows.")
        show(f'{by_summary.ask("unhappy love") = }')
        show(f'{by_summary.ask("growing up in a war", where={"genre": "memoir"}) = }')

        page = {
            "Books by title": B.ask("the alchmist"),
            "Books by what happens": by_summary.ask(idea),
            "A sentence": {"view": "sentence"},
            "Regression": {"view": "regression"},
            "Scores": {"view": "scores"},
        }
        qkv.page.to_html(page, out / "page.html", title="Attention is a query")
        asked = {
            "keys: titles": [
                ("hard", B.ask("war", weighting="hard")),
                ("soft", B.ask("war")),
                ("soft", B.ask("the alchmist")),
            ],
            "keys: summaries": [
                ("soft", by_summary.ask(idea)),
                ("soft", by_summary.ask("why countries are rich")),
                ("soft", by_summary.ask("unhappy love")),
            ],
        }
    draw(pictures.books(asked), out / "books.png")


# 2. Six names: an exact look-up, then one that tolerates typos.

FIRST_NAMES = {
    "Zhang": "Aston",
    "Lipton": "Zachary",
    "Li": "Mu",
    "Smola": "Alex",
    "Hu": "Rachel",
    "Werness": "Brent",
}


def names(out: Path) -> None:
    heading("2. Six names")
    D = qkv.Database(FIRST_NAMES)
    say("D holds " + ", ".join(f"{last} → {first}" for last, first in D.items()) + ".")

    say("\nAn exact look-up returns the row with this key, or raises KeyError.")
    show(f'{D["Li"] = }')
    try:
        D["Lee"]
    except KeyError as absent:
        say(f'  D["Lee"]\n    KeyError: {absent}')
    say("\nAn approximate match compares letters and meaning.")
    show(f'{D.ask("Lee", top=6) = }')

    asked = [*FIRST_NAMES, "Lee", "Hung", "Smith"]
    exact = D.ask(asked, score="exact", weighting="normalized")
    draw(pictures.names(exact, D.ask(asked), list(D)), out / "names.png")


# 3. Students and majors: only keys can be queried, so swap keys and values to find majors.

STUDENTS = {
    "John Doe": "psychology",
    "Ada Byron": "mathematics",
    "Mary Jackson": "aerospace engineering",
    "Wang Wei": "literature",
    "Amina Diallo": "psychology",
    "Sofia Rossi": "architecture",
    "Kofi Mensah": "economics",
    "Ines Silva": "marine biology",
}


def majors(out: Path) -> None:
    heading("3. Find people by major")
    students = qkv.Database(STUDENTS, key="name", value="major")
    show(f'{students["John Doe"] = }')
    say("\none_hot.png shows the weights of an exact look-up: one row has all the weight.")
    say('  students.plot("John Doe", score="exact", weighting="raw")')
    draw(students.plot("John Doe", score="exact", weighting="raw"), out / "one_hot.png")
    say("\nKey and value change places:")
    people = students.reindex(key="major", value="name")
    say('  people = students.by(key="major", value="name")')
    show(f'{people.get_all("psychology") = }')
    show(f'{people.ask("phychology", top=3) = }')
    show(f'{people.ask("animals of the sea", top=3) = }')


# 4. GPA → salary: numbers are pooled, and near rows have more weight.


def salaries() -> dict[float, float]:
    """Return fourteen invented engineers: grade point averages, and salaries in thousands."""
    rng = np.random.default_rng(420)
    gpa = np.sort(rng.uniform(2.4, 4.0, 14)).round(2)
    pay = 62 + 14 * (gpa - 2.4) ** 1.5 + rng.normal(0, 4, gpa.size)
    return dict(zip(gpa.tolist(), pay.round(1).tolist(), strict=True))


def salary(out: Path) -> None:
    heading("4. GPA → starting salary")
    D = qkv.Database(salaries(), key="gpa", value="salary")
    say(f"D holds {len(D)} invented engineers. What will a student with a GPA of 3.5 earn?")
    say("\nThe score −(q − k)²/2σ² with softmax is Nadaraya–Watson regression.")
    near = scores.Gaussian(0.15)
    say("  near = scores.Gaussian(0.15)")
    show(f"{D.ask(3.5, score=near) = }")

    say("\nA larger bandwidth gives weight to more rows.")
    for width in (0.02, 0.05, 0.15, 0.5, 5.0):
        answer = D.ask(3.5, score=scores.Gaussian(width))
        say(
            f"  σ = {width:<4}  {answer.value:5.1f} k ± {answer.spread:4.1f}"
            f"   from {answer.effective_rows:4.1f} rows in effect"
        )

    say("\nFour special cases of the weights:")
    window = scores.Epanechnikov(0.4)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("cone", "nonnegative", {"score": window, "weighting": "raw"}),
        ("convex", "and sum to 1", {"score": window, "weighting": "normalized"}),
        ("one-hot", "one is 1", {"score": near, "weighting": "hard"}),
        ("average", "all equal", {"weighting": "average"}),
    ]
    for name, what, how in cases:
        answer = D.ask(3.5, **how)
        say(
            f"  {name:8} {what:13} rows used: {np.count_nonzero(answer.weights):2}   "
            f"Σα = {answer.weights.sum():.2f}   {answer.value:6.1f} k"
        )
    say("  Only weights that sum to 1 give a salary: the cone gives a sum of them.")
    draw(pictures.salary(D, query=3.5, width=0.15), out / "salary.png")


# 5. Self-attention of a sentence: here keys, queries and values are arrays, not a table.

SENTENCE = "When he saw his owner , the dog was happy , so he wagged his tail"

FEATURES = ("animal", "person", "feeling", "motion", "sight", "body", "link")
IS = {  # what each word is, written by hand; a word that is not listed is a link
    "he": {"animal": 0.6, "link": 0.4},
    "saw": {"sight": 1.0},
    "his": {"animal": 0.2, "link": 0.8},
    "owner": {"person": 1.0},
    "dog": {"animal": 1.0},
    "happy": {"feeling": 1.0},
    "wagged": {"motion": 1.0, "feeling": 0.2},
    "tail": {"body": 1.0, "animal": 0.3},
}
LOOKS_FOR = {  # what a word that is one thing looks for in others, written by hand
    "animal": {"feeling": 9.0, "motion": 8.0, "sight": 6.0, "body": 4.0},
    "person": {"animal": 8.0, "sight": 9.0, "feeling": 4.0},
    "feeling": {"animal": 9.0, "person": 8.5, "motion": 7.0, "feeling": 6.0, "body": 5.0},
    "motion": {"body": 9.0, "animal": 8.0, "feeling": 4.0},
    "sight": {"person": 9.0, "animal": 8.0},
    "body": {"motion": 9.0, "animal": 6.0},
    "link": {"link": 3.0},
}


def table(rows: list[dict[str, float]]) -> np.ndarray:
    return np.array([[row.get(feature, 0.0) for feature in FEATURES] for row in rows])


def sentence(out: Path) -> None:
    words = [word for word in SENTENCE.split() if word != ","]
    x = table([IS.get(word, {"link": 1.0}) for word in words])
    w_query = table([LOOKS_FOR[feature] for feature in FEATURES])
    query, key, value = x @ w_query, x, x  # W_K and W_V are the identity

    heading("5. A sentence attends to itself")
    say(SENTENCE.replace(" ,", ","))
    say(f"Each word is a vector of {len(FEATURES)} features: {', '.join(FEATURES)}.")
    say("The features, and W_Q that says what each looks for, are written by hand; a model")
    say("would learn them. Q = X W_Q, K = V = X, and the answer is softmax(QKᵀ/√d) V.")
    pooled, alpha = qkv.attend(query, key, value, return_weights=True)

    happy = words.index("happy")
    say("\nq = happy")
    for word, weight in zip(words, alpha[happy], strict=True):
        say(f"  {weight:.3f} {format_bar(weight):24} {word}")
    say("\n  happy    " + "".join(f"{feature:>9}" for feature in FEATURES))
    say("  before   " + "".join(f"{number:9.2f}" for number in x[happy]))
    say("  after    " + "".join(f"{number:9.2f}" for number in pooled[happy]))
    say("  The word now says whose feeling it is, and how it shows.")
    draw(pictures.sentence(words, query, key), out / "sentence.png")


def grid(out: Path) -> None:
    draw(pictures.grid(), out / "scores.png")


STORIES: dict[str, Callable[[Path], None]] = {
    "books": books,
    "names": names,
    "majors": majors,
    "salary": salary,
    "sentence": sentence,
    "scores": grid,
}


# Printing, drawing and storing


def heading(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


def say(text: str) -> None:
    print(text)


def show(text: str) -> None:
    """Print a call and its result; Python writes both for f"{call = }"."""
    call, gave = text.split(" = ", 1)
    print(f"  {call}")
    for line in gave.splitlines():
        # Do not wrap the rows of an answer; only a paragraph is this long.
        lines = textwrap.wrap(line, 92) if len(line) > 120 else [line]
        print(textwrap.indent("\n".join(lines), "    "))


def draw(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.08, metadata={"Software": None})


def publish(draft: Path, out: Path) -> None:
    """Move everything from the draft folder to its place, and delete what was there before."""
    for made in sorted(draft.iterdir()):
        place = out / made.name
        if place.is_dir():
            os.replace(place, move_aside(place, draft))
        os.replace(made, place)
        print(f"  {place}")


def move_aside(store: Path, draft: Path) -> Path:
    """Return where to move an older store; a store that was changed since is kept."""
    try:
        with qkv.open(store, create=False) as old:
            changed = old.version > 1
    except qkv.QkvError:
        changed = True
    if not changed:
        return draft / "old.qkv"
    free = next(
        place
        for number in range(1, 1000)
        if not (place := store.with_name(f"{store.stem}-{number}.qkv")).exists()
    )
    print(f"  {free}: the older one, kept because it was changed")
    return free


def next_steps(store: Path) -> None:
    program = Path(sys.executable).with_name("qkv")
    command = "qkv" if shutil.which("qkv") else os.path.relpath(program)
    by_summary = "--key summary --value title"
    say("\nTry next:")
    say(f'  {command} ask {store} "the name of the rose"')
    say(f'  {command} ask {store} "a voyage to the moon" {by_summary}')
    say(f'  {command} ask {store} "revenge" {by_summary} --where "year < 1700"')
    say(f'  {command} get {store} "The Alchemist" --value year')
    say(f'  {command} rows {store} --where "genre=poetry"')
    say(f'  {command} plot {store} "a whale" {by_summary} -o {store.parent}/whale.png')
    say(f'  {command} add {store} "The Trial" "Franz Kafka"')
    say(f"  {command} versions {store}")
    say(f'  {command} weights "the dog was happy so he wagged his tail"')
    say(f"\nLook at it: open {store.parent}/page.html in a browser, or ask it live by")
    say(f"  {command} serve {store} --open")


def main() -> None:
    parser = argparse.ArgumentParser(description="Five examples of attention, with pictures.")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), metavar="DIR", help="where all goes (demo/)"
    )
    parser.add_argument("--only", choices=STORIES, help="tell one story")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    for package, extra in (("matplotlib", "plot"), ("wordllama", "text")):
        if find_spec(package) is None:
            sys.exit(f'demo needs {package}: pip install "qkv[{extra}]"')
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out, prefix=".draft-") as folder:
        draft = Path(folder)
        for name in [options.only] if options.only else STORIES:
            STORIES[name](draft)
        if any(draft.iterdir()):
            print("\nWritten:")
            publish(draft, options.out)
    if not options.only:
        next_steps(options.out / "books.qkv")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the draft would remain
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (qkv.QkvError, OSError) as error:
        sys.exit(f"demo: {error}")
