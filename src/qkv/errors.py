"""The errors of qkv and the checks that raise them.

Each error is a `QkvError` and also the built-in error that a caller would expect.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

PACKAGE_PATHS = f"{Path(__file__).parent}{os.sep}", functools.__file__, contextlib.__file__
"""Path prefixes of the stack frames that a warning skips: qkv, functools and contextlib."""


class QkvError(Exception):
    """The base class of every error that qkv raises on purpose."""


class _CallError(QkvError):
    """The base class of errors about arguments. They may be raised while a graph is traced."""

    # TensorFlow's AutoGraph re-raises an error with the same class only if the constructor of the
    # class is `Exception.__init__`. Type checkers skip this line: with it, they would infer that a
    # call of the class returns `Exception`.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class ShapeError(_CallError, ValueError):
    """An array has the wrong shape, or the shapes of two arrays do not match."""


class DtypeError(_CallError, TypeError):
    """An array has the wrong dtype, or an argument has the wrong type."""


class FrameworkError(_CallError, TypeError):
    """A call mixes arrays of two frameworks, or the framework does not support the operation."""


class ArgumentError(_CallError, ValueError):
    """An argument has an invalid value."""


class CombinationError(_CallError, ValueError):
    """Each argument is valid, but the combination is not."""


class AddedMaskWarning(UserWarning):
    """A mask of floats 0 and 1 is added to the scores; a boolean mask was probably meant."""


_collected_warnings: ContextVar[list[str] | None] = ContextVar("_collected_warnings", default=None)


def warn_at_caller(message: str | Warning, category: type[Warning] | None = None) -> None:
    """Issue a warning that points to the line outside qkv that made the call.

    Inside `collect_warnings`, append its text to the list instead.
    """
    collected = _collected_warnings.get()
    if collected is not None:
        collected.append(str(message))
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_PATHS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list that collects the texts of this thread's warnings inside the `with`.

    >>> with collect_warnings() as texts:
    ...     warn_at_caller("column 'price' is read as text")
    >>> texts
    ["column 'price' is read as text"]
    """
    texts: list[str] = []
    token = _collected_warnings.set(texts)
    try:
        yield texts
    finally:
        _collected_warnings.reset(token)


class EngineError(_CallError, ValueError):
    """The requested engine cannot run the call."""


FLOAT64_HINT = "float64 is off: on JAX call jax.config.update('jax_enable_x64', True)"


class MissingExtraError(QkvError, ImportError):
    """An optional dependency is not installed."""


def missing_extra_error(needs: str, extra: str) -> MissingExtraError:
    """Return the error that says what is missing and how to install it.

    >>> missing_extra_error("reading a frame needs narwhals", "tables")
    MissingExtraError('reading a frame needs narwhals: pip install "qkv[tables]"')
    """
    return MissingExtraError(f'{needs}: pip install "qkv[{extra}]"')


@contextlib.contextmanager
def require_extra(name: str, needs: str) -> Iterator[None]:
    """Replace an `ImportError` inside the block by one that names the extra to install.

    >>> with require_extra("tables", "reading a frame needs narwhals"):
    ...     import no_such_package
    Traceback (most recent call last):
    qkv.errors.MissingExtraError: reading a frame needs narwhals: pip install "qkv[tables]"
    """
    try:
        yield
    except ImportError:
        raise missing_extra_error(needs, name) from None


def as_float(value: Real) -> float:
    """Return a number as a float, ∞ if it is too large."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def coerce_field_to_float(owner: object, name: str) -> None:
    """Convert a field to float unless it is an int that a float represents exactly.

    Not every framework accepts fractions, large ints and NumPy scalars.
    """
    value = getattr(owner, name)
    if not (isinstance(value, int) and abs(value) <= 2**53):
        object.__setattr__(owner, name, float(value))


def validate_positive(owner: object, name: str) -> None:
    """Check that a field is a finite number above 0, and make it a float or int.

    Arrays are not checked.
    """
    value, kind = getattr(owner, name), type(owner).__name__
    if type(value) is float and 0 < value < float("inf"):
        return
    if isinstance(value, Real) and not isinstance(value, bool):
        if not 0 < as_float(value) < float("inf"):
            expected = "finite" if as_float(value) > 0 else "above 0"
            raise ArgumentError(f"{kind}: {name} must be {expected}, not {value!r:.40}")
        coerce_field_to_float(owner, name)
    elif not hasattr(value, "dtype"):
        raise DtypeError(f"{kind}: {name} must be a number, not {value!r}")


def validate_sizes(**sizes: Any) -> None:
    """Check that each size is an int above 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{name} must be a whole number above 0, not {size!r}")


def validate_optional_sizes(**sizes: Any) -> None:
    """Check that each size is an int above 0 or None."""
    validate_sizes(**{name: size for name, size in sizes.items() if size is not None})


def call_user_function(
    function: Callable[..., Any], *arguments: Any, takes: str, hint: str = ""
) -> Any:
    """Call a user's function and return its result.

    If the function does not accept the arguments, raise `DtypeError`. The message begins with
    `takes`, the expected parameters, and ends with `hint`.

    >>> call_user_function(lambda q: q, 1, 2, takes="score_mod must take (score, b)")
    Traceback (most recent call last):
    qkv.errors.DtypeError: score_mod must take (score, b), not (q)
    """
    try:
        return function(*arguments)
    except TypeError as error:  # read the signature only after a failure: reading it is slow
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise error from None
        try:
            signature.bind(*arguments)
        except TypeError:
            raise DtypeError(f"{takes}, not {signature}{hint}") from None
        raise


def validate_callables(**functions: Any) -> None:
    """Check that each argument is callable or None."""
    for name, value in functions.items():
        if not (value is None or callable(value)):
            raise DtypeError(f"{name} must be a function, not {value!r:.40}")


def validate_fraction(name: str, value: Any) -> float:
    """Return a number from 0 to 1 as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name} must be a number from 0 to 1, not {value!r}")
    if not 0 <= as_float(value) <= 1:
        raise ArgumentError(f"{name} must be between 0 and 1, not {value!r:.40}")
    return float(value)


def validate_file_path(path: Any) -> Path:
    """Return the path as a `Path`; raise `DtypeError` if it is not a str or a path object."""
    if isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str):
        return Path(path)
    raise DtypeError(f"path must be the name of a file, not a {type(path).__name__}")


def require_parent_folder(path: Path) -> Path:
    """Return the path; raise `ArgumentError` if its parent folder does not exist."""
    if not path.parent.is_dir():
        raise ArgumentError(f"{path}: there is no folder {path.parent}; create it first")
    return path


def format_count(number: int) -> str:
    """Format a number with thousands separators; it may be a symbolic int of torch.compile.

    >>> format_count(1234567)
    '1,234,567'
    """
    if not isinstance(number, int | float):
        return str(number)  # a symbolic int of make_fx
    return "{:,}".format(number)  # noqa: UP032, an f-string would force torch.compile to specialize


def format_plural(number: int, noun: str) -> str:
    """Format a number with its noun, in singular or plural.

    >>> format_plural(1, "row"), format_plural(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join_alternatives(names: Sequence[str], most: int = 3) -> str:
    """Join names by commas and "or"; names beyond the first `most` are only counted.

    >>> join_alternatives(["x"]), join_alternatives(["x", "y"]), join_alternatives(list("abcdef"))
    ('x', 'x or y', 'a, b, c or 3 others')
    """
    shown = [*names] if len(names) <= most + 1 else [*names[:most], f"{len(names) - most} others"]
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def unknown_name_error(
    kind: str, name: object, known: Iterable[str], more: str = "", meant: str | None = None
) -> ArgumentError:
    """Return the error for an unknown name, with the nearest known one.

    `meant` replaces the nearest name in the suggestion. `more` is appended to the message.

    >>> print(unknown_name_error("score", "gausian", ["dot", "gaussian"]))
    unknown score 'gausian': did you mean 'gaussian'? Known: dot, gaussian.
    """
    return ArgumentError(f"unknown {kind} {_describe_unknown_name(name, known, meant)}{more}")


def validate_keywords(
    function: str,
    names: Iterable[str],
    known: Collection[str] | None,
    more: str = "",
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raise `TypeError` for an unknown keyword argument, and suggest the nearest one.

    `elsewhere` maps names from other libraries to the argument to pass instead. `more` is appended
    to the message.

    >>> validate_keywords("warm()", ["scor"], ["score"])
    Traceback (most recent call last):
    TypeError: warm() got an unexpected keyword argument 'scor': did you mean 'score'? Known: score.
    """
    for name in names:
        if name not in (known := known or ()):
            hint = _describe_unknown_name(name, known)
            if elsewhere and name in elsewhere:
                hint = f"{name!r}: pass {elsewhere[name]}"
            raise TypeError(f"{function} got an unexpected keyword argument {hint}{more}")


def _describe_unknown_name(name: object, known: Iterable[str], meant: str | None = None) -> str:
    known = sorted(known)
    quoted = repr(name) if isinstance(name, str) else " ".join(repr(name).split())
    quoted = quoted if len(quoted) <= 80 else f"{quoted[:79]}…"
    matches = difflib.get_close_matches(str(name)[:80].lower(), known, 1, cutoff=0.5)
    hint = next((f": did you mean {x!r}?" for x in [meant or "", *matches] if x), ".")
    plain = (x.isprintable() and x == x.strip() and "," not in x for x in known)
    names = ", ".join(x if is_plain else repr(x) for x, is_plain in zip(known, plain, strict=True))
    return f"{quoted}{hint} Known: {names}."


def escape_control_characters(text: str) -> str:
    """Return the text with control characters escaped, so that data cannot control a terminal.

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
    """Return whether text[i] is a zero-width joiner between two non-Latin characters.

    Persian, Indic scripts and emoji need these joiners.
    """
    neighbours = text[i - 1 : i] + text[i + 1 : i + 2]
    is_joiner = text[i] in "\u200c\u200d"
    return is_joiner and len(neighbours) == 2 and all(c > "\u02ff" for c in neighbours)
