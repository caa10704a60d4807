"""Modules of the caller's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import HERE, data, qkv, run

PLUGIN = """
from dataclasses import dataclass

import numpy as np
from qkv import scores, weightings
from qkv.database import encoders

@scores.register("far")
@dataclass(frozen=True)
class Far(scores.Score):
    factor: float = 1.0

    def __call__(self, query, key):
        return -self.factor * scores.Laplace()(query, key)

@weightings.register("second")
@dataclass(frozen=True)
class Second(weightings.Weighting):
    def weights(self, scores, live, k):
        return self.block_weights(scores, live, k, ())

    def block_weights(self, scores, live, k, found):
        return 0.0 * scores + (k == 1)

@encoders.register("lengths")
@dataclass(frozen=True)
class Lengths(encoders.Encoder):
    kind = "lengths"
    width = 1

    def encode(self, keys):
        return np.array([[len(key)] for key in keys], np.float32).reshape(-1, 1)

    def default_score(self, rows):
        return scores.Gaussian(0.1)

    def settings(self):
        return {"kind": self.kind}

    @classmethod
    def build(cls, settings, arrays):
        return cls()
"""


class TestPlugin:
    """In processes of their own, so that no name outlives its test."""

    @pytest.fixture
    def plugin_file(self, tmp_path: Path) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(PLUGIN)
        return path

    def test_a_score_a_weighting_and_an_encoder(self, plugin_file: Path, table: Path) -> None:
        columns = ("--key", "title", "--value", "author", "--json")

        def answer(*options: str) -> Any:
            code, out, err = run("--plugin", plugin_file, "ask", table, "Five!", *columns, *options)
            assert (code, err) == (0, "")
            return json.loads(out)

        assert answer("-w", "second")["value"] == "Jane Austen"
        near = answer("-e", "lengths")  # Emma and Dune have one letter less, each other more
        assert {row["key"] for row in near["rows"][:2]} == {"Emma", "Dune"}
        assert answer("-e", "lengths", "-s", "far", "-w", "hard")["value"] == "Paulo Coelho"
        one, two = (answer("-e", "lengths", "-s", f"far:{x}")["rows"][0] for x in (0.1, 1))
        assert one["key"] == two["key"] == "The Alchemist"
        assert one["weight"] < two["weight"]

    def test_a_database_with_such_an_encoder(self, plugin_file: Path, table: Path) -> None:
        store = table.with_suffix(".qkv")
        made = run("--plugin", plugin_file, "import", table, store, "-k", "title", "-e", "lengths")
        assert made[0] == 0
        assert run("--plugin", plugin_file, "ask", store, "Five!")[0] == 0
        code, out, err = run("ask", store, "Five!")
        assert (code, out) == (2, "")
        assert "unknown encoder 'lengths'" in err and "encoders.register" in err

    def test_a_module_on_the_path_and_several(self, plugin_file: Path, table: Path) -> None:
        other = plugin_file.with_name("other.py")
        other.write_text("import mine\n")
        env = {"PYTHONPATH": os.pathsep.join([HERE["PYTHONPATH"], str(plugin_file.parent)])}
        command = ("ask", table, "Emma", "-s", "far", "--json")
        assert run("--plugin", "json", "--plugin", "mine", *command, env=env)[0] == 0
        assert run("--plugin", other, *command, env=env)[0] == 0
        assert run(*command, "--plugin", "json", "--plugin", other, env=env)[0] == 0
        assert run("--plugin", "json", *command, "--plugin", other, env=env)[0] == 0

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [
            ("absent.py", None, "there is no such file"),
            ("no_such_module", None, "ModuleNotFoundError: No module named 'no_such_module'"),
            ("wrong.py", "1 / 0", "ZeroDivisionError: division by zero"),
            ("wrong.py", "def", "SyntaxError: invalid syntax"),
            ("wrong.py", "from qkv import scores; scores.register('dot', scores.Exact)", "choose"),
        ],
    )
    def test_one_that_fails_is_one_line(
        self, name: str, text: str | None, says: str, tmp_path: Path, table: Path
    ) -> None:
        path = tmp_path / name if name.endswith(".py") else name
        if text is not None:
            Path(path).write_text(text)
        fault = data("--plugin", path, "ask", table, "Emma", code=2)
        assert fault["error"].startswith(f"--plugin {path} cannot be imported: ")
        assert says in fault["error"]
        shown = qkv("--plugin", path, "ask", table, "Emma").stderr
        assert shown == f"qkv: {fault['error']}\n"
