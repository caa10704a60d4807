"""What a mask says where its inner rule has nothing to say."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import errors, masks
from qkv.frameworks import get_framework, to_numpy
from tests.installed_frameworks import FRAMEWORKS


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_the_opposite_of_everything_is_nothing(fw, engine):
    x = fw.make_array(np.ones((3, 2)))
    everything = masks.window(float("inf"))
    assert (to_numpy(qkv.attend(x, x, x, mask=everything, engine=engine)) == 1).all()
    assert (to_numpy(qkv.attend(x, x, x, mask=~everything, engine=engine)) == 0).all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_numbers_that_32_bits_do_not_hold(framework):
    xp = pytest.importorskip(framework)
    make = getattr(xp, "tensor", None) or xp.asarray
    x = make(np.ones((1, 1, 3, 2)))
    ids, same = np.array([1, 2**32 + 1, 1]), np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], bool)
    want = qkv.weights(x, x, mask=make(same))
    for numbers in (ids, make(ids), ids.tolist(), ids[None]):
        np.testing.assert_array_equal(qkv.weights(x, x, mask=masks.documents(numbers)), want)
    other = masks.documents(make(ids), make(ids.astype("int32")))
    assert qkv.weights(x, x, mask=other)[0, 0, 1].sum() == 0
    far, every = [2**31], qkv.weights(x, x)
    for numbers in (far, np.array(far), make(np.array(far))):
        for mask in (masks.lengths(numbers), masks.causal(offset=numbers)):
            np.testing.assert_array_equal(qkv.weights(x, x, mask=mask), every)
        assert not qkv.weights(x, x, mask=masks.causal(offset=-make(np.array(far)))).any()


@pytest.mark.parametrize("engine", [None, "dense", "streaming"])
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_queries_without_a_batch_have_each_their_own_number(fw, engine):
    x = np.random.default_rng(0).normal(size=(3, 2))
    sees = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    want = qkv.attend(x, x, x, mask=sees)
    y = fw.make_array(x)
    for mask in (masks.lengths([1, 3, 2]), masks.causal(offset=[0, 1, -1])):
        got = to_numpy(qkv.attend(y, y, y, mask=mask, engine=engine))
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_a_batch_of_nothing_has_no_lengths(fw):
    x = fw.make_array(np.ones((0, 3, 2)))
    for mask in (masks.lengths([]), masks.causal(offset=[])):
        assert to_numpy(qkv.attend(x, x, x, mask=mask)).shape == (0, 3, 2)


@pytest.mark.parametrize("fw", [f for f in FRAMEWORKS if f.name != "numpy"], ids=lambda f: f.name)
def test_one_word_for_all_pairs(fw):
    """FlexAttention's `noop_mask` gives an array of no axes."""
    x = fw.make_array(np.arange(24.0).reshape(2, 3, 4) / 10)
    for word, want in ((0, qkv.attend(x, x, x)), (1, x * 0)):
        rule = masks.custom(lambda b, h, i, j, word=word: i[0, 0] * 0 == word)
        actual = qkv.attend(x, x, x, mask=rule)
        np.testing.assert_allclose(to_numpy(actual), to_numpy(want), atol=1e-6)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
def test_torchs_causal_biases_hold_no_numbers(name):
    torch = pytest.importorskip("torch")
    bias = getattr(pytest.importorskip("torch.nn.attention.bias"), name)(3, 3)
    x = torch.randn(2, 1, 3, 4)
    with pytest.raises(TypeError, match=r"mask is PyTorch.s CausalBias.* pass masks\.causal"):
        qkv.attend(x, x, x, mask=bias)


def test_a_block_mask_of_flex_attention_names_its_function():
    pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")
    x = np.ones((8, 2))
    with pytest.raises(TypeError, match=r"a BlockMask: pass masks\.custom\(mask\.mask_mod\)"):
        qkv.attend(x, x, x, mask=made)
    with pytest.raises(TypeError, match="BlockMask: pass its mask_mod"):
        masks.custom(made)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_floats_that_were_meant_as_booleans_are_reported(name):
    like = pytest.importorskip(name).asarray
    x, drawn = like(np.eye(4)), np.tril(np.ones((4, 4)))
    with pytest.warns(errors.AddedMaskWarning, match="pass booleans") as caught:
        actual = qkv.attend(x, x, x, mask=like(drawn))
    assert caught[0].filename == __file__
    scores = np.eye(4) / 2 + drawn
    want = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(actual, want, atol=1e-12)
    for silent in (drawn - 1, drawn * 2, np.ones((4, 4)), drawn != 0):
        qkv.attend(x, x, x, mask=like(silent))


LAYOUT = np.array([[True, False], [True, True]])


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_a_layout_of_blocks_may_be_an_array_of_any_framework(fw, monkeypatch):
    layout = fw.make_array(LAYOUT)
    # As of an array on a device, which the rules of other masks do not wait for.
    monkeypatch.setattr(type(get_framework(layout)), "concrete_value", lambda self, x: None)
    made = masks.blocks(layout, 2)
    assert type(made.layout) is np.ndarray and made.layout.tolist() == LAYOUT.tolist()


def test_a_traced_layout_of_blocks_is_refused():
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    with pytest.raises(errors.DtypeError, match="must not be traced"):
        jax.jit(lambda x: masks.blocks(x, 2).layout.sum())(jax.numpy.asarray(LAYOUT))
    with pytest.raises(errors.DtypeError, match="must not be traced"):
        masks.blocks(torch.ones(2, 2, device="meta"), 2)
