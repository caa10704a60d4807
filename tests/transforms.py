"""What a framework does to a function of its arrays: each transform as one check.

`TORCH[name](function, make)` raises unless the transformed function gives what plain calls give,
values and derivatives. `function(*arrays)` returns one array; `make(n)` gives its arrays for n
queries and keys, floats (which are differentiated) first, then masks. An entry is all that a row
of the table of docs/frameworks.md needs: a name, and a check that passes or raises.

To add a framework, add a dictionary of such checks by the same names where the transform is the
same; `OPTIONS` is what they are tried on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

import qkv
from qkv import masks, scores, weightings
from qkv.frameworks import get_framework
from tests.sampling import FULL

Function = Callable[..., Any]
Make = Callable[[int], list[Any]]
Check = Callable[[Function, Make], None]

N = 5


class Option(NamedTuple):
    """One way to call: a function of query, key, value and the arrays `extra(n)`, which gives one.

    Its keywords are more arguments of `attend`: `call(*x, engine="streaming")`. `family` is the
    column of the table that it counts in.
    """

    family: str
    call: Function
    extra: Callable[[int], list[np.ndarray]] = lambda n: []


def _with(family: str, **options: Any) -> Option:
    return Option(family, lambda *x, **more: qkv.attend(*x, **options, **more))


def _score(build: Callable[..., Any], *shapes: tuple[int, ...]) -> Option:
    """A score that holds arrays of these shapes."""

    def call(query: Any, key: Any, value: Any, *held: Any, **more: Any) -> Any:
        return qkv.attend(query, key, value, score=build(*held), **more)

    return Option("scores", call, lambda n: _drawn(*shapes))


def _distance(w: Any) -> Function:
    """−(w·q − w·k)², as a caller would write it."""

    def score(query: Any, key: Any) -> Any:
        a, b = (get_framework(x).xp.sum(x * w, axis=-1) for x in (query, key))
        return -((a[..., :, None] - b[..., None, :]) ** 2)

    return score


def _drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def _returned(**what: Any) -> Function:
    """All that comes back, side by side."""

    def call(*x: Any, **more: Any) -> Any:
        out, other = qkv.attend(*x, **what, **more)
        other = other[..., None] if len(other.shape) < len(out.shape) else other
        fw = get_framework(out)
        return fw.xp.concat([out, fw.astype(other, fw.dtype_name(out))], axis=-1)

    return call


def _bent(query: Any, key: Any, value: Any, bend: Any, **more: Any) -> Any:
    alpha = 1.5 + get_framework(bend).xp.tanh(bend) / 4
    return qkv.attend(query, key, value, weighting=weightings.Entmax(alpha), **more)


def _masked(query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
    return qkv.attend(query, key, value, mask=mask, **more)


OPTIONS: dict[str, Option] = {
    "softmax": _with("plain"),
    "causal": _with("masks", mask=masks.causal),
    "window": _with("masks", mask=masks.window(2)),
    "boolean mask": Option("mask arrays", _masked, lambda n: [_drawn((n, n + 2))[0] > -1]),
    "float mask": Option("mask arrays", _masked, lambda n: _drawn((n, n + 2))),
    "cosine": _with("scores", score="cosine"),
    "softcap": _with("scores", score=scores.ScaledDot(softcap=2.0)),
    "gaussian": _with("scores", score="gaussian"),
    "laplace": _with("scores", score="laplace"),
    "epanechnikov": _with("scores", score=scores.Epanechnikov(3.0), weighting="normalized"),
    "multiplicative": _score(scores.Multiplicative, (3, 3)),
    "additive": _score(scores.Additive, (4, 3), (4, 3), (4,)),
    "gated": _score(scores.Gated, (3,), (3,)),
    "a function": _score(_distance, (3,)),
    "hard": _with("weightings", weighting="hard"),
    "average": _with("weightings", weighting="average"),
    "raw": _with("weightings", weighting="raw"),
    "sigmoid": _with("weightings", weighting="sigmoid"),
    "top 3": _with("weightings", weighting=weightings.TopK(3)),
    "sparsemax": _with("weightings", weighting="sparsemax"),
    "entmax15": _with("weightings", weighting="entmax15"),
    "learned alpha": Option("weightings", _bent, lambda n: _drawn((n, 1))),
    "log-sum-exp": Option("lse", _returned(return_lse=True)),
    "weights": Option("weights", _returned(return_weights=True)),
    "dropout": _with("dropout", dropout_p=0.5, seed=7),
}
"""What transforms are tried on."""


def arrays(n: int, lead: tuple[int, ...] = (2, 4), width: int = 3) -> list[np.ndarray]:
    """Query, key and value of n rows in float64, always the same for one n."""
    rng = np.random.default_rng(n)
    return [rng.normal(size=(*lead, rows, width)) for rows in (n, n + 2, n + 2)]


def build_arguments(option: Option, array: Function, lead: tuple[int, ...] = (2, 4)) -> Make:
    """The arguments of an option's call, each turned into an array of a framework."""
    return lambda n: [array(x) for x in (*arrays(n, lead), *option.extra(n))]


def cells(transforms: dict[str, Check], options: dict[str, Option]) -> list[tuple[str, str]]:
    """Each cell of the table as a transform and one option of the family, taken in turn; in the
    full run every option."""
    if FULL:
        return [(transform, option) for transform in transforms for option in options]
    families: dict[str, list[str]] = {}
    for name, option in options.items():
        families.setdefault(option.family, []).append(name)
    return [
        (transform, names[i % len(names)])
        for i, transform in enumerate(transforms)
        for names in families.values()
    ]


def _close(got: Any, want: Any, atol: float = 1e-9) -> None:
    import torch

    torch.testing.assert_close(got, want, atol=atol, rtol=1e-7)


def _floats(inputs: list[Any]) -> list[Any]:
    return [x for x in inputs if x.is_floating_point()]


def _loss(function: Function, make: Make) -> tuple[Function, list[Any]]:
    """Σ output · along as a function of the arrays that have a derivative, and these."""
    import torch

    inputs = make(N)
    floats = _floats(inputs)
    remaining = inputs[len(floats) :]
    generator = torch.Generator().manual_seed(1)
    out = function(*inputs)
    along = torch.randn(out.shape, generator=generator, dtype=out.dtype)

    def loss(*moved: Any) -> Any:
        return (function(*moved, *remaining) * along).sum()

    return loss, floats


def _slopes(function: Function, inputs: list[Any]) -> list[Any]:
    """The gradients of a number as autograd gives them, zeros where there is none."""
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    value = function(*leaves)
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    result = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, result, strict=True)]


def _compile(**options: Any) -> Check:
    def check(function: Function, make: Make) -> None:
        import torch

        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True, **options)
        _close(compiled(*make(N)), function(*make(N)))

    return check


def _compile_gradients(function: Function, make: Make) -> None:
    import torch

    torch._dynamo.reset()
    loss, inputs = _loss(function, make)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    _close(_slopes(compiled, inputs), _slopes(loss, inputs))


def _compile_lengths(function: Function, make: Make) -> None:
    """Twenty lengths in two graphs: the first as it stands, then any."""
    import torch

    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for n in range(N, N + 20):
        _close(compiled(*make(n)), function(*make(n)))
    assert len(graphs) <= 2, f"{len(graphs)} graphs for twenty lengths"


def _export(strict: bool) -> Check:
    def check(function: Function, make: Make) -> None:
        import torch

        class Module(torch.nn.Module):
            def forward(self, *args: Any) -> Any:
                return function(*args)

        program = torch.export.export(Module(), tuple(make(N)), strict=strict)
        inputs = [x + 0.1 if x.is_floating_point() else x for x in make(N)]
        _close(program.module()(*inputs), function(*inputs))

    return check


def _make_fx(function: Function, make: Make) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [x + 0.1 if x.is_floating_point() else x for x in make(N)]
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda *x: function(*x), tracing_mode=mode)(*make(N))
        _close(graph(*inputs), function(*inputs))


def _vmap(function: Function, make: Make) -> None:
    import torch

    many = [[x * (1 + i / 4) if x.is_floating_point() else x for x in make(N)] for i in range(3)]
    stacked = [torch.stack(x) for x in zip(*many, strict=True)]
    _close(torch.func.vmap(function)(*stacked), torch.stack([function(*x) for x in many]))


def _per_sample(function: Function, make: Make) -> None:
    """The first array is mapped over, and the gradients of the others are taken for each."""
    import torch

    loss, (first, *others) = _loss(function, make)
    samples = torch.stack([first, first * 0.5, -first])
    slopes = torch.func.grad(loss, argnums=tuple(range(1, 1 + len(others))))
    actual = torch.func.vmap(slopes, in_dims=(0, *[None] * len(others)))(samples, *others)
    want = [_slopes(loss, [sample, *others])[1:] for sample in samples]
    for got, expected in zip(actual, zip(*want, strict=True), strict=True):
        _close(got, torch.stack(expected))


def _grad_of_vmap(function: Function, make: Make) -> None:
    import torch

    loss, inputs = _loss(function, make)
    many = [torch.stack([x, x * 0.5]) for x in inputs]
    result = torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum())(*many)
    _close(result, torch.stack([_slopes(loss, [x[i] for x in many])[0] for i in (0, 1)]))


def _grad(function: Function, make: Make) -> None:
    import torch

    loss, inputs = _loss(function, make)
    result = torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*inputs)
    _close(list(result), _slopes(loss, inputs))


def _jacobian(transform: str) -> Check:
    def check(function: Function, make: Make) -> None:
        import torch

        inputs = make(N)
        actual = getattr(torch.func, transform)(function)(*inputs)
        want = torch.autograd.functional.jacobian(lambda x: function(x, *inputs[1:]), inputs[0])
        _close(actual, want)

    return check


def _hessian(function: Function, make: Make) -> None:
    import torch

    loss, (first, *others) = _loss(function, make)
    result = torch.func.hessian(loss)(first, *others)
    _close(result, torch.autograd.functional.hessian(lambda x: loss(x, *others), first))


def _jvp(function: Function, make: Make) -> None:
    import torch

    loss, inputs = _loss(function, make)
    tangents = [x.nan_to_num().cos() for x in inputs]  # a mask may hold −∞
    value, along = torch.func.jvp(loss, tuple(inputs), tuple(tangents))
    _close(value, loss(*inputs))
    pairs = zip(_slopes(loss, inputs), tangents, strict=True)
    _close(along, sum((slope * tangent).sum() for slope, tangent in pairs))


def _forward_ad(function: Function, make: Make) -> None:
    from torch.autograd import forward_ad

    loss, inputs = _loss(function, make)
    tangents = [x.nan_to_num().cos() for x in inputs]  # a mask may hold −∞
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(inputs, tangents, strict=True)]
        value, along = forward_ad.unpack_dual(loss(*duals))
    _close(value, loss(*inputs))
    pairs = zip(_slopes(loss, inputs), tangents, strict=True)
    _close(along, sum((slope * tangent).sum() for slope, tangent in pairs))


def _checkpoint(function: Function, make: Make) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    loss, inputs = _loss(function, make)
    want = _slopes(loss, inputs)
    for reentrant in (True, False):
        leaves = [x.detach().requires_grad_() for x in inputs]
        checkpoint(loss, *leaves, use_reentrant=reentrant).backward()
        _close([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves], want)


def _checkpoint_twice(function: Function, make: Make) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    loss, inputs = _loss(function, make)

    def steep(through: Function) -> list[Any]:
        def size(*x: Any) -> Any:
            result = torch.autograd.grad(through(*x), x, create_graph=True, allow_unused=True)
            return sum(g.square().sum() for g in result if g is not None)

        return _slopes(size, inputs)

    _close(steep(lambda *x: checkpoint(loss, *x, use_reentrant=False)), steep(loss))


def _autocast(function: Function, make: Make) -> None:
    """Arguments in 16 bits, as layers before it would give them; sums in float32."""
    import torch

    wide = [x.float() if x.is_floating_point() else x for x in make(N)]
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in wide]
    with torch.autocast("cpu", torch.bfloat16):
        out = function(*inputs)
    assert out.dtype == torch.bfloat16
    _close(out, function(*inputs), atol=1e-6)


def _threads(function: Function, make: Make) -> None:
    """Calls of several lengths at once, with their gradients."""
    import torch

    def both(n: int) -> Any:
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in make(n)]
        out = getattr(function, "apart", lambda: function)()(*leaves)
        result = torch.autograd.grad(out.square().sum(), _floats(leaves), allow_unused=True)
        return [out.detach(), *(x for x in result if x is not None)]

    lengths = [N + i % 3 for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        for n, got in zip(lengths, pool.map(both, lengths), strict=True):
            _close(got, both(n))


TORCH: dict[str, Check] = {
    "compile": _compile(),
    "compile, dynamic": _compile(dynamic=True),
    "compile, gradients": _compile_gradients,
    "compile, new lengths": _compile_lengths,
    "export": _export(strict=False),
    "export, strict": _export(strict=True),
    "make_fx": _make_fx,
    "vmap": _vmap,
    "vmap of grad": _per_sample,
    "grad": _grad,
    "grad of vmap": _grad_of_vmap,
    "jacrev": _jacobian("jacrev"),
    "jacfwd": _jacobian("jacfwd"),
    "hessian": _hessian,
    "jvp": _jvp,
    "forward AD": _forward_ad,
    "checkpoint": _checkpoint,
    "checkpoint, second derivative": _checkpoint_twice,
    "autocast": _autocast,
    "threads": _threads,
}
