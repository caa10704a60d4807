"""Turn windows, Laplace, exact match and the constant into the arrays that the kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

from qkv.engines.call import Call
from qkv.frameworks import is_array
from qkv.scores import Boxcar, Constant, Epanechnikov, Exact, Laplace, Score, Triangular
from qkv.scores.distance import ExpandedGaussian

KERNEL_FORMS: dict[type[Score], str] = {
    Boxcar: "boxcar",
    Triangular: "triangular",
    Epanechnikov: "epanechnikov",
    Laplace: "laplace",
    Exact: "exact",
    Constant: "constant",
}
"""Scores that are no dot product, with their names in `kernel_call.FORMS`."""
MAX_WIDTH_16BIT = 128
"""The most columns of 16-bit rows whose gradients are summed on chip."""


class DistanceForm(NamedTuple):
    """The call, in float32 if its rows had to be shifted or scaled, and what the kernels compute.

    s = scale · profile, or caps · profile with `caps` (…, n, 1). The profile of a window is a
    function of square_scale · ‖φ − ψ‖².
    """

    call: Call
    query: Any
    key: Any
    scale: float
    square_scale: float
    caps: Any


def kernel_form(score: Any) -> str | None:
    """Return the name of the score's form; None: the kernels know it only as a dot product."""
    return KERNEL_FORMS.get(type(score))


def build_distance_form(call: Call) -> DistanceForm:
    """Return the form of a call whose score has a `kernel_form`."""
    score: Any = call.score
    square_scale = 1.0
    if isinstance(score, Laplace | Exact):
        query, key = call.query, call.key
    elif isinstance(score, Constant):  # only the shapes of the rows are read
        query, key = (
            x[..., :1] if x.shape[-1] else x.sum(-1, True) for x in (call.query, call.key)
        )
    else:
        call, query, key, square_scale = _window_arrays(call)
        score = call.score
    if isinstance(score, Boxcar | Exact):  # piecewise constant
        query, key = query.detach(), key.detach()
    temperature: Any = getattr(call.weighting, "temperature", 1.0)
    bandwidth: Any = score.bandwidth if isinstance(score, Laplace) else None
    if is_array(temperature) or is_array(bandwidth):
        return DistanceForm(
            call, query, key, 1.0, square_scale, _row_factors(call, temperature, bandwidth)
        )
    scale = 1.0 if bandwidth is None else -1.0 / bandwidth
    return DistanceForm(call, query, key, scale / temperature, square_scale, None)


def _row_factors(call: Call, temperature: Any, bandwidth: Any) -> Any:
    """Return 1 / temperature, for Laplace −1 / (temperature · bandwidth), of each query (…, n, 1).

    In float32; the gradients of both flow through it.
    """
    own: Any = 1.0
    for x in (temperature, bandwidth):
        if x is not None:
            x = x.float() if is_array(x) else x
            x = x.reshape(1, 1) if is_array(x) and x.ndim < 2 else x
            own = own / x
    own = own if bandwidth is None else -own
    return own.expand(*own.shape[:-2], call.n, 1)


def _window_arrays(call: Call) -> tuple[Call, Any, Any, float]:
    """Return the call, φ, ψ and the factor of ‖φ − ψ‖².

    Products of 16-bit rows are exact in float32, so such rows stay as they are. Others are centred.
    A width per head or column divides them first.
    """
    width: Any = call.score.width  # type: ignore[attr-defined]
    learned = is_array(width)
    value: Any = call.value
    widest = max(call.query.shape[-1], value.shape[-1])
    dtype = call.fw.dtype_name(call.query)
    if dtype != "float32" and not learned and widest <= MAX_WIDTH_16BIT:
        return call, call.query, call.key, 1 / width**2
    call = call.upcast()
    width = call.score.width if learned else 1.0  # type: ignore[attr-defined]
    expanded = ExpandedGaussian(width, _find_centre(call.query.detach(), call.key.detach()))
    query, key = (expanded.center_and_scale(x) for x in (call.query, call.key))
    return call, query, key, 1.0 if learned else 1 / call.score.width**2  # type: ignore[attr-defined]


def _find_centre(query: Any, key: Any) -> Any:
    """Return the mean of the finite keys (w,), but within the range of the queries.

    Excluded keys may hold any numbers; a centre far away would cost the others their digits.
    """
    query, key = (x.reshape(-1, x.shape[-1]) for x in (query, key))
    known = query.isfinite()
    low = query.where(known, float("inf")).amin(0)
    high = query.where(known, float("-inf")).amax(0)
    mean = key.where(key.isfinite(), 0.0).mean(0)
    return mean.clamp(low, high).nan_to_num(0.0, 0.0, 0.0)
