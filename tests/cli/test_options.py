"""Help, completion and what the documentation says of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.cli import COMMAND_MODULES, command
from tests.cli.run import HERE, ROOT, qkv, run


class TestHelp:
    def test_every_command_explains_itself(self) -> None:
        result = qkv("--help")
        assert result.exit_code == 0
        for name in COMMAND_MODULES:
            assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE)
            one = qkv(name, "--help")
            assert one.exit_code == 0
            assert "--json" in one.stdout
            assert "--debug" in one.stdout
        # A sentence that was cut ends in three dots.
        assert "...\n" not in result.stdout.partition("Commands:")[2]

    def test_exit_codes_are_documented(self) -> None:
        shown = qkv("--help").stdout
        page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
        for code, meaning in command.EXIT_CODES.items():
            assert f"{code}  {meaning}" in shown
            assert f"| {code} | {meaning} |" in page

    def test_docs_name_every_command_and_shared_option(self) -> None:
        page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
        for name in COMMAND_MODULES:
            assert f"`qkv {name}" in page
        for option in re.findall(
            r"^  (?:-\w, )?(--[\w-]+)", qkv("ask", "--help").stdout, re.MULTILINE
        ):
            assert f"`{option}" in page or option == "--help"

    def test_help_loads_neither_numpy_nor_rich(self) -> None:
        code = (
            "import sys\nfrom qkv.cli import app\n"
            "try: app(['--help'], prog_name='qkv')\nexcept SystemExit: pass\n"
            "print(sorted({m.partition('.')[0] for m in sys.modules} & {'numpy', 'rich'}))"
        )
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=HERE
        ).stdout
        assert out.splitlines()[-1] == "[]"

    def test_version(self) -> None:
        import qkv as package

        assert qkv("--version").stdout == f"qkv {package.__version__}\n"

    @pytest.mark.parametrize(
        ("line", "result"),
        [
            ("qkv vers", "versions"),
            ("qkv expo", "export"),
            ("qkv ask t.csv x --wei", "--weighting"),
            ("qkv ask t.csv x -w spa", "sparsemax"),
            ("qkv ask t.csv x --score gau", "gaussian"),
            ("qkv ask t.csv x --weighting top", "topk:"),
            ("qkv import t.csv t.qkv --encoder wo", "words"),
            ("qkv ask book", "books.csv"),
        ],
    )
    def test_completion(self, table: Path, line: str, result: str) -> None:
        words = line.split()
        environment = {
            "_QKV_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
        out = run(env=environment, cwd=table.parent)[1]
        assert result in out.split()
