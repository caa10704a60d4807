"""A call without a gradient, made again: arrays of known shapes and strides, by launches alone."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from qkv.engines.triton import ahead, launch, norms, ops, thresholds
from qkv.engines.triton.arguments import Numbers
from qkv.engines.triton.launch import Launch
from qkv.engines.triton.records import Arrays, Scales

Places = tuple[int | None, ...]
"""Where the arrays of a call lie: none, query, key, value, out, lse, kept, bias, row_a, row_b."""

NONE, QUERY, KEY, VALUE, OUT, LSE, KEPT, BIAS, ROW_A, ROW_B = range(10)


class Step(NamedTuple):
    """A launch, what it takes of the places (those of its record of arrays first), its numbers."""

    made: Launch
    record: Callable[[Places], Any] | None
    rest: Callable[[Places], Any]
    numbers: tuple[Any, ...]


class Steps(NamedTuple):
    """Launches, which device they are `at`, and the room of what lies between them."""

    launches: tuple[Step, ...]
    at: int | None
    shape: tuple[int, ...]
    size: int
    offsets: tuple[int, ...]

    def again(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The output; None where the arrays lie oddly or on a device that is not in use."""
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (q | k | v) % 16 or not launch.current(self.at):
            return None
        # One by one, and in the query's dtype: torch reads a tuple, and a dtype, for as long again.
        out, room = query.new_empty(*self.shape), query.new_empty(self.size)
        start, stream = room.data_ptr(), launch.current_stream(self.at)
        at = (None, q, k, v, out.data_ptr(), *[start + x for x in self.offsets])
        for made, record, rest, numbers in self.launches:
            if record is None:
                made.send(stream, *rest(at), *numbers)
            else:
                made.send(stream, record(at), *rest(at), *numbers)
        return out


class Repeat:
    """Σⱼ α(s)ᵢⱼ vⱼ with s = scale · q·k + factor · ‖k‖², for arrays on four axes of one dtype.

    query (B, H, n, w), key (B, Hₖ, m, w), value (B, Hₖ, m, d) → (B, H, n, d). `number` is entmax's
    alpha or top-k's k; `band(n, m)` gives the least and the largest j − i that count. What the
    launches depend on beside n, m, strides and places must not change; no width is 0.
    """

    def __init__(
        self,
        weighting: str,
        number: float,
        scale: float,
        factor: float | None,
        band: Callable[[int, int], tuple[int | None, int | None]],
    ) -> None:
        self.weighting, self.number, self.scale, self.factor = weighting, number, scale, factor
        self.band = band
        self.known: dict[Any, Steps] = {}
        bias = NONE if factor is None else BIAS
        found = {"entmax": (ROW_A,), "topk": (ROW_A, ROW_B)}.get(weighting, ())
        row_a, row_b = (*found, NONE, NONE)[:2]
        pair, none = (QUERY, KEY), (NONE, NONE)
        self.taken: list[tuple[int, ...]] = []
        if factor is not None:
            self.taken.append((KEY, BIAS))
        if found:
            self.taken.append((*pair, KEY, bias, *none * 5, NONE, *found, *none, NONE))
        rest = (*none * 4, NONE, OUT, LSE, KEPT)
        self.taken.append((*pair, VALUE, bias, *none, row_a, row_b, *rest))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        about = query.numel(), key.numel(), query.stride(), key.stride(), value.stride()
        steps = self.known.get(about)
        if steps is not None:
            out = steps.again(query, key, value)
            if out is not None:
                return out
        with launch.noted() as notes, ahead.together(lambda: self._run(query, key, value)):
            made = self._run(query, key, value)
        steps = None if launch.OVERRIDE else self._steps(notes, (query, key, value, *made))
        if steps is not None:
            if len(self.known) >= launch.MOST:
                self.known.clear()
            self.known[about] = steps
        return made[0]

    def _run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
        """out, lse, kept, bias, row_a and row_b, by the operators."""
        band = self.band(query.shape[2], key.shape[2])
        bias = None if self.factor is None else norms.square(key, self.factor)
        numbers = Numbers(self.scale, self.weighting, self.number, *band)
        arrays = thresholds.searched(Arrays(query, key, value, bias), numbers)
        return (*ops.pooled(*arrays, *numbers), bias, arrays.row_a, arrays.row_b)

    def _steps(self, notes: list[Any], arrays: tuple[Tensor | None, ...]) -> Steps | None:
        """The launches, if there were no others and they had no arrays but these."""
        at = (None, *[x if x is None else x.data_ptr() for x in arrays])
        if len(notes) != len(self.taken) or sum([x % 16 for x in at if x is not None]):
            return None
        steps, offsets, size = [], [], 0
        for (made, had, floats), taken in zip(notes, self.taken, strict=True):
            if tuple(had) != tuple([at[i] for i in taken]):
                return None
            record, rest = taken[: made.taken], taken[made.taken :]
            scales = (floats,) if type(floats) is Scales else floats
            first = itemgetter(*record) if record else None
            steps.append(Step(made, first, itemgetter(*rest), (*scales, *made.numbers)))
        for x in arrays[4:]:
            offsets.append(size)
            # With the room between its lines, and so that the next begins at 16 bytes.
            size += 0 if x is None else -(-x.untyped_storage().nbytes() // 16) * 16
        out: Any = arrays[3]
        size //= out.element_size()
        return Steps(tuple(steps), out.device.index, tuple(out.shape), size, tuple(offsets))
