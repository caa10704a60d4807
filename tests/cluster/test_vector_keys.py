"""Shards compare vectors as the database does."""

from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.cluster import split
from tests.cluster.local_shards import cluster
from tests.database.vector_kinds import VECTOR_KINDS


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_shards_compare_vectors_like_the_whole(kind: str, tmp_path: Path) -> None:
    keys = VECTOR_KINDS[kind][0](np.random.default_rng(7))
    with qkv.open(tmp_path / "v.qkv") as database:
        database.add(keys, np.arange(400.0))
        described, weights = (
            database.describe(),
            [answer.weights for answer in database.ask(keys[:3])],
        )
    parts = [tmp_path / f"{i}.qkv" for i in range(2)]
    split(tmp_path / "v.qkv", parts)
    for sources in ([tmp_path / "v.qkv"], parts):
        with cluster(list(map(str, sources)), 2) as whole:
            assert whole.describe() == described
            np.testing.assert_allclose(
                [np.asarray(answer.weights) for answer in whole.ask(keys[:3])],
                weights,
                rtol=1e-4,
                atol=1e-7,
            )


def test_stores_that_were_made_apart_can_be_shards(tmp_path: Path) -> None:
    keys = VECTOR_KINDS["unit embeddings"][0](np.random.default_rng(8))
    parts = [tmp_path / f"{i}.qkv" for i in range(2)]
    described = []
    for part, rows in zip(parts, (keys[:250], keys[250:]), strict=True):
        with qkv.open(part) as database:
            database.add(rows, np.arange(float(len(rows))))
            described.append(database.describe()["key"])
    assert described[0] != described[1]
    with cluster(list(map(str, parts)), 2) as whole:
        assert whole.describe()["key"] == described[0]
        assert whole.ask(keys[300]).rows[0].weight >= 0.5
