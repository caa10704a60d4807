"""Where that goes which others have an argument for, or have as one of another name: refusals of
keywords, and of torch.jit.script, with the next step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from qkv.errors import CombinationError, validate_keywords

ClassType = TypeVar("ClassType", bound=type)
EntryPoint = TypeVar("EntryPoint", bound=Callable[..., Any])

FOREIGN_KEYWORDS = {
    "alpha": "weighting=weightings.Entmax(alpha)",
    "attn_bias": "mask=attn_bias, floats that are added to the scores",
    "attn_mask": "mask=attn_mask, where True may attend",
    "attention_mask": "mask=, booleans where True may attend",
    "bandwidth": "score=scores.Gaussian(bandwidth)",
    "bias": "mask=bias, floats that are added to the scores",
    "causal": "mask='causal'",
    "deterministic": "dropout_p=0.0 where nothing is to be dropped",
    "dropout_rate": "dropout_p=dropout_rate",
    "dropout_rng": "seed=dropout_rng",
    "enable_gqa": "nothing: a key with fewer heads is shared",
    "implementation": "engine=, or nothing: the fastest that can is chosen",
    "inference": "dropout_p=0.0 where nothing is to be dropped",
    "is_causal": "mask='causal'",
    "k": "weighting=weightings.TopK(k)",
    "key_padding_mask": "mask=masks.lengths(valid), or booleans where True may attend",
    "key_value_seq_lengths": "mask=masks.lengths(key_value_seq_lengths)",
    "kernel": "score=kernel",
    "lengths": "mask=masks.lengths(lengths)",
    "local_window_size": "mask=masks.window(left, right)",
    "mask_mod": "mask=masks.custom(mask_mod)",
    "query_seq_lengths": "nothing: rows beyond a query's length may be cut off the output",
    "return_attention_scores": "return_weights=True",
    "return_residual": "return_lse=True",
    "scale": "score=scores.ScaledDot(scale)",
    "score_mod": "score=scores.Modified(score, score_mod)",
    "sigma": "score=scores.Gaussian(sigma)",
    "softcap": "score=scores.ScaledDot(softcap=softcap)",
    "src_mask": "mask=src_mask, of booleans ~src_mask: True may attend here",
    "temperature": "weighting=weightings.Softmax(temperature)",
    "tgt_mask": "mask=tgt_mask, of booleans ~tgt_mask: True may attend here",
    "training": "dropout_p=0.0 where nothing is to be dropped",
    "use_causal_mask": "mask='causal'",
    "valid_lens": "mask=masks.lengths(valid_lens)",
    "width": "score=scores.Boxcar(width)",
    "window": "mask=masks.window(window)",
}
"""What others call an argument, or have as one, and where it goes here."""
AT_CALL_TEXT, AT_BUILD_TEXT = "where it is called", "where it is built"


def suggest_keywords(kind: ClassType) -> ClassType:
    """A class that says of a keyword which it is not built with where that goes.

    >>> @suggest_keywords
    ... class Layer:
    ...     def __init__(self, weighting="softmax"): ...
    ...     def forward(self, x, is_causal=False): ...
    >>> Layer(temperature=2)
    Traceback (most recent call last):
    TypeError: Layer got an unexpected keyword argument 'temperature': pass \
weighting=weightings.Softmax(temperature)
    """
    init: Any = vars(kind)["__init__"]
    code = init.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(init)
    def init_with_hints(self: Any, *given: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                reject_init_keywords(self, named, known)
        init(self, *given, **named)

    kind.__init__ = init_with_hints  # type: ignore[misc]
    return kind


def reject_init_keywords(made: object, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse what is not built with: of a layer some goes into an argument that is known, some is
    said where it is called."""
    called = _call_parameters(made)
    then = f" {AT_CALL_TEXT}"
    steps = _keyword_hints(known, called, "", then) | {name: f"{name}={then}" for name in called}
    validate_keywords(
        type(made).__name__, given, known, elsewhere=steps | _causal_hints(called, then)
    )


def reject_call_keywords(layer: object, given: Iterable[str]) -> None:
    """Refuse what a layer is not called with: some goes into another argument of the call, some
    belongs to where it was built."""
    called, kind = _call_parameters(layer), type(layer)
    built, then = init_keywords(kind), f" {AT_BUILD_TEXT}"
    steps = _keyword_hints(built, called, then, "") | {name: f"{name}={then}" for name in built}
    door = f"{kind.__name__}.{'call' if hasattr(kind, 'call') else 'forward'}()"
    validate_keywords(door, given, called, elsewhere=steps | _causal_hints(called, ""))


def _call_parameters(layer: object) -> dict[str, str]:
    """What a layer is called with, and as what."""
    kind = type(layer)
    call = getattr(kind, "call", None) or getattr(kind, "forward", None)
    return {p.name: str(p.annotation) for p in _keyword_parameters(call)}


def _keyword_hints(
    built: Collection[str], called: dict[str, str], at_first: str, later: str
) -> dict[str, str]:
    """Where that goes which others have an argument for: into one that a layer is built with, or
    into the rule that it is called with, which is no other's mask."""
    rule = next((name for name, told in called.items() if "MaskLike" in told), None)
    steps = {}
    for name, step in FOREIGN_KEYWORDS.items():
        argument, _, value = step.partition("=")
        if argument in built:
            steps[name] = step + at_first
        elif argument == "mask" and rule:
            steps[name] = f"{rule}={value}{later}"
    return steps


def _causal_hints(called: Iterable[str], then: str) -> dict[str, str]:
    """The same of a causal mask, where a layer has a flag for it."""
    flags = [name for name in called if "causal" in name]
    return {x: f"{name}=True{then}" for name in flags for x in ("causal", "is_causal")}


def init_keywords(kind: type) -> set[str]:
    """What a class or a base of it is built with, by name; of `**options: Unpack[…]` the keys."""
    names: set[str] = set()
    for base in kind.__mro__:
        init: Any = vars(base).get("__init__")
        names.update(p.name for p in _keyword_parameters(init))
        for told in getattr(init, "__annotations__", {}).values():
            if str(told).startswith("Unpack["):
                names.update(init.__globals__[told[7:-1]].__optional_keys__)
    return names


def _keyword_parameters(method: Any) -> list[inspect.Parameter]:
    """What a method can be given by name."""
    given = inspect.signature(method).parameters.values() if inspect.isfunction(method) else []
    return [p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]


def reject_torchscript(door: Any) -> Any:
    """What torch.jit.script asks a layer or a function first, inside of any model:
    `__prepare_scriptable__`."""
    raise CombinationError(
        f"torch.jit.script cannot read {getattr(door, '__name__', type(door).__name__)}, whose "
        "arguments may be names and rules: use torch.jit.trace, torch.export.export or "
        "torch.compile"
    )


def forbid_torchscript(door: EntryPoint) -> EntryPoint:
    """The same function, which torch.jit.script is told not to read."""
    vars(door)["__prepare_scriptable__"] = functools.partial(reject_torchscript, door)
    return door
