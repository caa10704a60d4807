import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import run_checks

MAKEFILE = """
good:
\t@echo fine
bad:
\t@echo this is broken; exit 1
tests:
\t@printf '%s' '{xml}' > results/tests.xml; exit 1
"""
XML = (
    '<testsuite tests="4" failures="1" errors="0" skipped="1">'
    '<testcase classname="tests.a" name="first"><failure>it was 3</failure></testcase></testsuite>'
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a Makefile, and results of an earlier run."""
    (tmp_path / "Makefile").write_text(MAKEFILE.format(xml=XML))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gone.xml").write_text(XML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


def test_tests_are_counted_and_failures_are_printed(folder, capsys):
    assert run_checks.main("results", "2", "good", "bad", "tests") == 1
    lines = capsys.readouterr().out.splitlines()
    counts = {line.split()[0]: line.split()[1:7] for line in lines[:3]}
    assert counts["good"] == ["1", "passed,", "0", "failed,", "0", "skipped"]
    assert counts["bad"] == ["0", "passed,", "1", "failed,", "0", "skipped"]
    assert counts["tests"] == ["2", "passed,", "1", "failed,", "1", "skipped"]
    assert "--- failed: tests.a::first" in lines
    assert "it was 3" in lines
    assert "this is broken" in lines
    assert lines[-1].startswith("3 passed, 2 failed in ")
    assert not (folder / "results" / "gone.xml").exists()


def test_success(folder, capsys):
    assert run_checks.main("results", "1", "good") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 passed, 0 failed")
    assert (folder / "results" / "good.txt").read_text() == "fine\n"


def test_an_interrupt_stops_what_runs(folder):
    (folder / "Makefile").write_text("slow:\n\t@echo $$$$ > started; exec sleep 600\n")
    script = Path(run_checks.__file__)
    run = subprocess.Popen(
        [sys.executable, script, "results", "1", "slow", "good"], stderr=subprocess.PIPE, text=True
    )
    while not (folder / "started").exists() or not (folder / "started").read_text().strip():
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    assert "stopped" in run.communicate()[1]
    assert run.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "started").read_text()), 0)
