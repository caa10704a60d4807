"""The thresholds of sparse weightings, found tile by tile, against the whole row in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.kernel_call import Numbers
from qkv.engines.triton.sparse import thresholds
from qkv.engines.triton.tile_functions.records import Arrays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INFINITY = float("inf")
NOWHERE = 2**31 - 1
TILE = thresholds._choose_tile
# NumPy, which the interpreter runs on, speaks of infinities that are meant.
pytestmark = [
    pytest.mark.sample_of_module(9),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True, params=["", "stored"])
def small_tiles(monkeypatch, request):
    """Search small tiles, and stored scores where there are few rows."""
    monkeypatch.setattr(thresholds, "MIN_STORED_KEYS", 1 if request.param else 2**30)
    monkeypatch.setattr(thresholds, "MAX_STORED_COLUMNS", 16)
    monkeypatch.setattr(thresholds, "_choose_tile", lambda *_: tile_choice.Tile(16, 16, 16, 4, 2))
    monkeypatch.setattr(tile_choice, "MAX_FORWARD_TILE_WIDTH", 32)


def search_arguments(query, key, weighting, number, scale, **more):
    """What `thresholds.find_thresholds` is given."""
    named = {name: more.pop(name) for name in Arrays._fields if name in more}
    return *Arrays(query, key, key, **named), *Numbers(scale, weighting, number, **more), False


def entmax_threshold(query, key, *args, **more):
    return thresholds.find_thresholds(*search_arguments(query, key, "entmax", *args, **more))[0]


def topk_threshold(query, key, *args, **more):
    row_a, row_b = thresholds.find_thresholds(*search_arguments(query, key, "topk", *args, **more))[
        :2
    ]
    return (row_a[0] if row_a.dim() == 4 else row_a), row_b


def arrays(b=1, heads=1, few=1, n=5, m=40, w=16, bias=False, gate=False, dtype=torch.float32):
    torch.manual_seed(n + m + w)
    query, key = torch.randn(b, heads, n, w), torch.randn(b, few, m, w)
    more = {}
    if bias:
        more["key_bias"] = torch.randn(b, few, m).to(DEVICE)
    if gate:
        more["gate_query"] = torch.randn(b, heads, n).to(DEVICE)
        more["gate_key"] = torch.randn(b, few, m).to(DEVICE)
    return query.to(DEVICE, dtype), key.to(DEVICE, dtype), more


def scores_of(query, key, scale, key_bias=None, gate_query=None, gate_key=None, lower=None,
              upper=None, lengths=None):  # fmt: skip
    """Scores in float64, −∞ where a pair does not count."""
    group = query.shape[1] // key.shape[1]

    def shared(x):
        return x.double().repeat_interleave(group, 1)

    s = scale * query.double() @ shared(key).mT
    if key_bias is not None:
        s = s + shared(key_bias)[:, :, None, :]
    if gate_key is not None:
        s = s * torch.sigmoid(gate_query.double()[..., None] + shared(gate_key)[:, :, None, :])
    i = torch.arange(s.shape[-2], device=DEVICE)[:, None]
    j = torch.arange(s.shape[-1], device=DEVICE)[None, :]
    if lower is not None:
        s = s.masked_fill(j - i < lower, -INFINITY)
    if upper is not None:
        s = s.masked_fill(j - i > upper, -INFINITY)
    if lengths is not None:
        s = s.masked_fill(j >= lengths[:, None, None, None], -INFINITY)
    return s


LENGTHS = torch.tensor([33, 0], dtype=torch.int32, device=DEVICE)
CASES = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"heads": 4, "few": 2, "bias": True}, {"upper": 1}, id="causal, heads, bias"),
    pytest.param({"b": 2, "gate": True}, {"lengths": LENGTHS}, id="lengths, one of them 0, gate"),
    pytest.param(
        {"n": 20, "m": 48, "bias": True, "gate": True}, {"lower": -9, "upper": 30}, id="band"
    ),
    pytest.param({"w": 40, "m": 16}, {"lower": 2}, id="wide"),
    pytest.param({"n": 1, "m": 1, "w": 3}, {}, id="one of everything"),
    pytest.param({"dtype": torch.float16}, {}, id="float16"),
    pytest.param({"n": 20, "dtype": torch.float16, "gate": True}, {"upper": 9}, id="float16, gate"),
]


@pytest.mark.parametrize("alpha", [1.5, 1.25])
@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_the_weights_of_entmax_sum_to_one(shape, mask, alpha):
    query, key, more = arrays(**shape)
    t = entmax_threshold(query, key, alpha, 0.5, **more, **mask)
    s = scores_of(query, key, 0.5, **more, **mask)
    mass = (((alpha - 1) * s - t.double()[..., None]).clamp(min=0) ** (1 / (alpha - 1))).sum(-1)
    has_keys = (s > -INFINITY).any(-1)
    # A device has one instruction for a gate of 16 bits, with eleven digits.
    fast = "gate_key" in more and query.dtype == torch.float16 and not launch.is_interpreted()
    near = 2e-3 if fast else 1e-5
    torch.testing.assert_close(mass[has_keys], torch.ones_like(mass[has_keys]), rtol=0, atol=near)
    assert not t[~has_keys].any()


@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0])
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.7, 1.1])
def test_rows_that_are_flat_and_rows_that_are_steep(alpha, spread):
    query, key, _ = arrays(n=4, m=200)
    t = entmax_threshold(query, key, alpha, spread)
    s = scores_of(query, key, spread)
    mass = (((alpha - 1) * s - t.double()[..., None]).clamp(min=0) ** (1 / (alpha - 1))).sum(-1)
    rounding = 4e-7 * s.abs().max().item()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5 + rounding)


@pytest.mark.parametrize("odd", [float("nan"), INFINITY])
def test_a_score_that_is_not_finite_spoils_its_row_alone(odd):
    query, key, _ = arrays(n=3)
    query[0, 0, 1] = odd
    key[0, 0, 7] = key[0, 0, 7].abs() + 0.1
    t = entmax_threshold(query, key, 1.5, 1.0)
    least, _ = topk_threshold(query, key, 3, 1.0)
    for result in (t, least):
        assert torch.isnan(result).tolist() == [[[False, True, False]]]


def chosen_by(s, least, position):
    """As `weigh.chosen` does, of what is live."""
    j = torch.arange(s.shape[-1], device=DEVICE)
    tie = (s == least.double()[..., None]) & (j <= position[..., None])
    return ((s > least.double()[..., None]) | tie) & (s > -INFINITY)


def largest(s, k):
    """The k largest of each row, ties by the lowest position, of what is live."""
    order = torch.argsort(s, dim=-1, descending=True, stable=True)[..., :k]
    chosen = torch.zeros_like(s, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & (s > -INFINITY)


@pytest.mark.sample(7)
@pytest.mark.parametrize("k", [5, 24])
@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_the_k_largest(shape, mask, k):
    query, key, more = arrays(**shape)
    least, position = topk_threshold(query, key, k, 0.5, **more, **mask)
    s = scores_of(query, key, 0.5, **more, **mask)
    assert torch.equal(chosen_by(s, least, position), largest(s, k))
    few = (s > -INFINITY).sum(-1) < k
    assert (least[few] == -INFINITY).all()
    assert (position[few] == NOWHERE).all()


@pytest.mark.parametrize("k", [1, 3, 20, 37, 40])
def test_ties_go_to_the_lowest_positions(k):
    query = torch.tensor([[[[1.0, 0.0], [0.0, -1.0], [0.0, 0.0]]]], device=DEVICE)
    pattern = [2.0, -1.0, 2.0, 0.5, -0.0, 0.0, 2.0, -1.0]
    key = torch.tensor([pattern * 5, [3.0] * 40], device=DEVICE).T[None, None].contiguous()
    least, position = topk_threshold(query, key, k, 1.0)
    s = scores_of(query, key, 1.0)
    assert torch.equal(chosen_by(s, least, position), largest(s + 0.0, k))


def test_scores_of_every_size():
    """From the smallest to the largest float, so that even cuts of the range do not do."""
    sizes = torch.logspace(-38, 38, 60, dtype=torch.float64)
    key = torch.cat([sizes, -sizes]).float().to(DEVICE)[None, None, :, None]
    query = torch.ones(1, 1, 1, 1, device=DEVICE)
    for k in (17, 63):
        least, position = topk_threshold(query, key, k, 1.0)
        s = scores_of(query, key, 1.0)
        assert torch.equal(chosen_by(s, least, position), largest(s, k))


@pytest.mark.parametrize("k", [4, 9, 30])
@pytest.mark.parametrize("step", [1, 16])
def test_the_largest_scores_are_anywhere_or_in_one_column(k, step):
    """Tiles have 16 keys: the three largest of a column do not hold the k largest of its scores."""
    key = torch.randn(1, 1, 160, 2, generator=torch.Generator().manual_seed(k)).to(DEVICE)
    key[:, :, ::step] += 9.0
    query = torch.tensor([[[[1.0, 0.0], [0.5, 0.5], [-1.0, 0.3]]]], device=DEVICE)
    least, position = topk_threshold(query, key, k, 1.0)
    s = scores_of(query, key, 1.0)
    assert torch.equal(chosen_by(s, least, position), largest(s, k))


@pytest.mark.parametrize("upper", [None, 150])
@pytest.mark.parametrize("kind", ["normal", "sorted", "one column", "ties", "few", "flat", "one"])
def test_a_large_k_starts_from_a_guess(monkeypatch, kind, upper):
    """A bad guess, as from sorted keys, takes more passes."""
    monkeypatch.setattr(thresholds, "MAX_HIDING_RANK", 12)
    monkeypatch.setattr(thresholds, "MIN_STORED_KEYS", 2**30)
    seen = []
    samples = thresholds._samples
    monkeypatch.setattr(thresholds, "_samples", lambda *x: seen.append(samples(*x)) or seen[-1])
    key = torch.randn(1, 1, 330, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    query = torch.rand(1, 1, 18, 2, generator=torch.Generator().manual_seed(6)).to(DEVICE) + 0.1
    if kind == "sorted":
        key = key.sort(-2).values
    elif kind == "one column":
        key[:, :, ::16] += 9.0
    elif kind == "ties":
        key = key.round()
    elif kind == "few":
        key[:, :, 7:] = -INFINITY
    elif kind == "flat":
        key[:] = 0.5
    elif kind == "one":
        key[0, 0, 200] = 1e6
    key, query = (key * 1024).round() / 1024, (query * 1024).round() / 1024  # exact products
    least, position = topk_threshold(query, key, 20, 1.0, upper=upper)
    s = scores_of(query, key, 1.0, upper=upper)
    assert seen == [True]
    assert torch.equal(chosen_by(s, least, position), largest(s, 20))


def test_with_a_bias_that_rules_keys_out():
    query, key, more = arrays(n=2, m=20, bias=True)
    more["key_bias"][..., 4:] = -INFINITY
    for k in (3, 4, 7):
        least, position = topk_threshold(query, key, k, 1.0, **more)
        s = scores_of(query, key, 1.0, **more)
        assert torch.equal(chosen_by(s, least, position), largest(s, k))


def test_a_threshold_has_no_gradient():
    query, key, _ = arrays(n=2, m=3)
    query.requires_grad_()
    t = entmax_threshold(query, key, 1.5, 1.0)
    least, _ = topk_threshold(query, key, 2, 1.0)
    (query.sum() + t.sum() + least.sum()).backward()
    assert torch.equal(query.grad, torch.ones_like(query))


def test_no_queries_and_no_keys():
    query, key, _ = arrays()
    assert entmax_threshold(query[:, :, :0], key, 1.5, 1.0).shape == (1, 1, 0)
    assert not entmax_threshold(query, key[:, :, :0], 1.5, 1.0).any()
    least, position = topk_threshold(query, key[:, :, :0], 2, 1.0)
    assert (least == -INFINITY).all()
    assert (position == NOWHERE).all()


def test_arrays_need_not_be_contiguous():
    query, key, more = arrays(bias=True, gate=True)
    want = entmax_threshold(query, key, 1.5, 1.0, **more)
    turned = [x.mT.contiguous().mT for x in (query, key)]
    more = {name: torch.stack([x, x], -1)[..., 0] for name, x in more.items()}
    assert torch.equal(entmax_threshold(*turned, 1.5, 1.0, **more), want)


@pytest.mark.skipif(not launch.is_interpreted(), reason="a launch is stood in for")
def test_a_device_too_small_for_the_tile_gets_a_smaller_one(monkeypatch):
    import triton

    monkeypatch.setattr(tile_choice, "SHRUNK_TILES", {})
    tried = []
    plain = thresholds.entmax_kernel
    monkeypatch.setattr(thresholds, "MIN_STORED_KEYS", 2**30)

    class Kernel:
        def __getattr__(self, name):
            return getattr(plain, name)

        def __getitem__(self, grid):
            def launch(*args, **facts):
                tried.append(facts["num_stages"])
                if len(tried) == 1:
                    raise triton.runtime.errors.OutOfResources(300, 200, "shared memory")
                return plain[grid](*args, **facts)

            return launch

    monkeypatch.setattr(thresholds, "entmax_kernel", Kernel())
    query, key, _ = arrays()
    monkeypatch.setattr(thresholds, "_choose_tile", lambda *_: tile_choice.Tile(16, 16, 16, 4, 3))
    entmax_threshold(query, key, 1.5, 1.0)
    assert tried == [3, 2]


def test_tiles_of_every_width():
    for dtype in (torch.float32, torch.bfloat16):
        for w, kernel in product((64, 256), (thresholds.entmax_kernel, thresholds.topk_kernel)):
            tile = TILE(torch.empty(1, 1, 1, w, dtype=dtype), kernel, 0)
            assert tile.rows * tile.cols <= 128 * 128


def test_the_operators_pass_opcheck():
    query, key, _ = arrays(n=2, m=3)
    torch.library.opcheck(
        thresholds.find_thresholds.node, search_arguments(query, key, "entmax", 1.5, 1.0)
    )
    torch.library.opcheck(
        thresholds.find_thresholds.node, search_arguments(query, key, "topk", 2.0, 1.0)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["floats", "floats of 16 bits", "booleans"])
@pytest.mark.parametrize("lead", [(1, 1), (2, 2)])
@pytest.mark.parametrize("weighting", ["entmax", "topk"])
def test_masks_by_descriptors(monkeypatch, weighting, lead, kind):
    """On a device with a copy engine; rows that do not start at 16 bytes are read without it."""
    query, key, _ = arrays(b=2, heads=2, few=1, n=18, m=32)
    mask = torch.randn(*lead, 18, 32, device=DEVICE)
    mask[..., 3, 5:9] = -INFINITY
    mask[..., 4, :] = -INFINITY
    dtype = {"floats": torch.float32, "floats of 16 bits": torch.bfloat16}.get(kind, torch.bool)
    mask = mask.to(dtype) if dtype != torch.bool else mask > 0
    bias = mask.double() if dtype != torch.bool else torch.where(mask, 0.0, -INFINITY).double()
    scores = scores_of(query, key, 0.3, upper=16) + bias
    seen, start = set(), launch.launch_kernel

    def watched(kernel, *rest):
        seen.add(rest[-2].get("LAID"))
        start(kernel, *rest)

    monkeypatch.setattr(launch, "launch_kernel", watched)
    monkeypatch.setattr(thresholds, "MIN_STORED_KEYS", 2**30)
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    number = {"entmax": 1.5, "topk": 5}[weighting]
    for pairs, laid in ((mask, True), (torch.cat([mask, mask], -1)[..., 1:][..., :32], False)):
        pairs = mask if laid else pairs.copy_(mask)
        found = thresholds.find_thresholds(
            *search_arguments(query, key, weighting, number, 0.3, pairs=pairs, upper=16)
        )[0].double()
        assert seen == {laid}
        seen.clear()
        if weighting == "entmax":
            weights = (scores / 2 - found[..., None]).clamp_min(0.0).square()
            total = torch.ones(2, 2, 18, device=DEVICE, dtype=torch.double)
            total[(scores == -INFINITY).all(-1)] = 0.0
            torch.testing.assert_close(weights.sum(-1), total, rtol=1e-3, atol=1e-3)
        else:
            count = (scores > found[..., None]).sum(-1)
            want = (scores > -INFINITY).sum(-1).clamp_max(number)
            torch.testing.assert_close(count, want)


@pytest.mark.parametrize("upper", [None, 16])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("weighting", "number"), [("entmax", 1.5), ("entmax", 2.0), ("topk", 5)])
def test_a_key_that_a_float_mask_excludes_may_be_anything(
    monkeypatch, weighting, number, copies, upper
):
    monkeypatch.setattr(launch, "has_tma", lambda device: copies)
    query, key, _ = arrays(b=1, heads=2, few=1, n=34, m=64)
    mask = torch.randn(34, 64, device=DEVICE)
    mask[:, [5, 20, 63]] = -INFINITY
    mask = mask.masked_fill(torch.rand_like(mask) < 0.2, -INFINITY)[None, None]
    want = thresholds.find_thresholds(
        *search_arguments(query, key, weighting, number, 0.3, pairs=mask, upper=upper)
    )
    key[..., 5, :], key[..., 20, 3], key[..., 63, :] = torch.nan, INFINITY, -INFINITY
    found = thresholds.find_thresholds(
        *search_arguments(query, key, weighting, number, 0.3, pairs=mask, upper=upper)
    )
    for x, y in zip(found[:2], want[:2], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 1.8, 2.0])
def test_entmax_in_another_unit(alpha):
    """A search leaves a scale above 0, or the factor of a float mask, out of the scores."""
    query, key, _ = arrays(n=18, m=64)
    mask = torch.randn(1, 1, 18, 64, device=DEVICE)
    mask[..., 7] = -INFINITY
    for scale, times, pairs in ((0.4, 1.0, None), (-0.4, 1.0, None), (0.4, 2.5, mask)):
        scores = scores_of(query, key, scale) + (0 if pairs is None else times * pairs.double())
        found = entmax_threshold(query, key, alpha, scale, pairs=pairs, times=times)
        weights = ((alpha - 1) * scores - found[..., None]).clamp_min(0.0) ** (1 / (alpha - 1))
        total = weights.sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-3, atol=1e-3)
