"""One request, checked and complete, and the arithmetic that every engine starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

import numpy as np

from qkv import arrays
from qkv.arrays.base import FLOATS, Framework
from qkv.arrays.tree import derived, map_arrays
from qkv.engines.dropout import keep_factor
from qkv.errors import CombinationError, DtypeError, ShapeError
from qkv.masks import Mask
from qkv.scores import Score, evaluate
from qkv.types import Array, Block, Shape, Span
from qkv.weightings import Weighting


@dataclass(frozen=True)
class Call:
    """query (*lead, n, d_q), key (…, m, d_k), value (…, m, d_v), and what to do with them.

    `lead` is the leading shape that all three broadcast to; its last axis is the heads, and a key
    or value with fewer heads is shared. `rule` and `bias` are the two halves of the mask.
    """

    query: Array
    key: Array
    value: Array | None
    score: Score
    weighting: Weighting
    rule: Mask | None = None
    bias: Array | None = None
    dropout: float = 0.0
    seed: Array | None = None
    tolerance: float | None = None
    wants_lse: bool = False
    wants_weights: bool = False

    @derived
    def fw(self) -> Framework:
        return arrays.of(self.query)

    @derived
    def lead(self) -> Shape:
        return self.fw.shape(self.query)[:-2]

    @derived
    def n(self) -> int:
        return self.fw.shape(self.query)[-2]

    @derived
    def m(self) -> int:
        return self.fw.shape(self.key)[-2]

    @derived
    def lowering(self) -> tuple[Score, float] | str:
        """The score as one that has a form, and a bound on its error; or why there is none."""
        traced = self.fw.tracing(self.query) or self.fw.tracing(self.key)
        if traced and self.score.ranged:
            return "the range of the arguments is not known while they are traced"
        wide = self.precise() if self.score.ranged else self
        dtype = self.fw.dtype(self.query)
        return wide.score.lowered(wide.query, wide.key, self.tolerance, dtype)

    def precise(self) -> Call:
        """The same call with 16-bit arrays widened, so that sums run in float32."""
        fw = self.fw
        if fw.dtype(self.query) not in ("float16", "bfloat16"):
            return self

        def widen(x: Array) -> Array:
            return fw.astype(x, "float32") if fw.dtype(x) in ("float16", "bfloat16") else x

        return map_arrays(fw, widen, self)


def build(query: Array, key: Array, value: Array | None, **rest: Any) -> Call:
    """A call whose shapes and dtypes fit, with the query broadcast to the full leading shape."""
    given = {"query": query, "key": key} | ({} if value is None else {"value": value})
    like = next((x for x in given.values() if arrays.is_array(x)), None)
    given = {name: as_array(name, x, like) for name, x in given.items()}
    fw = arrays.common(**given)
    dtypes = {name: fw.dtype(x) for name, x in given.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            raise DtypeError(f"{name} is an array of {dtype}: attention needs floats, so cast it")
        if dtype != dtypes["query"]:
            raise DtypeError(f"query is {dtypes['query']} but {name} is {dtype}: cast one of them")
    shapes = {name: fw.shape(x) for name, x in given.items()}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ShapeError(
                f"{name} must have at least two axes (…, rows, width), not shape {shape}; "
                f"one row is {name}[None, :], one column {name}[:, None]"
            )
    if value is not None and _differ(shapes["key"][-2], shapes["value"][-2]):
        raise ShapeError(
            f"key and value must have one row each per pair, but key has {shapes['key'][-2]} "
            f"and value {shapes['value'][-2]}"
        )
    lead = shapes["query"][:-2]
    for name in ("key", "value")[: len(given) - 1]:
        lead = _join_leads(lead, shapes[name][:-2], shapes["query"], name, shapes[name])
    rest["score"].check(shapes["query"], shapes["key"])
    query, key, value = (given.get(name) for name in ("query", "key", "value"))
    if 0 in (*lead, shapes["query"][-2], shapes["key"][-2]):
        parts = (query, key, value, rest["score"], rest["weighting"], rest.get("bias"))
        parts = map_arrays(fw, fw.inert, parts)
        query, key, value, rest["score"], rest["weighting"], rest["bias"] = parts
    if lead != shapes["query"][:-2]:
        query = fw.xp.broadcast_to(query, (*lead, *shapes["query"][-2:]))
    call = Call(query, key, value, **rest)
    if call.rule is not None:
        call.rule.check(lead, call.n, call.m)
    return call


def paired(score: Score, weighting: Weighting, bias: Array | None) -> Score:
    """The score as the weighting reads it, refused where the two mean nothing together."""
    reason = weighting.refuses(score, bias is not None)
    if reason:
        raise CombinationError(reason)
    return weighting.reads(score)


def as_array(name: str, x: Any, like: Array | None = None) -> Array:
    """x, where nested lists of numbers become floats like those beside them, or NumPy's."""
    if isinstance(x, list | tuple):
        try:
            host = np.asarray(x, dtype=float)
        except (TypeError, ValueError) as error:
            raise DtypeError(f"{name} is no rectangle of numbers: {error}") from None
        return (
            host
            if like is None
            else arrays.of(like).constant(host, like, arrays.of(like).dtype(like))
        )
    if not arrays.is_array(x):
        raise DtypeError(f"{name} must be an array or nested lists, not {type(x).__name__}")
    return arrays.of(x).plain(x)


def _differ(one: int | None, two: int | None) -> bool:
    return one is not None and two is not None and one != two


def _join_leads(lead: Shape, other: Shape, query: Shape, name: str, shape: Shape) -> Shape:
    """The leading shape of both; the last axis, the heads, may be shared."""
    size = max(len(lead), len(other))
    a, b = ((1,) * (size - len(x)) + tuple(x) for x in (lead, other))
    joined = []
    for axis, (x, y) in enumerate(zip(a, b, strict=True)):
        heads = axis == size - 1
        if x == y or y == 1 or x is None or y is None:
            joined.append(y if x is None else x)
        elif x == 1:
            joined.append(y)
        elif heads and y and x % y == 0:
            joined.append(x)
        else:
            raise ShapeError(
                f"query {query} and {name} {shape} do not go together: leading axes must be equal "
                f"or 1" + (", or the query's heads a multiple of the other's" if heads else "")
            )
    return tuple(joined)


def all_rows(call: Call) -> Span:
    return Span(0, call.fw.length(call.query, -2))


def all_cols(call: Call) -> Span:
    return Span(0, call.fw.length(call.key, -2))


def place(call: Call, rows: Span, cols: Span) -> Block:
    """Where a block lies, with the positions that masks and score_mods read."""
    fw, lead = call.fw, call.lead
    q = fw.positions(rows.start, rows.size, call.query)[:, None]
    k = fw.positions(cols.start, cols.size, call.query)[None, :]
    b = h = fw.positions(0, 1, call.query)[:, None]
    sizes = [fw.length(call.query, axis) for axis in range(len(lead))]  # known when a graph runs
    if lead:
        h = fw.positions(0, sizes[-1], call.query)[:, None, None]
    if len(lead) > 1:
        count = reduce(mul, sizes[:-1])
        b = fw.xp.reshape(fw.positions(0, count, call.query), (*sizes[:-1], 1, 1, 1))
    n, m = fw.length(call.query, -2), fw.length(call.key, -2)
    return Block(rows, cols, n, m, q, k, b, h, len(lead))


def live(call: Call, block: Block) -> Array | None:
    """Which pairs of the block count: what the mask allows, less what was counted elsewhere."""
    out = None
    if call.rule is not None and not block.cols.open:
        out = call.rule.allowed(block)
    for at, span in ((block.q, block.rows), (block.k, block.cols)):
        if span.first is not None:
            fresh = at >= span.first
            out = fresh if out is None else call.fw.xp.logical_and(out, fresh)
    return out


def scores(call: Call, query: Array, key: Array, bias: Array | None, block: Block) -> Array:
    """The scores of a block: of its queries and keys, with the mask's bias, scaled for α."""
    s = evaluate(call.score, query, share_heads(call, key), block)
    if bias is not None:
        s = s + call.fw.keep(bias, bias > -float("inf"))
    return call.fw.settle(call.weighting.scale(s))


def clean(call: Call, rows: Array, alive: Array | None) -> Array:
    """Keys or values (…, c, d) with 0 in the rows that no query of the block may look at.

    What stands there may be NaN, and 0 · NaN would bring it back.
    """
    if alive is None:
        return rows
    fw = call.fw
    seen = fw.xp.any(alive, axis=-2)[..., None]  # (…, c, 1), over the lead or less
    lead = fw.shape(rows)[:-2]
    if len(seen.shape) > 2 and lead != call.lead:
        seen = fw.astype(seen, fw.dtype(rows))
        seen = fw.xp.broadcast_to(seen, (*call.lead, *seen.shape[-2:]))
        seen = fold_heads(call, seen, lead) > 0
    return fw.keep(rows, seen)


def clean_queries(call: Call, query: Array, alive: Array | None) -> Array:
    """Queries (…, r, d) with 0 in the rows that may look at no key of the block, likewise."""
    if alive is None:
        return query
    return call.fw.keep(query, call.fw.xp.any(alive, axis=-1)[..., None])


def share_heads(call: Call, x: Array) -> Array:
    """A key or value with fewer heads than the query, each repeated for its group."""
    shape = call.fw.shape(x)
    if len(shape) < 3 or not call.lead or shape[-3] in (1, call.lead[-1], None):
        return x
    group = call.lead[-1] // shape[-3]
    xp = call.fw.xp
    x = xp.broadcast_to(x[..., :, None, :, :], (*shape[:-2], group, *shape[-2:]))
    return xp.reshape(x, (*shape[:-3], call.lead[-1], *shape[-2:]))


def fold_heads(call: Call, x: Array, lead: Shape) -> Array:
    """x (*call.lead, ·, ·) summed over what `lead` shares: the transpose of broadcasting."""
    xp = call.fw.xp
    while len(x.shape) - 2 > len(lead):
        x = xp.sum(x, axis=0)
    for axis, size in enumerate(lead):
        have = x.shape[axis]
        if have == size:
            continue
        if size == 1:
            x = xp.sum(x, axis=axis, keepdims=True)
        else:
            x = xp.reshape(x, (*x.shape[:axis], size, have // size, *x.shape[axis + 1 :]))
            x = xp.sum(x, axis=axis + 1)
    return x


def dropped(call: Call, block: Block) -> Array | None:
    """The factor that dropout puts on each weight of the block: 0 or 1 / (1 − p)."""
    if not call.dropout:
        return None
    return keep_factor(call.query, call.dropout, call.seed, block)
