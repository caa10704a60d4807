"""Which models take their attention by name, told by their source; the others are refused."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from qkv.errors import ArgumentError
from qkv.util.caches import create_table, memoize

ATTENTION_PATTERN = re.compile("attention|multihead", re.IGNORECASE)
FORMULA_PATTERNS = (
    re.compile(
        r"softmax|scaled_dot_product_attention|multi_head_attention|self\.key =", re.IGNORECASE
    ),
    re.compile("key|k_proj|qkv"),
)
CHOICE_PATTERN = re.compile(r"(?<!FUNCTIONS)\[(self\.)?config\._attn_implementation\]")

IMPLEMENTATION_NAMES: set[str] = set()
"""What `attn_implementation` may be to mean qkv."""

_FAMILY_BY_CONFIG: dict[type, ModelFamily] = create_table("transformers.model_families")
_MODELS_BY_CONFIG: dict[type, set[type]] = {}


@dataclass(frozen=True)
class Definition:
    """A class or function of a model's file."""

    names: frozenset[str]
    """All that it names."""
    uses_interface: bool = False
    """Whether it looks its attention up in transformers' AttentionInterface."""
    computes_attention: bool = False
    """Whether it computes one by itself."""
    chooses_class: bool = False
    """Whether it chooses among classes of its own, by the name of an implementation."""
    declares_causal: bool = False
    """Whether it says that it is causal, where it may be."""

    @property
    def has_attention(self) -> bool:
        return self.uses_interface or self.computes_attention or self.chooses_class


def uses_attention_interface(kind: type) -> bool:
    """Whether a kind of layer looks its attention up by name."""
    found = [_parse_module(base.__module__).get(base.__name__) for base in kind.__mro__]
    return not issubclass(kind, PreTrainedModel) and any(
        part and part.uses_interface for part in found
    )


def unsupported_reason(kind: type) -> str | None:
    """Why a kind of model would not attend by a name of `IMPLEMENTATION_NAMES`; None: it does.

    Models inside of it are not looked at: each is asked for itself when it is built.
    """
    found = _collect_definitions(kind)
    alone = [
        name for name, part in found.items() if part.computes_attention and not part.uses_interface
    ]
    chooses = any(part.chooses_class for part in found.values())
    # Where a part asks, and the others take torch's boolean masks, they take ours.
    some = kind._supports_sdpa and any(part.uses_interface for part in found.values())  # type: ignore[attr-defined]
    if not chooses and (some or not alone):
        return None
    return (
        f"{kind.__name__} computes attention by itself ({', '.join(alone) or 'in classes'}), "
        "not through transformers' AttentionInterface"
    )


@dataclass(frozen=True)
class ModelFamily:
    """The models of one config."""

    uses_interface: bool = True
    """Whether any of them takes its attention by name."""
    takes_boolean_masks: bool = False
    """Whether all their parts take boolean masks."""
    declares_causal: bool = False
    """Whether their layers say that they are causal, where a mask is left out for that reason."""


def get_family(config: Any) -> ModelFamily:
    """What is known of the models of a config."""
    kind = type(config)
    if kind not in _FAMILY_BY_CONFIG and not torch.compiler.is_compiling():
        _FAMILY_BY_CONFIG[kind] = _build_family(kind)
    return _FAMILY_BY_CONFIG.get(kind, ModelFamily())


def register_model(model: Any) -> None:
    """Have a model known as one of its config's."""
    kind = type(model.config)
    members = _MODELS_BY_CONFIG.setdefault(kind, set())
    if type(model) not in members:
        members.add(type(model))
        _FAMILY_BY_CONFIG[kind] = _build_family(kind)


def _build_family(kind: type) -> ModelFamily:
    beside = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
    found = {x for x in (vars(beside).values() if beside else ()) if _is_model(x)}
    found = {x for x in found if x.config_class is kind} | _MODELS_BY_CONFIG.get(kind, set())
    parts = {model: _collect_definitions(model).values() for model in found}
    refused = [
        unsupported_reason(model) for model, x in parts.items() if any(y.has_attention for y in x)
    ]
    return ModelFamily(
        uses_interface=None in refused or not refused,
        takes_boolean_masks=refused.count(None) == len(refused) > 0
        and all(x._supports_sdpa for x in found),
        declares_causal=all(
            part.declares_causal for x in parts.values() for part in x if part.uses_interface
        ),
    )


def make_mask(
    *args: Any,
    config: Any,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Any:
    """A model's mask: of booleans, or of numbers where one of its parts adds it to its scores.

    None stands for a causal one alone: where all is seen, a mask of no size says so.
    """
    known = get_family(config)
    if not known.uses_interface:
        raise ArgumentError(
            f"{type(config).__name__}: these models compute attention by themselves, not through "
            'transformers\' AttentionInterface: set their attn_implementation to "eager"'
        )
    if not known.takes_boolean_masks:
        return eager_mask(*args, **options)
    found = sdpa_mask(
        *args,
        allow_is_causal_skip=allow_is_causal_skip and known.declares_causal,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **options,
    )
    if found is None and allow_is_bidirectional_skip:
        shape = (options["batch_size"], 1, options["q_length"], options["kv_length"])
        found = torch.ones((), dtype=torch.bool, device=options["device"]).expand(shape)
        found.is_full = True
    elif found is not None and found.is_cpu and not torch.compiler.is_compiling():
        found.span = _find_key_span(found)
    return found


def _find_key_span(mask: Any) -> tuple[int, int] | None:
    """The first key that is seen and how many are, where every query sees the same in a row."""
    # A token that meets a cache of fixed length: once for all its layers.
    if mask.shape[-2] != 1 or not mask.shape[0]:
        return None
    rows = mask.numpy()[:, 0, 0]
    at = np.flatnonzero(rows[0])
    if not len(at) or at[-1] - at[0] >= len(at) or (len(rows) > 1 and (rows != rows[0]).any()):
        return None
    return int(at[0]), len(at)


def allow_implementation(name: str) -> None:
    """Let models be built with `name`, those alone that attend by it."""
    if not IMPLEMENTATION_NAMES:
        # transformers lets every model have every name.
        PreTrainedModel.get_correct_attn_implementation = _wrap_with_check(
            PreTrainedModel.get_correct_attn_implementation
        )
    IMPLEMENTATION_NAMES.add(name)


def _wrap_with_check(theirs: Any) -> Any:
    @wraps(theirs)
    def get_correct_attn_implementation(self: Any, *args: Any, **options: Any) -> Any:
        found = theirs(self, *args, **options)
        if found in IMPLEMENTATION_NAMES:
            register_model(self)
            reason = unsupported_reason(type(self))
            if reason:
                raise ArgumentError(
                    f'{reason}, so attn_implementation={found!r} cannot reach it: use "eager". '
                    "Inside of a larger model, name it by its config: "
                    f'attn_implementation={{"": {found!r}, "vision_config": "eager"}}'
                )
        return found

    return get_correct_attn_implementation


def _is_model(x: Any) -> bool:
    return inspect.isclass(x) and issubclass(x, PreTrainedModel)


@memoize("transformers.model_definitions")
def _collect_definitions(kind: type) -> dict[str, Definition]:
    """The parts of a kind of model, by name."""
    found: dict[str, Definition] = {}
    # A class that builds nothing may name what others build.
    builders = [x for x in kind.__mro__ if _is_model(x) and "__init__" in vars(x)]
    waiting = [(x.__module__, x.__name__) for x in builders]
    while waiting:
        module, name = waiting.pop()
        part = _parse_module(module).get(name)
        if part is None or name in found:
            continue
        found[name] = part
        scope = vars(sys.modules[module])
        for name in sorted(part.names & scope.keys()):
            thing = scope[name]
            if not inspect.isclass(thing):
                waiting.append((module, name))
            elif issubclass(thing, torch.nn.Module) and not _is_model(thing):
                waiting.append((thing.__module__, name))
    return found


@memoize("transformers.parsed_modules")
def _parse_module(module: str) -> dict[str, Definition]:
    if module.partition(".")[0] in ("builtins", "torch") or module == PreTrainedModel.__module__:
        return {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        names = frozenset(re.findall(r"\w+", text))
        if isinstance(node, ast.ClassDef):
            found[node.name] = Definition(
                names,
                uses_interface="ALL_ATTENTION_FUNCTIONS" in names,
                computes_attention=bool(
                    ATTENTION_PATTERN.search(node.name)
                    and all(x.search(text) for x in FORMULA_PATTERNS)
                ),
                chooses_class=bool(CHOICE_PATTERN.search(text)),
                declares_causal="is_causal" in names and "self.is_causal = False" not in text,
            )
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = Definition(names)
        elif isinstance(node, ast.Assign):
            found |= {x.id: Definition(names) for x in node.targets if isinstance(x, ast.Name)}
    return found
