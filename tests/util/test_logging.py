"""The logger "qkv": what is chosen, read and refused."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np

import qkv
from tests.cli.run import HERE
from tests.cli.run import qkv as command


def test_it_tells_the_engine_and_why_not_the_others(caplog):
    x = np.full((3, 5), 0.5)
    with caplog.at_level(logging.DEBUG, "qkv"):
        qkv.attend(x, x, x, score=lambda q, k: q @ k.T)
    (message,) = caplog.messages
    assert message.startswith("engine dense for ")
    refused = dict(qkv.explain(x, x, x, score=lambda q, k: q @ k.T).refusals)
    assert "native" in refused
    for name, why in refused.items():
        assert f"not {name}: {why}" in message


def test_it_tells_what_is_read(caplog, tmp_path):
    table = tmp_path / "people.csv"
    table.write_text("name,age\n" + "".join(f"p{i},{i}\n" for i in range(5000)))
    path = tmp_path / "people.qkv"
    qkv.Database.from_source(table, key="name", encoder="exact", path=path).close()
    with caplog.at_level(logging.DEBUG, "qkv"):
        qkv.Database.from_source(table, key="name", encoder="exact")
        with qkv.open(path) as D:
            D.ask("p7")
    assert "read people: 5000 rows of name, age" in caplog.messages
    assert f"read {path}, version 1: 5000 rows" in caplog.messages
    assert any(m.startswith(f"read {path}/") and "rows" in m for m in caplog.messages)


def test_it_is_silent_and_not_even_loaded_by_itself(caplog):
    qkv.attend(np.eye(4), np.eye(4), np.eye(4), score=lambda q, k: q @ k.T)
    assert not caplog.messages
    code = "import sys; from qkv.util.logging import debug_logger; debug_logger(); "
    code += "print('logging' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=HERE, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_the_command_tells_it_on_stderr(tmp_path):
    table = tmp_path / "people.csv"
    table.write_text("name,age\nLi,34\n")
    logger = logging.getLogger("qkv")
    try:
        output = command("rows", table, "--debug")
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
    assert "read people: 1 rows of name, age" in output.stderr
    assert "read people" not in output.stdout
