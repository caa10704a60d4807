"""Dropout masks: where their seed lies, and that every engine drops the same weights."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.engines.dropout import seed_array
from qkv.frameworks import load_framework

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("seed", [None, 7, "generator", "tensor"])
def test_the_seed_is_on_the_device_of_the_query(seed):
    """A kernel on CUDA that reads a seed in host memory ends the process."""
    seeds = {
        "generator": torch.Generator().manual_seed(3),
        "tensor": torch.tensor(7),
    }.get(seed, seed)
    like = torch.empty(2, 3, device="meta")
    result = seed_array(load_framework("torch"), seeds, like)
    assert result.device == like.device and result.dtype == torch.int32 and result.shape == (1, 1)


@pytest.mark.parametrize("weighting", ["entmax15", "sparsemax", "sigmoid", "softmax", "hard"])
def test_a_fresh_seed_obeys_manual_seed_and_changes_from_call_to_call(weighting):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 40, 8)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(qkv.attend(x, x, x, weighting=weighting, dropout_p=0.5))
        outs.append(qkv.attend(x, x, x, weighting=weighting, dropout_p=0.5))
    torch.testing.assert_close(outs[0], outs[2])
    torch.testing.assert_close(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[4])


@pytest.mark.parametrize("engine", ["dense", "streaming", None])
@pytest.mark.parametrize(
    "make", [np.random.default_rng, torch.Generator().manual_seed], ids=["numpy", "torch"]
)
def test_a_generator_gives_one_number_to_each_call(engine, make):
    """Also to the first call of its kind, and none to `explain` and `warm`."""
    x = torch.randn(1, 2, 33, 8) if engine is None else torch.randn(1, 2, 31, 8)
    options = {"weighting": "entmax15", "dropout_p": 0.5, "engine": engine}
    generator = make(5)
    qkv.explain(x, x, x, seed=generator, **options)
    qkv.warm(x, x, x, seed=generator, **options)
    outs = [qkv.attend(x, x, x, seed=generator, **options) for _ in range(2)]
    alpha = qkv.weights(x, x, weighting="entmax15", dropout_p=0.5, seed=generator)
    generator = make(5)
    if isinstance(generator, np.random.Generator):
        seeds = [int(generator.integers(2**31 - 1)) for _ in range(3)]
    else:
        seeds = [int(torch.randint(2**31 - 1, (), generator=generator)) for _ in range(3)]
    for out, seed in zip(outs, seeds[:2], strict=True):
        torch.testing.assert_close(out, qkv.attend(x, x, x, seed=seed, **options))
    want = qkv.weights(x, x, weighting="entmax15", dropout_p=0.5, seed=seeds[2])
    torch.testing.assert_close(alpha, want)
