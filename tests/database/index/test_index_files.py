"""The files of an index: beside their segments, checked, and never needed for a right answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.database.errors import StaleIndexWarning, StoreDamagedError
from qkv.database.index import row_index, segment_index
from qkv.database.index.metric import IndexMetric
from qkv.database.storage import check_store, limits, segments
from qkv.weightings import TopK
from tests.database.storage.crash import left
from tests.sampling import FULL

pytest.importorskip("faiss")
ROWS, WIDTH = 3000, 8
SCORE = scores.Gaussian(0.3)
OPTIONS = {"score": SCORE, "weighting": TopK(5), "approximate": True}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Segments of about 1,000 rows, each with an index."""
    monkeypatch.setattr(segment_index, "MIN_ROWS", 500)
    monkeypatch.setattr(limits, "MAX_SEGMENT_BYTES", 100_000)
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 400)


@pytest.fixture(params=["in memory", "mapped"])
def codes(request, monkeypatch):
    """Where the codes are: small indexes are loaded, large ones stay in their files."""
    if request.param == "mapped":
        monkeypatch.setattr(row_index, "MAX_LOADED_BYTES", 0)
        monkeypatch.setattr(limits, "MAX_UNMAPPED_BYTES", 0)
        monkeypatch.setattr(limits, "MAX_MAPPED_BYTES", -1)
        monkeypatch.setattr(limits, "READS_PER_CHECK", 1)
    return request.param


def make_keys(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(20, WIDTH))
    return centres[rng.integers(0, 20, rows)] + 0.4 * rng.normal(size=(rows, WIDTH))


def create(path, rows=ROWS):
    x = make_keys(rows)
    with qkv.Database.from_columns(
        {"key": x, "value": np.arange(float(rows))}, key="key", path=path
    ) as D:
        D.index(recall=0.9, score=SCORE)
    return x


def index_files(path):
    return sorted(path.glob("index-*"))


def is_indexed(D, q):
    return "index" in D.ask(q, **OPTIONS).engine.split(", ")[0]


def matches_exact(D, queries, least=0.9):
    """Whether approximate answers agree with the exact ones."""
    hits = []
    for q in queries:
        answer = D.ask(q, **OPTIONS)
        exact = D.ask(q, **{**OPTIONS, "approximate": None})
        live = {row.index for row in exact.rows}
        hits.append(len(live & {row.index for row in answer.rows}) / max(len(live), 1))
        best = answer.rows[0]
        assert np.allclose(best.key, D.ask(best.key, score=SCORE, weighting="hard").rows[0].key)
    return np.mean(hits) >= least


def test_files_and_reopening(tmp_path, codes):
    path = tmp_path / "s.qkv"
    x = create(path)
    segments = sorted(path.glob("segment-*"))
    assert len(segments) >= 2
    names = [file.name.replace("segment", "index") for file in segments]
    assert [file.name for file in index_files(path)] == names
    assert check_store(path) == []
    with qkv.open(path) as D:
        assert is_indexed(D, x[0]) and matches_exact(D, x[:10])
        assert D.ask(x[7], **{**OPTIONS, "weighting": "hard"}).value == 7.0 == D[x[7]]
    before = [file.stat().st_mtime_ns for file in index_files(path)]
    with qkv.open(path) as D:
        D.index(recall=0.9, score=SCORE)  # nothing is missing
    assert before == [file.stat().st_mtime_ns for file in index_files(path)]


def test_read_only_folder(tmp_path):
    path = tmp_path / "s.qkv"
    x = create(path)
    before = {file: file.read_bytes() for file in path.iterdir()}
    with qkv.open(path, create=False) as D:
        assert is_indexed(D, x[0])
    assert before == {file: file.read_bytes() for file in path.iterdir()}


def damage(kind, file):
    content = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        content[-100] ^= 1
        file.write_bytes(content)
    elif kind == "header":
        content[12] ^= 0xFF
        file.write_bytes(content)
    elif kind == "other":
        other = next(x for x in index_files(file.parent) if x != file)
        file.write_bytes(other.read_bytes())
    elif kind == "link":
        target = file.with_suffix(".moved")
        file.rename(target)
        file.symlink_to(target)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["missing", "empty", "truncated", "flipped", "header", "other"])
def test_damage(tmp_path, kind, caplog):
    """The rows of a segment with a damaged index are scanned, and check names the file."""
    path = tmp_path / "s.qkv"
    x = create(path)
    file = index_files(path)[0]
    damage(kind, file)
    with qkv.open(path) as D:
        answer = D.ask(x[0], **OPTIONS)
        assert answer.rows[0].value == 0.0 and matches_exact(D, x[:10])
        assert len(D) == ROWS and D[x[0]] == 0.0
        if kind != "missing":
            assert "is not used" in caplog.text
    problems = check_store(path)
    assert [p.file for p in problems] == ([] if kind == "missing" else [file.name])
    problems = check_store(path, repair=True)
    assert all(p.repaired for p in problems) and not file.exists()
    assert check_store(path) == []
    with qkv.open(path) as D:
        D.index(recall=0.9, score=SCORE)
        assert file.exists() and matches_exact(D, x[:10])


def test_link(tmp_path):
    path = tmp_path / "s.qkv"
    create(path)
    damage("link", index_files(path)[0])
    with pytest.raises(StoreDamagedError, match="link"):
        qkv.open(path)


def test_all_indexes_lost(tmp_path):
    path = tmp_path / "s.qkv"
    x = create(path)
    for file in index_files(path):
        file.unlink()
    with qkv.open(path) as D:
        answer = D.ask(x[0], **OPTIONS)
        assert answer.value == D.ask(x[0], **{**OPTIONS, "approximate": None}).value
        assert "no index" in answer.engine and answer.recall == 1


def test_compaction_builds_again(tmp_path):
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        D.remove(list(x[:1500:3]))
        old = D.at(D.version)
        answer = old.ask(x[1], **OPTIONS)
        D.compact()
        assert is_indexed(D, x[1]) and matches_exact(D, x[1:20:3])
        assert D.ask(x[1], **OPTIONS).value == answer.value
        for q in x[:300:3]:
            assert not np.allclose(D.ask(q, **OPTIONS).rows[0].key, q)
    segments = {file.name.replace("segment", "index") for file in path.glob("segment-*")}
    assert {file.name for file in index_files(path)} == segments
    assert check_store(path) == []


def test_compaction_without_faiss(tmp_path, monkeypatch):
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        D.remove(list(x[::2]))
        monkeypatch.setitem(sys.modules, "faiss", None)
        with pytest.warns(StaleIndexWarning, match=r"compacted.*qkv\[index\]"):
            D.compact()
        assert D.ask(x[1], **OPTIONS).value == D.ask(x[1], **{**OPTIONS, "approximate": None}).value


def test_without_faiss(tmp_path, monkeypatch):
    path = tmp_path / "s.qkv"
    x = create(path)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with qkv.open(path) as D:
        answer = D.ask(x[0], **OPTIONS)
        assert "faiss is not installed" in answer.engine and answer.recall == 1
        with pytest.raises(ImportError, match=r"qkv\[index\]"):
            D.index(score=SCORE)


def test_versions(tmp_path):
    """A version sees its own rows: those that were deleted later, and none that came later."""
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        first = D.version
        D.remove(x[:1])
        D.add(x[1] + 0.001, 999_999.0)
        old = D.at(first)
        options = {**OPTIONS, "weighting": "hard"}
        assert old.ask(x[0], **options).value == 0.0
        assert D.ask(x[0], **options).value != 0.0
        assert old.ask(x[1] + 0.001, **options).value == 1.0
        assert D.ask(x[1] + 0.001, **options).value == 999_999.0
        assert old.ask(x[0], **options).rows_read < ROWS / 2
        before = D.at(first - 1)  # the version before the index was measured
        assert "no index" in before.ask(x[0], **options).engine


def test_rows_after_the_index(tmp_path):
    """New segments are scanned until `index` is called again, which leaves the others alone."""
    path = tmp_path / "s.qkv"
    x = create(path)
    new = make_keys(1200, seed=3)
    with qkv.open(path) as D:
        files = index_files(path)
        D.add(new, np.arange(1200.0) + ROWS)
        assert index_files(path) == files
        answer = D.ask(new[5], **{**OPTIONS, "weighting": "hard"})
        assert answer.value == ROWS + 5 and answer.rows_read >= 1200
        stamps = [file.stat().st_mtime_ns for file in files]
        report = D.index(recall=0.9, score=SCORE)
        assert report.indexed > ROWS and report.rows == ROWS + 1200
        assert [file.stat().st_mtime_ns for file in files] == stamps
        answer = D.ask(new[5], **{**OPTIONS, "weighting": "hard"})
        assert answer.value == ROWS + 5 and answer.rows_read < 1200
        assert matches_exact(D, x[:5])


def test_encode_makes_the_index_invalid(tmp_path):
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        D.encode()
        answer = D.ask(x[0], **OPTIONS)
        assert "no index" in answer.engine and answer.recall == 1
        D.index(recall=0.9, score=SCORE)
        assert is_indexed(D, x[0]) and matches_exact(D, x[:5])


def test_drop_index(tmp_path):
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        count = len(index_files(path))
        assert D.drop_index() == count and not index_files(path)
        assert "no index" in D.ask(x[0], **OPTIONS).engine
        assert D.drop_index() == 0
        D.compact()
        assert not index_files(path)


def test_another_metric_replaces_the_index(tmp_path):
    path = tmp_path / "s.qkv"
    x = create(path)
    cosine = {**OPTIONS, "score": scores.Cosine(0.05)}
    with qkv.open(path) as D:
        assert "metric distance" in D.ask(x[0], **cosine).engine
        D.index(recall=0.9, score=scores.Cosine(0.05))
        assert D.ask(x[0], **cosine).recall < 1
        assert "metric cosine" in D.ask(x[0], **OPTIONS).engine


def test_settings_of_a_stranger(tmp_path):
    """Any JSON may be in the settings of a store."""
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        good = D._view.settings["index"]
        effort = good["efforts"][0]
        for bad in (
            7,
            {},
            {**good, "metric": "x"},
            {**good, "efforts": 3},
            {**good, "rows_by_share": [[0.1]]},
            {**good, "rows_by_share": [[0.1, 5.0], [0.3, 5.0]]},
            {**good, "rows_by_share": [[-0.1, 5.0]]},
            {**good, "efforts": [3]},
            {**good, "slope": "x"},
            {**good, "efforts": [{**effort, "ratios": []}]},
            {**good, "efforts": [{**effort, "ratios": [[1, 2]]}]},
            {**good, "efforts": [{**effort, "lists": -1}]},
            {**good, "efforts": [{**effort, "rows": True}]},
        ):
            D._store.commit(settings=D._view.settings | {"index": bad})
            answer = D.ask(x[0], **OPTIONS)
            assert answer.recall == 1 and answer.rows[0].value == 0.0
        huge = {**effort, "lists": 10**12, "rows": 10**12}
        D._store.commit(settings=D._view.settings | {"index": {**good, "efforts": [huge]}})
        assert D.ask(x[0], **OPTIONS).rows[0].value == 0.0


def test_interrupted_building_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "s.qkv"
    x = make_keys()
    with qkv.Database.from_columns(
        {"key": x, "value": np.arange(float(ROWS))}, key="key", path=path
    ) as D:
        calls = []

        def stop(done, total):
            calls.append(done)
            if len(calls) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            D.index(score=SCORE, progress=stop)
        assert len(index_files(path)) == 1 and "no index" in D.ask(x[0], **OPTIONS).engine
        stamp = index_files(path)[0].stat().st_mtime_ns
        D.add(x[:1], [5.0])
        D.index(recall=0.9, score=SCORE)
        assert index_files(path)[0].stat().st_mtime_ns == stamp
        assert is_indexed(D, x[1])
    assert check_store(path) == []


def test_leftovers(tmp_path):
    """Unfinished indexes, and those without a segment, are removed by the next writer."""
    path = tmp_path / "s.qkv"
    x = create(path)
    content = index_files(path)[0].read_bytes()
    left = [path / "index-00000099.safetensors", path / "index-00000001.safetensors.tmp"]
    for file in left:
        file.write_bytes(content)
    problems = {problem.file for problem in check_store(path)}
    assert problems == {file.name for file in left}
    with qkv.open(path) as D:
        D.add(x[:1], [1.0])
    assert not any(file.exists() for file in left) and check_store(path) == []


KILLED = """
import sys
import numpy as np, qkv
from qkv.database.index import segment_index
from qkv.database.storage import limits
from tests.database.index import test_index_files as t
segment_index.MIN_ROWS, limits.MAX_SEGMENT_BYTES, limits.MAX_BUFFERED_ROWS = 500, 100_000, 400
rng = np.random.default_rng(int(sys.argv[2]))
with qkv.open(sys.argv[1]) as D:
    print("open", flush=True)
    while True:
        size = int(rng.integers(1, 900))
        first = len(D) + 10_000 * int(sys.argv[2])
        D.add(t.make_keys(size, int(rng.integers(1000))), first + np.arange(float(size)))
        print("added", first, size, flush=True)
        D.index(recall=0.9, score=t.SCORE)
        if rng.random() < 0.5:
            rows = [row["key"] for row in D.rows(count=3)]
            D.remove(rows)
            D.compact()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("round_", range(67 if FULL else 2))
def test_killed_while_indexing(tmp_path, round_):
    """No acknowledged row is lost, and every answer is that of a scan."""
    path = tmp_path / "s.qkv"
    x = create(path, 1500)
    acknowledged = set()
    rng = np.random.default_rng(round_)
    for number in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), str(round_ * 100 + number)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout.readline() == "open\n"
        time.sleep(float(rng.uniform(0.05, 4)))
        process.kill()
        for line in process.stdout.read().splitlines(keepends=True):
            if line.endswith("\n") and line.startswith("added"):
                _, first, size = line.split()
                acknowledged |= set(range(int(float(first)), int(float(first)) + int(size)))
        process.wait()
        process.stdout.close()
        with qkv.open(path) as D:
            values = set(map(int, D.values()))
            assert acknowledged <= values
            for q in x[100:130:3]:
                answer = D.ask(q, **{**OPTIONS, "weighting": "hard"})
                row = answer.rows[0]
                assert D[row.key] == row.value and answer.recall >= 0.9
        assert not [p for p in check_store(path) if p.file.startswith("segment") and not left(p)]
        assert check_store(path, repair=True) == [] or check_store(path) == []


def test_segments_are_searched_together(tmp_path, codes):
    """One search covers the segments of one build, also for versions that have only some of them,
    and where rows were deleted."""
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        D.ask(x[0], **OPTIONS)
        (group,) = D._view.index_cache["distance"]._groups
        assert len(group.parts) > 1 and None not in group.parts
        version = D.version
        matches_exact(D, x[:30])
        D.remove([row["key"] for row in D.rows(count=700)][5:])
        matches_exact(D, x[700:730])
        matches_exact(D.at(version), x[:30])
        first = D.ask(x[3], **OPTIONS).rows[0]
        assert first.index == 3 and np.array_equal(first.key, np.float32(x[3]))
        D.compact()
        matches_exact(D, x[700:730])


@pytest.mark.parametrize("length", [0, 7, 100, 4096, 0.5, 0.999, -1])
@pytest.mark.parametrize("is_open", [True, False])
def test_truncated_mapped_index(tmp_path, monkeypatch, caplog, length, is_open):
    """Its rows are scanned. Reading the missing pages would kill the process."""
    monkeypatch.setattr(row_index, "MAX_LOADED_BYTES", 0)
    path = tmp_path / "s.qkv"
    x = create(path)
    file = index_files(path)[1]
    size = file.stat().st_size
    with qkv.open(path) as D:
        if is_open:
            assert is_indexed(D, x[0])
            lists = D._view.index_cache["distance"]._groups[0].lists
            assert isinstance(lists, segment_index.MappedLists)
        length = int(length * size) if isinstance(length, float) else length
        os.truncate(file, length if length >= 0 else size + length)
        for q in x[[0, 1200, -1]]:
            assert_agrees(D, q)
        assert is_indexed(D, x[0])  # the other segments have theirs
        D.attend(x[:3], score=SCORE, approximate=0.5)
        assert f"index of {file.name.replace('index', 'segment')} is not used" in caplog.text
        assert [problem.file for problem in check_store(path)] == [file.name]
        D.index(recall=0.9, score=SCORE)
        assert check_store(path) == [] and matches_exact(D, x[:10])


def assert_agrees(D, q):
    """Check that an approximate answer has the best row, and is right over the rows it read."""
    answer, exact = D.ask(q, **OPTIONS), D.ask(q, **{**OPTIONS, "approximate": None})
    assert answer.rows[0].index == exact.rows[0].index
    soft = D.ask(q, score=SCORE, approximate=0.9)
    whole = D.ask(q, score=SCORE)
    read = soft.weights > 0
    expected = whole.weights[read] / whole.weights[read].sum()
    np.testing.assert_allclose(soft.weights[read], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("round_", range(20 if FULL else 3))
def test_flipped_bits_of_a_mapped_index(tmp_path, monkeypatch, caplog, is_open, round_):
    """Each bit is covered by a checksum: that of its list, or that of the rest."""
    monkeypatch.setattr(row_index, "MAX_LOADED_BYTES", 0)
    path, rng = tmp_path / "s.qkv", np.random.default_rng(round_)
    x = create(path)
    file = index_files(path)[-1]
    with qkv.open(path) as D:
        if is_open:
            # Nothing of the codes was read yet.
            row_index.open_row_index(D._view, "distance")
        content = bytearray(file.read_bytes())
        codes = len(content) - (len(content) - 8 - int.from_bytes(content[:8], "little")) // 4
        at = rng.integers(codes, len(content))
        content[at] ^= 1 << int(rng.integers(0, 8))
        with file.open("r+b") as stream:  # in place: a mapped file changes too
            stream.write(content)
        values = [answer.value for answer in D.ask(x, **OPTIONS | {"weighting": "hard"})]
        assert values == list(range(ROWS))  # the list of each row was read
        for q in x[::200]:
            assert_agrees(D, q)
        assert "is not used" in caplog.text
        assert [problem.file for problem in check_store(path)] == [file.name]
        assert is_indexed(D, x[0])
        # Each answer is found in the same way, and the warning is not repeated.
        count = caplog.text.count("is not used")
        D.ask(x[:5], **OPTIONS)
        assert caplog.text.count("is not used") == count


def test_all_mapped_indexes_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "MAX_LOADED_BYTES", 0)
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        assert is_indexed(D, x[0])
        for file in index_files(path):
            os.truncate(file, file.stat().st_size // 2)
        answer, exact = D.ask(x[3], **OPTIONS), D.ask(x[3], **{**OPTIONS, "approximate": None})
        assert answer.value == exact.value and answer.recall == 1.0
        assert "exactly: most rows are in no index" in answer.engine


@pytest.mark.parametrize("resident", [None, 10**9])
def test_pages_of_random_reads_are_released(tmp_path, monkeypatch, resident):
    """Where the system does not say what is in memory, reads are counted."""
    monkeypatch.setattr(limits, "MAX_UNMAPPED_BYTES", 0)
    monkeypatch.setattr(row_index, "MAX_LOADED_BYTES", 0)
    path, released = tmp_path / "s.qkv", []
    x = create(path)
    with qkv.open(path) as D:
        monkeypatch.setattr(
            segments.Segment, "release_pages", lambda part: released.append(part.path.name)
        )
        monkeypatch.setattr(segments, "_read_resident_bytes", lambda: resident)
        monkeypatch.setattr(segments._MAPPED_SEGMENTS, "_reads", 0)
        D.ask(x[0], **OPTIONS)
        limit = 100 * limits.MAPPED_BYTES_PER_READ
        monkeypatch.setattr(limits, "MAX_MAPPED_BYTES", limit)
        for q in x[:10]:
            D.ask(q, **OPTIONS)
            resident = resident and resident + limit // 4
    files = {name.partition("-")[0] for name in released}
    assert {"segment", "index"} <= files


def test_few_rows_of_many_segments_pass(tmp_path, codes, monkeypatch):
    """Their vectors are read, in all segments and where rows were deleted."""
    path = tmp_path / "s.qkv"
    x = create(path)
    monkeypatch.setattr(row_index, "MAX_READ_ALONE_SHARE", 0.5)
    monkeypatch.setattr(row_index.RowIndex, "_search_codes", None)
    options = OPTIONS | {"where": lambda row: row["value"] % 7 == 0}
    with qkv.open(path) as D:
        version, hits = D.version, 0
        D.remove([row["key"] for row in D.rows(count=700)][5:])
        for q in x[690:720]:
            answer = D.ask(q, **options)
            assert all(row.value % 7 == 0 for row in answer.rows) and answer.recall < 1
            exact = D.ask(q, **options | {"approximate": None})
            hits += len({x.index for x in exact.rows} & {x.index for x in answer.rows})
        assert hits >= 0.95 * 30 * 5
        assert D.at(version).ask(x[7], **options).rows[0].index == 7


def test_a_version_without_some_segments(tmp_path, codes):
    path = tmp_path / "s.qkv"
    x = create(path)
    with qkv.open(path) as D:
        version, more = D.version, make_keys(1500, 7)
        D.add(more, 10_000 + np.arange(1500.0))
        D.drop_index()
        D.index(recall=0.9, score=SCORE)
        D.ask(x[0], **OPTIONS)
        matches_exact(D, more[:30])
        (group,) = D._view.index_cache["distance"]._groups
        old = row_index.RowIndex(D.at(version)._view, "distance")
        assert old._groups[0].lists is group.lists and None in old._groups[0].parts
        found = old.search(np.float32(more[:20]), 10**6, 40, IndexMetric("distance", 1.0))
        assert found.positions.max() < len(x) and (found.positions >= 0).all()
