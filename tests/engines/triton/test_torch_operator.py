"""An operator is its function in eager code, and its node wherever a transform looks on."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="the kernels are written in Triton")

from qkv.engines.triton import norms
from tests.engines.triton.test_norms import DEVICE


@pytest.fixture
def seen(monkeypatch):
    """The calls of a node."""
    calls, node = [], norms.squared_norms.node
    monkeypatch.setattr(
        norms.squared_norms, "node", lambda *args: calls.append(args) or node(*args)
    )
    return calls


def random_tensor():
    return torch.randn(3, 8, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)


def test_eager_code_sees_the_function(seen):
    x = random_tensor().requires_grad_()
    out = norms.squared_norms(x, 0.5)
    assert not seen
    for y, z in ((out, 0.5 * (x * x).sum(-1, keepdim=True)), (slope(out, x), x)):
        torch.testing.assert_close(y, z)
    assert not norms.squared_norms(x.detach(), 0.5).requires_grad
    with torch.no_grad():
        assert not norms.squared_norms(x, 0.5).requires_grad


def test_the_node_has_the_same_gradient():
    x = random_tensor().requires_grad_()
    one, two = norms.squared_norms(x, 0.5), norms.squared_norms.node(x, 0.5)
    assert torch.equal(one, two)
    assert torch.equal(slope(one, x), slope(two, x))


def slope(out, x):
    return torch.autograd.grad(out.sum(), x)[0]


def test_a_trace_sees_the_node(seen):
    graph = make_fx(lambda x: norms.squared_norms(x, 0.5))(random_tensor()).graph
    assert "qkv.squared_norms.default" in {str(node.target) for node in graph.nodes}
    assert seen


def test_fake_tensors_see_the_node(seen):
    with FakeTensorMode():
        assert norms.squared_norms(torch.empty(3, 8), 0.5).shape == (3, 1)
    assert len(seen) == 1
