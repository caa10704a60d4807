"""Stores on object storage, as folders of this machine: what fsspec can list and read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from qkv.database.faults import Unreadable
from qkv.database.store.folder import is_part
from qkv.errors import ArgumentError, MissingExtra

MARKS = ("size", "mtime", "LastModified", "last_modified", "ETag", "etag", "md5Hash", "created")
"""What tells one state of a file from another, by the names that file systems have for it."""


def is_url(place: str) -> bool:
    return "://" in place


def local(url: str, cache: str | None = None) -> Path:
    """A copy of the store at the URL as it is now; made once for each state of its files.

    It lies in `cache`, by default in the user's folder of caches. Nothing in it is removed.
    """
    try:
        import fsspec
    except ImportError:
        raise MissingExtra("a URL needs fsspec: pip install 'qkv[ray]'") from None
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as fault:
        raise ArgumentError(f"{url}: {fault}") from None
    try:
        found: dict[str, Any] = system.find(root, detail=True)
    except OSError as fault:
        raise Unreadable(f"{url} cannot be listed: {fault}") from None
    named = {os.path.relpath(name, root): about for name, about in found.items()}
    # Whoever filled a bucket names its files, "../.." and all: a store's own are plain names.
    files = {name: about for name, about in named.items() if is_part(name)}
    if not files:
        raise Unreadable(f"{url}: there is no store; give the URL of its folder")
    target = _folder(cache) / f"{_mark(url, files)}.qkv"
    if not target.exists():
        part = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            for name in files:
                system.get_file(f"{root.rstrip('/')}/{name}", str(part / name))
            part.rename(target)
        except OSError as fault:
            if not target.exists():  # another process may have been first
                raise Unreadable(f"{url} cannot be copied: {fault}") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _folder(cache: str | None) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) if cache else Path(home) / "qkv"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _mark(url: str, files: dict[str, Any]) -> str:
    """A name for this state of the store."""
    told = [
        [name, *(str(about[mark]) for mark in MARKS if mark in about)]
        for name, about in sorted(files.items())
    ]
    return blake2b(json.dumps([url, told]).encode(), digest_size=16).hexdigest()
