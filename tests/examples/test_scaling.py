"""The cost model and the simulation of docs/scaling.md."""

import numpy as np
import pytest

from examples.scaling import Machine, hedged, plan, waits


def test_the_model_is_its_formula() -> None:
    machine = Machine(memory=1e9, bandwidth=1e9, flops=1e12, network=1e8, call=1e-3)
    result = plan(1e6, machine, width=250, pooled=0)  # a gigabyte of keys on one machine
    assert (result.machines, result.held) == (1, 1e9)
    assert result.total == pytest.approx(2e-3 + 1.0 + 8e-8)
    many = plan(1e6, machine, width=250, pooled=0, batch=10_000)
    assert many.scan == pytest.approx(2 * 10_000 * 1e6 * 250 / 1e12)  # products take longer
    assert plan(1e6, machine, width=250, pooled=0, within=0.25).total <= 0.25


def test_a_tree_merges_what_one_place_cannot() -> None:
    assert plan(1e12, batch=64, fan=8).merge < plan(1e12, batch=64).merge


def test_a_hedge_is_the_first_of_two_answers() -> None:
    first, second = np.array([1.0, 9.0, 9.0]), np.array([5.0, 1.0, 20.0])
    np.testing.assert_array_equal(hedged(first, second, 2.0), [1.0, 3.0, 9.0])


def test_hedges_shorten_the_tail() -> None:
    result = waits(64, slow=0.01, factor=10, queries=500)
    assert result["hedged p99"] < result["p99"] / 2 and result["more requests"] <= 0.06
