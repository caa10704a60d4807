"""Compare random valid calls of the CUDA kernels with the equation in float64.

python -m bench.fuzz --cuda SECONDS SEED [LOG]

Scores, weightings, masks, dtypes, lengths, widths, grouped heads, strides and offsets are drawn,
and every array is surrounded by NaN. A call is reported in these cases:

- its output or a gradient is more than twice as far from float64 as eager code in the same dtype,
  and further than MIN_ERROR;
- it is not finite, or raises;
- the requested engine refuses it;
- more than LEAST pairs ran on `dense`.

One such call may be chance, also for eager code. So DRAWS more calls of the same shapes with other
numbers are judged together with it; the number of these repetitions is printed at the end.

A third of the calls run in another context (`bench._contexts`): a second call of a kind,
checkpointing, autocast, float32 parameters, two streams, a CUDA graph, wrong masks, a layer in
training. Two of five have dropout, with a seed, a generator or a fresh draw; the reference drops
the same weights.

Several processes run in parallel. LOG has every call before it runs and its result after. If a
process ends, its current call is reported.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import qkv
from bench._contexts import CONTEXTS, check_graph, check_layer, check_wrong_masks
from qkv import masks, scores, weightings
from qkv.engines import dense
from qkv.engines.call import Call
from qkv.errors import EngineError, QkvError

LEAST = 64 * 64
MIN_ERROR = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Errors that are not looked at, ‖got − want‖ / ‖want‖: some roundings of numbers that cancel."""
ALIKE = 20
"""Calls of one kind in a row, which differ in lengths and numbers. All but a twentieth of the time
is the compiler's: 13 s for the first of a kind, of the next eight still 1 to 5 s for lengths of
their own, and later ones a tenth (H200, 14 processes)."""
CHOOSY = (weightings.TopK, weightings.Hard)
"""Weightings that another rounding may have choose another key; of sparsemax the slope does so."""
WORKERS = max((os.cpu_count() or 1) - 2, 1)
"""Processes: nearly all of the time is that of the compiler, which has a core for each."""
DRAWS = 4
ALONE = " | alone "
"""Before what was wrong with one draw."""
SEEDS = ("number", "fresh", "generator")
CHECKS = ("graph", "wrong masks", "layer")
ROUNDS = 32
"""Gradients along so many outputs are taken together on a GPU: of one number, as a temperature's, a
single error says nothing of the usual one."""


def _gaussian(w: int, wide: Any = 1.0) -> scores.Gaussian:
    """Return a Gaussian whose bandwidth grows with the width: distances stay within float32."""
    return scores.Gaussian(wide * max(w / 64, 1.0) ** 0.5)


def _alibi(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs() / 8


def _relative_bias(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s + table[h, q - k]


def _bend(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where((q + k) % 3 == 0, 2 * torch.tanh(s / 2), s - 0.25 * h)


def _sparse_pattern(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return ((q + 2 * k + h) % 3 != b % 2) | (k < 2)


def _window(kind: Any, w: int, wide: Any = 1.0) -> Any:
    """Return a window that holds more than half of the keys."""
    return kind(wide * (2.2 * w) ** 0.5)


SCORES: dict[str, tuple[str, Callable[..., Any]]] = {
    "scaled_dot": ("", lambda w: "scaled_dot"),
    "dot": ("", lambda w: "dot"),
    "of a scale": ("+", lambda w, scale: scores.ScaledDot(scale * w**-0.5)),
    "capped": ("", lambda w: scores.ScaledDot(softcap=3.0)),
    "of a cap": ("+", lambda w, cap: scores.ScaledDot(softcap=cap)),
    "cosine": ("", lambda w: "cosine"),
    "warm cosine": ("+", lambda w, warm: scores.Cosine(warm)),
    "gaussian": ("", lambda w: _gaussian(w)),
    "wide gaussian": ("+", lambda w, wide: _gaussian(w, wide)),
    "learned": ("w", lambda w, matrix: scores.Multiplicative(matrix)),
    "gated": ("gg", lambda w, a, b: scores.Gated(a, b)),
    "gated cosine": ("gg", lambda w, a, b: scores.Gated(a, b, None, scores.Cosine())),
    "gated cap": ("gg", lambda w, a, b: scores.Gated(a, b, None, scores.ScaledDot(softcap=3.0))),
    "gated gaussian": ("gg", lambda w, a, b: scores.Gated(a, b, None, _gaussian(w))),
    "additive": ("hhv", lambda w, *own: scores.Additive(*own)),
    "alibi": ("s", lambda w, slopes: scores.Modified("scaled_dot", _alibi(slopes))),
    "relative bias": ("t", lambda w, table: scores.Modified("scaled_dot", _relative_bias(table))),
    "alibi of a bias": (
        "st", lambda w, slopes, table: scores.Modified(
            scores.Modified("cosine", _relative_bias(table)), _alibi(slopes)
        ),
    ),
    "bent gaussian": ("", lambda w: scores.Modified(_gaussian(w), _bend)),
    "bent gate": ("gg", lambda w, a, b: scores.Modified(scores.Gated(a, b), _bend)),
    "boxcar": ("", lambda w: _window(scores.Boxcar, w)),
    "triangular": ("", lambda w: _window(scores.Triangular, w)),
    "epanechnikov": ("", lambda w: _window(scores.Epanechnikov, w)),
    "wide triangular": ("+", lambda w, wide: _window(scores.Triangular, w, wide)),
    "wide epanechnikov": ("+", lambda w, wide: _window(scores.Epanechnikov, w, wide)),
    "laplace": ("", lambda w: scores.Laplace(float(w) ** 0.5)),
    "wide laplace": ("+", lambda w, wide: scores.Laplace(wide * w**0.5)),
    "relative": ("r", lambda w, table: scores.Relative(table)),
    "relative alibi": ("s", lambda w, slopes: scores.Relative(scores.Alibi(slopes / 8), "cosine")),
    "t5": ("r", lambda w, table: scores.Relative(scores.T5Bias(table[:, :14]), _gaussian(w))),
    "decay": ("s", lambda w, rate: scores.Decay(rate.abs() / 8, "scaled_dot")),
    "feature map": ("", lambda w: scores.FeatureMap()),
    "decaying features": ("s", lambda w, rate: scores.Decay(rate.abs() / 8, scores.FeatureMap())),
    "constant": ("", lambda w: "constant"),
    "exact": ("", lambda w: "exact"),
}  # fmt: skip
"""Scores by name: the kinds of their arrays, and what makes one for rows of w numbers of these."""
PER_HEAD = "str"
"""Kinds of arrays with one row or number for each head."""
WEIGHTINGS = (
    "softmax", "entmax15", "entmax", "sparsemax", "topk", "all of them", "hard", "straight",
    "average", "sigmoid", "raw", "normalized", "warm", "sink",
    "entmax sink",
)  # fmt: skip


class Drawn(NamedTuple):
    """A call: named arrays, a function that makes the other arguments, and a description."""

    arrays: dict[str, Tensor]
    how: Any
    description: str
    seed_kind: str = "number"
    context: str = "plain"


def amid_nan(x: Tensor, random: Random) -> Tensor:
    """Return the same numbers surrounded by NaN, with strided rows, and heads packed or not."""
    before, after = random.choice((0, 1, 8)), random.choice((0, 3, 8))
    turned = x.ndim == 4 and random.random() < 0.5
    x = x.transpose(1, 2) if turned else x
    memory = x.new_full((*x.shape[:-2], x.shape[-2] + 2, before + x.shape[-1] + after), torch.nan)
    memory[..., 1:-1, before : before + x.shape[-1]] = x
    inside = memory[..., 1:-1, before : before + x.shape[-1]]
    return inside.transpose(1, 2) if turned else inside


def draw(random: Random, size: Random, device: str, small: bool, turn: int = 0) -> Drawn:
    """Draw one call: its kind by `random`, its lengths by `size`, its numbers by `turn`. Some calls
    are invalid.
    """
    make = torch.Generator(device=device).manual_seed(size.randrange(2**31) + turn)
    dtype = random.choice((torch.float32,) if small else tuple(MIN_ERROR))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, device=device).to(dtype)

    few = random.choice((1, 2))
    b, h = random.choice((1, 2)), few * random.choice((1, 2))
    top = 40 if small else random.choice((70, 300, 700))
    n, m = size.choice((1, 3, size.randint(2, top), size.randint(2, top))), size.randint(1, top)
    widths = (1, 8, 16, 20) if small else (1, 16, 40, 64, 64, 128, 128, 200, 512)
    w, d = (random.choice(widths) for _ in "wd")
    arrays = {
        "query": normal(b, h, n, w),
        "key": normal(b, few, m, w),
        "value": normal(b, few, m, d),
    }
    score = random.choice(tuple(SCORES))
    few_numbers = random.choice(((), (h, 1, 1))) if h > 1 else ()
    shapes = {"w": (w, w), "g": (w,), "h": (8, w), "v": (8,), "+": few_numbers}
    shapes |= {"s": (h,), "t": (h, n + m), "r": (h, 15)}
    for i, kind in enumerate(SCORES[score][0]):
        x = normal(*shapes[kind])
        scaled = x if kind in PER_HEAD else x / w**0.5
        arrays[f"of the score {i}"] = x.abs() + 1 if kind == "+" else scaled
    weighting = random.choice(WEIGHTINGS)
    if weighting == "warm":
        each = random.choice(((), (h, 1, 1) if h > 1 else (), (n, 1)))
        arrays["temperature"] = normal(*each).abs() + 0.5
    if weighting in ("sink", "entmax sink"):
        arrays["sink"] = normal(*random.choice(((), (h,))))
    rule = random.choice(
        ("none", "none", "causal", "window", "lengths", "bool", "float", "blocks", "all",
         "documents", "custom", "pattern", "packed")
    )  # fmt: skip
    fixed: dict[str, Any] = {}
    own = random.choice(((n, m), (b, 1, 1, m), (h, n, m), (b, h, n, m), (n, 1)))
    if rule in ("float", "all"):
        arrays["mask"] = normal(*own)
    elif rule == "bool":
        fixed["mask"] = torch.rand(own, generator=make, device=device) > 0.3
    elif rule == "blocks":
        fixed["mask"] = masks.blocks((torch.rand(-(-n // 16), -(-m // 16)) > 0.3).numpy(), 16)
    if rule in ("lengths", "all"):
        fixed["mask"] = masks.lengths(torch.randint(m + 1, (b,), generator=make, device=device))
    elif rule == "documents":
        axes = random.choice(((), (b,)))
        ids, key_ids = (
            torch.randint(4, (*axes, length), generator=make, device=device).sort(-1).values
            for length in (n, m)
        )
        fixed["mask"] = masks.documents(ids, key_ids) & random.choice(
            (masks.causal, ~masks.strided(2))
        )
    elif rule == "packed":
        cu_q, cu_k = (sorted((0, size.randint(0, x), size.randint(0, x), x)) for x in (n, m))
        fixed["mask"] = masks.packed(cu_q, cu_k, causal=random.choice((False, True)))
    elif rule == "custom":
        fixed["mask"] = masks.custom(_sparse_pattern) & masks.window(200)
    elif rule == "pattern":
        fixed["mask"] = masks.dilated(9, 3) | masks.global_tokens(2) | masks.strided(5)
    elif rule in ("causal", "window"):
        fixed["mask"] = masks.causal("bottom_right") if rule == "causal" else masks.window(5)
    if random.random() < 0.4:
        fixed |= {"dropout_p": 0.3, "seed": random.randrange(1000)}
    if weighting in ("softmax", "warm", "topk", "sink") and random.random() < 0.2:
        fixed["return_lse"] = True

    def how(given: dict[str, Tensor]) -> dict[str, Any]:
        own = [x for name, x in given.items() if name.startswith("of the score")]
        kinds = {
            "topk": weightings.TopK(4),
            "all of them": weightings.TopK(1000),
            "straight": weightings.Hard(straight_through=True),
            "entmax": weightings.Entmax(1.2),
            "warm": weightings.Softmax(given.get("temperature", 1.0)),
            "sink": weightings.Softmax(sink=given.get("sink")),
            "entmax sink": weightings.Entmax(1.4, sink=given.get("sink", 0.3)),
        }
        taken = {"mask": given["mask"]} if "mask" in given else {}
        if rule == "all":
            taken["mask"] = masks.array(given["mask"]) & masks.window(20) & fixed["mask"]
        weighs = kinds.get(weighting, weighting)
        return {"score": SCORES[score][1](w, *own), "weighting": weighs} | fixed | taken

    whole = few == h == 1 and rule in ("none", "causal", "window", "blocks", "pattern")
    whole = whole and not set(PER_HEAD) & set(SCORES[score][0])
    lead = random.choice(("", "no heads", "no axes")) if whole else ""
    if lead:  # the arrays without their axes of 1
        cut = (slice(None), 0) if lead == "no heads" else (0, 0)
        arrays |= {name: arrays[name][cut] for name in ("query", "key", "value")}
    description = f"{score}, {weighting}, {rule}{own if rule in ('bool', 'float', 'all') else ''}"
    description += f", {[x for x in fixed if x != 'mask']} {dtype} "
    description += str([tuple(x.shape) for x in arrays.values()])
    return Drawn(
        {name: amid_nan(x, random) if x.ndim > 1 else x for name, x in arrays.items()},
        how,
        description,
    )


def seeded_options(drawn: Drawn, given: dict[str, Tensor], engine: Any) -> dict[str, Any]:
    """Return the call's options with its seed; the reference gets the number that will be used.

    A fresh seed comes from the generator of the query's device, a generator's from itself.
    """
    options: dict[str, Any] = drawn.how(given)
    if "seed" not in options or drawn.seed_kind == "number":
        return options
    seed, device = options["seed"], given["query"].device
    generator = None
    if drawn.seed_kind == "generator":
        generator, device = torch.Generator().manual_seed(seed), torch.device("cpu")
    else:
        torch.manual_seed(seed)
    if engine == "dense":
        draw = torch.randint(2**31 - 1, (), generator=generator, device=device)
        return options | {"seed": int(draw)}
    return options | {"seed": generator}


def results(drawn: Drawn, dtype: torch.dtype | None, engine: Any) -> dict[str, Tensor]:
    """Return the output and every gradient, of arrays cast to this dtype or unchanged."""
    given = {
        name: (x if dtype is None else x.to(dtype)).detach().requires_grad_()
        for name, x in drawn.arrays.items()
    }

    def attend(given: dict[str, Tensor]) -> Any:
        options = seeded_options(drawn, given, engine)
        return qkv.attend(given["query"], given["key"], given["value"], **options, engine=engine)

    context = CONTEXTS[drawn.context if dtype is None and engine != "dense" else "plain"]
    outs: Any = context(attend, given)
    outs = dict(zip(("out", "lse"), outs if isinstance(outs, tuple) else (outs,), strict=False))
    learned = {name: x for name, x in outs.items() if x.requires_grad}  # no lse of equal scores
    make = torch.Generator(device=outs["out"].device).manual_seed(3)
    found: list[tuple[Tensor | None, ...]] = []
    for _ in range(ROUNDS if outs["out"].is_cuda else 1):
        along = [
            torch.randn(x.shape, generator=make, device=x.device)
            .to(drawn.arrays["query"].dtype)
            .to(x.dtype)
            .where(x.isfinite(), 0.0)  # of a row that sees nothing the logarithm is −∞
            for x in learned.values()
        ]
        found.append(
            torch.autograd.grad(
                tuple(learned.values()), tuple(given.values()), along, retain_graph=True,
                allow_unused=True,
            )
        )  # fmt: skip
    return {name: x.detach().masked_fill(x == -torch.inf, 0.0) for name, x in outs.items()} | {
        name: torch.stack([torch.zeros_like(x) if g is None else g for g in grads])
        for (name, x), grads in zip(given.items(), zip(*found, strict=True), strict=True)
    }


def eagerly(drawn: Drawn) -> dict[str, Tensor]:
    """Return the results of the equation with scores and weights in the arrays' dtype, like eager
    code.

    Weights are computed in float32, like torch's softmax. `dense` would upcast everything first.
    """
    kind = type(weightings.resolve(drawn.how(drawn.arrays)["weighting"]))
    wide, dtype = kind.weights, drawn.arrays["query"].dtype

    def weights(self: Any, scores: Any, *rest: Any) -> Any:
        if not isinstance(scores, Tensor):  # a plan that is tried out
            return wide(self, scores, *rest)
        return wide(self, scores.to(dtype).float(), *rest).to(dtype)

    with (
        patch.object(Call, "upcast", lambda call: call),
        patch.object(kind, "weights", weights),
        patch.object(dense, "build_direct_runner", lambda call: None),  # it upcasts by itself
    ):
        return results(drawn, None, "dense")


def errors(drawn: Drawn, engine: Any = None) -> dict[str, tuple[float, ...]]:
    """Return ‖got − want‖ / ‖want‖ of the output and each gradient, for engine and eager code."""
    got, want = results(drawn, None, engine), results(drawn, torch.float64, "dense")
    eager = eagerly(drawn)
    found: dict[str, tuple[float, ...]] = {}
    for name, x in want.items():
        size = max(float(x.norm()), 0.1 * x.numel() ** 0.5)  # what is 0 but for rounding
        off, usual = (float((y[name].double() - x).norm()) / size for y in (got, eager))
        found[name] = off, usual
    return found


def complaint(
    again: Callable[[int], Drawn],
    engine: Any = None,
    note_first: Callable[[str], object] = lambda line: None,
) -> str | None:
    """Return what is wrong with a call, or None.

    `again` draws further calls of the kind. `note_first` gets the complaint about the first one.
    """
    drawn = again(0)
    found = errors(drawn, engine)
    first = _worst(drawn, found)
    if first is None:
        return None
    note_first(first)
    more = [found, *[errors(again(turn), engine) for turn in range(1, DRAWS + 1)]]
    return _worst(
        drawn,
        {
            name: tuple(
                (sum(x[name][side] ** 2 for x in more) / len(more)) ** 0.5 for side in (0, 1)
            )
            for name in found
        },
    )


def _note_first(note: Callable[[str], object], line: str, first: str) -> None:
    note(line + ALONE + first)


def _worst(drawn: Drawn, found: dict[str, tuple[float, ...]]) -> str | None:
    weighting = weightings.resolve(drawn.how(drawn.arrays)["weighting"])
    for name, (off, usual) in found.items():
        choosy = isinstance(weighting, CHOOSY if name == "out" else (*CHOOSY, weightings.Sparsemax))
        least_error = MIN_ERROR[drawn.arrays["query"].dtype] * (50 if choosy else 1)
        if not off <= max(2 * usual, least_error):
            return f"{name} is off by {off:.1e}, eager by {usual:.1e}"
    return None


def run(
    random: Random,
    device: str,
    small: bool,
    engine: Any = None,
    note: Callable[[str], object] = lambda line: None,
) -> Iterator[tuple[str, str | None]]:
    """Yield the engine and the complaint of endless calls. `note` gets each call first."""
    kind, count = random.random(), 0
    while True:
        count += 1
        if small or count % ALIKE == 0:
            kind = random.random()
        lengths = random.random()

        def again(turn: int, kind: float = kind, lengths: float = lengths) -> Drawn:
            return put_in_context(draw(Random(kind), Random(lengths), device, small, turn), lengths)

        size = Random(lengths)
        check = size.choice(CHECKS) if size.random() < 0.1 else None
        if check == "layer":
            layer_dtype = size.choice((torch.float32,) if small else tuple(MIN_ERROR))
            about = f"call {count} on layers: {lengths} {layer_dtype}"
            note(about)
            try:
                about, wrong = check_layer(size, device, layer_dtype)
            except Exception as error:
                wrong = f"raised {type(error).__name__}: {str(error)[:200]}"
                note(traceback.format_exc())
            yield "layer", None if wrong is None else f"{wrong} | {about}"
            continue
        drawn = again(0)
        query, key, value = (drawn.arrays[name] for name in ("query", "key", "value"))
        try:
            explanation = qkv.explain(query, key, value, **drawn.how(drawn.arrays), engine=engine)
        except EngineError as error:
            yield "none", f"{error} | {drawn.description}"
            continue
        except QkvError:
            continue  # two things that mean nothing together
        if explanation.engine == "native" and drawn.seed_kind == "fresh":
            continue  # torch's own kernel draws its own mask
        about = check or f"{drawn.context}, seed {drawn.seed_kind}"
        line = f"call {count} on {explanation.engine}: {drawn.description} | {about}"
        note(line)
        try:
            if check is None:
                wrong = complaint(again, engine, partial(_note_first, note, line))
            else:
                wrong = run_check(check, drawn, again(1), engine)
        except Exception as error:  # the compiler's too: the next call is of interest all the same
            wrong = f"raised {type(error).__name__}: {str(error)[:200]}"
            note(traceback.format_exc())
        if (
            wrong is None
            and explanation.engine == "dense"
            and query.shape[-2] * key.shape[-2] > LEAST
        ):
            wrong = "ran on dense: " + dict(explanation.refusals).get("triton", "")
        yield (
            explanation.engine,
            None if wrong is None else f"{wrong} | {drawn.description} | {about}",
        )


def put_in_context(drawn: Drawn, number: float) -> Drawn:
    """Return the call with a context and a kind of seed, drawn by this number."""
    random = Random(f"context {number}")
    context = random.choice(tuple(CONTEXTS)) if random.random() < 0.4 else "plain"
    kinds = SEEDS if context in ("plain", "autocast") else ("number", "fresh")
    if context in ("two streams", "second call"):  # each calls twice, and would draw twice
        kinds = ("number",)
    return drawn._replace(context=context, seed_kind=random.choice(kinds))


def run_check(check: str, drawn: Drawn, other: Drawn, engine: Any) -> str | None:
    def attend(given: dict[str, Tensor], **options: Any) -> Any:
        arrays = (given[name] for name in ("query", "key", "value"))
        return qkv.attend(*arrays, **(drawn.how(given) | options), engine=engine)

    if check == "wrong masks":
        return check_wrong_masks(lambda given, mask: attend(given, mask=mask), drawn.arrays)
    looks_at_numbers = (
        drawn.arrays["query"].dtype == torch.float32 or "additive" in drawn.description
    )
    if looks_at_numbers and any(x in drawn.description for x in ("gaussian", "additive")):
        return None  # whether float32 has a form for it is seen from the numbers
    return check_graph(attend, drawn.arrays, other.arrays)


def work(seed: str, pipe: Connection) -> None:
    """Run one process, without end. It sends a line before each call, and the pair (engine,
    complaint) after it.
    """
    for found in run(Random(seed), "cuda", False, note=pipe.send):
        pipe.send(found)


def heard(seconds: float, seed: int) -> Iterator[tuple[str, tuple[str, str | None] | None]]:
    """Yield each call of all processes twice: before with None, and after with its result. Calls
    that still run when time is up are not awaited, because one may compile for as long again.
    """
    start, ends = get_context("spawn"), time.monotonic() + seconds
    workers: dict[Any, Any] = {}
    for each in range(WORKERS):
        ours, theirs = start.Pipe(duplex=False)
        workers[ours] = start.Process(target=work, args=(f"{seed} {each}", theirs))
        workers[ours].start()
        theirs.close()
    at = dict.fromkeys(workers, "before the first call")
    while workers and time.monotonic() < ends:
        ready: list[Any] = wait(list(workers), ends - time.monotonic())
        for pipe in ready:
            try:
                found = pipe.recv()
            except EOFError:
                process = workers.pop(pipe)
                process.join()
                if process.exitcode:
                    yield at[pipe], ("none", f"ended with {process.exitcode} | {at[pipe]}")
                continue
            if isinstance(found, str):
                at[pipe] = found
                yield found, None
            else:
                yield at[pipe], found
    for process in workers.values():
        process.kill()


def main(seconds: float, seed: int, log: str | None = None) -> None:
    started, engines, wrongs, repeated_count = time.monotonic(), Counter[str](), 0, 0
    with nullcontext() if log is None else Path(log).open("w", buffering=1) as file:

        def note(line: str) -> None:
            if file is not None:
                print(f"{time.monotonic() - started:6.1f} s {line}", file=file)

        for call, found in heard(seconds, seed):
            if found is None:
                note(call)
                continue
            engine, wrong = found
            engines[engine] += 1
            repeated_count += ALONE in call
            note(f"{wrong or 'right'}: {call}")
            if wrong is not None:
                wrongs += 1
                print(f"on {engine}: {wrong}", flush=True)
        summary = f"{sum(engines.values())} calls, {wrongs} complaints, {dict(engines)}"
        summary += f", {repeated_count} judged by {DRAWS + 1} draws"
        note(summary)
    print(summary)
    sys.exit(bool(wrongs))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] != "--cuda":
        sys.exit(__doc__)
    main(float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
