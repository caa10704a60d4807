"""Text, or JSON, as what it stands for: a cell of a column, a score, a weighting."""

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
    """The number that a text is, if it is one.

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
        found = float(text)
    except ValueError:
        return None
    return found if found == found else None


def parse_moment(cell: Any) -> datetime.datetime | datetime.time | None:
    """The moment that a date or its ISO text is, of a day its midnight; None of what is neither.

    >>> parse_moment("2024-03-01 12:00"), parse_moment("2024-03-01"), parse_moment("soon")
    (datetime.datetime(2024, 3, 1, 12, 0), datetime.datetime(2024, 3, 1, 0, 0), None)
    """
    if isinstance(cell, str):
        with contextlib.suppress(ValueError):
            return datetime.datetime.fromisoformat(cell)
        with contextlib.suppress(ValueError):  # 2024 is no time, though ISO may write 20:24 so
            return datetime.time.fromisoformat(cell) if ":" in cell else None
        return None
    if isinstance(cell, datetime.date) and not isinstance(cell, datetime.datetime):
        return datetime.datetime.combine(cell, datetime.time())
    return cell if isinstance(cell, datetime.datetime | datetime.time) else None


def equivalent_dates(moment: datetime.datetime | datetime.time | None) -> list[Any]:
    """The dates that mean this moment: itself, and of a midnight its day; none of None.

    >>> equivalent_dates(datetime.datetime(2024, 3, 1))
    [datetime.datetime(2024, 3, 1, 0, 0), datetime.date(2024, 3, 1)]
    """
    if isinstance(moment, datetime.datetime) and moment.timetz() == datetime.time():
        return [moment, moment.date()]
    return [] if moment is None else [moment]


def guess_cell(text: str) -> Any:
    """A cell of a column that has no type yet: a number if it prints back the same, else text.

    >>> guess_cell("7"), guess_cell("007"), guess_cell("3.5"), guess_cell("Mu")
    (7, '007', 3.5, 'Mu')
    """
    found = parse_number(text)
    return found if found is not None and str(found) == text else text


def parse_cell_like(text: str, example: Any, what: str = "the query") -> Any:
    """The text as the kind of cell that the example is; a guess where that is None.

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
            found = parse_number(text)
            if found is None:
                raise ArgumentError(f"{what} must be a number, as the column is, not {text!r}")
            return found
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
                part if not isinstance(part, str) else parse_cell_like(part, wish, what)
                for part, wish in zip(parts, example, strict=True)
            )
        case "date":
            dates = equivalent_dates(parse_moment(text))
            if not dates:
                form = example.isoformat()
                raise ArgumentError(f"{what} must be a date such as {form}, not {text!r}")
            return next((one for one in dates if type(one) is type(example)), dates[0])
        case "bytes":
            return _parse_bytes(text)
        case _:
            found = _json(text)
            return text if found is NO_JSON else found


def cell_from_json(given: Any, example: Any, what: str = "the query") -> Any:
    """What JSON gave as the kind of cell that the example is: text by `parse_cell_like` where the
    column is not of text, a list as a tuple or a vector.

    >>> (
    ...     cell_from_json(["Li", "3"], ("Hu", 1)),
    ...     cell_from_json("3.5", 2),
    ...     cell_from_json(["a"], None),
    ... )
    (('Li', 3), 3.5, ['a'])
    """
    from qkv.database.table.cells import cell_kind

    wish = "json" if example is None else cell_kind(example)
    if isinstance(given, str):
        return given if wish in ("text", "json") else parse_cell_like(given, example, what)
    if not isinstance(given, list):
        return given
    if wish == "vector":
        return parse_cell_like(json.dumps(given), example, what)
    if wish == "tuple" and len(given) == len(example):
        return tuple(
            cell_from_json(part, sample, what) for part, sample in zip(given, example, strict=True)
        )
    return given


NO_JSON = object()


def _json(text: str) -> Any:
    """The value that a text is in JSON; `NO_JSON` of other text, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NO_JSON


def _split_parts(text: str, what: str) -> list[Any]:
    """The parts of a JSON list, or of a line of CSV."""
    found = _json(text)
    if isinstance(found, list):
        return found
    try:
        return next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error:  # a line break outside of quotes, or a part of more than 131,072 characters
        raise ArgumentError(
            f"""{what} must be a line of CSV, or JSON such as '["first", "second"]', """
            f"not {text[:60]!r}"
        ) from None


def _parse_numbers(text: str, count: int, what: str) -> list[float]:
    parts = [
        parse_number(part) if isinstance(part, str) else part for part in _split_parts(text, what)
    ]
    if len(parts) != count or not all(isinstance(part, int | float) for part in parts):
        raise ArgumentError(f"{what} must be {count} numbers, as in 0.5,1.0,…, not {text[:60]!r}")
    return [float(part) for part in parts]  # type: ignore[arg-type]


def _parse_bytes(text: str) -> bytes:
    """Those of the text, or of its base64 where it names them as a store does.

    >>> _parse_bytes("a"), _parse_bytes('{"$bytes": "AP8="}')
    (b'a', b'\\x00\\xff')
    """
    from qkv.database.table.cells import encode_utf8, from_json_value

    try:
        found = from_json_value(_json(text))
    except (TypeError, ValueError, RecursionError):
        found = text
    return found if isinstance(found, bytes) else encode_utf8(text)


def parse_score(text: str | None) -> Any:
    """A score by name, with its number if one follows, or its parameters by their names.

    >>> parse_score("gaussian:0.5"), parse_score("cosine")
    (Gaussian(bandwidth=0.5), Cosine(temperature=1.0))
    >>> parse_score("scaled_dot:2,softcap=30")
    ScaledDot(scale=2, softcap=30)
    """
    from qkv import scores

    return None if text is None else _parse_component(text, scores.NAMES)


def parse_weighting(text: str) -> Any:
    """A weighting by name, with its number or word if one follows.

    >>> parse_weighting("topk:3"), parse_weighting("entmax:1.3"), parse_weighting("hard")
    (TopK(k=3), Entmax(alpha=1.3), Hard(straight_through=False))
    >>> parse_weighting("normalized:nearest")
    Normalized(on_empty='nearest')
    """
    from qkv import weightings

    if text.startswith("entmax:"):  # entmax15 is Entmax with its default
        text = text.replace("entmax", "entmax15", 1)
    return _parse_component(text, weightings.NAMES)


def _parse_component(text: str, names: ClassRegistry[Any]) -> Any:
    name, colon, rest = text.partition(":")
    takes, needs = names.list_parameters(name), names.required_parameters(name)
    if not colon and len(needs) == 1 and re.search("int|float", str(takes[0].annotation)):
        raise ArgumentError(f"{names.role} {name} needs a number: {name}:3")
    if not colon or len(needs) > 1:
        return names.build_default(name)
    given: dict[str, Any] = {}
    for place, part in enumerate(rest.split(",")):
        word, equals, told = (x.strip() for x in part.rpartition("="))
        named = [p for p in takes if p.name == word] if equals else takes[place : place + 1]
        parameter = named[0] if named else None
        found = None if parameter is None else _parse_parameter(told, _parameter_type(parameter))
        if parameter is None or found is None:
            wish = (
                "takes no number"
                if not takes
                else f"takes {_describe_parameters(takes)}, not {rest!r}"
            )
            raise ArgumentError(f"{names.role} {name} {wish}")
        given[parameter.name] = found
    return names.find_class(name)(**given)


def _parameter_type(parameter: inspect.Parameter) -> str:
    given = parameter.annotation
    return given if isinstance(given, str) else getattr(given, "__name__", str(given))


def _parse_parameter(text: str, kind: str) -> Any:
    """What a parameter is given, as its kind is; None where it cannot be."""
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower())
    return text or None if kind == "str" else parse_number(text)


def _describe_parameters(parameters: list[inspect.Parameter]) -> str:
    """What may follow a name, in a few words."""
    kinds = {"str": "a word", "bool": "true or false"}
    told = [kinds.get(_parameter_type(p), "a number") for p in parameters]
    if len(told) == 1:
        return told[0]
    return f"{told[0]}, or {', '.join(f'{p.name}=…' for p in parameters)}"


def format_component(thing: Any, names: ClassRegistry[Any]) -> str:
    """The text that stands for a score or a weighting, from which `parse_score` or
    `parse_weighting` makes it.

    >>> from qkv import scores, weightings
    >>> (
    ...     format_component(scores.Gaussian(0.5), scores.NAMES),
    ...     format_component(weightings.TopK(3), weightings.NAMES),
    ... )
    ('gaussian:0.5', 'topk:3')
    >>> format_component(weightings.Hard(straight_through=True), weightings.NAMES)
    'hard:True'
    """
    if isinstance(thing, str):
        return thing
    name = names.name_of(type(thing))
    if name is None:
        told = type(thing).__name__
        raise ArgumentError(f"{names.role}: {told} has no name: give it as text, as in 'name:0.5'")
    parts = []
    for place, parameter in enumerate(names.list_parameters(name)):
        given = getattr(thing, parameter.name, None)
        if isinstance(given, str | int | float) and given != parameter.default:
            told = given if isinstance(given, str) else repr(given)
            parts.append(f"{parameter.name}={told}" if place else told)
    text = f"{name}:{','.join(parts)}" if parts else name
    if repr(_parse_component(text, names)) != repr(thing):
        raise ArgumentError(f"{names.role}: {thing!r} cannot be written as text, as in 'name:0.5'")
    return text


def parse_options(how: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of `ask` that are given, with score and weighting built of their text.

    >>> parse_options({"top": 3, "score": "gaussian:0.5", "weighting": None})
    {'top': 3, 'score': Gaussian(bandwidth=0.5)}
    """
    made = {"score": parse_score, "weighting": parse_weighting}
    given = {name: option for name, option in how.items() if option is not None}
    return given | {name: made[name](given[name]) for name in made if name in given}


def format_options(how: Mapping[str, Any]) -> dict[str, Any]:
    """The same options with score and weighting as text, from which `parse_options` makes them.

    >>> from qkv import scores
    >>> format_options({"top": 3, "score": scores.Gaussian(0.5), "weighting": "hard"})
    {'top': 3, 'score': 'gaussian:0.5', 'weighting': 'hard'}
    """
    from qkv import scores, weightings

    names: dict[str, ClassRegistry[Any]] = {"score": scores.NAMES, "weighting": weightings.NAMES}
    given = {name: option for name, option in how.items() if option is not None}
    return given | {
        name: format_component(given[name], names[name]) for name in names if name in given
    }
