"""What four processes do together, in groups of one to four, and what each finds wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist

import qkv
from qkv import masks, scores, weightings
from qkv.cluster import torch as cluster
from qkv.nn import AdditiveScore
from tests.sampling import sample

WORLD = 4
GROUPS = ([2], [1, 3], [1, 2, 3], [0, 1, 2, 3])
"""The processes of each group: a rank in it is not always the rank in the world."""
KEYS = {1: (9,), 2: (7, 2), 3: (4, 0, 5), 4: (2, 3, 0, 4)}
"""How many of nine keys each process holds."""
QUERIES = {1: (6,), 2: (1, 5), 3: (3, 3, 0), 4: (2, 1, 0, 3)}


@dataclass(frozen=True)
class Case:
    """Arguments of `attend` for some columns of the keys, from learned arrays."""

    build_options: Callable[[list[Tensor], slice], dict[str, Any]]
    learned: tuple[tuple[int, ...], ...] = ()
    lead: tuple[int, ...] = ()
    shared: tuple[int, ...] | None = None

    def arrays(self) -> list[Tensor]:
        chance = torch.Generator().manual_seed(3)
        leads = self.lead, *(self.lead if self.shared is None else self.shared,) * 2
        shapes = [(*lead, size, 4) for lead, size in zip(leads, (6, 9, 9), strict=True)]
        return [
            torch.randn(shape, dtype=torch.float64, generator=chance).requires_grad_()
            for shape in (*shapes, *self.learned)
        ]


def _plain(**options: Any) -> Callable[[list[Tensor], slice], dict[str, Any]]:
    return lambda learned, cols: options


def _softmax(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    return {"return_lse": True}


def _additive(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    return {"score": scores.Additive(*learned), "weighting": "entmax15", "mask": "causal"}


def _gated(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    return {"score": scores.Gated(*learned), "return_lse": True}


def _alpha(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    return {"weighting": weightings.Entmax(1.2 + learned[0].sigmoid())}


def _function(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    def moved(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + learned[0] * (q - k).abs()

    even = masks.custom(lambda b, h, q, k: (q + k) % 2 == 0)
    return {"score": scores.Modified("dot", moved), "mask": even & masks.window(5)}


def _bias(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    return {"mask": masks.array(learned[0][:, cols]) & masks.causal("bottom_right")}


def _documents(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    ids, keys = np.array([0, 0, 1, 1, 2, 3]), np.array([2, 1, 0, 0, 0, 1, 1, 0, 2])
    rule = masks.documents(ids, keys[cols]) | masks.global_tokens(1)
    return {"mask": rule, "weighting": "sparsemax"}


def _tied(learned: list[Tensor], cols: slice) -> dict[str, Any]:
    return {"score": lambda q, k: (q @ k.mT).round(), "weighting": weightings.TopK(3)}


CASES = {
    "softmax": Case(_softmax),
    "constant": Case(_plain(score="constant")),
    "lse": Case(_plain(return_lse=True, mask="causal"), lead=(2,)),
    "shared heads": Case(_plain(mask=masks.lengths([8])), lead=(1, 4), shared=(1, 2)),
    "additive": Case(_additive, ((3, 4), (3, 4), (3,), (3,))),
    "gated": Case(_gated, ((4,), (4,))),
    "gaussian": Case(_plain(score="gaussian", weighting=weightings.TopK(4))),
    "nearest": Case(
        _plain(score=scores.Triangular(2.5), weighting=weightings.Normalized("nearest"))
    ),
    "learned alpha": Case(_alpha, ((1,),), lead=(2,)),
    "function": Case(_function, ((1,),)),
    "float mask": Case(_bias, ((6, 9),)),
    "documents": Case(_documents),
    "dropout": Case(_plain(dropout_p=0.4, seed=5)),
    "sigmoid": Case(_plain(weighting="sigmoid", mask=masks.strided(2))),
    "average": Case(_plain(weighting="average", mask="causal")),
    "hard": Case(_plain(score="constant", weighting="hard", mask=masks.window(1))),
    "ties": Case(_tied),
    "straight through": Case(_plain(weighting=weightings.Hard(True))),
}

CHECKED = (_softmax, _additive, _bias)
"""Gradients that gradcheck looks at too."""


class Joined(torch.autograd.Function):
    """The rows of all processes, for one loss that all compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any) -> Tensor:
        ctx.own = slice(
            sum(ranks.query_counts[: ranks.rank]), sum(ranks.query_counts[: ranks.rank + 1])
        )
        return ranks.all_gather_rows(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[..., ctx.own, :], None


def check(case: Case, queries: str, group: Any) -> None:
    """The output and all gradients are those of one process; of some, gradcheck agrees."""
    ranks = cluster.RankGroup(group)
    local_keys, own = _parts(ranks)
    ranks.query_counts = QUERIES[ranks.size]

    def one(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        options = case.build_options(list(learned), slice(None))
        return _flat(qkv.attend(query, key, value, engine="dense", **options))

    def many(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        key, value = (cluster.sum_gradient(x, group)[..., local_keys, :] for x in (key, value))
        options = case.build_options(list(learned), local_keys)
        if queries == "same":
            return _flat(cluster.attend(query, key, value, group, **options))
        query = cluster.sum_gradient(query, group)[..., own, :]
        out = cluster.attend(query, key, value, group, queries="sharded", **options)
        return Joined.apply(_flat(out), ranks)

    arrays = case.arrays()
    want, actual = one(*arrays), many(*arrays)
    _near(actual, want, "output")
    along = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(4))
    right, ours = (
        torch.autograd.grad(x, arrays, along, allow_unused=True, materialize_grads=True)
        for x in (want, actual)
    )
    ours = list(ours)
    parts = queries == "sharded" or case.build_options is _bias  # each has those of its own keys
    if parts and case.learned:
        ours[3:] = ranks.all_reduce_sum(ours[3:])
    for i, (a, b) in enumerate(zip(ours, right, strict=True)):
        _near(a, b, f"gradient {i}")
    if case.build_options in CHECKED:
        torch.manual_seed(5)  # all must look the same way
        fixed = [x.detach() for x in arrays[3:]]
        checked = arrays[:3] + (fixed if parts else arrays[3:])
        assert torch.autograd.gradcheck(many, checked, fast_mode=True)


def _parts(ranks: cluster.RankGroup) -> list[slice]:
    """Which keys and which queries are this process's own."""
    sizes = KEYS[ranks.size], QUERIES[ranks.size]
    return [slice(sum(x[: ranks.rank]), sum(x[: ranks.rank + 1])) for x in sizes]


def _flat(result: Any) -> Tensor:
    return torch.cat([result[0], result[1][..., None]], -1) if isinstance(result, tuple) else result


def _near(actual: Tensor, want: Tensor, what: str) -> None:
    error = (actual - want).abs().max().item()
    assert error < 1e-9, f"{what} is off by {error}"


def check_half(group: Any) -> None:
    """16-bit arrays are summed in float32, and gradients come back in 16 bits."""
    ranks = cluster.RankGroup(group)
    local_keys, own = _parts(ranks)
    arrays = [x.detach().bfloat16() for x in CASES["lse"].arrays()]
    for queries, rows in (("same", slice(None)), ("sharded", own)):
        inputs = [arrays[0][..., rows, :], *(x[..., local_keys, :] for x in arrays[1:])]
        inputs = [x.clone().requires_grad_() for x in inputs]
        full = [x.clone().requires_grad_() for x in arrays]
        out = cluster.attend(*inputs, group, queries=queries, mask="causal")
        want = qkv.attend(*full, mask="causal")
        slopes, right = (
            torch.autograd.grad(x.square().sum(), y) for x, y in ((out, inputs), (want, full))
        )
        parts = [
            want[..., rows, :],
            right[0][..., rows, :],
            *(x[..., local_keys, :] for x in right[1:]),
        ]
        for actual, expected in zip((out, *slopes), parts, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def check_few(group: Any) -> None:
    """Fewer queries than processes, or none at all, go round too."""
    ranks = cluster.RankGroup(group)
    local_keys, _ = _parts(ranks)
    query, key, value = CASES["softmax"].arrays()
    for count in (0, 1):
        own = query.detach()[: count * (ranks.rank == 0)].requires_grad_()
        out = cluster.attend(own, key[local_keys], value[local_keys], group, queries="sharded")
        want = qkv.attend(query[: len(own)], key, value)
        torch.testing.assert_close(out, want)
        slopes = (torch.autograd.grad(x.sum(), y)[0] for x, y in ((out, own), (want, query)))
        torch.testing.assert_close(*(x[: len(own)] for x in slopes))


class Layer(nn.Module):
    """Self-attention to a sequence of which each process has a part."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.score = AdditiveScore(4, 4, 3)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (f(x) for f in self.maps)
        options: dict[str, Any] = {"score": self.score.build(x.dtype), "mask": "causal"}
        if self.group is None:
            return qkv.attend(query, key, value, **options)
        return cluster.attend(query, key, value, self.group, queries="sharded", **options)


def check_ddp(group: Any, compiled: bool) -> None:
    """DDP's mean is the gradient of the mean of the losses, as for any model."""
    ranks = cluster.RankGroup(group)
    torch.manual_seed(7)
    alone, apart = Layer(None).double(), Layer(group).double()
    apart.load_state_dict(alone.state_dict())
    x = torch.randn(9, 4, dtype=torch.float64)
    local_keys = _parts(ranks)[0]
    model: Any = nn.parallel.DistributedDataParallel(apart, process_group=group)
    model = torch.compile(model, backend="eager") if compiled else model
    alone(x).square().sum().div(ranks.size).backward()
    model(x[local_keys]).square().sum().backward()
    for (name, a), b in zip(alone.named_parameters(), apart.parameters(), strict=True):
        _near(b.grad, a.grad, name)


def check_compiled(group: Any) -> None:
    """As one operator of a whole graph it gives what the eager call gives, and its gradients."""
    for name in ("lse", "additive", "float mask", "documents", "learned alpha", "dropout"):
        for queries in ("same", "sharded"):
            inputs, loss = _compilable(CASES[name], queries, group)
            torch._dynamo.reset()
            totals = (
                loss(*inputs),
                torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs),
            )
            want, actual = (torch.autograd.grad(x, inputs, allow_unused=True) for x in totals)
            _near(totals[1], totals[0], f"{name}, {queries}")
            for i, (a, b) in enumerate(zip(actual, want, strict=True)):
                _near(a, b, f"{name}, {queries}: gradient {i}")


def _compilable(case: Case, queries: Any, group: Any) -> tuple[list[Tensor], Any]:
    """This process's arrays, and a loss of them."""
    local_keys, own = _parts(cluster.RankGroup(group))
    query, key, value, *learned = (x.detach() for x in case.arrays())
    rows = own if queries == "sharded" else slice(None)
    fixed = {} if learned else case.build_options([], local_keys)

    def loss(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        options = case.build_options(list(learned), local_keys) if learned else fixed
        return (
            _flat(cluster.attend(query, key, value, group, queries=queries, **options))
            .square()
            .sum()
        )

    inputs = [query[..., rows, :], *(x[..., local_keys, :] for x in (key, value)), *learned]
    return [x.clone().requires_grad_() for x in inputs], loss


def check_refusals(group: Any) -> None:
    ranks = cluster.RankGroup(group)
    x = torch.ones(2, 3, requires_grad=True)
    local = x[: 1 + (ranks.rank == 0)]

    def refused(part: str, attempt: Callable[[], Any]) -> None:
        try:
            attempt()
        except (TypeError, ValueError) as error:
            assert part in str(error), error
        else:
            raise AssertionError(f"no error tells of {part}")

    if ranks.size > 1:
        refused("queries='sharded'", lambda: cluster.attend(local, x, x, group))
    refused("did you mean", lambda: cluster.attend(x, x, x, group, queries="shard"))
    by_row = weightings.Entmax(torch.tensor([[1.5], [1.6]]))
    options: Any = {"queries": "sharded", "weighting": by_row}
    refused("for each query", lambda: cluster.attend(x, x, x, group, **options))
    out = cluster.attend(x, x, x, group)
    refused("second derivatives", lambda: torch.autograd.grad(out.sum(), x, create_graph=True))
    small = masks.array(torch.ones(2, 3, dtype=torch.bool))
    refused("does not broadcast", lambda: cluster.attend(x, x, x, group, mask=small))


COMPILED = "DDP, compiled"


def _names() -> dict[str, Callable[[Any], None]]:
    result: dict[str, Callable[[Any], None]] = {}
    for name, case in CASES.items():
        for queries in ("same", "sharded"):
            result[f"{name}, {queries}"] = lambda group, c=case, q=queries: check(c, q, group)
    result["DDP"] = lambda group: check_ddp(group, compiled=False)
    result[COMPILED] = lambda group: check_ddp(group, compiled=True)
    result["compiled"] = check_compiled
    return result | {"16 bits": check_half, "few": check_few, "refusals": check_refusals}


def _sizes(name: str) -> Iterable[int]:
    """All where gradcheck looks too, else two and three: with empty shards, and without."""
    if name == COMPILED:
        return (2,)
    if name == "compiled":
        return (1, 2)
    case = CASES.get(name.partition(",")[0])
    return (2, 3) if case is not None and case.build_options not in CHECKED else range(1, WORLD + 1)


CHECKS = _names()
PAIRS = sample([(name, size) for name in CHECKS for size in _sizes(name)], 16)
"""The names of the checks, each with a number of processes."""


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    file = Path(folder, "meet").as_uri()
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=WORLD)
    groups = [dist.new_group(members) for members in GROUPS]
    faults: dict[tuple[str, int], str] = {}
    for name, size in PAIRS:
        if rank in GROUPS[size - 1]:
            try:
                CHECKS[name](groups[size - 1])
                faults[name, size] = ""
            except Exception:
                faults[name, size] = traceback.format_exc()
    torch.save(faults, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def run_ranks(folder: Path) -> list[dict[tuple[str, int], str]]:
    """What went wrong on each process, by the check and the size of the group; "" is nothing."""
    multiprocessing.set_forkserver_preload([__name__])  # torch is imported once, not four times
    multiprocessing.start_processes(
        run_rank, (str(folder),), nprocs=WORLD, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
