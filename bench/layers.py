"""Is `MultiHeadAttention` as fast as torch's? d512 h8 n1024, f32, CPU. What do weights cost?

With --cuda, the same in bf16 on a CUDA device, and at n2048 additive heads against dot heads.
"""

from __future__ import annotations

import copy
import itertools
import sys
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from bench._clocks import Cpu, Cuda
from bench._results import show
from bench._side_by_side import SMALL, compare, input_sets, save_results, size
from qkv import nn

D, H = 512, 8
N = size(1024, 64)
GOALS = {"torch": 1 / 1.02}
KINDS = {"qkv": nn.MultiHeadAttention, "torch": torch.nn.MultiheadAttention}


def layer(kind, **options):
    torch.manual_seed(0)
    return kind(D, H, batch_first=True, **options)


def forward(layer, x, g, **rest):
    with torch.no_grad():
        return layer(x, x, x, **rest)[0]


def both(layer, x, g, **rest):
    """Return the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    out, alpha = layer(x, x, x, **rest)
    loss = (out * g).sum() + (0 if alpha is None else (alpha * alpha).sum())
    return torch.autograd.grad(loss, [x, *layer.parameters()])


RUNS = {"forward": forward, "forward + backward": both}


def wide(run, layer, x, g, **rest):
    """Return the same in float64, by torch's layer."""
    found = run(copy.deepcopy(layer).double().train(), x.double(), g.double(), **rest)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def compare_layers(work, run, sets, layers, clock=None, goals=GOALS, **rest):
    return compare(
        work,
        {name: partial(run, layer, **rest) for name, layer in layers.items()},
        sets,
        exact=partial(wide, run, layers["torch"], **rest) if "torch" in layers else None,
        goals=goals,
        clock=clock,
        repeats=15,
    )


def rows():
    torch.manual_seed(0)
    sets = input_sets(lambda: tuple(torch.randn(2, 1, N, D)))
    train = {name: layer(kind) for name, kind in KINDS.items()}
    ready = {name: layer(kind).eval() for name, kind in KINDS.items()}
    work = f"heads d{D} h{H} n{N} f32"
    plain = {"need_weights": False}
    yield compare_layers(f"{work}, forward", forward, sets, train, **plain)
    yield compare_layers(f"{work}, forward, eval", forward, sets, ready, **plain)
    yield compare_layers(f"{work}, forward + backward", both, sets, train, **plain)
    for pass_name, run in RUNS.items():
        row = compare_layers(f"{work}, {pass_name}, with weights", run, sets, train, goals=None)
        for name, side in row["sides"].items():
            side["extra MiB"] = allocated(run, train[name], *sets[0])
        yield half(row)


def half(row):
    """Return the row with a goal for memory, if it was measured: half of torch's."""
    if "extra MiB" not in row["sides"]["qkv"]:
        return row
    ours, theirs = (row["sides"][name]["extra MiB"] for name in KINDS)
    goal = {"goal": "≤ 1/2 of torch's memory", "found": ours / theirs, "met": 2 * ours <= theirs}
    row["goals"].append(goal)
    show(row)
    return row


def allocated(run, *given):
    """Return the peak MiB of tensors above the start; resident memory depends on malloc."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run(*given)
    steps = (e.nbytes() for e in found.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(steps)) / 2**20


def cuda_rows():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Cuda() if device == "cuda" else Cpu()
    where = {"device": device, "dtype": torch.bfloat16}
    plain = {"need_weights": False}
    train = {name: layer(kind, **where) for name, kind in KINDS.items()}
    ready = {name: layer(kind, **where).eval() for name, kind in KINDS.items()}
    dots = {"dot heads": 0.25}
    torch.manual_seed(0)

    def inputs(batch, n):
        return input_sets(lambda: tuple(torch.randn(2, batch, n, D, **where)), clock)

    for batch in size(1, 1), size(8, 2):
        sets, work = inputs(batch, N), f"heads B{batch} d{D} h{H} n{N} bf16"
        yield compare_layers(f"{work}, forward, eval", forward, sets, ready, clock, **plain)
        for pass_name, run in RUNS.items():
            yield compare_layers(f"{work}, {pass_name}", run, sets, train, clock, **plain)
            if device == "cuda":
                yield as_graphs(f"{work}, {pass_name}, as a CUDA graph", run, sets[0], train, GOALS)
            row = compare_layers(
                f"{work}, {pass_name}, with weights", run, sets, train, clock, None
            )
            yield half(row)
    for batch, hidden in itertools.product((1, size(8, 2)), (D // H // 2, D // H)):
        work = f"additive heads B{batch} d{D} h{H} n{2 * N} bf16, {hidden} units"
        score = nn.AdditiveScore(D // H, D // H, hidden, **where)
        additive = layer(nn.MultiHeadAttention, score=score, **where)
        heads, sets = {"qkv": additive, "dot heads": train["qkv"]}, inputs(batch, 2 * N)
        for pass_name, run in RUNS.items():
            yield compare_layers(f"{work}, {pass_name}", run, sets, heads, clock, dots, **plain)
            if device == "cuda":
                yield as_graphs(f"{work}, {pass_name}, as a CUDA graph", run, sets[0], heads, dots)


def as_graphs(work, run, given, layers, goals):
    """Return the device time: all launches replayed as one CUDA graph."""

    def captured(layer):
        for _ in range(3):
            run(layer, *given, need_weights=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(layer, *given, need_weights=False)
        return lambda *_: graph.replay()

    sides = {name: captured(layer) for name, layer in layers.items()}
    return compare(work, sides, [given], goals=goals, clock=Cuda(), repeats=15)


if __name__ == "__main__":
    if "--cuda" not in sys.argv:
        save_results("layers", rows())
    elif torch.cuda.is_available() or SMALL:
        save_results("layers_cuda", cuda_rows())
    else:
        sys.exit("bench.layers --cuda needs a CUDA device, which torch does not find")
