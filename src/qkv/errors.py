"""What qkv raises: one family, each member also the built-in error a caller would expect."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

PACKAGE_PATHS = f"{Path(__file__).parent}{os.sep}", functools.__file__, contextlib.__file__
"""Where this package lies, and what stands between two calls of it."""


class QkvError(Exception):
    """The base of every error that qkv raises on purpose."""


class _CallError(QkvError):
    """What is wrong with a call, which a graph may be made of."""

    # TensorFlow's AutoGraph makes an error again in its own words where it is built by this very
    # function, and else raises one of its own in its place. A type checker would lose the class.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class ShapeError(_CallError, ValueError):
    """An array has the wrong shape, or two arrays do not fit each other."""


class DtypeError(_CallError, TypeError):
    """An array has the wrong element type, or an argument is no array at all."""


class FrameworkError(_CallError, TypeError):
    """Arrays of two frameworks met in one call, or the framework lacks what was asked."""


class ArgumentError(_CallError, ValueError):
    """An argument has a value that means nothing here."""


class CombinationError(_CallError, ValueError):
    """Each argument is valid, but together they do not make sense."""


class AddedMaskWarning(UserWarning):
    """A mask's floats are 0 and 1, and are added to the scores, where booleans rule pairs out."""


def warn_at_caller(told: str | Warning, kind: type[Warning] | None = None) -> None:
    """Warn at the line that called qkv, however deep below it this is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_PATHS):
        frame, level = frame.f_back, level + 1
    warnings.warn(told, kind, stacklevel=level)


class EngineError(_CallError, ValueError):
    """The engine that was asked for cannot serve the call."""


FLOAT64_HINT = "there is no float64 here: on JAX jax.config.update('jax_enable_x64', True)"


class MissingExtraError(QkvError, ImportError):
    """An optional dependency is not installed."""


@contextlib.contextmanager
def require_extra(name: str, needs: str) -> Iterator[None]:
    """Inside of this, a package that cannot be imported is told of with the extra that brings it.

    >>> with require_extra("tables", "reading a frame needs narwhals"):
    ...     import no_such_package
    Traceback (most recent call last):
    qkv.errors.MissingExtraError: reading a frame needs narwhals: pip install "qkv[tables]"
    """
    try:
        yield
    except ImportError:
        raise MissingExtraError(f'{needs}: pip install "qkv[{name}]"') from None


def as_float(value: Real) -> float:
    """A number as a float; ∞ where none is as large."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def coerce_field_to_float(owner: object, name: str) -> None:
    """Make a float of a field that not every framework takes: a fraction, an int of many digits, a
    number of NumPy."""
    value = getattr(owner, name)
    if not (isinstance(value, int) and abs(value) <= 2**53):
        object.__setattr__(owner, name, float(value))


def validate_positive(owner: object, name: str) -> None:
    """Refuse a field that is not a number above zero; one that is learned is its owner's care."""
    value, kind = getattr(owner, name), type(owner).__name__
    if type(value) is float and 0 < value < float("inf"):
        return
    if isinstance(value, Real) and not isinstance(value, bool):
        if not 0 < as_float(value) < float("inf"):
            told = "finite" if as_float(value) > 0 else "above 0"
            raise ArgumentError(f"{kind}: {name} must be {told}, not {value!r:.40}")
        coerce_field_to_float(owner, name)
    elif not hasattr(value, "dtype"):
        raise DtypeError(f"{kind}: {name} must be a number, not {value!r}")


def validate_sizes(**given: Any) -> None:
    """Refuse a size that is no whole number above zero, by its name."""
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{name} must be a whole number above 0, not {size!r}")


def validate_optional_sizes(**given: Any) -> None:
    """The same, of sizes that may be left out."""
    validate_sizes(**{name: size for name, size in given.items() if size is not None})


def call_user_function(
    function: Callable[..., Any], *arguments: Any, takes: str, hint: str = ""
) -> Any:
    """function(*arguments) of a caller's function; told what it `takes` where they do not fit.

    >>> call_user_function(lambda q: q, 1, 2, takes="score_mod must take (score, b)")
    Traceback (most recent call last):
    qkv.errors.DtypeError: score_mod must take (score, b), not (q)
    """
    try:
        return function(*arguments)
    except TypeError as error:  # looked into now alone: a signature takes longer than a short call
        try:
            own = inspect.signature(function)
        except (TypeError, ValueError):
            raise error from None
        try:
            own.bind(*arguments)
        except TypeError:
            raise DtypeError(f"{takes}, not {own}{hint}") from None
        raise


def validate_callables(**given: Any) -> None:
    """Refuse what is to be called and cannot be, by its name."""
    for name, value in given.items():
        if not (value is None or callable(value)):
            raise DtypeError(f"{name} must be a function, not {value!r:.40}")


def validate_fraction(name: str, value: Any) -> float:
    """A number from 0 to 1, as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name} must be a number from 0 to 1, not {value!r}")
    if not 0 <= as_float(value) <= 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, not {value!r:.40}")
    return float(value)


def validate_file_path(path: Any) -> Path:
    """The path, if it can be one of a file."""
    if isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str):
        return Path(path)
    raise DtypeError(f"path must be the name of a file, not a {type(path).__name__}")


def require_parent_folder(path: Path) -> Path:
    """The path, if there is a folder for it."""
    if not path.parent.is_dir():
        raise ArgumentError(f"{path}: there is no folder {path.parent}; make it first")
    return path


def format_count(number: int) -> str:
    """A number as sentences have it; torch.compile may know it only when it runs.

    >>> format_count(1234567)
    '1,234,567'
    """
    if not isinstance(number, int | float):
        return str(number)  # the symbol that make_fx has for it
    return "{:,}".format(number)  # noqa: UP032, an f-string asks torch.compile for the number


def format_plural(number: int, noun: str) -> str:
    """So many of them.

    >>> format_plural(1, "row"), format_plural(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join_alternatives(names: Sequence[str], most: int = 3) -> str:
    """Any of them, the first by name.

    >>> join_alternatives(["x"]), join_alternatives(["x", "y"]), join_alternatives(list("abcdef"))
    ('x', 'x or y', 'a, b, c or 3 others')
    """
    shown = [*names] if len(names) <= most + 1 else [*names[:most], f"{len(names) - most} others"]
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def unknown_name_error(
    kind: str, name: object, known: Iterable[str], more: str = "", meant: str | None = None
) -> ArgumentError:
    """The error for a name that is in no table, with the one that is meant, or the nearest.

    >>> print(unknown_name_error("score", "gausian", ["dot", "gaussian"]))
    unknown score 'gausian': did you mean 'gaussian'? Known: dot, gaussian.
    """
    return ArgumentError(f"unknown {kind} {_describe_unknown_name(name, known, meant)}{more}")


def validate_keywords(
    door: str,
    given: Iterable[str],
    known: Collection[str] | None,
    more: str = "",
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Refuse an argument by a name that the door does not have, as Python does, with the nearest,
    or with what is passed in its place.

    >>> validate_keywords("warm()", ["scor"], ["score"])
    Traceback (most recent call last):
    TypeError: warm() got an unexpected keyword argument 'scor': did you mean 'score'? Known: score.
    """
    for name in given:
        if name not in (known := known or ()):
            told = _describe_unknown_name(name, known)
            if elsewhere and name in elsewhere:
                told = f"{name!r}: pass {elsewhere[name]}"
            raise TypeError(f"{door} got an unexpected keyword argument {told}{more}")


def _describe_unknown_name(name: object, known: Iterable[str], meant: str | None = None) -> str:
    known = sorted(known)
    told = repr(name) if isinstance(name, str) else " ".join(repr(name).split())
    near = [meant or "", *difflib.get_close_matches(str(name)[:80].lower(), known, 1, cutoff=0.5)]
    hint = next((f": did you mean {x!r}?" for x in near if x), ".")
    told = told if len(told) <= 80 else f"{told[:79]}…"
    bare = (name.isprintable() and name == name.strip() and "," not in name for name in known)
    names = ", ".join(name if x else repr(name) for name, x in zip(known, bare, strict=True))
    return f"{told}{hint} Known: {names}."


def escape_control_characters(text: str) -> str:
    """The text with its control characters spelled out: data must not steer the terminal.

    >>> escape_control_characters("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    return "".join(
        c if c.isprintable() or c in "\n\t" or _is_joiner(text, i) else ascii(c)[1:-1]
        for i, c in enumerate(text)
    )


def _is_joiner(text: str, i: int) -> bool:
    """Whether a joiner stands there that its neighbours are written with: of Persian or Indic
    letters, of pictures."""
    near = text[i - 1 : i] + text[i + 1 : i + 2]
    return text[i] in "\u200c\u200d" and len(near) == 2 and all(c > "\u02ff" for c in near)
