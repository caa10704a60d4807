"""The battery for classes of one's own: it passes what is right, and notices what is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qkv import scores, weightings
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import get_framework
from qkv.testing import battery, check_encoder, check_score, check_weighting
from qkv.util.types import Array
from tests.installed_frameworks import NAMES
from tests.util.test_registry import Cubic, Exponential, Lengths

QUICK: dict[str, Any] = {"frameworks": ["numpy", "torch"], "engines": ["dense", "streaming"]}


@dataclass(frozen=True)
class Bilinear(scores.Score):
    """qᵀWk with W of its own, by products of its own."""

    w: Any

    def __call__(self, query: Array, key: Array) -> Array:
        xp = get_framework(query).xp
        return xp.matmul(xp.matmul(query, self.w), xp.matrix_transpose(key))

    def check_shapes(self, query: Any, key: Any) -> None:
        assert (query[-1], key[-1]) == tuple(self.w.shape)


some = [name for name in ("numpy", "torch") if name in NAMES]


@battery(Cubic(), Exponential(), frameworks=some)
def test_classes_of_ones_own(check: Any) -> None:
    check()


@battery(Bilinear(np.random.default_rng(2).normal(size=(3, 4))), width=(3, 4), frameworks=some)
def test_a_score_with_an_array_and_two_widths(check: Any) -> None:
    check()


def test_an_encoder() -> None:
    check_encoder(Lengths(), ["Li", "Hu", "Zhang"])


def test_an_encoder_whose_score_is_no_product_and_so_no_head() -> None:
    class Apart(Lengths):
        def default_score(self, rows: int) -> scores.Score:
            return scores.Laplace()

    check_encoder(Apart(), ["Li", "Hu", "Zhang"])


class TestWhatIsWrongIsNoticed:
    def test_a_score_that_looks_at_other_keys(self) -> None:
        @dataclass(frozen=True)
        class Centred(scores.Score):
            def __call__(self, query: Array, key: Array) -> Array:
                s = scores.Dot()(query, key)
                return s - get_framework(s).xp.max(s, axis=-1, keepdims=True)

        with pytest.raises(AssertionError, match=r"values-Centred.*streaming"):
            check_score(Centred(), **QUICK)

    def test_a_slope_that_is_not_the_weights_own(self) -> None:
        pytest.importorskip("torch")

        @dataclass(frozen=True)
        class Steep(Exponential):
            def score_gradient(self, scores: Any, weight: Any, along: Any, *rest: Any) -> Array:
                return 2 * self.rate * weight * along

        with pytest.raises(AssertionError, match=r"gradients-Steep.*torch-streaming.*query"):
            check_weighting(Steep(), **QUICK)

    def test_a_merge_that_minds_the_order(self) -> None:
        @dataclass(frozen=True)
        class Last(Exponential):
            def merge(self, one: Any, two: Any) -> Any:
                return (one[0] + 0.5 * two[0],)

        with pytest.raises(AssertionError, match=r"Last.*-merging"):
            check_weighting(Last(), **QUICK)

    def test_a_key_left_out_that_the_others_do_not_feel(self) -> None:
        @dataclass(frozen=True)
        class Felt(Exponential):
            def divisor_without(self, rest: Array) -> Array:
                return rest

        with pytest.raises(AssertionError, match=r"Felt.*-without_key"):
            check_weighting(Felt(), **QUICK)

    def test_a_mask_that_is_not_heeded(self) -> None:
        @dataclass(frozen=True)
        class Blind(Exponential):
            def block_weights(self, scores: Array, live: Any, k: Array, result: Any) -> Array:
                return get_framework(scores).xp.exp(self.rate * scores)

        with pytest.raises(AssertionError, match="values-Blind"):
            check_weighting(Blind(), **QUICK)

    def test_settings_that_forget(self) -> None:
        class Forgetful(Lengths):
            def arrays(self) -> dict[str, np.ndarray]:
                return {}

        with pytest.raises(AssertionError, match="gives other vectors"):
            check_encoder(Forgetful(), ["Li", "Zhang"])

    def test_what_is_no_score(self) -> None:
        with pytest.raises(DtypeError, match="expected a score or a weighting"):
            battery(3)
        with pytest.raises(ArgumentError, match="unknown framework 'trch'"):
            check_score("dot", frameworks=["trch"])
        with pytest.raises(ArgumentError, match="unknown engine 'dens'"):
            check_score("dot", frameworks=["numpy"], engines=["dens"])


def test_names_are_enough() -> None:
    check_score("dot", **QUICK)
    check_weighting("softmax", **QUICK)
    check_weighting(weightings.Hard(straight_through=True), follows=weightings.Softmax(), **QUICK)
