"""Errors for keywords of other libraries, with our equivalents, and for torch.jit.script."""

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
    "attn_mask": "mask=attn_mask (True: may attend)",
    "attention_mask": "mask= with booleans (True: may attend)",
    "bandwidth": "score=scores.Gaussian(bandwidth)",
    "bias": "mask=bias, floats that are added to the scores",
    "causal": "mask='causal'",
    "deterministic": "dropout_p=0.0 to disable dropout",
    "dropout_rate": "dropout_p=dropout_rate",
    "dropout_rng": "seed=dropout_rng",
    "enable_gqa": "nothing: query heads share the heads of key and value by default",
    "implementation": "engine=, or nothing: the fastest supported engine is chosen",
    "inference": "dropout_p=0.0 to disable dropout",
    "is_causal": "mask='causal'",
    "k": "weighting=weightings.TopK(k)",
    "key_padding_mask": "mask=masks.lengths(valid), or booleans (True: may attend)",
    "key_value_seq_lengths": "mask=masks.lengths(key_value_seq_lengths)",
    "kernel": "score=kernel",
    "lengths": "mask=masks.lengths(lengths)",
    "local_window_size": "mask=masks.window(left, right)",
    "mask_mod": "mask=masks.custom(mask_mod)",
    "query_seq_lengths": "nothing, and remove the padded rows from the output",
    "return_attention_scores": "return_weights=True",
    "return_residual": "return_lse=True",
    "scale": "score=scores.ScaledDot(scale)",
    "score_mod": "score=scores.Modified(score, score_mod)",
    "sigma": "score=scores.Gaussian(sigma)",
    "s_aux": "weighting=weightings.Softmax(sink=s_aux)",
    "sink": "weighting=weightings.Softmax(sink=sink)",
    "sinks": "weighting=weightings.Softmax(sink=sinks)",
    "softcap": "score=scores.ScaledDot(softcap=softcap)",
    "src_mask": "mask=~src_mask for booleans, src_mask for floats",
    "temperature": "weighting=weightings.Softmax(temperature)",
    "tgt_mask": "mask=~tgt_mask for booleans, tgt_mask for floats",
    "training": "dropout_p=0.0 to disable dropout",
    "use_causal_mask": "mask='causal'",
    "valid_lens": "mask=masks.lengths(valid_lens)",
    "width": "score=scores.Boxcar(width)",
    "window": "mask=masks.window(window)",
}
"""Keywords of other libraries, and our equivalents: texts that follow "pass" in an error."""
AT_CALL_TEXT, AT_BUILD_TEXT = "in the call", "in the constructor"


def suggest_keywords(kind: ClassType) -> ClassType:
    """Decorate a class so that an unknown keyword of `__init__` raises an error with a hint.

    The decorator replaces the `__init__` of the class itself. So write it above `@dataclass`, and
    also above each subclass that needs it.

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
    def init_with_hints(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                reject_init_keywords(self, kwargs, known)
        init(self, *args, **kwargs)

    kind.__init__ = init_with_hints  # type: ignore[misc]
    return kind


def reject_init_keywords(instance: object, keywords: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for unknown keywords of `__init__`.

    The hint names another argument of `__init__`, or an argument of the layer's call.
    """
    call_parameters = _call_parameters(instance)
    at_call = f" {AT_CALL_TEXT}"
    hints = _keyword_hints(known, call_parameters, "", at_call)
    hints |= {name: f"{name}={at_call}" for name in call_parameters}
    hints |= _causal_hints(call_parameters, at_call)
    validate_keywords(type(instance).__name__, keywords, known, elsewhere=hints)


def reject_call_keywords(layer: object, keywords: Iterable[str]) -> None:
    """Raise TypeError for unknown keywords of the call of a layer.

    The hint names another argument of the call, or an argument of `__init__`.
    """
    call_parameters, kind = _call_parameters(layer), type(layer)
    init_parameters, at_build = init_keywords(kind), f" {AT_BUILD_TEXT}"
    hints = _keyword_hints(init_parameters, call_parameters, at_build, "")
    hints |= {name: f"{name}={at_build}" for name in init_parameters}
    hints |= _causal_hints(call_parameters, "")
    method = f"{kind.__name__}.{'call' if hasattr(kind, 'call') else 'forward'}()"
    validate_keywords(method, keywords, call_parameters, elsewhere=hints)


def _call_parameters(layer: object) -> dict[str, str]:
    """Return the parameters of the call of a layer, with their annotations."""
    kind = type(layer)
    call = getattr(kind, "call", None) or getattr(kind, "forward", None)
    return {p.name: str(p.annotation) for p in _keyword_parameters(call)}


def _keyword_hints(
    init_parameters: Collection[str],
    call_parameters: dict[str, str],
    init_suffix: str,
    call_suffix: str,
) -> dict[str, str]:
    """Return a hint for each keyword of other libraries.

    The hint names a parameter of `__init__`, or the parameter of the call that accepts our masks.
    """
    mask = next((name for name, kind in call_parameters.items() if "MaskLike" in kind), None)
    hints = {}
    for name, hint in FOREIGN_KEYWORDS.items():
        argument, _, value = hint.partition("=")
        if argument in init_parameters:
            hints[name] = hint + init_suffix
        elif argument == "mask" and mask:
            hints[name] = f"{mask}={value}{call_suffix}"
    return hints


def _causal_hints(call_parameters: Iterable[str], suffix: str) -> dict[str, str]:
    """Return the hints for a causal mask if the call of the layer has a flag for it."""
    flags = [name for name in call_parameters if "causal" in name]
    return {x: f"{name}=True{suffix}" for name in flags for x in ("causal", "is_causal")}


def init_keywords(kind: type) -> set[str]:
    """Return the keywords of `__init__` of a class and its bases, with those of `Unpack[…]`."""
    names: set[str] = set()
    for base in kind.__mro__:
        init: Any = vars(base).get("__init__")
        names.update(p.name for p in _keyword_parameters(init))
        for annotation in getattr(init, "__annotations__", {}).values():
            if str(annotation).startswith("Unpack["):
                names.update(init.__globals__[annotation[7:-1]].__optional_keys__)
    return names


def _keyword_parameters(method: Any) -> list[inspect.Parameter]:
    """Return the parameters of a method that can be passed by keyword, without `self`."""
    parameters = inspect.signature(method).parameters.values() if inspect.isfunction(method) else []
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]


def reject_torchscript(target: Any) -> Any:
    """Raise CombinationError; torch.jit.script calls it as `__prepare_scriptable__`."""
    raise CombinationError(
        f"torch.jit.script cannot compile {getattr(target, '__name__', type(target).__name__)}, "
        "whose arguments may be names or objects: use torch.jit.trace, torch.export.export or "
        "torch.compile"
    )


def forbid_torchscript(function: EntryPoint) -> EntryPoint:
    """Return the function, marked so that torch.jit.script raises our error for it."""
    vars(function)["__prepare_scriptable__"] = functools.partial(reject_torchscript, function)
    return function
