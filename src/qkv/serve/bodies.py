"""What goes in and what comes out, as JSON Schema: what is checked, and what is published."""

from __future__ import annotations

from typing import Any

from qkv.serve import limits
from qkv.serve.fit import Schema

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {
    "type": ["number", "string", "null"],
    "description": 'A number; null where it is NaN, "inf" or "-inf" where it is infinite.',
}
AT: Schema = {
    "type": "integer",
    "minimum": 0,
    "maximum": 2**53,
    "description": "As of this version; by default the newest.",
}
WHERE: Schema = {
    "type": "string",
    "maxLength": 10_000,
    "description": "Rows that pass: \"year < 1900 and genre == 'poetry'\".",
}


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


TEXTS = list_of(TEXT)
HOW: dict[str, Schema] = {
    "score": {
        "type": ["string", "null"],
        "maxLength": 64,
        "description": 'How keys are compared with the query: "cosine", "gaussian:0.5" …',
    },
    "weighting": {
        "type": "string",
        "maxLength": 64,
        "description": 'How scores become weights: "softmax", "hard", "topk:5", "entmax15" …',
    },
}
TOLERANCE: Schema = {
    "type": ["number", "null"],
    "minimum": 0,
    "description": "How far the weights may lie from the exact ones, proven: ½ Σ |difference|.",
}
CONFIDENCE: Schema = {
    "type": ["number", "null"],
    "minimum": 0,
    "maximum": 1,
    "description": "With what probability the tolerance must hold, where rows may be drawn for it.",
}
NEAR = {"tolerance": TOLERANCE, "confidence": CONFIDENCE}
WHERE_OR_CELLS: Schema = {
    "anyOf": [
        WHERE,
        {
            "type": "object",
            "description": 'Columns and what they equal: {"genre": "poetry"}.',
        },
        {"type": "null"},
    ]
}
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
        "exact": {"type": "boolean", "description": "Whether the query is a key, which decides."},
        "error_bound": {**NUMBER, "description": "½ Σ |weight − exact weight| is at most this."},
        "rows_read": {**COUNT, "description": "Rows whose keys were read in full."},
        "statistical": {"type": "boolean", "description": "Whether the bound is not proven."},
        "engine": TEXT,
        "score": TEXT,
        "weighting": TEXT,
        "values": list_of(record("Share", {"value": {}, "weight": NUMBER})),
        "lse": NUMBER,
        "version": COUNT,
    },
    weights=list_of(NUMBER),
    spread={},
    coverage={"type": "number", "description": "With what probability `set` has the right row."},
    abstains={"type": "boolean", "description": "Whether no row fits: `set` is empty."},
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
    weights={"type": "boolean", "description": "Give the weight of every row too."},
    spread={"type": "boolean", "description": "Give how far the pooled values lie apart too."},
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
RECORD: Schema = {"type": "object", "description": "A cell for each column, by its name."}
ADD = body(
    "Add",
    {"rows": list_of(RECORD, minItems=1, maxItems=limits.ROWS)},
    update={"type": "boolean", "description": "Replace the newest row that has a row's key."},
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
