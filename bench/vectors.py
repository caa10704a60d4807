"""How often does a vector find its row? Five kinds of vectors as keys, 800 rows, three seeds.

A query is a key, or a key with noise of 30 % of the distance to its nearest neighbour. The columns
are: keys that rank first with at least half of the weight; keys with noise that rank first, for the
database and for exact k-NN; and the same keys ranked by q·k/√d.

    python -m bench.vectors [--write]        # --write also changes the table of docs/database.md
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench._results import RESULTS, commit, machine
from qkv import Database
from tests.database.vector_kinds import VECTOR_KINDS, nearest_rows, perturb_keys

ROWS, SEEDS = 800, 3
PAGE = Path(__file__).resolve().parents[1] / "docs" / "database.md"
MARKED = re.compile(r"(?<=<!-- measured: vectors -->\n).*?(?=<!-- /measured -->)", re.S)
HEAD = """| keys | score | finds its row with ½ of the weight | with noise | k-NN | q·k/√d |
|---|---|---|---|---|---|
"""


def weights(database: Database, queries: np.ndarray, score: str | None = None) -> np.ndarray:
    return np.array([answer.weights for answer in database.ask(queries, score=score)])


def measure(kind: str, seed: int) -> dict[str, float]:
    make, metric = VECTOR_KINDS[kind]
    rng, at = np.random.default_rng(seed), np.arange(ROWS)
    keys = make(rng, ROWS)
    queries = perturb_keys(keys, at, metric, rng)
    database = Database(keys, at)
    own, dot = weights(database, keys), weights(database, keys, "scaled_dot")
    noisy = weights(database, queries)
    is_first = own.argmax(axis=1) == at
    return {
        "own row": float(np.mean(is_first & (np.diagonal(own) >= 0.5))),
        "noise": float(np.mean(noisy.argmax(axis=1) == at)),
        "k-NN": float(np.mean(nearest_rows(keys, queries, metric) == at)),
        "scaled dot": float(
            np.mean((dot.argmax(axis=1) == at) & (np.diagonal(dot) >= 0.5)),
        ),
    }


def main() -> None:
    source = {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    rows, text = [], HEAD
    for kind, (_, metric) in VECTOR_KINDS.items():
        seeds = [measure(kind, seed) for seed in range(SEEDS)]
        shares = {name: min(seed[name] for seed in seeds) for name in seeds[0]}
        rows.append({"work": f"{kind}: {ROWS} rows", "worst of three seeds": shares, **source})
        cells = " | ".join(f"{share:.1%}".replace("%", " %") for share in shares.values())
        text += f"| {kind} | {metric} | {cells} |\n"
    print(text)
    if "--write" in sys.argv:
        written = {"machine": machine(), "rows": rows}
        (RESULTS / "vectors.json").write_text(json.dumps(written, indent=2) + "\n")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(MARKED.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    main()
