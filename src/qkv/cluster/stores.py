"""Split a store into several stores, and copy stores from object storage."""

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
    """Split the rows of a database into new stores, in order.

    Each target gets about the same number of rows, and the same encoder.

    >>> import tempfile, qkv
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with qkv.open(f"{place}/all.qkv") as D:
    ...         D.add(["Li", "Hu", "Smola"], ["Mu", "Rachel", "Alex"])
    ...     split(f"{place}/all.qkv", [f"{place}/one.qkv", f"{place}/two.qkv"])
    ...     with qkv.open(f"{place}/two.qkv") as D:
    ...         list(D)
    ['Hu', 'Smola']
    """
    paths = [folder.check_path(target) for target in targets]
    existing = next((path for path in paths if os.path.lexists(path)), None)
    if existing is not None:
        raise ArgumentError(f"targets: {existing} exists already: choose another path")
    with Store(source, create=False) as store, store.open_snapshot() as snapshot:
        edges = [len(snapshot) * i // len(paths) for i in range(len(paths) + 1)]
        if len(snapshot) < len(paths):
            raise ArgumentError(
                f"targets: {len(snapshot)} rows cannot be split into {len(paths)} stores: pass "
                "fewer paths"
            )
        dropped_ids = snapshot.last_id + 1 - len(snapshot)
        for path, (start, stop) in zip(paths, pairwise(edges), strict=True):
            with folder.build_store_folder(path) as part, Store(part, create=True) as new:
                _copy_rows(TableView(snapshot.slice_rows(start, stop)), new, dropped_ids)


def _copy_rows(view: TableView, target: Store, dropped_ids: int) -> None:
    """Copy the rows of a view to a new store.

    `dropped_ids` is the number of row ids that the old store has used but that no row has.
    """
    # fitted = 0: an encoder that was fitted again to one part would not match the other parts.
    settings, arrays = {**view.settings, "fitted": 0}, view.snapshot.read_arrays() or None
    calibration = settings.get("promise")
    if isinstance(calibration, dict) and isinstance(calibration.get("last"), int):
        # A calibration counts the rows that were added later by their ids. The parts have new ids.
        settings["promise"] = {**calibration, "last": calibration["last"] - dropped_ids}
    for start in range(0, len(view), ROWS_PER_CHUNK):
        ids = view.ids[start : start + ROWS_PER_CHUNK]
        target.commit(
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
"""The fields of fsspec's file systems that change when the content of a file changes."""


def is_url(location: str) -> bool:
    """Return whether the location of a store is a URL."""
    return "://" in location


def fetch_local_copy(url: str, cache: str | None = None) -> Path:
    """Copy the store at a URL to this machine, and return the folder of the copy.

    Copies are in the folder `cache`, by default the user's cache folder. Each state of a store is
    copied once. Copies are never removed.
    """
    with require_extra("ray", "a URL needs fsspec"):
        import fsspec
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ArgumentError(f"{url}: {error}") from None
    try:
        listing: dict[str, Any] = system.find(root, detail=True)
    except OSError as error:
        raise StoreUnreadableError(f"{url} cannot be listed: {error}") from None
    named = {os.path.relpath(name, root): info for name, info in listing.items()}
    # An untrusted bucket may contain names such as "../..": accept only file names of a store.
    files = {name: info for name, info in named.items() if is_store_file(name)}
    if not files:
        raise StoreUnreadableError(f"{url}: there is no store; pass the URL of its folder")
    target = _cache_folder(cache) / f"{_state_name(url, files)}.qkv"
    if not target.exists():
        part = target.with_suffix(f".{token_hex(4)}")
        try:
            part.mkdir(0o700)
            for name in files:
                system.get_file(f"{root.rstrip('/')}/{name}", str(part / name))
            part.rename(target)
        except OSError as error:
            if not target.exists():  # another process may have copied the store meanwhile
                raise StoreUnreadableError(f"{url} cannot be copied: {error}") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _cache_folder(cache: str | None) -> Path:
    """Return the folder for copies; create the folder if it does not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) if cache else Path(home) / "qkv"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _state_name(url: str, files: dict[str, Any]) -> str:
    """Return a name for the current state of a store: a hash of the metadata of its files."""
    state = [
        [name, *(str(info[field]) for field in FILE_STATE_FIELDS if field in info)]
        for name, info in sorted(files.items())
    ]
    return blake2b(json.dumps([url, state]).encode(), digest_size=16).hexdigest()
