"""Is each score as fast as the fastest attention on a CUDA device in bf16, and is it right?

python -m bench.gpu [dot projected additive gated entmax lookup ceilings]

It runs from a plain checkout and needs only torch, NumPy and SciPy. With --small it also runs on
the CPU, to check all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import normalize
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench import _formulas as formulas
from bench._clocks import Cpu, Cuda
from bench._formulas import Formula, compiled, there_and_back
from bench._side_by_side import SMALL, Row, compare, input_sets, mute, save_results, size
from qkv import masks, scores

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CLOCK = Cuda() if CUDA else Cpu()
BUDGET = 2**30 if CUDA else 2**24
B, H, N = 4, size(16, 2), size(4096, 64)


def randn(*shape: int):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def exact(formula: Formula, back: bool = False):
    """Return the exact result for a set whose last array is the cotangent."""
    return lambda *x: formula.exact(*x[:-1], cotangent=x[-1] if back else None, budget=BUDGET)


def one_way(function):
    """Return the function without the cotangent at the end of each set."""
    return lambda *x: function(*x[:-1])


def pass_name(back: bool) -> str:
    return "forward + backward" if back else "forward"


def measure(work: str, sides, make, **rest) -> Row:
    """Measure a row. make: a function that returns a set of inputs, or the sets."""
    sets = make if isinstance(make, list) else input_sets(make, CLOCK)
    row = compare(work, sides, sets, clock=CLOCK, repeats=30, **rest)
    if CUDA:
        torch.cuda.empty_cache()
    return row


def cudnn(q, k, v, **rest):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, **rest)


def dot() -> Iterator[Row]:
    for d in (128, 64):
        for causal in (False, True):
            mask = masks.causal if causal else None
            formula = Formula(formulas.dot, causal=causal)
            sides = {
                "qkv": lambda *x, m=mask: qkv.attend(*x, mask=m),
                "SDPA cuDNN": lambda *x, c=causal: cudnn(*x, is_causal=c),
                "SDPA": lambda *x, c=causal: sdpa(*x, is_causal=c),
            }
            flops = 4 * B * H * N * N * d / (2 if causal else 1)
            for back, turn, factor in ((False, one_way, 1), (True, there_and_back, 3.5)):
                yield measure(
                    f"dot B{B} H{H} n{N} d{d}{' causal' * causal}, {pass_name(back)}",
                    {name: turn(side) for name, side in sides.items()},
                    lambda d=d: tuple(randn(4, B, H, N, d)),
                    exact=exact(formula, back),
                    goals={"SDPA cuDNN": 0.98, "SDPA": 0.99},
                    rate=(flops * factor, "TFLOP/s"),
                )


def projected() -> Iterator[Row]:
    """Measure scores that are a dot product of projected inputs; the peer gets projected ones."""
    d = 128
    bandwidth = (2 * d) ** 0.25  # so that the scores of normal inputs spread by about 1
    yield from after_projection(
        "multiplicative",
        scores.Multiplicative,
        formulas.multiplicative,
        lambda q, k, w: (q @ w, k),
        scale=1.0,
        parameters=lambda: (randn(d, d) / d,),
    )
    yield from after_projection(
        "cosine",
        lambda: scores.Cosine(0.1),
        formulas.cosine(0.1),
        lambda q, k: (normalize(q, dim=-1), normalize(k, dim=-1)),
        scale=10.0,
    )
    yield from after_projection(
        "gaussian", lambda: scores.Gaussian(bandwidth), formulas.gaussian(bandwidth)
    )


def after_projection(name, score, formula, project=None, scale=None, parameters=tuple):
    """Measure without the projection: the peer computes q·k, which is another result."""
    d = 128

    def make():
        q, k, v, g = randn(4, B, H, N, d)
        more = parameters()
        return (q, k, v, *more, g, *(project(q, k, *more) if project else (q, k)))

    def attend(q, k, v, *parameters):
        return qkv.attend(q, k, v, score=score(*parameters))

    def given(q, k, v, *rest):
        return rest[-2], rest[-1], v, rest[-3]

    for back, turn in ((False, one_way), (True, there_and_back)):
        ours, theirs = turn(attend), turn(lambda *x: cudnn(*x, scale=scale))
        truth = exact(Formula(formula), back)
        sides = {
            "qkv": lambda *x, f=ours: f(*x[:-2]),
            "SDPA cuDNN, projected": lambda *x, f=theirs: f(*given(*x)),
        }
        if back or not project:  # the peer's gradients are those of the projected inputs
            sides["SDPA cuDNN, projected"] = mute(sides["SDPA cuDNN, projected"])
        yield measure(
            f"{name} B{B} H{H} n{N} d{d}, {pass_name(back)}",
            sides,
            make,
            exact=lambda *x, f=truth: f(*x[:-2]),
            goals={"SDPA cuDNN, projected": 0.9},
            rate=(4 * B * H * N * N * d * (3.5 if back else 1), "TFLOP/s"),
        )


def additive() -> Iterator[Row]:
    batch, d, h = size(8, 2), 64, 64

    def attend(q, k, v, *parameters):
        return qkv.attend(q, k, v, score=scores.Additive(*parameters))

    for n in (size(2048, 32), size(4096, 64)):

        def make(n=n):
            weights = (randn(h, d) / d**0.5, randn(h, d) / d**0.5, randn(h))
            return (*randn(3, batch, n, d), *weights, randn(batch, n, d))

        eager = Formula(formulas.additive, wide=h)
        sides = {"qkv": attend, "torch.compile": compiled(eager), "eager": eager}
        for back, turn in ((False, one_way), (True, there_and_back)):
            yield measure(
                f"additive B{batch} n{n} h{h}, {pass_name(back)}",
                {name: turn(side) for name, side in sides.items()},
                make,
                exact=exact(eager, back),
                goals={"torch.compile": 8.0 if back else 10.0},
                most=400 if back else 200,
                no_worse_than="eager",
                rate=None if back else (batch * n * n * h, "Ttanh/s"),
            )


def gated() -> Iterator[Row]:
    d = 128

    def attend(q, k, v, *parameters):
        score = scores.Gated(*parameters, score=scores.ScaledDot())
        return qkv.attend(q, k, v, score=score)

    fused = compiled(flex_attention)

    def flex(q, k, v, w_query, w_key):
        a, b = q @ w_query, k @ w_key
        return fused(
            q, k, v, score_mod=lambda s, z, h, i, j: torch.sigmoid(a[z, h, i] + b[z, h, j]) * s
        )

    def make():
        weights = (randn(d) / d**0.5, randn(d) / d**0.5)
        return (*randn(3, B, H, N, d), *weights, randn(B, H, N, d))

    sides = {"qkv": attend, "FlexAttention": flex}
    for back, turn in ((False, one_way), (True, there_and_back)):
        yield measure(
            f"gated B{B} H{H} n{N} d{d}, {pass_name(back)}",
            {name: turn(side) for name, side in sides.items()},
            make,
            exact=exact(Formula(formulas.gated), back),
            goals={"FlexAttention": 1.6 if back else 1.3},
            rate=(4 * B * H * N * N * d * (3.5 if back else 1), "TFLOP/s"),
        )


def entmax() -> Iterator[Row]:
    d = 64

    def dense(weigh):
        return Formula(formulas.dot, lambda s: weigh(s.float()).to(s.dtype))

    sides = {
        "qkv": lambda q, k, v: qkv.attend(q, k, v, weighting="entmax15"),
        "dense, sorted": dense(formulas.entmax15),
        "dense, halved, compiled": compiled(dense(formulas.entmax15_by_halves)),
    }
    yield measure(
        f"entmax15 B{B} H{H} n{N} d{d}, forward",
        {name: one_way(side) for name, side in sides.items()},
        lambda: tuple(randn(4, B, H, N, d)),
        exact=exact(Formula(formulas.dot, formulas.entmax15)),
        goals={("dense, sorted", "dense, halved, compiled"): 5.0},
        most=256,  # O(n): the matrix alone would be 2,048
    )
    yield measure(
        f"entmax15 B{B} H{H} n{N} d{d}, forward + backward",
        {name: there_and_back(sides[name]) for name in ("qkv", "dense, sorted")},
        lambda: tuple(randn(4, B, H, N, d)),
        exact=exact(Formula(formulas.dot, formulas.entmax15), True),
    )


def lookup() -> Iterator[Row]:
    m, d = size(8_000_000, 4096), 128
    tables = input_sets(lambda: tuple(randn(2, m, d)), CLOCK)
    target = torch.empty_like(tables[0][0])
    copy = "a copy that moves the same bytes"

    def flash(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(q, k, v)

    for n in (1, 16, 64):
        sets = [tuple(x[None, None] for x in (randn(n, d), *table)) for table in tables]
        yield measure(
            f"look-up, {n} quer{'y' if n == 1 else 'ies'} in {m:,} × {d}",
            {
                "qkv": qkv.attend,
                copy: mute(lambda q, k, v: target.copy_(k[0, 0])),
                "SDPA flash": flash,
                "SDPA cuDNN": cudnn,
            },
            sets,
            exact=lambda q, k, v: Formula(formulas.dot).exact(q, k, v, budget=BUDGET),
            goals={copy: 0.9},
            rate=(2 * m * d * 2, "TB/s"),
        )


def ceilings() -> Iterator[Row]:
    n = size(8192, 64)
    yield measure(
        f"a product {n}³",
        {"torch": mute(lambda a, b: a @ b)},
        lambda: tuple(randn(2, n, n)),
        rate=(2 * n**3, "TFLOP/s"),
    )


ROWS = {f.__name__: f for f in (ceilings, dot, projected, additive, gated, entmax, lookup)}


def rows(names: list[str]) -> Iterator[Row]:
    for name in names or ROWS:
        torch.manual_seed(0)
        try:
            yield from ROWS[name]()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    if set(names) - set(ROWS):
        sys.exit(f"no rows {', '.join(set(names) - set(ROWS))}; there are {', '.join(ROWS)}")
    if not (CUDA or SMALL):
        sys.exit("bench.gpu needs a CUDA device, which torch does not find")
    save_results("gpu", rows(names), replace=not names)


if __name__ == "__main__":
    main()
