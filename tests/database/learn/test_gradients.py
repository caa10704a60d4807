"""The gradients of −ln α."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.database.encoders.learned import (
    HeadInput,
    TokenBag,
    build_token_bag,
)
from qkv.database.learn import gradients
from qkv.frameworks.ragged import build_sparse, gather_columns


def random_batch(dtype: Any) -> tuple[dict[str, np.ndarray], gradients.TrainingBatch]:
    """Three heads: of tokens (with an empty text), of vectors that keep their lengths, of words."""
    rng = np.random.default_rng(0)
    d, e, n, c, vocabulary = 5, 3, 4, 6, 7
    parameters = {"scales": rng.normal(size=3), "2.words": rng.normal(size=4)}
    for side in ("query", "key"):
        parameters[f"0.{side}.w"] = np.eye(d) + 0.3 * rng.normal(size=(d, d))
        parameters[f"0.{side}.logits"] = rng.normal(size=vocabulary)
        parameters[f"0.{side}.places"] = rng.normal(size=32)
        parameters[f"0.{side}.vectors"] = rng.normal(size=(vocabulary, d))
        parameters[f"1.{side}.w"] = np.eye(e) + 0.3 * rng.normal(size=(e, e))

    def texts(count: int, empty: int) -> TokenBag:
        lengths = rng.integers(1, 5, count)
        lengths[empty] = 0
        offsets = np.cumsum([0, *lengths])
        return build_token_bag(rng.integers(0, vocabulary, offsets[-1]), offsets)

    def vectors(count: int) -> np.ndarray:
        return rng.normal(size=(count, e)).astype(dtype)

    def words(count: int) -> HeadInput:
        there = rng.random((count, 4)) < 0.8
        row, word = np.nonzero(there)
        return HeadInput(
            build_sparse(row, 10 * word, rng.random(len(row)), count), rng.random(count)
        )

    share = rng.random(n)
    own = words(n), words(c)
    # A word that no weight is learned for is left out.
    assert gradients.find_shared_words(*own, np.array([5, 10]))[1].tolist() == [10]
    shared, asked = gradients.find_shared_words(*own, np.array([0, 10, 15, 20, 30]))
    assert asked.tolist() == [0, 10, 20, 30]
    batch = gradients.TrainingBatch(
        query=[HeadInput(texts(n, 2), rng.random(n).astype(dtype)), HeadInput(vectors(n)), own[0]],
        key=[HeadInput(texts(c, 5)), HeadInput(vectors(c), rng.random(c).astype(dtype)), own[1]],
        right_columns=np.array([0, 3, 3, 1]),
        pair_shares=(share / share.sum()).astype(dtype),
        excluded_cells=(np.array([0, 3]), np.array([4, 0])),
        cosines=(True, False, False),
        words={2: shared},
    )
    return {name: array.astype(dtype) for name, array in parameters.items()}, batch


class TestGradients:
    def test_are_the_differences(self) -> None:
        parameters, batch = random_batch(np.float64)
        _, result = gradients.compute_gradients(parameters, batch)
        assert set(result) == set(parameters)
        for name, array in parameters.items():
            for at in list(np.ndindex(array.shape))[:40]:
                step = 1e-6
                sides = []
                for sign in (1, -1):
                    moved = array.copy()
                    moved[at] += sign * step
                    sides.append(gradients.compute_gradients({**parameters, name: moved}, batch)[0])
                slope = (sides[0] - sides[1]) / (2 * step)
                assert result[name][at] == pytest.approx(slope, abs=1e-7), (name, at)

    def test_words_are_the_products_of_sparse_vectors(self) -> None:
        _, batch = random_batch(np.float64)
        places = np.arange(0, 40, 10, dtype=np.uint32)
        query, key = (
            gather_columns(side[2].x, places)[:, :-1] * side[2].length[:, None]
            for side in (batch.query, batch.key)
        )
        weight = np.array([1.0, 2.0, 0.5, 3.0])
        np.testing.assert_allclose(
            batch.words[2].compute_scores(weight), query * weight @ key.T, rtol=1e-6
        )

    @pytest.mark.parametrize(("dtype", "within"), [(np.float64, 1e-12), (np.float32, 1e-5)])
    def test_are_those_of_torch(self, dtype: Any, within: float) -> None:
        pytest.importorskip("torch")
        parameters, batch = random_batch(dtype)
        loss, ours = gradients.compute_gradients(parameters, batch)
        other, theirs = by_torch(parameters, batch)
        assert loss == pytest.approx(other, rel=within)
        assert set(ours) == set(theirs)
        for name, slope in ours.items():
            np.testing.assert_allclose(slope, theirs[name], rtol=within, atol=within, err_msg=name)

    def test_loss_is_minus_ln_alpha(self) -> None:
        parameters, batch = random_batch(np.float64)
        one = batch._replace(query=[batch.query[1]], key=[batch.key[1]], cosines=(False,), words={})
        own = {"0." + k.partition(".")[2]: v for k, v in parameters.items() if k.startswith("1.")}
        own["scales"] = parameters["scales"][1:2]
        q = batch.query[1].x @ own["0.query.w"].T
        k = batch.key[1].x @ own["0.key.w"].T * batch.key[1].length[:, None]
        s = np.exp(own["scales"][0]) * q @ k.T
        s[batch.excluded_cells] = -np.inf
        alpha = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
        expected = -(batch.pair_shares * np.log(alpha[np.arange(4), batch.right_columns])).sum()
        assert gradients.compute_gradients(own, one)[0] == pytest.approx(expected)


def by_torch(
    parameters: gradients.Parameters, batch: gradients.TrainingBatch
) -> tuple[float, dict[str, np.ndarray]]:
    """The same, differentiated by torch."""
    import torch

    p = {
        name: torch.from_numpy(np.ascontiguousarray(array)).requires_grad_()
        for name, array in parameters.items()
    }

    def vectors(side: str, i: int, input: HeadInput) -> Any:
        own = f"{i}.{side}."
        x, stretch = input
        if isinstance(x, TokenBag):
            ids, offsets = torch.from_numpy(x.ids), torch.from_numpy(x.offsets)
            logits = p[own + "logits"][ids] + p[own + "places"][torch.from_numpy(x.positions)]
            text = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
            # A shift of all logits of a text does not matter to it, so its top needs no gradient.
            top = torch.full((len(offsets) - 1,), -torch.inf, dtype=logits.dtype)
            top = top.scatter_reduce(0, text, logits.detach(), "amax")
            e = torch.exp(logits - top[text])
            alpha = e / torch.zeros_like(top).index_add(0, text, e)[text]
            result = torch.nn.functional.embedding_bag(
                ids, p[own + "vectors"], offsets[:-1], mode="sum", per_sample_weights=alpha
            )
        else:
            result = torch.from_numpy(np.ascontiguousarray(x))
        y = result @ p[own + "w"].T
        if batch.cosines[i]:
            y = torch.nn.functional.normalize(y, dim=1)
        return y if stretch is None else y * torch.from_numpy(stretch)[:, None]

    u = {(side, i): vectors(side, i, x) for side, i, x in batch.list_sides()}

    def alike(i: int) -> Any:
        if i not in batch.words:
            return u["query", i] @ u["key", i].T
        query, row, word, number = map(torch.from_numpy, batch.words[i][:4])
        weight = p[f"{i}.words"].exp()[:, None]
        at, size = torch.stack([row, word]), (batch.words[i].key_count, len(query))
        key = torch.sparse_coo_tensor(at, number.to(weight.dtype), size, check_invariants=True)
        return torch.sparse.mm(key, query.to(weight.dtype) * weight).T

    s = sum(p["scales"][i].exp() * alike(i) for i in range(len(batch.key)))
    rows, columns = map(torch.from_numpy, batch.excluded_cells)
    s = s.index_put((rows, columns), torch.tensor(-torch.inf, dtype=s.dtype))
    right = torch.from_numpy(batch.right_columns)
    each = torch.nn.functional.cross_entropy(s, right, reduction="none")
    loss = each @ torch.from_numpy(batch.pair_shares)
    loss.backward()
    return loss.item(), {name: tensor.grad.numpy() for name, tensor in p.items()}
