"""The text is shared out, the three kinds of heads are what they say, and each of them learns."""

import math
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from examples import letters  # noqa: E402
from qkv import nn  # noqa: E402

pytestmark = pytest.mark.sample_of_module(5)

EACH = pytest.mark.parametrize("kind", list(letters.KINDS))
TEXT = letters.text()


def build_small_model(kind: str) -> letters.Model:
    torch.manual_seed(0)
    return letters.Model(len(TEXT.letters), kind)


def spell(numbers: torch.Tensor) -> str:
    return "".join(TEXT.letters[i] for i in numbers.tolist())


def test_no_line_is_both_learned_and_asked() -> None:
    learned, watched, held = (set(spell(part).splitlines()) for part in TEXT[1:4])
    assert (len(learned), len(watched), len(held)) == (240, 30, 30)
    assert len(learned | watched | held) == 300
    assert TEXT.line.rstrip("\n") in held


def test_bits_of_a_model_that_knows_nothing() -> None:
    model = build_small_model("dot")
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    assert letters.bits(model, TEXT.held) == pytest.approx(math.log2(len(TEXT.letters)), rel=1e-5)


def test_even_weights_attend_to_every_letter_so_far() -> None:
    model = build_small_model("dot")
    for block in model.blocks:
        torch.nn.init.zeros_(block.self_attn.in_proj_weight)
    assert letters.attended(model, TEXT.held) == pytest.approx((letters.LENGTH + 1) / 2, rel=1e-4)


@EACH
def test_weights_of_heads(kind: str) -> None:
    with torch.no_grad():
        alpha = build_small_model(kind).weights(TEXT.held[None, :40])
    assert alpha.shape == (1, letters.LAYERS, letters.HEADS, 40, 40)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(alpha.shape[:-1]))
    assert not alpha.triu(1).any()
    seen = alpha[..., torch.ones(40, 40, dtype=torch.bool).tril()]
    assert bool((seen == 0).any()) is (kind == "entmax15")


@EACH
def test_writing_with_a_cache_is_the_full_pass(kind: str) -> None:
    model, x = build_small_model(kind).eval(), TEXT.held[None, :20]
    caches = [(nn.Cache(), nn.Cache()) for _ in model.blocks]
    with torch.inference_mode():
        steps = torch.cat(
            [model(x[:, :5], caches)] + [model(x[:, i : i + 1], caches) for i in range(5, 20)], 1
        )
        torch.testing.assert_close(steps, model(x), atol=1e-5, rtol=1e-5)
        assert model.write(x[0, :5], 7)[:5].tolist() == x[0, :5].tolist()
        assert torch.equal(model.write(x[0, :5], 7), model.write(x[0, :5], 7))


def test_the_kinds_are_of_one_size() -> None:
    dot, additive, entmax = (
        sum(weight.numel() for weight in build_small_model(kind).parameters())
        for kind in letters.KINDS
    )
    assert dot == entmax
    assert dot < additive < 1.01 * dot


@pytest.mark.sample(1)
@EACH
def test_each_kind_learns(kind: str) -> None:
    result = letters.learn(kind, TEXT, 20)
    assert result.curve[0].bits > 5.5
    assert result.curve[-1].bits < 4.6
    assert letters.learn(kind, TEXT, 1).curve == letters.learn(kind, TEXT, 1).curve


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["letters.py", *args])
    return letters.main()


def test_it_tells_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--steps", "1", "--out", str(tmp_path)) == 0
    output = capsys.readouterr().out
    for kind in letters.KINDS:
        assert re.search(rf"^{kind} +\d+,\d+ +\d\.\d+ +\d+\.\d +\d+$", output, re.M)
        assert f"{kind} writes:\n    The " in output
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "heads.png"}


def test_stopped_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(letters, "bits", interrupted)
    assert command(monkeypatch, "--steps", "1", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert not list(tmp_path.iterdir())
