"""Keys that several hold, each a thread here; as processes of a group they are in tests/cluster."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import scores  # noqa: E402
from qkv.attention import attend_sharded  # noqa: E402
from qkv.errors import CombinationError  # noqa: E402
from qkv.util.types import ShardPosition  # noqa: E402
from qkv.weightings import Softmax  # noqa: E402

KEYS, QUERIES = (4, 0, 3), (2, 3, 0)
CASES = {
    "softmax": {},
    "softmax of all before": {"mask": "causal"},
    "entmax15, which searches its rows": {"weighting": "entmax15"},
    "distances": {"score": scores.Gaussian(1.5), "weighting": "hard"},
}


class ThreadRank:
    """One of several threads: each writes to a board and reads what all have written."""

    def __init__(self, rank, rows, board, barrier):
        self.rank, self.query_counts, self.board, self.barrier = rank, rows, board, barrier

    def _all(self, mine):
        self.board[self.rank] = mine
        self.barrier.wait(60)
        result = list(self.board)
        self.barrier.wait(60)
        return result

    def all_reduce_state(self, state, merge):
        return reduce(merge, self._all(state))

    def all_reduce_sum(self, arrays):
        return tuple(map(sum, zip(*self._all(arrays), strict=True)))

    def ring_shift(self, arrays, rows):
        result = self._all(arrays)[self.rank - 1]
        assert {x.shape[-2] for x in result} == {rows}
        return tuple(result)

    def all_gather_rows(self, array):
        return torch.cat(self._all(array), -2)


def starts(sizes):
    return [sum(sizes[:i]) for i in range(len(sizes))]


def arrays():
    chance = torch.Generator().manual_seed(1)
    shapes = (sum(QUERIES), 4), (sum(KEYS), 4), (sum(KEYS), 2)
    return [torch.randn(2, *x, dtype=torch.float64, generator=chance) for x in shapes]


def attend_in_threads(options, rows=()):
    """Output and gradients of Σ out², put together from what each thread finds."""
    query, key, value = arrays()
    n, m, board, barrier = sum(QUERIES), sum(KEYS), [None] * len(KEYS), threading.Barrier(len(KEYS))

    def one(rank):
        first, size = (starts(rows)[rank], rows[rank]) if rows else (0, n)
        col, count = starts(KEYS)[rank], KEYS[rank]
        parts = (query[:, first : first + size], *(x[:, col : col + count] for x in (key, value)))
        inputs = [x.clone().requires_grad_() for x in parts]
        across = ThreadRank(rank, rows, board, barrier)
        try:
            out = attend_sharded(across, ShardPosition(first, col, n, m), *inputs, **options)
            slopes = torch.autograd.grad((out**2).sum(), inputs, materialize_grads=True)
        except BaseException:
            barrier.abort()
            raise
        return out.detach(), *slopes

    with ThreadPoolExecutor(len(KEYS)) as pool:
        out, dquery, *rest = zip(*pool.map(one, range(len(KEYS))), strict=True)
    if not rows:
        out, dquery = out[:1], dquery[:1]  # the same everywhere
    return [torch.cat(x, -2) for x in (out, dquery, *rest)]


@pytest.mark.parametrize("rows", [(), QUERIES], ids=["the same queries", "queries of one's own"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_what_several_hold_is_attended_to_as_one(options, rows):
    inputs = [x.requires_grad_() for x in arrays()]
    out = qkv.attend(*inputs, **options, engine="dense")
    slopes = torch.autograd.grad((out**2).sum(), inputs, materialize_grads=True)
    for actual, want in zip(attend_in_threads(options, rows), (out.detach(), *slopes), strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-9, atol=1e-9)


def test_a_number_for_each_query_does_not_travel():
    query, key, value = arrays()
    across = ThreadRank(0, (5,), [None], threading.Barrier(1))
    each = Softmax(torch.ones(2, 5, 1, dtype=torch.float64))
    with pytest.raises(CombinationError, match="not supported with sharded queries"):
        attend_sharded(across, ShardPosition(0, 0, 5, 7), query, key, value, weighting=each)
