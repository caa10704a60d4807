"""Keys that several processes hold are attended to as one process would."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from qkv.cluster import custom_op  # noqa: E402
from qkv.cluster import torch as cluster  # noqa: E402
from tests.cluster.process_group_checks import PAIRS, run_ranks  # noqa: E402


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """What each of four processes finds wrong, in groups of one to four."""
    return run_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_as_one_process(name, size, faults):
    assert not any(rank.get((name, size)) for rank in faults), faults
    assert sum((name, size) in rank for rank in faults) == size


def test_without_a_group():
    x = torch.ones(1, 2)
    with pytest.raises(TypeError, match="init_process_group"):
        cluster.attend(x, x, x)


def test_names_are_spelled_for_a_graph_as_they_are():
    arguments = {'a "quoted" name': "back\\slash and\nline", "plain": [1, 0.5, None, True]}
    result = custom_op.decode_arguments(
        json.loads(custom_op.encode_arguments(arguments, []), strict=False), []
    )
    assert result == arguments | {"plain": (1, 0.5, None, True)}
