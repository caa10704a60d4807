"""A temporary PostgreSQL server for the tests of PostgreSQL sources.

Without PostgreSQL's programs, `test_postgres.py` is not collected; `make postgres` installs them.
"""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def find_program(name: str) -> str | None:
    """Return the path of a PostgreSQL program; Debian installs them outside of PATH."""
    folders = sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


collect_ignore: list[str] = []
if not (find_program("initdb") and find_program("pg_ctl") and find_spec("psycopg")):
    collect_ignore.append("test_postgres.py")


def unprivileged_user() -> str | None:
    """Return the user that runs the server, because initdb refuses root; None: the current one."""
    if os.geteuid() != 0:
        return None
    users = {user.pw_name for user in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in users)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a new server that listens on a Unix socket only; stopped at the end."""
    user = unprivileged_user()
    # Not tmp_path: only root could enter it, and a socket's path has at most about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="qkv-postgres-"))
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        log = folder.with_suffix(".log")
        with log.open("ab") as output:
            done = subprocess.run(
                [str(find_program(program)), "-D", str(folder / "data"), *arguments],
                user=user,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=120,
            )
        assert done.returncode == 0, f"{program} failed:\n{log.read_text(errors='replace')}"

    try:
        run("initdb", "-U", "qkv", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-w", "-o", options, "start")
        try:
            yield f"postgresql://qkv@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[tuple[Any, str, str]]:
    """A connection, the name of a new schema, and the start of a URL that takes more options."""
    import psycopg

    schema = f"qkv_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(f"create schema {schema}")
        try:
            yield server, schema, f"{postgres_url}&"
        finally:
            server.execute(f"drop schema {schema} cascade")
