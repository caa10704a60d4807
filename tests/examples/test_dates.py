"""The dates are right, and both models read, decode and learn as they should."""

import random
import re
import sys
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from examples import dates  # noqa: E402

pytestmark = pytest.mark.sample_of_module(8)

BOTH = pytest.mark.parametrize("name", list(dates.MODELS))
TEXTS = ["3 Mar 2021", "Wednesday, 3rd of September 2021", "1999/12/31"]


def build_small_model(name: str) -> dates.Model:
    torch.manual_seed(0)
    return dates.MODELS[name](32)


@pytest.mark.parametrize(
    ("day", "form", "text"),
    [
        (date(2021, 3, 3), "{month} {d}, {y}", "March 3, 2021"),
        (date(2021, 3, 3), "{weekday}, {d}{th} of {month} {y}", "Wednesday, 3rd of March 2021"),
        (date(2001, 9, 11), "{d}{th} of {month} {y}", "11th of September 2001"),
        (date(1987, 5, 22), "{mon}. {d}{th}, '{yy}", "May. 22nd, '87"),
        (date(2049, 12, 31), "{mm}/{dd}/{yy}", "12/31/49"),
        (date(1950, 1, 1), "{day} {mon} {d} {y}", "Sun Jan 1 1950"),
    ],
)
def test_a_date_is_written(day: date, form: str, text: str) -> None:
    assert dates.write(day, form) == text


def test_a_text_means_one_day() -> None:
    meaning: dict[str, date] = {}
    for year in (1950, 2000, 2049):
        for i in range(365):
            day = date(year, 1, 1) + timedelta(i)
            for form in dates.forms(day):
                assert meaning.setdefault(dates.write(day, form), day) == day
    assert len(meaning) > 3 * 365 * len(dates.FORMS)


def test_pairs_read_back() -> None:
    """What Python's own parser makes of the text is the answer."""
    chance = random.Random(0)
    patterns = ["%B %d, %Y", "%d %B %Y", "%b %d, %Y", "%d %b %Y", "%Y/%m/%d", "%a, %d %b %Y"]
    read = 0
    for day in dates.split().tested:
        text, answer = dates.pair(day, chance)
        plain = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
        for pattern in patterns:
            try:
                result = datetime.strptime(plain, pattern)
            except ValueError:
                continue
            assert result.date().isoformat() == answer
            read += 1
    assert read > 500


def test_no_day_is_both_learned_and_asked() -> None:
    learned, watched, tested = map(set, dates.split())
    assert (len(watched), len(tested)) == (500, 2000)
    assert len(learned | watched | tested) == len(learned) + 2500 == 36_525


def test_letters_are_numbers() -> None:
    for day in dates.split().watched:
        for form in dates.forms(day):
            assert (dates.read([dates.write(day, form)]) > 0).all()
    assert dates.spell(dates.read(["2021-03-03"], dates.SIGNS)) == ["2021-03-03"]
    assert dates.shifted(torch.tensor([[4, 5, 6]])).tolist() == [[0, 4, 5]]


@BOTH
def test_decoding_is_the_full_pass_letter_by_letter(name: str) -> None:
    model, source = build_small_model(name).eval(), dates.read(TEXTS)
    with torch.inference_mode():
        result = model.translate(source)
        assert result.shape == (3, dates.LENGTH)
        assert torch.equal(model(source, result).argmax(-1), result)


@BOTH
def test_neighbours_in_a_batch_do_not_count(name: str) -> None:
    model, target = build_small_model(name).eval(), dates.read(["2021-03-03"], dates.SIGNS)
    with torch.no_grad():
        alone = model(dates.read(TEXTS[:1]), target)
        other = model(dates.read(TEXTS), target.expand(3, -1))
    torch.testing.assert_close(alone[0], other[0], atol=1e-5, rtol=1e-5)


@BOTH
def test_an_alignment_is_made_of_weights(name: str) -> None:
    source, target = dates.read(TEXTS), dates.read(["2021-03-03"], dates.SIGNS).expand(3, -1)
    with torch.no_grad():
        alpha = build_small_model(name).alignment(source, target)
    assert alpha.shape == (3, dates.LENGTH, source.shape[1])
    torch.testing.assert_close(alpha.sum(-1), torch.ones(3, dates.LENGTH))
    assert not alpha[(source == 0)[:, None].expand_as(alpha)].any()


@pytest.mark.sample(1)
@BOTH
def test_a_few_days_are_learned_by_heart(name: str) -> None:
    days = [date(2021, 3, 3), date(1987, 11, 25), date(2049, 6, 30)]
    result = dates.learn(
        lambda: build_small_model(name), dates.Split(days, days, days), 60, 24, 1e-2
    )
    assert result.curve[0].loss > 1.5
    assert result.curve[-1].loss < 0.05
    assert result.curve[-1].right == 1.0
    again = dates.learn(lambda: build_small_model(name), dates.Split(days, days, days), 2, 24, 1e-2)
    same = dates.learn(lambda: build_small_model(name), dates.Split(days, days, days), 2, 24, 1e-2)
    assert again.curve == same.curve


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dates.py", *args])
    monkeypatch.setattr(dates, "TESTED", 20)
    monkeypatch.setattr(dates, "WATCHED", 10)
    return dates.main()


def test_it_tells_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--steps", "2", "--out", str(tmp_path / "a" / "b")) == 0
    output = capsys.readouterr().out
    assert "20 others asked" in output
    assert re.search(r"^Bahdanau +102,956 +\d+\.\d\d% +\d+$", output, re.M)
    assert re.search(r"^Transformer +176,588 +\d+\.\d\d% +\d+$", output, re.M)
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {
        "curves.png",
        "alignment.png",
    }


def test_stopped_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(dates, "right", interrupted)
    assert command(monkeypatch, "--steps", "1", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert not list(tmp_path.iterdir())
