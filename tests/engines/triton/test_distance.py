"""Windows, Laplace, exact match and the constant in the kernels, beside the equation in float64."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

import qkv
from qkv import masks, scores, weightings
from qkv.engines import triton as engine
from qkv.engines.triton import distance_arrays, row_terms
from qkv.engines.triton.launching import tile_choice
from qkv.engines.validation import build_call
from tests.engines.triton.formulas import DEVICE

pytestmark = pytest.mark.sample_of_module(10)

WINDOWS = {
    "boxcar": scores.Boxcar,
    "triangular": scores.Triangular,
    "epanechnikov": scores.Epanechnikov,
}
CLOSE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
MASKS = {
    "none": lambda n, m, normal: None,
    "causal": lambda n, m, normal: masks.causal("bottom_right"),
    "lengths": lambda n, m, normal: masks.lengths([m // 2, m]),
    "blocks": lambda n, m, normal: masks.blocks((torch.rand(-(-n // 16), -(-m // 16)) > 0.3), 16),
    "boolean": lambda n, m, normal: normal(n, m) > -0.5,
    "float": lambda n, m, normal: normal(2, 1, 1, m),
}


def normal(*shape, dtype=torch.float32, seed=0):
    make = torch.Generator(DEVICE).manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=make, device=DEVICE).to(dtype)


def amid_nan(x):
    """Return the same numbers as a part of an array that is NaN elsewhere, with strided rows."""
    *lead, rows, width = x.shape
    held = x.new_full((*lead, rows + 3, width + 5), math.nan)
    held[..., 1 : rows + 1, 2 : width + 2] = x
    return held[..., 1 : rows + 1, 2 : width + 2]


def results(arrays, build_options, name, dtype=None, **options):
    """Return the output and the gradient of each array; `how` makes score, weighting and mask."""
    inputs = {key: amid_nan(x) if x.ndim > 1 else x for key, x in arrays.items()}
    inputs = {
        key: (x if dtype is None else x.to(dtype)).detach().requires_grad_()
        for key, x in inputs.items()
    }
    query, key, value = (inputs[x] for x in ("query", "key", "value"))
    out = qkv.attend(query, key, value, **build_options(inputs), engine=name, **options)
    along = normal(*out.shape, dtype=arrays["value"].dtype, seed=1).to(out.dtype)
    grads = torch.autograd.grad(out, tuple(inputs.values()), along, allow_unused=True)
    result = {
        key: torch.zeros_like(x) if g is None else g
        for (key, x), g in zip(inputs.items(), grads, strict=True)
    }
    return {"out": out.detach()} | result


def compare(arrays, build_options, close=None, **options):
    """Compare the output and every gradient with float64, relative to their sizes."""
    dtype = arrays["query"].dtype
    got = results(arrays, build_options, "triton", **options)
    want = results(arrays, build_options, "dense", torch.float64, **options)
    assert got["out"].dtype == dtype
    for name, x in want.items():
        off = float((got[name].double() - x).norm() / x.norm().clamp(min=1e-3 * x.numel() ** 0.5))
        assert off < (close or CLOSE[dtype]), (name, off)


def arrays_of(n=21, m=70, w=5, d=7, h=2, hk=1, dtype=torch.float32):
    return {
        "query": normal(2, h, n, w, dtype=dtype),
        "key": normal(2, hk, m, w, dtype=dtype),
        "value": normal(2, hk, m, d, dtype=dtype),
    }


def drawn_score(name, w):
    """Return a score whose window holds about half of the keys."""
    if name in WINDOWS:
        return WINDOWS[name]((2 * w) ** 0.5)
    return {"laplace": scores.Laplace(1.5), "exact": scores.Exact(), "constant": "constant"}[name]


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weighting", ["softmax", "raw", "sigmoid", "entmax15", "normalized"])
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "exact", "constant"])
def test_values_and_gradients(name, weighting, mask, dtype):
    arrays = arrays_of(dtype=dtype)
    score, rule = drawn_score(name, 5), MASKS[mask](21, 70, normal)
    if weighting == "normalized" and (mask == "float" or name == "laplace"):
        weighting = "sparsemax"
    close = 0.1 if dtype == torch.bfloat16 and weighting == "sparsemax" else None
    compare(arrays, lambda inputs: {"score": score, "weighting": weighting, "mask": rule}, close)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "exact", "constant"])
@pytest.mark.parametrize(
    ("n", "m", "w", "d", "h", "hk"),
    [
        (1, 700, 16, 16, 4, 2),  # packed, in parts
        (130, 129, 3, 1, 1, 1),
        (9, 40, 130, 3, 2, 2),  # gradients by matrix products
        (5, 33, 7, 160, 2, 1),
        (3, 20, 300, 4, 1, 1),  # read in chunks
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shapes(name, n, m, w, d, h, hk, dtype):
    score = drawn_score(name, w)
    compare(
        arrays_of(n, m, w, d, h, hk, dtype), lambda inputs: {"score": score, "weighting": "softmax"}
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "exact", "constant"])
@pytest.mark.parametrize(
    "weighting", ["hard", weightings.TopK(4), weightings.Softmax(0.5), weightings.Entmax(1.3)]
)
def test_weightings_of_few_keys(name, weighting):
    score = drawn_score(name, 5)
    compare(arrays_of(), lambda inputs: {"score": score, "weighting": weighting})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "constant"])
@pytest.mark.parametrize("shape", [(), (2, 1, 1), (21, 1)], ids=str)
def test_a_learned_temperature(name, shape):
    arrays = arrays_of() | {"temperature": normal(*shape).abs() + 0.5, "bias": normal(2, 21, 70)}
    score = drawn_score(name, 5)

    def build_options(inputs):
        warm = weightings.Softmax(inputs["temperature"])
        return {"score": score, "weighting": warm, "mask": inputs["bias"]}

    compare(arrays, build_options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighting", ["softmax", "raw"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((x, shape) for x in WINDOWS.values() for shape in ((), (2, 1, 1), (5,))),
        *((scores.Laplace, shape) for shape in ((), (2, 1, 1))),
    ],
    ids=str,
)
def test_a_learned_width(kind, shape, weighting, dtype):
    arrays = arrays_of(dtype=dtype) | {"wide": (normal(*shape).abs() + 2.5).to(dtype)}
    compare(arrays, lambda inputs: {"score": kind(inputs["wide"]), "weighting": weighting})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "constant"])
def test_dropout(name):
    score = drawn_score(name, 5)
    options = {"score": score, "weighting": "softmax", "dropout_p": 0.4, "seed": 3}
    compare(arrays_of(), lambda inputs: options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "constant"])
def test_the_log_sum_exp(name):
    arrays = arrays_of()
    options = {"score": drawn_score(name, 5), "return_lse": True, "mask": masks.causal}
    _, lse = qkv.attend(*arrays.values(), **options, engine="triton")
    _, want = qkv.attend(*(x.double() for x in arrays.values()), **options, engine="dense")
    torch.testing.assert_close(lse.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("width", [3.0, 5.0, 7.0])
def test_a_key_at_the_edge_is_inside(name, width, dtype):
    """Whole numbers: many distances are exactly the width, and those count as r = 1."""
    make = torch.Generator(DEVICE).manual_seed(0)
    query, key = (
        torch.randint(-4, 5, (n, 3), generator=make, device=DEVICE).to(dtype) for n in (40, 90)
    )
    square = (query[:, None].double() - key.double()).square().sum(-1)
    assert (square == width**2).any()
    want = {
        "boxcar": square <= width**2,
        "triangular": (1 - square.sqrt() / width).clamp(min=0),
        "epanechnikov": (1 - square / width**2).clamp(min=0),
    }[name]
    eye = torch.eye(90, device=DEVICE, dtype=dtype)
    got = qkv.attend(query, key, eye, score=WINDOWS[name](width), weighting="raw", engine="triton")
    close = 5e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.double(), want.double(), atol=close, rtol=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("weighting", ["softmax", "normalized"])
@pytest.mark.parametrize("name", WINDOWS)
def test_keys_at_the_edge_in_every_tile(monkeypatch, name, weighting):
    """Pairs that are computed exactly count once, also if there are more tiles than bits."""
    tile = tile_choice.Tile(32, 16, 16, 4, 1)
    tiles = {"pool": tile, "split": tile, "to_queries": tile}
    monkeypatch.setattr(tile_choice, "TILE_OVERRIDES", tiles)
    arrays = arrays_of(17, 16 * 32 + 21, w=3, d=16, h=1, dtype=torch.float16)
    arrays |= {x: arrays[x].round().clamp(-1, 1) for x in ("query", "key")}
    score = WINDOWS[name](2.0)
    compare(arrays, lambda inputs: {"score": score, "weighting": weighting})


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_rows_far_from_the_origin(name, dtype):
    """The expanded square has no correct digit there: differences are used."""
    far = 3e4 if dtype == torch.float32 else 256.0
    arrays = arrays_of(dtype=dtype)
    arrays = {x: y + (far if x != "value" else 0) for x, y in arrays.items()}
    score = WINDOWS[name](3.2)  # no whole number is its square
    close = 1e-4 if dtype == torch.float32 else None
    compare(arrays, lambda inputs: {"score": score, "weighting": "raw"}, close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_triangle_of_a_key_that_is_the_query(dtype):
    """√ has no slope at 0; a rounding of r² instead of 0 would have a large one."""
    arrays = arrays_of(40, 40, 5, 7, 1, 1, dtype)
    arrays["key"] = arrays["query"].clone()
    arrays["key"][:, :, 20:] += 2.0**-7
    score = scores.Triangular(3.0)
    compare(arrays, lambda inputs: {"score": score, "weighting": "raw"})
    eye = torch.eye(40, device=DEVICE, dtype=dtype)
    options = {"score": score, "weighting": "raw"}
    out = qkv.attend(arrays["query"], arrays["key"], eye, **options, engine="triton")
    assert (out[..., range(20), range(20)] == 1).all()


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_excluded_keys_may_hold_anything(name, dtype):
    arrays = arrays_of(h=1, dtype=dtype)
    options = {
        "score": drawn_score(name, 5),
        "weighting": "softmax",
        "mask": masks.lengths([50, 50]),
    }
    want = results(arrays, lambda inputs: options, "triton")
    for odd in (math.nan, math.inf, 1e30):
        spoiled = {x: y.clone() for x, y in arrays.items()}
        spoiled["key"][:, :, 50:] = odd
        got = results(spoiled, lambda inputs: options, "triton")
        for x in want:
            rows = slice(0, 50) if x in ("key", "value") else slice(None)
            torch.testing.assert_close(
                got[x][:, :, rows], want[x][:, :, rows], atol=CLOSE[dtype], rtol=CLOSE[dtype]
            )
            assert got[x].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", [*WINDOWS, "laplace", "exact"])
def test_infinite_and_missing_numbers(name):
    """A key at infinity is outside; NaN makes a score NaN, but nothing is equal to it."""
    query, key = normal(4, 3), normal(6, 3, seed=2)
    key[2, 1], key[4, 0] = math.inf, math.nan
    eye = torch.eye(6, device=DEVICE)
    score = drawn_score(name, 3)
    options = {"score": score, "weighting": "sigmoid" if name == "laplace" else "raw"}
    for x in (key, query):
        x[1] = 0.5
    got, want = (
        qkv.attend(*(x.to(dtype) for x in (query, key, eye)), **options, engine=each)
        for each, dtype in (("triton", torch.float32), ("dense", torch.float64))
    )
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_the_constant_reads_no_vector():
    """Rows of NaN are as good as others, of two widths; the gradients of both are 0."""
    query = torch.full((2, 3, 4), math.nan, device=DEVICE, requires_grad=True)
    key, value = torch.ones(2, 5, 2, device=DEVICE, requires_grad=True), normal(2, 5, 6)
    out = qkv.attend(query, key, value, score="constant", engine="triton")
    torch.testing.assert_close(out, value.mean(1, True).expand(2, 3, 6))
    for x, g in zip((query, key), torch.autograd.grad(out.sum(), (query, key)), strict=True):
        assert g.shape == x.shape and (g == 0).all()
    none = torch.zeros(2, 3, 0, device=DEVICE)
    out = qkv.attend(none, none, value[:, :3], score="constant", engine="triton")
    torch.testing.assert_close(out, value[:, :3].mean(1, True).expand(2, 3, 6))


def test_it_says_how_scores_are_computed():
    x = normal(2, 3, 5)
    for score, text in (
        ("boxcar", "differences where"),
        ("laplace", "column by column"),
        ("exact", "column by column"),
        ("constant", "equal scores"),
    ):
        call = build_call(x, x, x, score, "softmax", None, 0.0, None, None)
        assert engine.unsupported_reason(call) is None and text in engine.describe(call)
        assert engine.build_direct_runner(call) is None


@pytest.mark.parametrize("rows", [1, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_terms(rows, dtype):
    x = amid_nan(normal(2, 3, rows, 70, dtype=dtype))
    squares = row_terms.collect_row_terms(x, True)
    columns = row_terms.collect_row_terms(x, False)
    tiles = -(-rows // 128)
    assert squares.shape == (2, 3, tiles * 128) and columns.shape == (2, 3, tiles, 70, 128)
    want = x.double().square().sum(-1)
    torch.testing.assert_close(squares[:, :, :rows].double(), want, rtol=1e-6, atol=0)
    flat = columns.mT.flatten(2, 3)[:, :, :rows]
    torch.testing.assert_close(flat, x.float(), rtol=0, atol=0)
    out = torch.empty(2, 3, rows, 70, device=DEVICE, dtype=dtype)
    row_terms.restore_rows(columns, 2.0, out)
    torch.testing.assert_close(out, 2 * x, rtol=0, atol=0)


def test_the_centre_is_among_the_queries():
    query, key = normal(7, 3), normal(9, 3, seed=1)
    query[0, 0], key[3], key[4] = math.nan, 1e38, math.inf
    centre = distance_arrays._find_centre(query, key)
    low, high = query[1:].amin(0), query[1:].amax(0)
    assert (centre >= low).all() and (centre <= high).all()
    assert (distance_arrays._find_centre(query * math.nan, key) == 0).all()
