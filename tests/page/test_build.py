"""The module in the wheel is the one that frontend/ makes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "src/qkv/page/static/qkv.js"
LEAST = "node is not installed: the module cannot be rebuilt here"


@pytest.mark.skipif(shutil.which("node") is None, reason=LEAST)
def test_the_committed_module_is_what_the_sources_make(tmp_path: Path) -> None:
    made = tmp_path / "qkv.js"
    command = ["make", "--no-print-directory", "page", f"PAGE={made}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert made.read_bytes() == BUILT.read_bytes(), "run `make page` and commit what it wrote"


def test_it_is_small_and_reaches_for_nothing() -> None:
    text = BUILT.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    assert "</script" not in text.lower() and "<!--" not in text
    assert set(re.findall(r"https?://[^\"'`\s]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_lock_file_names_no_host() -> None:
    assert "://" not in (ROOT / "frontend/package-lock.json").read_text(encoding="utf-8")
