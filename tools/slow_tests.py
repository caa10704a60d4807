"""List the tests that take long, from the results of `make test`, in tests/slow_tests.txt.

    QKV_TEST_SHARE=1 make test && python -m tools.slow_tests

Every line holds the seconds of one case of a function, and the name of the function. `make test`
runs a part of these cases each day (tests/conftest.py); `make test-full` runs all of them.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "test-results"
TARGET = ROOT / "tests" / "slow_tests.txt"
MIN_SECONDS = 0.5
"""A function is slow if one of its cases takes longer."""


def find_slow_functions(paths: Iterable[Path]) -> dict[str, float]:
    """Return the mean seconds of a case of each slow function."""
    seconds: dict[str, list[float]] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname')}::{str(case.get('name')).partition('[')[0]}"
            if name.startswith("tests."):
                seconds.setdefault(name, []).append(float(case.get("time", 0)))
    slow = {name: sum(x) / len(x) for name, x in seconds.items() if max(x) > MIN_SECONDS}
    return dict(sorted(slow.items()))


def main() -> None:
    paths = sorted(RESULTS.glob("*.xml"))
    if not paths:
        sys.exit(f"no results in {RESULTS}: run `make test` first")
    slow = find_slow_functions(paths)
    TARGET.write_text("".join(f"{x:.1f} {name}\n" for name, x in slow.items()))
    print(f"{len(slow)} functions in {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
