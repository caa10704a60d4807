"""A sentence in the bundled model MiniLM: X, Q, K, V and the weights of every head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkv.errors import ArgumentError
from qkv.page.heads import heads_view

MAX_TOKENS = 128
"""Longest sentence, in tokens."""

MAX_CHARACTERS = 10_000
"""Longest sentence, in characters."""


def sentence(text: str, *, model: bool = False) -> dict[str, Any]:
    """Return the view of a sentence; `model` adds the activations of MiniLM.

    Without them the page uses its own example heads.

    >>> sentence("I like NLP, a lot!")
    {'view': 'sentence', 'title': 'Sentence', 'data': {'text': 'I like NLP, a lot!'}}
    """
    data: dict[str, Any] = {"text": text}
    if model:
        data["read"] = read_sentence(text)
    return {"view": "sentence", "title": "Sentence", "data": data}


def read_text_call(args: Mapping[str, Any], _: Any) -> dict[str, Any]:
    """Return the activations of MiniLM for the page's text."""
    return read_sentence(str(args["text"]))


def read_heads_call(args: Mapping[str, Any], _: Any) -> dict[str, Any]:
    """Return the data of the view of a model: the heads of MiniLM for the page's text."""
    read = read_sentence(str(args["text"]))
    names = [f"layer {i}" for i in range(len(read["weights"]))]
    return heads_view(np.asarray(read["weights"]), names, labels=read["tokens"])["data"]  # type: ignore[no-any-return]


def read_sentence(text: str) -> dict[str, Any]:
    """Return the activations of MiniLM for a text.

    They are x (layers, n, d), q, k and v (layers, heads, n, d_Q), and weights (layers, heads, n,
    n). `tokens` are pieces of `words`; `groups` has the number of the word of each token.
    """
    if len(text) > MAX_CHARACTERS:
        raise ArgumentError(
            f"the sentence has {len(text):,} characters, and at most {MAX_CHARACTERS:,} are "
            "allowed: shorten it"
        )
    model, tokenizer = load_minilm()
    import torch

    from qkv.transformers import capture
    from qkv.transformers.captured_attention import group_tokens

    encoded = tokenizer(text, return_tensors="pt")
    ids = encoded["input_ids"][0].tolist()
    if len(ids) > MAX_TOKENS:
        raise ArgumentError(
            f"the sentence has {len(ids)} tokens, and at most {MAX_TOKENS} are allowed: shorten it"
        )
    heads, recorder = model.config.num_attention_heads, _ProjectionRecorder()
    with torch.no_grad(), recorder.record_projections(model), capture(model) as captured:
        model(**encoded)
    words, groups = group_tokens(tokenizer, ids)
    return {
        "model": "all-MiniLM-L6-v2",
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "words": words,
        "groups": groups,
        "x": np.stack(recorder.inputs),
        **{name[0]: _split_heads(recorder.outputs[name], heads) for name in recorder.NAMES},
        "weights": captured.weights,
        "first": find_farthest_head(captured.weights),
    }


def find_farthest_head(alpha: np.ndarray) -> int:
    """Return the head with the largest weights between words that are not neighbours.

    α (layers, heads, n, n) → layer · heads + head. The special tokens at both ends do not count.
    """
    position = np.arange(alpha.shape[-1])
    far = abs(position[:, None] - position) > 1
    far[[0, -1]] = far[:, [0, -1]] = False
    return int((alpha * far).max(-1).sum(-1).argmax())


class _ProjectionRecorder:
    """Record the inputs and outputs of the projections of each layer."""

    NAMES = ("query", "key", "value")

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: dict[str, list[Any]] = {name: [] for name in self.NAMES}

    @contextlib.contextmanager
    def record_projections(self, model: Any) -> Iterator[None]:
        def make_hook(name: str) -> Any:
            def hook(_: Any, inputs: tuple[Any, ...], out: Any) -> None:
                if name == "query":
                    self.inputs.append(inputs[0][0].numpy())
                self.outputs[name].append(out[0].numpy())

            return hook

        with contextlib.ExitStack() as hooks:
            for path, module in model.named_modules():
                name = path.rpartition(".")[2]
                if name in self.NAMES:
                    hooks.enter_context(module.register_forward_hook(make_hook(name)))
            yield


def _split_heads(layers: list[Any], heads: int) -> Any:
    """Reshape (layers, n, heads · d) to (layers, heads, n, d)."""
    stacked = np.stack(layers)
    return stacked.reshape(*stacked.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def load_minilm() -> tuple[Any, Any]:
    """Return MiniLM and its tokenizer; load them without a progress bar."""
    from qkv.database.encoders import Sentences

    with contextlib.ExitStack() as after:
        with contextlib.suppress(ImportError):  # loading the model reports the missing package
            from transformers.utils import logging

            logging.disable_progress_bar()
            after.callback(logging.enable_progress_bar)
        model = Sentences().load_model()
    return model[0].auto_model, model.tokenizer
