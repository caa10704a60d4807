"""Heatmaps: what is drawn, on which scale, with which words, and what is refused."""

import itertools
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.errors import ArgumentError, DtypeError, MissingExtraError, QkvError, ShapeError
from qkv.plot import heatmaps

matplotlib = pytest.importorskip("matplotlib")

pytestmark = pytest.mark.sample_of_module(60)

BASELINE = Path(__file__).parent / "baseline"


def softmax(scores: Any) -> Any:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def heads(*shape: int) -> Any:
    return softmax(2 * np.random.default_rng(0).normal(size=shape))


def panels(figure: Any) -> list[Any]:
    return [axes for axes in figure.axes if axes.images]


def bars(figure: Any) -> list[Any]:
    return [axes for axes in figure.axes if not axes.images]


def read_heatmap(panel: Any) -> Any:
    return np.ma.filled(panel.images[0].get_array().astype(float), np.nan)


def colour(figure: Any, panel: Any, query: int, key: int) -> tuple[int, ...]:
    """The colour of one cell in the finished picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    x, y = panel.transData.transform((key, query))
    return tuple(int(c) for c in pixels[pixels.shape[0] - 1 - int(y), int(x), :3])


def words(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


class TestPanels:
    @pytest.mark.parametrize(
        ("shape", "inches"),
        [
            ((3, 4), (2.5, 2.5)),
            ((1, 1, 10, 10), (2.5, 2.5)),
            ((5, 3, 4), (12.5, 2.5)),
            ((2, 4, 6, 6), (10.0, 5.0)),
        ],
    )
    def test_axes_give_the_grid(self, shape: tuple[int, ...], inches: tuple[float, float]) -> None:
        matrices = heads(*shape)
        figure = heatmaps(matrices)
        each = matrices.reshape(-1, *shape[-2:])
        assert len(panels(figure)) == len(each)
        for panel, matrix in zip(panels(figure), each, strict=True):
            np.testing.assert_allclose(read_heatmap(panel), matrix)
        assert tuple(figure.get_size_inches()) == inches
        assert len(bars(figure)) == 1

    def test_figsize_is_one_panel(self) -> None:
        assert tuple(heatmaps(heads(2, 3, 4, 4), figsize=(3, 2)).get_size_inches()) == (9, 4)

    @pytest.mark.parametrize(("n", "m"), [(50, 50), (16, 16), (3, 50), (50, 2)])
    def test_every_word_is_read(self, n: int, m: int) -> None:
        words = [f"word{i}" for i in range(max(n, m))]
        figure = heatmaps(heads(n, m), xticks=words[:m], yticks=words[:n])
        (panel,) = panels(figure)
        for labels, count in ((panel.get_xticklabels(), m), (panel.get_yticklabels(), n)):
            assert [x.get_text() for x in labels] == words[:count]
            assert all(x.get_fontsize() >= 5.5 for x in labels)
        assert max(figure.get_size_inches()) < 9.5
        assert tuple(heatmaps(heads(n, m)).get_size_inches()) == (2.5, 2.5)

    def test_many_panels_with_words_stay_a_page(self) -> None:
        words = [f"word{i}" for i in range(50)]
        wide, high = heatmaps(heads(2, 4, 50, 50), xticks=words, yticks=words).get_size_inches()
        assert wide < 18 and high < 9.5

    def test_labels_on_the_outside_only(self) -> None:
        grid = panels(heatmaps(heads(2, 2, 4, 4), "Rows", "Questions"))
        assert [p.get_xlabel() for p in grid] == ["", "", "Rows", "Rows"]
        assert [p.get_ylabel() for p in grid] == ["Questions", "", "Questions", ""]

    def test_queries_run_down_and_keys_across(self) -> None:
        figure = heatmaps(np.array([[0.0, 1.0], [0.0, 0.0]]))
        (panel,) = panels(figure)
        reds = matplotlib.colormaps["Reds"]
        assert colour(figure, panel, 0, 1) == tuple(reds(1.0, bytes=True)[:3])
        assert colour(figure, panel, 1, 0) == tuple(reds(0.0, bytes=True)[:3])

    @pytest.mark.parametrize(("shape", "box"), [((6, 9), 6 / 9), ((1, 90), 1 / 4), ((90, 2), 4.0)])
    def test_cells_are_square_unless_the_panel_would_be_a_thread(
        self, shape: tuple[int, int], box: float
    ) -> None:
        (panel,) = panels(heatmaps(np.ones(shape)))
        assert panel.get_box_aspect() == pytest.approx(box)

    def test_one_bar_as_tall_as_the_panels(self) -> None:
        shapes = [(10, 10), (2, 3, 8, 8), (6, 2, 5, 5), (4, 16), (20, 3), (1, 90)]
        for shape, side in itertools.product(shapes, [1.5, 2.5, 4.0]):
            figure = heatmaps(heads(*shape), figsize=(side, side))
            figure.draw_without_rendering()
            (bar,) = bars(figure)
            boxes = [panel.get_window_extent() for panel in panels(figure)]
            low, high = min(box.y0 for box in boxes), max(box.y1 for box in boxes)
            extent = bar.get_window_extent()
            assert extent.height == pytest.approx(high - low, rel=0.03)
            assert extent.width < 0.15 * figure.dpi


class TestScale:
    def test_is_shared_and_starts_at_zero(self) -> None:
        matrices = np.stack([np.full((3, 3), 0.2), np.full((3, 3), 0.6)])
        norms = {panel.images[0].norm for panel in panels(heatmaps(matrices))}
        assert len(norms) == 1
        (norm,) = norms
        assert (norm.vmin, norm.vmax) == (0, 0.6)

    @pytest.mark.parametrize("value", [0.0, np.nan])
    def test_of_nothing_is_zero_to_one(self, value: float) -> None:
        norm = panels(heatmaps(np.full((3, 3), value)))[0].images[0].norm
        assert (norm.vmin, norm.vmax) == (0, 1)

    def test_of_signed_values_is_symmetric_in_two_colours(self) -> None:
        image = panels(heatmaps([[-3.0, 1.0], [0.0, 2.0]]))[0].images[0]
        assert (image.norm.vmin, image.norm.vmax) == (-3, 3)
        assert image.cmap.name == "RdBu_r"
        red, _, blue, _ = image.to_rgba(np.array([2.0]))[0]
        assert red > blue

    def test_a_chosen_map_stays(self) -> None:
        assert panels(heatmaps([[-3.0, 1.0]], cmap="viridis"))[0].images[0].cmap.name == "viridis"
        chosen = matplotlib.colormaps["Blues"]
        assert panels(heatmaps([[0.5, 1.0]], cmap=chosen))[0].images[0].cmap.name == "Blues"

    def test_rounding_below_zero_is_zero(self) -> None:
        image = panels(heatmaps([[-1e-9, 1.0]]))[0].images[0]
        assert (image.norm.vmin, image.cmap.name) == (0, "Reds")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_not_finite_is_grey_and_off_the_scale(self, value: float) -> None:
        figure = heatmaps([[value, 0.5], [0.0, 0.25]])
        (panel,) = panels(figure)
        red, green, blue = colour(figure, panel, 0, 0)
        assert red == green == blue
        assert 190 < red < 240
        assert panel.images[0].norm.vmax == 0.5


class TestTitles:
    @pytest.mark.parametrize(
        ("titles", "expected"),
        [
            (None, ["", "", "", ""]),
            (["a", "b"], ["a", "b", "", ""]),
            (["a", "b", "c", "d"], ["a", "b", "c", "d"]),
            ([["a", "b"], ["c", "d"]], ["a", "b", "c", "d"]),
            (range(4), ["0", "1", "2", "3"]),
        ],
    )
    def test_per_column_per_panel_or_nested(self, titles: Any, expected: list[str]) -> None:
        grid = panels(heatmaps(heads(2, 2, 3, 3), titles=titles))
        assert [panel.get_title() for panel in grid] == expected

    def test_one_string_for_one_panel(self) -> None:
        assert panels(heatmaps(heads(3, 3), titles="Layer 1"))[0].get_title() == "Layer 1"

    @pytest.mark.parametrize(
        ("titles", "said"),
        [
            (["a", "b", "c"], "titles has 3 entries; expected 2, one per column, or 4"),
            ("ab", "titles has 1 entries; expected 2"),
            ([["a"], ["b"]], "expected 2 lists of 2 titles"),
            ([["a", "b"], "c"], "expected 2 lists of 2 titles"),
        ],
    )
    def test_wrong_number(self, titles: Any, said: str) -> None:
        with pytest.raises(ShapeError, match=said):
            heatmaps(heads(2, 2, 3, 3), titles=titles)


class TestTicks:
    def test_numbers_are_whole_and_few(self) -> None:
        for size in (1, 2, 7, 10, 33, 1000):
            figure = heatmaps(np.ones((size, size)))
            figure.draw_without_rendering()
            (panel,) = panels(figure)
            shown = [x for x in panel.get_xticks() if -0.5 <= x <= size - 0.5]
            assert 1 <= len(shown) <= 6
            assert all(x == int(x) for x in shown)

    def test_words(self) -> None:
        keys, queries = ["the", "cat", "sat", "down"], ["who", "sat"]
        (panel,) = panels(heatmaps(heads(2, 4), xticks=keys, yticks=queries))
        assert words(panel.xaxis) == keys
        assert words(panel.yaxis) == queries
        assert list(panel.get_xticks()) == [0, 1, 2, 3]

    def test_words_turn_when_they_would_touch(self) -> None:
        def turn(texts: list[str], **options: Any) -> set[float]:
            (panel,) = panels(heatmaps(heads(3, len(texts)), xticks=texts, **options))
            return {label.get_rotation() for label in panel.get_xticklabels()}

        assert turn(["a", "b", "c"]) == {0}
        assert turn(["attention", "mechanism", "question"]) == {45}
        assert turn(["word"] * 20) == {90}

    def test_crowded_words_are_thinned_and_stay_readable(self) -> None:
        texts = [f"w{i}" for i in range(100)]
        (panel,) = panels(heatmaps(heads(100, 100), xticks=texts, yticks=texts))
        shown = words(panel.yaxis)
        step = int(panel.get_yticks()[1])
        assert shown == texts[::step]
        assert min(label.get_fontsize() for label in panel.get_yticklabels()) >= 4.5

    def test_long_words_are_cut(self) -> None:
        (panel,) = panels(heatmaps(heads(2, 2), xticks=["x" * 80, "y"]))
        assert words(panel.xaxis) == ["x" * 23 + "…", "y"]

    def test_dollars_are_money_unless_they_enclose(self) -> None:
        texts = ["$5", "$$", "$5 or $6", r"$\frac{$", "$x^$", "$k_1$"]
        figure = heatmaps(heads(1, 6), xticks=texts)
        (panel,) = panels(figure)
        assert [label.get_parse_math() for label in panel.get_xticklabels()] == [False] * 5 + [True]
        figure.draw_without_rendering()

    def test_a_formula_that_cannot_be_set_is_drawn_as_it_is_written(self) -> None:
        figure = heatmaps(heads(1, 2), xlabel="keys $k_i$", ylabel="$x^$", titles=[[r"$\frac{$"]])
        (panel,) = panels(figure)
        texts = panel.xaxis.label, panel.yaxis.label, panel.title
        assert [text.get_parse_math() for text in texts] == [True, False, False]
        figure.draw_without_rendering()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"xticks": ["a"]}, "xticks has 1 entries; expected 4, one per key"),
            ({"yticks": ["a"] * 4}, "yticks has 4 entries; expected 3, one per query"),
            ({"yticks": "abc"}, "yticks is one string; expected a list of 3"),
        ],
    )
    def test_wrong_number(self, options: Any, said: str) -> None:
        with pytest.raises(ShapeError, match=said):
            heatmaps(heads(3, 4), **options)


class TestNumbers:
    def written(self, matrix: Any, **options: Any) -> dict[tuple[float, float], str]:
        (panel,) = panels(heatmaps(matrix, annotate=True, **options))
        return {(text.get_position()[::-1]): text.get_text() for text in panel.texts}

    def test_each_cell_has_its_own(self) -> None:
        matrix = [[0.25, 0.75, 0.0], [0.001, 0.5, np.nan]]
        assert self.written(matrix) == {
            (0, 0): "0.25",
            (0, 1): "0.75",
            (0, 2): "0",
            (1, 0): "0.00",
            (1, 1): "0.50",
        }

    @pytest.mark.parametrize(
        ("value", "text"),
        [(3.0, "3"), (-1.25, "−1.25"), (0.0312, "0.031"), (12.34, "12.3"), (4321.5, "4322"),
         (3e-9, "3e−09"), (2e12, "2e+12")],
    )  # fmt: skip
    def test_digits(self, value: float, text: str) -> None:
        assert self.written([[value]]) == {(0, 0): text}

    def test_ink_stands_out(self) -> None:
        (panel,) = panels(heatmaps(np.eye(3), annotate=True))
        ink = {text.get_text(): text.get_color() for text in panel.texts}
        assert ink["1"] == "white"
        assert ink["0"] != "white"

    def test_not_off_a_large_matrix_nor_unasked(self) -> None:
        assert self.written(heads(3, 13)) == {}
        assert len(self.written(heads(12, 12))) == 144
        assert not panels(heatmaps(heads(3, 3)))[0].texts


class TestLarge:
    def test_5000_squared_is_quick(self, tmp_path: Path) -> None:
        matrix = np.zeros((5000, 5000), np.float32)
        heatmaps(np.eye(2)).savefig(tmp_path / "warm.png")
        start = time.thread_time()
        heatmaps(matrix).savefig(tmp_path / "large.png")
        assert time.thread_time() - start < 4

    def test_one_strong_weight_survives(self) -> None:
        matrix = np.zeros((3000, 2000), np.float32)
        matrix[1234, 567] = 0.9
        figure = heatmaps(matrix)
        (panel,) = panels(figure)
        cells = read_heatmap(panel)
        assert max(cells.shape) < 250
        assert np.count_nonzero(cells) == 1
        assert cells.max() == np.float32(0.9)
        i, j = np.argwhere(cells)[0]
        assert i == 1234 * cells.shape[0] // 3000
        assert j == 567 * cells.shape[1] // 2000
        # Every cell has at least a pixel, or the picture could still lose it.
        figure.draw_without_rendering()
        box = panel.get_window_extent()
        assert cells.shape[0] <= box.height
        assert cells.shape[1] <= box.width
        assert panel.get_ylim() == (2999.5, -0.5)

    def test_blocks_keep_the_largest_magnitude_and_skip_nan(self) -> None:
        matrix = np.random.default_rng(1).normal(size=(700, 700))
        matrix[:350, :350] = np.nan
        matrix[0, 0] = 0.5
        (panel,) = panels(heatmaps(matrix))
        cells = read_heatmap(panel)
        rows, columns = cells.shape
        edges_i = np.append(np.arange(rows) * 700 // rows, 700)
        edges_j = np.append(np.arange(columns) * 700 // columns, 700)
        for i in range(0, rows, 7):
            for j in range(0, columns, 7):
                block = matrix[edges_i[i] : edges_i[i + 1], edges_j[j] : edges_j[j + 1]]
                block = block[~np.isnan(block)]
                expected = block[np.argmax(abs(block))] if block.size else np.nan
                np.testing.assert_equal(cells[i, j], expected)

    def test_the_input_is_left_alone(self) -> None:
        matrix = np.full((300, 300), -np.inf)
        heatmaps(matrix)
        assert np.all(matrix == -np.inf)

    def test_twelve_layers_of_twelve_heads(self, tmp_path: Path) -> None:
        start = time.thread_time()
        figure = heatmaps(heads(12, 12, 16, 16), figsize=(0.8, 0.8))
        figure.savefig(tmp_path / "heads.png")
        assert time.thread_time() - start < 20
        assert len(panels(figure)) == 144
        assert len(bars(figure)) == 1


class TestInput:
    weights = heads(2, 3, 4)

    def shows_weights(self, matrices: Any, rtol: float = 1e-6) -> None:
        for panel, matrix in zip(panels(heatmaps(matrices)), self.weights, strict=True):
            np.testing.assert_allclose(read_heatmap(panel), matrix, rtol=rtol)

    def test_lists(self) -> None:
        self.shows_weights(self.weights.tolist())
        self.shows_weights(tuple(self.weights))

    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble"])
    def test_numpy(self, dtype: str) -> None:
        self.shows_weights(self.weights.astype(dtype), rtol=1e-3)

    @pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint16"])
    def test_masks_and_counts(self, dtype: str) -> None:
        (panel,) = panels(heatmaps(np.tri(4).astype(dtype)))
        np.testing.assert_array_equal(read_heatmap(panel), np.tri(4))

    def test_torch(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.tensor(self.weights, requires_grad=True)
        self.shows_weights(tensor)
        self.shows_weights(list(tensor))
        self.shows_weights(tensor.to(torch.bfloat16), rtol=1e-2)

    def test_jax(self) -> None:
        jnp = pytest.importorskip("jax.numpy")
        self.shows_weights(jnp.asarray(self.weights))
        self.shows_weights(jnp.asarray(self.weights, jnp.bfloat16), rtol=1e-2)

    def test_tensorflow(self) -> None:
        tf = pytest.importorskip("tensorflow")
        self.shows_weights(tf.constant(self.weights))
        self.shows_weights(tf.Variable(self.weights))
        self.shows_weights(tf.cast(self.weights, tf.bfloat16), rtol=1e-2)

    def test_mxnet(self) -> None:
        mx = pytest.importorskip("mxnet")
        self.shows_weights(mx.np.array(self.weights))

    @pytest.mark.parametrize("shape", [(), (3,), (1, 1, 1, 3, 3)])
    def test_wrong_number_of_axes(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError, match=r"matrices has shape .* expected \(queries, keys\)"):
            heatmaps(np.ones(shape))

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 3, 3)])
    def test_empty(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError, match=r"matrices has shape .* at least one cell"):
            heatmaps(np.ones(shape))

    @pytest.mark.parametrize(
        "ragged", [[[1.0, 2.0], [3.0]], [np.ones((2, 2)), np.ones((3, 3))], [[1.0, 2.0], 3.0]]
    )
    def test_ragged(self, ragged: Any) -> None:
        with pytest.raises(ShapeError, match="matrices is ragged; expected"):
            heatmaps(ragged)

    @pytest.mark.parametrize("values", [[["a", "b"]], [[1j, 2.0]]])
    def test_not_real(self, values: Any) -> None:
        with pytest.raises(DtypeError, match=r"matrices has dtype .* expected real numbers"):
            heatmaps(values)

    @pytest.mark.parametrize("figsize", [3, (3,), (3, 0), (3, -1), (np.nan, 1), ("a", "b")])
    def test_wrong_figsize(self, figsize: Any) -> None:
        with pytest.raises(ArgumentError, match=r"figsize is .* expected a width and a height"):
            heatmaps(np.eye(3), figsize=figsize)

    def test_unknown_cmap(self) -> None:
        with pytest.raises(ArgumentError, match="cmap: 'Redz'"):
            heatmaps(np.eye(3), cmap="Redz")

    def test_errors_are_also_the_built_in_ones(self) -> None:
        with pytest.raises(ValueError, match="matrices") as caught:
            heatmaps(np.ones(3))
        assert isinstance(caught.value, QkvError)


class TestFigure:
    def test_no_global_state(self) -> None:
        import matplotlib.pyplot as plt

        before = plt.get_fignums()
        heatmaps(np.eye(3))
        assert plt.get_fignums() == before

    def test_notebook_shows_it(self) -> None:
        figure: Any = heatmaps(np.eye(3))
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert "<svg" in figure._repr_svg_()

    @pytest.mark.parametrize(
        ("name", "starts"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.pdf", b"%PDF")]
    )
    def test_savefig(self, name: str, starts: bytes, tmp_path: Path) -> None:
        heatmaps(heads(2, 2, 4, 4)).savefig(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(starts)

    def test_identity_looks_as_it_did(self, tmp_path: Path) -> None:
        """To store a new picture, save this figure in its place and look at it."""
        from matplotlib.testing.compare import compare_images

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({"font.family": "DejaVu Sans", "figure.dpi": 100})
            figure = heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries")
            figure.savefig(tmp_path / "identity.png", dpi=100)
        # One cell of another colour is 14 off; another version of the font renderer, 1 or 2.
        difference = compare_images(
            str(BASELINE / "identity.png"), str(tmp_path / "identity.png"), tol=4
        )
        assert difference is None, difference


class TestImport:
    def test_is_light(self) -> None:
        code = "import sys, qkv.plot; assert 'matplotlib' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_no_picture_hides_a_module(self) -> None:
        import qkv.plot

        hidden = [name for name in qkv.plot.__all__ if find_spec(f"qkv.plot.{name}")]
        assert hidden == ["data"]

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "qkv.plot.figures", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingExtraError) as caught:
            heatmaps(np.eye(3))
        assert str(caught.value) == 'plots need matplotlib: pip install "qkv[plot]"'
        assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (8, 8), (8, 1), (3, 1, 1, 8)], ids=str)
def test_long_words_and_few_rows_cover_nothing(shape):
    words = [f"a long label number {i}" for i in range(8)]
    figure = heatmaps(np.ones(shape), xticks=words[: shape[-1]], yticks=words[: shape[-2]])
    figure.draw_without_rendering()
    *panels, bar = figure.axes
    level = [label for axes in figure.axes for label in axes.get_yticklabels()]
    named = [panel.yaxis.label for panel in panels if panel.get_ylabel()]
    boxes = [text.get_window_extent().padded(-0.5) for text in level + named]
    assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    below = [text for panel in panels for text in (*panel.get_xticklabels(), panel.xaxis.label)]
    colours = bar.get_window_extent()
    assert not [
        text
        for text in below + level[: -len(bar.get_yticks())]
        if text.get_window_extent().overlaps(colours)
    ]
