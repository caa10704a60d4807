"""Rows of different lengths, and sparse vectors against the dense ones that they stand for."""

import numpy as np
import pytest

from qkv.frameworks.ragged import (
    DenseAndSparse,
    Ragged,
    build_sparse,
    concat_ragged,
    entry_positions,
    entry_values,
    gather_columns,
    group_words,
)

RNG = np.random.default_rng(0)


def lists(rows: Ragged) -> list[list[int]]:
    return [row.tolist() for row in rows.split_rows()]


ROWS = Ragged(np.arange(10, 16), np.array([0, 2, 2, 5, 6]))


@pytest.mark.parametrize(
    ("some", "expected"),
    [
        (slice(1, 3), [[], [12, 13, 14]]),
        (slice(3, 3), []),
        (slice(2, 99), [[12, 13, 14], [15]]),
        (np.array([True, True, False, True]), [[10, 11], [], [15]]),
        (np.array([3, 0, 3]), [[15], [10, 11], [15]]),
        (np.zeros(4, bool), []),
    ],
)
def test_some_of_the_rows(some: slice | np.ndarray, expected: list[list[int]]) -> None:
    assert (
        lists(ROWS[some]) == lists(ROWS[some].trim_flat()) == lists(ROWS[some].copy()) == expected
    )
    assert ROWS[some].trim_flat().starts[0] == 0
    assert len(ROWS[some]) == len(expected)


def test_parts_are_joined_and_cut_again() -> None:
    assert lists(concat_ragged([ROWS[2:], ROWS[:0], ROWS[:2]])) == [
        [12, 13, 14],
        [15],
        [10, 11],
        [],
    ]
    assert lists(concat_ragged([ROWS[2:], ROWS])[1:3][1:]) == [[10, 11]]


def random_sparse(rows: int, width: int) -> tuple[np.ndarray, Ragged, np.ndarray]:
    """Vectors with few numbers, dense and sparse, and the places that stand for their columns."""
    dense = RNG.normal(size=(rows, width)).astype(np.float32) * (RNG.random((rows, width)) < 0.2)
    place = np.sort(RNG.choice(2**32, width, replace=False).astype(np.uint32))
    row, at = np.nonzero(dense)
    return dense, build_sparse(row, place[at], dense[row, at], rows), place


def test_products_and_distances_are_those_of_the_dense_vectors() -> None:
    key, kept, place = random_sparse(50, 40)
    query = np.zeros((3, 40), np.float32)
    query[:, 5:12] = RNG.normal(size=(3, 7))
    positions = place[5:12]
    short, long = query[:, 5:12], gather_columns(kept, positions)
    np.testing.assert_array_equal(long[:, :-1], key[:, 5:12])
    np.testing.assert_allclose(short @ long[:, :-1].T, query @ key.T, atol=1e-6)
    own = np.concatenate([short, np.zeros((3, 1), np.float32)], axis=1)
    far = ((own[:, None] - long) ** 2).sum(axis=-1)
    np.testing.assert_allclose(far, ((query[:, None] - key) ** 2).sum(axis=-1), rtol=1e-5)


def test_entries_are_given_back_to_the_last_bit() -> None:
    _, kept, _ = random_sparse(5, 9)
    row = np.repeat(np.arange(5), np.diff(kept.starts))
    again = build_sparse(row, entry_positions(kept), entry_values(kept), 5)
    np.testing.assert_array_equal(again.flat, kept.flat)
    np.testing.assert_array_equal(again.starts, kept.starts)


def test_places_that_share_their_low_bits_are_distinguished() -> None:
    place = np.array([7, 7 + (1 << 16), 7 + (1 << 20)])
    matrix = build_sparse(np.zeros(3, int), place, np.array([1.0, 2.0, 3.0]), 1)
    assert gather_columns(matrix, place[1:2].astype(np.uint32)).tolist() == [
        [2.0, pytest.approx(10**0.5)]
    ]
    assert gather_columns(matrix, np.zeros(0, np.uint32)).tolist() == [[pytest.approx(14**0.5)]]


@pytest.mark.parametrize("has_norm", [False, True])
def test_groups_are_columns_of_their_own(has_norm: bool) -> None:
    """With and without the array: the column of a group is 0 unless the row has all its words."""
    key, kept, place = random_sparse(200, 30)
    positions, row = place[3:9], np.array([0, 0, 1, 2, 2])
    members = np.array([*place[3:5], place[8], place[6], place[20]])
    groups = group_words(positions, row, members, 0.5, 2.0)
    full = DenseAndSparse(RNG.normal(size=(200, 4)).astype(np.float32), kept, groups)
    array = np.asarray(full)
    assert full.shape == array.shape == (200, 4 + 6 + 3 + 1)
    has_all = [(key[:, 3:5] != 0).all(axis=1), key[:, 8] != 0, np.zeros(200, bool)]
    share = np.array([2, 1, 2])[:, None] / np.maximum(np.diff(kept.starts), 1)
    np.testing.assert_allclose(array[:, 10:13].T, np.where(has_all, 0.5 + share, 0), rtol=1e-6)
    assert 0 < np.count_nonzero(array[:, 10]) < 200
    query = RNG.normal(size=(3, 14)).astype(np.float32)
    query[:, -1] *= has_norm
    np.testing.assert_allclose(full.inner_products(query), query @ array.T, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(full[5:9]), array[5:9])


def test_a_wide_array_is_cut_before_it_is_made() -> None:
    _, kept, place = random_sparse(20, 30)
    dense = RNG.normal(size=(20, 4)).astype(np.float16)
    full = DenseAndSparse(dense, kept, place[3:9])
    assert full.shape == np.asarray(full).shape == (20, 11) and len(full) == 20
    np.testing.assert_array_equal(np.asarray(full[4:9]), np.asarray(full)[4:9])
    chosen = RNG.random(20) < 0.5
    np.testing.assert_array_equal(np.asarray(full[chosen], np.float64), np.asarray(full)[chosen])
