"""A sentence as the bundled MiniLM reads it: X, Q, K, V and the weights of every head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkv.errors import ArgumentError
from qkv.page.heads import heads_view

MAX_TOKENS = 128
"""Tokens of a sentence that is read."""

MAX_CHARACTERS = 10_000
"""Of a sentence that is tokenized."""


def sentence(text: str, *, model: bool = False) -> dict[str, Any]:
    """The view of a sentence; with `read_heads_call`, as MiniLM reads it, else by the page's own
    heads.

    >>> sentence("I like NLP, a lot!")
    {'view': 'sentence', 'title': 'Sentence', 'data': {'text': 'I like NLP, a lot!'}}
    """
    data: dict[str, Any] = {"text": text}
    if model:
        data["read"] = read_sentence(text)
    return {"view": "sentence", "title": "Sentence", "data": data}


def read_text_call(args: Mapping[str, Any], _: Any) -> dict[str, Any]:
    """`read_sentence` of the page's text."""
    return read_sentence(str(args["text"]))


def read_heads_call(args: Mapping[str, Any], _: Any) -> dict[str, Any]:
    """The heads of MiniLM while it reads the page's text, as the view of a model has them."""
    found = read_sentence(str(args["text"]))
    names = [f"layer {i}" for i in range(len(found["weights"]))]
    return heads_view(np.asarray(found["weights"]), names, labels=found["tokens"])["data"]  # type: ignore[no-any-return]


def read_sentence(text: str) -> dict[str, Any]:
    """x (layers, n, d), q, k and v (layers, heads, n, d_Q), weights (layers, heads, n, n).

    `tokens` are pieces of `words`: `groups` has for each the number of its word.
    """
    if len(text) > MAX_CHARACTERS:
        raise ArgumentError(
            f"the sentence has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read: "
            "give a shorter one"
        )
    reader, tokenizer = load_minilm()
    import torch

    from qkv.transformers import capture
    from qkv.transformers.captured_attention import group_tokens

    found = tokenizer(text, return_tensors="pt")
    ids = found["input_ids"][0].tolist()
    if len(ids) > MAX_TOKENS:
        raise ArgumentError(f"the sentence has {len(ids)} tokens; at most {MAX_TOKENS} are read")
    heads, kept = reader.config.num_attention_heads, _ProjectionRecorder()
    with torch.no_grad(), kept.record_projections(reader), capture(reader) as seen:
        reader(**found)
    words, groups = group_tokens(tokenizer, ids)
    return {
        "model": "all-MiniLM-L6-v2",
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "words": words,
        "groups": groups,
        "x": np.stack(kept.inputs),
        **{name[0]: _split_heads(kept.outputs[name], heads) for name in _ProjectionRecorder.NAMES},
        "weights": seen.weights,
        "first": find_farthest_head(seen.weights),
    }


def find_farthest_head(alpha: np.ndarray) -> int:
    """The head whose words look most at one word that is no neighbour, and no mark at an end.

    α (layers, heads, n, n) → layer · heads + head.
    """
    at = np.arange(alpha.shape[-1])
    far = abs(at[:, None] - at) > 1
    far[[0, -1]] = far[:, [0, -1]] = False
    return int((alpha * far).max(-1).sum(-1).argmax())


class _ProjectionRecorder:
    """What goes into the projections of each layer, and what comes out."""

    NAMES = ("query", "key", "value")

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: dict[str, list[Any]] = {name: [] for name in self.NAMES}

    @contextlib.contextmanager
    def record_projections(self, model: Any) -> Iterator[None]:
        def make_hook(name: str) -> Any:
            def hook(_: Any, given: tuple[Any, ...], out: Any) -> None:
                if name == "query":
                    self.inputs.append(given[0][0].numpy())
                self.outputs[name].append(out[0].numpy())

            return hook

        with contextlib.ExitStack() as hooks:
            for path, module in model.named_modules():
                name = path.rpartition(".")[2]
                if name in self.NAMES:
                    hooks.enter_context(module.register_forward_hook(make_hook(name)))
            yield


def _split_heads(layers: list[Any], heads: int) -> Any:
    """(layers, n, heads · d) as (layers, heads, n, d)."""
    whole = np.stack(layers)
    return whole.reshape(*whole.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def load_minilm() -> tuple[Any, Any]:
    """The model that reads, and its tokenizer; without the bars that others draw for a moment's
    work."""
    from qkv.database.encoders import Sentences

    with contextlib.ExitStack() as after:
        with contextlib.suppress(ImportError):  # whoever needs it says so
            from transformers.utils import logging

            logging.disable_progress_bar()
            after.callback(logging.enable_progress_bar)
        model = Sentences().load_model()
    return model[0].auto_model, model.tokenizer
