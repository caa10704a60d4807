"""Does the default for text find the right row at least as often as the best single method?

Seventeen tasks with known answers, from data that is installed here: docstrings, manual pages,
Debian packages and their changelogs, WordNet, perlfaq, names of devices, and identifiers. A task
has up to 2,000 keys and asks up to 1,000 queries, each with one right key, for three seeds. The
methods are BM25 (bm25s), letters alone, words alone, and the default encoder `Text`. With
`--minilm`, all of them and MiniLM alone are compared on the first 300 queries. A task whose data is
not installed is left out.

The coefficients of `Text` are fitted to these tasks with seed 0, to names with up to four typos and
to vague queries; letters have the square root of their idf. The weights of tokens and the weight of
meaning are chosen with the seeds 0 and 11. If each family of tasks is left out of the fit in turn,
the default is above the best single method by .01 less at 1 and by .005 less at 10 in the mean. It
loses most for questions of the FAQ, and for years of a life.

The confidence is measured by default, and corrected by `calibrate` with the first 100 or 300
queries of a seed, on the later queries.

    apt-get install perl-doc wordnet-base      # or --root FOLDER, where they are unpacked
    pip install bm25s "qkv[text,sentences]"
    python -m bench.retrieval [--minilm] [--root FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench._results import RESULTS, commit, machine
from bench.answers import (
    MORE,
    TECHNICAL,
    bm25,
    calibration_error,
    docstrings,
    make_typos,
    man_pages,
    recall,
    scored,
    sentences,
)
from qkv.answer import MAX_CONFIDENCE
from qkv.database import Database
from qkv.database.encoders import Characters, Heads, Sentences, Text, Words
from qkv.database.query.confidence import fit_logit

MAX_KEYS, QUERIES, MINILM_QUERIES, SEEDS = 2000, 1000, 300, (1, 2, 3)
SINGLE_METHODS = ("BM25", "letters", "words", "MiniLM")
ROOT = Path("/")
CALIBRATION_PAIRS = (100, 300)
"""So many of the queries of a seed calibrate; the error after it is that of the later queries."""
MAX_TEXT = 400
"""The number of characters of a key or a query, at most."""

Pair = tuple[str, str]
MakeQuery = Callable[[str, np.random.Generator], str]


class Task(NamedTuple):
    """Keys with a query each; `make_query`, if there is one, makes the query from it."""

    pairs: list[Pair]
    make_query: MakeQuery | None = None


def shorten(text: str) -> str:
    """Return the first sentences of a text, at most MAX_TEXT characters."""
    return " ".join(text.split())[:MAX_TEXT]


@cache
def read_docstrings() -> list[tuple[str, str, str]]:
    """Return first sentences of docstrings, names, and the paragraphs that follow."""
    rows = {}
    for name, (first, *others) in docstrings(TECHNICAL):
        after = " ".join(sentences(others[0])[:2]) if others else ""
        is_prose = 40 <= len(after) <= 300 and not re.search(r"---|::|>>>|\.\. ", after)
        if is_prose and 25 <= len(first) <= 160 and not name.startswith("_"):
            rows.setdefault(first, (first, name, after))
    return list(rows.values())


@cache
def read_identifiers() -> list[Pair]:
    """Return names of functions and classes, each with the first sentence of its docstring."""
    return [
        (name, sentences(first)[0])
        for name, (first, *_) in docstrings((*TECHNICAL, *MORE[:2], "matplotlib"))
        if len(split_identifier(name).split()) > 1 and 20 <= len(first) <= 160 and name[0] != "_"
    ]


def split_identifier(name: str) -> str:
    """Return the words of an identifier.

    >>> split_identifier("read_csvFile")
    'read csv file'
    """
    return re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).replace("_", " ").strip().lower()


@cache
def read_manual_pages() -> list[tuple[str, str, str]]:
    """Return the line, the name and the first sentences of manual pages, but gcloud's."""
    files = [file for n in (1, 5, 8) for file in sorted(glob.glob(f"/usr/share/man/man{n}/*"))]
    return man_pages([file for file in files if "/gcloud" not in file])


@cache
def read_packages() -> list[tuple[str, str, str]]:
    """Return the name, the synopsis and the description of installed Debian packages."""
    path, rows = Path("/var/lib/dpkg/status"), {}
    if not path.is_file():
        return []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        name = re.search(r"^Package: (.*)$", block, re.M)
        about = re.search(r"^Description: (.*)\n((?: .*\n?)*)", block, re.M)
        if name and about:
            paragraph = re.split(r"\n \.\n", about[2])[0]
            rows.setdefault(about[1], (name[1], about[1], shorten(paragraph)))
    return [row for row in rows.values() if len(row[2]) > 40]


@cache
def read_changelogs() -> list[tuple[str, str, str, str]]:
    """Return package, version, date and first change of the entries of Debian's changelogs."""
    found = []
    entry = re.compile(
        r"^(\S+) \((\S+)\) .*\n\s*\n((?:  .*\n|\s*\n)*?) -- .*>  \w+, (\d+ \w+ \d+) ", re.M
    )
    for file in sorted(glob.glob("/usr/share/doc/*/changelog.Debian.gz")):
        if Path(file).is_symlink():
            continue
        text = gzip.decompress(Path(file).read_bytes()).decode(errors="replace")
        for package, version, changes, date in entry.findall(text)[:12]:
            items = [x for x in re.split(r"^\s*[*+-]\s", changes, flags=re.M) if len(x) > 20]
            if items:
                change = re.sub(r"\[.*?\]", "", " ".join(items[0].split()))[:160]
                found.append((package, version, date, change))
    return sorted(set(found))


@cache
def read_synsets(root: Path) -> list[tuple[str, str, list[str]]]:
    """Return lemmas, definition and example sentences of the nouns and verbs of WordNet."""
    found = []
    for part in ("noun", "verb", "adj"):
        path = root / f"usr/share/wordnet/data.{part}"
        if not path.is_file():
            return []
        for line in path.read_text("latin-1").splitlines():
            if line.startswith("  "):
                continue  # the licence
            data, _, gloss = line.partition(" | ")
            fields = data.split(" ")
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            lemmas = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words]
            about = re.sub(r"\s*;\s*(?=;|$)", "", re.sub(r'"[^"]*"?', "", gloss)).strip(" ;")
            found.append((", ".join(lemmas), about, re.findall(r'"([^"]{15,})"', gloss)))
    return found


@cache
def read_questions(root: Path) -> list[Pair]:
    """Return the answers and questions of perlfaq."""
    found = []
    for path in sorted(root.glob("usr/share/perl/*/pod/perlfaq[1-9].pod")):
        for part in re.split(r"^=head2 ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            question, _, answer = part.partition("\n")
            answer = re.sub(r"^(=|X<).*$|^ .*$", "", answer, flags=re.M)
            answer = re.sub(r"[A-Z]<<?\s*(.*?)\s*>?>", r"\1", answer)
            answer = re.sub(r"^\s*\(contributed by .*?\)\s*", "", answer.strip(), flags=re.S)
            if len(answer) > 60:
                found.append((shorten(answer), re.sub(r"[A-Z]<(.*?)>", r"\1", question)))
    return found


@cache
def read_products() -> list[str]:
    """Return names of USB and PCI devices, each after that of the vendor."""
    found = []
    for kind in ("usb", "pci"):
        for path in Path("/usr/lib/udev/hwdb.d").glob(f"20-{kind}-vendor-model.hwdb"):
            vendor = ""
            for line in path.read_text(encoding="utf-8").splitlines():
                name = line.partition("=")[2].strip()
                if "ID_VENDOR_FROM" in line:
                    vendor = name
                elif "ID_MODEL_FROM" in line and len(name) > 12:
                    found.append(f"{vendor} {name}")
    return found


def drop_words(text: str, rng: np.random.Generator) -> str:
    """Return half of the words, in another order."""
    words = text.split()
    return " ".join(words[i] for i in rng.permutation(len(words))[: max(2, len(words) // 2)])


def keep_half(text: str, rng: np.random.Generator) -> str:
    words = text.split()
    chosen = np.sort(rng.permutation(len(words))[: max(1, len(words) // 2)])
    return " ".join(words[i] for i in chosen)


def ask_for_change(text: str, rng: np.random.Generator) -> str:
    """Return a question about an entry of a changelog: two of name, version, date and words."""
    package, version, date, change = text.split("\t")
    some = " ".join(sorted(change.split(), key=len)[-2:])
    forms = (
        f"{package} {version}",
        f"{package}, {date}",
        f"{date}: {some}",
        f"changes of {package} in {date.split(' ', 1)[1]}, {some}",
    )
    return forms[int(rng.integers(len(forms)))]


def ask_for_person(text: str, rng: np.random.Generator) -> str:
    """Return a year of a life and two words of its description."""
    born, died = re.findall(r"\d{4}", text)[-2:]
    words = [word for word in re.findall(r"[a-z]{4,}", text) if word not in ("born", "with")]
    kept = rng.permutation(len(words))[:2]
    year = f"born {born}" if rng.random() < 0.5 else f"died in {died}"
    return " ".join([*(words[i] for i in kept), year])


def build_tasks(root: Path = ROOT) -> dict[str, Task]:
    """Return all tasks by name."""
    texts, synsets = read_docstrings(), read_synsets(root)
    firsts = [(first, first) for first, _, _ in texts]
    names = read_identifiers()
    products = [(name, name) for name in read_products()]
    people = [x for _, x, _ in synsets if re.search(r"\(\d{4}-\d{4}\)$", x)]
    return {
        "docstring: next paragraph": Task([(first, after) for first, _, after in texts]),
        "docstring: function name": Task(
            [(first, split_identifier(name)) for first, name, _ in texts]
        ),
        "docstring: half of the words": Task(firsts, keep_half),
        "docstring: four typos": Task(firsts, lambda text, rng: make_typos(text, 4, rng)),
        "manual page: description": Task([(line, about) for line, _, about in read_manual_pages()]),
        "manual page: name": Task([(line, name) for line, name, _ in read_manual_pages()]),
        "package: synopsis": Task([(about, line) for _, line, about in read_packages()]),
        "package: description": Task([(f"{n}: {s}", about) for n, s, about in read_packages()]),
        "dictionary: word of a definition": Task([(word, about) for word, about, _ in synsets]),
        "dictionary: definition of a word": Task([(about, word) for word, about, _ in synsets]),
        "FAQ: question": Task(read_questions(root)),
        "product: two typos": Task(products, lambda text, rng: make_typos(text, 2, rng)),
        "product: half of the words": Task(products, drop_words),
        "code: sentence to identifier": Task(names),
        "code: identifier with a typo": Task(
            [(name, split_identifier(name)) for name, _ in names],
            lambda text, rng: make_typos(text, 1, rng),
        ),
        "numbers: changelog": Task(
            [
                (
                    f"{date} {package} {version}: {change}",
                    "\t".join((package, version, date, change)),
                )
                for package, version, date, change in read_changelogs()
            ],
            ask_for_change,
        ),
        "numbers: years of a life": Task([(x, x) for x in people], ask_for_person),
    }


def draw(task: Task, seed: int) -> tuple[list[str], list[str], np.ndarray]:
    """Return keys, queries, and the index of the right key of each query."""
    rng = np.random.default_rng(seed)
    pairs = list(dict(task.pairs).items())
    pairs = [pairs[i] for i in rng.permutation(len(pairs))[:MAX_KEYS]]
    right = rng.permutation(len(pairs))[:QUERIES]
    asked = [pairs[i][1] for i in right]
    if task.make_query is not None:
        asked = [task.make_query(text, rng) for text in asked]
    return [key for key, _ in pairs], asked, right


def score_methods(keys: list[str], asked: list[str]) -> dict[str, np.ndarray]:
    """Return the scores of each single method and of the default encoder, each (n, m)."""
    index = bm25(keys)
    scores = {} if index is None else {"BM25": index(asked)}
    scores |= {"letters": scored(Characters(), keys)(asked), "words": scored(Words(), keys)(asked)}
    return scores | {"default": scored(Text().fit(keys), keys)(asked)}


def measure_task(name: str, task: Task, seeds: Sequence[int], minilm: bool) -> dict[str, Any]:
    """Return the mean recalls of each method over the seeds, and the error of the confidence."""
    recalls: dict[str, list[tuple[float, float]]] = {}
    first: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        keys, asked, right = draw(task, seed)
        scores = score_methods(keys, asked)
        for method, s in scores.items():
            recalls.setdefault(method, []).append((recall(s, right, 1), recall(s, right, 10)))
        if minilm:
            some = slice(MINILM_QUERIES)
            scores["MiniLM"] = scored(Sentences(), keys)(asked[some])
            both = Heads([Text(), Sentences()]).fit(keys)
            scores["default and MiniLM"] = scored(both, keys)(asked[some])
            for method, s in scores.items():
                found = [recall(s[some], right[some], k) for k in (1, 10)]
                first.setdefault(method, []).append((found[0], found[1]))
    row: dict[str, Any] = {"work": name, "keys": len(keys), "queries": len(asked) * len(seeds)}
    row |= compare_recalls("", recalls, SINGLE_METHODS[:3])
    if minilm:
        row |= compare_recalls(" with MiniLM", first, SINGLE_METHODS)
    return row | measure_confidence(task, seeds)


def compare_recalls(
    suffix: str, recalls: dict[str, list[tuple[float, float]]], methods: Sequence[str]
) -> dict[str, Any]:
    """Return the mean recall of each method, and by how much the default is above the best."""
    means = {
        method: dict(zip(("1", "10"), np.mean(pairs, axis=0).tolist(), strict=True))
        for method, pairs in recalls.items()
    }
    above = {
        k: means["default"][k] - max(means[m][k] for m in methods if m in means)
        for k in ("1", "10")
    }
    return {f"recall{suffix}": means, f"above best{suffix}": above}


def measure_confidence(task: Task, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the error of the confidence by default, and after `calibrate` with so many pairs.

    Even a perfect confidence has the smallest error, because the queries are few. The debiased
    error is not larger because of that, if no query is asked twice.
    """
    said: dict[int, list[np.ndarray]] = {}
    texts: dict[int, list[str]] = {}
    is_right: dict[int, list[np.ndarray]] = {}
    for seed in seeds:
        keys, asked, right = draw(task, seed)
        database = Database(dict(zip(keys, map(str, range(len(keys))), strict=True)))
        answers = database.ask(asked, top=1)
        was_right = np.array([a.value == str(i) for a, i in zip(answers, right, strict=True)])
        logit = np.array([answer._confidence_logit for answer in answers])
        confidence = np.array([answer.confidence for answer in answers])
        factor = confidence / np.minimum(1 / (1 + np.exp(-logit)), MAX_CONFIDENCE)
        for count in (0, *CALIBRATION_PAIRS):
            if count > len(asked) / 2:
                continue
            # What `calibrate` does with the first pairs, without asking the later queries again.
            bias, slope = fit_logit(logit[:count], was_right[:count])
            p = np.minimum(1 / (1 + np.exp(-bias - slope * logit)), MAX_CONFIDENCE) * factor
            said.setdefault(count, []).append(p[count:])
            texts.setdefault(count, []).extend(asked[count:])
            is_right.setdefault(count, []).append(was_right[count:])
    row: dict[str, Any] = {}
    for count in said:
        p, y = np.concatenate(said[count]), np.concatenate(is_right[count])
        # A query that several seeds ask is right for all of them, or for none.
        distinct, number = np.unique(texts[count], return_inverse=True)
        drawn = [np.random.default_rng(i).random(len(distinct))[number] < p for i in range(50)]
        when = f" after {count} pairs" if count else ""
        row[f"confidence error{when}"] = calibration_error(p, y)
        row[f"smallest error{when}"] = float(np.mean([calibration_error(p, x) for x in drawn]))
        row[f"debiased error{when}"] = debiased_error(p, y)
        row[f"mean confidence{when}"] = float(p.mean())
        row[f"right{when}"] = float(y.mean())
    return row


def debiased_error(said: np.ndarray, is_right: np.ndarray) -> float:
    """Return the root of the mean square of (share right − mean confidence) over ten bins.

    The variance that the share has because the queries of a bin are few is subtracted from the
    square (Kumar, Liang and Ma 2019). So it estimates the error of infinitely many queries.

    >>> debiased_error(np.full(100, 0.5), np.arange(100) % 2 == 0)
    0.0
    >>> round(debiased_error(np.full(100, 0.9), np.arange(100) % 2 == 0), 2)
    0.4
    """
    bins, total = np.minimum((said * 10).astype(int), 9), 0.0
    for b in range(10):
        count = int((bins == b).sum())
        if count > 1:
            share = is_right[bins == b].mean()
            square = (share - said[bins == b].mean()) ** 2 - share * (1 - share) / (count - 1)
            total += count / len(said) * square
    return float(np.sqrt(max(total, 0.0)))


def show_row(row: dict[str, Any]) -> None:
    numbers = [f"{x['1']:.3f}/{x['10']:.3f}" for x in row["recall"].values()]
    above = row["above best"]
    errors = [f"{x:.3f}" for name, x in row.items() if name.startswith("confidence error")]
    print(
        f"{row['work']:<34}" + "  ".join(numbers),
        f"  {above['1']:+.3f}/{above['10']:+.3f}  " + " ".join(errors),
        flush=True,
    )


def write_rows(rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Write the rows. Rows of other tasks with these names that the file has are kept."""
    path = RESULTS / "retrieval.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    source = {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    by_name = {row["work"]: row for row in old} | {row["work"]: row | source for row in rows}
    kept = [by_name[name] for name in names if name in by_name]
    path.write_text(json.dumps({"machine": machine(), "rows": kept}, indent=2) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    options.add_argument("--minilm", action="store_true", help="MiniLM too: minutes of encoding")
    options.add_argument("--root", type=Path, default=ROOT, help="where the packages are unpacked")
    options.add_argument("--write", action="store_true")
    options.add_argument("--only", default="", help="tasks whose name contains this text")
    chosen = options.parse_args()
    rows = []
    print("recall at 1/at 10 of " + ", ".join((*SINGLE_METHODS[:3], "default")), end="; ")
    print("default above the best; error of the confidence, and after calibrate")
    tasks = build_tasks(chosen.root)
    for name, task in tasks.items():
        if chosen.only in name and task.pairs:
            rows.append(measure_task(name, task, SEEDS, chosen.minilm))
            show_row(rows[-1])
            if chosen.write:
                write_rows(rows, list(tasks))
    for name in [name for name in rows[0] if name.startswith("above")]:
        above = np.array([[row[name][k] for k in ("1", "10")] for row in rows])
        print(f"{name}: mean {above.mean(0).round(4)}, least {above.min(0).round(4)}")
    names = [name for name in rows[0] if "error" in name]
    for name in names:
        print(f"mean {name}: {np.mean([row[name] for row in rows if name in row]):.4f}")


if __name__ == "__main__":
    main()
