"""Checks of one call on one framework and engine, against `dense` in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any
from unittest import SkipTest, mock

import numpy as np

from qkv.attention import attend, explain
from qkv.engines import streaming
from qkv.engines.choice import Explanation
from qkv.errors import EngineError
from qkv.frameworks import get_framework, to_numpy
from qkv.scores import resolve, user_functions
from qkv.scores.user_score import UserScore
from qkv.testing.frameworks import NumPy as Framework
from qkv.util.types import Array
from qkv.weightings import Weighting

TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 2e-5}
"""Largest error relative to float64, for arguments that are already rounded to the dtype."""
DIFFERENCE_STEP = 1e-6

Arrays = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One call: NumPy arrays by name, and the options of `attend`.

    `build_options` builds score, weighting and mask from the arrays of any framework. `follows` is
    the weighting whose gradient the scores receive, if it is not the case's own.
    """

    arrays: Mapping[str, np.ndarray]
    build_options: Callable[[Arrays], dict[str, Any]]
    follows: Weighting | None = None

    def attend(self, arrays: Arrays, **more: Any) -> Any:
        return attend(
            arrays["query"], arrays["key"], arrays["value"], **self.build_options(arrays) | more
        )

    @cached_property
    def expected(self) -> np.ndarray:
        return self.attend(self.arrays, engine="dense")  # type: ignore[no-any-return]

    @cached_property
    def output_gradient(self) -> np.ndarray:
        """The gradient of the output in every check of gradients."""
        return np.random.default_rng(7).normal(size=self.expected.shape)

    @cached_property
    def numeric_slopes(self) -> dict[str, tuple[np.ndarray, float]]:
        """A random direction for each array, and the derivative of the loss along it."""
        rng, out = np.random.default_rng(1), {}

        def loss(name: str, x: np.ndarray) -> float:
            follows = self.follows if name != "value" else None
            more = {} if follows is None else {"weighting": follows}
            return float(
                np.sum(self.attend({**self.arrays, name: x}, **more) * self.output_gradient)
            )

        for name, x in self.arrays.items():
            if x.dtype.kind == "f":
                along = rng.normal(size=x.shape)
                above, below = (loss(name, x + side * DIFFERENCE_STEP * along) for side in (1, -1))
                out[name] = along, (above - below) / (2 * DIFFERENCE_STEP)
        return out

    def compute_gradients(
        self, fw: Framework, arrays: Arrays, engine: str, **more: Any
    ) -> list[np.ndarray]:
        """Return the gradient of each array, for the gradient `output_gradient` of the output."""
        along = fw.make_array(
            self.output_gradient, get_framework(arrays["query"]).dtype_name(arrays["query"])
        )

        def loss(*inputs: Array) -> Array:
            now = dict(zip(arrays, inputs, strict=True))
            out = self.attend(now, engine=engine, **more) * along
            return get_framework(out).xp.sum(out)

        return fw.compute_gradients(loss, list(arrays.values()))

    def explain(self, arrays: Arrays, **more: Any) -> Explanation:
        return explain(
            arrays["query"], arrays["key"], arrays["value"], **self.build_options(arrays) | more
        )

    def make_arrays(self, fw: Framework, dtype: str = "float64") -> dict[str, Any]:
        return {name: fw.make_array(x, dtype) for name, x in self.arrays.items()}


def is_supported(
    case: Case, fw: Framework, engine: str, dtype: str = "float64", **more: Any
) -> bool:
    """Return whether the engine supports this call; `dense` and `streaming` must."""
    if engine in ("dense", "streaming"):
        return True
    try:
        case.explain(case.make_arrays(fw, dtype), engine=engine, **more)
    except EngineError:
        return False
    return True


@contextmanager
def with_small_blocks(case: Case, fw: Framework, engine: str) -> Iterator[None]:
    """Run with block sizes that do not divide n and m; skip calls that the engine does not support.

    `dense` and `streaming` must support every call, except functions whose captured arrays the
    framework cannot find.
    """
    sizes = {
        "block_size": lambda call: (3, 4),
        "MAX_NUMBERS_PER_BLOCK": 2 * 8 * case.arrays["key"].shape[-2],
    }
    try:
        with mock.patch.multiple(streaming, **sizes):
            yield
    except EngineError as refusal:
        score = resolve(case.build_options(case.arrays).get("score", "scaled_dot"))
        may_capture = isinstance(score, UserScore) and user_functions(score)
        finds_no_captures = fw.name in ("tensorflow", "mxnet")
        if engine in ("dense", "streaming") and not (may_capture and finds_no_captures):
            raise
        raise SkipTest(str(refusal)) from None


def check_values(case: Case, fw: Framework, engine: str) -> None:
    """Check the output, and that weights times values give the output."""
    with with_small_blocks(case, fw, engine):
        out, alpha = case.attend(case.make_arrays(fw), engine=engine, return_weights=True)
    np.testing.assert_allclose(to_numpy(out), case.expected, atol=1e-10)
    value = np.nan_to_num(case.arrays["value"])
    groups = alpha.shape[-3] // value.shape[-3] if value.ndim > 2 else 1
    shared = np.repeat(value, groups, axis=-3) if groups > 1 else value
    np.testing.assert_allclose(to_numpy(alpha) @ shared, to_numpy(out), atol=1e-10)


def check_gradients(case: Case, fw: Framework, engine: str) -> None:
    """Check the gradient of every array along a random direction, by finite differences."""
    with with_small_blocks(case, fw, engine):
        gradients = case.compute_gradients(fw, case.make_arrays(fw), engine)
    for name, gradient in zip(case.arrays, gradients, strict=True):
        assert np.isfinite(gradient).all(), f"the gradient of {name} is not finite"
        if name in case.numeric_slopes:
            direction, slope = case.numeric_slopes[name]
            parts = np.nan_to_num(gradient * direction)
            error, size = abs(parts.sum() - slope), np.abs(parts).sum() + 1
            assert error < 1e-7 * size, f"the gradient of {name} differs by {error} from {slope}"


def check_dtype(case: Case, fw: Framework, engine: str, dtype: str) -> None:
    """Check that sums run at least in float32: only arguments and result are rounded."""
    arrays = case.make_arrays(fw, dtype)
    expected = case.attend(to_float64(arrays), engine="dense")
    with with_small_blocks(case, fw, engine):
        out = case.attend(arrays, engine=engine)
    assert get_framework(out).dtype_name(out) == dtype
    atol = TOLERANCE[dtype] * (np.abs(expected).max() + 1)
    np.testing.assert_allclose(to_numpy(out), expected, atol=atol)


def to_float64(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return NumPy copies in float64; arrays that are not floats keep their dtype."""
    host = {name: to_numpy(x) for name, x in arrays.items()}
    return {n: x.astype("float64") if x.dtype.kind == "f" else x for n, x in host.items()}


def check_merging(weighting: Weighting, nonnegative: bool = False) -> None:
    """Check that states of three blocks merge to the same result in any order, from `init`."""
    rng = np.random.default_rng(3)
    scores, value = rng.normal(size=(4, 9)), rng.normal(size=(9, 2))
    scores = np.abs(scores) if nonnegative else scores
    k, rows = np.arange(9, dtype="int32")[None], np.zeros((4, 1))
    scaled, blocks = weighting.scale_scores(scores), (slice(0, 4), slice(4, 5), slice(5, 9))

    def fold_blocks(lift: Any, merge: Any, init: Any) -> Any:
        state = init(rows)
        for at in blocks:
            state = merge(state, lift(scaled[:, at].copy(), None, k[:, at]))
        return state

    found = weighting.find_threshold(fold_blocks)
    states = [
        weighting.partial_state(scaled[:, at].copy(), None, k[:, at], found, value[at], None)
        for at in blocks
    ]
    want = weighting(scores) @ value
    for order in permutations(states):
        state = weighting.init(rows, 2)
        for part in order:
            state = weighting.merge(state, part)
        np.testing.assert_allclose(weighting.finish(state, found)[0], want, atol=1e-10)


def check_without_key(weighting: Weighting, nonnegative: bool = False) -> None:
    """Check that leaving out a key gives the weights that `divisor_without` predicts.

    If `divisor_without` returns None and the weighting is sparse, check that leaving out a key of
    weight 0 changes no weight.
    """
    scores = np.random.default_rng(4).normal(size=(4, 9))
    scores = np.abs(scores) if nonnegative else scores
    alpha = np.asarray(weighting(scores))
    for i in range(9):
        live = np.arange(9)[None] != i
        expected, remaining = np.asarray(weighting(scores, live)), np.where(live, alpha, 0)
        divisor = weighting.divisor_without(remaining.sum(axis=1, keepdims=True))
        if divisor is not None:
            np.testing.assert_allclose(remaining / divisor, expected, atol=1e-10)
        elif weighting.is_sparse:
            had_no_weight = alpha[:, i] == 0
            np.testing.assert_allclose(alpha[had_no_weight], expected[had_no_weight], atol=1e-10)
