"""Which calls use the kernel for Hopper, and on such a GPU, its results against float64.

Gluon has no interpreter: test_compiles compiles it without a device.
"""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.engines.triton import norms
from qkv.engines.triton.forward import forward
from qkv.engines.triton.launching import launch
from qkv.engines.triton.launching.kernel_call import KernelCall
from qkv.engines.triton.tile_functions.records import ARRAY_COUNT
from qkv.scores import Gaussian
from tests.engines.triton import formulas

hopper = pytest.importorskip(
    "qkv.engines.triton.forward.hopper", reason="this Triton has another Gluon"
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def arrays_of(b=2, h=4, hk=4, n=200, m=300, w=128, d=128, dtype=torch.bfloat16, device=None):
    shapes = ((b, h, n, w), (b, hk, m, w), (b, hk, m, d))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


@pytest.fixture
def device(monkeypatch):
    """A Hopper with four processors, as the choice sees it."""
    monkeypatch.setattr(launch, "has_tma", lambda device: True)
    monkeypatch.setattr(launch, "count_processors", lambda device: 4)


def fits(bias=True, places=(), numbers=(), **shape):
    query, key, value = arrays_of(**shape)
    inputs = [
        query,
        key,
        value,
        norms.squared_norms(key, -0.5) if bias else None,
        *[None] * (ARRAY_COUNT - 4),
    ]
    for at, x in places:
        inputs[at] = x
    return hopper.is_supported(KernelCall(*inputs, 0.3, *numbers))


def test_which_calls_it_takes(device):
    assert fits() and fits(hk=2) and fits(dtype=torch.float16) and fits(n=129, m=4097)
    few = {"b": 1, "h": 1, "hk": 1}
    for shape in ({"w": 64}, {"w": 64, "d": 64}, {"dtype": torch.float32}, {"m": 100}, few):
        assert not fits(**shape)
    assert not fits(b=64, h=8, hk=2, n=1), "a decoding step"
    assert not fits(bias=False)
    assert not fits(numbers=("average",))
    assert not fits(numbers=("softmax", 0.0, None, 0)), "causal"
    assert not fits(places=[(8, torch.tensor([3, 300]))]), "lengths"
    assert not fits(places=[(10, torch.zeros(200, 300))]), "a float mask"
    assert not fits(places=[(11, torch.zeros(1, dtype=torch.int32))]), "dropout"
    assert not fits(places=[(3, torch.zeros(1, 1, 300).expand(2, 4, 300))]), "a bias for all heads"
    assert not fits(places=[(3, torch.zeros(2, 4, 301)[..., 1:])]), "or one that begins oddly"
    assert not fits(places=[(2, torch.randn(2, 4, 1, 128).bfloat16().expand(2, 4, 300, 128))])


def test_what_fits_is_handed_over(monkeypatch):
    """With a buffer for everything that backward needs; the kernel fills it."""

    class Stand:
        is_supported = staticmethod(lambda call: call.key_bias is not None)

        @staticmethod
        def launch_pool(call, out, lse, kept):
            out.fill_(call.scales.scale)
            lse.fill_(1.0)
            kept.fill_(2.0)

    monkeypatch.setattr(forward, "_hopper_module", lambda device: Stand)
    query, key, value = arrays_of(n=8, m=8, w=16, d=16, dtype=torch.float32)
    out, lse = formulas.attend(
        query, key, value, scale=0.5, key_bias=norms.squared_norms(key, -0.25)[..., 0]
    )
    assert (out == torch.tensor(0.5 * 1.4426950408889634)).all() and (lse == 1).all()
    out, _ = formulas.attend(query, key, value, scale=0.5)
    assert out.std() > 0


def test_other_devices_have_none():
    assert HOPPER or forward._hopper_module(torch.device("cpu")) is None


@pytest.mark.skipif(not HOPPER, reason="it runs on a Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 40, 40, 256, 256, 128),
        (2, 40, 20, 1000, 777, 128),
        (1, 132, 132, 65, 129, 128),
        (2, 8, 8, 4096, 4096, 128),
    ],
    ids=str,
)
def test_the_result_is_close_to_float64(shape, dtype, monkeypatch):
    """Any lengths, heads that share keys, rows in any order in memory; the same bits each time."""
    started = []
    pool = hopper.launch_pool
    monkeypatch.setattr(hopper, "launch_pool", lambda *args: started.append(1) or pool(*args))
    b, h, hk, n, m, w = shape
    arrays = arrays_of(b, h, hk, n, m, w, w, dtype)
    arrays[0] = arrays[0].transpose(1, 2).contiguous().transpose(1, 2)
    options = {"score": Gaussian(3.4)}
    want = qkv.attend(*(x.double() for x in arrays), **options, engine="streaming")
    actual = [qkv.attend(*arrays, **options) for _ in range(4)]
    assert started and all(torch.equal(actual[0], x) for x in actual)
    close = 4e-3 if dtype == torch.bfloat16 else 6e-4
    assert (actual[0].double() - want).norm() < close * want.norm()
    key, scale = arrays[1], 3.4**-2
    _, lse = formulas.attend(
        *arrays, scale=scale, key_bias=norms.squared_norms(key, -scale / 2)[..., 0]
    )
    keys = key.double().repeat_interleave(h // hk, 1)
    scores = scale * (arrays[0].double() @ keys.mT - keys.square().sum(-1)[..., None, :] / 2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
