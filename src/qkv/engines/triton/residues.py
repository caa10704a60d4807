"""Strided masks as dense calls: queries and keys with the same remainder form a call of their own.

Query i sees key j if i − j is a multiple of the step. So the rows of each remainder attend to each
other and to nothing else. They become lanes of a call without a mask, which has 1 / step of the
pairs. Its arrays are views of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.masks import Mask
from qkv.masks.band import Band, Dilated, Strided
from qkv.scores.functions import EvaluatedScore
from qkv.util.types import Array

MIN_SPLIT_PAIRS = 2**20
"""Pairs of a head from which the views take less time than the pairs that they save."""


def find_step(call: Call) -> int | None:
    """Return the step of the mask if the rows of a call can be split by their remainders."""
    rule: Any = call.rule
    if type(rule) not in (Strided, Dilated) or rule.step < 2 or call.bias is not None:
        return None
    if call.value is None or call.dropout or call.wants_lse or call.wants_weights:
        return None
    if call.score.needs_positions or isinstance(call.score, EvaluatedScore):
        return None
    if tree.array_leaves(call.fw, (call.score, call.weighting)):  # may have a number per row
        return None
    if call.at is not None or call.fw.is_traced(call.query) or len(call.lead) != 2:
        return None
    if any(x.shape[:-2] != call.lead for x in (call.query, call.key, call.value)):
        return None
    divides = call.n % rule.step == 0 == call.m % rule.step
    return rule.step if divides and call.n * call.m >= MIN_SPLIT_PAIRS else None


def split_call(call: Call, step: int) -> Call:
    """Return the call in which each remainder of the positions is a head."""
    query, key, value = (_split_rows(x, step) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, rule=_inner_rule(call.rule))


def build_split_runner(
    call: Call, step: int, build_runner: Callable[[Call], Callable[[Call], Any]]
) -> Callable[[Call], tuple[Array, Array | None, None]]:
    """Return a function that runs calls like this one; lengths may differ."""
    run_split, run_whole = build_runner(split_call(call, step)), build_runner(call)

    def run(call: Call) -> tuple[Array, Array | None, None]:
        if find_step(call) is None:
            return run_whole(call)[0], None, None
        out = _join_rows(run_split(split_call(call, step))[0])
        return out.view(*call.lead, call.n, -1), None, None

    return run


def build_split_replay(
    call: Call, step: int, build_replay_runner: Callable[[Call], Callable[..., Any] | None]
) -> Callable[..., Array | None] | None:
    """Return the function of `triton.build_replay_runner` for calls like this one, or None."""
    replay = build_replay_runner(split_call(call, step))
    if replay is None:
        return None

    def run_or_replay(
        query: Any, key: Any, value: Any, score: Any, mask: Any, build: Callable[[], Call]
    ) -> Array | None:
        n, m = query.shape[2], key.shape[2]
        if n % step or m % step or n * m < MIN_SPLIT_PAIRS:
            return None
        rows = (_split_rows(x, step) for x in (query, key, value))
        rule = _inner_rule(mask)
        out = replay(*rows, score, rule, lambda: split_call(build(), step))
        return None if out is None else _join_rows(out).view(*query.shape[:3], -1)

    return run_or_replay


def _inner_rule(rule: Any) -> Mask | None:
    return Band(rule.window, rule.window) if type(rule) is Dilated else None


def _split_rows(x: Any, step: int) -> Any:
    """Return rows (B, H, n, w) as (B · H, step, n / step, w)."""
    b, h, n, width = x.shape
    return x.reshape(b * h, n // step, step, width).transpose(1, 2)


def _join_rows(x: Any) -> Any:
    """Return rows (lanes, step, n / step, w) in the order of their positions."""
    return x.transpose(1, 2).contiguous()
