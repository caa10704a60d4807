"""A sample of the hostile requests of `bench/fuzz_http.py`."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("starlette")

from bench.fuzz_http import fuzz


def test_no_request_makes_an_error_of_the_server() -> None:
    statuses: Counter[int] = Counter()
    assert list(fuzz(300, seed=3, statuses=statuses, models=False)) == []
    assert statuses.total() == 300 and min(statuses[200], statuses[422]) > 20
