"""A score, a weighting or an encoder of one's own, tested against the equation in float64.

    from qkv.testing import battery

    @battery(Mine(0.5))
    def test_mine(check):
        check()

is one test for each check, framework and engine: values, weights, gradients by finite differences,
keys that are masked out, queries without a key, dropout, blocks in any order, 32 and 16 bits. An
engine that cannot serve a call says why, and its test is skipped. `check_score`, `check_weighting`
and `check_encoder` run all of them at once. The battery of this package runs the same checks.
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
    """One check, to be called; its name says what, where and how."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()


def battery(*things: Any, **how: Any) -> Any:
    """Parametrize a pytest function by `check`: every check of these scores and weightings.

    `attend_options` is what `check_score` and `check_weighting` take.
    """
    import pytest

    found = [check for thing in things for check in _build_checks(thing, **how)]
    return pytest.mark.parametrize("check", found, ids=[check.name for check in found])


def check_score(score: str | Score, **how: Any) -> None:
    """Every check of a score: `width` is that of queries and keys, if it takes one width only.

    `frameworks` and `engines` name some of them, else all that are installed. Its arrays are
    NumPy's; each framework gets its own.

    >>> check_score("laplace", frameworks=["numpy"], engines=["streaming"])
    """
    _run_checks(_build_checks(scores.resolve(score), **how))


def check_weighting(weighting: str | Weighting, **how: Any) -> None:
    """Every check of a weighting; `score` makes the scores that it is given.

    `follows` is the weighting whose gradient the scores get, where that is not its own.

    >>> check_weighting("sigmoid", frameworks=["numpy"], engines=["streaming"])
    """
    _run_checks(_build_checks(weightings.resolve(weighting), **how))


def _run_checks(found: Iterable[Check]) -> None:
    for check in found:
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
        yield Check(f"{title}-leaving", partial(checks.check_leaving, thing, nonnegative))
    elif isinstance(thing, Score):
        kinds: list[Weighting] = [weightings.Softmax(), weightings.Raw()]
        kinds += [weightings.Normalized()] if thing.is_nonnegative else []
        pairs = [(thing, kind) for kind in kinds]
    else:
        raise DtypeError(f"expected a score or a weighting, not {thing!r}")
    widths = width if isinstance(width, tuple) else (width, width)
    for pair in pairs:
        for name, case in _build_cases(*pair, widths, follows):
            told = (
                f"{title}-{tree.format_record(pair[1])}-{name}"
                if thing is pair[0]
                else f"{title}-{name}"
            )
            for fw in frameworks or installed_frameworks():
                for engine in engines or choice.ENGINES_BY_NAME:
                    yield from _engine_checks(
                        f"{told}-{fw}-{engine}", case, fw, engine, name == "plain"
                    )


def _engine_checks(name: str, case: Case, fw: str, engine: str, widen: bool) -> Iterator[Check]:
    if fw not in FRAMEWORKS:
        raise unknown_name_error("framework", fw, FRAMEWORKS)
    made = FRAMEWORKS[fw]
    kinds = {"values": checks.check_values, "gradients": checks.check_gradients}
    for told, check in list(kinds.items())[: 2 if made.has_gradients else 1]:
        yield Check(f"{told}-{name}", partial(check, case, made, engine))
    for dtype in checks.TOLERANCE if widen else ():
        if dtype in made.dtypes:
            yield Check(f"{dtype}-{name}", partial(checks.check_dtype, case, made, engine, dtype))


def _build_cases(
    score: Score, weighting: Weighting, widths: tuple[int, int], follows: Weighting | None
) -> Iterator[tuple[str, Case]]:
    """Without a mask, with grouped heads; a query without a key; a masked key that is NaN; …"""
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
    spoiled = {**arrays, "key": arrays["key"].copy(), "value": arrays["value"].copy()}
    spoiled["key"][..., 6:, :] = spoiled["value"][..., 6:, :] = np.nan

    def build_case(given: dict[str, np.ndarray], **more: Any) -> Case:
        def attend_options(now: Any) -> dict[str, Any]:
            def rebuild_record(what: str, record: Any) -> Any:
                inside = [x for name, x in now.items() if name.startswith(f"{what} ")]
                return tree.replace_arrays(host, record, inside)

            mask = now.get("mask", more.get("mask"))
            how = {
                "score": rebuild_record("score", score),
                "weighting": rebuild_record("weighting", weighting),
            }
            return {**how, **more, "mask": mask}

        return Case(given, attend_options, follows)

    yield "plain", build_case(arrays)
    yield "causal", build_case(arrays, mask=masks.causal)
    yield "no key", build_case({**arrays, "mask": live})
    yield "NaN", build_case(spoiled, mask=masks.lengths([6, 4]))
    yield "dropout", build_case(arrays, dropout_p=0.4, seed=3)
    if not weighting.needs_nonnegative:
        yield (
            "bias",
            build_case(
                {
                    **arrays,
                    "mask": np.where(live, rng.normal(size=(QUERY_COUNT, KEY_COUNT)), -np.inf),
                }
            ),
        )


def check_encoder(encoder: Any, keys: Sequence[Any]) -> None:
    """Every check of an encoder, fitted to these keys.

    One float32 vector for each key, whatever is beside it; settings (JSON) and arrays that build
    it again; a score by which its vectors can be compared; None asks nothing of it as a head, if
    that score is a product and it can be one.

    >>> from qkv.database.encoders import Characters
    >>> check_encoder(Characters(64), ["Dracula", "Emma"])
    """
    fitted, keys = encoder.fit(keys), list(keys)
    encoded = fitted.encode(keys)
    for vectors in (encoded, fitted.encode_query(keys)):
        assert vectors.shape == (len(keys), fitted.width), f"vectors of shape {vectors.shape}"
        assert vectors.dtype == np.float32, f"vectors of {vectors.dtype}"
        assert np.isfinite(vectors).all(), "vectors that are not finite"
    assert fitted.encode([]).shape == (0, fitted.width), "no keys must give no vectors"
    alone = np.concatenate([fitted.encode([key]) for key in keys])
    np.testing.assert_allclose(alone, encoded, atol=1e-6, err_msg="a key alone")
    np.testing.assert_allclose(fitted.encode(keys[::-1])[::-1], encoded, atol=1e-6)
    settings = json.loads(json.dumps(fitted.settings(), allow_nan=False))
    assert settings.get("kind") == fitted.kind, "settings must have the encoder's kind"
    again = type(fitted).build(settings, {k: x.copy() for k, x in fitted.arrays().items()})
    np.testing.assert_array_equal(again.encode(keys), encoded, "settings and arrays")
    np.testing.assert_array_equal(
        again.encode_query(keys), fitted.encode_query(keys), "settings and arrays"
    )
    assert again == fitted, f"{again!r} was built from the settings of {fitted!r}"
    score = fitted.default_score(len(keys))
    assert again.default_score(len(keys)) == score
    alpha = weights(fitted.encode_query(keys), encoded, score=score)
    np.testing.assert_allclose(alpha.sum(axis=-1), 1, rtol=1e-5)
    try:
        heads = fitted.encode_head(keys)
    except CombinationError:
        return
    assert heads.shape == (len(keys), fitted.head_width), f"as a head, {heads.shape}"
    assert not fitted.encode_head([None, keys[0]], query=True)[0].any(), "None must ask nothing"
