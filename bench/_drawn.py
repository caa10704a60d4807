"""Draw random valid calls of `attend`: named arrays, and the other arguments as a function."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

import qkv
from qkv import masks, scores, weightings
from qkv.frameworks import get_framework

SCORES = (
    *("scaled_dot", "dot", "cosine", "gaussian", "laplace", "softcap", "constant", "modified"),
    *("epanechnikov", "triangular", "boxcar", "normalized"),  # the last with its own weighting
    *("learned", "gated", "additive", "scale", "bandwidth", "function"),  # by arrays
    *("relative", "t5", "alibi", "decay"),  # by distance
    *("feature map", "linear", "decaying linear"),  # the last two with raw or normalized weights
)
WEIGHTINGS = (
    *("softmax", "entmax15", "sparsemax", "entmax13", "topk", "hard", "straight"),
    *("average", "sigmoid", "raw", "warm", "alpha", "sink", "entmax sink"),
)
RULES = (
    *("none", "none", "causal", "window", "lengths", "bool", "float", "documents", "not"),
    *("blocks", "custom", "strided", "both", "packed", "packed causal"),
)
RETURNS = ("output", "output", "output", "lse", "weights", "weights alone")
CHOOSY = ("hard", "topk", "straight")
"""Weightings that another rounding may have choose another key."""
STEEP = ("boxcar", "triangular", "epanechnikov", "normalized", "laplace")
"""Scores with an edge that another rounding may lie across of."""


class Drawn(NamedTuple):
    """A call: named arrays, a function from them to the other arguments, and a description."""

    arrays: dict[str, np.ndarray]
    how: Callable[[dict[str, Any]], dict[str, Any]]
    dtype: str
    returns: str
    score: str
    weighting: str
    description: str

    def call(self, given: dict[str, Any], **more: Any) -> Any:
        """Return one array of the call: its output, or an additional result."""
        how = {**self.how(given), **more}
        query, key, value = (given[name] for name in ("query", "key", "value"))
        if self.returns == "weights alone":
            how.pop("engine", None)
            return qkv.weights(query, key, **how)
        if self.returns == "output":
            return qkv.attend(query, key, value, **how)
        how |= {"return_lse" if self.returns == "lse" else "return_weights": True}
        out, second_result = qkv.attend(query, key, value, **how)
        fw = get_framework(out)
        second_result = fw.astype(second_result, fw.dtype_name(out))
        second_result = second_result[..., None] if self.returns == "lse" else second_result
        return fw.xp.concat([out, second_result], axis=-1)


def draw(random: Random) -> Drawn:
    make = np.random.default_rng(random.randrange(2**31))
    dtype = random.choice(("float32", "float32", "float64", "bfloat16", "float16"))
    few = random.choice((1, 2))
    lead = random.choice(((), (2,), (2, 2 * few), (1, 2 * few)))
    less = (lead[0], few) if len(lead) == 2 else lead
    top = random.choice((5, 9, 9, 20, 300))
    n, m = random.choice((1, random.randint(1, top))), random.randint(1, top)
    w, d = random.choice((1, 3, 8)), random.choice((1, 4))
    arrays: dict[str, np.ndarray] = {
        "query": make.normal(size=(*lead, n, w)),
        "key": make.normal(size=(*less, m, w)),
        "value": make.normal(size=(*less, m, d)),
    }
    score = random.choice(SCORES)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "learned": ((w, w),),
        "gated": ((w,), (w,)),
        "additive": ((4, w), (4, w), (4,)),
        "scale": ((),),
        "bandwidth": ((),),
        "function": ((w,),),
        "relative": ((*lead[-1:], 7),),
        "t5": ((*(lead[-1:] or (1,)), 6),),
        "alibi": (lead[-1:] or (1,),),
        "decay": (lead[-1:],),
        "decaying linear": (lead[-1:],),
    }
    for i, shape in enumerate(shapes.get(score, ())):
        x = make.normal(size=shape) / w**0.5
        is_positive = score in ("bandwidth", "decay", "decaying linear")
        arrays[f"of the score {i}"] = np.abs(x) + 0.5 if is_positive else x
    weighting = "normalized" if score == "normalized" else random.choice(WEIGHTINGS)
    if score.endswith("linear"):
        weighting = random.choice(("raw", "normalized"))
    if weighting == "warm":
        arrays["temperature"] = np.abs(make.normal(size=())) + 0.5
    if weighting == "alpha":
        shape = random.choice(((), lead[1:], (n, 1)))
        arrays["alpha"] = make.uniform(1.1, 1.9, size=shape)
    if weighting.endswith("sink"):
        arrays["sink"] = make.normal(size=random.choice(((), lead[-1:])))
    rule = random.choice(RULES)
    own = random.choice(((n, m), (1, m), (n, 1), (*lead, n, m)))
    fixed: dict[str, Any] = {}
    if rule == "float":
        arrays["mask"] = make.normal(size=own)
        if random.random() < 0.5:
            arrays["mask"][make.random(own) < 0.3] = -np.inf
    elif rule in ("bool", "both"):
        arrays["mask"] = make.random(own) > 0.3
    fixed |= _ruled(rule, random, make, lead, n, m)
    if random.random() < 0.15:
        fixed |= {"dropout_p": 0.3, "seed": random.randrange(1000)}
    if random.random() < 0.2:
        more = ("linear", "linear") if score.endswith("linear") else ()
        fixed["engine"] = random.choice(("streaming", "dense", *more))
    poisoned = "lengths" in rule and "mask" in fixed and random.random() < 0.5
    if poisoned:  # after the end of every sequence
        arrays["key"][..., int(fixed["mask"].valid.max()) :, :] = np.nan
        arrays["value"][..., int(fixed["mask"].valid.max()) :, :] = np.inf
    returns = random.choice(RETURNS)
    if returns == "weights alone":
        arrays["value"] = np.zeros((*less, m, d))
        fixed = {name: x for name, x in fixed.items() if name not in ("dropout_p", "seed")}

    def how(given: dict[str, Any]) -> dict[str, Any]:
        return {
            "score": _score(score, given),
            "weighting": _weighting(weighting, given),
            **fixed,
            **({"mask": given["mask"]} if "mask" in given else {}),
            **({"mask": masks.causal & given["mask"]} if rule == "both" else {}),
        }

    description = (
        f"{score}, {weighting}, {rule}{own if rule in ('bool', 'float', 'both') else ''}, "
    )
    description += f"{dtype}, {returns} {[x.shape for x in arrays.values()]} {fixed}"
    description += " poisoned" if poisoned else ""
    return Drawn(arrays, how, dtype, returns, score, weighting, description)


def _ruled(rule: str, random: Random, make: Any, lead: Any, n: int, m: int) -> dict[str, Any]:
    """Return the mask of a rule that holds no array of a framework."""
    if rule == "lengths" and lead:
        return {"mask": masks.lengths(make.integers(0, m + 1, lead[0]))}
    if rule == "documents" and n == m:
        return {"mask": masks.documents(np.sort(make.integers(0, 3, n)))}
    if rule == "causal":
        return {"mask": masks.causal(random.choice(("top_left", "bottom_right")))}
    if rule == "window":
        return {"mask": masks.window(random.randrange(4), random.randrange(4))}
    if rule == "not":
        return {"mask": ~masks.dilated(2, 1) | masks.global_tokens(1)}
    if rule == "blocks":
        size = random.choice((2, 4))
        return {"mask": masks.blocks(make.random((-(-n // size), -(-m // size))) > 0.3, size)}
    if rule == "custom":
        return {"mask": masks.custom(lambda b, h, i, j: (i + j + h) % 2 == 0)}
    if rule.startswith("packed"):
        cu_q, cu_k = (np.sort([0, *make.integers(0, x + 1, 2), x]) for x in (n, m))
        return {"mask": masks.packed(cu_q, cu_k, causal="causal" in rule)}
    return {"mask": masks.strided(2)} if rule == "strided" else {}


def _nearer(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    fw = get_framework(s)
    return s * 0.5 + fw.astype(i - j + h - b, fw.dtype_name(s)) * 0.125


def _as(x: Any, like: Any) -> Any:
    return get_framework(like).astype(
        x, get_framework(like).dtype_name(like)
    )  # 16 bits are widened before a score is asked


def _score(name: str, given: dict[str, Any]) -> Any:
    held = [x for name, x in given.items() if name.startswith("of the score")]
    kinds: dict[str, Callable[..., Any]] = {
        "learned": scores.Multiplicative,
        "gated": scores.Gated,
        "additive": scores.Additive,
        "scale": scores.ScaledDot,
        "bandwidth": scores.Gaussian,
        "function": lambda w: lambda query, key: scores.Dot()(query * _as(w, query), key),
        "modified": lambda: scores.Modified(scores.ScaledDot(), _nearer),
        "softcap": lambda: scores.ScaledDot(softcap=2.0),
        "epanechnikov": lambda: scores.Epanechnikov(2.0),
        "triangular": lambda: scores.Triangular(2.0),
        "boxcar": lambda: scores.Boxcar(2.0),
        "normalized": lambda: scores.Epanechnikov(3.0),
        "relative": scores.Relative,
        "t5": lambda table: scores.Relative(scores.T5Bias(table, max_distance=20)),
        "alibi": lambda slopes: scores.Relative(scores.Alibi(slopes)),
        "decay": scores.Decay,
        "feature map": scores.FeatureMap,
        "linear": scores.FeatureMap,
        # Larger rates underflow in float32, where all weights of a query are then 0.
        "decaying linear": lambda rate: scores.Decay(rate * 0.05, scores.FeatureMap("relu")),
    }
    return kinds[name](*held) if name in kinds else name


def _weighting(name: str, given: dict[str, Any]) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "topk": lambda: weightings.TopK(3),
        "straight": lambda: weightings.Hard(straight_through=True),
        "entmax13": lambda: weightings.Entmax(1.3),
        "warm": lambda: weightings.Softmax(given["temperature"]),
        "alpha": lambda: weightings.Entmax(given["alpha"]),
        "sink": lambda: weightings.Softmax(sink=given["sink"]),
        "entmax sink": lambda: weightings.Entmax(1.5, sink=given["sink"]),
    }
    return kinds[name]() if name in kinds else name


def rounded(drawn: Drawn) -> dict[str, np.ndarray]:
    """Return the inputs of the call in float64, rounded to its dtype."""
    kind = getattr(torch, drawn.dtype)
    return {
        name: x if x.dtype == bool else torch.tensor(x).to(kind).double().numpy()
        for name, x in drawn.arrays.items()
    }


class Exact(NamedTuple):
    """The equation in float64: the output, the gradients of Σ output · along, and the derivative of
    the first gradient along a direction of the query.
    """

    output: np.ndarray
    slopes: list[np.ndarray]
    bend: np.ndarray | None


def output(drawn: Drawn) -> np.ndarray:
    given = {name: torch.tensor(x) for name, x in rounded(drawn).items()}
    found: np.ndarray = drawn.call(given, engine="dense").numpy()
    return found


def exact(drawn: Drawn, names: list[str], along: np.ndarray, way: np.ndarray | None) -> Exact:
    given = {name: torch.tensor(x) for name, x in rounded(drawn).items()}
    leaves = [given[name].requires_grad_() for name in names]
    out = drawn.call(given, engine="dense")
    total = (out * torch.tensor(along)).sum()
    if not total.requires_grad:
        zeros = [np.zeros(x.shape) for x in leaves]
        return Exact(out.numpy(), zeros, None if way is None else zeros[0])
    found = torch.autograd.grad(
        total, leaves, allow_unused=True, materialize_grads=True, create_graph=way is not None
    )
    bend = None
    if way is not None:
        push = (found[0] * torch.tensor(way)).sum()
        bend = np.zeros(leaves[0].shape)
        if push.requires_grad:
            (second,) = torch.autograd.grad(push, leaves[:1], allow_unused=True)
            bend = bend if second is None else second.numpy()
    return Exact(out.detach().numpy(), [x.detach().numpy() for x in found], bend)
