"""Convert text and JSON to cells, scores, weightings and options, and back."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qkv.errors import ArgumentError

if TYPE_CHECKING:
    import inspect

    from qkv.util.registry import ClassRegistry


def parse_number(text: str) -> int | float | None:
    """Parse a number. Return None for any other text, and for NaN.

    >>> (
    ...     parse_number("3"),
    ...     parse_number("3.5"),
    ...     parse_number("-1e3"),
    ...     parse_number("Li"),
    ...     parse_number("nan"),
    ... )
    (3, 3.5, -1000.0, None, None)
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number == number else None  # NaN is not a number here


def parse_moment(cell: Any) -> datetime.datetime | datetime.time | None:
    """Return a date, or ISO text, as a datetime or time; None for other text.

    A day becomes its midnight.

    >>> parse_moment("2024-03-01 12:00"), parse_moment("2024-03-01"), parse_moment("soon")
    (datetime.datetime(2024, 3, 1, 12, 0), datetime.datetime(2024, 3, 1, 0, 0), None)
    """
    if isinstance(cell, str):
        with contextlib.suppress(ValueError):
            return datetime.datetime.fromisoformat(cell)
        with contextlib.suppress(ValueError):  # without a colon, 2024 would be parsed as 20:24
            return parse_time_of_day(cell) if ":" in cell else None
        return None
    if isinstance(cell, datetime.date) and not isinstance(cell, datetime.datetime):
        return datetime.datetime.combine(cell, datetime.time())
    return cell if isinstance(cell, datetime.datetime | datetime.time) else None


def parse_time_of_day(text: str) -> datetime.time:
    """Parse a time of day, such as "14:30"; the hour may have one digit. Raise `ValueError`.

    >>> parse_time_of_day("9:30")
    datetime.time(9, 30)
    """
    return datetime.time.fromisoformat(f"0{text}" if text[1:2] == ":" else text)


def equivalent_dates(moment: datetime.datetime | datetime.time | None) -> list[Any]:
    """Return the dates that are equal to a moment: itself, and for a midnight also its day.

    The list is empty for None.

    >>> equivalent_dates(datetime.datetime(2024, 3, 1))
    [datetime.datetime(2024, 3, 1, 0, 0), datetime.date(2024, 3, 1)]
    """
    if isinstance(moment, datetime.datetime) and moment.timetz() == datetime.time():
        return [moment, moment.date()]
    return [] if moment is None else [moment]


def guess_cell(text: str) -> Any:
    """Convert text to a number if that number is printed as the same text; else return the text.

    It is for columns without a type.

    >>> guess_cell("7"), guess_cell("007"), guess_cell("3.5"), guess_cell("Mu")
    (7, '007', 3.5, 'Mu')
    """
    number = parse_number(text)
    return number if number is not None and str(number) == text else text


def is_decimal_comma(text: str) -> bool:
    """Return whether a text is a number with a decimal comma.

    >>> is_decimal_comma("2,5"), is_decimal_comma("2.5"), is_decimal_comma("2, 5")
    (True, False, False)
    """
    return re.fullmatch(r"\s*[-+]?\d*,\d+\s*", text) is not None


def parse_cell_like(text: str, example: Any, what: str = "the query") -> Any:
    """Parse text as a cell of the same kind as `example`. `what` names the text in messages.

    If `example` is None, guess the kind.

    >>> (
    ...     parse_cell_like("3.5", 2),
    ...     parse_cell_like("3.5", "Li"),
    ...     parse_cell_like("Li, 3", ("Hu", 1)),
    ...     parse_cell_like('["Li", 3]', ("Hu", 1)),
    ... )
    (3.5, '3.5', ('Li', 3), ('Li', 3))
    """
    from qkv.database.table.cells import cell_kind

    if example is None:
        return guess_cell(text)
    match cell_kind(example):
        case "text":
            return text
        case "number":
            number = parse_number(text)
            if number is None:
                advice = f": write {text.replace(',', '.')}" if is_decimal_comma(text) else ""
                raise ArgumentError(
                    f"{what} must be a number, as the column is, not {text!r}{advice}"
                )
            return number
        case "vector":
            import numpy as np

            return np.asarray(_parse_numbers(text, len(example), what), dtype=np.float32)
        case "tuple":
            parts = _split_parts(text, what)
            if len(parts) != len(example):
                raise ArgumentError(
                    f"{what} must have {len(example)} parts, not {len(parts)}: write them as "
                    """'first, second' or '["first", "second"]'"""
                )
            return tuple(
                part if not isinstance(part, str) else parse_cell_like(part, sample, what)
                for part, sample in zip(parts, example, strict=True)
            )
        case "date":
            dates = equivalent_dates(parse_moment(text))
            if not dates:
                raise ArgumentError(
                    f"{what} must be a date such as {example.isoformat()}, not {text!r}"
                )
            return next((date for date in dates if type(date) is type(example)), dates[0])
        case "bytes":
            return _parse_bytes(text)
        case _:
            value = _load_json(text)
            return text if value is NOT_JSON else value


def cell_from_json(value: Any, example: Any, what: str = "the query") -> Any:
    """Convert a JSON value to a cell of the same kind as `example`.

    `parse_cell_like` parses text, unless the column is text. A list becomes a tuple or a vector.

    >>> (
    ...     cell_from_json(["Li", "3"], ("Hu", 1)),
    ...     cell_from_json("3.5", 2),
    ...     cell_from_json(["a"], None),
    ... )
    (('Li', 3), 3.5, ['a'])
    """
    from qkv.database.table.cells import cell_kind

    kind = "json" if example is None else cell_kind(example)
    if isinstance(value, str):
        return value if kind in ("text", "json") else parse_cell_like(value, example, what)
    if not isinstance(value, list):
        return value
    if kind == "vector":
        return parse_cell_like(json.dumps(value), example, what)
    if kind == "tuple" and len(value) == len(example):
        return tuple(
            cell_from_json(part, sample, what) for part, sample in zip(value, example, strict=True)
        )
    return value


NOT_JSON = object()


def _load_json(text: str) -> Any:
    """Parse JSON text. Return `NOT_JSON` for other text, or if it is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NOT_JSON


def _split_parts(text: str, what: str) -> list[Any]:
    """Return the items of a JSON list, or the cells of a line of CSV."""
    value = _load_json(text)
    if isinstance(value, list):
        return value
    try:
        return next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:  # a line break outside quotes, or a field of more than 131,072 characters
        raise ArgumentError(
            f"""{what} must be a line of CSV, or JSON such as '["first", "second"]', """
            f"not {text[:60]!r}"
        ) from None


def _parse_numbers(text: str, count: int, what: str) -> list[float]:
    """Parse a list of `count` numbers."""
    parts = [
        parse_number(part) if isinstance(part, str) else part for part in _split_parts(text, what)
    ]
    if len(parts) != count or not all(isinstance(part, int | float) for part in parts):
        raise ArgumentError(f"{what} must be {count} numbers, as in 0.5,1.0,…, not {text[:60]!r}")
    return [float(part) for part in parts]  # type: ignore[arg-type]


def _parse_bytes(text: str) -> bytes:
    """Return the bytes of a text, or of base64 text in the form {"$bytes": …}.

    >>> _parse_bytes("a"), _parse_bytes('{"$bytes": "AP8="}')
    (b'a', b'\\x00\\xff')
    """
    from qkv.database.table.cells import encode_utf8, from_json_value

    try:
        value = from_json_value(_load_json(text))
    except (TypeError, ValueError, RecursionError):
        value = text
    return value if isinstance(value, bytes) else encode_utf8(text)


def parse_score(text: str | None) -> Any:
    """Return the score for a name. Parameters may follow after a colon.

    >>> parse_score("gaussian:0.5"), parse_score("cosine")
    (Gaussian(bandwidth=0.5), Cosine(temperature=1.0))
    >>> parse_score("scaled_dot:2,softcap=30")
    ScaledDot(scale=2, softcap=30)
    """
    from qkv import scores

    return None if text is None else _parse_component(text, scores.NAMES)


def parse_weighting(text: str) -> Any:
    """Return the weighting for a name. Parameters may follow after a colon.

    >>> parse_weighting("topk:3"), parse_weighting("entmax:1.3"), parse_weighting("hard")
    (TopK(k=3), Entmax(alpha=1.3), Hard(straight_through=False))
    >>> parse_weighting("normalized:nearest")
    Normalized(on_empty='nearest')
    """
    from qkv import weightings

    # Entmax is registered as "entmax15", which names its default alpha.
    if text.startswith("entmax:"):
        text = text.replace("entmax", "entmax15", 1)
    return _parse_component(text, weightings.NAMES)


def _parse_component(text: str, names: ClassRegistry[Any]) -> Any:
    """Return the score or weighting for a name with parameters."""
    name, colon, arguments = text.partition(":")
    takes, needs = names.list_parameters(name), names.required_parameters(name)
    if not colon and len(needs) == 1 and re.search("int|float", str(takes[0].annotation)):
        raise ArgumentError(f"{names.role} {name} needs a number: {name}:3")
    if not colon or len(needs) > 1:
        return names.build_default(name)
    values: dict[str, Any] = {}
    for position, part in enumerate(arguments.split(",")):
        keyword, equals, word = (x.strip() for x in part.rpartition("="))
        matches = (
            [p for p in takes if p.name == keyword] if equals else takes[position : position + 1]
        )
        parameter = matches[0] if matches else None
        value = None if parameter is None else _parse_parameter(word, _parameter_type(parameter))
        if parameter is None or value is None:
            expected = (
                f"takes {_describe_parameters(takes)}, not {arguments!r}"
                if takes
                else "takes no number"
            )
            raise ArgumentError(f"{names.role} {name} {expected}")
        values[parameter.name] = value
    return names.find_class(name)(**values)


def _parameter_type(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def _parse_parameter(text: str, kind: str) -> Any:
    """Parse the value of a parameter of this type; return None for text of another type."""
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower())
    return text or None if kind == "str" else parse_number(text)


def _describe_parameters(parameters: list[inspect.Parameter]) -> str:
    """Return the parameters that may follow a name, such as "a number, or scale=…, softcap=…"."""
    kinds = {"str": "a word", "bool": "true or false"}
    types = [kinds.get(_parameter_type(p), "a number") for p in parameters]
    if len(types) == 1:
        return types[0]
    return f"{types[0]}, or {', '.join(f'{p.name}=…' for p in parameters)}"


def format_component(component: Any, names: ClassRegistry[Any]) -> str:
    """Return a score or weighting as text that `parse_score` or `parse_weighting` can parse.

    >>> from qkv import scores, weightings
    >>> (
    ...     format_component(scores.Gaussian(0.5), scores.NAMES),
    ...     format_component(weightings.TopK(3), weightings.NAMES),
    ... )
    ('gaussian:0.5', 'topk:3')
    >>> format_component(weightings.Hard(straight_through=True), weightings.NAMES)
    'hard:True'
    """
    if isinstance(component, str):
        return component
    name = names.name_of(type(component))
    if name is None:
        class_name = type(component).__name__
        raise ArgumentError(
            f"{names.role}: {class_name} has no registered name: register the class, or pass text "
            "such as 'name:0.5'"
        )
    parts = []
    for position, parameter in enumerate(names.list_parameters(name)):
        value = getattr(component, parameter.name, None)
        if isinstance(value, str | int | float) and value != parameter.default:
            word = value if isinstance(value, str) else repr(value)
            parts.append(f"{parameter.name}={word}" if position else word)
    text = f"{name}:{','.join(parts)}" if parts else name
    if repr(_parse_component(text, names)) != repr(component):
        raise ArgumentError(
            f"{names.role}: {component!r} cannot be written as text such as 'name:0.5': pass such "
            "a text"
        )
    return text


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `ask` that are not None, with score and weighting as objects.

    >>> parse_options({"top": 3, "score": "gaussian:0.5", "weighting": None})
    {'top': 3, 'score': Gaussian(bandwidth=0.5)}
    """
    parsers = {"score": parse_score, "weighting": parse_weighting}
    present = {name: option for name, option in options.items() if option is not None}
    return present | {name: parsers[name](present[name]) for name in parsers if name in present}


def format_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `ask` as JSON values: score and weighting become text.

    `parse_options` is the inverse.

    >>> from qkv import scores
    >>> format_options({"top": 3, "score": scores.Gaussian(0.5), "weighting": "hard"})
    {'top': 3, 'score': 'gaussian:0.5', 'weighting': 'hard'}
    """
    from qkv import scores, weightings

    names: dict[str, ClassRegistry[Any]] = {"score": scores.NAMES, "weighting": weightings.NAMES}
    present = {name: option for name, option in options.items() if option is not None}
    return present | {
        name: format_component(present[name], names[name]) for name in names if name in present
    }
