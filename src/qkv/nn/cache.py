"""The key-value cache for generating a sequence token by token."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from qkv.errors import ArgumentError, ShapeError


class Cache:
    """The projected keys and values of one layer, which grow with each call.

    key and value are (batch, heads, m, width). `append` adds rows and returns all of them. The
    first layer that uses a cache owns it: every layer and every batch needs its own cache.

    >>> cache = Cache()
    >>> row = torch.ones(1, 1, 1, 4)
    >>> layer = torch.nn.Identity()
    >>> for _ in range(3):
    ...     key, value = cache.append(layer, row, row)
    >>> len(cache), key.shape
    (3, torch.Size([1, 1, 3, 4]))
    """

    def __init__(self) -> None:
        self.length = 0
        self.owner: Any = None
        self.buffers: list[Tensor] = []

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Cache({self.length} rows)"

    def get_rows(self, layer: Any) -> list[Tensor]:
        """Return the keys and the values stored so far."""
        self._claim_owner(layer)
        return self._current_rows()

    def _current_rows(self) -> list[Tensor]:
        return [x[..., : self.length, :] for x in self.buffers]

    def append(self, layer: Any, key: Tensor, value: Tensor) -> list[Tensor]:
        """Add rows, and return all keys and all values."""
        self._claim_owner(layer)
        self._check_fit(key, value)
        if not self.buffers:
            self.buffers = [key, value]
        elif torch.is_grad_enabled():  # autograd may hold the old tensors: do not overwrite
            self.buffers = [
                torch.cat(x, -2) for x in zip(self._current_rows(), (key, value), strict=True)
            ]
        else:
            self._write_rows(key, value)
        self.length += key.shape[-2]
        return self._current_rows()

    def _claim_owner(self, layer: Any) -> None:
        """Make `layer` the owner, or raise if another layer is."""
        if self.owner is None:
            self.owner = weakref.ref(layer)
        if self.owner() is not layer:
            raise ArgumentError(
                "cache holds the keys and values of another layer or model: make one for each "
                "layer, qkv.nn.Cache() or model.cache()"
            )

    def _check_fit(self, key: Tensor, value: Tensor) -> None:
        for name, old, new in zip(("key", "value"), self.buffers, (key, value), strict=False):
            have, come = ((*x.shape[:-2], x.shape[-1]) for x in (old, new))
            if have != come or old.dtype != new.dtype or old.device != new.device:
                raise ShapeError(
                    f"cache holds {name} rows of (batch, heads, width) {have}, {old.dtype} on "
                    f"{old.device}; the new rows are {come}, {new.dtype} on {new.device}: create a "
                    "new cache for another batch"
                )

    def _write_rows(self, key: Tensor, value: Tensor) -> None:
        """Write the rows after the stored ones; a full buffer doubles its size."""
        need = self.length + key.shape[-2]
        for i, new in enumerate((key, value)):
            buffer = self.buffers[i]
            if (
                buffer.shape[-2] < need
                or buffer.is_inference() != torch.is_inference_mode_enabled()
            ):
                capacity = max(2 * self.length, need, 16)
                grown = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
                grown[..., : self.length, :] = buffer[..., : self.length, :]
                self.buffers[i] = buffer = grown
            buffer[..., self.length : need, :] = new
