"""One JupyterLab for the tests of a worker, on loopback, with folders of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).parents[2] / "src"
# It requests news and extensions from the network unless disabled.
QUIET = [
    "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--LabApp.collaborative=False",
]


class Lab:
    """A notebook of cells, with a kernel that is started before the browser is."""

    def __init__(self, root: Path, url: str, token: str) -> None:
        self.root, self.url, self.token = root, url, token
        self.ask(
            "api/sessions", path="page.ipynb", name="", type="notebook", kernel={"name": "python3"}
        )

    def ask(self, at: str, **body: Any) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{self.url}/{at}", data, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def run(self, page: Any, *cells: str) -> None:
        """Opens the notebook with these cells in it, and runs them one after another."""
        made: list[dict[str, Any]] = [
            {"cell_type": "code", "source": x, "metadata": {}, "outputs": [], "id": f"c{i}",
             "execution_count": None}
            for i, x in enumerate(cells)
        ]  # fmt: skip
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book = {
            "cells": made,
            "metadata": {"kernelspec": kernel},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.root / "page.ipynb").write_text(json.dumps(book))
        page.goto(f"{self.url}/lab/tree/page.ipynb?token={self.token}")
        page.get_by_text("| Idle").wait_for()
        page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        for _ in cells:
            page.keyboard.press("Shift+Enter")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: Any) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
             "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "HOME")  # fmt: skip
    own = {name: str(folder / name.lower()) for name in names}
    settings = Path(own["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab/apputils-extension"
    for place in (*map(Path, own.values()), settings):
        place.mkdir(parents=True)
    news = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(news))
    root = folder / "root"
    root.mkdir()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *QUIET,
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={token}",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        command, env=os.environ | own | {"PYTHONPATH": path}, stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while server.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        assert server.poll() is None, (folder / "log").read_text()
        yield Lab(root, url, token)
    finally:
        server.terminate()
        server.wait(300)
        log.close()
