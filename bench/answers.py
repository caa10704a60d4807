"""How good are the answers for text keys? Five kinds of query among 2,500 short technical texts.

A text is the first sentence of a docstring of numpy, scipy, scikit-learn, pandas or networkx. The
queries are its three rarest words, the paragraph that follows it, half of its words, the text with
four typos, and the name of the function. Recall counts ties by chance. The calibration error is the
mean of |share right − mean weight| over ten bins of the largest weight. "letters and meaning" is
the default text encoder without words and without fitting. The last line has four typos in each of
many more texts.

    python -m bench.answers [--minilm] [--write]     # compares with bm25s if it is installed

How often is an answer right that says it is 90 % sure? `--confidence` asks a database built from
tables of several kinds and sizes. The coefficients of `Answer.confidence` are fitted on the tasks
of `bench.retrieval` and on names with typos; docstrings, Unicode names, names of functions and
manual pages are among them. Book titles with typos and parts of book summaries are held out. Two
kinds of table break the assumption that some row has the answer, and are reported apart: in "no
right row", the right row is removed before a query is asked.

    python -m bench.answers --confidence [--write]
"""

from __future__ import annotations

import ast
import csv
import glob
import gzip
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench._results import RESULTS, commit, machine
from bench._side_by_side import peer
from qkv.answer import CONFIDENCE_COEFFICIENTS, MAX_CONFIDENCE
from qkv.database import Database
from qkv.database.encoders import Characters, Encoder, Heads, Sentences, Text, Words
from qkv.database.encoders.characters import normalize_text
from qkv.database.encoders.text import make_typo
from qkv.frameworks.ragged import DenseAndSparse
from qkv.weightings import Softmax

TECHNICAL = ("scipy", "sklearn", "numpy", "networkx", "pandas")
MORE = ("torch", "sympy", "tensorflow", "keras", "jax", "transformers", "matplotlib")
TEXTS, ASKED, AT_ONCE = 2500, 400, 25
QUERIES_PER_TASK = 200
STANDARD = ("asyncio", "email", "http", "json", "logging", "multiprocessing", "unittest", "xml")
CLASSES = ("numpy", "scipy", "sklearn", "pandas", "networkx")
BOOKS = Path(__file__).resolve().parent.parent / "examples" / "data" / "books.csv"
MAN_PAGES, MAX_MAN_PAGES = "/usr/share/man/man1/*", 6000
FITTED = ("docstrings", "Unicode names", "function names", "manual pages")
HELD_OUT = ("book titles", "book summaries")
NAMES = ("names of people", "Unicode names", "function names", "book titles")
"""Tables of which users ask for one row by its name; a name may also be missing."""
CHANGELOGS = "/usr/share/doc/*/changelog.Debian.gz"


def docstrings(packages: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield names of functions and classes, and the paragraphs of their docstrings."""
    for package in packages:
        found = find_spec(package)
        folder = Path(found.submodule_search_locations[0]) if found else Path("nowhere")
        for path in sorted(folder.rglob("*.py")):
            if "test" in str(path.relative_to(folder)):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
                    yield node.name, [" ".join(part.split()) for part in paragraphs]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def texts() -> list[tuple[str, str, str]]:
    """Return 2,500 texts, each with the name and the following paragraph."""
    found = {}
    for name, (first, *others) in docstrings(TECHNICAL):
        after = " ".join(sentences(others[0])[:2]) if others else ""
        fits = 40 <= len(after) <= 300 and not re.search(r"---|::|>>>|\.\. ", after)
        if fits and 25 <= len(first) <= 160 and not name.startswith("_"):
            found.setdefault(first, (first, name, after))
    rows = list(found.values())
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:TEXTS]]


def slipped(text: str, rng: np.random.Generator) -> str:
    letters = list(text)
    for _ in range(4):
        make_typo(letters, rng)
    return "".join(letters)


def tasks(rows: list[tuple[str, str, str]], at: np.ndarray) -> dict[str, list[str]]:
    rng = np.random.default_rng(1)
    common = Counter(word for text, _, _ in rows for word in set(normalize_text(text).split()))

    def key_words(text: str) -> str:
        words = list(dict.fromkeys(normalize_text(text).split()))
        rare = sorted(words, key=lambda word: common[word])[:3]
        return " ".join(word for word in words if word in rare)

    def half(text: str) -> str:
        words = text.split()
        kept = rng.permutation(len(words))[: max(1, len(words) // 2)]
        return " ".join(words[i] for i in np.sort(kept))

    def name(identifier: str) -> str:
        return re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", identifier).replace("_", " ").strip().lower()

    some = [rows[i] for i in at]
    return {
        "key words": [key_words(text) for text, _, _ in some],
        "a paraphrase": [after for _, _, after in some],
        "half the words": [half(text) for text, _, _ in some],
        "four slips": [slipped(text, rng) for text, _, _ in some],
        "a name": [name(text) for _, text, _ in some],
    }


def recall(s: np.ndarray, right: np.ndarray, k: int) -> float:
    own = s[np.arange(len(s)), right][:, None]
    more, same = (s > own + 1e-9).sum(axis=1), (np.abs(s - own) <= 1e-9).sum(axis=1)
    return float(np.mean(np.clip((k - more) / same, 0, 1)))


def calibration(s: np.ndarray, right: np.ndarray) -> float:
    alpha = np.asarray(Softmax().weights(s, None, np.arange(s.shape[1])[None]))
    top, hit = alpha.max(axis=1), alpha.argmax(axis=1) == right
    bins = np.minimum((top * 10).astype(int), 9)
    off = [abs((hit[bins == b] - top[bins == b]).sum()) for b in range(10)]
    return float(sum(off) / len(top))


def scored(made: Encoder, keys: list[str]) -> Callable[[list[str]], np.ndarray]:
    key, sparse, score = made.encode(keys), made.encode_sparse(keys), made.default_score(len(keys))

    def scores(queries: list[str]) -> np.ndarray:
        found = []
        for start in range(0, len(queries), AT_ONCE):
            query, asked = made.encode_full_query(queries[start : start + AT_ONCE])
            whole = key if asked is None else np.asarray(DenseAndSparse(key, sparse, asked))
            found.append(np.asarray(score(query, whole), np.float64))
        return np.concatenate(found)

    return scores


def bm25(keys: list[str]) -> Callable[[list[str]], np.ndarray] | None:
    bm25s = peer("bm25s")
    if not bm25s:
        return None
    index = bm25s.BM25()
    index.index([normalize_text(key).split() for key in keys], show_progress=False)

    def scores(queries: list[str]) -> np.ndarray:
        known = [[w for w in normalize_text(q).split() if w in index.vocab_dict] for q in queries]
        nothing = np.zeros(len(keys))
        return np.array([index.get_scores(words) if words else nothing for words in known])

    return scores


class Asked(NamedTuple):
    """What one answer said, and whether it was right."""

    table: str
    task: str
    rows: int
    share: float
    next_share: float
    top_weight: float
    confidence: float
    is_right: bool


def ask_all(
    table: str, task: str, keys: list[str], values: list[str], queries: list[str], right: list[Any]
) -> list[Asked]:
    """Ask a database all queries with the default options."""
    database, answers = Database(keys, values), list[Any]()
    for start in range(0, len(queries), AT_ONCE):
        answers += database.ask(queries[start : start + AT_ONCE], top=1)
    results = [
        Asked(
            *(table, task, len(keys), *answer._value_shares, answer._top_weight),
            *(answer.confidence, answer.value == value),
        )
        for answer, value in zip(answers, right, strict=True)
    ]
    accuracy = np.mean([x.is_right for x in results])
    print(f"{table}: {task} in {len(keys):,}: {accuracy:.3f} are right", flush=True)
    return results


def ask_table(
    table: str, rows: list[tuple[str, str, str]], sizes: tuple[int, ...], names: tuple[str, ...]
) -> Iterator[Asked]:
    """Ask tables of several sizes: each query has one right row, except for "no right row".

    `names` are the tasks: those of `tasks`, or a number of typos.
    """
    for size in sizes:
        if size > len(rows):
            continue
        rng = np.random.default_rng(size)
        chosen = [rows[i] for i in rng.permutation(len(rows))[:size]]
        keys, at = [text for text, _, _ in chosen], rng.permutation(size)[:QUERIES_PER_TASK]
        numbers = [str(i) for i in range(size)]
        queries = {f"{n} typos": [make_typos(keys[i], n, rng) for i in at] for n in (0, 1, 2, 4)}
        queries = tasks(chosen, at) | queries
        for name in names:
            yield from ask_all(table, name, keys, numbers, queries[name], [str(i) for i in at])
        gone = {*at[: size // 3].tolist()}
        rest = [key for i, key in enumerate(keys) if i not in gone]
        for name in names if table in NAMES else names[-1:]:
            absent = [queries[name][j] for j, i in enumerate(at) if i in gone]
            title, nothing = f"no right row ({table})", [None] * len(absent)
            yield from ask_all(title, name, rest, numbers[: len(rest)], absent, nothing)


def make_typos(text: str, count: int, rng: np.random.Generator) -> str:
    letters = list(text)
    for _ in range(count):
        make_typo(letters, rng)
    return "".join(letters)


def man_pages(files: list[str] | None = None) -> list[tuple[str, str, str]]:
    """Return the line, the name and the first sentences of manual pages; [] if there are none."""
    rows = {}
    for file in sorted(glob.glob(MAN_PAGES))[:MAX_MAN_PAGES] if files is None else files:
        if Path(file).is_symlink():
            continue
        data = Path(file).read_bytes()
        source = (gzip.decompress(data) if file.endswith(".gz") else data).decode(errors="replace")
        section = r'^\.S[Hh] "?{}"?\s*\n(.*?)\n\.(S[Hh]|PP|P|TP|IP|LP|sp)\b'
        found = [
            re.search(section.format(name), source, re.S | re.M) for name in ("NAME", "DESCRIPTION")
        ]
        if not all(found):
            continue
        name_line, about = (
            re.sub(r"\\f.|\\&|\\", "", re.sub(r"^\.\S+\s*", "", each[1], flags=re.M))  # type: ignore[index]
            for each in found
        )
        name, _, line = " ".join(name_line.split()).partition(" - ")
        about = " ".join(sentences(" ".join(about.split()))[:2])[:300]
        if 15 <= len(line) <= 160 and len(about) >= 40:
            rows.setdefault(line, (line, name.split(",")[0].strip(), about))
    return list(rows.values())


def read_people() -> list[str]:
    """Return the names of people who signed changelogs of Debian."""
    found = set()
    for file in sorted(glob.glob(CHANGELOGS)):
        if not Path(file).is_symlink():
            text = gzip.decompress(Path(file).read_bytes()).decode(errors="replace")
            found |= set(re.findall(r"^ -- (\w[\w.'-]* (?:\w[\w.'-]* )?\w[\w.'-]*) <", text, re.M))
    no_people = re.compile("Debian|Team|Maint|Ubuntu|Group|Build")
    return sorted(name for name in found if not no_people.search(name))


def ask_everything() -> list[Asked]:
    """Ask all tables."""
    every = ("key words", "a paraphrase", "half the words", "four slips", "a name")
    typos = ("0 typos", "1 typos", "2 typos", "4 typos", "half the words")
    parts = (every[0], *every[3:1:-1])
    unicode = [unicodedata.name(chr(i), "").title() for i in range(0x20, 0x3000)]
    functions = sorted({name for name, _ in docstrings(STANDARD) if len(name) > 5})
    with BOOKS.open(encoding="utf-8") as file:
        books = list(csv.DictReader(file))
    shuffled = (*every[:2], *every[3:], every[2])
    results = [
        *ask_table("docstrings", texts(), (30, 300, 2500), shuffled),
        *ask_table(
            "Unicode names", as_rows([*filter(None, unicode)]), (20, 200, 2000, 8000), typos
        ),
        *ask_table("names of people", as_rows(read_people()), (30, 300, 3000), typos[:3]),
        *ask_table("function names", as_rows(functions), (50, 500, 1500), typos[:4]),
        *ask_table("book titles", as_rows([x["title"] for x in books]), (30, 300), typos),
        *ask_table("book summaries", as_rows([x["summary"] for x in books]), (60, 300), parts),
        *ask_table("manual pages", man_pages(), (30, 300, 1000, 2500), shuffled),
    ]
    firsts = [(p, {first for _, (first, *_) in docstrings((p,))}) for p in CLASSES]
    pairs = [(x, p) for p, all_texts in firsts for x in sorted(all_texts) if 25 <= len(x) <= 160]
    for size in (100, 1000, 2500):
        order = np.random.default_rng(size).permutation(len(pairs))
        keys, packages = zip(*(pairs[i] for i in order[:size]), strict=True)
        queries, right = zip(*(pairs[i] for i in order[size : size + 300]), strict=True)
        table = "the package of another docstring"
        results += ask_all(table, "class", [*keys], [*packages], [*queries], [*right])
    return results


def as_rows(names: list[str]) -> list[tuple[str, str, str]]:
    return [(name, name, name) for name in dict.fromkeys(names)]


def calibration_error(said: np.ndarray, is_right: np.ndarray) -> float:
    """Return the mean of |share right − mean confidence| over ten bins of the confidence."""
    bins = np.minimum((said * 10).astype(int), 9)
    return float(sum(abs((is_right - said)[bins == b].sum()) for b in range(10)) / len(said))


def fit_confidence(results: list[Asked]) -> np.ndarray:
    """Return the coefficients of a logistic regression; every task of a table counts the same."""
    share, next_share, top = (
        np.clip([getattr(x, name) for x in results], 1e-6, 1 - 1e-4)
        for name in ("share", "next_share", "top_weight")
    )
    margin = np.log(share / next_share) * np.minimum(top / share, 1)
    inputs = np.stack([np.ones_like(share), np.log(share / (1 - share)), margin], axis=1)
    counts = Counter((x.table, x.task, x.rows) for x in results)
    weight = np.array([1 / counts[x.table, x.task, x.rows] for x in results])
    is_right, coefficients = np.array([x.is_right for x in results]), np.zeros(3)
    for _ in range(50):  # Newton's method
        p = 1 / (1 + np.exp(-inputs @ coefficients))
        hessian = (inputs * (weight * p * (1 - p))[:, None]).T @ inputs + 1e-6 * np.eye(3)
        coefficients -= np.linalg.solve(hessian, inputs.T @ (weight * (p - is_right)))
    return coefficients


def measure_confidence() -> None:
    results = ask_everything()
    fitted = fit_confidence([x for x in results if x.table in FITTED])
    print(f"coefficients: {CONFIDENCE_COEFFICIENTS}, the fit gives {np.round(fitted, 3)}")
    tables = {
        name: [x for x in results if x.table == name]
        for name in dict.fromkeys(x.table for x in results)
    }
    tables["all that were held out"] = [x for x in results if x.table in HELD_OUT]
    tables["no right row"] = [x for x in results if x.table.startswith("no right row")]
    rows = []
    for name, part in tables.items():
        if not part:
            continue
        said, share, is_right = np.array([(x.confidence, x.share, x.is_right) for x in part]).T
        row: dict[str, Any] = {"work": f"confidence: {name}", "asked": len(part)}
        row |= {"right": is_right.mean(), "mean confidence": said.mean()}
        row |= {"calibration error": calibration_error(said, is_right)}
        row |= {"calibration error of the weight": calibration_error(share, is_right)}
        sure = said >= 0.9
        row |= {"sure": sure.mean(), "right if sure": is_right[sure].mean()}
        if (at_limit := said >= MAX_CONFIDENCE).any():
            row |= {"right at the limit": is_right[at_limit].mean()}
        rows.append(row)
        numbers = "".join(f"{x:>8.3f}" for x in [*row.values()][2:])
        print(f"{name:<34}{len(part):>6}{numbers}")
    print("asked, right, confidence, its error, that of the weight, sure, right if sure, at 0.99")
    if "--write" in sys.argv:
        source = {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
        written = {"machine": machine(), "rows": [row | source for row in rows]}
        (RESULTS / "confidence.json").write_text(json.dumps(written, indent=2) + "\n")


def main() -> None:
    if "--confidence" in sys.argv:
        measure_confidence()
        return
    rows = texts()
    keys = [text for text, _, _ in rows]
    at = np.random.default_rng(2).permutation(len(keys))[:ASKED]
    asked = tasks(rows, at)
    two = {"characters": Characters(), "words": Words()}
    kinds = {
        "BM25 (bm25s)": bm25(keys),
        "letters and meaning": scored(Text(two, half=30), keys),
        "Text": scored(Text().fit(keys), keys),
    }
    if "--minilm" in sys.argv:
        kinds["MiniLM"] = scored(Sentences(), keys)
        kinds["Text and MiniLM"] = scored(Heads([Text(), Sentences()]).fit(keys), keys)
    kept = []
    print(f"{len(keys):,} texts; recall at 1, at 10, calibration error")
    for name, scores in kinds.items():
        if scores is None:
            continue
        for task, queries in asked.items():
            s = scores(queries)
            found = {"1": recall(s, at, 1), "10": recall(s, at, 10)}
            row = {"work": f"{name}: {task}", "recall": found}
            if not name.startswith("BM25"):
                row["calibration error"] = calibration(s, at)
            numbers = [*found.values(), row.get("calibration error", np.nan)]
            print(f"{row['work']:<40}" + "".join(f"{x:>8.3f}" for x in numbers), flush=True)
            kept.append(row)
    every = (x for _, part in docstrings(TECHNICAL + MORE) for p in part for x in sentences(p))
    many = list(dict.fromkeys(x for x in every if 20 <= len(x) <= 60))
    right = np.random.default_rng(3).permutation(len(many))[:200]
    rng = np.random.default_rng(4)
    s = scored(Text().fit(many), many)([slipped(many[i], rng) for i in right])
    kept.append(
        {"work": f"Text: four slips in {len(many):,}", "recall": {"1": recall(s, right, 1)}}
    )
    print(f"{kept[-1]['work']:<40}{recall(s, right, 1):>8.3f}")
    if "--write" in sys.argv:
        source = {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
        written = {"machine": machine(), "rows": [row | source for row in kept]}
        (RESULTS / "answers.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
