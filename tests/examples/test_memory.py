"""The perplexity falls as the memory grows, and what is forgotten leaves no trace."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from examples import memory  # noqa: E402

pytestmark = pytest.mark.sample_of_module(3)


def test_it_learns_without_training_and_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "ASKED", 150)
    none, few, more, all_of_them, before, learned, after = memory.run(tmp_path)
    assert none > few > more > all_of_them > 1
    assert learned < before / 3
    assert after == before
    assert capsys.readouterr().out.count("\n") == 7
    with qkv.open(tmp_path / "books.qkv") as kept:
        assert len(kept) > 30_000


def test_what_stands_before_each_letter() -> None:
    x = torch.arange(1, 15)
    assert memory.windows(x)[0].tolist() == [0] * memory.SEEN
    assert memory.windows(x)[-1].tolist() == list(range(4, 14))


def test_chances_sum_to_one(tmp_path: Path) -> None:
    text = memory.text()
    network = memory.Network(len(text.letters))
    model = memory.Model(network, text.letters, tmp_path / "some.qkv")
    for _ in range(2):  # without rows, and with some
        sums = model.chances(text.held[:20]).sum(-1)
        torch.testing.assert_close(sums, torch.ones(20))
        model.add(text.held[:50])
    model.database.close()


def test_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "learn", interrupted)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--out", str(tmp_path)])
    assert memory.main() == 130
