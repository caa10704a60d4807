"""The caches of the library, in one place where they can be inspected and cleared.

Every module-level cache of qkv is created here, under a name "<part>.<contents>":

- `create_table(name)` returns a plain `dict`. Hot paths read it without any extra call.
- `get_or_compute(table, key, compute, max_entries)` returns an entry, and inserts a missing one.
- `memoize(name)` is `functools.lru_cache` that also registers the cache.
- `register(name, cache)` adds any other object with `clear()` and a length.

A cache holds only what can be computed again, so `clear_caches` never changes a result. Tables that
hold state (registered names, open captures, thread-local buffers) are not caches and do not belong
here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
_MISSING = object()


class ClearableCache(Protocol):
    """The methods that a registered cache must have. A dict or WeakKeyDictionary has them."""

    def __len__(self) -> int: ...
    def clear(self) -> None: ...


class _MemoizedCalls:
    """The cache of a memoized function, with the methods of `ClearableCache`."""

    def __init__(self, function: functools._lru_cache_wrapper[Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return self.function.cache_info().currsize

    def clear(self) -> None:
        self.function.cache_clear()


_CACHES: dict[str, ClearableCache] = {}


def register(name: str, cache: ClearableCache) -> None:
    """Add a cache to those that `clear_caches` clears and `describe_caches` lists.

    A second cache of the same name replaces the first: a module may be reloaded.
    """
    _CACHES[name] = cache


def create_table(name: str) -> dict[Any, Any]:
    """Return a new registered dict. Use `insert_bounded` if it could grow without a limit."""
    table: dict[Any, Any] = {}
    register(name, table)
    return table


def insert_bounded(table: dict[K, V], key: K, entry: V, max_entries: int) -> None:
    """Insert an entry. If the table already holds `max_entries`, empty it first.

    There is no eviction order, because every read would have to maintain it. Do not read the entry
    back from the table: another thread may have emptied the table.
    """
    if len(table) >= max_entries:
        table.clear()
    table[key] = entry


def get_or_compute(
    table: dict[K, V], key: K, compute: Callable[[], V], max_entries: int
) -> V | None:
    """Return the entry of a key, after computing and inserting it if it is missing.

    None if the key has no hash, such as one with an array of the caller.

    >>> table = {}
    >>> get_or_compute(table, "pairs", lambda: 2 * 3, 10), table
    (6, {'pairs': 6})
    """
    try:
        entry: Any = table.get(key, _MISSING)
    except TypeError:
        return None
    if entry is _MISSING:
        entry = compute()
        insert_bounded(table, key, entry, max_entries)
    return entry  # type: ignore[no-any-return]


def memoize(
    name: str, max_entries: int | None = None
) -> Callable[[Callable[..., T]], functools._lru_cache_wrapper[T]]:
    """Return a decorator that caches at most `max_entries` results; None: there is no limit."""

    def decorate(function: Callable[..., T]) -> functools._lru_cache_wrapper[T]:
        cached = functools.lru_cache(maxsize=max_entries)(function)
        register(name, _MemoizedCalls(cached))
        return cached

    return decorate


def clear_caches() -> None:
    """Empty every cache of qkv: plans, tilings, compiled kernels, loaded word vectors and others.

    No result changes; the next calls choose, measure, compile and load again. Use this to free
    memory, or before you measure the time of a first call.

    >>> import numpy as np
    >>> from qkv import attend, clear_caches
    >>> attend(np.eye(2), np.eye(2), np.ones((2, 1)))
    array([[1.],
           [1.]])
    >>> describe_caches()["engines.plans_by_signature"] > 0
    True
    >>> clear_caches()
    >>> describe_caches()["engines.plans_by_signature"]
    0
    """
    for cache in list(_CACHES.values()):
        cache.clear()


def describe_caches() -> dict[str, int]:
    """Return the number of entries of each cache, by name.

    A module registers its caches when it is imported, so the list grows as parts of qkv load.
    """
    return {name: len(cache) for name, cache in sorted(_CACHES.items())}
