"""How accurate and fast are the scikit-learn estimators? Bundled and synthetic data, 5 folds, CPU.

The alternatives are tuned by a grid search inside each fold; qkv learns its bandwidths. Times are
CPU seconds of tuning, fitting and predicting. `predict` is wall-clock time. The loop of statsmodels
runs on a hundredth of the queries, which all take equally long.
"""

from __future__ import annotations

import time
import warnings

import numpy as np

from bench._results import show
from bench._side_by_side import SMALL, Row, compare, peer, save_results, size

M, N, D = size(200_000, 5_000), size(2_000, 50), 3
SIGMA = M ** (-1 / (D + 4)) / np.sqrt(12)
ROWS = size(1_000, 150)
MANY = size(4_000, 300)
LEARNED = size(400, 100)
WITHIN = 5.5
"""Bandwidths beyond which scikit-learn does not look: a millionth of the weight lies there."""


def tuned(model, classes=False):
    """Return k nearest neighbours with scaling, k, weights and norm by cross-validation."""
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    grid = {
        "scale": [StandardScaler(), "passthrough"],
        "knn__n_neighbors": [1, 3, 5, 7, 10, 15, 20, 30],
        "knn__weights": ["uniform", "distance"],
        "knn__p": [1, 2] if not classes else [2],
    }
    if SMALL:
        grid["knn__n_neighbors"] = [3, 10]
    return GridSearchCV(Pipeline([("scale", None), ("knn", model)]), grid, cv=5)


def gaussian_process(X, y, query):
    """Return the predictions of a Gaussian process, and the seconds that a full fit would take.

    It has a length scale for each column, and noise. They are learned from a part of the rows, then
    all rows are fitted with them. A step on all rows is slow: one is timed, and multiplied by the
    number of steps on the part.
    """
    from scipy.optimize import minimize
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.preprocessing import StandardScaler

    steps = [0]

    def counted(objective, start, bounds):
        def step(theta):
            steps[0] += 1
            return objective(theta)

        found = minimize(step, start, jac=True, method="L-BFGS-B", bounds=bounds)
        return found.x, found.fun

    scale = StandardScaler().fit(X)
    X, query = scale.transform(X), scale.transform(query)
    kernel = ConstantKernel() * RBF(np.ones(X.shape[1])) + WhiteKernel()
    part = GaussianProcessRegressor(kernel, optimizer=counted, normalize_y=True)
    part.fit(X[:LEARNED], y[:LEARNED])
    begin = time.process_time()
    whole = GaussianProcessRegressor(part.kernel_, optimizer=None, normalize_y=True).fit(X, y)
    predicted = whole.predict(query)
    rest = time.process_time()
    whole.log_marginal_likelihood(whole.kernel_.theta, eval_gradient=True, clone_kernel=False)
    return predicted, rest - begin + steps[0] * (time.process_time() - rest), steps[0]


def waves(rows):
    """Return sin(2x₁) x₂ + cos x₃ of four columns, with noise of 0.3."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (rows, 4))
    return x, np.sin(2 * x[:, 0]) * x[:, 1] + np.cos(x[:, 2]) + rng.normal(0, 0.3, rows)


def folded(make, X, y, folds, measures):
    """Return each measure of (true, predicted) over all folds, and the seconds of one fold."""
    found, seconds = [], 0.0
    for known, held_out in folds:
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a peer's optimizer that stops at a bound
            model = make().fit(X[known], y[known])
            if "log-loss" in measures:
                predicted = model.predict_proba(X[held_out])
            else:
                predicted = model.predict(X[held_out])
        seconds += time.process_time() - begin
        found.append((y[held_out], predicted))
    true, predicted = (np.concatenate(x) for x in zip(*found, strict=True))
    side = {name: float(measure(true, predicted)) for name, measure in measures.items()}
    return side | {"ms": 1e3 * seconds / len(folds)}


def judged(work, sides, goals) -> Row:
    """Return a row of these sides. goals: text, measured value, and whether it is met."""
    results = [{"goal": goal, "found": found, "met": bool(met)} for goal, found, met in goals]
    row = {"work": work, "sides": sides, "goals": results}
    show(row)
    return row


def root(true, predicted):
    return np.sqrt(np.mean((true - predicted) ** 2))


def regression():
    from sklearn.datasets import load_diabetes, make_friedman1
    from sklearn.model_selection import KFold
    from sklearn.neighbors import KNeighborsRegressor

    from qkv.sklearn import AttentionRegressor

    tables = {
        "diabetes": load_diabetes(return_X_y=True),
        f"Friedman 1, {ROWS:,} rows": make_friedman1(ROWS, noise=1.0, random_state=0),
        f"waves, {ROWS:,} rows": waves(ROWS),
    }
    for name, (X, y) in tables.items():
        folds = list(KFold(5, shuffle=True, random_state=0).split(X))
        makes = {
            "qkv": lambda: AttentionRegressor("learned", degree=1, random_state=0),
            "qkv, degree 0": lambda: AttentionRegressor("learned", random_state=0),
            "k-NN, tuned": lambda: tuned(KNeighborsRegressor()),
        }
        sides = {k: folded(make, X, y, folds, {"RMSE": root}) for k, make in makes.items()}
        ratio = sides["k-NN, tuned"]["RMSE"] / sides["qkv"]["RMSE"]
        goal = "RMSE below that of k-NN, tuned (times)"
        yield judged(f"regression, {name}, 5 folds", sides, [(goal, ratio, ratio > 1)])


def compare_gaussian_process():
    from sklearn.datasets import make_friedman1
    from sklearn.model_selection import KFold

    from qkv.sklearn import AttentionRegressor

    X, y = make_friedman1(MANY, noise=1.0, random_state=0)
    folds = list(KFold(5, shuffle=True, random_state=0).split(X))[:1]
    known, held_out = folds[0]

    def make():
        return AttentionRegressor("learned", degree=1, random_state=0)

    ours = folded(make, X, y, folds, {"RMSE": root})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predicted, seconds, steps = gaussian_process(X[known], y[known], X[held_out])
    theirs = {
        "ms": 1e3 * seconds,
        "RMSE": float(root(y[held_out], predicted)),
        "note": f"{steps} steps, one of them timed; its kernel learned from {LEARNED} rows",
    }
    near, quick = ours["RMSE"] / theirs["RMSE"], theirs["ms"] / ours["ms"]
    goals = [
        ("RMSE ≤ 1.05 × that of Gaussian process", near, near <= 1.05),
        ("≥ 10× Gaussian process", quick, quick >= 10),
    ]
    sides = {"qkv": ours, "Gaussian process": theirs}
    yield judged(f"regression, Friedman 1, {MANY:,} rows, first of 5 folds", sides, goals)


def classification():
    from sklearn.datasets import load_digits, load_wine
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold
    from sklearn.neighbors import KNeighborsClassifier

    from qkv.sklearn import AttentionClassifier

    measures = {"accuracy": lambda true, p: np.mean(p.argmax(1) == true), "log-loss": log_loss}
    for name, load in {"wine": load_wine, "digits": load_digits}.items():
        X, y = load(return_X_y=True)
        if SMALL:
            X, y = X[:300], y[:300]
        folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y))
        makes = {
            "qkv": lambda: AttentionClassifier("loo", degree=1, sample=400, random_state=0),
            "qkv, degree 0": lambda: AttentionClassifier("loo", random_state=0),
            "k-NN, tuned": lambda: tuned(KNeighborsClassifier(), classes=True),
        }
        sides = {k: folded(make, X, y, folds, measures) for k, make in makes.items()}
        ours, theirs = sides["qkv"], sides["k-NN, tuned"]
        more = ours["accuracy"] - theirs["accuracy"]
        less = theirs["log-loss"] / ours["log-loss"]
        goals = [
            ("accuracy ≥ that of k-NN, tuned (difference)", more, more >= 0),
            ("log-loss below that of k-NN, tuned (times)", less, less > 1),
        ]
        yield judged(f"classes, {name}, 5 folds", sides, goals)


def draw_sine(rows, seed):
    """Return 2 sin x + x of one column, with noise of 0.5."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 5, (rows, 1))
    return x, 2 * np.sin(x[:, 0]) + x[:, 0] + rng.normal(0, 0.5, rows)


def load_tables():
    """Return functions of a seed that load or draw (X, y), by kind and name: thirteen in all."""
    from sklearn import datasets

    some, fewer = size(600, 120), size(400, 100)
    values = {
        "diabetes": lambda seed: datasets.load_diabetes(return_X_y=True),
        "Friedman 1": lambda seed: datasets.make_friedman1(some, noise=1.0, random_state=seed),
        "Friedman 2": lambda seed: datasets.make_friedman2(some, noise=50.0, random_state=seed),
        "Friedman 3": lambda seed: datasets.make_friedman3(some, noise=0.1, random_state=seed),
        "waves": lambda seed: waves(some),
        "sine": lambda seed: draw_sine(fewer, seed),
        "sparse uncorrelated": lambda seed: datasets.make_sparse_uncorrelated(
            some, random_state=seed
        ),
    }
    classes = {
        "iris": lambda seed: datasets.load_iris(return_X_y=True),
        "wine": lambda seed: datasets.load_wine(return_X_y=True),
        "breast cancer": lambda seed: datasets.load_breast_cancer(return_X_y=True),
        "digits": lambda seed: tuple(x[:some] for x in datasets.load_digits(return_X_y=True)),
        "moons": lambda seed: datasets.make_moons(fewer, noise=0.3, random_state=seed),
        "make_classification": lambda seed: datasets.make_classification(
            some, n_features=12, n_informative=5, random_state=seed
        ),
    }
    return {"R²": values, "accuracy": classes}


def compare_defaults(seeds=3):
    """Compare estimators without arguments with tuned k-NN on held-out 30 % of each table."""
    from sklearn.model_selection import train_test_split
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

    from qkv.sklearn import AttentionClassifier, AttentionRegressor

    for measure, tables in load_tables().items():
        is_classes = measure == "accuracy"
        ours, theirs = (
            (AttentionClassifier, KNeighborsClassifier)
            if is_classes
            else (AttentionRegressor, KNeighborsRegressor)
        )
        for name, load in tables.items():
            sides = {"qkv, defaults": [], "k-NN, tuned": []}
            covered = []
            for seed in range(seeds):
                X, y = load(seed)
                known, held_out, y_known, y_held_out = train_test_split(
                    X, y, test_size=0.3, random_state=seed, stratify=y if is_classes else None
                )
                models = {
                    "qkv, defaults": ours(random_state=0),
                    "k-NN, tuned": tuned(theirs(), classes=is_classes),
                }
                for side, model in models.items():
                    begin = time.process_time()
                    model.fit(known, y_known)
                    seconds = time.process_time() - begin
                    sides[side].append((model.score(held_out, y_held_out), seconds))
                    if side == "qkv, defaults" and not is_classes:
                        value, deviation = model.predict(held_out, return_std=True)
                        apart = np.abs(value - y_held_out) / deviation
                        covered.append((np.mean(apart < 1), np.mean(apart < 2)))
            means = {side: np.mean(found, axis=0) for side, found in sides.items()}
            result = {
                side: {measure: float(mean[0]), "ms": 1e3 * float(mean[1])}
                for side, mean in means.items()
            }
            more = float(means["qkv, defaults"][0] - means["k-NN, tuned"][0])
            goals = [(f"{measure} at least that of k-NN, tuned (difference)", more, more >= -0.002)]
            if covered:
                one, two = map(float, np.mean(covered, axis=0))
                goals += [
                    ("within ±1 deviation: 0.63 to 0.73", one, 0.63 <= one <= 0.73),
                    ("within ±2 deviations: 0.93 to 0.97", two, 0.93 <= two <= 0.97),
                ]
            yield judged(f"defaults, {name}, {seeds} splits", result, goals)


def speed():
    """Time prediction only; fitted models and trees are reused between calls."""
    from sklearn.neighbors import RadiusNeighborsRegressor

    from qkv.sklearn import AttentionRegressor

    rng = np.random.default_rng(0)
    X, Q = rng.random((M, D)), rng.random((N, D))
    y = np.sin(3 * X.sum(1)) + 0.1 * rng.normal(size=M)

    def weigh(apart):
        return [np.exp(-0.5 * (x / SIGMA) ** 2) for x in apart]

    model = AttentionRegressor(SIGMA).fit(X, y)
    within = RadiusNeighborsRegressor(WITHIN * SIGMA, weights=weigh, algorithm="kd_tree").fit(X, y)
    few = Q[: max(N // 100, 1)]
    sides = {
        "qkv": lambda: model.predict(Q),
        "RadiusNeighborsRegressor": lambda: np.concatenate(
            [within.predict(Q[at : at + 100]) for at in range(0, N, 100)]
        ),
    }
    if peer("statsmodels"):
        from statsmodels.nonparametric.kernel_regression import KernelReg

        loop = KernelReg(y, X, "c" * D, reg_type="lc", bw=np.full(D, SIGMA))
        sides["KernelReg, a hundredth of the queries"] = lambda: loop.fit(few)[0]
    row = compare(f"predict {N:,} of {M:,} rows d{D}, σ {SIGMA:.3g}, f64", sides, repeats=5)
    ours = row["sides"]["qkv"]["ms"]
    want = model.predict(few)
    for name, least, times in (("RadiusNeighborsRegressor", 5, 1), ("KernelReg", 20, 100)):
        side = next((x for key, x in row["sides"].items() if key.startswith(name)), None)
        found = side and side["ms"] * times / ours
        met = None if found is None else found >= least
        row["goals"].append({"goal": f"≥ {least}× {name}", "found": found, "met": met})
    for name, side in list(sides.items())[1:]:
        row["sides"][name]["error"] = float(np.abs(side()[: len(few)] - want).max())
    show(row)
    yield row


def rows():
    yield from compare_defaults()
    yield from regression()
    yield from classification()
    yield from speed()
    yield from compare_gaussian_process()


if __name__ == "__main__":
    save_results("estimators", rows())
