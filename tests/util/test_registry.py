"""User-defined names: registered, accepted by every entry point, refused where unsupported."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar, get_args

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.database import encoders
from qkv.engines import choice
from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import get_framework, to_numpy
from qkv.util import registry
from qkv.util.types import Array

RNG = np.random.default_rng(5)
QUERY, KEY, VALUE = (RNG.normal(size=shape) for shape in ((4, 3), (6, 3), (6, 2)))
TABLES = (scores.NAMES, weightings.NAMES, encoders.ENCODERS)


@dataclass(frozen=True)
class Cubic(scores.Score):
    """(a qᵀk)³: no score of ours."""

    a: float = 0.5

    def __call__(self, query: Array, key: Array) -> Array:
        return (self.a * scores.Dot()(query, key)) ** 3


@dataclass(frozen=True)
class Exponential(weightings.Weighting):
    """α = exp(rate · s) as it is, whatever else is in the row."""

    rate: float = 0.1

    def weights(self, scores: Array, live: Array | None, k: Array) -> Array:
        return self.block_weights(scores, live, k, ())

    def block_weights(self, scores: Array, live: Array | None, k: Array, result: Any) -> Array:
        fw = get_framework(scores)
        return fw.fill_unless(fw.xp.exp(self.rate * scores), live)

    def score_gradient(
        self, scores: Array, weight: Array, along: Array, centre: Array, result: Any
    ) -> Array:
        return self.rate * weight * along


@dataclass(frozen=True)
class Lengths(encoders.Encoder):
    """(number of letters, 1), with a factor that it learns from the keys."""

    factor: Any = None
    kind: ClassVar[str] = "lengths"
    width: ClassVar[int] = 2  # type: ignore[misc]

    def fit(self, keys: Sequence[Any]) -> Lengths:
        return type(self)(np.float32([1 / max(map(len, keys))]))

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        result = np.array([[len(key), 1] for key in keys], np.float32).reshape(-1, 2)
        return result * (1 if self.factor is None else self.factor)

    def default_score(self, rows: int) -> scores.Score:
        return scores.Gaussian(0.05)

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def arrays(self) -> dict[str, np.ndarray]:
        return {} if self.factor is None else {"factor": self.factor}

    @classmethod
    def build(cls, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Lengths:
        return cls(arrays.get("factor"))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test registers is gone after it."""
    copies = [dict(table) for table in TABLES]
    yield
    for table, entries in zip(TABLES, copies, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def registered() -> None:
    scores.register("cubic", Cubic)
    weightings.register("exponential", Exponential)
    encoders.register("lengths", Lengths)


def formula(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The weights that exponential of cubic means, every key being live."""
    return np.exp(0.1 * (0.5 * query @ np.swapaxes(key, -1, -2)) ** 3)


class TestRegister:
    def test_by_a_call_and_as_a_decorator(self) -> None:
        assert scores.register("cubic", Cubic) is Cubic
        assert scores.register("cubed")(Cubic) is Cubic
        assert scores.resolve("cubic") == scores.resolve("cubed") == Cubic()

    def test_again_is_no_second_name(self) -> None:
        first = scores.register("cubic", Cubic)
        assert scores.register("cubic", Cubic) is first
        newer = type("Cubic", (Cubic,), {"__module__": Cubic.__module__})
        assert scores.register("cubic", newer) is newer  # a cell that ran twice
        assert type(scores.resolve("cubic")) is newer

    @pytest.mark.parametrize(
        ("register", "error", "says"),
        [
            (lambda: scores.register("dot", Cubic), ArgumentError, r"is already qkv.*Dot: choose"),
            (lambda: scores.register("my score", Cubic), ArgumentError, "identifier.*'my score'"),
            (lambda: scores.register("", Cubic), ArgumentError, "identifier.*''"),
            (lambda: scores.register(3, Cubic), ArgumentError, "identifier.*3"),
            (
                lambda: scores.register("mine", Exponential),
                DtypeError,
                "scores.Score, not the class E",
            ),
            (lambda: scores.register("mine", Cubic()), DtypeError, r"not Cubic\(a=0.5\): derive"),
            (lambda: scores.register("mine", max), DtypeError, "or pass it as score="),
            (lambda: scores.register("mine", scores.Score), DtypeError, "Score must be a frozen"),
            (lambda: weightings.register("mine", Cubic), DtypeError, "weightings.Weighting"),
            (lambda: encoders.register("mine", Cubic), DtypeError, "encoders.Encoder"),
            (lambda: encoders.register("other", Lengths), ArgumentError, "kind is 'lengths'"),
            (lambda: encoders.register("exact", encoders.Text), ArgumentError, "kind is 'text'"),
        ],
    )
    def test_what_is_refused(
        self, register: Callable[[], Any], error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says) as caught:
            register()
        assert isinstance(caught.value, qkv.QkvError)
        assert not any("mine" in table for table in TABLES)

    def test_unknown_names_tell_of_registered_ones(self, registered: None) -> None:
        with pytest.raises(ArgumentError, match=r"did you mean 'cubic'\? Known: .*cubic"):
            scores.resolve("cubik")
        with pytest.raises(ArgumentError, match="did you mean 'exponential'"):
            weightings.resolve("exponental")
        with pytest.raises(ArgumentError, match="did you mean 'lengths'"):
            encoders.resolve("length")

    def test_one_that_has_parameters_says_which(self) -> None:
        @scores.register("weighed")
        @dataclass(frozen=True)
        class Weighed(scores.Score):
            w: Any
            bias: float = 0.0

        with pytest.raises(DtypeError, match=r"required parameters: pass Weighed\(w\)"):
            qkv.attend(QUERY, KEY, VALUE, score="weighed")

    def test_a_mistake_inside_the_class_is_shown_as_it_is(self) -> None:
        @scores.register("broken")
        @dataclass(frozen=True)
        class Broken(scores.Score):
            def __post_init__(self) -> None:
                raise TypeError("of its own")

        with pytest.raises(TypeError, match="of its own"):
            scores.resolve("broken")


class TestRegisteredScore:
    """A score and a weighting of one's own, by name, against what they mean."""

    options: ClassVar[dict[str, Any]] = {"score": "cubic", "weighting": "exponential"}

    @pytest.mark.parametrize("engine", [None, "dense", "streaming"])
    def test_attend(self, registered: None, engine: str | None) -> None:
        out, alpha = qkv.attend(
            QUERY, KEY, VALUE, **self.options, engine=engine, return_weights=True
        )
        np.testing.assert_allclose(alpha, formula(QUERY, KEY), atol=1e-12)
        np.testing.assert_allclose(out, formula(QUERY, KEY) @ VALUE, atol=1e-12)

    def test_weights_and_explain(self, registered: None) -> None:
        causal = qkv.weights(QUERY, KEY, **self.options, mask="causal")
        np.testing.assert_allclose(causal, formula(QUERY, KEY) * np.tri(4, 6), atol=1e-12)
        assert "Cubic(a=0.5) → Exponential(rate=0.1)" in str(
            qkv.explain(QUERY, KEY, VALUE, **self.options)
        )

    def test_layers(self, registered: None) -> None:
        torch = pytest.importorskip("torch")
        from qkv import nn

        layer = nn.MultiHeadAttention(8, 2, **self.options, dtype=torch.float64, batch_first=True)
        x = torch.from_numpy(RNG.normal(size=(1, 5, 8)))
        out, alpha = layer(x, x, x, need_weights=True, average_attn_weights=False)
        q, k, v = (
            part.reshape(1, 5, 2, 4).swapaxes(1, 2).numpy(force=True)
            for part in (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)
        )
        np.testing.assert_allclose(alpha.numpy(force=True), formula(q, k), atol=1e-12)
        pooled = (formula(q, k) @ v).swapaxes(1, 2).reshape(1, 5, 8)
        want = layer.out_proj(torch.from_numpy(pooled))
        np.testing.assert_allclose(out.numpy(force=True), want.numpy(force=True), atol=1e-12)

    def test_keras(self, registered: None) -> None:
        pytest.importorskip("keras")
        from qkv.keras import Attention

        made = [Attention(**self.options), Attention(score=Cubic(0.5), weighting=Exponential(0.1))]
        made += [Attention.from_config(layer.get_config()) for layer in made]
        for layer in made:
            out = layer([QUERY[None], VALUE[None], KEY[None]], attention_mask="causal")
            want = formula(QUERY, KEY) * np.tri(4, 6) @ VALUE
            np.testing.assert_allclose(to_numpy(out)[0], want, rtol=1e-4, atol=1e-5)

    def test_a_database(self, registered: None) -> None:
        table = qkv.Database(
            {tuple(map(float, k)): float(v) for k, v in zip(KEY, VALUE[:, 0], strict=True)},
            encoder="arrays",
        )
        answer = table.ask(QUERY[0], **self.options)
        want = formula(QUERY[:1], KEY) @ VALUE[:, 0]
        np.testing.assert_allclose(answer.value, want[0], rtol=1e-4)

    def test_a_stored_encoder_opens_again(self, registered: None, tmp_path: Any) -> None:
        path = tmp_path / "names.qkv"
        with qkv.open(path, create=True, encoder="lengths") as table:
            table.add(["Li", "Hu", "Zhang"], ["Mu", "Yi", "Aston"])
        with qkv.open(path) as table:
            assert table.ask("Smith").value == "Aston"
            assert table.encoder.factor == np.float32(0.2)
        del encoders.ENCODERS["lengths"]
        with qkv.open(path) as table:
            assert table["Li"] == "Mu"  # which needs no encoder
            with pytest.raises(ArgumentError, match=r"'lengths'.*encoders.register, or .*encoder="):
                table.ask("Smith")
        with qkv.open(path, encoder=Lengths()) as table:
            assert table.ask("Smith").value == "Aston"
            assert table.encoder.factor == np.float32(0.2)


class TestEntryPoints:
    @pytest.fixture
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        monkeypatch.setattr(registry, "_failed_plugins", None)

        def install(**modules: Callable[[], None]) -> None:
            points = [types.SimpleNamespace(value=n, load=load) for n, load in modules.items()]
            keywords = {"group": registry.PLUGIN_GROUP}
            monkeypatch.setattr(
                metadata, "entry_points", lambda **spec: points if spec == keywords else []
            )

        return install

    def test_an_unknown_name_asks_installed_plugins_once(
        self, installed: Callable[..., None]
    ) -> None:
        loads = []

        def load() -> None:
            loads.append(1)
            scores.register("cubic", Cubic)
            with pytest.raises(ArgumentError, match="unknown score"):
                scores.resolve("nowhere")  # asks again while it is asked

        installed(mine=load)
        assert scores.resolve("dot") == scores.Dot()
        assert not loads
        assert scores.resolve("cubic") == Cubic()
        with pytest.raises(ArgumentError, match="unknown score 'nowhere'"):
            scores.resolve("nowhere")
        assert loads == [1]

    def test_one_that_fails_is_named_and_the_others_work(
        self, installed: Callable[..., None]
    ) -> None:
        def broken() -> None:
            raise ImportError("no module named 'x'")

        installed(broken=broken, mine=lambda: scores.register("cubic", Cubic))
        assert scores.resolve("cubic") == Cubic()
        with pytest.raises(ArgumentError, match=r"unknown.*plug-in broken failed: ImportError: no"):
            scores.resolve("cubik")


class TestTypeCheckers:
    """The names in the type hints are those of the registries."""

    @pytest.mark.parametrize(
        ("names", "table"),
        [
            pytest.param(scores.Name, scores.NAMES, id="scores"),
            pytest.param(weightings.Name, weightings.NAMES, id="weightings"),
            pytest.param(encoders.EncoderName, encoders.ENCODERS, id="encoders"),
        ],
    )
    def test_names_that_are_enough(self, names: Any, table: Any) -> None:
        assert set(get_args(names)) == {
            name for name in table if not table.required_parameters(name)
        }

    def test_scores_that_layers_make(self) -> None:
        from qkv.nn.scores import LEARNED_SCORES

        assert set(get_args(scores.LearnedName)) == set(LEARNED_SCORES)

    def test_masks_and_engines(self) -> None:
        names_with_masks = {
            name for name, mask in masks.NAMES.items() if isinstance(mask, masks.Mask)
        }
        assert set(get_args(masks.Name)) == names_with_masks
        assert get_args(choice.EngineName) == tuple(choice.ENGINES_BY_NAME)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.module_name)
def test_every_built_in_class_explains_an_unknown_keyword(table: Any) -> None:
    """Each states `@suggest_keywords` itself."""
    for kind in table.values():
        with pytest.raises(TypeError, match=f"^{kind.__name__} got an unexpected keyword"):
            kind(no_such_keyword=1)
