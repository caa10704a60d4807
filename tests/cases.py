"""What the batteries run: every score, weighting and mask, with the arrays inside them.

A new score or weighting joins by being listed here; a test fails while one is not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv import masks, scores, weightings
from qkv.frameworks import get_framework, load_framework, tree
from qkv.testing import Case

LEAD, N, M, D, DV, HIDDEN = (2, 4), 7, 9, 3, 5, 6
KV_HEADS = 2
_rng = np.random.default_rng(7)


def _normal(*shape: int) -> np.ndarray:
    return _rng.normal(size=shape)


QUERY, KEY, VALUE = _normal(*LEAD, N, D), _normal(2, KV_HEADS, M, D), _normal(2, KV_HEADS, M, DV)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Own:
    """A score of the caller's own, with an array among its fields."""

    w: Any

    def __call__(self, query, key):
        return scores.Dot()(query * self.w, key)


def _closure(arrays: Arrays) -> Callable[..., Any]:
    w = arrays["w"]
    return lambda query, key: scores.Dot()(query * w, key)


def _nearer(s, b, h, i, j):
    fw = get_framework(s)  # some frameworks add no whole numbers to floats
    return s * 0.5 + fw.astype(i - j + h - b, fw.dtype_name(s)) * 0.25


SCORES: dict[str, tuple[Arrays, Callable[[Arrays], Any]]] = {
    **{name: ({}, lambda _, name=name: name) for name in scores.NAMES},
    "boxcar": ({}, lambda _: scores.Boxcar(2.0)),
    "triangular": ({}, lambda _: scores.Triangular(2.0)),
    "epanechnikov": ({}, lambda _: scores.Epanechnikov(2.0)),
    "softcap": ({}, lambda _: scores.ScaledDot(0.7, softcap=1.5)),
    "learned_scale": ({"scale": np.array(0.7)}, lambda a: scores.ScaledDot(a["scale"])),
    "learned_cosine": ({"t": np.array(0.6)}, lambda a: scores.Cosine(a["t"])),
    "learned_gaussian": ({"sigma": np.array(0.8)}, lambda a: scores.Gaussian(a["sigma"])),
    "learned_laplace": ({"b": np.array(0.8)}, lambda a: scores.Laplace(a["b"])),
    "learned_window": ({"width": np.array(2.2)}, lambda a: scores.Epanechnikov(a["width"])),
    "multiplicative": ({"w": _normal(D, D)}, lambda a: scores.Multiplicative(a["w"])),
    "additive": (
        {
            "w_query": _normal(HIDDEN, D),
            "w_key": _normal(HIDDEN, D),
            "v": _normal(HIDDEN),
            "bias": _normal(HIDDEN),
        },
        lambda a: scores.Additive(**a),
    ),
    "gated": (
        {"w_query": _normal(D), "w_key": _normal(D), "bias": np.array(0.3)},
        lambda a: scores.Gated(**a),
    ),
    "gated_gaussian": (
        {"w_query": _normal(D), "w_key": _normal(D)},
        lambda a: scores.Gated(**a, score=scores.Gaussian(0.9)),
    ),
    "modified": (
        {},
        lambda _: scores.Modified(scores.Dot(), _nearer),
    ),
    "relative": (
        {"bias": _normal(4, 7)},
        lambda a: scores.Relative(a["bias"], scores.Dot(), align="bottom_right"),
    ),
    "alibi": (
        {"slopes": np.array([0.5, 0.25, 0.1, 1.0])},
        lambda a: scores.Relative(scores.Alibi(a["slopes"])),
    ),
    "t5": ({"table": _normal(4, 6)}, lambda a: scores.Relative(scores.T5Bias(a["table"], True, 5))),
    "decay": ({"rate": np.array([0.5, 0.25, 0.1, 1.0])}, lambda a: scores.Decay(a["rate"])),
    "feature_map": ({}, lambda _: scores.FeatureMap()),
    "own_class": ({"w": _normal(D)}, lambda a: Own(a["w"])),
    "own_function": ({"w": _normal(D)}, _closure),
}

WEIGHTINGS: dict[str, weightings.Weighting] = {
    **{name: kind() for name, kind in weightings.NAMES.items() if name != "topk"},
    "temperature": weightings.Softmax(0.6),
    "straight_through": weightings.Hard(straight_through=True),
    "top3": weightings.TopK(3),
    "top_more_than_all": weightings.TopK(50),
    "entmax13": weightings.Entmax(1.3),
    "uniform_if_empty": weightings.Normalized("uniform"),
    "nearest_if_empty": weightings.Normalized("nearest"),
}

LEARNED: dict[str, weightings.Weighting] = {
    "alphas": weightings.Entmax(np.array([0.6, 1.0, 1.7, 2.6])),
    "sinks": weightings.Softmax(0.8, sink=np.array([0.4, -1.0, 0.0, 2.0])),
    # No sink differs from a boxcar score by 2, where the second derivative jumps.
    "entmax_sinks": weightings.Entmax(1.5, sink=np.array([0.4, -0.9, 0.1, 1.7])),
}
"""Weightings that hold arrays, of the shapes of these cases."""

_ALLOWED = _rng.random((N, M)) > 0.4
_ALLOWED[2] = False  # one query has nothing to attend to
_BIAS = np.where(_ALLOWED, _normal(N, M), -np.inf)

MASKS: dict[str, tuple[Arrays, Callable[[Arrays], Any]]] = {
    "none": ({}, lambda _: None),
    "causal": ({}, lambda _: masks.causal),
    "bottom_right": ({}, lambda _: masks.causal(align="bottom_right")),
    "causal_offset": ({}, lambda _: masks.causal(offset=np.array([2, -3]))),
    "window": ({}, lambda _: masks.window(1)),
    "one_sided": ({}, lambda _: masks.window(2, 0, align="bottom_right")),
    "causal_window": ({}, lambda _: masks.causal & masks.window(2)),
    "dilated": ({}, lambda _: masks.dilated(1, 2) | masks.global_tokens(1)),
    "strided": ({}, lambda _: ~masks.strided(2)),
    "blocks": ({}, lambda _: masks.blocks([[1, 0, 1], [0, 1, 1]], 4)),
    "blocks_per_head": (
        {},
        lambda _: masks.blocks(np.arange(4 * 2 * 3).reshape(4, 2, 3) % 3 > 0, 4),
    ),
    "lengths": ({}, lambda _: masks.lengths([3, 8])),
    "documents": ({}, lambda _: masks.documents([0] * 4 + [1] * 3, [0] * 5 + [1] * 4)),
    "packed": ({}, lambda _: masks.packed([0, 3, 3, 7], [0, 2, 4, 9], causal=True)),
    "custom": ({}, lambda _: masks.custom(lambda b, h, i, j: (i + j + h) % 2 == 0)),
    "boolean": ({"mask": _ALLOWED}, lambda a: a["mask"]),
    "float": ({"mask": _BIAS}, lambda a: a["mask"]),
    "float_per_head": ({"mask": _normal(4, 1, M)}, lambda a: masks.causal & a["mask"]),
}


@functools.cache
def case(score: str, weighting: str, mask: str) -> Case:
    """The call of these three: the arrays inside of them are among its own."""
    inside = {f"score.{k}": x for k, x in SCORES[score][0].items()}
    inside |= {f"mask.{k}": x for k, x in MASKS[mask][0].items()}
    weigh, host = {**WEIGHTINGS, **LEARNED}[weighting], load_framework("numpy")
    held = tree.array_leaves(host, weigh)
    inside |= {f"weighting.{i}": x for i, x in enumerate(held)}

    def build_options(arrays: Arrays) -> dict[str, Any]:
        def part(prefix: str) -> Arrays:
            return {k.partition(".")[2]: x for k, x in arrays.items() if k.startswith(prefix)}

        return {
            "score": SCORES[score][1](part("score.")),
            "weighting": tree.replace_arrays(host, weigh, part("weighting.").values()),
            "mask": MASKS[mask][1](part("mask.")),
        }

    # Straight-through: forward the hard weights, backward the softmax's gradient.
    follows = weightings.Softmax() if weighting == "straight_through" else None
    return Case({"query": QUERY, "key": KEY, "value": VALUE, **inside}, build_options, follows)


def can_combine(score: str, weighting: str, mask: str) -> bool:
    """Whether the three go together; the refusals have tests of their own."""
    built = scores.resolve(SCORES[score][1](SCORES[score][0]))
    resolved_weighting = {**WEIGHTINGS, **LEARNED}[weighting]
    if resolved_weighting.needs_nonnegative and (
        not built.is_nonnegative or mask.startswith("float")
    ):
        return False
    return weighting != "nearest_if_empty" or built.ranking_score is not None


def product() -> list[tuple[str, str, str]]:
    """Every score × weighting × mask that makes sense."""
    return [c for c in itertools.product(SCORES, (*WEIGHTINGS, *LEARNED), MASKS) if can_combine(*c)]


def covering() -> list[tuple[str, str, str]]:
    """A part of the product in which every sensible pair of two of the three occurs."""

    def pairs(case: tuple[str, str, str]) -> set[tuple[int, str, str]]:
        a, b, c = case
        return {(0, a, b), (1, a, c), (2, b, c)}

    cases = product()
    np.random.default_rng(3).shuffle(cases)
    cases = [tuple(case) for case in cases]
    left = set().union(*(pairs(case) for case in cases))
    chosen = []
    for least in (3, 2, 1):
        for case in cases:
            if len(pairs(case) & left) >= least:
                left -= pairs(case)
                chosen.append(case)
    return chosen
