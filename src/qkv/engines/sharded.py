"""Attention over keys that several processes hold. Keys and values never leave their process.

Each process reduces its keys to a state of the weighting.

- Replicated queries: the states of all processes are merged. In the backward pass, the gradients of
  the queries and of the score's arrays are summed over the processes.
- Sharded queries: the queries and their states travel around a ring, and each process adds its
  keys. In the backward pass they travel with their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from qkv import masks
from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.choice import choose_engine
from qkv.engines.streaming import (
    MAX_NUMBERS_PER_BLOCK,
    BlockPasses,
    block_size,
    build_tiling,
    hoist_captured_arrays,
    numbers_per_pair,
    run_backward,
)
from qkv.errors import CombinationError
from qkv.frameworks import tree
from qkv.frameworks.base import Tiling
from qkv.scores import has_user_code
from qkv.util.types import Array, Arrays, Gradients, ShardPosition, Span
from qkv.weightings import Softmax, State
from qkv.weightings.base import has_number_per_row

SEARCHED_KEYS_PER_BLOCK = 256
"""Keys per block if the weighting searches thresholds, which all processes do together."""


SINGLE_ROW = Span(0, 1)


class ProcessGroup(Protocol):
    """The processes that hold the keys. All of them call its methods in the same order."""

    rank: int
    query_counts: Sequence[int]
    """The number of queries of each process; empty if the queries are replicated."""

    def all_reduce_state(self, state: State, merge: Callable[[State, State], State]) -> State:
        """Return the states of all processes, merged in the order of the ranks."""
        ...

    def all_reduce_sum(self, arrays: Sequence[Array]) -> Arrays:
        """Return the sums over all processes."""
        ...

    def ring_shift(self, arrays: Sequence[Array], rows: int) -> Arrays:
        """Send arrays to the next process; return (…, rows, ·) arrays from the previous process."""
        ...

    def all_gather_rows(self, array: Array) -> Array:
        """Return the rows (…, n_i, ·) of all processes, concatenated in the order of the ranks."""
        ...


def run(call: Call, group: ProcessGroup) -> tuple[Array, Array | None]:
    """Return the output and, if requested, the log-sum-exp."""
    call = calls.ensure_seed(call)
    fw = call.fw
    if group.query_counts and any(
        has_number_per_row(x, call.n) for x in tree.array_leaves(fw, call.weighting)
    ):
        raise CombinationError(
            "weighting: an array with one number for each query is not supported with sharded "
            "queries: replicate the queries, or use one number for each head"
        )
    call = _hoist_arrays(call)
    strategy_class = (
        (GatheredQueries if call.weighting.needs_search else RingQueries)
        if group.query_counts
        else ReplicatedQueries
    )
    leaves = tree.array_leaves(fw, call)
    strategy = strategy_class(group, fw.needs_gradient(leaves))

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.replace_arrays(fw, call, arrays)
        out, saved = strategy.forward(fresh)
        if call.weighting.raises_on_empty:
            call.weighting.check_row_state(saved)
        return ((out, call.weighting.lse_from_state(saved)) if call.wants_lse else (out,)), saved

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        return tuple(strategy.backward(tree.replace_arrays(fw, call, arrays), saved, gradients))

    def reference(*arrays: Array) -> Arrays:
        raise CombinationError(
            "second derivatives are not supported for attention over keys of several processes: "
            "gather the keys and call attend"
        )

    outputs = fw.run_differentiable(forward, backward, reference, leaves)
    return outputs[0], outputs[1] if call.wants_lse else None


def _hoist_arrays(call: Call) -> Call:
    """Return a call whose leaves include the arrays that the user's functions capture.

    To find these arrays, a process without queries or keys traces the functions on a row of zeros.
    """
    fw = call.fw

    def at_least_one_row(x: Array) -> Array:
        shape = fw.static_shape(x)
        return x if shape[-2] else fw.full((*shape[:-2], 1, shape[-1]), 0.0, x)

    hoisted = hoist_captured_arrays(
        replace(call, query=at_least_one_row(call.query), key=at_least_one_row(call.key)),
        [(SINGLE_ROW, [SINGLE_ROW])],
    )
    return replace(call, score=hoisted.score, rule=hoisted.rule)


@dataclass(eq=False)
class ReplicatedQueries:
    """The strategy for queries that are the same on all processes."""

    group: ProcessGroup
    needs_gradient: bool
    backward_function: BackwardFunction | None = None
    """The backward function from the forward pass. With it, the engine does not run again."""

    def forward(self, call: Call) -> tuple[Array, State]:
        single = detach_from_group(call) if self.needs_gradient else None
        if single is None:
            thresholds, state = fold_local_keys(call, self.group)
        else:
            thresholds, (state, self.backward_function) = (), run_with_backward(single)
        return finish_state(
            call, self.group.all_reduce_state(state, call.weighting.merge), thresholds
        )

    def backward(self, call: Call, saved: State, gradients: Arrays) -> list[Array | None]:
        local = local_gradients(call, saved, gradients, self.backward_function)
        summed = [0, *range(3, 3 + len(tree.array_leaves(call.fw, (call.score, call.weighting))))]
        totals = iter(self.group.all_reduce_sum([local[i] for i in summed]))
        return [next(totals) if i in summed else x for i, x in enumerate(local)]


class GatheredQueries(ReplicatedQueries):
    """The strategy for sharded queries if the weighting searches a threshold for each row.

    A search reads all keys several times, so every process gathers and processes all queries.
    """

    def gather_call(self, call: Call) -> Call:
        assert call.at is not None
        query = self.group.all_gather_rows(call.query)
        return replace(call, query=query, at=call.at._replace(row=0))

    def slice_own_rows(self, call: Call, x: Array) -> Array:
        assert call.at is not None
        return x[..., call.at.row : call.at.row + call.n, :]

    def forward(self, call: Call) -> tuple[Array, State]:
        out, saved = super().forward(self.gather_call(call))
        return self.slice_own_rows(call, out), tuple(self.slice_own_rows(call, x) for x in saved)

    def backward(self, call: Call, saved: State, gradients: Arrays) -> list[Array | None]:
        gather, gathered = self.group.all_gather_rows, self.gather_call(call)
        saved, gradients = tuple(map(gather, saved)), tuple(map(gather, gradients))
        local = local_gradients(gathered, saved, gradients)
        local[0] = self.slice_own_rows(call, self.group.all_reduce_sum(local[:1])[0])
        return local


@dataclass(eq=False)
class RingQueries:
    """The strategy for sharded queries with other weightings.

    The queries travel around a ring of all processes.
    """

    group: ProcessGroup
    needs_gradient: bool

    def visiting_positions(self, call: Call) -> list[ShardPosition]:
        """Return the positions of the queries that visit this process, its own first."""
        assert call.at is not None
        rows, rank = self.group.query_counts, self.group.rank
        owners = [(rank - step) % len(rows) for step in range(len(rows))]
        return [call.at._replace(row=sum(rows[:owner])) for owner in owners]

    def visiting_call(self, call: Call, query: Array, at: ShardPosition) -> Call:
        """Return the call for visiting queries at this position."""
        bias = call.bias
        if bias is not None:
            bias = call.fw.slice_span(bias, Span(at.row, call.fw.static_shape(query)[-2]), -2)
        return replace(call, query=query, bias=bias, at=at)

    def next_row_count(self, step: int) -> int:
        """Return how many queries visit this process in the next step."""
        rows = self.group.query_counts
        return rows[(self.group.rank - step - 1) % len(rows)]

    def forward(self, call: Call) -> tuple[Array, State]:
        query, state = call.query, None
        visits = self.visiting_positions(call)
        for step, at in enumerate(visits):
            _, local = fold_local_keys(self.visiting_call(call, query, at), None)
            state = local if state is None else call.weighting.merge(state, local)
            is_last = step == len(visits) - 1
            sent = state if is_last else (query, *state)
            received = self.group.ring_shift(sent, self.next_row_count(step))
            query, state = (call.query, received) if is_last else (received[0], received[1:])
        assert state is not None
        return finish_state(call, state, ())

    def backward(self, call: Call, saved: State, gradients: Arrays) -> list[Array | None]:
        fw, visits = call.fw, self.visiting_positions(call)
        counts = len(saved), len(gradients)
        query, dquery = (
            call.query,
            fw.full(fw.static_shape(call.query), 0.0, upcast_array(call, call.query)),
        )
        row_data = (*saved, *gradients)
        total: list[Array | None] | None = None
        for step, at in enumerate(visits):
            visiting = self.visiting_call(call, query, at)
            visiting_saved, visiting_gradients = row_data[: counts[0]], row_data[counts[0] :]
            query_part, *others = local_gradients(visiting, visiting_saved, visiting_gradients)
            dquery = dquery + query_part
            others = self.scatter_bias_gradient(call, at, others)
            total = others if total is None else [*map(_add_optional, total, others)]
            is_last = step == len(visits) - 1
            sent = (dquery,) if is_last else (dquery, query, *row_data)
            dquery, *received = self.group.ring_shift(sent, self.next_row_count(step))
            query, row_data = (received[0], tuple(received[1:])) if received else (query, row_data)
        assert total is not None
        return [dquery, *total]

    def scatter_bias_gradient(
        self, call: Call, at: ShardPosition, gradients: Sequence[Array | None]
    ) -> list[Array | None]:
        """Return the gradients; the bias gradient of the visiting rows is extended to all rows."""
        if call.bias is None:
            return list(gradients)
        fw = call.fw
        index = -1 - len(tree.array_leaves(fw, call.seed))
        visiting = gradients[index]
        total = fw.new_accumulator(call.bias)
        if visiting is not None:
            total = fw.add_to_span(total, visiting, Span(at.row, visiting.shape[-2]), None)
        return [
            fw.accumulator_total(total) if i == len(gradients) + index else x
            for i, x in enumerate(gradients)
        ]


def _add_optional(one: Array | None, two: Array | None) -> Array | None:
    return two if one is None else one if two is None else one + two


def local_tiling(call: Call) -> Tiling:
    """Return the blocks of this process's keys.

    If the weighting searches thresholds, all processes use the same blocks of queries, because they
    search each block together.
    """
    if call.rule is not None:
        call = replace(call, rule=masks.localize_mask(call.rule, call.at))
    if not call.weighting.needs_search:
        return build_tiling(call, *block_size(call))
    numbers_per_key = max(math.prod(call.lead) * numbers_per_pair(call), 1)
    rows = max(
        min(8 * MAX_NUMBERS_PER_BLOCK // (numbers_per_key * SEARCHED_KEYS_PER_BLOCK), call.n), 1
    )
    cols = max(8 * MAX_NUMBERS_PER_BLOCK // (numbers_per_key * rows), SEARCHED_KEYS_PER_BLOCK)
    return build_tiling(call, rows, cols)


def fold_local_keys(call: Call, group: ProcessGroup | None) -> tuple[State, State]:
    """Return the thresholds of all keys of the group, and the state of this process's keys.

    The group is needed only if the weighting searches thresholds.
    """
    single = detach_from_group(call)
    if single is not None:
        return (), _softmax_state(single, *choose_engine(single).run(single)[:2])
    call = call.upcast()
    counts: set[int] = set()

    def pool_rows(rows: Span, keys: list[Span]) -> Arrays:
        passes = BlockPasses(call, rows, keys)

        def fold_everywhere(lift: Any, merge: Any, init: Any) -> State:
            assert group is not None
            return group.all_reduce_state(passes.fold(lift, merge, init), merge)

        thresholds = passes.weighting.find_threshold(fold_everywhere)
        counts.add(len(thresholds))
        return *thresholds, *passes.state(thresholds)

    results = call.fw.map_tiles(pool_rows, local_tiling(call) or [(Span(0, 0), [])])
    (count,) = counts
    return results[:count], results[count:]


def local_gradients(
    call: Call, saved: State, gradients: Arrays, backward: BackwardFunction | None = None
) -> list[Array | None]:
    """Return one gradient for each array of the call, from this process's keys."""
    if backward is None:
        single = detach_from_group(call)
        backward = None if single is None else run_with_backward(single)[1]
    if backward is None:
        call = call.upcast()
        return list(run_backward(call, local_tiling(call), saved, gradients, None))
    return [*backward(saved, gradients), *[None] * len(tree.array_leaves(call.fw, call.rule))]


def finish_state(call: Call, state: State, thresholds: State) -> tuple[Array, State]:
    """Return the output, and the state of each row that the backward pass needs."""
    out, row_state, centre = call.weighting.finish(state, thresholds)
    return out, (*row_state, *(() if centre is None else (centre,)))


BackwardFunction = Callable[[State, Arrays], Arrays]
"""Maps the saved state over all keys, and the output gradients, to gradients of the arrays."""


def detach_from_group(call: Call) -> Call | None:
    """Return the call without its position among the shards; None if the result depends on it."""
    needs_position = call.dropout or call.bias is not None or has_user_code(call.score)
    needs_position = needs_position or call.score.needs_positions
    if type(call.weighting) is not Softmax or needs_position or 0 in (*call.lead, call.n, call.m):
        return None
    rule, at = call.rule, call.at
    if rule is not None and at is not None:
        verdict = masks.localize_mask(rule, at).block_verdict(
            Span(0, call.n), Span(0, call.m), call.n, call.m
        )
        if verdict is not True and not (masks.is_plain_causal(rule) and at.row == at.col):
            return None
        rule = None if verdict else rule
    return replace(call, rule=rule, at=None, wants_lse=True)


def run_with_backward(call: Call) -> tuple[State, BackwardFunction]:
    """Return the state of a call that runs on one process, and its backward function."""
    fw, leaves = call.fw, tree.array_leaves(call.fw, call)

    def concat_output_and_lse(*arrays: Array) -> Array:
        fresh = tree.replace_arrays(fw, call, arrays)
        result = choose_engine(fresh).run(fresh)
        return fw.xp.concat([upcast_array(call, x) for x in result[:2]], axis=-1)

    result, pull = fw.vjp(concat_output_and_lse, *leaves)
    local_out, lse = result[..., :-1], result[..., -1:]

    def pull_gradients(saved: State, gradients: Arrays) -> Arrays:
        top, total, out = saved
        share = fw.xp.exp(lse - fw.replace_nonfinite(top)) / fw.safe_divisor(total)
        lse_gradient = fw.row_sum((local_out - out) * gradients[0])
        if len(gradients) > 1:
            lse_gradient = lse_gradient + gradients[1]
        pulled = pull(fw.xp.concat([share * gradients[0], share * lse_gradient], axis=-1))
        pairs = (
            (upcast_array(call, x), gradient) for x, gradient in zip(leaves, pulled, strict=True)
        )
        return tuple(
            fw.full(fw.static_shape(x), 0.0, x)
            if gradient is None
            else upcast_array(call, gradient)
            for x, gradient in pairs
        )

    return _softmax_state(call, local_out, lse), pull_gradients


def _softmax_state(call: Call, out: Array | None, lse: Array | None) -> State:
    fw = call.fw
    assert out is not None and lse is not None
    lse = upcast_array(call, lse)
    return lse, fw.astype(lse > -float("inf"), fw.dtype_name(lse)), upcast_array(call, out)


def upcast_array(call: Call, x: Array) -> Array:
    """Return x in the dtype of sums: 16-bit floats become float32."""
    fw = call.fw
    return fw.astype(x, "float32") if fw.dtype_name(x) in ("float16", "bfloat16") else x
