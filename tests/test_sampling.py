"""Which tests run on a day."""

from __future__ import annotations

import pytest

from tests import conftest, sampling
from tools import slow_tests

NAMES = [f"case {i}" for i in range(40)]


def test_a_sample_of_slow_tests_needs_its_share_of_the_time(monkeypatch):
    seconds = {name: 1.0 + i % 5 for i, name in enumerate(NAMES)}
    days = []
    for day in range(30):
        monkeypatch.setattr(sampling, "DAY", str(day))
        drawn = sampling.sample_by_seconds(seconds, 0.3, str)
        assert sum(seconds[x] for x in drawn) == pytest.approx(0.3 * sum(seconds.values()), abs=3)
        days.append(drawn)
    assert set.union(*days) == set(NAMES)
    assert sampling.sample_by_seconds(seconds, 1.0, str) == set(NAMES)
    assert sampling.sample_by_seconds({}, 0.3, str) == set()


def test_slow_tests_are_listed_with_the_names_of_the_results(request, tmp_path):
    name = conftest.name_slow_test(request.node)
    here = "test_slow_tests_are_listed_with_the_names_of_the_results"
    assert name == f"tests.test_sampling::{here}"
    (tmp_path / "unit.xml").write_text(
        "<testsuite>"
        f'<testcase classname="tests.test_sampling" name="{here}[a]" time="0.9"/>'
        f'<testcase classname="tests.test_sampling" name="{here}[b]" time="0.1"/>'
        '<testcase classname="tests.a.B" name="test_quick" time="0.1"/>'
        '<testcase classname="qkv.answer" name="qkv.answer.Answer" time="9"/>'
        "</testsuite>"
    )
    assert slow_tests.find_slow_functions(tmp_path.glob("*.xml")) == {name: 0.5}


class TestInClass:
    def test_name(self, request):
        assert conftest.name_slow_test(request.node) == (
            "tests.test_sampling.TestInClass::test_name"
        )
