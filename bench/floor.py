"""Which legal call is slower than the plain formula? A sweep over all options, taken in pairs.

python -m bench.floor [--cuda] [--seconds N] [--seed N] [--compile] [numpy torch jax tensorflow]
python -m bench.floor --cuda --rows TEXT [TEXT ...]
python -m bench.floor --database [--seconds N] [--seed N]

Every pair of options of `attend` occurs in some call: scores, weightings, masks, results, dropout,
sizes, dtypes, directions. Each call runs in turns with the formula that a user would write in the
same framework, and with PyTorch's SDPA where it computes the same. Times are the smallest of
several. With --cuda, FlexAttention and the compiled formula follow in the time that is left;
--compile does this on the CPU. With --rows, only those rows of the table of CUDA calls are measured
whose "score · weighting · mask" contains one of the texts. The other rows of the file stay.

On a busy machine, pass --cpu-time and set OMP_NUM_THREADS=1: a thread that waits for another one
counts as CPU time too.

The ratio is qkv's time over that of the fastest other side: above 1, qkv is slower. The slowest
calls are printed, and written to results/floor_<framework>.json with a summary. Outputs and
gradients are compared too. The backward pass gives the gradients of all arrays of the call, also of
ALiBi's slopes, which `bench.published` keeps fixed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import qkv
from bench._calls import CPU_SIZES, CUDA_SIZES, FACTORS, Call, Size, draw_cases
from bench._database_calls import ROWS, StoredCall, iterate_calls
from bench._floor_cuda import bind_compiled, bind_flex, bind_plain_sdpa, list_table_cases
from bench._pairwise import Case
from bench._plain import Arrays, Plain, load_plain
from bench._results import milliseconds, write
from bench._turns import CallTimeoutError, limit_seconds, take_turns
from qkv.errors import QkvError

Row = dict[str, Any]
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
PRINTED, WRITTEN = 30, 100
COMPLAINTS = ("stopped", "wrong", "refused", "failed", "note")
SHARES = (1.0, 1.2, 1.5, 2.0, 4.0)
SLOW_CALL = 1.0
"""Seconds of a call that is not repeated."""
TURNS = 0.3
"""Seconds of the turns of one row."""
SWEPT = 0.6
"""The share of the time before the sides that need a compiler, where these run."""
SHORTER = 8
"""How many times shorter the call is by which a long one is estimated."""
CLOCK = [time.perf_counter]
"""The clock of the turns: `time.process_time` on a busy machine."""
LIMIT = {"cpu": 30.0, "cuda": 12.0}
"""Seconds that a first call may take."""
FORMULA_BYTES = 2e9
"""The plain formula does not run on a CPU if it needs more bytes than that."""
CLOSE = {"f32": 2e-3, "f64": 1e-5, "bf16": 5e-2}
"""‖got − want‖ / ‖want‖ of an output; a gradient may be off by four times that."""
ROWS_OFF, EDGE_OFF = 0.02, 0.2
"""The share of rows, or the error, that may be off where rounding decides which key is chosen."""


def bind_side(call: Call, function: Callable[[Arrays], Any]) -> Callable[[], Any]:
    """Return a function without arguments that runs the call's direction of `function`."""
    o, case = call.o, call.case
    if case["direction"] == "both":
        return o.both(function, call.arrays, call.leaves, call.cotangent, case["mode"])
    return o.forward(function, call.arrays, case["mode"])


def bind_attend(call: Call, row: Row) -> Callable[[Arrays], Any]:
    """Return `attend` of the call; its first run writes the engine into the row."""

    def attend(arrays: Arrays) -> Any:
        given, how = [arrays[x] for x in ("query", "key", "value")], call.options(arrays)
        if "engine" not in row:
            found = qkv.explain(*given, **how)
            row["engine"], row["detail"] = found.engine, found.detail
        return qkv.attend(*given, **how)

    return attend


def measure(
    call: Call,
    seconds: float = TURNS,
    limit: float = LIMIT["cpu"],
    peers: Mapping[str, Callable[[Arrays], Any]] | None = None,
) -> Row:
    """Run qkv and the other sides of a call in turns; return the row."""
    o = call.o
    row: Row = {"work": call.describe(), **call.case}
    clock, sides = CLOCK[0], {"qkv": bind_side(call, bind_attend(call, row))}
    begin, got, first = clock(), None, {}
    try:
        with limit_seconds(limit, clock):
            for _ in range(o.first_calls):
                got = sides["qkv"]()
            o.settle()
    except CallTimeoutError:
        row["stopped"] = f"after {clock() - begin:.0f} s"
    row["first"] = clock() - begin
    if "stopped" in row or (not o.each and row["first"] > limit / 2):
        first["qkv"] = row["first"]  # with its compilation, but a second one would take as long
    for name, function in (list_peers(call) if peers is None else peers).items():
        try:
            side = bind_side(call, function)
            with limit_seconds(limit, CLOCK[0]):
                side()
                o.settle()
            sides[name] = side
        except Exception as error:
            row.setdefault("peers", {})[name] = describe_error(error)
    if got is not None and peers is None:
        try:
            row["wrong"] = check_results(call, got)
        except Exception as error:
            row["not compared"] = describe_error(error)
    del got
    return add_ratio(row, take_turns(sides, o.settle, seconds, SLOW_CALL, first, o.each, clock))


def add_ratio(row: Row, times: Mapping[str, float]) -> Row:
    row["ms"] = 1e3 * times["qkv"]
    row["sides"] = {name: 1e3 * x for name, x in times.items()}
    peers = {name: x for name, x in times.items() if name != "qkv"}
    if "stopped" not in row and peers:
        best = min(peers, key=lambda name: peers[name])
        row["peer"], row["peer ms"] = best, 1e3 * peers[best]
        row["ratio"] = times["qkv"] / peers[best]
    return row


def list_peers(call: Call) -> dict[str, Callable[[Arrays], Any]]:
    """Return the other sides that need no compiler."""
    peers: dict[str, Callable[[Arrays], Any]] = {}
    size, o = call.size, call.o
    pairs = size.b * size.h * size.n * size.m
    wide = call.score.numbers_per_pair(o, size.d) * (2 if call.case["direction"] == "both" else 1)
    if not o.each or 4 * pairs * wide < FORMULA_BYTES:
        peers["formula"] = call.formula
    if o.name == "torch" and applies_sdpa(call):
        peers["SDPA"] = lambda arrays: run_sdpa(call, arrays)
    return peers


def applies_sdpa(call: Call) -> bool:
    plain = call.score.scale is not None and call.weighting.temperature is not None
    return plain and call.case["returns"] == "output"


def run_sdpa(call: Call, arrays: Arrays) -> Any:
    import torch

    assert call.score.scale is not None and call.weighting.temperature is not None
    mask, allowed = arrays.get("allowed"), arrays.get("allowed")
    causal = call.case["mask"] == "causal"
    if call.mask.bias:
        mask = arrays[f"mask.{call.mask.bias}"]
        mask = mask if allowed is None else mask.masked_fill(~allowed, -torch.inf)
        mask = mask / call.weighting.temperature
    return torch.nn.functional.scaled_dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        None if causal else mask,
        call.p,
        causal,
        scale=call.score.scale(call.size.d) / call.weighting.temperature,
        enable_gqa=call.size.h_key != call.size.h,
    )


def check_results(call: Call, got: Any) -> str | None:
    """Return what is wrong with the output or the gradients, or None."""
    o, case = call.o, call.case
    if (
        "formula" not in list_peers(call)
        or call.p
        or (call.score.has_ties and case["weighting"].startswith("topk"))
    ):
        return None  # each side drops its own weights, or chooses its own of equal scores
    arrays = {name: o.widen(x) for name, x in call.arrays.items()}
    both = case["direction"] == "both"
    names: list[str]
    if both:
        along = o.widen(call.cotangent)
        want = o.both(call.formula, arrays, call.leaves, along, "eager")()
        names = [f"the gradient of {x}" for x in call.leaves]
    else:
        want = o.forward(call.formula, arrays, "eager")()
        names = ["the output", f"the {case['returns']}"]
    if not isinstance(want, list | tuple):
        got, want = [got], [want]
    limit = CLOSE[case["dtype"]] * (4 if both else 1)
    edge = call.score.has_edge or call.weighting.has_edge
    for name, x, y in zip(names, got, want, strict=False):
        error, rows = o.compare_arrays(x, y)
        if edge and (rows <= ROWS_OFF or error <= EDGE_OFF):
            continue
        if not error <= limit:
            return f"{name} is off by {error:.2g}, {100 * rows:.3g} % of the rows"
    return None


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def sweep(
    o: Plain, sizes: Mapping[str, Size], seed: int, most: int | None = None
) -> Iterator[tuple[int, int, Row]]:
    """Yield the number of each call, the number of all, and its row."""
    cases = draw_cases(o, sizes, seed)[:most]
    for i, case in enumerate(cases):
        yield i, len(cases), measure_case(case, sizes[case["size"]], o)


def measure_case(case: Case, size: Size, o: Plain) -> Row:
    """Return the row of a call, also if it fails."""
    row: Row = {**case, "work": " · ".join(case.values())}
    limit = LIMIT["cpu" if o.each else "cuda"]
    try:
        call = Call(case, size, o)
        row["work"] = call.describe()
        if (estimate := estimate_seconds(call)) > limit:
            return row | {"note": f"not run: about {estimate:.0f} s, from a smaller call"}
        return measure(call, limit=limit)
    except QkvError as error:
        return row | {"refused": describe_error(error)}
    except Exception as error:
        return row | {"failed": describe_error(error)}


def estimate_seconds(call: Call) -> float:
    """Return the seconds of a long call on a device, from one of an eighth of its length; else 0.

    An operation on a device cannot be stopped.
    """
    size, o = call.size, call.o
    if o.each or size.n * size.m < 2**22:
        return 0.0
    less = size._replace(n=max(size.n // SHORTER, 1), m=max(size.m // SHORTER, 1))
    small = Call(call.case, less, o)
    side = bind_side(small, bind_attend(small, {}))
    side()
    seconds = take_turns({"qkv": side}, o.settle, 0.0, 0.0, each=False)["qkv"]
    return seconds * (size.n // less.n) * (size.m // less.m)


def sweep_database(
    rows: Mapping[str, tuple[int, int]], seed: int, most: int | None = None
) -> Iterator[tuple[int, int, Row]]:
    """Yield the number of each call of a database, the number of all, and its row."""
    for i, planned, make, case in iterate_calls(seed, dict(rows), most):
        yield i, planned, measure_stored(make, case)


def measure_stored(make: Callable[[], StoredCall], case: Case) -> Row:
    row: Row = {**case, "work": " · ".join(case.values())}
    try:
        call = make()
        row |= {"work": call.describe(), "engine": "database"}
        begin = time.perf_counter()
        got = call.run()
        row["first"] = time.perf_counter() - begin
        row["wrong"] = call.check_results(got)
        sides = {"qkv": call.run, "formula": call.formula}
        return add_ratio(row, take_turns(sides, lambda: None, TURNS, SLOW_CALL, clock=CLOCK[0]))
    except QkvError as error:
        return row | {"refused": describe_error(error)}
    except Exception as error:
        return row | {"failed": describe_error(error)}


def summarize(rows: list[Row], planned: int, seconds: float) -> Row:
    """Return the shares of calls above each ratio."""
    ratios = sorted((row["ratio"] for row in rows if "ratio" in row), reverse=True)
    shares = {f"above {x:g}": sum(y > x for y in ratios) / max(len(ratios), 1) for x in SHARES}
    return {
        "planned": planned,
        "measured": len(rows),
        "with a ratio": len(ratios),
        "shares": shares,
        "worst": ratios[0] if ratios else None,
        "median": ratios[len(ratios) // 2] if ratios else None,
        "wrong": sum(bool(row.get("wrong")) for row in rows),
        "stopped": sum("stopped" in row for row in rows),
        "refused": sum("refused" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "slowest first call": max((row.get("first", 0.0) for row in rows), default=0.0),
        "seconds": seconds,
    }


def print_report(name: str, rows: list[Row], summary: Row) -> None:
    ranked = rank_rows(rows)
    print(f"--- {name}: {summary['measured']} of {summary['planned']} calls, ", end="")
    print(f"{summary['with a ratio']} with another side, {summary['seconds']:.0f} s")
    for row in ranked[:PRINTED]:
        told = f"{milliseconds(row['ms'])} beside {milliseconds(row['peer ms'])} {row['peer']}"
        print(f"{row['ratio']:8.2f}×  {row.get('engine', ''):<9} {row['work']}  ({told})")
    print("  ".join(f"{name}: {100 * x:.1f} %" for name, x in summary["shares"].items()))
    for kind in COMPLAINTS:
        for row in rows:
            if row.get(kind):
                print(f"{kind}: {row['work']}: {row[kind]}")
    late = sorted((row for row in rows if row.get("first", 0) > 5), key=lambda row: -row["first"])
    for row in late[:10]:
        print(f"first call of {row['first']:.1f} s: {row['work']}")
    sys.stdout.flush()


def rank_rows(rows: Iterable[Row]) -> list[Row]:
    return sorted((row for row in rows if "ratio" in row), key=lambda row: -row["ratio"])


def collect(
    name: str,
    found: Iterator[tuple[int, int, Row]],
    seconds: float,
    refine: Callable[[list[Row], float], None] | None = None,
    refine_seconds: float = 0.0,
    table: Sequence[Row] = (),
) -> list[Row]:
    """Take rows until the time is over or Ctrl-C, refine them, print and write them."""
    rows: list[Row] = []
    begin, planned = time.perf_counter(), 0
    try:
        for i, planned, row in found:
            rows.append(row)
            spent = time.perf_counter() - begin
            show_progress(name, i + 1, planned, spent, seconds, row)
            if spent > seconds:
                break
        if refine is not None and refine_seconds:
            refine(rows, refine_seconds)
    except KeyboardInterrupt:
        pass
    finally:
        print(file=sys.stderr)
        summary = summarize(rows, planned, time.perf_counter() - begin)
        print_report(name, rows, summary)
        write_results(name, rows, summary, table)
    return rows


def show_progress(
    name: str, done: int, planned: int, spent: float, seconds: float, row: Row
) -> None:
    ratio = f"{row['ratio']:.2f}×" if "ratio" in row else ""
    told = f"{name} {done}/{planned}, {spent:.0f}/{seconds:.0f} s  {ratio:>8}"
    told += f"  {row.get('engine', ''):<9}  {row['work']}"
    if sys.stderr.isatty():
        print(f"\r{told[:150]:<150}", end="", file=sys.stderr, flush=True)
    else:
        print(told, file=sys.stderr, flush=True)


def compare_compiled(found: list[Row], o: Plain, sizes: Mapping[str, Size], seconds: float) -> None:
    """Add FlexAttention and the compiled formula to the rows, those near 1 first."""
    begin = time.perf_counter()
    known = [row for row in found if row.get("ratio", 9.0) <= 1.2]
    known.sort(key=lambda row: -row["ratio"])
    for i, row in enumerate(known):
        spent = time.perf_counter() - begin
        if spent > seconds:
            break
        call = Call({name: row[name] for name in FACTORS}, sizes[row["size"]], o)
        peers: dict[str, Callable[[Arrays], Any]] = {}
        try:
            if not o.each and (flex := bind_flex(call)) is not None:
                peers["FlexAttention"] = flex
        except Exception as error:
            row.setdefault("peers", {})["FlexAttention"] = describe_error(error)
        if not call.p:
            peers["compiled formula"] = bind_compiled(call)
        other = measure(call, limit=60.0, peers=peers)
        if other.get("ratio", 0.0) > row["ratio"]:
            row |= {x: other[x] for x in ("ratio", "ms", "peer", "peer ms", "sides")}
        show_progress("compiled", i + 1, len(known), spent, seconds, row)


def write_results(name: str, rows: list[Row], summary: Row, table: Sequence[Row]) -> None:
    keys = ("work", "ratio", "ms", "peer", "peer ms", "engine", "wrong")
    kept = [
        {key: _round(row[key]) for key in keys if row.get(key) is not None}
        for row in rank_rows(rows)[:WRITTEN]
    ]
    told = [
        {key: row[key] for key in ("work", *COMPLAINTS) if row.get(key)}
        for row in rows
        if any(row.get(key) for key in COMPLAINTS)
    ]
    most, worst = (1.2 if name.endswith("cuda") else 1.5), summary["worst"]
    head = {
        "work": f"sweep of {name}, {summary['measured']} calls",
        "sides": {"qkv": {}},
        "goals": [
            {
                "goal": f"every call ≤ {most}× the fastest other side",
                "found": worst,
                "met": None if worst is None else worst <= most,
            }
        ],
        "summary": summary,
        "clock": "CPU time, on a busy machine" if CLOCK[0] is time.process_time else "time",
        "complaints": told[:WRITTEN],
    }
    if threads := os.environ.get("OMP_NUM_THREADS"):
        head["OMP_NUM_THREADS"] = threads
    write(f"floor_{name}", [head, *describe_table(table), *kept], replace=True)


def describe_formula(case: Case) -> str:
    return " · ".join(case[name] for name in ("score", "weighting", "mask"))


def describe_table(table: Sequence[Row]) -> list[Row]:
    """Return the rows of the table as they are written."""
    return [
        {
            "work": row["work"],
            "sides": {x: {"ms": _round(ms)} for x, ms in row.get("sides", {}).items()},
            "goals": [],
        }
        | {key: row[key] for key in ("engine", "note", "failed") if key in row}
        for row in table
    ]


def _round(x: Any) -> Any:
    return float(f"{x:.4g}") if isinstance(x, float) else x


def run_table(o: Plain, cases: Iterable[tuple[Case, Size]], seconds: float) -> list[Row]:
    """Measure the calls; then FlexAttention in the time that is left. Print the table."""
    begin = time.perf_counter()
    rows: list[Row] = []
    for case, size in cases:
        if time.perf_counter() - begin > seconds:
            break
        before = rows[-1] if rows and case["direction"] == "both" else {}
        if before.get("ms", 0.0) > 1e3 * SLOW_CALL:
            work = Call(case, size, o).describe()
            rows.append({**case, "work": work, "note": "not run: the output alone is slow"})
            continue
        try:
            call = Call(case, size, o)
            peers = list_peers(call) | {"plain SDPA": bind_plain_sdpa(call)}
            row = measure(call, limit=LIMIT["cuda"], peers=peers)
            rows.append(row | {"case": case, "lengths": size})
        except Exception as error:
            rows.append({**case, "work": str(case), "failed": describe_error(error)})
        show_progress("table", len(rows), 0, time.perf_counter() - begin, seconds, rows[-1])
    for row in rows:
        if time.perf_counter() - begin > seconds or "case" not in row:
            continue
        try:
            call = Call(row["case"], row["lengths"], o)
            if (flex := bind_flex(call)) is not None:
                found = measure(call, limit=60.0, peers={"FlexAttention": flex})
                row["sides"] |= found["sides"]
                row["ms"] = found["ms"]
        except Exception as error:
            row.setdefault("peers", {})["FlexAttention"] = describe_error(error)
    print_table(rows)
    return rows


def print_table(rows: list[Row]) -> None:
    names = ("plain SDPA", "SDPA", "FlexAttention", "formula")
    print(f"{'call':<70}{'engine':<10}{'qkv':>10}" + "".join(f"{'× ' + x:>17}" for x in names))
    for row in rows:
        sides, ms = row.get("sides", {}), row.get("ms")
        cells = [f"{ms / sides[x]:17.2f}" if x in sides else " " * 17 for x in names]
        told = milliseconds(ms) if ms else row.get("failed", "")
        print(f"{row['work']:<70}{row.get('engine', ''):<10}{told:>10}{''.join(cells)}", end="  ")
        print(row.get("note", ""), *(f"{k}: {v[:60]}" for k, v in row.get("peers", {}).items()))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("framework", nargs="*", help=", ".join(FRAMEWORKS))
    parser.add_argument("--cuda", action="store_true", help="PyTorch on a CUDA device")
    parser.add_argument("--database", action="store_true", help="Database.ask and attend")
    parser.add_argument("--compile", action="store_true", help="torch.compile on the CPU too")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each framework")
    parser.add_argument("--table", type=float, default=200.0, help="seconds of the table on CUDA")
    parser.add_argument(
        "--rows", nargs="+", default=(), help="only these rows of the table on CUDA"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of calls")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds instead of time, for a busy machine"
    )
    given = parser.parse_args()
    if unknown := set(given.framework) - set(FRAMEWORKS):
        parser.error(f"no framework {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    if given.cuda and set(given.framework) - {"torch"}:
        parser.error("--cuda measures torch")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if given.cpu_time:
        CLOCK[0] = time.process_time
    if given.database:
        collect("database", sweep_database(ROWS, given.seed), given.seconds)
        return
    device = "cuda" if given.cuda else "cpu"
    sizes = CUDA_SIZES if given.cuda else CPU_SIZES
    table: list[Row] = []
    if given.cuda:
        o = load_plain("torch", "cuda")
        cases: Iterable[tuple[Case, Size]] = list_table_cases()
        if given.rows:
            cases = [x for x in cases if any(y in describe_formula(x[0]) for y in given.rows)]
        table = run_table(o, cases, given.table)
        if given.rows:
            write("floor_torch_cuda", describe_table(table), replace=False)
            return
    for framework in given.framework or (("torch",) if given.cuda else FRAMEWORKS):
        compiles = framework == "torch" and (given.cuda or given.compile)
        o = load_plain(framework, device)
        collect(
            f"{framework}_cuda" if given.cuda else framework,
            sweep(o, sizes, given.seed),
            given.seconds * (SWEPT if compiles else 1),
            lambda rows, seconds, o=o: compare_compiled(rows, o, sizes, seconds),
            given.seconds * (1 - SWEPT) if compiles else 0.0,
            table,
        )


if __name__ == "__main__":
    main()
