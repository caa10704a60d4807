"""Scores with a relative bias: a number for each distance between a query and a key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from qkv.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    as_float,
    call_user_function,
    coerce_field_to_float,
    unknown_name_error,
    validate_sizes,
)
from qkv.frameworks import get_framework, is_array
from qkv.frameworks.tree import Record
from qkv.scores.base import Score, sizes_differ
from qkv.scores.functions import evaluate_block
from qkv.scores.registry import resolve_inner_score
from qkv.util.caches import memoize
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, Block, Shape, Span

ALIGNMENTS = {"top_left": 0, "bottom_right": 1}


def take_numbers(x: Array, at: Array) -> Array:
    """Return the numbers of an array at positions in the order of its memory.

    The gradient is an array: without the reshape, TensorFlow's would be slices.
    """
    fw = get_framework(x)
    return fw.take_positions(fw.xp.reshape(x, (-1,)), at)


class DistanceBias(Record):
    """A bias that is a function of the distance j − i and the head, with arrays as its fields."""

    def __call__(self, distance: Array, head: Array) -> Array:
        raise NotImplementedError

    def head_count(self) -> int | None:
        """Return the number of heads that the bias is for; None: for any."""
        return None


@suggest_keywords
@dataclass(frozen=True)
class Alibi(DistanceBias):
    """bias = −slope·|j − i|, with one slope for each head, (h,).

    >>> Alibi(alibi_slopes(2)).slopes
    array([0.0625    , 0.00390625])
    """

    slopes: Array

    def __post_init__(self) -> None:
        if not is_array(self.slopes) or len(self.slopes.shape) != 1:
            raise DtypeError(
                "Alibi: slopes must be an array (h,), one for each head, such as "
                f"alibi_slopes(heads), not {self.slopes!r:.60}"
            )

    def __call__(self, distance: Array, head: Array) -> Array:
        fw = get_framework(self.slopes)
        far = fw.astype(fw.xp.abs(distance), fw.dtype_name(self.slopes))
        return -take_numbers(self.slopes, head) * far

    def head_count(self) -> int | None:
        return get_framework(self.slopes).static_shape(self.slopes)[0]


@suggest_keywords
@dataclass(frozen=True)
class DistanceTable(DistanceBias):
    """bias = table[h, j − i + r], for a table (h, 2r + 1) or (2r + 1,); distances end at ±r.

    >>> import numpy as np
    >>> DistanceTable(np.array([-1.0, 0.0, 5.0]))(np.array([[0, 1, 9]]), np.array([[0]]))
    array([[0., 5., 5.]])
    """

    table: Array

    def __post_init__(self) -> None:
        shape = get_framework(self.table).static_shape(self.table)
        if len(shape) not in (1, 2) or not (shape[-1] or 1) % 2:
            raise ShapeError(
                "Relative: a table has one number for each distance from −r to r, (2r + 1,) or "
                f"(heads, 2r + 1), not shape {shape}"
            )

    def __call__(self, distance: Array, head: Array) -> Array:
        fw = get_framework(self.table)
        shape = fw.static_shape(self.table)
        radius = shape[-1] // 2
        at = fw.xp.clip(distance, -radius, radius) + radius
        if fw.name == "torch":  # two indices, which kernels read as they are
            return self.table[at.long()] if len(shape) == 1 else self.table[head.long(), at.long()]
        if len(shape) == 1:
            return take_numbers(self.table, at)
        return take_numbers(self.table, head * shape[-1] + at)

    def head_count(self) -> int | None:
        shape = get_framework(self.table).static_shape(self.table)
        return shape[0] if len(shape) == 2 else None


@suggest_keywords
@dataclass(frozen=True)
class T5Bias(DistanceBias):
    """bias = table[h, bucket(j − i)], T5's buckets of distances, for a table (h, buckets).

    Half of the buckets of a direction hold one distance each, the others grow up to
    `max_distance`. An encoder is `bidirectional`; in a decoder, later keys share bucket 0.

    >>> import numpy as np
    >>> T5Bias(np.arange(8.0)[None], max_distance=16).distance_table()[0, 12:21]
    array([2., 2., 2., 1., 0., 5., 6., 6., 6.])
    """

    table: Array
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        shape = tuple(getattr(self.table, "shape", ()))
        least = 4 if self.bidirectional else 2
        if not is_array(self.table) or len(shape) != 2 or shape[1] % 2 or shape[1] < least:
            raise ShapeError(
                "T5Bias: table must be (heads, buckets) with an even number of buckets, not of "
                f"shape {shape}: for T5's Embedding pass weight.T"
            )
        validate_sizes(max_distance=self.max_distance)
        if self.max_distance <= shape[1] // least:
            raise ArgumentError(
                f"T5Bias: max_distance must be above {shape[1] // least}, the distances with a "
                f"bucket of their own, not {self.max_distance}"
            )

    def distance_table(self) -> Array:
        """Return the bias of each head and distance, (h, 2·max_distance + 1)."""
        fw, (heads, buckets) = get_framework(self.table), self.table.shape
        form = int(buckets), self.max_distance, self.bidirectional
        if fw.name == "torch":  # one operation
            at = fw.cached_constant(_bucket_places(1, *form)[0], self.table, "int64")
            return self.table.index_select(1, at)
        places = fw.cached_constant(_bucket_places(int(heads), *form), self.table, "int32")
        return take_numbers(self.table, places)

    def __call__(self, distance: Array, head: Array) -> Array:
        return DistanceTable(self.distance_table())(distance, head)

    def head_count(self) -> int | None:
        return get_framework(self.table).static_shape(self.table)[0]


class RelativeScore(Score):
    """Base of scores that depend on the distance j − i of query i and key j, by `align`."""

    needs_positions: ClassVar[bool] = True
    score: Score
    align: str

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        """Return the scores of a block, with its positions in the whole call."""
        raise NotImplementedError

    def as_score_mod(self, n: int, m: int) -> Callable[..., Array]:
        """Return FlexAttention's `score_mod` of the score inside, for n queries and m keys."""
        raise NotImplementedError

    def __call__(self, query: Array, key: Array) -> Array:
        fw = get_framework(query)
        n, m = fw.axis_length(query, -2), fw.axis_length(key, -2)
        heads = fw.axis_length(query, -3) if len(query.shape) > 2 else 1

        def make_positions(name: str) -> Array:
            at = fw.position_range(0, {"q": n, "k": m, "h": heads}.get(name, 1), query)
            if name == "h" and len(query.shape) > 2:
                return at[:, None, None]
            return at[None, :] if name == "k" else at[:, None]

        return self.score_block(query, key, Block(Span(0, n), Span(0, m), n, m, make_positions))

    def shift(self, n: Any, m: Any) -> Any:
        """Return the position of query 0 among the keys."""
        return m - n if self.align == "bottom_right" else 0

    def __post_init__(self) -> None:
        resolve_inner_score(self)
        if self.align not in ALIGNMENTS:
            raise unknown_name_error("align", self.align, ALIGNMENTS)


@suggest_keywords
@dataclass(frozen=True)
class Relative(RelativeScore):
    """s = score(q, k) + bias(j − i), for query i and key j: a relative position bias.

    `bias` is one of

    - a table of the distances −r … r, (2r + 1,) or (heads, 2r + 1); larger distances count as ±r,
    - `Alibi(slopes)`, −slope·|j − i| for each head,
    - `T5Bias(table)`, one number for each head and bucket of distances,
    - a function (distance, head) of integer arrays that broadcast against the scores.

    Tables and slopes receive gradients. The bias is computed block by block: no n × m array is
    kept. Query i has the position i, with `align="bottom_right"` the position i + m − n, as for
    `masks.causal`.

    >>> import numpy as np
    >>> one = np.ones((3, 1))
    >>> Relative(np.array([-1.0, 0.0, -5.0]), "dot")(one, one)
    array([[ 1., -4., -4.],
           [ 0.,  1., -4.],
           [ 0.,  0.,  1.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("alibi", "t5", "relative_position", "position_bias")
    function_field: ClassVar[str] = "bias"

    bias: Array | DistanceBias | Callable[[Array, Array], Array]
    # The default is a name because torch.compile cannot trace an object here.
    score: Score = "scaled_dot"  # type: ignore[assignment]
    align: str = "top_left"

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_array(self.bias):
            object.__setattr__(self, "bias", DistanceTable(self.bias))
        elif not callable(self.bias):
            raise DtypeError(
                "Relative: bias must be an array, Alibi(slopes), T5Bias(table) or a function "
                f"(distance, head), not {type(self.bias).__name__}"
            )

    def with_distance_table(self) -> Relative:
        """Return the score with the numbers of `T5Bias` as a table of distances."""
        if not isinstance(self.bias, T5Bias):
            return self
        return Relative(self.bias.distance_table(), self.score, self.align)

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        """Return the scores of a block, with its positions in the whole call."""
        s = evaluate_block(self.score, query, key, block)
        fw = get_framework(s)
        bias = self.bias_of(block.k - block.q - self.shift(block.n, block.m), block.h)
        return s + fw.astype(bias, fw.dtype_name(s))

    def bias_of(self, distance: Array, head: Array) -> Array:
        """Return the bias of these distances."""
        bias: Array = call_user_function(
            self.bias, distance, head, takes="Relative: bias must take (distance, head)"
        )
        return bias

    def as_score_mod(self, n: int, m: int) -> Callable[..., Array]:
        """Return the bias as FlexAttention's `score_mod` for n queries and m keys."""
        shift, bias = self.shift(n, m), self.bias
        if isinstance(bias, T5Bias):
            bias = DistanceTable(bias.distance_table())
        if isinstance(bias, DistanceTable):
            table, radius = bias.table, bias.table.shape[-1] // 2
            if len(table.shape) == 1:
                return lambda s, b, h, q, k: (
                    s + table[(k - q - shift).clamp(-radius, radius) + radius]
                )
            return lambda s, b, h, q, k: (
                s + table[h, (k - q - shift).clamp(-radius, radius) + radius]
            )
        if isinstance(bias, Alibi):
            slopes = bias.slopes
            return lambda s, b, h, q, k: s - slopes[h] * (k - q - shift).abs()
        return lambda s, b, h, q, k: s + bias(k - q - shift, h)

    def check_shapes(self, query: Shape, key: Shape) -> None:
        self.score.check_shapes(query, key)
        heads = self.bias.head_count() if isinstance(self.bias, DistanceBias) else None
        if heads is not None and sizes_differ(heads, query[-3] if len(query) > 2 else 1):
            raise ShapeError(
                f"Relative: the bias is for {heads} heads, but the query has shape {query}, whose "
                "axis −3 is the heads"
            )

    def numbers_per_pair(self, width: int) -> int:
        return self.score.numbers_per_pair(width) + 1


@suggest_keywords
@dataclass(frozen=True)
class Decay(RelativeScore):
    """s = exp(−rate·|j − i|) · score(q, k), for query i and key j: the decay of linear attention.

    `rate` is a number, or an array (h,) with one number for each head, and may be learned. With
    `weighting="raw"` and `mask="causal"` it is the retention of RetNet, whose γ is exp(−rate), and
    lightning attention. There the sums over the keys take O(n log n) time, by chunks. A softmax of
    scores that decay by −rate·|j − i| is `Relative(Alibi(rates))`. `align` is that of `Relative`.

    >>> import numpy as np
    >>> one = np.ones((3, 1))
    >>> Decay(np.log(2.0))(one, one)
    array([[1.  , 0.5 , 0.25],
           [0.5 , 1.  , 0.5 ],
           [0.25, 0.5 , 1.  ]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("retention", "retnet", "lightning_attention")

    rate: float | Array
    score: Score = "dot"  # type: ignore[assignment]
    align: str = "top_left"

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_array(self.rate):
            if len(self.rate.shape) > 1:  # type: ignore[union-attr]
                raise ShapeError(
                    "Decay: rate must be a number or (h,), one for each head, not of shape "
                    f"{tuple(self.rate.shape)}"  # type: ignore[union-attr]
                )
            return
        if isinstance(self.rate, bool) or not isinstance(self.rate, Real):
            raise DtypeError(f"Decay: rate must be a number or an array (h,), not {self.rate!r}")
        if not 0 <= as_float(self.rate) < math.inf:
            raise ArgumentError(f"Decay: rate must be finite and at least 0, not {self.rate!r:.40}")
        coerce_field_to_float(self, "rate")

    @property
    def is_nonnegative(self) -> bool:  # type: ignore[override]
        return self.score.is_nonnegative

    def score_block(self, query: Array, key: Array, block: Block) -> Array:
        s = evaluate_block(self.score, query, key, block)
        fw = get_framework(s)
        far = fw.xp.abs(block.k - block.q - self.shift(block.n, block.m))
        return s * fw.xp.exp(-self.rates(s, block.h) * fw.astype(far, fw.dtype_name(s)))

    def rates(self, like: Array, head: Array | None = None) -> Any:
        """Return the rate, or the rates of heads in the shape of `head` (h, 1, 1)."""
        fw = get_framework(like)
        if not is_array(self.rate):
            return self.rate
        rate = fw.astype(self.rate, fw.dtype_name(like))
        if not len(rate.shape):
            return rate
        return rate[:, None, None] if head is None else take_numbers(rate, head)

    def as_score_mod(self, n: int, m: int) -> Callable[..., Array]:
        shift, rate = self.shift(n, m), self.rate
        if is_array(rate) and len(rate.shape):  # type: ignore[union-attr]
            return lambda s, b, h, q, k: s * (-rate[h] * (k - q - shift).abs()).exp()  # type: ignore[index]
        return lambda s, b, h, q, k: s * (-rate * (k - q - shift).abs()).exp()

    def check_shapes(self, query: Shape, key: Shape) -> None:
        self.score.check_shapes(query, key)
        heads = tuple(getattr(self.rate, "shape", ()))
        if heads and sizes_differ(heads[0], query[-3] if len(query) > 2 else 1):
            raise ShapeError(
                f"Decay: rate is for {heads[0]} heads, but the query has shape {query}, whose axis "
                "−3 is the heads"
            )

    def numbers_per_pair(self, width: int) -> int:
        return self.score.numbers_per_pair(width) + 1


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """Return ALiBi's slope of each head, (heads,): 2^(−8/heads) and its powers.

    If the number of heads is no power of 2, the slopes of the next smaller power come first, then
    every other slope of twice that number.

    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    validate_sizes(heads=heads)
    power = 2 ** int(math.log2(heads))
    first = 2.0 ** (-8 / power * np.arange(1, power + 1))
    others = 2.0 ** (-4 / power * np.arange(1, 2 * power, 2))
    return np.concatenate([first, others])[:heads]


@memoize("scores.bucket_places", 64)
def _bucket_places(
    heads: int, buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray[Any, Any]:
    """Return where a table (heads, buckets) holds the number of each head and distance.

    One array for equal arguments, so that a device has one copy.
    """
    distances = np.arange(-max_distance, max_distance + 1)
    numbers = t5_buckets(distances, buckets, max_distance, bidirectional)
    return np.asarray(np.arange(heads)[:, None] * buckets + numbers)


def t5_buckets(
    distance: Any, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> np.ndarray[Any, Any]:
    """Return T5's bucket of each distance j − i, as in `relative_position_bucket`.

    >>> t5_buckets([-200, -20, -3, 0, 3, 20, 200])
    array([15, 10,  3,  0, 19, 26, 31])
    """
    distance = np.asarray(distance)
    start: Any = 0
    if bidirectional:
        buckets //= 2
        start = (distance > 0) * buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    # float32, as in T5: a bucket may begin at a power of 2.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(math.log(max_distance / exact))
    wide = exact + (ratio * (buckets - exact)).astype(int)
    return np.asarray(start + np.where(distance < exact, distance, np.minimum(wide, buckets - 1)))
