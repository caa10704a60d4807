"""Vectors that are kept in 8 bits: what they are worth, who gets them, and stores without them."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.database.encoders import Characters, Heads, Learned, Numbers, resolve
from qkv.database.storage import limits, writer
from qkv.database.table import encoding, quantization

TITLES = [
    f"{a} {b} {c}" for a in ("old", "new") for b in ("man", "sea", "town") for c in "abcdefghij"
]


def test_each_number_is_right_to_a_254th_of_the_largest_of_its_row():
    x = np.random.default_rng(0).normal(size=(50, 33)) * np.logspace(-20, 20, 50)[:, None]
    x[3] = 0
    code, scale = quantization.quantize_int8(x.astype(np.float32))
    assert code.dtype == np.int8 and scale.dtype == np.float32
    top = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(code * scale[:, None].astype(np.float64) - x) <= top / 253.9).all()
    assert np.abs(code).max() == 127 and not code[3].any()


def test_the_smallest_numbers_keep_their_codes_until_float32_has_no_inverse():
    code, scale = quantization.quantize_int8(
        np.array([[127 * 2e-37, -2e-37], [127 * 5e-38, 0]], np.float32)
    )
    assert code.tolist() == [[127, -1], [0, 0]]
    np.testing.assert_allclose(scale, [2e-37, 5e-38], rtol=1e-6)


def test_a_vector_that_is_not_finite_stays_so():
    code, scale = quantization.quantize_int8(np.array([[1.0, np.nan], [1.0, np.inf]], np.float32))
    assert not np.isfinite(scale).any() and not code.any()


@pytest.mark.parametrize(
    ("encoder", "rounded"),
    [
        (Characters(64), True),
        (Heads([Characters(64), Characters(32)]), True),
        (Learned.from_base(Characters(64), rows=3), True),
        (Heads([Characters(64), Numbers()]), False),
        (Numbers(), False),
        (resolve(lambda keys: np.ones((len(keys), 2))), False),
    ],
)
def test_vectors_that_are_made_of_text_here_are_rounded(encoder, rounded):
    assert encoder.int8_safe is rounded


@pytest.mark.parametrize("score", [None, "cosine", "gaussian", scores.ScaledDot(9.0, softcap=5.0)])
@pytest.mark.parametrize("gone", [[], TITLES[:7]])
def test_what_is_asked_is_compared_with_the_rounded_vectors(score, gone):
    D = qkv.Database({title: i for i, title in enumerate(TITLES)}, encoder=Characters(64))
    assert D.info()["vectors"] == "64 int8"
    if gone:
        D.remove(gone)
    view, query = D._view, "old sea c"
    code, scale = (view.snapshot.read_tensor(name, view.ids) for name in ("code", "scale"))
    key = code.astype(np.float64) * scale[:, None]
    chosen = view.encoder.default_score(len(D)) if score is None else scores.resolve(score)
    alpha = qkv.weights(view.encoder.encode_query([query]).astype(np.float64), key, score=chosen)
    value = alpha @ np.arange(len(gone), len(TITLES))
    options = {} if score is None else {"score": score}
    np.testing.assert_allclose(D.ask(query, **options).weights, alpha[0], rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(D.attend(query, **options), value, rtol=1e-4)


@pytest.mark.parametrize("softcap", [1e37, 1e300])
def test_a_softcap_that_float32_does_not_hold_costs_no_proof(softcap):
    key = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    D = qkv.Database(key, np.arange(300), precision="int8")
    plain, capped = (
        D.ask(
            key[3],
            score=scores.ScaledDot(softcap=cap),
            weighting=qkv.weightings.Softmax(0.01),
            tolerance=0.5,
        )
        for cap in (None, softcap)
    )
    assert (capped.value, capped.error_bound) == (plain.value, plain.error_bound)


@pytest.mark.parametrize("encoder_name", ["text", "exact"])
def test_keys_that_threads_share_are_encoded_as_by_one(monkeypatch, encoder_name):
    encoder, keys, progress = resolve(encoder_name).fit(TITLES), TITLES * 9, []
    precision = quantization.VectorPrecision(is_int8=True)
    want = encoding.encode_tensors(encoder, keys, precision, 0)
    monkeypatch.setattr(encoding, "KEYS_PER_BLOCK", 7)
    made = encoding.encode_keys(encoder, keys, precision, 0, lambda *at: progress.append(at))
    assert (
        made.keys() == want.keys() and progress == sorted(progress) and progress[-1] == (540, 540)
    )
    for name, tensor in want.items():
        parts = [(x.flat, x.starts) if name == "sparse" else (x,) for x in (tensor, made[name])]
        for one, other in zip(*parts, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.fixture
def small(monkeypatch):
    """Sizes with which a few rows are many."""
    monkeypatch.setattr(encoding, "KEYS_PER_BLOCK", 50)
    monkeypatch.setattr(writer, "MIN_THREAD_BYTES", 1)
    monkeypatch.setattr(limits, "MAX_BUFFERED_ROWS", 10)
    monkeypatch.setattr(limits, "MAX_SEGMENT_BYTES", 120 * 256)


VECTORS = np.random.default_rng(1).normal(size=(300, 40)).astype("f4")


@pytest.mark.parametrize("place", [None, "new"])
def test_codes_that_are_made_while_rows_are_written_are_theirs(tmp_path, small, place):
    with qkv.Database() if place is None else qkv.open(tmp_path / place) as D:
        D.add(VECTORS[:290], np.arange(290.0))
        D.add(VECTORS[290:], np.arange(290.0, 300))
        parts = list(D._view.snapshot.iterate_segments())
        assert len(parts) > 2 and sum(len(part.ids) for part in parts) == 300
        for part in parts:
            code = part.tensors["code"]
            np.testing.assert_array_equal(code, VECTORS[part.ids])
            for name, want in quantization.quantize_with_bounds(code, int(part.ids[0])).items():
                np.testing.assert_array_equal(part.tensors[name], want)
        near, exact = D.ask(VECTORS[7], tolerance=1e-3), D.ask(VECTORS[7])
        assert 0.5 * np.abs(near.weights - exact.weights).sum() <= near.error_bound <= 1e-3


def test_vectors_that_are_the_keys_are_not_encoded_anew_when_they_have_doubled():
    D = qkv.Database(VECTORS[:20], np.arange(20.0))
    D.add(VECTORS[20:], np.arange(20.0, 300))
    assert [version.what for version in D.versions()] == ["add", "add"]


def test_rows_whose_codes_cannot_be_made_change_nothing(tmp_path, small, monkeypatch):
    def fails(vectors, first, with_codes=True, near=quantization.quantize_with_bounds):
        if first > 100:
            raise MemoryError("no room for codes")
        return near(vectors, first, with_codes)

    with qkv.open(tmp_path / "new") as D:
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no room"):
            patch.setattr(quantization, "quantize_with_bounds", fails)
            D.add(VECTORS, np.arange(300.0))
        assert len(D) == 0 and not list(D.path.glob("*.safetensors*"))
        D.add(VECTORS, np.arange(300.0))
        assert D[VECTORS[299]] == 299
