"""`python -m bench.floor` on tiny arrays: it covers every pair of options, and results agree."""

import itertools
import json

import numpy as np
import pytest

from bench import _results, floor
from bench._calls import MASKS, TEST_SIZES, USUAL, Call
from bench._database_calls import TEST_ROWS
from bench._floor_cuda import TABLE, bind_flex, list_table_cases
from bench._pairwise import cover_pairs, list_pairs, list_single_steps
from bench._plain import load_plain
from bench._turns import CallTimeoutError, limit_seconds, take_turns

pytestmark = pytest.mark.sample_of_module(14)

FACTORS = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r"), "d": ("u", "v")}


def differs(case):
    return not (case.get("a") == "1" and case.get("b") == "x")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(floor, "TURNS", 0.0)


def list_complaints(rows):
    names = ("wrong", "refused", "failed", "note", "not compared", "peers")
    return [(row["work"], name, row[name]) for row in rows for name in names if row.get(name)]


def run_sweep(framework, count, seed=0):
    result = floor.sweep(load_plain(framework), TEST_SIZES, seed, count)
    return [row for _, _, row in result]


def test_every_valid_pair_is_covered():
    cases = cover_pairs(FACTORS, differs, 0)
    covered = {pair for case in cases for pair in list_pairs(case, FACTORS)}
    expected = {
        (one, x, two, y)
        for one, two in itertools.combinations(FACTORS, 2)
        for x in FACTORS[one]
        for y in FACTORS[two]
        if (one, x, two, y) != ("a", "1", "b", "x")
    }
    assert covered == expected
    assert len(cases) < 15  # of the 36 cases of the product


def test_cases_depend_on_the_seed_alone():
    one, two, other = (cover_pairs(FACTORS, differs, seed) for seed in (1, 1, 2))
    assert one == two != other


def test_a_pair_that_fits_no_case_is_left_out():
    factors = {"a": ("1", "2"), "b": ("x",), "c": ("p",)}

    def is_valid(case):  # a = 1 goes with b and with c, but not with both
        return not (case.get("a") == "1" and {"b", "c"} <= case.keys())

    assert cover_pairs(factors, is_valid, 0) == [{"a": "2", "b": "x", "c": "p"}]


def test_single_steps_change_one_option():
    usual = {"a": "2", "b": "y"}
    cases = list_single_steps(FACTORS, differs, 0, usual, times=1)
    changed = [[name for name in usual if case[name] != usual[name]] for case in cases]
    assert sorted(changed) == [[], ["a"], ["a"], ["b"]]
    covered = cover_pairs(FACTORS, differs, 0, usual, cases)
    assert covered[: len(cases)] == cases


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_results_of_a_few_calls_agree(framework, quick):
    pytest.importorskip(framework)
    rows = run_sweep(framework, 12)
    assert not list_complaints(rows)
    assert all(row["ratio"] > 0 and row["engine"] for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("framework", floor.FRAMEWORKS)
def test_results_of_many_calls_agree(framework, quick):
    pytest.importorskip(framework)
    assert not list_complaints(run_sweep(framework, 120, seed=1))


def test_results_of_a_few_database_calls_agree(quick):
    rows = [row for _, _, row in floor.sweep_database(TEST_ROWS, 0, 12)]
    assert not list_complaints(rows)


@pytest.mark.full
def test_results_of_all_database_calls_agree(quick):
    rows = [row for _, _, row in floor.sweep_database(TEST_ROWS, 1)]
    assert not list_complaints(rows)


def make_case(**options):
    drawn = {"size": "batch", "dtype": "f32", "direction": "forward", "mode": "eager"}
    return {**USUAL, **drawn, **options}


def make_call(framework="numpy", **options):
    case = make_case(**options)
    return Call(case, TEST_SIZES[case["size"]], load_plain(framework))


def test_a_wrong_result_is_reported():
    call = make_call()
    right = call.formula(call.arrays)
    assert floor.check_results(call, right) is None
    assert "the output is off" in floor.check_results(call, right * 1.1)
    assert "the output is off" in floor.check_results(call, right[..., :1])
    call = make_call(weighting="topk(8)")  # another key here and there is a matter of rounding
    right = np.array(call.formula(call.arrays))
    right[0, 0, 0] *= 1.1
    assert floor.check_results(call, right) is None


def test_a_call_that_raises_is_a_row():
    o, size = load_plain("numpy"), TEST_SIZES["batch"]
    row = floor.measure_case(make_case(weighting="normalized"), size, o)
    assert "CombinationError" in row["refused"]
    assert "KeyError" in floor.measure_case(make_case(mask="?"), size, o)["failed"]


def test_report_and_file(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_results, "RESULTS", tmp_path)

    def interrupted():
        yield from itertools.islice(floor.sweep(load_plain("numpy"), TEST_SIZES, 0), 3)
        raise KeyboardInterrupt

    rows = floor.collect("numpy", interrupted(), 100.0)
    assert len(rows) == 3
    out = capsys.readouterr()
    assert "3 of" in out.out and "above 1.5:" in out.out
    assert "numpy 3/" in out.err
    (path,) = tmp_path.rglob("floor_numpy.json")
    head, *kept = json.loads(path.read_text())["rows"]
    assert head["summary"]["measured"] == 3 and len(kept) == 3
    assert kept[0]["ratio"] >= kept[1]["ratio"]


def test_slow_sides_run_once():
    now, runs = [0.0], {"quick": 0, "slow": 0}

    def make_side(name, seconds):
        def side():
            now[0] += seconds
            runs[name] += 1

        return side

    sides = {"quick": make_side("quick", 0.01), "slow": make_side("slow", 5.0)}
    result = take_turns(sides, lambda: None, 0.0, 1.0, clock=lambda: now[0])
    assert result == pytest.approx({"quick": 0.01, "slow": 5.0})
    assert runs["slow"] == 1 < runs["quick"]
    result = take_turns(sides, lambda: None, 0.0, 1.0, {"slow": 7.0}, False, lambda: now[0])
    assert result == pytest.approx({"quick": 0.01, "slow": 7.0}) and runs["slow"] == 1


def test_a_call_is_stopped():
    with pytest.raises(CallTimeoutError, match="it took longer"), limit_seconds(0.01):
        while True:
            pass
    with limit_seconds(100.0):
        pass


@pytest.mark.parametrize(
    "options",
    [
        *({"mask": mask} for mask in MASKS),
        *({"score": score} for score in ("relative", "alibi", "relative table", "dot", "function")),
        {"weighting": "softmax(0.7)", "mask": "causal & float (n, m)"},
        {"score": "alibi", "mask": "float (h, n, m)", "returns": "lse"},
    ],
    ids=lambda options: ", ".join(options.values()),
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same(options):
    torch = pytest.importorskip("torch")
    call = make_call("torch", **options)
    flex = bind_flex(call, compiles=False)
    torch.testing.assert_close(flex(call.arrays), call.formula(call.arrays), rtol=1e-3, atol=1e-4)


def test_calls_without_a_flex_attention():
    pytest.importorskip("torch")
    for options in ({"weighting": "hard"}, {"score": "gaussian"}, {"returns": "weights"}):
        assert bind_flex(make_call("torch", **options)) is None
    assert bind_flex(make_call("torch", score="relative", weighting="softmax(0.7)")) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_table_of_cuda_runs_on_a_cpu(quick, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(floor, "bind_flex", lambda call: bind_flex(call, compiles=False))
    cases = [(case, TEST_SIZES["batch"]) for case, _ in list_table_cases()]
    chosen = [x for x in cases if x[0]["score"] in ("scaled_dot", "alibi")][:4]
    rows = floor.run_table(load_plain("torch"), chosen, 100.0)
    assert len(cases) == 2 * len(TABLE) and len(rows) == 4
    assert all({"qkv", "plain SDPA", "formula"} <= row["sides"].keys() for row in rows)
    assert "× FlexAttention" in capsys.readouterr().out
    # A call that was slow once does not run both ways.
    monkeypatch.setattr(floor, "SLOW_CALL", 0.0)
    rows = floor.run_table(load_plain("torch"), chosen[:2], 100.0)
    assert "not run" in rows[1]["note"]


def test_long_calls_on_a_device_are_estimated(quick):
    pytest.importorskip("torch")
    call = make_call("torch")
    assert floor.estimate_seconds(call) == 0.0
    call.o.each = False
    call.size = call.size._replace(b=1, h=1, h_key=1, n=2048, m=2048)
    assert floor.estimate_seconds(call) > 0.0


def test_some_rows_of_the_table(monkeypatch):
    measured, written = [], []
    monkeypatch.setattr(floor, "load_plain", lambda *_: None)
    monkeypatch.setattr(floor, "run_table", lambda o, cases, seconds: measured.extend(cases) or [])
    monkeypatch.setattr(floor, "write", lambda *given, **how: written.append((given, how)))
    monkeypatch.setattr("sys.argv", ["floor", "--cuda", "--rows", "softmax · lengths", "entmax15"])
    floor.main()
    found = {floor.describe_formula(case) for case, _ in measured}
    assert "scaled_dot · softmax · lengths" in found
    assert all("entmax15" in x or x.endswith("softmax · lengths") for x in found)
    assert written == [(("floor_torch_cuda", []), {"replace": False})]
