"""One database as several stores, so that each machine can have its own rows on its own disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from qkv.database.store import Store, folder
from qkv.database.view import CHUNK, View
from qkv.errors import ArgumentError


def split(source: str | os.PathLike[str], targets: Sequence[str | os.PathLike[str]]) -> None:
    """Share the rows of a database out among new stores, in its order, with its encoder.

    >>> import tempfile, qkv
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with qkv.open(f"{place}/all.qkv") as D:
    ...         D.add(["Li", "Hu", "Smola"], ["Mu", "Rachel", "Alex"])
    ...     split(f"{place}/all.qkv", [f"{place}/one.qkv", f"{place}/two.qkv"])
    ...     with qkv.open(f"{place}/two.qkv") as D:
    ...         list(D)
    ['Hu', 'Smola']
    """
    places = [folder.named(target) for target in targets]
    there = next((place for place in places if os.path.lexists(place)), None)
    if there is not None:
        raise ArgumentError(f"targets: {there} is there already: choose another path")
    with Store(source, create=False) as store, store.at() as whole:
        edges = [len(whole) * i // len(places) for i in range(len(places) + 1)]
        if len(whole) < len(places):
            raise ArgumentError(f"{len(whole)} rows cannot be shared out among {len(places)}")
        for place, (start, stop) in zip(places, pairwise(edges), strict=True):
            with folder.beside(place) as part, Store(part) as made:
                _copy(View(whole.between(start, stop)), made)


def _copy(view: View, made: Store) -> None:
    # An encoder that fits itself anew to some of the rows would no longer be that of the others.
    settings, arrays = {**view.settings, "fitted": 0}, view.snapshot.arrays() or None
    for start in range(0, len(view), CHUNK):
        ids = view.ids[start : start + CHUNK]
        made.commit(
            records=view.snapshot.records(ids),
            digests=view.snapshot.digests(ids),
            tensors={name: view.snapshot.tensor(name, ids) for name in view.snapshot.names},
            settings=settings,
            arrays=None if start else arrays,
            what="import",
        )
