"""Stores of a cluster: one database as several, so that each machine can have its own rows on its
own disk; and stores on object storage as folders of this machine, where fsspec reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

from qkv.database.errors import StoreUnreadableError
from qkv.database.storage import Store, folder
from qkv.database.storage.folder import is_store_file
from qkv.database.table.view import ROWS_PER_CHUNK, TableView
from qkv.errors import ArgumentError, require_extra


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
    places = [folder.check_path(target) for target in targets]
    there = next((place for place in places if os.path.lexists(place)), None)
    if there is not None:
        raise ArgumentError(f"targets: {there} is there already: choose another path")
    with Store(source, create=False) as store, store.open_snapshot() as whole:
        edges = [len(whole) * i // len(places) for i in range(len(places) + 1)]
        if len(whole) < len(places):
            raise ArgumentError(f"{len(whole)} rows cannot be shared out among {len(places)}")
        for place, (start, stop) in zip(places, pairwise(edges), strict=True):
            with folder.build_store_folder(place) as part, Store(part) as made:
                _copy_rows(TableView(whole.slice_rows(start, stop)), made)


def _copy_rows(view: TableView, made: Store) -> None:
    # An encoder that fits itself anew to some of the rows would no longer be that of the others.
    settings, arrays = {**view.settings, "fitted": 0}, view.snapshot.read_arrays() or None
    for start in range(0, len(view), ROWS_PER_CHUNK):
        ids = view.ids[start : start + ROWS_PER_CHUNK]
        made.commit(
            records=view.snapshot.read_records(ids),
            digests=view.snapshot.read_digests(ids),
            tensors={
                name: view.snapshot.read_tensor(name, ids) for name in view.snapshot.tensor_names
            },
            settings=settings,
            arrays=None if start else arrays,
            what="import",
        )


FILE_STATE_FIELDS = (
    "size",
    "mtime",
    "LastModified",
    "last_modified",
    "ETag",
    "etag",
    "md5Hash",
    "created",
)
"""What tells one state of a file from another, by the names that file systems have for it."""


def is_url(place: str) -> bool:
    return "://" in place


def fetch_local_copy(url: str, cache: str | None = None) -> Path:
    """A copy of the store at the URL as it is now; made once for each state of its files.

    It lies in `cache`, by default in the user's folder of caches. Nothing in it is removed.
    """
    with require_extra("ray", "a URL needs fsspec"):
        import fsspec
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as fault:
        raise ArgumentError(f"{url}: {fault}") from None
    try:
        found: dict[str, Any] = system.find(root, detail=True)
    except OSError as fault:
        raise StoreUnreadableError(f"{url} cannot be listed: {fault}") from None
    named = {os.path.relpath(name, root): about for name, about in found.items()}
    # Whoever filled a bucket names its files, "../.." and all: a store's own are plain names.
    files = {name: about for name, about in named.items() if is_store_file(name)}
    if not files:
        raise StoreUnreadableError(f"{url}: there is no store; give the URL of its folder")
    target = _cache_folder(cache) / f"{_state_name(url, files)}.qkv"
    if not target.exists():
        part = target.with_suffix(f".{token_hex(4)}")
        try:
            part.mkdir(0o700)
            for name in files:
                system.get_file(f"{root.rstrip('/')}/{name}", str(part / name))
            part.rename(target)
        except OSError as fault:
            if not target.exists():  # another process may have been first
                raise StoreUnreadableError(f"{url} cannot be copied: {fault}") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _cache_folder(cache: str | None) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) if cache else Path(home) / "qkv"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _state_name(url: str, files: dict[str, Any]) -> str:
    """A name for this state of the store."""
    told = [
        [name, *(str(about[mark]) for mark in FILE_STATE_FIELDS if mark in about)]
        for name, about in sorted(files.items())
    ]
    return blake2b(json.dumps([url, told]).encode(), digest_size=16).hexdigest()
