"""The equation in JavaScript against the one in Python, on the same cases."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import attention, scores, weightings
from qkv.database import encoders
from qkv.database.table.encoding import add_word_columns, encode_as_stored
from qkv.errors import QkvError
from qkv.frameworks.stored_rows import RowChunk, StoredRows
from qkv.page.html_file import read_module
from qkv.partial_attention import get_entropy

CLOSE = {"rtol": 1e-6, "atol": 1e-6}

RNG = np.random.default_rng(14)
W_QUERY, W_KEY, V, BIAS = (RNG.normal(size=shape) for shape in ((4, 3), (4, 3), (4,), (4,)))

SCORES: list[dict[str, Any]] = [
    {"name": "dot"},
    {"name": "scaled_dot"},
    {"name": "scaled_dot", "scale": 0.3, "softcap": 2.0},
    {"name": "cosine", "temperature": 0.5},
    {"name": "multiplicative", "w": W_QUERY[:3]},
    {"name": "additive", "w_query": W_QUERY, "w_key": W_KEY, "v": V, "bias": BIAS},
    {"name": "additive", "w_query": W_QUERY[:3], "w_key": None, "v": V[:3]},
    {"name": "gated", "w_query": W_QUERY[0], "w_key": W_KEY[0], "bias": -0.4},
    {"name": "gated", "w_query": W_QUERY[0], "w_key": W_KEY[0], "score": "cosine"},
    {"name": "gaussian", "bandwidth": 0.7},
    {"name": "gaussian", "bandwidth": np.array([0.5, 1.0, 2.0])},
    {"name": "laplace", "bandwidth": 1.3},
    {"name": "boxcar", "width": 1.5},
    {"name": "triangular", "width": 1.5},
    {"name": "epanechnikov", "width": 1.5},
    {"name": "constant"},
    {"name": "exact"},
]
WEIGHTINGS: list[dict[str, Any]] = [
    {"name": "softmax"},
    {"name": "softmax", "temperature": 0.3},
    {"name": "topk", "k": 1},
    {"name": "topk", "k": 3},
    {"name": "hard"},
    {"name": "average"},
    *({"name": "normalized", "on_empty": x} for x in ("zero", "nan", "uniform", "nearest")),
    {"name": "raw"},
    {"name": "sigmoid"},
    {"name": "sparsemax"},
    *({"name": "entmax15", "alpha": x} for x in (0.5, 1.0, 1.01, 1.3, 1.5, 2.0, 3.0)),
]


def build_record(names: Any, spec: dict[str, Any]) -> Any:
    settings = {
        name: np.array(x) if isinstance(x, list) else x
        for name, x in spec.items()
        if name != "name"
    }
    return names[spec["name"]](**settings)


def plain(x: Any) -> Any:
    """What JSON has: arrays as lists, and what is no number by its name."""
    if isinstance(x, np.ndarray):
        return plain(x.tolist())
    if isinstance(x, float) and not math.isfinite(x):
        return {"$": {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(x)]}
    if isinstance(x, dict):
        return {name: plain(item) for name, item in x.items()}
    if isinstance(x, date | time):
        return x.isoformat()
    return [plain(item) for item in x] if isinstance(x, list | tuple) else x


def revived(x: dict[str, Any]) -> Any:
    return float(x["$"]) if x.keys() == {"$"} else x


LOAD = """
async (source) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  globalThis.equation = (await import(url)).equation;
  globalThis.read = (text) => JSON.parse(text, (_, x) => (x?.$ ? Number(x.$) : x));
  globalThis.written = (given) =>
    JSON.stringify(given, (_, x) => {
      if (ArrayBuffer.isView(x)) return Array.from(x);
      return typeof x === "number" && !Number.isFinite(x) ? { $: String(x) } : x;
    });
}
"""


@pytest.fixture
def run(page: Any) -> Any:
    """run(body, cases): a function body of `equation` and `given`, in Chromium; JSON both ways."""
    page.goto("about:blank")
    page.evaluate(LOAD, read_module())

    def run(body: str, inputs: Any) -> Any:
        code = f"(text) => written(((given) => {{ {body} }})(read(text)))"
        return json.loads(page.evaluate(code, json.dumps(plain(inputs))), object_hook=revived)

    return run


ATTEND = """
return given.map(({ query, keys, values, how }) => {
  try {
    return equation.attend(query, keys, values, how);
  } catch (error) {
    return { error: error.message };
  }
});
"""


def draw(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, ...]:
    query, key = rng.normal(size=(1, 3)), rng.normal(size=(rows, 3))
    key[rows // 2 :: 5] = query  # some keys are the query itself, and tie
    return query, key, rng.normal(size=(rows, 2))


def test_sigmoids_keep_the_digits_of_what_is_small(run: Any) -> None:
    key = np.array([[-700.0], [-40.0], [-17.0], [0.0], [3.0], [800.0]])
    options = {"score": {"name": "dot"}, "weighting": {"name": "sigmoid"}}
    actual = run(ATTEND, [{"query": [1.0], "keys": key, "values": key, "how": options}])[0]
    expected = qkv.weights(np.ones((1, 1)), key, score="dot", weighting="sigmoid")[0]
    np.testing.assert_allclose(actual["weights"], expected, rtol=1e-14)
    np.testing.assert_allclose(expected[:2], np.exp([-700.0, -40.0]), rtol=1e-14)


def test_every_score_and_weighting(run: Any) -> None:
    rng = np.random.default_rng(0)
    cases, correct = [], []
    for score in SCORES:
        for weighting in WEIGHTINGS:
            for rows in (7, 90):
                query, key, value = draw(rng, rows)
                if rows == 7:
                    key += 9.0  # nothing within a window
                options = {"score": score, "weighting": weighting}
                cases.append({"query": query[0], "keys": key, "values": value, "how": options})
                correct.append(expected_answer(query, key, value, options))
    for case, actual, wanted in zip(cases, run(ATTEND, cases), correct, strict=True):
        label = str(case["how"])
        if wanted is None:
            assert "error" in actual, label
            continue
        for name, x in wanted.items():
            if name in ("entropy", "effective") and np.abs(wanted["weights"]).sum() < 1e-9:
                continue  # shares of what has no digits
            if x is None:
                assert actual[name] is None, label
            else:
                np.testing.assert_allclose(actual[name], x, err_msg=f"{label}: {name}", **CLOSE)


def expected_answer(query: Any, key: Any, value: Any, options: Any) -> dict[str, Any] | None:
    """What Python gives; None where it refuses."""
    score = build_record(scores.NAMES, options["score"])
    weighting = build_record(weightings.NAMES, options["weighting"])
    if weighting.incompatible_reason(score, biased=False):
        return None
    rows = StoredRows(lambda: [RowChunk(key, value)], key.shape, 2)
    seen = attention.weigh_rows(rows, query, score=score, weighting=weighting)
    out, alpha = qkv.attend(
        query, key, value, score=score, weighting=weighting, engine="dense", return_weights=True
    )
    has_weight = bool((np.abs(alpha[0]) > 0).any())
    entropy = get_entropy(seen)[0]
    return {
        "scores": weighting.adapt_score(score)(query, key)[0],
        "weights": alpha[0],
        "value": out[0],
        "entropy": entropy,
        "effective": math.exp(entropy) if has_weight else 0.0,
        "lse": None if seen.lse is None else seen.lse[0],
    }


ROWS: list[tuple[list[float], list[bool] | None]] = [
    ([], None),
    ([2.0], None),
    ([1e30, -1e30, 1e30], None),
    ([-1e30, -1e30], None),
    ([1e30, 1e30 - 1e15, 0.0], None),
    ([3.0, 3.0, 1.0, 3.0], None),
    ([0.0, 0.0, 0.0], None),
    ([0.1, math.nan, 0.7], None),
    ([-math.inf, 0.5, 0.25], None),
    ([-math.inf, -math.inf], None),
    ([0.3, 0.9, 0.5, 2.0], [True, False, True, False]),
    ([math.nan, 0.9, 0.5], [False, True, True]),
    ([0.3, 0.9], [False, False]),
    ([800.0, 799.0, -800.0], None),
]


def test_rows_on_the_edge(run: Any) -> None:
    body = """
    return given.map(({ spec, rows }) => {
      const weighting = equation.resolveWeighting(spec);
      return rows.map(([s, live]) => [weighting.weights(s, live), weighting.lse(s, live)]);
    });
    """
    cases = []
    for spec in WEIGHTINGS:
        positive = spec["name"] == "normalized"
        rows = [(np.abs(s).tolist() if positive else s, live) for s, live in ROWS]
        cases.append({"spec": spec, "rows": rows})
    for case, actual in zip(cases, run(body, cases), strict=True):
        weighting = build_record(weightings.NAMES, case["spec"])
        for (s, live), (alpha, lse) in zip(case["rows"], actual, strict=True):
            label = f"{weighting} {s} {live}"
            x, at = np.array([s]), np.arange(len(s))[None]
            mask = None if live is None else np.array([live])
            expected = weighting(x, mask)[0]
            if isinstance(weighting, weightings.Entmax) and np.isnan(expected).any():
                # Which of a row's weights are NaN is the solver's own affair.
                assert np.isnan(alpha).any() == np.isnan(s).any(), label
                continue
            np.testing.assert_allclose(alpha, expected, err_msg=label, **CLOSE)
            if not weighting.has_lse:
                assert lse is None
                continue
            with np.errstate(invalid="ignore"):
                correct = weighting.compute_lse(weighting.scale_scores(x), mask, at)[0, 0]
            np.testing.assert_allclose(lse, correct, err_msg=label, **CLOSE)


def test_pairs_on_the_edge(run: Any) -> None:
    ends = [0.0, -0.0, 1e30, -1e30, 1e-30, math.nan, 1.0]
    query = np.array([[a, b, 0.5] for a in ends for b in ends])
    key = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.5], [1e30, 2.0, 0.5], [math.nan, 1.0, 2.0]])
    body = """
    return given.scores.map((spec) => {
      const score = equation.resolveScore(spec);
      return given.query.map((q) => given.key.map((k) => score.compute(q, k)));
    });
    """
    all_found = run(body, {"scores": SCORES, "query": query, "key": key})
    for spec, actual in zip(SCORES, all_found, strict=True):
        with np.errstate(all="ignore"):
            expected = build_record(scores.NAMES, spec)(query, key)
        np.testing.assert_allclose(actual, expected, err_msg=str(spec), **CLOSE)


def test_every_name_is_registered_in_python(run: Any) -> None:
    body = "return [Object.keys(equation.SCORES), Object.keys(equation.WEIGHTINGS)];"
    page_scores, others = run(body, None)
    assert set(page_scores) <= set(scores.NAMES)
    assert set(others) <= set(weightings.NAMES)


BAD: list[tuple[str, Any]] = [
    ("score", {"name": "gaussian", "bandwidth": 0}),
    ("score", {"name": "boxcar", "width": -1}),
    ("weighting", {"name": "topk", "k": 1.5}),
    ("weighting", {"name": "softmax", "temperature": math.inf}),
    ("weighting", {"name": "entmax15", "alpha": -1}),
    ("weighting", {"name": "normalized", "on_empty": "none"}),
]


def test_bad_settings_are_refused(run: Any) -> None:
    body = """
    const resolve = { score: equation.resolveScore, weighting: equation.resolveWeighting };
    return given.map(([kind, spec]) => {
      try { resolve[kind](spec); return null } catch (error) { return error.message }
    });
    """
    for (what, spec), message in zip(BAD, run(body, BAD), strict=True):
        assert message, spec
        assert spec["name"] in message
        with pytest.raises(QkvError):
            build_record(getattr(qkv, f"{what}s").NAMES, spec)


def test_unknown_names_are_refused(run: Any) -> None:
    body = "try { equation[given]('none') } catch (error) { return error.message }"
    assert "gaussian" in run(body, "resolveScore")
    assert "softmax" in run(body, "resolveWeighting")


def test_an_empty_window_may_be_an_error(run: Any) -> None:
    body = """
    try { equation.resolveWeighting({ name: "normalized", on_empty: "raise" }).weights([0, 0]) }
    catch (e) { return e.message }
    """
    assert "window" in run(body, None)


TEXTS = [
    "The Alchemist", "the alchmist", "Les Misérables", "Gulliver’s Travels", "C++ & C#", "",
    "   ", "naïve café—déjà vu", "ΣΊΣΥΦΟΣ σίσυφος", "Straße STRASSE", "ıİ", "日本語", "ﬁne ½",
    "a\x1eb", "Zhang", "Li", "Lee", "war and peace and war", "🎉 emoji 🎉", "don't stop", "x" * 300,
]  # fmt: skip


NOON, EAST = datetime(2024, 6, 1, 12, tzinfo=UTC), timezone(timedelta(hours=5, minutes=30))

ENCODED: list[tuple[str, list[Any], list[Any]]] = [
    ("characters", TEXTS, TEXTS),
    ("lexical", TEXTS, [*TEXTS, "the war of unknown words", "peace peace"]),
    ("exact", [*TEXTS, 1, 1.5, -3, 1e-5, 1e22, 123456.789, 5e-324], ["Li", 1.0, 0.1]),
    ("numbers", [2.0, 3.5, 3.5, 100.0, -7.25], [3.0, 1e6]),
    ("numbers", [4.0, 4.0], [4.5]),
    ("numbers", [(1.0, 1e-3), (2.0, 5e-3), (4.0, 1e-3)], [(2.0, 2e-3)]),
    ("numbers", [1e-40, 3e-40], [2e-40]),
    (
        "numbers",
        [date(1814, 8, 13), date(2024, 2, 29)],
        [date(1969, 12, 31), datetime(2000, 1, 1, 6)],
    ),
    (
        "numbers",
        [datetime(2024, 3, 1, 12, 30, 15, 250000), datetime(2024, 3, 2)],
        [date(2024, 3, 1)],
    ),
    ("numbers", [NOON, NOON.astimezone(EAST) + timedelta(hours=1)], [NOON]),
    ("numbers", [time(6), time(18, 30)], [time(0, 0, 1)]),
    ("arrays", np.eye(3).tolist(), [[0.25, 0.1, -3.0]]),
]


def test_encoders(run: Any) -> None:
    body = """
    return given.map(([name, keys, queries]) => {
      const encoder = equation.encoders.fit(name, keys);
      const score = encoder.defaultScore(keys.length);
      return [encoder.encode(keys), encoder.encodeQueries(queries), score];
    });
    """
    for (name, keys, queries), (vectors, asked, score) in zip(
        ENCODED, run(body, ENCODED), strict=True
    ):
        encoder = encoders.resolve(name).fit(keys)
        query, key = add_word_columns(
            encoder, queries, encode_as_stored(encoder, keys), encoder.encode_sparse(keys)
        )
        np.testing.assert_allclose(vectors, key, err_msg=name, **CLOSE)
        np.testing.assert_allclose(asked, query, err_msg=name, **CLOSE)
        ours, own = build_record(scores.NAMES, score), encoder.default_score(len(keys))
        assert type(ours) is type(own)
        for field in ("scale", "bandwidth"):
            if getattr(own, field, None) is not None:
                np.testing.assert_allclose(getattr(ours, field), getattr(own, field), rtol=1e-6)


def test_encoders_that_do_not_run_here_say_so(run: Any) -> None:
    body = "return given.map((name) => equation.encoders.isAvailable(name));"
    assert run(body, ["characters", "text", "words", "sentences"]) == [True, False, False, False]


NAMES = {"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu", "Smola": "Alex", "Hu": "Rachel"}
SALARIES = {3.1: 62.0, 3.4: 71.5, 3.5: 70.0, 3.6: 78.0, 4.0: 95.0, 2.9: None}
EXACT, BOX = {"name": "exact"}, {"name": "boxcar", "width": 0.2}
MAJORS = {"Ann": "maths", "Anna": "art", "Anne": "maths", "Bob": None, "Rob": "art"}


ASKED: list[tuple[dict[Any, Any], Any, str, dict[str, Any]]] = [
    (NAMES, "Lee", "characters", {}),
    (NAMES, "Lee", "characters", {"weighting": {"name": "softmax", "temperature": 2.5}}),
    (NAMES, "Li", "exact", {}),
    (NAMES, "Li", "characters", {"score": EXACT, "weighting": {"name": "normalized"}}),
    (NAMES, "Lo", "characters", {"score": EXACT, "weighting": {"name": "normalized"}}),
    (NAMES, "Hu", "lexical", {"weighting": {"name": "sparsemax"}}),
    (MAJORS, "Ane", "characters", {"weighting": {"name": "entmax15"}}),
    (SALARIES, 3.56, "numbers", {}),
    (SALARIES, 3.57, "numbers", {"score": {"name": "gaussian", "bandwidth": 0.15}}),
    (SALARIES, 3.55, "numbers", {"weighting": {"name": "hard"}}),
    (SALARIES, 3.55, "numbers", {"weighting": {"name": "raw"}}),
    (SALARIES, 5.0, "numbers", {"score": BOX, "weighting": {"name": "normalized"}}),
    (
        SALARIES,
        5.0,
        "numbers",
        {"score": BOX, "weighting": {"name": "normalized", "on_empty": "nearest"}},
    ),
]


def test_a_database_answers_alike(run: Any) -> None:
    body = """
    return given.map(([rows, query, how]) => equation.ask(rows, query, how));
    """
    cases = [
        (
            [{"key": key, "value": value} for key, value in rows.items()],
            query,
            options | {"encoder": e},
        )
        for rows, query, e, options in ASKED
    ]
    for (rows, query, encoder, options), result in zip(ASKED, run(body, cases), strict=True):
        made = {
            name: build_record(getattr(qkv, f"{name}s").NAMES, x) for name, x in options.items()
        }
        answer = qkv.Database(rows, encoder=encoder).ask(query, **made)
        label = f"{query} {encoder} {options}"
        if isinstance(answer.value, float):
            np.testing.assert_allclose(result["shown"], answer.value, err_msg=label, **CLOSE)
            np.testing.assert_allclose(result["mean"], answer.mean, err_msg=label, **CLOSE)
            np.testing.assert_allclose(result["spread"], answer.spread, err_msg=label, **CLOSE)
        else:
            assert result["shown"] == answer.value, label
        np.testing.assert_allclose(result["weights"], answer.weights, err_msg=label, **CLOSE)
        np.testing.assert_allclose(result["entropy"], answer.entropy, err_msg=label, **CLOSE)
        np.testing.assert_allclose(
            result["effective"], answer.effective_rows, err_msg=label, **CLOSE
        )
        assert (result["total"], result["missing"]) == (answer.total, answer.missing)
        assert [row["key"] for row in result["rows"]] == [row.key for row in answer.rows], label
        assert [share["value"] for share in result["values"]] == [s.value for s in answer.values]
