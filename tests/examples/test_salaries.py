"""The tables are what they say, the learned kernel is the equation, and learning helps it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from examples import salaries  # noqa: E402
from qkv import scores  # noqa: E402

pytestmark = pytest.mark.sample_of_module(6)

PICTURES = {"salaries.png", "diabetes.png", "homes.png", "training.png"}


@pytest.fixture(scope="module")
def study() -> salaries.Study:
    return salaries.study(salaries.salaries(160), steps=40)


@pytest.mark.parametrize("name", ["salaries", "diabetes", "homes"])
def test_a_quarter_is_held_out(name: str) -> None:
    table = getattr(salaries, name)(200)
    assert (len(table.held_out), len(table.known)) == (50, 150)
    assert sorted([*table.held_out, *table.known]) == list(range(200))
    assert table.x.shape == (200, len(table.columns))
    again = getattr(salaries, name)(200)
    assert np.array_equal(table.x, again.x) and np.array_equal(table.y, again.y)
    key = table.keys(table.x[table.known]).numpy()
    np.testing.assert_allclose(key.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(key.std(0), 1, atol=1e-5)
    value = table.values(table.y)
    np.testing.assert_allclose(table.back(value), table.y, rtol=1e-5)


def test_generated_data_is_as_described() -> None:
    assert salaries.pay(np.array([3.2, 3.4])) == pytest.approx([66.5, 78.5], abs=0.5)
    assert (np.diff(salaries.pay(np.linspace(2.4, 4, 50))) > 0).all()
    homes = salaries.homes()
    assert len(homes.x) == 1200
    assert homes.y.max() == 500 and homes.y.min() > 0
    latitude, longitude, income = homes.x.T
    shore = np.interp(latitude, salaries.SHORE[:, 0], salaries.SHORE[:, 1])
    assert (longitude >= shore).all()  # none stands in the sea
    near = longitude - shore < 0.1
    assert (homes.y / (40 + 38 * income))[near].mean() > (homes.y / (40 + 38 * income)).mean()


def test_learning_beats_a_bandwidth_of_one(study: salaries.Study) -> None:
    losses = study.losses["learned σ"]
    assert losses[-1] < 0.75 * losses[0]
    assert study.rmse("learned σ") < study.rmse("attend, σ = 1") < study.rmse("mean of all")
    assert study.rmse("learned σ") < study.rmse("straight line")
    assert study.r2("learned σ") > 0.7
    assert 0.03 < study.bandwidths()[0] < 0.5


def test_errors_are_those_of_scikit_learn(study: salaries.Study) -> None:
    from sklearn.metrics import r2_score, root_mean_squared_error

    true = study.table.y[study.table.held_out]
    for method, predicted in study.predicted.items():
        assert study.rmse(method) == pytest.approx(root_mean_squared_error(true, predicted))
        assert study.r2(method) == pytest.approx(r2_score(true, predicted))


def test_the_learned_kernel_is_the_equation(study: salaries.Study) -> None:
    table = study.table
    query = table.x[table.held_out]
    sigma = study.last.score.bandwidth.detach()
    attended = table.attended(query, scores.Gaussian(sigma))
    np.testing.assert_allclose(study.best, attended, rtol=1e-5)
    width = float(sigma) * table.spread[0]
    alpha = np.exp(-((query - table.x[table.known].T) ** 2) / (2 * width**2))
    by_hand = (alpha / alpha.sum(1, keepdims=True)) @ table.y[table.known]
    np.testing.assert_allclose(study.best, by_hand, rtol=1e-4)


def test_the_query_listens_to_its_neighbours(study: salaries.Study) -> None:
    gpa, alpha, answer = salaries.asked(study)
    assert alpha.sum() == pytest.approx(1, abs=1e-5)
    assert alpha[abs(gpa - salaries.QUERY) <= 0.2].sum() > 0.9
    assert answer == pytest.approx(salaries.pay(np.array(salaries.QUERY)), abs=4)


def test_a_column_of_noise_is_not_looked_at() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (120, 2))
    table = salaries.Table("made", "y", ["counts", "noise"], x, np.sin(4 * x[:, 0]))
    counts, noise = salaries.study(table, 60).bandwidths()
    assert counts < 0.3 and noise > 5 * counts


def test_the_small_run_draws_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["salaries.py", "--small", "--out", str(tmp_path / "new")])
    salaries.main()
    output = capsys.readouterr().out
    for name in ("salaries", "diabetes", "homes"):
        assert f"{name}: 150 rows known, 50 held out" in output
    assert "A student with a GPA of 3.5 may expect 8" in output
    assert {path.name for path in (tmp_path / "new").iterdir()} == PICTURES


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_stopped_halfway_it_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-u", salaries.__file__, "--out", str(tmp_path / "new")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("salaries"):  # diabetes is next
                break
        process.send_signal(signal.SIGINT)
        _, wrong = process.communicate(timeout=300)
    assert (process.returncode, wrong) == (130, "stopped\n")
    assert not list(tmp_path.iterdir())
