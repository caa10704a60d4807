"""Mistakes of the first five minutes; each error names the next step."""

from __future__ import annotations

import datetime
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import qkv
from qkv import scores, weightings
from qkv.errors import QkvError

X = np.ones((2, 3))
NAMES = qkv.Database({"Li": "Mu", "Zhang": "Aston"}, encoder="characters")
GRADES = qkv.Database([(3.1, 70.0), (3.9, 95.0)])
DAYS = qkv.Database({datetime.date(2024, 1, 31): 1.0})
POINTS = qkv.Database(np.eye(3), ["a", "b", "c"])


def attend(query: Any = X, key: Any = X, value: Any = X, **options: Any) -> Any:
    return qkv.attend(query, key, value, **options)


def books(**options: Any) -> Any:
    return qkv.Database.from_source("books.csv", encoder="characters", **options)


# Each: what he tries, and what the one line must say.

SLIPS: list[tuple[str, Callable[[], Any], str]] = [
    # Strings without an encoder.
    ("words", lambda: attend(["a whale"]), "query .* Database(keys, values).ask(query)"),
    ("a word", lambda: attend("a whale"), "query must be an array .* Database(keys, values)"),
    (
        "an array of words",
        lambda: attend(key=np.array([["a"] * 3] * 2)),
        "key .* encode text",
    ),
    (
        "a frame's objects",
        lambda: attend(np.array([["a"] * 3], object)),
        "query .* encode text",
    ),
    # Wrong shapes and types.
    ("a vector", lambda: attend([1.0, 2.0, 3.0]), "query .* query[None, :] for one row"),
    ("ragged rows", lambda: attend([[1, 2], [3]]), "query .* differ in length.*masks.lengths"),
    ("widths", lambda: attend(np.ones((2, 4))), "query has 4 columns and key 3"),
    ("fewer values", lambda: attend(key=np.ones((5, 3))), "key has 5 and value 2"),
    ("nothing", lambda: attend(key=None), "key must be an array"),
    ("truths", lambda: attend(X > 0), "query is an array of bool.*query.astype('float32')"),
    ("two precisions", lambda: attend(key=X.astype("f4")), "key is float32: .* key.astype("),
    ("a mask's shape", lambda: attend(mask=np.ones((3, 3), bool)), "(3, 3) .* (2, 2): .* each key"),
    ("a mask of ints", lambda: attend(mask=np.ones((2, 2), int)), "mask .* booleans"),
    ("lengths as a mask", lambda: attend(mask=np.array([1, 2])), "int64 .* masks.lengths(mask)"),
    ("a flag as a mask", lambda: attend(mask=True), "not bool: .* masks.causal"),
    # Masks joined by words: Python would take the last one and drop the other.
    ("and", lambda: qkv.masks.causal and qkv.masks.window(2), "use & for and"),
    ("or", lambda: qkv.masks.causal or qkv.masks.window(2), "| for or"),
    ("not", lambda: not qkv.masks.causal, "~ for not"),
    # Typos.
    ("a score", lambda: attend(score="gausian"), "did you mean 'gaussian'"),
    ("a weighting", lambda: attend(weighting="softmx"), "did you mean 'softmax'"),
    ("a mask", lambda: attend(mask="casual"), "did you mean 'causal'"),
    # The words of papers and books, and none that only sound alike.
    *(
        (f"score {word}", lambda word=word: attend(score=word), f"did you mean {ours!r}")
        for word, ours in {
            "bahdanau": "additive",
            "concat": "additive",
            "luong": "multiplicative",
            "bilinear": "multiplicative",
            "rbf": "gaussian",
            "Euclidean": "gaussian",
            "manhattan": "laplace",
            "uniform": "boxcar",
            "dot product": "dot",
            "scaled dot-product": "scaled_dot",
        }.items()
    ),
    *(
        (f"weighting {word}", lambda word=word: attend(weighting=word), f"did you mean {ours!r}")
        for word, ours in {
            "argmax": "hard",
            "max": "hard",
            "mean": "average",
            "uniform": "average",
            "identity": "raw",
            "entmax": "entmax15",
            "top-k": "topk",
        }.items()
    ),
    ("no word of ours", lambda: attend(score="kernel"), "unknown score 'kernel'. Known: additive"),
    ("an engine", lambda: attend(engine="streming"), "did you mean 'streaming'"),
    ("an encoder", lambda: qkv.Database({"a": 1}, encoder="wrods"), "did you mean 'words'"),
    ("a function", lambda: qkv.atend, "did you mean 'attend'"),
    (
        "a class, not an object",
        lambda: attend(score=qkv.scores.Gaussian),
        "pass an instance, Gaussian(…)",
    ),
    ("a learned score", lambda: attend(score="additive"), "scores.Additive(w_query, w_key, v)"),
    (
        "matrices the other way round",
        lambda: qkv.scores.Additive(np.ones((3, 8)), np.ones((3, 8)), np.ones(8)),
        "hidden widths .* w_query has 3, w_key has 3, v has 8",
    ),
    (
        "a layer for its matrix",
        lambda: qkv.scores.Multiplicative(type("Linear", (), {"weight": X})()),
        "w must be an array (d_q, d_k), not Linear: pass its .weight",
    ),
    ("a layer of another module", lambda: qkv.MultiHeadAttention, "qkv.nn.MultiHeadAttention"),
    ("a layer as torch spells it", lambda: qkv.MultiheadAttention, "qkv.nn.MultiHeadAttention"),
    ("a function of another module", lambda: qkv.heatmaps, "qkv.plot.heatmaps"),
    ("a width below 0", lambda: qkv.scores.Gaussian(-1), "bandwidth must be above 0"),
    (
        "widths of other columns",
        lambda: attend(score=qkv.scores.Gaussian(np.ones(4))),
        "bandwidth has shape (4,); .* each of the 3 columns",
    ),
    (
        "no widths",
        lambda: attend(score=qkv.scores.Gaussian(np.ones((2, 0)))),
        "bandwidth has shape (2, 0)",
    ),
    *(
        (f"{name} for other columns", lambda score=score: attend(score=score), f"{name} has shape")
        for name, score in {
            "Laplace: bandwidth": qkv.scores.Laplace(np.ones(2)),
            "Boxcar: width": qkv.scores.Boxcar(np.ones((2, 1))),
            "Cosine: temperature": qkv.scores.Cosine(np.ones(2)),
            "ScaledDot: scale": qkv.scores.ScaledDot(np.ones(2)),
            "ScaledDot: softcap": qkv.scores.ScaledDot(softcap=np.ones((2, 0))),
        }.items()
    ),
    (
        "widths of other heads",
        lambda: attend(*[np.ones((5, 2, 3))] * 3, score=qkv.scores.Gaussian(np.ones((7, 1, 1)))),
        "bandwidth has shape (7, 1, 1); .* (5, 1, 1)",
    ),
    ("an align", lambda: qkv.masks.window(1, align=X), "align must be 'top_left' or"),
    (
        "a flag",
        lambda: qkv.scaled_dot_product_attention(X, X, X, enable_gqa=X),
        "enable_gqa must be True or False",
    ),
    # Pictures and pages.
    ("a page nowhere", lambda: NAMES.ask("Li").to_html(True), "path .* file, not a bool"),
    ("a page's folder", lambda: NAMES.to_html("no/where.html"), "no folder no; create it first"),
    ("a page's title", lambda: qkv.page.to_html(NAMES, title=5), "title must be text, not a int"),
    ("a picture nowhere", lambda: NAMES.ask("Li").plot(True), "path .* file, not a bool"),
    ("a picture's folder", lambda: NAMES.plot("Li", "no/a.png"), "no folder no; create it first"),
    ("a picture's ending", lambda: NAMES.plot("Li", "a.doc"), "a.doc: the name must end in .*.png"),
    ("a threshold", lambda: qkv.plot.alignment(X, least="x"), "least must be a number, not 'x'"),
    ("no kernels", lambda: qkv.plot.kernels([]), "scores is empty"),
    ("how far", lambda: qkv.plot.kernels(reach="x"), "reach must be a number above 0, not 'x'"),
    ("points of text", lambda: qkv.plot.regression("x", [1.0]), "key must be a vector of numbers"),
    ("a truth", lambda: qkv.plot.regression([1.0], [1.0], truth=3), "truth must be a function"),
    ("no names", lambda: qkv.plot.bars(None, [1.0]), "bars needs a list of names"),
    ("bars of rows", lambda: qkv.plot.bars(["a", "b"], X), "bars needs a list of names"),
    ("a tick", lambda: qkv.plot.heatmaps(X, xticks=3), "xticks is a int; expected a list of 3"),
    ("colours", lambda: qkv.plot.heatmaps(X, cmap=3), "cmap: "),
    (
        "a version's name",
        lambda: NAMES.encode(what=5),
        "what must be text, the label of the version",
    ),
    # Making a database.
    ("a file as data", lambda: qkv.Database("books.csv"), "Database.from_source(path)"),
    ("a path as data", lambda: qkv.Database(Path("books.csv")), "Database.from_source(path)"),
    (
        "a cell as a column",
        lambda: qkv.Database.from_columns({"name": "Ann", "age": [3]}),
        "column 'name' must be a list of cells, not 'Ann'",
    ),
    ("a precision", lambda: qkv.Database({"a": 1}, precision=X), "unknown precision"),
    ("a number as progress", lambda: NAMES.compact(20), "progress must be a function, not 20"),
    ("text as progress", lambda: NAMES.encode(progress="x"), "progress must be a function"),
    ("keys alone", lambda: qkv.Database(["a", "b"]), "Database(keys, values)"),
    ("records", lambda: qkv.Database([{"a": 1, "b": 2}]), "key='a', value='b'), .* D.extend(rows)"),
    ("words of two letters", lambda: qkv.Database(["ab", "cd"]), "Database(keys, values)"),
    ("sets", lambda: qkv.Database([{1, 2}]), "pairs (key, value)"),
    ("a Series", lambda: qkv.Database(pandas.Series({"a": 1})), "series.to_dict()"),
    ("a value too few", lambda: qkv.Database(["a", "b"], [1]), "2 keys but 1 values"),
    ("keys of two types", lambda: qkv.Database({"a": 1, 2: 3}), "have one type"),
    ("NaN as a key", lambda: qkv.Database([(float("nan"), 1.0)]), "nan: no query could match it"),
    ("a table that is not there", lambda: qkv.Database.from_source("book.csv"), "'books.csv'?"),
    ("a column that is not there", lambda: books(key="titel"), "did you mean 'title'"),
    ("a value that is not there", lambda: books(key="title", value="yaer"), "mean 'year'"),
    ("a table of the web", lambda: qkv.Database.from_source("https://a.b/c.csv"), "download"),
    ("a table opened", lambda: qkv.open("books.csv"), "Database.from_source(file, path="),
    ("no such database", lambda: qkv.open("boks.qkv", create=False), "boks.qkv .* create=True"),
    (
        "a database of the web",
        lambda: qkv.open("s3://here/books.qkv"),
        "copy the folder of the database",
    ),
    ("a server without a scheme", lambda: qkv.Client("127.0.0.1:8000"), "http://host:8000"),
    # Asking it.
    ("an empty one", lambda: qkv.Database().ask("x"), "add rows first"),
    (
        "a path that was not meant",
        lambda: qkv.open("new.qkv").ask("x"),
        "new.qkv does not exist: .*add rows",
    ),
    ("a number of text", lambda: NAMES.ask(3), "query 0 must be text, like the keys, not 3"),
    ("a number of text, spelled", lambda: NAMES.ask(3), "like the keys, not 3 (int): pass '3'"),
    (
        "vectors of two lengths",
        lambda: POINTS.ask([[1.0, 2.0, 3.0], [1.0, 2.0]]),
        "of one length, not .* they have 3 numbers and 2",
    ),
    ("a month", lambda: DAYS.ask("2024-01"), "ISO text .* write it as 2024-01-31"),
    ("a method of others", lambda: NAMES.search("Li"), "no attribute 'search': use ask(query)"),
    ("text of numbers", lambda: GRADES.ask("three"), "query 0 must be a number, not 'three'"),
    ("NaN", lambda: GRADES.ask(float("nan")), "query 0 is not a finite number"),
    ("None", lambda: NAMES.ask(None), "query 0 must not be None"),
    ("a narrow vector", lambda: POINTS.ask([1.0, 2.0]), "query 0 has 2 numbers, but the keys are"),
    ("text of vectors", lambda: POINTS.ask("a"), "a vector of numbers, like the keys"),
    ("a key that is not there", lambda: NAMES["Lee"], "the nearest are 'Li', 'Zhang'"),
    ("no rows", lambda: NAMES.ask("Li", top=0), "top must be a number of rows, at least 1"),
    (
        "a number of sources",
        lambda: NAMES.ask("Li")._collect_source(-1),
        "most must be a whole number",
    ),
    ("a condition's column", lambda: books().ask("x", where="yaer < 1900"), "mean 'year'"),
    ("a condition's sign", lambda: books().ask("x", where="year => 1815"), "write <= and >="),
    ("SQL's range", lambda: books().ask("x", where="year between 1 and 2"), "1900 <= year <= 1950"),
    (
        "a condition's type",
        lambda: books().ask("x", where="year < 'old'"),
        "cannot be compared with",
    ),
    ("text pooled", lambda: NAMES.attend("Li"), "only numbers can be pooled: use ask"),
]


@pytest.mark.parametrize(("slip", "says"), [x[1:] for x in SLIPS], ids=[x[0] for x in SLIPS])
def test_an_error_for_a_mistake_names_the_next_step(slip, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("books.csv").write_text("title,year\nEmma,1815\nMoby-Dick,1851\n")
    with pytest.raises((QkvError, AttributeError)) as caught:
        slip()
    message = str(caught.value)
    assert "\n" not in message
    for part in says.split(".*"):
        assert part.strip() in message, message
        message = message[message.index(part.strip()) :]
    assert not Path("boks.qkv").exists() and not Path("s3:").exists()


WORDS = {
    "bandwidth": "score=scores.Gaussian(bandwidth)",
    "temperature": "weighting=weightings.Softmax(temperature)",
    "valid_lens": "mask=masks.lengths(valid_lens)",
    "is_causal": "mask='causal'",
    "attn_mask": "mask=attn_mask",
    "scale": "score=scores.ScaledDot(scale)",
    "k": "weighting=weightings.TopK(k)",
    "score_mod": "score=scores.Modified(score, score_mod)",
    "need_weights": "did you mean 'return_weights'",
    "dropout": "did you mean 'dropout_p'",
    "key_value_seq_lengths": "mask=masks.lengths(key_value_seq_lengths)",
    "local_window_size": "mask=masks.window(left, right)",
    "return_residual": "return_lse=True",
    "return_attention_scores": "return_weights=True",
    "dropout_rng": "seed=dropout_rng",
    "inference": "dropout_p=0.0",
}


@pytest.mark.parametrize("word", WORDS)
def test_an_error_for_a_foreign_argument_names_ours(word) -> None:
    """As Python refuses it, by a TypeError that is none of ours."""
    for function in (attend, qkv.explain, qkv.warm):
        with pytest.raises(TypeError) as caught:
            function(*[X] * 3, **{word: 1})
        message = f"{function.__name__}() got an unexpected keyword argument {word!r}"
        assert message in str(caught.value) and WORDS[word] in str(caught.value)
    with pytest.raises(TypeError, match=r"weights\(\) got an unexpected .* 'scor': .* 'score'"):
        qkv.weights(X, X, scor="dot")
    with pytest.raises(TypeError, match=r"ask\(\) got an unexpected .*Softmax\(temperature\)"):
        NAMES.ask("Li", temperature=2)
    with pytest.raises(TypeError, match=r"ask\(\) got an unexpected .* 'k': .*top=k"):
        NAMES.ask("Li", k=2)
    with pytest.raises(TypeError, match=r"'limit': pass top=limit to list this many rows"):
        NAMES.ask("Li", limit=2)
    with pytest.raises(TypeError, match=r"use answer.value, answer.rows\[0\]"):
        NAMES.ask("Li")[0]


LAYERS = {
    "nn.Attention()": {
        "temperature": r"Attention got .*'temperature': pass weighting=weightings.Softmax\(temp",
        "is_causal": r"'is_causal': pass mask='causal' in the call$",
        "valid_lens": r"pass mask=masks.lengths\(valid_lens\) in the call$",
        "need_weights": r"pass need_weights= in the call$",
        "scor": r"'scor': did you mean 'score'\? Known: dropout, score, weighting",
    },
    "nn.MultiHeadAttention(8, 2)": {
        "sigma": r"^MultiHeadAttention got .* pass score=scores.Gaussian\(sigma\)$",
        "causal": r"pass is_causal=True in the call$",
        "attn_mask": r"pass attn_mask= in the call$",
        "kv_heads": r"did you mean 'num_kv_heads'",
    },
    "nn.Transformer(8, 2, 1, 1)": {"temperature": r"^Transformer got .*Softmax\(temperature\)"},
    "nn.AdditiveScore(2, 2)": {"hiden": r"^AdditiveScore got .* did you mean 'hidden'"},
    "keras.Attention()": {
        "temperature": r"^Attention got .*'temperature': pass weighting=weightings.Softmax\(temp",
        "is_causal": r"pass use_causal_mask=True in the call$",
        "attention_mask": r"pass attention_mask= in the call$",
        "dropuot": r"did you mean 'dropout'",
    },
    "keras.MultiHeadAttention(2, 4)": {
        "scale": r"^MultiHeadAttention got .*score=scores.ScaledDot\(scale\)",
        "num_head": r"did you mean 'num_heads'",
    },
    "keras.FeedForward(2)": {"temperature": r"^FeedForward got .*'temperature'\. Known: act"},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_says_where_an_argument_goes(layer) -> None:
    module = pytest.importorskip(f"qkv.{layer.partition('.')[0]}")
    name, _, inputs = layer.partition(".")[2].partition("(")
    kind, sizes = getattr(module, name), [int(x) for x in inputs[:-1].split(", ") if x]
    for word, message in LAYERS[layer].items():
        with pytest.raises(TypeError, match=message):
            kind(*sizes, **{word: 1})
    assert kind(*sizes) is not None
    with pytest.raises(TypeError, match=r"takes from .* positional"):
        kind(*[1] * 40)


CALLS = {
    "nn.Attention()": {
        "is_causal": r"^Attention.forward\(\) got .*'is_causal': pass mask='causal'$",
        "valid_lens": r"pass mask=masks.lengths\(valid_lens\)$",
        "sigma": r"pass score=scores.Gaussian\(sigma\) in the constructor$",
        "score": r"pass score= in the constructor$",
        "need_weight": r"did you mean 'need_weights'\? Known: key, mask, need_weights",
    },
    "nn.SelfAttention(4)": {"causal": "pass mask='causal'$", "d_qk": "d_qk= in the constructor$"},
    "nn.MultiHeadAttention(4, 2)": {
        "causal": r"^MultiHeadAttention.forward\(\) got .* pass is_causal=True$",
        "dropout": r"pass dropout= in the constructor$",
        "average_attn_weight": r"did you mean 'average_attn_weights'",
    },
    "nn.TransformerBlock(4, 2, 4)": {
        "src_mask": "pass mask=~src_mask for booleans",
        "rotary": "pass rotary= in the constructor$",
    },
    "nn.TransformerEncoder(1, 4, 2)": {
        "src_key_padding_mask": "mean 'key_padding_mask'",
        "temperature": r"Softmax\(temperature\) in the constructor$",
    },
    "nn.TransformerDecoder(1, 4, 2)": {
        "causal": "pass is_causal=True$",
        "dropout": "pass dropout= in the constructor$",
    },
    "nn.Transformer(4, 2, 1, 1)": {
        "src_key_padding_mask": "mean 'source_key_padding_mask'",
        "score": "pass score= in the constructor$",
    },
    "nn.BahdanauDecoder(5, 2, 3, 4)": {"dropout": "pass dropout= in the constructor$"},
    "keras.Attention()": {
        "is_causal": r"^Attention.call\(\) got .* pass use_causal_mask=True$",
        "valid_lens": r"pass attention_mask=masks.lengths\(valid_lens\)$",
        "temperature": r"Softmax\(temperature\) in the constructor$",
        "return_attention_score": r"did you mean 'return_attention_scores'",
    },
    "keras.MultiHeadAttention(2, 4)": {"causal": "pass use_causal_mask=True$"},
    "keras.GroupedQueryAttention(4, 2, 1)": {"causal": "pass use_causal_mask=True$"},
}


@pytest.mark.parametrize("layer", CALLS)
def test_a_call_of_a_layer_says_where_an_argument_goes(layer) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip(f"qkv.{layer.partition('.')[0]}")
    name, _, inputs = layer.partition(".")[2].partition("(")
    made = getattr(module, name)(*[int(x) for x in inputs[:-1].split(", ") if x])
    x = torch.ones(1, 3, 4)
    inputs = inspect.signature(made.call if hasattr(made, "call") else made.forward).parameters
    needs = [p for p in inputs.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for word, message in CALLS[layer].items():
        with pytest.raises(TypeError, match=message):
            made(*[[x, x] if p.name == "inputs" else x for p in needs], **{word: 1})


def test_an_error_inside_a_layer_stays_as_it_is() -> None:
    """A TypeError of a caller's own score, and a method of one's own with another signature."""
    nn, torch = pytest.importorskip("qkv.nn"), pytest.importorskip("torch")
    x = torch.ones(1, 3, 4)

    def wrong(query, key):
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        nn.Attention(wrong)(x, x, value=x)

    class Mine(nn.Attention):
        def forward(self, query, key, value, causal=False):
            return super().forward(query, key, value, mask="causal" if causal else None)

    assert torch.equal(Mine()(x, x, x, causal=True), x)


def test_a_score_names_what_it_is_built_with() -> None:
    for build, message in [
        (lambda: scores.Gaussian(sigma=2.0), r"Gaussian got an unexpected .*'sigma'.*bandwidth"),
        (lambda: weightings.Softmax(temprature=2.0), "did you mean 'temperature'"),
        (lambda: weightings.Entmax(alfa=2.0), "^Entmax got .* did you mean 'alpha'"),
        (lambda: weightings.TopK(kk=2), "^TopK got .* did you mean 'k'"),
    ]:
        with pytest.raises(TypeError, match=message):
            build()
    assert inspect.signature(scores.Gaussian).parameters["bandwidth"].default == 1.0


@pytest.mark.parametrize("name", ["dot", "cosine", "gaussian", "laplace", "boxcar", "exact"])
def test_a_formula_of_lists_says_how_they_become_arrays(name) -> None:
    rows = [[0.0], [1.0]]
    formula = scores.resolve(name)
    for inputs in ((rows, np.array(rows)), (rows, rows)):
        with pytest.raises(QkvError, match=r"list: pass np.asarray"):
            formula(*inputs)
    with pytest.raises(QkvError, match=r"list: pass np.asarray"):
        weightings.Softmax()(rows)


def test_a_database_names_no_argument_that_it_has_not() -> None:
    """It has no mask, so the error suggests none; its entry points say the same."""
    numbers = qkv.Database({1.0: 2.0, 2.0: 3.0})
    for function in (numbers.ask, numbers.attend):
        with pytest.raises(TypeError, match=r"'is_causal'. Known: approximate, confidence, score"):
            function(np.array([1.2]), is_causal=True)
        with pytest.raises(TypeError, match=r"'mask': pass where="):
            function(np.array([1.2]), mask=None)
        with pytest.raises(TypeError, match=r"Softmax\(temperature\)"):
            function(np.array([1.2]), temperature=2)


def test_an_attribute_is_suggested_once(tmp_path) -> None:
    """Python adds what it finds nearest where it knows the module."""
    code = [sys.executable, "-c", "import qkv; qkv.mask"]
    output = subprocess.run(code, capture_output=True, text=True).stderr
    assert output.lower().count("did you mean") == 1 and "'masks'" in output


def test_what_a_notebook_shows_is_what_print_shows() -> None:
    """The last line of a cell is shown by its repr, which must not be fields and arrays."""
    nn = pytest.importorskip("qkv.nn")
    keys = [f"name {i}" for i in range(20)]
    D = qkv.Database({key: float(i) for i, key in enumerate(keys)}, encoder="characters")
    for result, part in (
        (qkv.explain(X, X, X), "engine: dense ("),
        (qkv.warm(X, X, X), "engine: dense"),
        (nn.describe(nn.TransformerBlock(8, 2)), "layer      kind"),
        (D.learn([(key[1:], key) for key in keys], epochs=1), "recall"),
        (D.calibrate([(key[1:], key) for key in keys]), "0.9"),
    ):
        assert repr(result) == str(result) and part in repr(result) and "array(" not in repr(result)


def test_numbers_of_millions_are_read_as_such() -> None:
    D = qkv.Database({1.0: 3600000.0, 2.0: 2100000.5, 9e15: 1e20})
    message = str(D.ask(1.5, score=qkv.scores.Gaussian(1.0)))
    assert "1.5 → 2850000\n" in message and " 3600000" in message and "e+06" not in message
    assert "9e+15" in str(D.ask(9e15))


def test_an_error_for_a_frame_suggests_from_frame() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(QkvError, match="from_frame"):
        qkv.Database(pandas.DataFrame({"a": [1, 2]}))


@pytest.mark.parametrize("number", [2**70, Fraction(1, 3)])
def test_every_framework_takes_every_number(number) -> None:
    torch = pytest.importorskip("torch")
    scores, weightings, x = qkv.scores, qkv.weightings, np.array([[1.0, 2.0], [0.5, -1.0]])
    kinds = [scores.Gaussian, scores.Laplace, scores.Boxcar, scores.Cosine, scores.ScaledDot]
    ways = [(scores.ScaledDot(softcap=number), "softmax"), ("dot", weightings.Softmax(number))]
    for score, weighting in [*((kind(number), "softmax") for kind in kinds), *ways]:
        options = {"score": score, "weighting": weighting}
        out = [
            qkv.attend(make(x), make(x), make(x), **options) for make in (np.array, torch.tensor)
        ]
        np.testing.assert_allclose(out[1], out[0], rtol=1e-12)


@pytest.mark.parametrize(
    "table",
    [
        "Sales 2024\nproduct,price\nLamp,12.5\nChair,80\n",
        "Sales 2024\nproduct;city;shop\nLamp;Rome;A\nChair;Bonn;B\n",
        "\nSales 2024,,\nproduct,price,city\nLamp,12.5,Rome\n",
    ],
)
def test_a_title_above_a_table_is_reported(table, tmp_path) -> None:
    (tmp_path / "sales.csv").write_text(table)
    with pytest.raises(QkvError, match=r"sales.csv, line [12]: .* one name.* remove it; if"):
        qkv.Database.from_source(tmp_path / "sales.csv")


def test_names_with_commas_are_one_column(tmp_path) -> None:
    (tmp_path / "names.csv").write_text("name\nLovelace, Ada\nHopper, Grace\n")
    names = qkv.Database.from_source(tmp_path / "names.csv", key="name", value="name")
    assert list(names) == ["Lovelace, Ada", "Hopper, Grace"]


def test_a_signature_shows_no_address() -> None:
    for made in (qkv.Database, qkv.Database.add, qkv.Client.add):
        assert " at 0x" not in str(inspect.signature(made))


# Each: a package that is not there, what needs it, and the extra that brings it.

EXTRAS: list[tuple[str, str, str]] = [
    ("torch", "import qkv.nn", "torch"),
    ("torch", "qkv.cluster.torch", "torch"),
    ("keras", "import qkv.keras", "keras"),
    ("transformers", "import qkv.transformers", "transformers"),
    ("onnx", "qkv.onnx.Attention", "onnx"),
    ("matplotlib", "D.ask('Li').plot()", "plot"),
    ("narwhals", "qkv.Database.from_frame(object())", "tables"),
    ("pyarrow", "qkv.Database.from_source('t.parquet')", "tables"),
    ("pyarrow", "D.to_parquet('x.parquet')", "tables"),
    ("polars pandas", "D.to_frame()", "tables"),
    ("anywidget", "qkv.show(D)", "widget"),
    ("psycopg", "qkv.Database.from_source('postgresql://h/d?table=t')", "postgres"),
    ("wordllama", "qkv.Database({'a': 1}, encoder='words')", "text"),
    ("sentence_transformers", "qkv.Database({'a': 1}, encoder='sentences')", "sentences"),
    ("duckdb", "qkv.duckdb.register(None)", "duckdb"),
    ("sklearn", "import qkv.sklearn", "sklearn"),
    ("langchain_core", "qkv.retrievers.LangChainRetriever", "langchain"),
    ("llama_index", "qkv.retrievers.LlamaIndexRetriever", "llama-index"),
    ("haystack", "qkv.retrievers.HaystackRetriever", "haystack"),
    ("ray", "qkv.cluster.Cluster('x.qkv')", "ray"),
    ("starlette", "from qkv.cli.serve import serve; next(serve([]))", "serve"),
]

MISSING = """
import json, sys
for names, _, _ in json.loads(sys.argv[1]):
    sys.modules |= dict.fromkeys(names.split())
import qkv
D = qkv.Database({"Li": "Mu", "Zhang": "Aston"})
assert D.ask("Lee").value == "Mu"
for _, code, _ in json.loads(sys.argv[1]):
    try:
        exec(code)
        print("nothing was raised")
    except qkv.QkvError as error:
        print(type(error).__name__, error)
"""


def test_a_missing_extra_is_one_line_that_says_what_to_install(tmp_path):
    """One fresh interpreter in which no extra is there."""
    (tmp_path / "t.parquet").write_bytes(b"PAR1----PAR1")
    ran = subprocess.run(
        [sys.executable, "-c", MISSING, json.dumps(EXTRAS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == len(EXTRAS), ran.stdout
    for line, (names, code, extra) in zip(lines, EXTRAS, strict=True):
        assert line.startswith("MissingExtra"), (code, names, line)
        assert f"qkv[{extra}]" in line and "pip install" in line, (code, line)
