"""What goes in and what comes out, as JSON Schema: what is checked, and what is published."""

from __future__ import annotations

from typing import Any

from qkv.serve import limits
from qkv.serve.fit import Schema


def typed(kind: str | list[str], tells: str, **more: Any) -> Schema:
    return {"type": kind, **more, "description": tells}


def list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(title: str, required: dict[str, Schema], **more: Schema) -> Schema:
    return {
        "title": title,
        "type": "object",
        "properties": {**required, **more},
        "required": list(required),
    }


def body(title: str, required: dict[str, Schema], **more: Schema) -> Schema:
    return {**record(title, required, **more), "additionalProperties": False}


TEXT: Schema = {"type": "string"}
TEXTS = list_of(TEXT)
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER = typed(
    ["number", "string", "null"],
    'A number; null where it is NaN, "inf" or "-inf" where it is infinite.',
)
AT = typed("integer", "As of this version; by default the newest.", minimum=0, maximum=2**53)
WHERE = typed("string", "Rows that pass: \"year < 1900 and genre == 'poetry'\".", maxLength=10_000)
SCORE = 'How keys are compared with the query: "cosine", "gaussian:0.5" …'
WEIGHTING = 'How scores become weights: "softmax", "hard", "topk:5", "entmax15" …'
HOW: dict[str, Schema] = {
    "score": typed(["string", "null"], SCORE, maxLength=64),
    "weighting": typed("string", WEIGHTING, maxLength=64),
}
TOLERANCE = "How far the weights may lie from the exact ones, proven: ½ Σ |difference|."
CONFIDENCE = "With what probability the tolerance must hold, where rows may be drawn for it."
NEAR = {
    "tolerance": typed(["number", "null"], TOLERANCE, minimum=0),
    "confidence": typed(["number", "null"], CONFIDENCE, minimum=0, maximum=1),
}
NO_ROWS = typed("string", "That no row passes `where`, with values that its columns have.")
EQUAL = typed("object", 'Columns and what they equal: {"genre": "poetry"}.')
WHERE_OR_CELLS: Schema = {"anyOf": [WHERE, EQUAL, {"type": "null"}]}
QUERY: Schema = {
    "description": "A query, of the kind that the keys are, or a list of queries.",
    "type": ["string", "number", "boolean", "array", "object", "null"],
}
ROW = record("Row", {"key": {}, "value": {}, "weight": NUMBER, "index": COUNT})
ANSWER = record(
    "Answer",
    {
        "query": {},
        "value": {},
        "rows": list_of(ROW),
        "entropy": NUMBER,
        "effective_rows": NUMBER,
        "total": COUNT,
        "missing": COUNT,
        "exact": typed("boolean", "Whether the query is a key that has nearly all weight."),
        "error_bound": {**NUMBER, "description": "½ Σ |weight − exact weight| is at most this."},
        "rows_read": {**COUNT, "description": "Rows whose keys were read in full."},
        "statistical": typed("boolean", "Whether the bound is not proven."),
        "engine": TEXT,
        "hint": typed("string", "What to ask by instead where the default score may be wrong."),
        "score": TEXT,
        "weighting": TEXT,
        "values": list_of(record("Share", {"value": {}, "weight": NUMBER})),
        "lse": NUMBER,
        "shares": typed("boolean", "Whether the weights share out one whole."),
        "version": COUNT,
    },
    weights=list_of(NUMBER),
    spread={},
    coverage=typed("number", "With what probability `set` has the right row."),
    abstains=typed("boolean", "Whether no row fits: `set` is empty."),
    set_rows={**COUNT, "description": "Rows in `set`."},
    set=list_of(ROW, description="The set, where it is small."),
)
ASK = body(
    "Ask",
    {"query": QUERY},
    **HOW,
    **NEAR,
    top={"type": "integer", "minimum": 1, "maximum": limits.TOP},
    where=WHERE_OR_CELLS,
    at=AT,
    weights=typed("boolean", "Give the weight of every row too."),
    spread=typed("boolean", "Give how far the pooled values lie apart too."),
)
ATTEND = body("Attend", {"query": QUERY}, **HOW, **NEAR, where=WHERE_OR_CELLS, at=AT)
MATRIX = list_of(list_of({"type": "number"}, minItems=1), minItems=1)
WEIGHTS = body(
    "Weights",
    {"query": MATRIX, "key": MATRIX},
    **HOW,
    mask={
        "description": "Which pairs count: a mask's name, or a row of booleans for each query.",
        "anyOf": [
            {"type": "string", "maxLength": 64},
            list_of(list_of({"type": "boolean"})),
            {"type": "null"},
        ],
    },
)
RECORD = typed("object", "A cell for each column, by its name.")
ADD = body(
    "Add",
    {"rows": list_of(RECORD, minItems=1, maxItems=limits.ROWS)},
    update=typed("boolean", "Replace the newest row that has a row's key."),
)
NOW: dict[str, Schema] = {"name": TEXT, "rows": COUNT, "version": COUNT}
KIND: Schema = {"type": ["string", "null"]}
SHORT: dict[str, Schema] = {
    **NOW,
    "columns": TEXTS,
    "key": TEXTS,
    "value": TEXTS,
    "key_kind": KIND,
    "value_kind": KIND,
    "uploaded": {"type": "boolean"},
}
INFO = record(
    "Info",
    {
        **SHORT,
        "unique": {"type": "boolean"},
        "encoder": {"type": ["object", "null"]},
        "bytes": {"type": ["integer", "null"]},
        "types": {"type": "object", "additionalProperties": TEXT},
        "missing": {"type": "object", "additionalProperties": COUNT},
    },
)
