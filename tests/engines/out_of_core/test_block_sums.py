"""Flat queries by sums over blocks: the bound is never below the true error, and no row is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from qkv import scores
from qkv.attention import attend_rows
from qkv.database.table import quantization
from qkv.engines.out_of_core import block_sums
from qkv.frameworks.stored_rows import RowChunk, RowSpan, StoredRows
from qkv.weightings import Softmax

WIDTH = 32
KINDS = ["plain", "unit", "all equal", "clusters", "one huge row", "far off", "tiny", "large"]


def random_keys(rng, kind, count):
    keys = rng.normal(size=(count, WIDTH))
    if kind == "unit":
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    elif kind == "all equal":
        keys[:] = keys[0]
    elif kind == "clusters":
        keys = keys[np.sort(rng.integers(0, min(count, 5), count))] + 0.01 * keys
    elif kind == "one huge row":
        keys[count // 2] *= 1e6
    elif kind == "far off":
        keys = 1e4 + 1e-3 * keys
    elif kind == "tiny":
        keys *= 1e-40
    elif kind == "large":
        keys *= 1e19
    return keys.astype(np.float32)


def store_rows(keys, value, live=None, pieces=1):
    """Rows in pieces, with their codes."""
    near = quantization.read_codes({"code": keys, **quantization.quantize_with_bounds(keys, 0)})
    full = RowChunk(keys, value, live, quantized=near)
    step = -(-len(keys) // pieces)
    parts = [full.slice_rows(slice(at, at + step)) for at in range(0, len(keys), step)]
    m = len(keys) if live is None else int(live.sum())
    return StoredRows(lambda: parts, (m, keys.shape[1]), value.shape[1])


def block_weights(rows, phi):
    """The weights (n, m) in float64 that the sums stand for: one for each block."""
    groups = [
        [cut.read_keys().astype(float) for cut in group]
        for group in rows.iter_spans(block_sums.ROWS_PER_BLOCK)
    ]
    keys = [key for group in groups for key in group]
    a = np.concatenate([np.tile(phi @ key.mean(axis=0), (len(key), 1)) for key in keys]).T
    return Softmax()(a)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    count=st.sampled_from([1, 2, 50, 400]),
    block=st.sampled_from([1, 7, 64, 4096]),
    scale=st.sampled_from([1e-4, 0.01, 0.06, 0.3, 1.0, 5.0]),
    dead=st.booleans(),
    pieces=st.integers(1, 3),
)
def test_the_bound_is_never_below_the_error(seed, kind, count, block, scale, dead, pieces):
    rng = np.random.default_rng(seed)
    keys, value = random_keys(rng, kind, count), rng.normal(size=(count, 2)).astype(np.float32)
    live = rng.random(count) < 0.7 if dead else None
    if live is not None:
        live[0] = True
    rows = store_rows(keys, value, live, pieces)
    queries = keys[rng.integers(count, size=3)].astype(float) + 0.1 * rng.normal(size=(3, WIDTH))
    size = np.abs(queries).max() if kind in ("large", "far off", "one huge row") else 1.0
    phi = scale * queries / size**2
    left = slice(None) if live is None else live
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(block_sums, "ROWS_PER_BLOCK", block)
        out, error = block_sums.sum_blocks(rows).pool_queries(phi)
        weights = block_weights(rows, phi)
    true = Softmax()(phi @ keys[left].astype(float).T)
    assert (0.5 * np.abs(weights - true).sum(axis=1) <= error + 1e-12).all()
    assert ((error >= 0) & (error <= 1)).all()
    known = error < 1
    np.testing.assert_allclose(out[known], (weights @ value[left])[known], atol=1e-9)
    reach = 2 * np.abs(value).max() * error[:, None] + 1e-9
    assert (np.abs(out - true @ value[left]) <= reach)[known].all()


def test_the_bound_is_near_the_error_where_keys_point_everywhere():
    rng = np.random.default_rng(0)
    keys = random_keys(rng, "unit", 6000)
    rows = store_rows(keys, np.zeros((6000, 1), np.float32))
    phi = 0.06 * random_keys(rng, "unit", 4).astype(float)
    true, error = (
        Softmax()(phi @ keys.astype(float).T),
        block_sums.sum_blocks(rows).pool_queries(phi)[1],
    )
    result = 0.5 * np.abs(block_weights(rows, phi) - true).sum(axis=1)
    assert (result <= error).all() and (error < 1.6 * result).all()


@pytest.fixture
def unread(monkeypatch):
    """What refuses to read rows, once it is called."""

    def refuse(*_, **__):
        raise AssertionError("rows were read")

    def shut():
        for name in ("read_keys", "read_values", "read_keys_at"):
            monkeypatch.setattr(RowSpan, name, refuse)
        monkeypatch.setattr("qkv.engines.out_of_core.quantized.QuantizedScores.scan_codes", refuse)

    monkeypatch.setattr(block_sums, "PAYBACK_DIVISOR", WIDTH)  # the first query pays
    return shut


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_flat_query_reads_neither_key_nor_code(tmp_path, unread, kind):
    rng = np.random.default_rng(3)
    keys, value = random_keys(rng, "unit", 500), rng.normal(size=(500, 3)).astype(np.float32)
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add(keys, value)
        D.remove(keys[:10])
    with qkv.open(tmp_path / "d.qkv") as D:
        query = keys[:2].astype(kind)
        true = D.attend(query, score="scaled_dot")
        first = D.attend(query, score="scaled_dot", tolerance=0.05)
        unread()
        result = D.attend(query, score="scaled_dot", tolerance=0.05)
        assert result.dtype == kind and np.array_equal(result, first)
        exact = qkv.attend(query.astype(float), keys[10:].astype(float), value[10:].astype(float))
        np.testing.assert_allclose(true, exact, atol=1e-6)
        assert np.abs(result - exact).max() <= 0.05 * np.ptp(value)
        with pytest.raises(AssertionError, match="rows were read"):
            D.attend(query, score=scores.ScaledDot(30.0), tolerance=0.05)


def test_a_change_is_seen(unread):
    rng = np.random.default_rng(4)
    keys = random_keys(rng, "unit", 300)
    D = qkv.Database(keys, np.zeros((300, 1), np.float32))
    assert D.attend(keys[:1], tolerance=0.05) == 0
    D.add(keys, np.ones((300, 1), np.float32))
    np.testing.assert_allclose(D.attend(keys[:1], tolerance=0.05), 0.5, atol=0.01)
    D.remove(keys[:200])
    np.testing.assert_allclose(
        D.attend(keys[:1], tolerance=0.05), D.attend(keys[:1]), atol=0.05, rtol=0
    )


def test_sharp_queries_among_flat_ones_are_answered_from_codes(unread):
    rng = np.random.default_rng(5)
    keys, value = random_keys(rng, "unit", 400), rng.normal(size=(400, 2)).astype(np.float32)
    rows = store_rows(keys, value)
    query = keys[:4] * np.array([[0.1], [60.0], [0.2], [90.0]], np.float32)
    result = attend_rows(rows, query, score="dot", weighting="softmax", tolerance=0.02)
    true = Softmax()(query.astype(float) @ keys.astype(float).T) @ value
    assert np.abs(result - true).max() <= 0.02 * np.ptp(value)
    assert isinstance(rows.bounds_cache["flat", 2], block_sums.BlockMeans)


def test_sums_are_made_when_as_many_flat_queries_have_come_as_pay_for_them():
    keys = random_keys(np.random.default_rng(6), "unit", 200)
    rows, options = store_rows(keys, keys[:, :1]), {"score": "dot", "weighting": "softmax"}
    for size, come in ((90.0, 0), (0.1, 1), (90.0, 1), (0.1, 2)):
        attend_rows(rows, size * keys[:1], **options, tolerance=0.02)
        assert rows.bounds_cache["flat", 1].query_count == come < WIDTH / block_sums.PAYBACK_DIVISOR
    attend_rows(rows, 0.1 * keys[:1], **options, tolerance=0.02)
    assert isinstance(rows.bounds_cache["flat", 1], block_sums.BlockMeans)


@pytest.mark.parametrize(
    ("score", "weighting", "allowed"),
    [
        (scores.Cosine(10.0), Softmax(), False),
        (scores.Gaussian(9.0), Softmax(), False),
        (scores.ScaledDot(0.1, softcap=5.0), Softmax(), False),
        (scores.Gated(np.zeros(WIDTH), np.full(WIDTH, 0.02)), Softmax(), False),
        (scores.ScaledDot(0.1), qkv.weightings.TopK(3), False),
        (scores.ScaledDot(0.1), Softmax(), True),
    ],
    ids=["factor", "bias", "cap", "gate", "topk", "where"],
)
def test_what_has_no_such_sums_is_asked_of_codes(unread, score, weighting, allowed):
    keys = random_keys(np.random.default_rng(7), "unit", 200)
    rows = store_rows(keys, keys[:, :1])
    rows.allowed = np.arange(200) % 2 == 0 if allowed else None
    result = attend_rows(rows, keys[:1], score=score, weighting=weighting, tolerance=0.02)
    live = None if rows.allowed is None else rows.allowed[None]
    true = weighting(score(keys[:1].astype(float), keys.astype(float)), live) @ keys[:, :1]
    assert np.abs(result - true).max() <= 0.02 and not rows.bounds_cache.get(("flat", 1))
