import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests import sampling
from tests.browser import browser, page

__all__ = ["browser", "page"]

STARTED = time.monotonic()
SESSION: list[pytest.Session] = []
TIME_LIMIT_REACHED: list[bool] = []

# A busy machine is slow, so there is no deadline. `make test-full` looks for new examples; other
# runs try the same ones.
settings.register_profile(
    "qkv",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not sampling.FULL,
)
settings.load_profile("qkv")

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # read when JAX starts: shards need two

if find_spec("torch") is not None and find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        # Read when triton is imported, so before any test module.
        os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401  which ends the process where TensorFlow was loaded before it


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "sample(count, always=()): run so many cases of this test, drawn by the date, and those "
        "whose id contains one of `always`. `make test-full` runs all of them.",
    )
    config.addinivalue_line(
        "markers",
        "sample_of_module(count): run so many cases of this module, drawn by the date, one of each "
        "test first. All run in `make test-full`, or if a test is named.",
    )
    config.addinivalue_line("markers", "full: run in `make test-full` only.")
    config.addinivalue_line(
        "markers", "applies(predicate): collect the cases whose parameters satisfy the predicate."
    )


def pytest_report_header() -> str:
    cases = "all" if sampling.FULL else f"a sample (QKV_TEST_DAY={sampling.DAY})"
    return f"cases of large products: {cases}"


def is_applicable(item: pytest.Item) -> bool:
    marks = item.iter_markers("applies")
    return all(mark.args[0](**item.callspec.params) for mark in marks)


def group_items(
    items: Iterable[pytest.Item], key: Callable[[pytest.Item], str]
) -> list[list[pytest.Item]]:
    """Return the items in groups of one key, each in the order of the day's draw."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: sampling.draw(item.nodeid)):
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def name_function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def sample_functions(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items that `sample` leaves out: of each function, all but the first of the day."""
    left_out: set[pytest.Item] = set()
    for group in group_items(items, name_function):
        if mark := group[0].get_closest_marker("sample"):
            always = mark.kwargs.get("always", ())
            cases = [item for item in group if not any(part in item.nodeid for part in always)]
            left_out.update(cases[mark.args[0] :])
    return left_out


def sample_modules(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items that `sample_of_module` leaves out.

    One case of every function runs first, then a second one, and so on up to the count.
    """
    left_out: set[pytest.Item] = set()
    for group in group_items(items, lambda item: str(item.path)):
        if mark := group[0].get_closest_marker("sample_of_module"):
            rounds = itertools.zip_longest(*group_items(group, name_function))
            cases = [item for items in rounds for item in items if item is not None]
            left_out.update(cases[mark.args[0] :])
    return left_out


def name_slow_test(item: pytest.Item) -> str:
    """Return the name of an item's function as in `slow_tests.txt`."""
    path, _, name = name_function(item).partition("::")
    module, _, function = ("::" + name).rpartition("::")
    classes = module.replace("::", ".")
    return f"{path.removesuffix('.py').replace('/', '.')}{classes}::{function}"


def estimate_seconds(items: list[pytest.Item]) -> dict[pytest.Item, float]:
    """Return the seconds of the items that are slow.

    A module with `sample_of_module` has functions that no run has measured. They count like the
    others of the module.
    """
    known = sampling.read_slow_tests()
    by_module: dict[str, list[float]] = {}
    for name, seconds in known.items():
        by_module.setdefault(name.partition("::")[0], []).append(seconds)
    found: dict[pytest.Item, float] = {}
    for item in items:
        name = name_slow_test(item)
        others = by_module.get(name.partition("::")[0])
        if name in known:
            found[item] = known[name]
        elif others and item.get_closest_marker("sample_of_module"):
            found[item] = sum(others) / len(others)
    return found


def sample_slow_tests(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the slow items that another day's run has."""
    seconds = estimate_seconds(items)
    drawn = sampling.sample_by_seconds(seconds, sampling.SHARE, lambda item: item.nodeid)
    return seconds.keys() - drawn


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases that do not apply, and what only `make test-full` runs."""
    items[:] = [item for item in items if is_applicable(item)]
    if sampling.FULL:
        return
    left_out = {item for item in items if item.get_closest_marker("full")}
    left_out |= sample_functions(items)
    if not any("::" in argument for argument in config.args):
        left_out |= sample_modules([item for item in items if item not in left_out])
    if all(Path(argument).is_dir() for argument in config.args):  # else the caller names a module
        left_out |= sample_slow_tests([item for item in items if item not in left_out])
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Stop after the seconds of QKV_TEST_SECONDS, which `make check` sets."""
    limit = float(os.environ.get("QKV_TEST_SECONDS", "inf"))
    if SESSION and time.monotonic() - STARTED > limit:
        TIME_LIMIT_REACHED.append(True)
        SESSION[0].shouldstop = f"stopped after {limit:g} s: `make test` runs the rest"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report success if the time limit stopped the run and no test had failed."""
    if TIME_LIMIT_REACHED and not session.testsfailed:
        session.exitstatus = pytest.ExitCode.OK


def pytest_sessionstart(session: pytest.Session) -> None:
    SESSION.append(session)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators, so that no test depends on those before it."""
    np.random.seed(0)  # noqa: NPY002  scikit-learn draws from it
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)
