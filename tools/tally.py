"""Summarize a `make test`: tally.py RESULTS "every check" "the checks that failed".

A check with a JUnit file in RESULTS counts as its tests, any other as one. The failed tests are
printed last, each with the end of its output.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

MAX_LINES = 40
"""Lines of what a test that failed said."""


def count(report: Path, broke: bool) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            left_out = int(suite.get("skipped", 0))
            passed += int(suite.get("tests", 0)) - bad - left_out
            failed += bad
            skipped += left_out
    elif not broke:
        passed = 1
    # A run that crashed, or collected nothing, has no failing test to show for it.
    return passed, max(failed, int(broke)), skipped


def faults(report: Path) -> Iterator[str]:
    """Yield each failed test: its name, and the end of its output."""
    if not report.exists():
        return
    for case in ElementTree.parse(report).iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            said = (fault.text or fault.get("message") or "").strip().splitlines()
            yield "\n".join([f"{case.get('classname')}::{case.get('name')}", *said[-MAX_LINES:]])


def main(results: str, checks: str, broken: str) -> int:
    total_passed = total_failed = 0
    print("---")
    for check in checks.split():
        passed, failed, skipped = count(Path(results, f"{check}.xml"), check in broken.split())
        print(f"{check:<9} {passed} passed, {failed} failed, {skipped} skipped")
        total_passed += passed
        total_failed += failed
    for check in broken.split():
        for fault in faults(Path(results, f"{check}.xml")):
            print(f"--- failed: {fault}")
    print(f"{total_passed} passed, {total_failed} failed")
    return int(total_failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
