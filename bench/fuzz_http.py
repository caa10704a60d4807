"""Send hostile requests to a server: no input may cause a server error or a long computation.

python -m bench.fuzz_http [REQUESTS] [SEED]

Every route gets valid requests in which some values are then replaced: ragged lists, huge integers,
NaN, deep nesting, nulls, lone surrogates, long text, dates, NUL, line breaks, in bodies, paths and
parameters. The app runs in this process. A request is reported if its status is 500 or above,
except 501 (a missing extra) and 503 (a limit), or if it takes more than MAX_CPU_SECONDS of CPU time
over all threads.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from starlette.testclient import TestClient

import qkv
from qkv import scores, weightings
from qkv.serve import encoding, validation
from qkv.serve.app import build_routes, create_app
from qkv.serve.databases import DatabaseRegistry, open_sources
from qkv.serve.route import Route
from qkv.serve.security import Access

MAX_CPU_SECONDS = 10.0
ALLOWED = (501, 503)


def nested(depth: int, inner: Any = 1, name: str | None = None) -> Any:
    """Return lists or objects nested in each other."""
    for _ in range(depth):
        inner = [inner] if name is None else {name: inner}
    return inner


TEXTS = [
    *("", " ", "\x00", "a\nb", "a\r\nb", "\r", "\ud800", "x\udfff", "é", "e\u0301", "😀", "\u202e"),
    *("nan", "NaN", "inf", "-inf", "1e999", "-0", "007", "1_000", "٣", "0x10", "true", "null"),
    *(
        "2024-02-30",
        "2024-01-31",
        "2024-01-31T25:00",
        "0001-01-01T00:00+14:00",
        "9999-12-31",
        "12:00",
    ),
    *(
        "[",
        "[" * 5000,
        '{"a":' * 5000,
        '["Li", 1]',
        "Li, 1",
        'Li, "1',
        '"a\nb", 1',
        '{"$bytes": "x"}',
    ),
    *('{"$date": 1}', '{"$array": ["O", [1], ""]}', '{"$array": ["f4", [9], "AAAA"]}', "../../x"),
    *(
        "x" * 5000,
        "a b " * 20_000,
        "\u0301\u0327" * 2000,
        "1" * 5000,
        "9" * 30,
        "%s%n",
        "`",
        "'",
        '"',
    ),
]
NUMBERS = [
    *(0, -1, 1, -0.0, 0.5, 1e308, -1e308, 5e-324, 1e-310, 3.5, 2**31, 2**53, 2**53 + 1, 2**63),
    *(-(2**63) - 1, 2**64, 10**30, 10**400, float("nan"), float("inf"), -float("inf")),
]
NESTED = [
    *([], {}, [[]], [{}], [[1], [1, 2]], [[[1]], [1]], [1, "a"], [None], [True, 1], [[True], [1]]),
    *([1] * 5000, [["a"]], {"": 1}, {"a": {"b": [1]}}, {"$tuple": [1, 2]}, {"$date": "x"}),
    *({"$bytes": "!"}, {"$float": "x"}, {"$decimal": "nan"}, {"$array": ["f4", [1], "AAAA"]}),
    *({"$array": ["O", [1], "AAAA"]}, {"$array": ["V9", [-1], ""]}, {"$array": {}}, {"$time": []}),
    *(nested(50), nested(150), nested(150, name="a"), nested(300), "DEEP", "HUGE"),
]
WRITTEN = {b'"DEEP"': b"[" * 5000 + b"]" * 5000, b'"HUGE"': b"9" * 5000}
"""What Python does not write as JSON."""
HOSTILE = [*TEXTS, *NUMBERS, *NESTED, None, True, False]
NAMES = [
    *scores.NAMES,
    *weightings.NAMES,
    *(
        "topk:0",
        "topk:3",
        "topk:99999999999999999999",
        "gaussian:nan",
        "gaussian:0",
        "gaussian:1e308",
    ),
    *(
        "gaussian:5e-324",
        "entmax:1e400",
        "entmax:1.00001",
        "softmax:0",
        "softmax:-1",
        "cosine:1e-308",
    ),
    *(
        "normalized:raise",
        "normalized:nan",
        "scaled_dot:softcap=0",
        "scaled_dot:2,softcap=x",
        ":",
        "a:b",
    ),
    *("laplace:inf", "dot:1", "hard:true", "exact", "raw", "gaussian:0.5,0.5", "causal", "window"),
]
CONDITIONS = [
    *(
        "year > 1900",
        "genre == 'novel'",
        "key == None",
        "value < 1",
        "`a",
        "a = 1",
        "year",
        "not year",
    ),
    *(
        "genre < 1",
        "year in (1, 'a')",
        "'a' in genre",
        "year < year",
        "1 < 2",
        "f(x)",
        "year.real > 1",
    ),
    *("(" * 300, "not " * 900 + "year", "year" + "<year" * 900, "'\x00' == genre", "year > 1e999"),
    *(
        "year > 99999999999999999999999",
        "key == '\ud800'",
        "key == 'a\\nb'",
        "year == nan",
        "",
        " ",
    ),
    {"genre": "novel"},
    {"genre": ["novel", None]},
    {"year": [[1]]},
    {"year": {}},
    {"": 1},
    {},
]
FILES = [
    *(
        b"",
        b"a",
        b"a,b\n1,2\n",
        b"a,b\n1\n",
        b'a,b\n"',
        b'"' * 3001,
        b"\xff\xfe",
        b"a\x00b",
        b"PK\x03\x04",
    ),
    *(
        b"a,b\n" + b"," * 3000,
        b"a,a\n1,2\n",
        b",\n,\n",
        b"a;b\n1,5;2\n",
        b"\r\r\r",
        b"a\n" + b"1" * 5000,
    ),
    *(b'{"a":1}\n', b'{"a":1,"b":2}\n{"a":', b"[]", b"[{}]", b"[1]", b'{"a":1}\n"' + b'\\"' * 8000),
    *(b'[{"a":1e999,"b":1}]', b'[{"a":"\\ud800","b":1}]', b'{"a":' * 5000, b'{"a":NaN,"b":1}\n'),
    *(
        b'{"a":{"b":1},"b":[1,[2]]}\n',
        b'{"a":null,"b":null}\n',
        b'{"":1}\n',
        b"PAR1",
        b"ARROW1\x00\x00",
    ),
    *(
        b"\xff\xff\xff\xff\x10\x00\x00\x00",
        b"SQLite format 3\x00",
        b"\x00" * 1024,
        b"x" * 512 + b"ustar",
    ),
    b"a,b\n" + ("\u0301\u0327" * 2000).encode() + b",1\n",
    b"a,b\n2024-01-31,1\n2024-02-30,2\n",
    b"k,v\n1,inf\n2,-inf\n3,nan\n",
    b"k,v\n1e308,1\n-1e308,2\n",
]


def build_served(folder: Path) -> DatabaseRegistry:
    """Create databases with every kind of key; one on disk, which may be written."""
    books = {
        "title": ["Emma", "Ulysses", "Dubliners", "Persuasion", "Leaves of Grass"],
        "genre": ["novel", "novel", "stories", "novel", None],
        "year": [1815, 1922, 1914, 1817, 1855],
    }
    how: dict[str, Any] = {"key": "title", "value": "genre", "encoder": "characters"}
    qkv.Database.from_columns(books, **how, path=folder / "books.qkv").close()
    served = open_sources([folder / "books.qkv"])
    rng = np.random.default_rng(0)
    day = datetime.date(2024, 1, 1)
    made: dict[str, qkv.Database[Any, Any]] = {
        "ages": qkv.Database({3.5: 1.0, 4.0: 2.5, 17.0: -1.0}),
        "vectors": qkv.Database(rng.standard_normal((30, 4)), rng.standard_normal((30, 2))),
        "places": qkv.Database({("Li", 1): "Mu", ("Hu", 2): "Bo"}, key=("name", "number")),
        "days": qkv.Database({day: 1.0, day.replace(day=9): 2.0}),
        "blobs": qkv.Database({b"a": 1, b"\x00": 2}),
        "words": qkv.Database({f"word {i}": f"value {i % 3}" for i in range(80)}),
    }
    for name, database in made.items():
        served.add_database(name, database)
    return served


class Request(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def generate_valid(schema: Any, rng: Random, name: str = "") -> Any:
    """Return a value that fits a schema, or nearly if the schema allows anything."""
    known = {"score": list(scores.NAMES), "weighting": list(weightings.NAMES)}.get(name)
    if known and rng.random() < 0.6:
        return rng.choice(known)
    if name in ("score", "weighting") or (name == "mask" and rng.random() < 0.3):
        return rng.choice(NAMES)
    if name == "where":
        return rng.choice(CONDITIONS)
    if name == "query" and "items" not in schema:
        return rng.choice(
            ["Emma", 3.5, [3.5, 4.0], ["Emma", "Ulises"], [0.1] * 4, ["Li", 1], "2024-01-01"]
        )
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return generate_valid(rng.choice(schema["anyOf"]), rng, name)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    match kind:
        case "object":
            known, required = schema.get("properties", {}), schema.get("required", ())
            found = {
                x: generate_valid(inner, rng, x)
                for x, inner in known.items()
                if x in required or rng.random() < 0.4
            }
            if name in ("rows", ""):
                found |= {} if known else {"title": "Emma", "genre": "novel", "year": 1}
            return found
        case "array":
            size = rng.choice([1, 2, 3])
            return [generate_valid(schema.get("items", {}), rng, name) for _ in range(size)]
        case "integer":
            return rng.choice([schema.get("minimum", 0), 1, 2, 5, schema.get("maximum", 3)])
        case "number":
            return rng.choice([0, 0.5, 1.0, 2])
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return rng.choice(["books", "Emma", "query", "FP32", "a"])


def mutate(x: Any, rng: Random) -> Any:
    """Return the value with one part replaced, dropped or repeated."""
    if isinstance(x, dict) and x and rng.random() < 0.85:
        name = rng.choice(list(x))
        if rng.random() < 0.1:
            return {k: v for k, v in x.items() if k != name}
        return {**x, name: mutate(x[name], rng)}
    if isinstance(x, list) and x and rng.random() < 0.7:
        at = rng.randrange(len(x))
        if rng.random() < 0.3:
            return rng.choice([x[:at], x + x[at:], [*x, *x]])
        return [*x[:at], mutate(x[at], rng), *x[at + 1 :]]
    return rng.choice(HOSTILE)


PAGE: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {x: {} for x in names.split()},
        "required": names.split(),
    }
    for name, names in {
        "ask": "database query top where score weighting at",
        "answer": "database query top where score weighting at",
        "encode": "keys query encoder",
        "databases": "",
        "rows": "database where at",
        "versions": "database",
        "views": "",
        "model": "text",
        "sentence": "text",
    }.items()
}


def draw_page_call(rng: Random, databases: list[str], models: bool) -> tuple[str, Any]:
    name = rng.choice([x for x in PAGE if models or x not in ("model", "sentence")])
    plain: dict[str, Any] = {
        "database": rng.choice(databases),
        "query": rng.choice(["Emma", "3.5", 3.5, "Li, 1"]),
        "top": 3,
        "where": rng.choice(CONDITIONS),
        "score": rng.choice(NAMES),
        "weighting": rng.choice(NAMES),
        "at": 1,
        "keys": ["Emma", "Ulysses"],
        "encoder": rng.choice(["characters", "numbers", "exact", "lexical", "text"]),
        "text": "a short sentence",
    }
    known = PAGE[name]["properties"]
    return name, {x: plain[x] for x in known if x == "database" or rng.random() < 0.6}


def draw_request(route: Route, databases: list[str], rng: Random, models: bool = True) -> Request:
    """Draw a request to one route, with up to three hostile values."""
    mutations = rng.choice([0, 1, 1, 1, 2, 3])
    path, body = route.path, b""
    headers = {"accept": rng.choice(["*/*", "*/*", encoding.CELLS_MEDIA_TYPE])}
    sent: Any = None
    if route.body is not None:
        sent = generate_valid(route.body, rng)
    if "{call}" in path:
        call, sent = draw_page_call(rng, databases, models)
        path = path.replace("{call}", call)
    for _ in range(mutations if sent is not None else 0):
        drawn = [mutate(sent, rng) for _ in range(20)]
        # Mostly such as pass the schema: they reach what is behind it.
        fitting = [x for x in drawn if validation.find_violation(x, route.body or {}) is None]
        sent = rng.choice(fitting) if fitting and rng.random() < 0.9 else drawn[0]
    if sent is not None:
        body = json.dumps(sent).encode()
        for word, instead in WRITTEN.items():
            body = body.replace(word, instead)
        headers["content-type"] = rng.choice(["application/json"] * 3 + [encoding.CELLS_MEDIA_TYPE])
    elif route.raw_media_types:
        body = rng.choice(FILES)
        headers["content-type"] = rng.choice(route.raw_media_types)
    elif rng.random() < 0.2:
        headers["content-type"] = encoding.CELLS_MEDIA_TYPE
    if rng.random() < 0.02:
        body = body[: rng.randrange(len(body) + 1)]
    name = rng.choice(databases) if rng.random() < 0.95 else str(rng.choice(TEXTS))
    key = rng.choice(["Emma", "3.5", "Li, 1", "2024-01-01", "a", "0.1,0.2,0.3,0.4"])
    key = rng.choice(TEXTS)[:20_000] if rng.random() < 0.7 else key
    path = path.replace("{name}", encode_part(name[:1000])).replace("{key}", encode_part(key))
    at = {
        x: generate_valid(schema, rng, x)
        for x, schema in route.query.items()
        if x in route.required_parameters or rng.random() < 0.4
    }
    if mutations and at and rng.random() < 0.5:
        at[rng.choice(list(at))] = rng.choice([*TEXTS, *NUMBERS])
    parts = [f"{x}={encode_part(str(text)[:10_050])}" for x, text in at.items()]
    return Request(route.method, path + ("?" + "&".join(parts) if parts else ""), headers, body)


def encode_part(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


class Recorder(logging.Handler):
    """Records the tracebacks that a server logs."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            trace, place = error.__traceback__, ""
            while trace is not None:
                code = trace.tb_frame.f_code
                place = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
                trace = trace.tb_next
            self.errors.append(f"{type(error).__name__}: {error} in {place}"[:300])


def fuzz(
    count: int, seed: int, statuses: Counter[int] | None = None, models: bool = True
) -> Iterator[str]:
    """Return what is wrong with the responses to this many requests; without `models`, no language
    model is loaded.
    """
    rng, access = Random(seed), Access(write=True)
    log, recorder = logging.getLogger("qkv"), Recorder()
    log.addHandler(recorder)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            served = build_served(Path(folder))
            databases, routes = list(served.databases), build_routes(access)
            busy = [
                x
                for x in routes
                if x.body is not None or x.raw_media_types or x.query or "{key}" in x.path
            ]
            client = TestClient(
                create_app(served, access),
                base_url="http://localhost",
                raise_server_exceptions=False,
            )
            with client:
                for _ in range(count):
                    route = rng.choice(busy if rng.random() < 0.97 else routes)
                    request = draw_request(route, databases, rng, models)
                    recorder.errors.clear()
                    start = time.process_time()
                    answer = client.request(
                        request.method, request.path, headers=request.headers, content=request.body
                    )
                    took = time.process_time() - start
                    if statuses is not None:
                        statuses[answer.status_code] += 1
                    shown = f"{request.method} {request.path[:300]} {request.headers} "
                    shown += f"{request.body[:400]!r}"
                    if answer.status_code >= 500 and answer.status_code not in ALLOWED:
                        yield f"{answer.status_code} {recorder.errors} {answer.text[:200]} {shown}"
                    if took > MAX_CPU_SECONDS:
                        yield f"{took:.0f} s of CPU {shown}"
    finally:
        log.removeHandler(recorder)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    statuses: Counter[int] = Counter()
    wrong = 0
    logging.getLogger("qkv").propagate = False
    for complaint in fuzz(count, seed, statuses):
        wrong += 1
        print(complaint, flush=True)
    print(f"{count:,} requests, {wrong} wrong; statuses {dict(sorted(statuses.items()))}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
