"""A weighting's parameters as a layer's own."""

from __future__ import annotations

import io
from copy import deepcopy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import nn, weightings  # noqa: E402


def alphas(*values):
    return torch.nn.Parameter(torch.tensor(values))


def layer_of(*values, **more):
    torch.manual_seed(0)
    weighting = weightings.Entmax(alphas(*values))
    return nn.MultiHeadAttention(8, len(values), batch_first=True, weighting=weighting, **more)


def test_the_parameter_is_the_layer_s():
    layer = layer_of(1.2, 1.8)
    assert "weighting.alpha" in layer.state_dict()
    assert dict(layer.named_parameters())["weighting.alpha"].tolist() == pytest.approx([1.2, 1.8])
    assert "weighting=Entmax" in repr(layer)
    x = torch.randn(2, 5, 8)
    out, alpha = layer(x, x, x, average_attn_weights=False)
    out.square().sum().backward()
    assert torch.isfinite(layer.weighting.alpha.grad).all()
    assert (layer.weighting.alpha.grad != 0).all()
    for head, value in enumerate((1.2, 1.8)):  # each head has its own
        torch.manual_seed(0)
        weighting = weightings.Entmax(value)
        alone = nn.MultiHeadAttention(8, 2, batch_first=True, weighting=weighting)
        want = alone(x, x, x, average_attn_weights=False)[1]
        np.testing.assert_allclose(alpha[:, head].detach(), want[:, head].detach(), atol=1e-5)


def test_it_is_saved_copied_and_moved():
    layer, x = layer_of(1.2, 2.3), torch.randn(2, 5, 8)
    want = layer(x, x, x)[0]
    other = layer_of(1.5, 1.5)
    other.load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for same in (other, deepcopy(layer), torch.load(file, weights_only=False)):
        np.testing.assert_array_equal(same(x, x, x)[0].detach(), want.detach())
    copy = deepcopy(layer)
    with torch.no_grad():
        copy.weighting.alpha.fill_(1.0)
    np.testing.assert_array_equal(layer(x, x, x)[0].detach(), want.detach())
    wide = layer.double()(x.double(), x.double(), x.double())[0]
    np.testing.assert_allclose(wide.detach(), want.detach(), atol=1e-5)
    assert layer.bfloat16()(*[x.bfloat16()] * 3)[0].dtype == torch.bfloat16


def test_every_layer_of_a_stack_has_its_own():
    weighting = weightings.Entmax(alphas(1.5, 1.5))
    stack = nn.TransformerEncoder(2, 8, 2, dim_feedforward=16, weighting=weighting)
    result = [x for name, x in stack.named_parameters() if name.endswith("weighting.alpha")]
    assert len({id(x) for x in result}) == 2


@pytest.mark.parametrize("make", [nn.Attention, lambda **options: nn.SelfAttention(3, **options)])
def test_other_layers(make):
    layer = make(weighting=weightings.Softmax(torch.nn.Parameter(torch.tensor(0.5))))
    assert list(layer.state_dict())[-1] == "weighting.temperature"
    x = torch.randn(4, 3)
    out = layer(x) if isinstance(layer, nn.SelfAttention) else layer(x, x, x)
    out.sum().backward()
    assert layer.weighting.temperature.grad is not None


def test_a_tensor_that_is_no_parameter_stays_the_caller_s():
    t = torch.tensor(0.5, requires_grad=True)
    layer = nn.Attention(weighting=weightings.Softmax(t))
    assert not list(layer.parameters())
    x = torch.randn(4, 3)
    layer(x, x, x).square().sum().backward()
    assert t.grad is not None
    # One for each head, which torch's own layer has not.
    nn.MultiHeadAttention(8, 2, weighting=weightings.Softmax(torch.ones(2, 1, 1)))


def test_compiled():
    layer, x = layer_of(1.2, 1.7), torch.randn(2, 5, 8)
    want = layer(x, x, x, need_weights=False)[0]
    quick = torch.compile(layer, backend="eager", fullgraph=True)
    actual = quick(x, x, x, need_weights=False)[0]
    np.testing.assert_allclose(actual.detach(), want.detach(), atol=1e-5)
    grads = [
        torch.autograd.grad(y.square().sum(), layer.weighting.alpha)[0] for y in (want, actual)
    ]
    np.testing.assert_allclose(*grads, rtol=1e-3, atol=1e-5)


def test_it_is_learned():
    """The head that must tell two keys apart gets sharper, the one that must average does not."""
    torch.manual_seed(0)
    alpha = alphas(1.5, 1.5)
    q, k = torch.zeros(2, 1, 1), torch.tensor([[0.3], [0.0], [-0.3]]).expand(2, 3, 1)
    q = q + 1
    want = torch.tensor([[1.0, 0.0, 0.0], [0.45, 0.33, 0.22]])
    optimizer = torch.optim.Adam([alpha], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        p = qkv.weights(q, k, score="dot", weighting=weightings.Entmax(alpha))[:, 0]
        (p - want).square().sum().backward()
        optimizer.step()
    assert alpha[0] > 2.5 and alpha[1] < 1.2


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated")
def test_a_trace_is_small_enough_for_torch_to_run_twice():
    """The search is one node: torch's fuser, at the second call, took minutes for its steps."""
    layer = layer_of(1.2, 1.8)
    x, y = torch.randn(2, 1, 3, 8)
    traced = torch.jit.trace(layer, (x, x.clone(), x.clone()), check_trace=False)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("qkv::rows") == 1 and len(kinds) < 1500
    want = layer(y, y, y)[0]
    for _ in range(3):
        out = traced(y, y.clone(), y.clone())[0]
        torch.testing.assert_close(out, want)
    (slope,) = torch.autograd.grad(out.square().sum(), layer.weighting.alpha)
    (expected,) = torch.autograd.grad(want.square().sum(), layer.weighting.alpha)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_hook_that_never_runs_is_reported(kind):
    layer = layer_of(1.2, 1.8)
    with pytest.warns(UserWarning, match=r"never runs.*nn\.capture"):
        getattr(layer.weighting, f"register_{kind}")(lambda *args: None)
