"""JSON schemas of bodies and responses, for the server's checks and for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from qkv.serve import limits
from qkv.serve.validation import Schema


def typed_schema(kind: str | list[str], description: str, **more: Any) -> Schema:
    """Return the schema of values of this JSON type."""
    return {"type": kind, **more, "description": description}


def list_schema(items: Schema, **more: Any) -> Schema:
    """Return the schema of a list of `items`."""
    return {"type": "array", "items": items, **more}


def object_schema(title: str, required: dict[str, Schema], **more: Schema) -> Schema:
    """Return the schema of an object; `more` are its optional fields."""
    return {
        "title": title,
        "type": "object",
        "properties": {**required, **more},
        "required": list(required),
    }


def body_schema(title: str, required: dict[str, Schema], **more: Schema) -> Schema:
    """Return the schema of an object that may have no other fields."""
    return {**object_schema(title, required, **more), "additionalProperties": False}


TEXT_SCHEMA: Schema = {"type": "string"}
TEXT_LIST_SCHEMA = list_schema(TEXT_SCHEMA)
COUNT_SCHEMA: Schema = {"type": "integer", "minimum": 0}
NUMBER_SCHEMA = typed_schema(
    ["number", "string", "null"],
    'A number. NaN is null, and infinity is "inf" or "-inf".',
)
VERSION_SCHEMA = typed_schema(
    "integer", "The version to read, by default the newest.", minimum=0, maximum=2**53
)
WHERE_SCHEMA = typed_schema(
    "string", "A filter, such as \"year < 1900 and genre == 'poetry'\".", maxLength=10_000
)
SCORE_DESCRIPTION = 'The score that compares keys with the query: "cosine", "gaussian:0.5" …'
WEIGHTING_DESCRIPTION = (
    'The rule that turns scores into weights: "softmax", "hard", "topk:5", "entmax15" …'
)
SCORING_PROPERTIES: dict[str, Schema] = {
    "score": typed_schema(["string", "null"], SCORE_DESCRIPTION, maxLength=64),
    "weighting": typed_schema("string", WEIGHTING_DESCRIPTION, maxLength=64),
}
TOLERANCE_DESCRIPTION = "The largest allowed error of the weights: ½ Σ |weight − exact weight|."
CONFIDENCE_DESCRIPTION = (
    "The probability that the tolerance holds. Below 1, the server may sample rows."
)
APPROXIMATE_DESCRIPTION = (
    "The weight that the rows which are not read may have, by estimate; true means 0.05. Only rows "
    "that the index finds are read."
)
TOLERANCE_PROPERTIES = {
    "tolerance": typed_schema(["number", "null"], TOLERANCE_DESCRIPTION, minimum=0),
    "confidence": typed_schema(["number", "null"], CONFIDENCE_DESCRIPTION, minimum=0, maximum=1),
    "approximate": typed_schema(
        ["number", "boolean", "null"], APPROXIMATE_DESCRIPTION, minimum=0, maximum=1
    ),
}
NO_ROWS = typed_schema(
    "string", "Present if no row passes `where`: it names values that the columns have."
)
EQUALITY_SCHEMA = typed_schema("object", 'Columns and their values: {"genre": "poetry"}.')
CONDITION_SCHEMA: Schema = {"anyOf": [WHERE_SCHEMA, EQUALITY_SCHEMA, {"type": "null"}]}
QUERY_SCHEMA: Schema = {
    "description": "A query of the same type as the keys, or a list of queries.",
    "type": ["string", "number", "boolean", "array", "object", "null"],
}
ROW_SCHEMA = object_schema(
    "Row", {"key": {}, "value": {}, "weight": NUMBER_SCHEMA, "index": COUNT_SCHEMA}
)
ANSWER_SCHEMA = object_schema(
    "Answer",
    {
        "query": {},
        "value": {},
        "mean": {"description": "Σ α v over all rows, or null if values are not numbers."},
        "value_is_mean": typed_schema("boolean", "Whether `value` is `mean`."),
        "rows": list_schema(ROW_SCHEMA),
        "entropy": NUMBER_SCHEMA,
        "effective_rows": NUMBER_SCHEMA,
        "total": COUNT_SCHEMA,
        "missing": COUNT_SCHEMA,
        "exact": typed_schema("boolean", "Whether the query equals a key with nearly all weight."),
        "error_bound": {
            **NUMBER_SCHEMA,
            "description": "An upper bound on ½ Σ |weight − exact weight|.",
        },
        "rows_read": {
            **COUNT_SCHEMA,
            "description": "The number of keys that were read in full precision.",
        },
        "statistical": typed_schema(
            "boolean", "Whether `error_bound` holds only with the probability `confidence`."
        ),
        "engine": TEXT_SCHEMA,
        "hint": typed_schema(
            "string", "Advice: the score or option to use, if the default may be wrong."
        ),
        "confidence": typed_schema(
            ["number", "null"], "The estimated probability that the value is right."
        ),
        "confidence_text": typed_schema("string", "The confidence in words."),
        "expected_error": {
            "description": "The root mean square error to expect of a mean, from rows left out."
        },
        "score": TEXT_SCHEMA,
        "weighting": TEXT_SCHEMA,
        "values": list_schema(object_schema("Share", {"value": {}, "weight": NUMBER_SCHEMA})),
        "lse": NUMBER_SCHEMA,
        "shares": typed_schema("boolean", "Whether the weights sum to 1."),
        "version": COUNT_SCHEMA,
    },
    weights=list_schema(NUMBER_SCHEMA),
    spread={},
    missing_weight=typed_schema(
        ["array", "null"],
        "With `approximate`: the estimated weight of the rows that were not read, and the ends of "
        "an interval that is right for 90 % of queries.",
    ),
    recall=typed_schema(
        "number", "With `approximate`: the share of the ten best rows that the index finds."
    ),
    coverage=typed_schema("number", "The probability that `set` contains the right row."),
    abstains=typed_schema("boolean", "Whether the answer abstains: `set` is empty."),
    set_rows={**COUNT_SCHEMA, "description": "The number of rows in `set`."},
    set=list_schema(
        ROW_SCHEMA, description="The rows of the prediction set, unless there are too many."
    ),
)
ASK_BODY = body_schema(
    "Ask",
    {"query": QUERY_SCHEMA},
    **SCORING_PROPERTIES,
    **TOLERANCE_PROPERTIES,
    top={"type": "integer", "minimum": 1, "maximum": limits.MAX_TOP_ROWS},
    where=CONDITION_SCHEMA,
    at=VERSION_SCHEMA,
    weights=typed_schema("boolean", "Include the weight of every row."),
    spread=typed_schema("boolean", "Include the weighted standard deviation of the values."),
)
ATTEND_BODY = body_schema(
    "Attend",
    {"query": QUERY_SCHEMA},
    **SCORING_PROPERTIES,
    **TOLERANCE_PROPERTIES,
    where=CONDITION_SCHEMA,
    at=VERSION_SCHEMA,
)
MATRIX_SCHEMA = list_schema(list_schema({"type": "number"}, minItems=1), minItems=1)
WEIGHTS_BODY = body_schema(
    "Weights",
    {"query": MATRIX_SCHEMA, "key": MATRIX_SCHEMA},
    **SCORING_PROPERTIES,
    mask={
        "description": "The name of a mask, or booleans: one row per query, one column per key.",
        "anyOf": [
            {"type": "string", "maxLength": 64},
            list_schema(list_schema({"type": "boolean"})),
            {"type": "null"},
        ],
    },
)
RECORD_SCHEMA = typed_schema("object", "A row: one cell per column name.")
ADD_BODY = body_schema(
    "Add",
    {"rows": list_schema(RECORD_SCHEMA, minItems=1, maxItems=limits.MAX_ROWS)},
    update=typed_schema("boolean", "Replace the newest row with the same key."),
)
STATE_PROPERTIES: dict[str, Schema] = {
    "name": TEXT_SCHEMA,
    "rows": COUNT_SCHEMA,
    "version": COUNT_SCHEMA,
}
NULLABLE_TEXT_SCHEMA: Schema = {"type": ["string", "null"]}
SUMMARY_PROPERTIES: dict[str, Schema] = {
    **STATE_PROPERTIES,
    "columns": TEXT_LIST_SCHEMA,
    "key": TEXT_LIST_SCHEMA,
    "value": TEXT_LIST_SCHEMA,
    "key_kind": NULLABLE_TEXT_SCHEMA,
    "value_kind": NULLABLE_TEXT_SCHEMA,
    "uploaded": {"type": "boolean"},
}
INFO_SCHEMA = object_schema(
    "Info",
    {
        **SUMMARY_PROPERTIES,
        "unique": {"type": "boolean"},
        "encoder": {"type": ["object", "null"]},
        "bytes": {"type": ["integer", "null"]},
        "types": {"type": "object", "additionalProperties": TEXT_SCHEMA},
        "missing": {"type": "object", "additionalProperties": COUNT_SCHEMA},
        "scores": {"type": "object", "additionalProperties": {"type": "object"}},
    },
)
