"""Tests for your own scores, weightings and encoders, against the equation in float64.

    from qkv.testing import battery

    @battery(Mine(0.5))
    def test_mine(check):
        check()

The decorator makes one test for each check, framework and engine. The checks cover values, weights,
gradients (by finite differences), masked keys, queries without a key, dropout, the order of blocks,
and 16- and 32-bit dtypes. If an engine does not support a call, its test is skipped with the
reason.
`check_score`, `check_weighting` and `check_encoder` run all checks in one test. The tests of qkv
run the same checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import SkipTest

import numpy as np

from qkv import masks, scores, weightings
from qkv.attention import weights
from qkv.engines import choice
from qkv.errors import CombinationError, DtypeError, unknown_name_error
from qkv.frameworks import load_framework, tree
from qkv.scores import Score
from qkv.testing import checks
from qkv.testing.checks import Case
from qkv.testing.frameworks import FRAMEWORKS, installed_frameworks
from qkv.weightings import Weighting

__all__ = ["Case", "Check", "battery", "check_encoder", "check_score", "check_weighting"]

QUERY_COUNT, KEY_COUNT, VALUE_WIDTH = 7, 9, 5


@dataclass(frozen=True)
class Check:
    """One check. Call the object to run it. `name` contains the case, framework and engine."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()


def battery(*objects: Any, **options: Any) -> Any:
    """Parametrize a pytest function by `check`, with every check of these scores and weightings.

    The options are those of `check_score` and `check_weighting`.
    """
    import pytest

    built = [check for thing in objects for check in _build_checks(thing, **options)]
    return pytest.mark.parametrize("check", built, ids=[check.name for check in built])


def check_score(score: str | Score, **options: Any) -> None:
    """Run every check of a score.

    - `width`: the width of queries and keys, or a pair of both (default 3).
    - `frameworks`, `engines`: names; by default all that are installed.

    Arrays inside the score are NumPy's; the checks convert them for each framework.

    >>> check_score("laplace", frameworks=["numpy"], engines=["streaming"])
    """
    _run_checks(_build_checks(scores.resolve(score), **options))


def check_weighting(weighting: str | Weighting, **options: Any) -> None:
    """Run every check of a weighting. Options beyond those of `check_score`:

    - `score`: the score that produces its scores.
    - `follows`: the weighting whose gradient the scores receive, if it is not this one
      (straight-through gradients).

    >>> check_weighting("sigmoid", frameworks=["numpy"], engines=["streaming"])
    """
    _run_checks(_build_checks(weightings.resolve(weighting), **options))


def _run_checks(checks: Iterable[Check]) -> None:
    for check in checks:
        try:
            check()
        except SkipTest:
            continue
        except AssertionError as error:
            raise AssertionError(f"{check.name}: {error}") from None


def _build_checks(
    thing: Any,
    *,
    width: int | tuple[int, int] = 3,
    score: Any = None,
    follows: Weighting | None = None,
    frameworks: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
) -> Iterator[Check]:
    title = tree.format_record(thing)
    if isinstance(thing, Weighting):
        nonnegative = thing.needs_nonnegative
        fallback = scores.Triangular(3.0) if nonnegative else scores.ScaledDot()
        pairs = [(scores.resolve(score or fallback), thing)]
        yield Check(f"{title}-merging", partial(checks.check_merging, thing, nonnegative))
        yield Check(f"{title}-without_key", partial(checks.check_without_key, thing, nonnegative))
    elif isinstance(thing, Score):
        kinds: list[Weighting] = [weightings.Softmax(), weightings.Raw()]
        kinds += [weightings.Normalized()] if thing.is_nonnegative else []
        pairs = [(thing, kind) for kind in kinds]
    else:
        raise DtypeError(f"expected a score or a weighting, not {thing!r}")
    widths = width if isinstance(width, tuple) else (width, width)
    for pair in pairs:
        for name, case in _build_cases(*pair, widths, follows):
            label = (
                f"{title}-{tree.format_record(pair[1])}-{name}"
                if thing is pair[0]
                else f"{title}-{name}"
            )
            for fw in frameworks or installed_frameworks():
                for engine in engines or choice.ENGINES_BY_NAME:
                    yield from _engine_checks(
                        f"{label}-{fw}-{engine}", case, fw, engine, name == "plain"
                    )


def _engine_checks(
    name: str, case: Case, fw: str, engine: str, all_dtypes: bool
) -> Iterator[Check]:
    if fw not in FRAMEWORKS:
        raise unknown_name_error("framework", fw, FRAMEWORKS)
    framework = FRAMEWORKS[fw]
    if checks.is_supported(case, framework, engine, return_weights=True):
        yield Check(f"values-{name}", partial(checks.check_values, case, framework, engine))
    if framework.has_gradients and checks.is_supported(case, framework, engine):
        yield Check(f"gradients-{name}", partial(checks.check_gradients, case, framework, engine))
    for dtype in checks.TOLERANCE if all_dtypes else ():
        if dtype in framework.dtypes and checks.is_supported(case, framework, engine, dtype):
            run = partial(checks.check_dtype, case, framework, engine, dtype)
            yield Check(f"{dtype}-{name}", run)


def _build_cases(
    score: Score, weighting: Weighting, widths: tuple[int, int], follows: Weighting | None
) -> Iterator[tuple[str, Case]]:
    """Yield the cases by name: without a mask, causal, a query without a key, masked NaN and so on.

    All cases have grouped heads.
    """
    rng, host = np.random.default_rng(7), load_framework("numpy")
    arrays = {
        "query": rng.normal(size=(2, 4, QUERY_COUNT, widths[0])),
        "key": rng.normal(size=(2, 2, KEY_COUNT, widths[1])),
        "value": rng.normal(size=(2, 2, KEY_COUNT, VALUE_WIDTH)),
    }
    for name, record in (("score", score), ("weighting", weighting)):
        for i, x in enumerate(tree.array_leaves(host, record)):
            arrays[f"{name} {i}"] = np.asarray(x, "float64")
    live = rng.random((QUERY_COUNT, KEY_COUNT)) > 0.4
    live[2] = False
    with_nan = {**arrays, "key": arrays["key"].copy(), "value": arrays["value"].copy()}
    with_nan["key"][..., 6:, :] = with_nan["value"][..., 6:, :] = np.nan

    def build_case(inputs: dict[str, np.ndarray], **fixed: Any) -> Case:
        def attend_options(current: Any) -> dict[str, Any]:
            def rebuild_record(role: str, record: Any) -> Any:
                leaves = [x for name, x in current.items() if name.startswith(f"{role} ")]
                return tree.replace_arrays(host, record, leaves)

            formula = {
                "score": rebuild_record("score", score),
                "weighting": rebuild_record("weighting", weighting),
            }
            return {**formula, **fixed, "mask": current.get("mask", fixed.get("mask"))}

        return Case(inputs, attend_options, follows)

    yield "plain", build_case(arrays)
    yield "causal", build_case(arrays, mask=masks.causal)
    yield "no key", build_case({**arrays, "mask": live})
    yield "NaN", build_case(with_nan, mask=masks.lengths([6, 4]))
    yield "dropout", build_case(arrays, dropout_p=0.4, seed=3)
    if not weighting.needs_nonnegative:
        bias = np.where(live, rng.normal(size=(QUERY_COUNT, KEY_COUNT)), -np.inf)
        yield "bias", build_case({**arrays, "mask": bias})


def check_encoder(encoder: Any, keys: Sequence[Any]) -> None:
    """Run every check of an encoder, fitted to these keys.

    - It returns one finite float32 vector for each key, independent of the other keys.
    - Its settings (JSON) and arrays build an equal encoder.
    - Its default score compares its vectors.
    - If it can be one head of several, None as a query gives a zero vector.

    >>> from qkv.database.encoders import Characters
    >>> check_encoder(Characters(64), ["Dracula", "Emma"])
    """
    fitted, keys = encoder.fit(keys), list(keys)
    encoded = fitted.encode(keys)
    for vectors in (encoded, fitted.encode_query(keys)):
        expected = (len(keys), fitted.width)
        assert vectors.shape == expected, f"the vectors have shape {vectors.shape}, not {expected}"
        assert vectors.dtype == np.float32, f"the vectors are {vectors.dtype}, not float32"
        assert np.isfinite(vectors).all(), "some vectors are not finite"
    empty = fitted.encode([]).shape
    assert empty == (0, fitted.width), f"encode([]) has shape {empty}, not {(0, fitted.width)}"
    one_by_one = np.concatenate([fitted.encode([key]) for key in keys])
    np.testing.assert_allclose(
        one_by_one, encoded, atol=1e-6, err_msg="encoding one key at a time changes the vectors"
    )
    np.testing.assert_allclose(fitted.encode(keys[::-1])[::-1], encoded, atol=1e-6)
    settings = json.loads(json.dumps(fitted.settings(), allow_nan=False))
    kind = settings.get("kind")
    assert kind == fitted.kind, f'settings()["kind"] is {kind!r}, not {fitted.kind!r}'
    again = type(fitted).build(settings, {k: x.copy() for k, x in fitted.arrays().items()})
    changed = "an encoder that was built from settings() and arrays() gives other vectors"
    np.testing.assert_array_equal(again.encode(keys), encoded, changed)
    np.testing.assert_array_equal(again.encode_query(keys), fitted.encode_query(keys), changed)
    assert again == fitted, f"{again!r} was built from the settings of {fitted!r}"
    score = fitted.default_score(len(keys))
    assert again.default_score(len(keys)) == score
    alpha = weights(fitted.encode_query(keys), encoded, score=score)
    np.testing.assert_allclose(alpha.sum(axis=-1), 1, rtol=1e-5)
    try:
        heads = fitted.encode_head(keys)
    except CombinationError:
        return
    expected = (len(keys), fitted.head_width)
    assert heads.shape == expected, f"encode_head has shape {heads.shape}, not {expected}"
    none_vector = fitted.encode_head([None, keys[0]], query=True)[0]
    assert not none_vector.any(), "encode_head must encode the query None as a zero vector"
