"""What a process prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkv.cli import command, weights
from qkv.errors import ArgumentError, MissingExtraError, QkvError
from tests.cli.run import HERE, data, process, qkv, run


class TestProcess:
    """What only a real process shows."""

    def test_a_terminal_is_coloured_and_nothing_wider_than_it(self, table: Path) -> None:
        pty = pytest.importorskip("pty")

        def shown(width: int, **environment: str) -> str:
            ours, theirs = pty.openpty()
            child = subprocess.Popen(
                [sys.executable, "-m", "qkv", "ask", str(table), "Dune"],
                stdout=theirs,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env=HERE | {"TERM": "xterm-256color", "COLUMNS": str(width)} | environment,
            )
            os.close(theirs)
            parts = []
            while True:
                try:
                    part = os.read(ours, 65536)
                except OSError:  # Linux's word for the end of a terminal
                    break
                if not part:
                    break
                parts.append(part)
            os.close(ours)
            assert child.communicate(timeout=300)[1] == b""
            assert child.returncode == 0
            return b"".join(parts).decode()

        text = shown(40)
        assert "\x1b[" in text
        assert "…" in text
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
        rows = [line for line in plain.splitlines() if "%" in line and "effective rows" not in line]
        assert len(rows) == 5
        assert max(map(len, rows)) <= 40
        text = shown(80, NO_COLOR="1")
        assert "\x1b[3" not in text

    def test_a_look_up_loads_no_part_of_the_equation(self, tmp_path: Path) -> None:
        made = tmp_path / "books.qkv"
        assert qkv("add", made, "Dune", "Frank Herbert").exit_code == 0
        code = (
            "import atexit, sys, qkv.cli; sys.argv[1:] = ['get', sys.argv[1], 'Dune']\n"
            "atexit.register(lambda: print(*sys.modules))\n"
            "qkv.cli.main()"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, str(made)],
            capture_output=True,
            text=True,
            env=HERE,
            check=True,
        )
        value, loaded = result.stdout.splitlines()
        assert value == "Frank Herbert"
        modules = {"qkv.attention", "qkv.engines", "qkv.scores", "rich.console", "torch", "pandas"}
        assert not modules & set(loaded.split())

    def test_a_reader_that_goes_away(self, tmp_path: Path) -> None:
        lines = "\n".join(["Li"] * 2000)
        table = tmp_path / "names.csv"
        table.write_text("last,first\nLi,Mu\nHu,Rachel\n")
        with process("ask", table, "-", "--json", stdin=subprocess.PIPE) as child:
            assert child.stdin and child.stdout and child.stderr
            child.stdin.write(lines)
            child.stdin.close()
            child.stdout.readline()
            child.stdout.close()
            assert child.wait(timeout=300) == command.EXIT_BROKEN_PIPE
            assert child.stderr.read() == ""

    def test_ctrl_c(self, tmp_path: Path) -> None:
        table = tmp_path / "names.csv"
        table.write_text("last,first\nLi,Mu\nHu,Rachel\n")
        with process("ask", table, "-", "--json", stdin=subprocess.PIPE) as child:
            assert child.stdin and child.stdout and child.stderr
            child.stdin.write("Li\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline())["value"] == "Mu"  # it waits for more now
            time.sleep(0.1)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=300) == 130
            assert child.stderr.read() == "qkv: stopped\n"

    def test_ctrl_c_while_it_loads(self, tmp_path: Path) -> None:
        (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
        code = (
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import qkv.__main__ as q; q.main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, "qkv: stopped\n")

    def test_ctrl_c_while_python_runs_a_text(self, tmp_path: Path) -> None:
        """As it does for each dataclass; it would end by the signal, though that was caught."""
        (tmp_path / "slow.py").write_text(
            "import signal\nexec('signal.raise_signal(signal.SIGINT)')\n"
        )
        code, out, err = run("--plugin", tmp_path / "slow.py", "ask", "names.csv", "Li")
        assert (code, out, err) == (130, "", "qkv: stopped\n")

    def test_ctrl_c_leaves_nothing_half_imported(self, tmp_path: Path) -> None:
        table, path = tmp_path / "names.csv", tmp_path / "names.qkv"
        table.write_text("key,value\n" + "".join(f"name {i},{i}\n" for i in range(200_000)))
        with process("import", table, path) as child:
            while not list(tmp_path.glob(".names.qkv.*")) and child.poll() is None:
                time.sleep(0.01)
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=300) == 130
            assert child.stderr.read() == "qkv: stopped\n"
        assert list(tmp_path.iterdir()) == [table]

    @pytest.mark.parametrize(
        "encoding", ["ascii", "ascii:surrogateescape"]
    )  # the latter as in locale C
    def test_an_encoding_without_blocks(self, tmp_path: Path, encoding: str) -> None:
        table = tmp_path / "names.csv"
        table.write_text("last,first\nLi,Mü\nHu,黎\n", encoding="utf-8")
        environment = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        code, out, err = run("ask", table, "Hu", "-w", "hard", env=environment)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == "?"
        assert "####" in out

    def test_no_progress_outside_a_terminal(self, table: Path) -> None:
        code, out, err = run("import", table, table.with_suffix(".qkv"))
        assert (code, err) == (0, "")
        assert out == f"{table.with_suffix('.qkv')}: 8 rows, version 1\n"


class TestErrors:
    def test_each_has_its_code(self) -> None:
        from qkv.database.errors import StoreDamagedError, StoreLockedError

        cases: list[tuple[BaseException, int]] = [
            (command.NothingFoundError("x"), 1),
            (ArgumentError("x"), 2),
            (QkvError("x"), 2),
            (FileNotFoundError(2, "No such file", "a.csv"), 2),
            (StoreDamagedError("x"), 3),
            (StoreLockedError("x"), 4),
            (MissingExtraError("x"), 5),
            (ZeroDivisionError("x"), 70),
            (KeyboardInterrupt(), 130),
            (BrokenPipeError(), 141),
        ]
        for error, code in cases:
            assert command.diagnose_error(error)[0] == code
        assert command.diagnose_error(PermissionError(13, "Denied", "a.csv"))[1] == "a.csv: Denied"

    def test_a_bug_is_one_line_unless_debugged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("by naught")

        monkeypatch.setattr(weights, "compute_weights", broken)
        result = qkv("weights", "a b", "--words")
        assert result.exit_code == 70
        assert result.stderr.startswith("qkv: a bug, ZeroDivisionError: by naught.")
        assert result.stderr.count("\n") == 1
        for inputs in (
            ("weights", "a b", "--words", "--debug"),
            ("--debug", "weights", "--words", "a b"),
        ):
            result = qkv(*inputs)
            assert result.exit_code == 70
            assert "Traceback" in result.stderr

    def test_json_stays_json(self) -> None:
        assert data("weights", " ", code=2) == {
            "error": "the sentence ' ' has no words",
            "code": 2,
        }
