"""The index of one segment: lists, codes, search, and arrays that nobody may trust."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.database.index import segment_index
from qkv.database.index.metric import IndexMetric, find_metric, scale_by_temperature
from qkv.database.index.segment_index import (
    MappedLists,
    MergedLists,
    SegmentIndex,
    build_arrays,
    describe_arrays,
)
from qkv.database.storage.segments import Segment
from qkv.scores import Additive, Cosine, Dot, Gaussian, Laplace, ScaledDot
from qkv.weightings import Softmax

pytest.importorskip("faiss")
ROWS, WIDTH = 3000, 12
METRICS = [IndexMetric(name, 1.0) for name in ("cosine", "dot", "distance")]


def make_vectors(metric, rows=ROWS):
    rng = np.random.default_rng(0)
    return metric.prepare_vectors(rng.normal(size=(rows, WIDTH)) + rng.normal(size=(1, WIDTH)))


def build(metric, x):
    return build_arrays(lambda start, stop: x[start:stop], len(x), metric)


def similarity(metric, q, x):
    q, x = q.astype(float), x.astype(float)
    if metric.name == "distance":
        return -np.square(q[:, None] - x[None]).sum(-1) / 2
    return q @ x.T


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_lists(metric):
    x = make_vectors(metric)
    arrays = build(metric, x)
    start, row = arrays["start"], arrays["row"]
    assert sorted(row) == list(range(ROWS)) and start[0] == 0 and start[-1] == ROWS
    assert (np.diff(start) > 0).all()
    for i in (0, len(start) // 2, len(start) - 2):
        own = x[row[start[i] : start[i + 1]]]
        if len(own):
            np.testing.assert_allclose(arrays["mean"][i], own.mean(0), atol=1e-5)
            spread = np.square(own - own.mean(0)).sum(1).mean() / WIDTH
            np.testing.assert_allclose(arrays["spread"][i], spread, atol=1e-5)
    low, size = arrays["bounds"]
    mean = np.repeat(arrays["mean"], np.diff(start), axis=0)
    decoded = mean + low + (arrays["code"] + 0.5) / 255 * size
    assert np.abs(decoded - x[row]).max() <= size.max() / 255


def test_outliers():
    """A few rows far away: the codes are float16, so that the others can be told apart."""
    x = make_vectors(METRICS[2])
    x[:3] *= 1e3
    arrays = build(METRICS[2], x)
    assert arrays["code"].dtype == np.float16
    check_search(METRICS[2], x, arrays)


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_search(metric):
    """Over all lists a search finds the nearest rows, up to the rounding of the codes."""
    x = make_vectors(metric)
    check_search(metric, x, build(metric, x))


def check_search(metric, x, arrays):
    index = SegmentIndex(arrays, describe_arrays(metric), ROWS, WIDTH)
    q = metric.prepare_vectors(np.random.default_rng(1).normal(size=(5, WIDTH)))
    lists = np.tile(np.arange(index.list_count), (5, 1))
    near_lists = similarity(metric, q, index.mean)
    first_rows = set(index.row_of_entry[: index.start[1]].tolist())
    merged = MergedLists([index])
    rows, near = merged.search(q, lists, near_lists, 40, None)
    exact = similarity(metric, q, x)
    np.testing.assert_allclose(near, np.take_along_axis(exact, rows, 1), atol=0.1)
    best = np.argsort(-exact, axis=1)[:, :10]
    assert all(set(b) <= set(r) for b, r in zip(best, rows, strict=True))
    # Only allowed rows, and only rows of the lists.
    allowed = np.zeros(ROWS, bool)
    allowed[::7] = True
    some, _ = merged.search(q, lists, near_lists, ROWS, np.packbits(allowed, bitorder="little"))
    assert all(set(r[r >= 0]) == set(np.flatnonzero(allowed)) for r in some)
    lists[:, 1:] = -1
    first, _ = merged.search(q, lists, near_lists, ROWS, None)
    assert all(set(r[r >= 0]) == first_rows for r in first)
    counts = index.count_rows(allowed)
    assert counts.sum() == allowed.sum()
    assert counts[0] == allowed[list(first_rows)].sum()


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_mapped_codes(metric):
    """Codes that stay in files give the same rows."""
    x = make_vectors(metric, 2 * ROWS)
    centres = segment_index.train_centres(x, 2 * ROWS, metric)
    indexes = {MergedLists: [], MappedLists: []}
    for start in (0, ROWS):
        part = x[start : start + ROWS]
        arrays = build_arrays(lambda i, j, part=part: part[i:j], ROWS, metric, centres)
        file = Segment(np.zeros(0, np.int64), arrays)
        for kind, parts in indexes.items():
            parts.append(SegmentIndex(arrays, describe_arrays(metric), ROWS, WIDTH, file))
            assert kind is MergedLists or parts[0].has_same_codes(parts[-1])
    merged, mapped = (kind(parts) for kind, parts in indexes.items())
    q = metric.prepare_vectors(np.random.default_rng(1).normal(size=(5, WIDTH)))
    near_lists = similarity(metric, q, centres.means)
    lists = np.argsort(-near_lists, axis=1)[:, :7]
    near_lists = np.take_along_axis(near_lists, lists, 1)
    lists[2, 3:] = lists[4] = -1
    allowed = np.packbits(np.arange(2 * ROWS) % 3 == 0, bitorder="little")
    for bits in (None, allowed, allowed):
        for count in (1, 40, 2 * ROWS):
            one, other = (y.search(q, lists, near_lists, count, bits) for y in (merged, mapped))
            np.testing.assert_array_equal(one[0], other[0])
            is_row = one[0] >= 0
            assert not is_row[4].any() and is_row[0].any()
            np.testing.assert_allclose(one[1][is_row], other[1][is_row], rtol=1e-6)
    for count in (1, 40):
        np.testing.assert_array_equal(*(y.find_rows(q, 9, count) for y in (merged, mapped)))
    assert mapped.segments[0].code is not None and merged.segments[0].code is None


def test_not_finite():
    x = make_vectors(METRICS[1])
    for bad in (np.nan, np.inf, 1e30):
        x[1777, 3] = bad
        assert build(METRICS[1], x) is None


@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_few_rows_and_duplicates(rows):
    for metric in METRICS:
        x = metric.prepare_vectors(np.ones((rows, WIDTH)))
        index = SegmentIndex(build(metric, x), describe_arrays(metric), rows, WIDTH)
        lists = np.arange(index.list_count)[None]
        near_lists = similarity(metric, x[:1], index.mean)
        found, near = MergedLists([index]).search(x[:1], lists, near_lists, rows, None)
        assert sorted(found[0]) == list(range(rows)) and np.isfinite(near).all()


def spoil(arrays, name, change):
    arrays = {key: x.copy() for key, x in arrays.items()}
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays[name])
    return arrays


def put(x, at, value):
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("row", lambda x: put(x, 5, ROWS)),
        ("row", lambda x: put(x, 5, 2**32 - 1)),
        ("row", lambda x: put(x, 5, x[6])),
        ("row", lambda x: x.astype(np.int64)),
        ("row", lambda x: x[1:]),
        ("start", lambda x: put(x, 1, -1)),
        ("start", lambda x: put(x, 1, ROWS + 1)),
        ("start", lambda x: put(x, -1, ROWS + 1)),
        ("start", lambda x: put(x, 0, 1)),
        ("start", lambda x: put(x, 2, x[1] - 1)),
        ("code", lambda x: x[:, 1:]),
        ("code", lambda x: x[1:]),
        ("code", None),
        ("mean", lambda x: put(x, (0, 0), np.nan)),
        ("mean", lambda x: x[:0]),
        ("bounds", lambda x: put(x, (0, 0), np.inf)),
        ("spread", lambda x: x[1:]),
    ],
)
def test_hostile_arrays(name, change):
    """FAISS would read outside of the arrays: they are refused before."""
    arrays = build(METRICS[0], make_vectors(METRICS[0]))
    with pytest.raises(ValueError, match=r"its|it has|a number"):
        SegmentIndex(spoil(arrays, name, change), describe_arrays(METRICS[0]), ROWS, WIDTH)


def test_other_layout():
    arrays = build(METRICS[0], make_vectors(METRICS[0]))
    for metadata in ({}, {"index": "later", "metric": "cosine"}, {"index": "lists-2"}):
        with pytest.raises(ValueError, match="layout"):
            SegmentIndex(arrays, metadata, ROWS, WIDTH)


def test_metrics():
    assert find_metric(Cosine(0.1), 4) == ("cosine", 10.0)
    assert find_metric(Dot(), 4) == ("dot", 1.0)
    assert find_metric(ScaledDot(), 16) == ("dot", 0.25)
    assert find_metric(ScaledDot(3.0), 16) == ("dot", 3.0)
    assert find_metric(Gaussian(0.5), 4) == ("distance", 4.0)
    w = np.ones((2, 2))
    for score in (
        ScaledDot(-1.0),
        ScaledDot(1.0, softcap=3.0),
        ScaledDot(np.ones(4)),
        Gaussian(np.ones(4)),
        Laplace(),
        Additive(w, w, np.ones(2)),
    ):
        assert isinstance(find_metric(score, 4), str)
    assert scale_by_temperature(METRICS[0], Softmax(0.5)).slope == 2.0
    assert scale_by_temperature(METRICS[0], Softmax(np.ones((3, 1)))) is None


def test_the_file_of_an_index_leaves_memory():
    """The other arrays are no views into the memory of the codes, which are in the lists."""
    x = make_vectors(METRICS[0])
    arrays = build(METRICS[0], x)
    memory = np.concatenate([a.reshape(-1).view(np.uint8) for a in arrays.values()])
    starts = np.cumsum([0, *(a.nbytes for a in arrays.values())])
    parts = {
        name: memory[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
        for start, (name, a) in zip(starts.tolist(), arrays.items(), strict=False)
    }
    index = SegmentIndex(parts, describe_arrays(METRICS[0]), ROWS, WIDTH)
    merged = MergedLists([index])
    left = index.mean, index.spread, index.start, index._list_of_row, index.bounds
    assert index.code is None and not any(np.shares_memory(memory, a) for a in left)
    assert index.row_of_entry is None
    assert merged.rows == ROWS
