"""How good are the answers for text keys? Five kinds of query among 2,500 short technical texts.

A text is the first sentence of a docstring of numpy, scipy, scikit-learn, pandas or networkx. The
queries are its three rarest words, the paragraph that follows it, half of its words, the text with
four typos, and the name of the function. Recall counts ties by chance. The calibration error is the
mean of |share right − mean weight| over ten bins of the largest weight. "letters and meaning" is
the default text encoder without words and without fitting. The last line has four typos in each of
many more texts.

    python -m bench.answers [--minilm] [--write]     # compares with bm25s if it is installed
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bench._results import RESULTS, commit, machine
from bench._side_by_side import peer
from qkv.database.encoders import Characters, Encoder, Heads, Sentences, Text, Words
from qkv.database.encoders.characters import normalize_text
from qkv.database.encoders.text import make_typo
from qkv.frameworks.ragged import DenseAndSparse
from qkv.weightings import Softmax

TECHNICAL = ("scipy", "sklearn", "numpy", "networkx", "pandas")
MORE = ("torch", "sympy", "tensorflow", "keras", "jax", "transformers", "matplotlib")
TEXTS, ASKED, AT_ONCE = 2500, 400, 25


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


def main() -> None:
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
