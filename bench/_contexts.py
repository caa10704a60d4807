"""Contexts for `bench.fuzz`: what a training script does around a call of `attend`.

A *context* runs the drawn call in another way that must give the same numbers. A *check* replaces
the comparison by its own and returns a complaint or None.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from qkv import nn
from qkv.errors import QkvError

Given = dict[str, Tensor]
Attend = Callable[[Given], Any]

PARAMETERS = ("of the score", "temperature")
TOLERANCES = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""‖got − want‖ / ‖want‖ of a layer in training against its copy in float64."""


def run_plainly(attend: Attend, given: Given) -> Any:
    return attend(given)


def run_again(attend: Attend, given: Given) -> Any:
    """Run the call twice; the second run uses a cached plan."""
    attend(given)
    return attend(given)


def run_checkpointed(attend: Attend, given: Given) -> Any:
    names = list(given)
    return torch.utils.checkpoint.checkpoint(
        lambda *arrays: attend(dict(zip(names, arrays, strict=True))),
        *given.values(),
        use_reentrant=False,
    )


def run_in_autocast(attend: Attend, given: Given) -> Any:
    """Pass float32 arrays that autocast rounds to the original ones."""
    dtype, device = given["query"].dtype, given["query"].device.type
    if dtype == torch.float32:
        return attend(given)
    with torch.autocast(device, dtype):
        return attend({name: x.float() for name, x in given.items()})


def run_with_float32_parameters(attend: Attend, given: Given) -> Any:
    return attend(
        {name: x.float() if name.startswith(PARAMETERS) else x for name, x in given.items()}
    )


def run_on_two_streams(attend: Attend, given: Given) -> Any:
    if not given["query"].is_cuda:
        return attend(given)
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        outs = attend(given)
    with torch.no_grad():
        attend({name: x.detach() for name, x in given.items()})  # meanwhile, on the current stream
    current.wait_stream(side)
    return outs


CONTEXTS: dict[str, Callable[[Attend, Given], Any]] = {
    "plain": run_plainly,
    "second call": run_again,
    "checkpoint": run_checkpointed,
    "autocast": run_in_autocast,
    "float32 parameters": run_with_float32_parameters,
    "two streams": run_on_two_streams,
}


def check_graph(attend: Attend, given: Given, other: Given) -> str | None:
    """Check that a captured CUDA graph, replayed with other numbers, equals an eager run."""
    if not given["query"].is_cuda:
        return None
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}

    def run() -> list[Tensor]:
        outs = attend(leaves)
        out = outs[0] if isinstance(outs, tuple) else outs
        grads = torch.autograd.grad(
            out.float().square().sum(), list(leaves.values()), allow_unused=True
        )
        return [out, *[x for x in grads if x is not None]]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for name, x in leaves.items():
            x.copy_(other[name])
    graph.replay()
    torch.cuda.synchronize()
    got = [x.clone() for x in captured]
    want = run()
    for x, y in zip(got, want, strict=True):
        if not torch.equal(x.isfinite(), y.isfinite()):
            return "a replayed graph is finite elsewhere than eager"
        x, y = (torch.nan_to_num(z.detach().double(), 0.0, 0.0, 0.0) for z in (x, y))
        off = float((x - y).norm()) / max(float(y.norm()), 1e-3)
        if not off <= 1e-2:
            return f"a replayed graph is off by {off:.1e}"
    return None


def check_wrong_masks(attend: Callable[[Given, Any], Any], given: Given) -> str | None:
    """Check that invalid masks raise qkv's errors, and that the next call works."""
    query, key = given["query"], given["key"]
    n, m = query.shape[-2], key.shape[-2]
    wrong: dict[str, Any] = {
        "one query too many": torch.ones(n + 2, m, dtype=torch.bool, device=query.device),
        "one key too many": torch.ones(n, m + 2, dtype=torch.bool, device=query.device),
        "too many heads": torch.ones(7, n, m, dtype=torch.bool, device=query.device),
        "whole numbers": torch.ones(n, m, dtype=torch.int32, device=query.device),
        "floats of a wrong shape": torch.zeros(n + 2, m, device=query.device),
    }
    if query.is_cuda:
        wrong["on the CPU"] = torch.ones(n, m, dtype=torch.bool)
        wrong["floats on the CPU"] = torch.zeros(n, m)
    for name, mask in wrong.items():
        try:
            attend(given, mask)
        except QkvError:
            continue
        except Exception as error:
            return f"a mask ({name}) raised {type(error).__name__}: {str(error)[:120]}"
        return f"a mask ({name}) was accepted"
    attend(given, torch.ones(n, m, dtype=torch.bool, device=query.device))
    if query.is_cuda:
        torch.cuda.synchronize()
    return None


LAYER_SCORES = ("scaled_dot", "additive", "gaussian", "cosine", "multiplicative", "gated")
LAYER_WEIGHTINGS = ("softmax", "entmax15", "sparsemax", "sigmoid")


def check_layer(random: Random, device: str, dtype: torch.dtype) -> tuple[str, str | None]:
    """Check a layer in training: reproducible dropout, and float64 results without it."""
    heads, score = random.choice((2, 4)), random.choice(LAYER_SCORES)
    weighting, length = random.choice(LAYER_WEIGHTINGS), random.randint(2, 200)
    causal, checkpointed = random.random() < 0.5, random.random() < 0.5
    autocast = dtype != torch.float32 and random.random() < 0.5
    about = f"layer {score}, {weighting}, {heads} heads, n {length}, {dtype}"
    about += ", causal" * causal + ", checkpoint" * checkpointed + ", autocast" * autocast
    torch.manual_seed(random.randrange(2**31))
    layer: Any = nn.MultiHeadAttention(
        64, heads, dropout=0.2, batch_first=True, score=score, weighting=weighting,
        device=device, dtype=torch.float32 if autocast else dtype,
    )  # fmt: skip
    x = torch.randn(2, length, 64, device=device, dtype=torch.float32 if autocast else dtype)

    def run(layer: Any, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()

        def attend(x: Tensor) -> Tensor:
            out: Tensor = layer(x, x, x, need_weights=False, is_causal=causal)[0]
            return out

        with torch.autocast(device, dtype, enabled=autocast and x.dtype == torch.float32):
            if checkpointed:
                out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
            else:
                out = attend(x)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        # The mean, because gradients of a sum exceed float16 where weights are not normalized.
        loss = out.float().square().mean()
        grads = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
        return [out, *[g for g in grads if g is not None]]

    runs = []
    for _ in range(2):  # the first call of its kind, and a later one
        torch.manual_seed(7)
        runs.append(run(layer, x))
    for first, second in zip(*runs, strict=True):
        if not bool(first.isfinite().all()):
            return about, "a layer in training is not finite"
        if not torch.allclose(first.float(), second.float(), atol=1e-3, rtol=1e-3):
            return about, "a layer in training differs between two calls of one seed"
    layer.eval()
    copy: Any = nn.MultiHeadAttention(
        64, heads, batch_first=True, score=score, weighting=weighting, dtype=torch.float64
    )
    copy.load_state_dict({name: p.double().cpu() for name, p in layer.state_dict().items()})
    copy.eval()
    got = run(layer, x)[0].detach().double().cpu()
    want = run(copy, x.double().cpu())[0].detach()
    off = float((got - want).norm() / want.norm())
    if not off <= TOLERANCES[dtype]:
        return about, f"a layer is off by {off:.1e}"
    return about, None
