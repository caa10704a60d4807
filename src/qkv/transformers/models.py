"""Which models and layers look their attention up in transformers' AttentionInterface.

A model that computes attention itself would silently ignore `attn_implementation="qkv"`, so it is
refused. This module reads the models' source code, because no attribute answers the question. In
transformers 5.22, `_supports_attention_backend` is wrong for 130 of 637 model classes: it is unset
in 121 that use the interface (Bart, Marian) and set in 9 that do not (DetrForSegmentation). The
library's own check, `_can_set_attn_implementation`, reads the source too, but only searches
a whole file for one call: it is wrong for 18 classes, in files with both kinds of attention. And no
attribute of a layer says whether it uses the interface, which `capture` must know.
"""

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
"""The registered values of `attn_implementation` that select qkv."""

_FAMILY_BY_CONFIG: dict[type, ModelFamily] = create_table("transformers.model_families")
_MODELS_BY_CONFIG: dict[type, set[type]] = {}


@dataclass(frozen=True)
class SourceDefinition:
    """A class, function or assignment in the source of a model."""

    names: frozenset[str]
    """All identifiers in its source."""
    uses_interface: bool = False
    """Whether it looks its attention up in transformers' AttentionInterface."""
    computes_attention: bool = False
    """Whether it contains an attention formula."""
    chooses_class: bool = False
    """Whether it selects one of the model's own attention classes by `_attn_implementation`."""
    declares_causal: bool = False
    """Whether it sets `is_causal`, and not to a constant False."""

    @property
    def has_attention(self) -> bool:
        return self.uses_interface or self.computes_attention or self.chooses_class


def uses_attention_interface(kind: type) -> bool:
    """Return whether a class of layers looks its attention up in the AttentionInterface."""
    definitions = [_parse_module(base.__module__).get(base.__name__) for base in kind.__mro__]
    return not issubclass(kind, PreTrainedModel) and any(
        definition and definition.uses_interface for definition in definitions
    )


def model_refusal_reason(kind: type) -> str | None:
    """Return why a model class does not use the AttentionInterface; None if it does.

    Models inside this model are not checked here: each is checked when it is built.
    """
    definitions = _collect_definitions(kind)
    own = [name for name, x in definitions.items() if x.computes_attention and not x.uses_interface]
    chooses_class = any(x.chooses_class for x in definitions.values())
    # Layers with their own attention are accepted next to others that use the interface, if they
    # take sdpa's boolean masks: `make_mask` returns the same masks.
    is_mixed = kind._supports_sdpa and any(x.uses_interface for x in definitions.values())  # type: ignore[attr-defined]
    if not chooses_class and (is_mixed or not own):
        return None
    return (
        f"{kind.__name__} computes attention by itself ({', '.join(own) or 'in classes'}), "
        "not through transformers' AttentionInterface"
    )


@dataclass(frozen=True)
class ModelFamily:
    """What the model classes of one config class have in common."""

    uses_interface: bool = True
    """Whether any of them uses the AttentionInterface."""
    takes_boolean_masks: bool = False
    """Whether all their layers accept boolean masks."""
    declares_causal: bool = False
    """Whether their layers set `is_causal`, so that a causal mask may be omitted."""


def get_family(config: Any) -> ModelFamily:
    """Return what is known about the model classes of a config."""
    kind = type(config)
    if kind not in _FAMILY_BY_CONFIG and not torch.compiler.is_compiling():
        _FAMILY_BY_CONFIG[kind] = _build_family(kind)
    return _FAMILY_BY_CONFIG.get(kind, ModelFamily())


def register_model(model: Any) -> None:
    """Add the class of a model to the family of its config."""
    kind = type(model.config)
    members = _MODELS_BY_CONFIG.setdefault(kind, set())
    if type(model) not in members:
        members.add(type(model))
        _FAMILY_BY_CONFIG[kind] = _build_family(kind)


def _build_family(kind: type) -> ModelFamily:
    module = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
    models = {x for x in (vars(module).values() if module else ()) if _is_model(x)}
    models = {x for x in models if x.config_class is kind} | _MODELS_BY_CONFIG.get(kind, set())
    definitions = {model: _collect_definitions(model).values() for model in models}
    reasons = [
        model_refusal_reason(model)
        for model, parts in definitions.items()
        if any(x.has_attention for x in parts)
    ]
    return ModelFamily(
        uses_interface=None in reasons or not reasons,
        takes_boolean_masks=reasons.count(None) == len(reasons) > 0
        and all(x._supports_sdpa for x in models),
        declares_causal=all(
            x.declares_causal for parts in definitions.values() for x in parts if x.uses_interface
        ),
    )


def make_mask(
    *args: Any,
    config: Any,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Any:
    """Create a model's attention mask, as transformers' mask interface requires.

    The mask is boolean, or additive if one of the model's layers adds it to the scores. None
    stands for a plain causal mask. If every query sees every key, the mask is a broadcast scalar
    with the attribute `is_full`.
    """
    family = get_family(config)
    if not family.uses_interface:
        raise ArgumentError(
            f"{type(config).__name__}: these models compute attention by themselves, not through "
            'transformers\' AttentionInterface: set their attn_implementation to "eager"'
        )
    if not family.takes_boolean_masks:
        return eager_mask(*args, **options)
    mask = sdpa_mask(
        *args,
        allow_is_causal_skip=allow_is_causal_skip and family.declares_causal,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **options,
    )
    if mask is None and allow_is_bidirectional_skip:
        shape = (options["batch_size"], 1, options["q_length"], options["kv_length"])
        mask = torch.ones((), dtype=torch.bool, device=options["device"]).expand(shape)
        mask.is_full = True
    elif mask is not None and mask.is_cpu and not torch.compiler.is_compiling():
        mask.span = _find_key_span(mask)
    return mask


def _find_key_span(mask: Any) -> tuple[int, int] | None:
    """Return start and length of the visible keys, if one span serves all queries.

    This is the case of one new token and a cache of fixed length. The mask is created once for all
    layers, so the span is computed here and not per layer.
    """
    if mask.shape[-2] != 1 or not mask.shape[0]:
        return None
    rows = mask.numpy()[:, 0, 0]
    visible = np.flatnonzero(rows[0])
    if not len(visible) or visible[-1] - visible[0] >= len(visible):
        return None
    if len(rows) > 1 and (rows != rows[0]).any():
        return None
    return int(visible[0]), len(visible)


def allow_implementation(name: str) -> None:
    """Allow `attn_implementation=name` for the models that use the AttentionInterface."""
    if not IMPLEMENTATION_NAMES:
        # transformers itself accepts a registered name for every model.
        PreTrainedModel.get_correct_attn_implementation = _refuse_unsupported_models(
            PreTrainedModel.get_correct_attn_implementation
        )
    IMPLEMENTATION_NAMES.add(name)


def _refuse_unsupported_models(original: Any) -> Any:
    """Wrap PreTrainedModel's method to refuse models that do not use the AttentionInterface."""

    @wraps(original)
    def get_correct_attn_implementation(self: Any, *args: Any, **options: Any) -> Any:
        name = original(self, *args, **options)
        if name in IMPLEMENTATION_NAMES:
            register_model(self)
            reason = model_refusal_reason(type(self))
            if reason:
                raise ArgumentError(
                    f'{reason}, so attn_implementation={name!r} would have no effect: use "eager". '
                    "For a part of a larger model, set the implementation by sub-config, such as "
                    f'attn_implementation={{"": {name!r}, "vision_config": "eager"}}'
                )
        return name

    return get_correct_attn_implementation


def _is_model(x: Any) -> bool:
    return inspect.isclass(x) and issubclass(x, PreTrainedModel)


@memoize("transformers.model_definitions")
def _collect_definitions(kind: type) -> dict[str, SourceDefinition]:
    """Return all definitions that a model class refers to, directly or not, by name."""
    definitions: dict[str, SourceDefinition] = {}
    # Skip classes without __init__: they may mention layers that only other models build.
    builders = [x for x in kind.__mro__ if _is_model(x) and "__init__" in vars(x)]
    pending = [(x.__module__, x.__name__) for x in builders]
    while pending:
        module, name = pending.pop()
        definition = _parse_module(module).get(name)
        if definition is None or name in definitions:
            continue
        definitions[name] = definition
        scope = vars(sys.modules[module])
        for name in sorted(definition.names & scope.keys()):
            value = scope[name]
            if not inspect.isclass(value):
                pending.append((module, name))
            elif issubclass(value, torch.nn.Module) and not _is_model(value):
                pending.append((value.__module__, name))
    return definitions


@memoize("transformers.parsed_modules")
def _parse_module(module: str) -> dict[str, SourceDefinition]:
    """Return the top-level definitions in the source of a module, by name."""
    if module.partition(".")[0] in ("builtins", "torch") or module == PreTrainedModel.__module__:
        return {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    lines, definitions = source.splitlines(), {}
    for node in ast.parse(source).body:
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        names = frozenset(re.findall(r"\w+", text))
        if isinstance(node, ast.ClassDef):
            definitions[node.name] = SourceDefinition(
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
            definitions[node.name] = SourceDefinition(names)
        elif isinstance(node, ast.Assign):
            targets = (x for x in node.targets if isinstance(x, ast.Name))
            definitions |= {x.id: SourceDefinition(names) for x in targets}
    return definitions
