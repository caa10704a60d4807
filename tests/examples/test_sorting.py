"""The pointers learn to sort, a hard one gives back a number as it was, and Ctrl-C is obeyed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from examples import sorting  # noqa: E402

pytestmark = pytest.mark.sample_of_module(5)

PICTURES = {"training.png", "pointers.png", "counting.png"}


@pytest.fixture(scope="module")
def taught() -> tuple[sorting.Sorter, sorting.Training]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sorting.Sorter(4, "sigmoid")
    return model, sorting.train(model, 4, 150)


def test_sequences_repeat_by_seed() -> None:
    x = sorting.sequences(100, 10, seed=3)
    assert x.shape == (100, 10)
    assert float(x.min()) >= 0 and float(x.max()) < 1
    assert torch.equal(x, sorting.sequences(100, 10, seed=3))
    assert not torch.equal(x, sorting.sequences(100, 10, seed=2))


def test_learning_sorts(taught: tuple[sorting.Sorter, sorting.Training]) -> None:
    model, training = taught
    assert training.losses[0] > 1.2  # log 4 = 1.39 is what guessing costs
    assert sum(training.losses[-10:]) / 10 < 0.35
    unseen = sorting.sequences(1000, 4, seed=sorting.TEST)
    soft, hard = (sorting.judge(model, unseen, x) for x in (False, True))
    assert hard.whole > 0.85
    assert hard.places > 0.95
    assert hard.error < soft.error


def test_a_hard_pointer_gives_a_number_as_it_was(
    taught: tuple[sorting.Sorter, sorting.Training],
) -> None:
    model, _ = taught
    x = sorting.sequences(50, 4, seed=9)
    with torch.no_grad():
        result, alpha = model(x, hard=True)
        soft = model(x)[1]
    assert (result[..., None] == x[:, None, :]).any(-1).all()
    assert ((alpha == 0) | (alpha == 1)).all() and (alpha.sum(-1) == 1).all()
    assert torch.equal(alpha.argmax(-1), soft.argmax(-1))
    torch.testing.assert_close(soft.sum(-1), torch.ones(50, 4))


def test_the_order_in_which_numbers_come_does_not_matter(
    taught: tuple[sorting.Sorter, sorting.Training],
) -> None:
    model, _ = taught
    x = sorting.sequences(20, 4, seed=9)
    turn = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        torch.testing.assert_close(model(x[:, turn])[1], model(x)[1][..., turn])
        assert model.looks(x).shape == (20, sorting.HEADS, 4, 4)


def test_judging() -> None:
    x = sorting.sequences(50, 10, seed=9)

    def backwards(x: Any, hard: bool) -> Any:
        return x.sort(-1, descending=True).values, None

    def nearly(x: Any, hard: bool) -> Any:
        return x.sort(-1).values + 1e-7, None

    wrong = sorting.judge(cast(Any, backwards), x, True)
    assert (wrong.whole, wrong.places) == (0.0, 0.0)
    right = sorting.judge(cast(Any, nearly), x, True)
    assert (right.whole, right.places) == (1.0, 1.0)
    assert right.error == pytest.approx(1e-7, rel=0.5)


def test_the_small_run_draws_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sorting.py", "--small", "--out", str(tmp_path / "new")])
    sorting.main()
    output = capsys.readouterr().out
    assert "1,000 unseen sequences of 5 numbers" in output
    hard = next(line for line in output.splitlines() if line.startswith("sigmoid  hard"))
    assert float(hard.split()[3].rstrip("%")) > 80
    assert {path.name for path in (tmp_path / "new").iterdir()} == PICTURES


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_stopped_halfway_it_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-u", sorting.__file__, "--out", str(tmp_path / "new")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("block"):  # the table is begun
                break
        process.send_signal(signal.SIGINT)
        _, wrong = process.communicate(timeout=300)
    assert (process.returncode, wrong) == (130, "stopped\n")
    assert not list(tmp_path.iterdir())
