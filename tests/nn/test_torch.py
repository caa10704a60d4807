"""The layers inside torch's own machinery: compile, autocast, export, DDP, checkpointing."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from qkv.errors import EngineError  # noqa: E402
from qkv.nn import (  # noqa: E402
    AdditiveScore,
    MultiHeadAttention,
    SelfAttention,
    TransformerBlock,
)
from tests.transforms import TORCH  # noqa: E402

pytestmark = pytest.mark.sample_of_module(26)

FULL = True
"""Whether torch.compile must take each layer as one graph."""

LAYERS = {
    "plain": lambda: MultiHeadAttention(8, 2, batch_first=True),
    "rotary, grouped": lambda: MultiHeadAttention(
        8, 2, batch_first=True, rotary=True, num_kv_heads=1
    ),
    "additive": lambda: MultiHeadAttention(8, 2, batch_first=True, score=AdditiveScore(4, 4, 6)),
    "entmax": lambda: MultiHeadAttention(8, 2, batch_first=True, weighting="entmax15"),
}


def loss_and_slopes(function, layer, x):
    loss = function(x).square().sum()
    return [loss, *torch.autograd.grad(loss, [x, *layer.parameters()])]


# Where a graph ends, torch looks at .grad of what the next one begins with.
between_graphs = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.mark.sample(3)
@between_graphs
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_compile(make, weights):
    torch._dynamo.reset()
    layer = make()

    def function(x):
        out, alpha = layer(x, x, x, is_causal=True, need_weights=weights)
        return out if alpha is None else out + alpha.sum(-1, keepdim=True)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    got, want = (loss_and_slopes(f, layer, x) for f in (compiled, function))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@between_graphs
def test_compile_takes_a_block():
    torch._dynamo.reset()
    block = TransformerBlock(8, 2, 16, dropout=0.0, norm_first=True, rotary=True)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(
        compiled(x, key_padding_mask=padded), block(x, key_padding_mask=padded)
    )


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("weights", [True, False])
def test_autocast(make, weights):
    layer = make()
    x = torch.randn(2, 70, 8, requires_grad=True)
    want = layer(x, x, x, need_weights=weights)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, x, x, need_weights=weights)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert all(w.grad.dtype == torch.float32 for w in layer.parameters() if w.grad is not None)


def test_autocast_of_self_attention():
    layer = SelfAttention(8, 4, 4, score=AdditiveScore(4, 4, 6))
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out.float(), layer(x), rtol=0.05, atol=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_export(make, strict):
    layer = make().eval()

    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 5, 8)
    program = torch.export.export(Alone(), (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), Alone()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_checkpointing(make, reentrant, weights):
    layer = make()
    layer.dropout = 0.3  # drawn again as it was

    def function(x):
        out, alpha = layer(x, x, x, need_weights=weights)
        return out if alpha is None else out + alpha.sum(-1, keepdim=True)

    x = torch.randn(2, 70, 8, requires_grad=True)
    result = []
    for run in (function, lambda x: checkpoint(function, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        loss = run(x).square().sum()
        layer.zero_grad()
        x.grad = None
        loss.backward()
        result.append([loss, x.grad, *(w.grad for w in layer.parameters())])
    for a, b in zip(*result, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_distributed_data_parallel():
    # In a process of its own: a process group is for good.
    code = """
import sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from qkv.nn import AdditiveScore, TransformerBlock
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
for more in ({}, {"score": AdditiveScore(4, 4, 3)}):
    block = TransformerBlock(8, 2, 16, dropout=0.0, **more)
    x = torch.randn(2, 5, 8)
    want = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    DistributedDataParallel(block)(x).square().sum().backward()
    for w, grad in zip(block.parameters(), want):
        torch.testing.assert_close(w.grad, grad)
distributed.destroy_process_group()
print("equal")
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert ran.stdout.strip() == "equal", ran.stderr[-2000:]


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_second_derivative_inside_a_checkpoint(make):
    layer, x = make(), torch.randn(2, 5, 8, requires_grad=True)

    def steep(kept):
        def function(x):
            return layer(x, x, x, need_weights=False)[0].square().sum()

        loss = checkpoint(function, x, use_reentrant=False) if kept else function(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    want = steep(False)
    if make in (LAYERS["plain"], LAYERS["rotary, grouped"]):  # a fused kernel's
        with pytest.raises(EngineError, match=r"sdpa_kernel\(SDPBackend.MATH\)"):
            steep(True)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(steep(True), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "grad of vmap", "jvp", "hessian"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_transforms_of_layers(make, transform):
    """Ensembles, gradients for each sample and curvature, of the layer as a function."""
    layer = make().double()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        named_parameters = dict(zip(names, parameters, strict=True))
        keys = {"need_weights": False}
        return torch.func.functional_call(layer, named_parameters, (x, x, x), keys)[0]

    x = torch.randn(2, 5, 8, dtype=torch.double)
    TORCH[transform](function, lambda n: [x, *(p.detach() for p in layer.parameters())])


class Custom(torch.nn.TransformerEncoderLayer):
    """A subclass of torch's layer, as torch's own tests have it."""


def encoder(kind=torch.nn.TransformerEncoderLayer, dropout=0.0, layers=2):
    """torch's stack, and the same with our heads inside."""
    torch.manual_seed(3)
    layer = kind(8, 4, 16, dropout=dropout, batch_first=True)
    ours = copy.deepcopy(layer)
    heads = MultiHeadAttention(8, 4, dropout=dropout, batch_first=True)
    heads.load_state_dict(layer.self_attn.state_dict())
    ours.self_attn = heads
    return [torch.nn.TransformerEncoder(x, layers) for x in (layer, ours)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [torch.nn.TransformerEncoderLayer, Custom])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_encoder_with_our_heads_inside(kind, is_causal, training):
    theirs, ours = (x.train(training) for x in encoder(kind))
    x = torch.randn(2, 5, 8)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for masks_given in ({}, {"mask": causal}, {"src_key_padding_mask": padding}):
        options = {**masks_given, "is_causal": is_causal} if "mask" in masks_given else masks_given
        with torch.set_grad_enabled(training):  # without gradients: torch's fast path
            want, actual = theirs(x, **options), ours(x, **options)
        torch.testing.assert_close(actual, want)
        if training:
            slopes = [
                torch.autograd.grad(out.square().sum(), list(model.parameters()))
                for model, out in ((theirs, want), (ours, actual))
            ]
            torch.testing.assert_close(*slopes)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", [torch.nn.TransformerEncoderLayer, Custom])
def test_torchscript_of_torchs_encoder_with_our_heads_inside(kind):
    x, mask = torch.randn(2, 5, 8), torch.zeros(5, 5, dtype=torch.bool)
    _, ours = encoder(kind)
    want = ours(x, mask=mask)
    torch.testing.assert_close(torch.jit.script(ours)(x, mask=mask), want)
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(ours)(x, mask=mask), want)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("extra", [False, True])
def test_torchscript_of_plain_heads(extra):
    layer = MultiHeadAttention(16, 4, kdim=6, vdim=5, add_bias_kv=extra, add_zero_attn=extra)
    inputs = torch.rand(3, 2, 16), torch.rand(4, 2, 6), torch.rand(4, 2, 5)
    made = torch.jit.script(layer)
    torch.testing.assert_close(made(*inputs), layer(*inputs))
    assert list(made.state_dict()) == list(layer.state_dict())
