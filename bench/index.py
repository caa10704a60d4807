"""How fast are approximate answers, and which engine finds the nearest rows of a segment?

With --database, a database of such vectors is asked approximately, certified and exactly, beside
FAISS with about as many lists. Times are those of the CPU.

Otherwise each engine builds an index of clustered unit vectors, on one core. The table has the time
of ten neighbours of one query, their recall, the time of 1,000 neighbours, the time to build, and
the size of the index as a share of the vectors. Queries are drawn like the rows. Codes are
re-ranked exactly.

With --memory, each side builds such an index in its own process, and the row has the memory that
it took beside the vectors. The clustering has few rounds, which does not change the memory.

With --conditions, a store of these vectors is built in this folder, unless it is there, and is
asked under conditions.

With --store, a store of 8-bit vectors is built in this folder, unless it is there, and is asked
from disk. The row has the memory of the process too.

    python -m bench.index [--database | --memory | --conditions PATH | --store PATH]
        [--rows N] [--width D] [--graphs] [--write]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import qkv
from bench._results import show, write
from bench._side_by_side import peer
from qkv import scores
from qkv.weightings import TopK

QUERIES, BEST, MANY = 200, 10, 1000
RERANKED = 30
CLOSENESS, TEMPERATURE = 1.5, 1 / 30
PROBES, EXPANSIONS = (8, 32, 128), (32, 64, 128)
PROBES_OF_PEER = 2, 4, 8
ROWS_PER_ADD, EXACT_QUERIES, ROUNDS = 500_000, 10, 3
CLUSTERING_ROUNDS = 2
Search = Callable[[np.ndarray, int], np.ndarray]


def main() -> None:
    options = build_parser().parse_args()
    if options.memory:
        rows = [measure_memory(options.rows, options.width)]
    elif options.conditions:
        rows = [measure_store_conditions(options.conditions, options.rows, options.width)]
    elif options.store:
        rows = [measure_store(options.store, options.rows, options.width)]
    elif options.database:
        keys, queries = make_clusters(options.rows, options.width, CLOSENESS)
        rows = list(measure_database(keys, queries))
    else:
        keys, queries = make_clusters(options.rows, options.width)
        rows = list(measure_engines(keys, queries, options.graphs))
    for row in rows:
        show(row)
    if options.write:
        write("index", rows, replace=False)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--database", action="store_true", help="ask a database")
    parser.add_argument("--store", help="ask a store of 8-bit vectors in this folder")
    parser.add_argument("--memory", action="store_true", help="the memory to build an index")
    parser.add_argument("--conditions", help="ask a store in this folder under conditions")
    parser.add_argument("--graphs", action="store_true", help="HNSW too; it builds for minutes")
    parser.add_argument("--write", action="store_true")
    return parser


def measure_memory(rows: int, width: int) -> Any:
    """Return a row for the memory that building an index takes beside the vectors."""
    sides = {}
    for name, build in (("qkv", build_with_qkv), ("FAISS", build_with_faiss)):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            sides[name] = pool.submit(build, rows, width).result()
    work = f"memory to build the index of {rows:,} × {width}"
    return {"work": work, "sides": sides, "goals": []}


class MemoryWatch:
    """The memory that a process needs beyond that at the start, sampled by a thread."""

    def __init__(self) -> None:
        self._start, self.most, self._is_done = sum(read_memory()), 0.0, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._is_done.wait(0.02):
            self.most = max(self.most, sum(read_memory()) - self._start)

    def stop(self) -> float:
        """Return the most memory in MB, and stop the thread."""
        self._is_done.set()
        return self.most


def build_with_qkv(rows: int, width: int) -> dict[str, float]:
    from qkv.database.index import build, segment_index

    peer("faiss")
    keys, score = make_clusters(rows, width, CLOSENESS)[0], scores.Cosine(TEMPERATURE)
    database = qkv.Database(keys, np.arange(float(rows)))
    segment_index.CLUSTERING_ROUNDS = CLUSTERING_ROUNDS
    watch, metric = MemoryWatch(), build.choose_metric(database._view, score)
    build.build_segments(database._store, database._view, metric, None)
    sides = {"building, MB": watch.stop()}
    watch = MemoryWatch()
    database.index(score=score)
    return sides | {"measurement, MB": watch.stop()}


def build_with_faiss(rows: int, width: int) -> dict[str, float]:
    faiss: Any = peer("faiss")
    keys = make_clusters(rows, width, CLOSENESS)[0]
    watch, engine = MemoryWatch(), make_engine(faiss, rows, width)
    engine.cp.niter = CLUSTERING_ROUNDS
    engine.train(keys)
    engine.add(keys)
    return {"building, MB": watch.stop()}


def make_engine(faiss: Any, rows: int, width: int) -> Any:
    """Return an empty index of FAISS that is like ours."""
    engine = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(width),
        width,
        int(2 * rows**0.5),
        faiss.ScalarQuantizer.QT_8bit,
        faiss.METRIC_INNER_PRODUCT,
    )
    engine.cp.max_points_per_centroid = 64
    return engine


def measure_store_conditions(path: str, rows: int, width: int) -> Any:
    """Return the row of `measure_conditions` for a store."""
    keys, queries = make_clusters(rows, width, CLOSENESS)
    score, exists = scores.Cosine(TEMPERATURE), Path(path).exists()
    database = qkv.open(path)
    if not exists:
        database.add(keys, np.arange(float(rows)))
    del keys
    print(database.index(score=score))
    shared = {"score": score, "weighting": TopK(BEST), "top": BEST}
    return measure_conditions(database, queries, shared)


def measure_store(path: str, rows: int, width: int) -> Any:
    """Return a row for the best rows of a store, which is built if it does not exist."""
    rng, score = np.random.default_rng(0), scores.Cosine(TEMPERATURE)
    centres = rng.normal(size=(rows // 1000, width)).astype(np.float32)

    def draw_vectors(seed: int, count: int) -> np.ndarray:
        """Draw from the same clusters, but with another seed for each block of rows."""
        rng = np.random.default_rng(seed)
        x = CLOSENESS * centres[rng.integers(0, len(centres), count)]
        x += rng.standard_normal(size=x.shape, dtype=np.float32)
        return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))

    database, exists = qkv.open(path, precision="int8"), Path(path).exists()
    for start in () if exists else range(0, rows, ROWS_PER_ADD):
        count = min(ROWS_PER_ADD, rows - start)
        keys = draw_vectors(1 + start // ROWS_PER_ADD, count)
        database.add(keys, np.arange(start, start + count, dtype=float))
    if not exists:
        print(database.index(score=score))
    queries = draw_vectors(99, 400)
    shared: Any = {"score": score, "weighting": TopK(BEST), "top": BEST}
    ask = partial(ask_one, database, shared | {"approximate": True})
    ms, hits = time_queries(queries, ask), []
    anonymous, mapped = read_memory()
    for query in queries[:EXACT_QUERIES]:
        wanted = {row.index for row in database.ask(query, **shared).rows}
        found = {row.index for row in ask(query[None]).rows}
        hits.append(len(wanted & found) / len(wanted))
    started = time.process_time()
    database.ask(queries[:256], **shared, approximate=True)
    batch = 1e3 * (time.process_time() - started)
    side = {
        "ms": ms,
        "ms of 256 at once": batch,
        "recall@10": float(np.mean(hits)),
        "rows read": float(ask(queries[:1]).rows_read),
        "resident, MB": anonymous,
        "mapped files in memory, MB": mapped,
    }
    work = f"ten best rows of a store, {rows:,} × {width} int8, CPU"
    return {"work": work, "sides": {"qkv": side}, "goals": []}


def read_memory() -> tuple[float, float]:
    """Return the memory of this process and of its mapped files in MB. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    anonymous, mapped = (int(sizes[name].split()[0]) for name in ("RssAnon", "RssFile"))
    return anonymous / 1024, mapped / 1024


def make_clusters(rows: int, width: int, closeness: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors around one centre per 1,000 rows, and queries drawn like them."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(max(rows // 1000, 10), width))
    labels = rng.integers(0, len(centres), rows + QUERIES)
    x = (closeness * centres[labels] + rng.normal(size=(len(labels), width))).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:rows], x[rows:]


def measure_database(keys: np.ndarray, queries: np.ndarray) -> Iterator[Any]:
    """Yield a row for the best rows, one for soft answers, and one for the time to build."""
    rows, width = keys.shape
    database = qkv.Database(keys, np.arange(float(rows)))
    score = scores.Cosine(TEMPERATURE)
    started = time.process_time()
    report = database.index(score=score)
    seconds = time.process_time() - started
    print(report)
    started = time.process_time()
    database.index(score=score)  # nothing is missing: this only measures
    measurement = time.process_time() - started
    faiss: Any = peer("faiss")
    started = time.process_time()
    lists, engine = int(2 * rows**0.5), make_engine(faiss, rows, width)
    engine.train(keys)
    engine.add(keys)
    its_seconds = time.process_time() - started
    yield {
        "work": f"build the index of {rows:,} × {width}, CPU",
        "sides": {
            "qkv": {
                "ms": 1e3 * (seconds - measurement),
                "size, MB": measure_index_bytes(database) / 1e6,
            },
            "qkv, the measurement": {"ms": 1e3 * measurement},
            "FAISS": {
                "ms": 1e3 * its_seconds,
                "size, MB": faiss.serialize_index(engine).nbytes / 1e6,
            },
        },
        "goals": [],
    }
    best = TopK(BEST)
    for name, weighting, options in (
        ("ten best rows", best, {"approximate": True}),
        ("soft answer", "softmax", {"approximate": True}),
    ):
        shared: Any = {"score": score, "weighting": weighting, "top": BEST}
        errors, found, read = [], [], []
        for query in queries[:50]:
            mine = database.ask(query, **shared, **options)
            exact = database.ask(query, **shared)
            errors.append(np.abs(mine.weights - exact.weights).sum() / 2)
            wanted = {row.index for row in exact.rows}
            found.append(len(wanted & {row.index for row in mine.rows}) / len(wanted))
            read.append(mine.rows_read)
        sides: dict[str, Any] = {
            "qkv": {
                "ms": time_queries(queries, partial(ask_one, database, shared | options)),
                "recall@10": float(np.mean(found)),
                "error of the weights, median": float(np.median(errors)),
                "rows read": float(np.median(read)),
            },
            "certified": {
                "ms": time_queries(
                    queries[:20], partial(ask_one, database, shared | {"tolerance": 0.05})
                )
            },
            "exact": {"ms": time_queries(queries[:20], partial(ask_one, database, shared))},
        }
        if weighting is best:
            true = [np.argpartition(-(keys @ q), BEST)[:BEST] for q in queries[:50]]
            searches: dict[str, Any] = {"qkv": partial(ask_one, database, shared | options)}
            for probes in PROBES_OF_PEER:
                parameters = faiss.SearchParametersIVF(nprobe=probes)
                search = partial(engine.search, k=RERANKED, params=parameters)
                near = [rerank(keys, q, search(q[None])[1][0]) for q in queries[:50]]
                hits = [len({*a} & {*b}) / BEST for a, b in zip(near, true, strict=True)]
                name_of_side = f"FAISS, {probes} of {lists:,} lists"
                sides[name_of_side] = {"recall@10": float(np.mean(hits))}
                searches[name_of_side] = search
            for side, ms in time_in_turns(queries, searches).items():
                sides[side]["ms"] = ms
            batch = queries[np.arange(256) % len(queries)]
            sides["qkv"]["ms of 256 at once"] = time_batch(
                partial(database.ask, batch, **shared, **options)
            )
            for side, search in list(searches.items())[1:]:
                sides[side]["ms of 256 at once"] = time_batch(partial(search, batch))
        yield {"work": f"{name}, {rows:,} × {width}, CPU", "sides": sides, "goals": []}
    yield measure_conditions(database, queries, {"score": score, "weighting": best, "top": BEST})


def measure_conditions(database: qkv.Database, queries: np.ndarray, shared: Any) -> Any:
    """Return a row for the best rows under conditions that few rows pass."""
    rows, sides, searches = len(database), dict[str, Any](), dict[str, Any]()
    for name, share in (("all pass", 1.0), ("10 % pass", 0.1), ("1 % pass", 0.01)):
        # The values are the numbers of the rows, which say nothing about the clusters.
        options = shared | {"where": None if share == 1 else f"value < {share * rows}"}
        found = []
        for query in queries[:20]:
            mine = database.ask(query, **options, approximate=True)
            wanted = {row.index for row in database.ask(query, **options).rows}
            found.append(len(wanted & {row.index for row in mine.rows}) / len(wanted))
        searches[name] = partial(ask_one, database, options | {"approximate": True})
        sides[name] = {"recall@10": float(np.mean(found))}
    times = {name: list[float]() for name in searches}
    for _ in range(ROUNDS):
        for name, search in searches.items():  # a condition is found once for many queries
            times[name].append(time_queries(queries, search))
    for name, ms in times.items():
        sides[name]["ms"] = min(ms)
    width = queries.shape[1]
    work = f"ten best rows under a condition, {rows:,} × {width}, CPU"
    return {"work": work, "sides": sides, "goals": []}


def measure_index_bytes(database: qkv.Database) -> int:
    """Return the bytes of all arrays of the index, which are those of its files."""
    snapshot = database._view.snapshot
    entries = [part.entry for part in snapshot.list_parts() if part.entry is not None]
    stored = [snapshot.read_index(entry) for entry in entries]
    arrays = [x for index in stored if index is not None for x in index[0].tensors.values()]
    return sum(x.nbytes for x in arrays)


def ask_one(database: qkv.Database, options: Any, query: np.ndarray) -> Any:
    return database.ask(query[0], **options)


def measure_engines(keys: np.ndarray, queries: np.ndarray, graphs: bool) -> Iterator[Any]:
    """Yield a row of results with one side per engine and setting."""
    faiss: Any = peer("faiss")
    faiss.omp_set_num_threads(1)
    flat = faiss.IndexFlatIP(keys.shape[1])
    flat.add(keys)
    best = flat.search(queries, BEST)[1]
    sides: dict[str, Any] = {}
    for name, build_seconds, size, search in build_indexes(faiss, keys, graphs):
        found = [rerank(keys, q, search(q[None], RERANKED)) for q in queries]
        recall = np.mean([len({*a} & {*b}) / BEST for a, b in zip(found, best, strict=True)])
        sides[name] = {
            "ms": time_queries(queries, lambda q, search=search: search(q, RERANKED)),
            "recall@10": float(recall),
            "ms of 1,000": time_queries(queries, lambda q, search=search: search(q, MANY)),
            "build, s of CPU": build_seconds,
            "index / vectors": size / keys.nbytes,
        }
    sides["flat"] = {"ms": time_queries(queries, lambda q: flat.search(q, BEST)), "recall@10": 1.0}
    rows, width = keys.shape
    yield {"work": f"engines of an index, {rows:,} × {width}", "sides": sides, "goals": []}


def build_indexes(
    faiss: Any, keys: np.ndarray, graphs: bool
) -> Iterator[tuple[str, float, int, Search]]:
    """Yield (name, CPU seconds to build, bytes, search) of each engine and setting."""
    rows, width = keys.shape
    lists, metric = int(4 * rows**0.5), faiss.METRIC_INNER_PRODUCT
    eight_bits = faiss.ScalarQuantizer.QT_8bit
    makers = {
        "FAISS IVF": lambda x: faiss.IndexIVFFlat(x, width, lists, metric),
        "FAISS IVF, 8 bits": lambda x: faiss.IndexIVFScalarQuantizer(
            x, width, lists, eight_bits, metric
        ),
        "FAISS IVF, fast-scan PQ": lambda x: faiss.IndexIVFPQFastScan(
            x, width, lists, width // 2, 4, metric
        ),
    }
    for name, make in makers.items():
        started = time.process_time()
        index = make(faiss.IndexFlatIP(width))
        index.cp.max_points_per_centroid = 64
        index.train(keys)
        index.add(keys)
        seconds, size = time.process_time() - started, faiss.serialize_index(index).nbytes
        for probes in PROBES:
            index.nprobe = probes
            yield (
                f"{name}, {probes} of {lists:,} lists",
                seconds,
                size,
                lambda q, k, index=index: index.search(q, k)[1][0],
            )
    if not graphs:
        return
    started = time.process_time()
    graph = faiss.IndexHNSWFlat(width, 16, metric)
    graph.hnsw.efConstruction = 100
    graph.add(keys)
    seconds, size = time.process_time() - started, faiss.serialize_index(graph).nbytes
    for expansion in EXPANSIONS:
        graph.hnsw.efSearch = expansion
        yield (
            f"FAISS HNSW, expansion {expansion}",
            seconds,
            size,
            lambda q, k: graph.search(q, k)[1][0],
        )
    usearch = peer("usearch.index")
    for dtype in ("f32", "i8") if usearch else ():
        started = time.process_time()
        peer_index = usearch.Index(
            ndim=width, metric="ip", dtype=dtype, connectivity=16, expansion_add=100
        )
        peer_index.add(np.arange(rows), keys, threads=1)
        seconds, size = time.process_time() - started, peer_index.serialized_length
        for expansion in EXPANSIONS:
            peer_index.expansion_search = expansion
            yield (
                f"usearch {dtype}, expansion {expansion}",
                seconds,
                size,
                lambda q, k, index=peer_index: index.search(q[0], k, threads=1).keys,
            )


def rerank(keys: np.ndarray, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the rows with the best exact scores."""
    rows = np.asarray(rows).astype(np.int64)
    rows = rows[rows >= 0]
    return rows[np.argsort(-(keys[rows] @ query))[:BEST]]


def time_queries(queries: np.ndarray, search: Callable[[np.ndarray], Any]) -> float:
    """Return the median CPU time of one query in milliseconds."""
    return time_in_turns(queries, {"": search})[""]


def time_batch(search: Callable[[], Any]) -> float:
    """Return the least CPU time of a batch in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        search()
        times.append(time.process_time() - started)
    return 1e3 * min(times)


def time_in_turns(
    queries: np.ndarray, searches: dict[str, Callable[[np.ndarray], Any]]
) -> dict[str, float]:
    """Return the median CPU time of one query in milliseconds for each search.

    Each query is asked of all searches in turn, in several rounds; its smallest time counts.
    """
    times = np.empty((ROUNDS, len(searches), min(len(queries), 100)))
    for each_round in times:
        for i, query in enumerate(queries[:100]):
            for j, search in enumerate(searches.values()):
                started = time.process_time()
                search(query[None])
                each_round[j, i] = time.process_time() - started
    medians = 1e3 * np.median(times.min(axis=0), axis=1)
    return dict(zip(searches, medians.tolist(), strict=True))


if __name__ == "__main__":
    main()
