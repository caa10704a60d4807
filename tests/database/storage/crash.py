"""Kill a writer at random moments and look at what is left.

`python -m tests.database.storage.crash PATH SEED` writes to a store until it is killed. It prints
what it tries and what was acknowledged.

`python -m tests.database.storage.crash --rounds 200` is the battery.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from qkv.database.storage import Store, check_store, limits
from qkv.database.storage.integrity_check import Problem

ROOT = Path(__file__).parents[3]


def tighten() -> None:
    """Limits so low that every few rows make a segment and a bundle, and every few segments are
    joined."""
    limits.MAX_BUFFERED_ROWS = 12
    limits.MIN_BUNDLE_ROWS = 6
    limits.MAX_SEGMENT_BYTES = 8192
    limits.SEGMENTS_PER_MERGE = 8


class Model:
    """What a store should hold: a number for each row, and how its tensor is made from it."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.factor = 1
        self.last = -1
        self.version = 0

    def after(self, step: dict) -> Model:
        new = copy.deepcopy(self)
        if step["what"] == "compact":
            return new
        new.version += 1
        if step["what"] == "recode":
            new.factor = step["factor"]
        else:
            for row in step["remove"]:
                del new.rows[row]
            for _ in range(step["count"]):
                new.last += 1
                new.rows[new.last] = step["salt"]
        return new

    def matches(self, s: Store) -> bool:
        """Whether the newest version of the store is this, read in every way."""
        with s.open_snapshot() as snap:
            ids = snap.live_ids().tolist()
            if snap.version != self.version or ids != sorted(self.rows):
                return False
            salts = [self.rows[row] for row in ids]
            parts = [
                part.tensors["key"][slice(None) if part.live is None else part.live]
                for part in snap.iterate_segments()
            ]
            key = np.concatenate(parts) if parts else np.zeros((0, 2))
            return (
                snap.settings == ({"factor": self.factor} if self.version else {})
                and dict(snap.iterate_rows()) == dict(zip(ids, map(str, salts), strict=True))
                and snap.read_records(ids) == [str(salt) for salt in salts]
                and all(snap.find_ids(b"%d" % row) == [row] for row in ids)
                and np.array_equal(key, tensor(ids, salts, self.factor).reshape(-1, 2))
            )


def tensor(ids, salts, factor):
    return np.array([ids, salts], np.float64).T * factor


def plan(rng: random.Random, model: Model) -> dict:
    """A step that the model allows."""
    chance = rng.random()
    if chance < 0.06:
        return {"what": "compact"}
    if chance < 0.12 and model.version:
        return {"what": "recode", "factor": rng.randrange(1, 100)}
    count = rng.choice([0, 1, 1, 1, 2, 5, 13, 60]) if model.rows else 3
    most = len(model.rows) if chance < 0.15 or len(model.rows) > 400 else 3
    remove = rng.sample(sorted(model.rows), min(len(model.rows), rng.randrange(most + 1)))
    if not count and not remove:
        count = 1
    return {"what": "commit", "count": count, "remove": remove, "salt": rng.randrange(10**6)}


def perform(s: Store, step: dict, model: Model) -> None:
    if step["what"] == "compact":
        s.compact()
    elif step["what"] == "recode":
        ids = sorted(model.rows)
        blocks = [ids[start : start + 50] for start in range(0, len(ids), 50)]
        s.rewrite_tensors(
            (
                (block, {"key": tensor(block, [model.rows[row] for row in block], step["factor"])})
                for block in blocks
            ),
            settings={"factor": step["factor"]},
            arrays={"factor": np.array([step["factor"]])},
        )
    else:
        ids = range(model.last + 1, model.last + 1 + step["count"])
        salts = [step["salt"]] * step["count"]
        s.commit(
            records=[str(salt) for salt in salts],
            digests=[b"%d" % row for row in ids],
            tensors={"key": tensor(ids, salts, model.factor).reshape(-1, 2)},
            remove=step["remove"],
            settings={"factor": model.factor},
        )


def read(s: Store) -> Model:
    """The model of what is there, for a writer that goes on."""
    model = Model()
    with s.open_snapshot() as snap:
        model.rows = {row: int(record) for row, record in snap.iterate_rows()}
        model.version = snap.version
        model.factor = snap.settings.get("factor", 1)
    model.last = s._reader_catalog.newest_version().last
    return model


def work(path: Path, seed: int) -> None:
    """Write until killed."""
    tighten()
    rng = random.Random(seed)
    s = Store(path)
    model = read(s)
    while True:
        step = plan(rng, model)
        print(json.dumps(step), flush=True)
        perform(s, step, model)
        model = model.after(step)
        print("done", flush=True)


def kill_once(path: Path, model: Model, rng: random.Random) -> Model:
    """Let a writer work for a moment, kill it, and compare; gives the model of what is left."""
    command = [
        sys.executable,
        "-m",
        "tests.database.storage.crash",
        str(path),
        str(rng.randrange(10**9)),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(rng.random() ** 2 * 0.3)
        child.kill()
        lines += child.stdout.read().splitlines()
    assert child.returncode == -signal.SIGKILL, "the writer ended by itself"
    pending = None
    for line in lines:
        if line.strip() == "done":
            assert pending is not None
            model, pending = model.after(pending), None
        elif line.strip():
            try:
                pending = json.loads(line)
            except json.JSONDecodeError:
                pending = None  # killed while it spoke, before it did anything
    with Store(path) as s:
        possible = [model] + ([model.after(pending)] if pending else [])
        matching = [one for one in possible if one.matches(s)]
        assert matching, f"version {s.version} is neither before nor after {pending}"
    # What was left over is removed by a repair, or by the next writer.
    problems = [
        problem for problem in check_store(path, repair=rng.random() < 0.5) if not left(problem)
    ]
    assert problems == [], [str(problem) for problem in problems]
    return matching[-1]


def left(problem: Problem) -> bool:
    """Whether a problem is a file of a commit or a compaction that did not finish."""
    return problem.what.startswith(("left by", "a temporary file that was not finished"))


def battery(rounds: int, seed: int, say=lambda text: None) -> None:
    rng = random.Random(seed)
    done = 0
    while done < rounds:
        with tempfile.TemporaryDirectory() as folder:
            model = Model()
            for _ in range(min(25, rounds - done)):
                model = kill_once(Path(folder) / "s", model, rng)
                done += 1
                say(f"round {done}: version {model.version}, {len(model.rows)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.path:
        work(arguments.path, arguments.seed)
    else:
        battery(arguments.rounds, arguments.seed, lambda text: print(text, file=sys.stderr))
