"""`qkv weights`: a heatmap of the self-attention of a sentence."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from qkv.cli import files, options, terminal
from qkv.cli.command import Result
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from rich.text import Text

    Weights: TypeAlias = "np.ndarray[Any, Any]"
    from qkv.transformers.captured_attention import CapturedAttention

MAX_WORDS = 200
DEFAULT_TEMPERATURE = 0.3
MODEL_NAME = "all-MiniLM-L6-v2"
MODEL_EXAMPLE = "When he saw his owner, the dog was happy, so he wagged his tail"
WORDS_EXAMPLE = "Paris is to France what Rome is to Italy"
"""Sentences that show something: a head that resolves pronouns, and words with similar vectors."""
PALE_RGB, DEEP_RGB = (255, 245, 240), (165, 15, 21)
SHADES = " ░▒▓█"
MAX_WORD_CHARACTERS, MAX_LABEL_CHARACTERS = 24, 14
NUMBER_WIDTH, BARE_WIDTH = 4, 2
"""The widths of a heatmap cell in characters: with a number, and with a colour only."""


def weights(
    sentence: Annotated[
        list[str] | None,
        options.make_argument(
            "[SENTENCE]", "The sentence, with or without quotes; by default an example."
        ),
    ] = None,
    model: Annotated[
        bool,
        options.make_option(
            "--model",
            "Show a head of the bundled MiniLM transformer: the default if it is installed.",
        ),
    ] = False,
    head: Annotated[
        str | None,
        options.make_option(
            "LAYER.HEAD",
            "Choose one of the 6 × 12 heads; by default the one with the largest weights between "
            "words that are not neighbours.",
        ),
    ] = None,
    words: Annotated[
        bool,
        options.make_option("--words", "Compare word vectors instead, without a model."),
    ] = False,
    temperature: Annotated[
        float,
        options.make_option(
            "NUMBER",
            "With word vectors: divide the scores by this number. A lower number gives sharper "
            "weights.",
        ),
    ] = DEFAULT_TEMPERATURE,
    others: Annotated[
        bool,
        options.make_option(
            "--others", "With word vectors: mask the attention of each word to itself."
        ),
    ] = False,
    causal: Annotated[
        bool,
        options.make_option(
            "--causal", "With word vectors: mask the attention of each word to the words after it."
        ),
    ] = False,
    png: Annotated[
        Path | None,
        options.make_option("FILE", "Also plot the weights into this file (.png, .svg or .pdf)."),
    ] = None,
    page: Annotated[
        Path | None, options.make_option("--html FILE", "Also write an HTML page to this file.")
    ] = None,
) -> Result:
    """Show how much each word of SENTENCE attends to each other word.

    Each word is a query and a key, and a row of weights sums to 1. By default the weights are those
    of one head of a small transformer, MiniLM (extra "sentences"). The files of --png and --html
    show all its heads, unless --head selects one.

    With --words, the vector of a word comes from the Words encoder. The score is the cosine divided
    by the temperature, and the softmax gives the weights. Words attend most to themselves; --others
    masks that. Without the model, --words --others is the default.
    """
    from qkv.database.encoders.sentences import has_bundled_model

    has_word_options = words or others or causal or temperature != DEFAULT_TEMPERATURE
    if has_word_options and (model or head):
        raise ArgumentError(
            "--model and --head do not use --words, --temperature, --others and --causal: leave "
            "them out"
        )
    needs_model = bool(model or head) or (not has_word_options and has_bundled_model())
    others = others or not (needs_model or has_word_options)
    text = " ".join(sentence or [MODEL_EXAMPLE if needs_model else WORDS_EXAMPLE])
    tokens = split_words(text)
    if not tokens:
        raise ArgumentError(f"the sentence {text!r} has no words")
    if len(tokens) > MAX_WORDS:
        raise ArgumentError(f"the sentence has {len(tokens)} words; the limit is {MAX_WORDS}")
    captured: CapturedAttention | None = None
    if needs_model:
        captured, layer, at = capture_model_weights(
            text, None if head is None else parse_head(head)
        )
        tokens, alpha = captured.labels or [], captured.weights[layer, at]
        title = f"layer {layer}, head {at} of {MODEL_NAME}"
        source: dict[str, Any] = {"model": MODEL_NAME, "layer": layer, "head": at}
    else:
        alpha = compute_weights(tokens, temperature, others=others, causal=causal)
        title = "cosines of word vectors" + ", each word's own weight masked" * others
        source = {"model": None}
    data = {"words": tokens, **source, "weights": alpha.tolist()}
    all_heads = None if head else captured
    written = []
    if png is not None:
        bare: dict[str, Any] = {"xlabel": "", "ylabel": "", "figsize": (2.6, 2.6)}
        files.write_figure(
            png, _build_figure(tokens, alpha) if all_heads is None else all_heads.plot(**bare)
        )
        written.append(str(png))
    if page is not None:
        html = _build_page(tokens, alpha) if all_heads is None else all_heads.to_html()
        files.write_file(page, html.encode())
        written.append(str(page))

    def print_heatmap() -> None:
        _print_heatmap(tokens, alpha, written, title)
        if not (needs_model or has_word_options):
            terminal.print_note('pip install "qkv[sentences]" to see the heads of a model')

    return Result({**data, "written": written}, print_heatmap)


def _build_figure(words: list[str], alpha: Weights) -> Figure:
    from qkv.plot import heatmaps

    side = min(max(0.42 * len(words) + 1.2, 3.0), 14.0)
    ticks: dict[str, Any] = {"xticks": words, "yticks": words}
    return heatmaps(alpha, figsize=(side, side), annotate=True, **ticks)


def split_words(text: str) -> list[str]:
    """Split a text into words and punctuation marks. Combining marks stay with their letters.

    >>> split_words("the dog's tail, हिन्दी")
    ['the', "dog's", 'tail', ',', 'हिन्दी']
    """
    import unicodedata

    marks = {c for c in text if unicodedata.category(c)[0] == "M" or c in "\u200c\u200d"}
    own, tones = "".join(map(re.escape, sorted(marks))), "\U0001f3fb-\U0001f3ff"
    word, sign = rf"\w[\w{own}]*", rf"[^\w\s](?:\u200d[^\w\s]|[{own}{tones}])*"
    return re.findall(rf"{word}(?:['’-]{word})*|{sign}", text)


def compute_weights(words: list[str], temperature: float, *, others: bool, causal: bool) -> Weights:
    """Return softmax(cos(wᵢ, wⱼ) / τ) over the words, (words, words); row i is word i's weights."""
    import numpy as np

    import qkv
    from qkv.database.encoders import Words
    from qkv.scores import Cosine

    score = Cosine(temperature)
    vectors = Words().encode(words)
    mask = np.ones((len(words), len(words)), dtype=bool)
    if causal:
        mask &= np.tri(len(words), dtype=bool)
    if others:
        mask &= ~np.eye(len(words), dtype=bool)
    return np.asarray(qkv.weights(vectors, vectors, score=score, mask=mask))


def _build_page(words: list[str], alpha: Weights) -> str:
    """Return the HTML page of one head."""
    from qkv.page.heads import heads_view
    from qkv.page.html_file import render_page

    return render_page([heads_view(alpha[None, None], ["words"], labels=words)], "Self-attention")


def _print_heatmap(words: list[str], alpha: Weights, written: list[str], title: str) -> None:
    """Print the heatmap and its title; on stderr, note the files that were written."""
    out = terminal.make_console()
    coloured = out.is_terminal and out.color_system is not None and not out.no_color
    for row in render_heatmap(words, alpha, out.width, coloured, terminal.is_ascii_only()):
        if out.is_terminal:
            out.print(row, no_wrap=True, crop=False, overflow="ignore")
        else:
            print(row.plain.rstrip())
    if title:
        terminal.print_line()
        terminal.print_line(title, "dim")
    for name in written:
        terminal.print_note(f"wrote {name}")


def render_heatmap(
    words: list[str], alpha: Weights, width: int, coloured: bool, ascii_only: bool
) -> list[Text]:
    """Return the lines of the heatmap. It is split into panels that fit `width` characters.

    Cells show percentages. If numbers do not fit, cells show only colours or shades.
    """
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    words = [
        w if cell_len(w) <= MAX_WORD_CHARACTERS else w[: MAX_WORD_CHARACTERS // 2] + "…"
        for w in words
    ]
    longest = max(map(cell_len, words))
    margin = min(longest, MAX_LABEL_CHARACTERS, max(width // 3, 1)) + 1
    available = max(width - margin, BARE_WIDTH)
    # Shades show only a few different weights, so prefer numbers if there are no colours.
    numbers = len(words) * NUMBER_WIDTH <= available or (
        not coloured and available >= 2 * NUMBER_WIDTH
    )
    size = NUMBER_WIDTH if numbers else BARE_WIDTH
    if numbers and len(words) * (longest + 1) <= available:
        size = max(longest + 1, NUMBER_WIDTH)
    panels = math.ceil(len(words) / max(available // size, 1))
    per_panel = math.ceil(len(words) / panels)
    top = float(alpha.max()) or 1.0
    lines = []
    for start in range(0, len(words), per_panel):
        columns = range(start, min(start + per_panel, len(words)))
        if start:
            lines.append(Text())
        lines += _render_headings([words[j] for j in columns], margin, size)
        for i, word in enumerate(words):
            text = Text(set_cell_size(word, margin - 1) + " ")
            for j in columns:
                weight = float(alpha[i, j])
                text.append(
                    *_render_cell(weight, weight / top, numbers, size, coloured, ascii_only)
                )
            lines.append(text)
    return lines


def _render_headings(words: list[str], margin: int, size: int) -> list[Text]:
    """Return the lines with the words above their columns. Long words are written downwards."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    if all(cell_len(word) < size for word in words):
        return [
            Text(" " * margin + "".join(" " * (size - cell_len(w) - 1) + w + " " for w in words))
        ]
    height = max(map(len, words))
    padded = [word.rjust(height) for word in words]

    def heading_cell(letter: str) -> str:
        right = " " * (size - 1 - cell_len(letter) - bool(size > BARE_WIDTH))
        return set_cell_size(f"{right} {letter}" if cell_len(letter) < size else letter, size)

    return [
        Text(" " * margin + "".join(heading_cell(word[k]) for word in padded))
        for k in range(height)
    ]


def _render_cell(
    weight: float, share: float, numbers: bool, size: int, coloured: bool, ascii_only: bool
) -> tuple[str, str]:
    """Return the text and the style of one cell; `share` is its weight over the largest weight."""
    if numbers:
        text = f"{100 * weight:.0f} ".rjust(size)
    elif coloured:
        text = " " * size
    else:
        shades = " .:*#" if ascii_only else SHADES
        text = shades[round(share * (len(shades) - 1))] * size
    if not coloured:
        return text, ""
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (round(p + share * (d - p)) for p, d in zip(PALE_RGB, DEEP_RGB, strict=True))
    ink = "#ffffff" if share > 0.5 else "#333333"
    return text, f"{ink} on #{red:02x}{green:02x}{blue:02x}"


MODEL_LAYERS, MODEL_HEADS = 6, 12


def parse_head(text: str) -> tuple[int, int]:
    """Parse LAYER.HEAD into the two numbers.

    >>> parse_head("5.11")
    (5, 11)
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None or int(match[1]) >= MODEL_LAYERS or int(match[2]) >= MODEL_HEADS:
        raise ArgumentError(
            f"--head: expected LAYER.HEAD, layers 0 to {MODEL_LAYERS - 1} and heads 0 to "
            f"{MODEL_HEADS - 1}, not {text!r}"
        )
    return int(match[1]), int(match[2])


def capture_model_weights(
    sentence: str, chosen: tuple[int, int] | None
) -> tuple[CapturedAttention, int, int]:
    """Run MiniLM on a sentence; return its weights between words, a layer and a head.

    `chosen` is the layer and the head. By default, `find_farthest_head` chooses them.
    """
    from qkv.page.sentence import find_farthest_head, load_minilm

    reader, tokenizer = load_minilm()
    from qkv.transformers import capture

    with capture(reader) as captured:
        reader(**tokenizer(sentence, return_tensors="pt"))
    by_word = captured.words(tokenizer, sentence)
    return by_word, *(chosen or divmod(find_farthest_head(by_word.weights), MODEL_HEADS))
