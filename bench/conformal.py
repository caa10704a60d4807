"""Do prediction sets have their coverage? Sets of rows, measured on held-out queries.

Books are queried with one to four typos, and the reverse dictionary (WordNet, with an encoder
trained as in examples/reverse_dictionary.py) by unseen definitions. Half of the queries calibrate,
the other half test. Queries from another field are first sentences of docstrings of numpy, scipy,
scikit-learn, pandas and networkx. A database of all English words cannot recognize another field;
this is measured too.

    python -m bench.conformal [--wordnet FOLDER] [--cache FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import qkv
from bench._results import show_goals, write
from bench.answers import make_typo, texts
from qkv.database.encoders import Words
from qkv.database.query.calibration import Calibration

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import reverse_dictionary  # noqa: E402

COVERAGES = (0.8, 0.9, 0.95)
FOREIGN, AT_ONCE, LOOKED = 200, 100, 20
WITHIN, SILENT = 0.02, 0.9
Pairs = Sequence[tuple[str, str]]


def main() -> None:
    options = parser().parse_args()
    foreign = [text for text, _, _ in texts()[:FOREIGN]]
    rows = list(measured("books, slips", *books(), foreign, {0.9}))
    if options.wordnet.is_dir():
        made = dictionary(options.wordnet, options.cache)
        rows += measured("reverse dictionary", *made, foreign, set())
    else:
        print(f"no {options.wordnet}: the reverse dictionary is not measured")
    show_goals(rows)
    if options.write:
        write("conformal", rows, replace=options.wordnet.is_dir())


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    found.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), metavar="FOLDER")
    found.add_argument("--cache", type=Path, default=ROOT / "build" / "reverse_dictionary")
    found.add_argument("--write", action="store_true")
    return found


def books() -> tuple[qkv.Database, Pairs, Pairs]:
    D = qkv.Database.from_source(ROOT / "examples/data/books.csv", key="title", value="author")
    rng = np.random.default_rng(0)
    pairs = []
    for title in list(D) * 16:
        letters = list(title)
        for _ in range(int(rng.integers(1, 5))):
            make_typo(letters, rng)
        pairs.append(("".join(letters), title))
    order = rng.permutation(len(pairs))
    halves = np.array_split(order, 2)
    return D, *([pairs[i] for i in half] for half in halves)


def dictionary(folder: Path, cache: Path) -> tuple[qkv.Database, Pairs, Pairs]:
    """Return the words by definition: train on four fifths, calibrate and test on the rest."""
    cache.mkdir(parents=True, exist_ok=True)
    synsets = reverse_dictionary.read(folder)
    order = np.random.default_rng(reverse_dictionary.SEED).permutation(len(synsets))
    tenth = len(synsets) // 10
    pairs = [(synsets[i].definition, synsets[i].key) for i in order]
    asked = reverse_dictionary.TESTED
    distinct = np.unique([synset.key for synset in synsets]).tolist()
    D = qkv.Database(distinct, np.arange(float(len(distinct))), encoder=Words())
    D.learn(
        pairs[2 * tenth :],
        held_out=pairs[tenth : 2 * tenth][:asked],
        vectors=True,
        epochs=6,
        budget_s=1200,
        seed=reverse_dictionary.SEED,
        resume=cache / "words-learned.safetensors",
    )
    return D, pairs[asked : 2 * asked], pairs[:asked]


def measured(
    name: str, D: qkv.Database, some: Pairs, others: Pairs, foreign: list[str], silent: set[float]
) -> Iterator[dict[str, Any]]:
    """Return a row for each coverage; databases in `silent` must abstain on foreign queries."""
    place = {key: i for i, key in enumerate(D)}
    for coverage in COVERAGES:
        calibration = D.calibrate(some, coverage)
        held, sizes, quiet = [], [], []
        for _, right, fits, alpha in asked(D, calibration, others, place):
            inside = fits & (alpha >= calibration.weight)
            held.append(inside[right])
            sizes.append(np.count_nonzero(inside))
            quiet.append(not inside.any())
        strange = [(text, next(iter(place))) for text in foreign]
        away = [
            not (fits and (alpha >= calibration.weight).any())
            for _, _, fits, alpha in asked(D, calibration, strange, place)
        ]
        found = {
            "coverage": float(np.mean(held)),
            "rows of a set, median": float(np.median(sizes)),
            "abstained": float(np.mean(quiet)),
            "abstained, foreign": float(np.mean(away)),
        }
        off = abs(found["coverage"] - coverage)
        goals = [{"goal": f"within {WITHIN} of {coverage}", "found": off, "met": off <= WITHIN}]
        if coverage in silent:
            rate = found["abstained, foreign"]
            goals.append(
                {"goal": f"≥ {SILENT} of foreign abstained", "found": rate, "met": rate >= SILENT}
            )
        asked_of = f"{len(some):,} pairs, {len(others):,} asked, {len(D):,} rows"
        yield {"work": f"{name}: {coverage:g} ({asked_of})", "found": found, "goals": goals}
        print(f"{name}: {coverage:g}", *(f"{k} {v:.4g}" for k, v in found.items()), sep="  ")


def asked(
    D: qkv.Database, calibration: Calibration, pairs: Pairs, place: dict[str, int]
) -> Iterator[tuple[qkv.Answer, int, bool, np.ndarray]]:
    """Yield each answer, the right row, whether any row fits, and all weights.

    A set of thousands of rows is built only for the first query, to check it against the weights.
    """
    for start in range(0, len(pairs), AT_ONCE):
        batch = pairs[start : start + AT_ONCE]
        answers = D.ask([query for query, _ in batch], top=1)
        for i, (answer, (_, key)) in enumerate(zip(answers, batch, strict=True)):
            alpha = answer.weights
            fits = bool(answer.lse + np.log(alpha.max()) >= calibration.best)
            if start + i < LOOKED:
                rows = np.flatnonzero(alpha >= calibration.weight) if fits else []
                assert {row.index for row in answer.prediction_set} == set(map(int, rows))
            yield answer, place[key], fits, alpha


if __name__ == "__main__":
    main()
