"""Shape checks, and the conversion of several attention axes to one axis of rows."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from keras import ops

from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.util.types import Array, Shape


class Axes(NamedTuple):
    """The axes that attention runs over; all others except the width are batch axes."""

    attended: tuple[int, ...]
    rank: int
    """The number of axes of a tensor (batch, …, width)."""

    @property
    def axis_order(self) -> tuple[int, ...]:
        """All axes except the width: batch axes first, attended axes last."""
        return (*(i for i in range(self.rank - 1) if i not in self.attended), *self.attended)

    def split_shape(self, shape: Shape) -> tuple[Shape, Shape]:
        """Split the shape (batch, …, width) into the batch axes and the attended axes."""
        axes = self.axis_order
        cut = len(axes) - len(self.attended)
        return tuple(shape[i] for i in axes[:cut]), tuple(shape[i] for i in axes[cut:])

    def check_shared_axes(self, query: Shape, value: Shape) -> None:
        """Raise unless query and value agree in the axes that attention does not run over."""
        sides = (self.split_shape(x)[0][1:] for x in (query, value))
        if any(None not in pair and pair[0] != pair[1] for pair in zip(*sides, strict=True)):
            raise ShapeError(
                f"query {tuple(query)} and value {tuple(value)} must agree in all axes between the "
                f"batch and the width, except attention_axes={self.attended}"
            )

    def flatten_rows(self, x: Array) -> Array:
        """Return (batch, …, heads, width) as (batch, …, heads, rows, width)."""
        lead, rows = self.split_shape(ops.shape(x))
        heads = self.rank - 1
        cut = len(lead)
        x = ops.transpose(x, (*self.axis_order[:cut], heads, *self.axis_order[cut:], heads + 1))
        return x if len(rows) == 1 else ops.reshape(x, (*lead, x.shape[cut], -1, x.shape[-1]))

    def restore_axes(self, out: Array, like: Array) -> Array:
        """Undo `flatten_rows`; `like` is its input, which gives the shape."""
        lead, rows = self.split_shape(ops.shape(like))
        cut = len(lead)
        out = ops.reshape(out, (*lead, out.shape[cut], *rows, out.shape[-1]))
        now = (*self.axis_order[:cut], self.rank - 1, *self.axis_order[cut:], self.rank)
        return ops.transpose(out, [now.index(i) for i in range(self.rank + 1)])

    def scores_shape(self, query: Shape, value: Shape, heads: int | None) -> Shape:
        """Return the shape of Keras's weights: (batch, …, heads, query axes, key axes)."""
        lead, rows = self.split_shape(query)
        return (*lead, *(() if heads is None else (heads,)), *rows, *self.split_shape(value)[1])

    def expand_row_mask(self, mask: Array, of_keys: bool, heads: int | None) -> Array:
        """Reshape a mask (batch, …) of rows to broadcast with scores (batch, …, heads, n, m)."""
        if len(mask.shape) < self.rank - 1:  # (batch, rows): the same for all axes between
            lead = (ops.shape(mask)[0], *(1,) * (self.rank - 3))
        else:
            mask = ops.transpose(mask, self.axis_order)
            lead = ops.shape(mask)[: self.rank - 1 - len(self.attended)]
        ones = () if heads is None else (1,)
        return ops.reshape(mask, (*lead, *ones, *((1, -1) if of_keys else (-1, 1))))

    def expand_pair_mask(self, mask: Array, full: Shape) -> Array:
        """Reshape a mask of pairs to broadcast with scores (batch, …, heads, n, m).

        Its axes are those of `full`, the shape of the scores, or the first and the last of them.
        """
        count = len(self.attended)
        while 2 * count < len(mask.shape) < len(full):
            mask = ops.expand_dims(mask, -2 * count - 1)
        if count == 1:
            return mask
        lead, pairs = ops.shape(mask)[: -2 * count], full[-2 * count :]
        mask = ops.broadcast_to(mask, (*lead, *pairs))
        return ops.reshape(mask, (*lead, prod(pairs[:count]), prod(pairs[count:])))


SEQUENCE_AXES = Axes((1,), 3)
"""For tensors (batch, rows, width)."""


def unpack_inputs(inputs: Any, name: str = "inputs") -> tuple[Any, Any, Any]:
    """Return query, value and key from [query, value] or [query, value, key].

    `inputs` may also be their shapes, or, if `name` is "mask", their masks.
    """
    is_list = isinstance(inputs, list | tuple)
    if not is_list or any(isinstance(x, int) for x in inputs):
        # The words are those of keras.layers.Attention.
        expected = (
            "the layer mask must be a list, [query_mask, value_mask] or with key_mask"
            if name == "mask"
            else "the layer must be called on a list, [query, value] or [query, value, key]"
        )
        came = f"one array of shape {tuple(inputs)}" if is_list else type(inputs).__name__
        raise ArgumentError(f"{expected}, not {came}")
    if len(inputs) not in (2, 3):
        raise ArgumentError(
            f"{name} must be a list of length 2 or 3, for query, value and, if it is not the "
            f"value, key: got length {len(inputs)}"
        )
    query, value, *key = inputs
    return query, value, key[0] if key else value


def check_shapes(query: Shape, value: Shape, key: Shape) -> None:
    if None not in (value, key) and len(value) != len(key):
        raise ShapeError(
            f"the numbers of axes of key and value must be equal, but key has the shape {key} and "
            f"value {value}"
        )
    for name, shape in (("query", query), ("value", value), ("key", key)):
        if shape is None:
            raise DtypeError(f"{name} must be an array, not None")
        if len(shape) < 3:
            raise ShapeError(f"{name} must have the axes (batch, …, rows, width), not {shape}")
        known_width(name, shape)
    if None not in (value[-2], key[-2]) and value[-2] != key[-2]:
        raise ShapeError(
            f"the numbers of rows of key and value must be equal, but key has {key[-2]} and value "
            f"{value[-2]}"
        )


def check_sequence(name: str, shape: Shape) -> Shape:
    if len(shape) != 3:
        raise ShapeError(f"{name} must have the axes (batch, rows, width), not {tuple(shape)}")
    known_width(name, shape)
    return tuple(shape)


def known_width(name: str, shape: Shape) -> int:
    if shape[-1] is None:
        raise ShapeError(f"{name} must have a known width, its last axis, not {tuple(shape)}")
    return shape[-1]
