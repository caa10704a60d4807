"""Run checks in parallel and summarize them: run_checks.py RESULTS WORKERS CHECK [CHECK ...].

A check is a target of the Makefile. So many of them run at once, in the order given, so the longest
should come first. The output of each is in RESULTS/CHECK.txt and is printed when the check fails. A
check that writes RESULTS/CHECK.xml counts as its tests, any other as one. Ctrl-C stops all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

MAX_LINES = 40
"""Printed lines of the output of a failed test, and of a failed check without one."""
SECONDS_TO_STOP = 10


class Result(NamedTuple):
    """How a check ended."""

    check: str
    failed: bool
    seconds: float


def count_tests(report: Path, failed: bool) -> tuple[int, int, int]:
    """Return how many tests of a report passed, failed and were skipped."""
    passed = broken = skipped = 0
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            left_out = int(suite.get("skipped", 0))
            passed += int(suite.get("tests", 0)) - bad - left_out
            broken += bad
            skipped += left_out
    elif not failed:
        passed = 1
    # A run that crashed, or collected nothing, has no failing test to show for it.
    return passed, max(broken, int(failed)), skipped


def find_faults(report: Path) -> Iterator[str]:
    """Yield each failed test: its name and the end of its output."""
    if not report.exists():
        return
    for case in ElementTree.parse(report).iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            said = (fault.text or fault.get("message") or "").strip().splitlines()
            yield "\n".join([f"{case.get('classname')}::{case.get('name')}", *said[-MAX_LINES:]])


def start_check(check: str, results: Path) -> subprocess.Popen[bytes]:
    """Start `make CHECK` in a process group of its own, with its output in a file."""
    with (results / f"{check}.txt").open("wb") as output:
        return subprocess.Popen(
            [os.environ.get("MAKE", "make"), "--no-print-directory", check],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def stop_checks(running: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt checks, as Ctrl-C does, and kill those that have not ended after some seconds."""
    for process in running:
        os.killpg(process.pid, signal.SIGINT)
    for process in running:
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def run_all(checks: list[str], workers: int, results: Path) -> Iterator[Result]:
    """Run the checks, at most `workers` at once, and yield each when it ends."""
    waiting = deque(checks)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                check = waiting.popleft()
                running[check] = start_check(check, results), time.monotonic()
            time.sleep(0.1)
            for check, (process, started) in list(running.items()):
                if process.poll() is not None:
                    del running[check]
                    yield Result(check, process.returncode != 0, time.monotonic() - started)
    finally:
        stop_checks([process for process, _ in running.values()])


def print_result(result: Result, results: Path) -> tuple[int, int]:
    """Print one line about a check that ended; return how many tests passed and failed."""
    report = results / f"{result.check}.xml"
    passed, failed, skipped = count_tests(report, result.failed)
    print(
        f"{result.check:<18} {passed:5} passed, {failed} failed, {skipped} skipped"
        f"  {result.seconds:4.0f} s",
        flush=True,
    )
    return passed, failed


def print_faults(check: str, results: Path) -> None:
    """Print the failed tests of a check, or the end of its output if no test is to blame."""
    faults = list(find_faults(results / f"{check}.xml"))
    if not faults:
        said = (results / f"{check}.txt").read_text(errors="replace").splitlines()
        faults = ["\n".join([check, *said[-MAX_LINES:]])]
    for fault in faults:
        print(f"--- failed: {fault}")


def main(results: str, workers: str, *checks: str) -> int:
    folder = Path(results)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.xml"), *folder.glob("*.txt")):
        old.unlink()
    started = time.monotonic()
    totals, failures = [], []
    for result in run_all(list(checks), int(workers), folder):
        totals.append(print_result(result, folder))
        if totals[-1][1]:
            failures.append(result.check)
    for check in failures:
        print_faults(check, folder)
    passed, failed = map(sum, zip(*totals, strict=True))
    minutes = (time.monotonic() - started) / 60
    print(f"{passed} passed, {failed} failed in {minutes:.1f} minutes")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped")
