"""Signatures of functions that capture objects."""

from __future__ import annotations

import random
from dataclasses import dataclass
from operator import attrgetter

import pytest

torch = pytest.importorskip("torch")

from qkv.frameworks.torch_signatures import NoSignatureError, SignatureBuilder  # noqa: E402


class Layer:
    kind = 1

    def __init__(self):
        self.slopes, self.weight, self.other = torch.rand(4), 0.5, 1.0
        self.shift = Shift(2.0)

    @property
    def double(self):
        return self.weight * 2

    def scale(self, s):
        return s * self.weight

    def score_mod(self, s, b, h, i, j):
        return self.scale(s) + self.slopes[h] * self.shift.by * self.double * self.kind


@dataclass
class Shift:
    by: float


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4))
        self.register_buffer("table", torch.rand(3))
        self.inner = torch.nn.Linear(2, 2)

    def score_mod(self, s, b, h, i, j):
        return s + self.slopes[h] + self.table[i]

    def nested(self, s, b, h, i, j):
        return s + self.inner(s)


def build(function):
    builder = SignatureBuilder()
    return builder.build(function), builder.tensors


def test_what_the_functions_read_of_an_object_belongs_to_the_signature():
    layer = Layer()
    first, tensors = build(layer.score_mod)
    assert tensors == [layer.slopes]
    hash(first)
    assert build(Layer().score_mod)[0] == first
    layer.other = 7.0
    assert build(layer.score_mod)[0] == first, "no function reads it"
    layer.slopes = torch.rand(4)
    same, tensors = build(layer.score_mod)
    assert same == first and tensors[0] is layer.slopes
    layer.weight = 0.25
    assert build(layer.score_mod)[0] != first, "a method of the object reads it"
    layer.weight = 0.5
    layer.shift.by = 3.0
    assert build(layer.score_mod)[0] != first
    layer.shift.by = 2.0
    assert build(layer.score_mod)[0] == first


def test_an_attribute_of_a_class(monkeypatch):
    first = build(Layer().score_mod)[0]
    monkeypatch.setattr(Layer, "kind", 2)
    assert build(Layer().score_mod)[0] != first
    monkeypatch.setattr(Layer, "scale", lambda self, s: s)
    assert build(Layer().score_mod)[0] != first


def test_an_object_in_a_closure_that_another_function_reads():
    layer = Layer()

    def read(x):
        return x.other

    def score_mod(s, b, h, i, j):
        return s * read(layer)

    first = build(score_mod)[0]
    layer.other = 2.0
    assert build(score_mod)[0] != first


def test_parameters_and_buffers_of_a_module():
    module = Module()
    signature, tensors = build(module.score_mod)
    assert {id(x) for x in tensors} == {id(module.slopes), id(module.table)}
    assert build(Module().score_mod)[0] == signature


class Scaled:
    def __init__(self):
        self.scale = 1.0

    def __call__(self, s):
        return s * self.scale


class ScaledModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, s):
        return s * self.scale * self.weight


@pytest.mark.parametrize("kind", [Scaled, ScaledModule])
def test_what_a_call_of_an_object_reads_belongs_to_the_signature(kind):
    held = kind()
    first, tensors = build(lambda s: held(s))
    assert len(tensors) == (kind is ScaledModule)
    again = kind()
    assert build(held)[0] == build(again)[0]
    again.scale = 2.0
    assert build(held)[0] != build(again)[0]
    held.scale = 2.0
    assert build(lambda s: held(s))[0] != first


def test_modules_of_pytorch_that_are_called():
    held = torch.nn.Softplus(beta=1.0)

    def score_mod(s):
        return held(s)

    first = build(score_mod)[0]
    assert build(score_mod)[0] == first
    held.beta = 2.0
    assert build(score_mod)[0] != first


def test_modules_with_hooks_have_no_signature():
    held = ScaledModule()
    held.register_forward_hook(lambda *_: None)
    with pytest.raises(NoSignatureError):
        build(lambda s: held(s))


class Lazy:
    def __getattr__(self, name):
        return 1.0


class Slots:
    __slots__ = ("weight",)


def read_dynamically(x, s):
    return s * getattr(x, "weight")  # noqa: B009


def matched(x, s):
    match x:
        case Shift(by=weight):
            return s * weight
    return s


@pytest.mark.parametrize("held", [Lazy(), Slots(), random.Random(0), [Lazy()], {1: object()}])
def test_objects_that_may_change_unnoticed_have_no_signature(held):
    with pytest.raises(NoSignatureError):
        build(lambda s: (held, s.weight)[1])


LAYER = Layer()


@pytest.mark.parametrize(
    "function",
    [
        Module().nested,
        lambda s: read_dynamically(LAYER, s),
        lambda s: attrgetter("weight")(LAYER) * s,
        lambda s: matched(LAYER, s),
    ],
)
def test_attributes_whose_names_are_not_in_the_code_have_no_signature(function):
    with pytest.raises(NoSignatureError):
        build(function)
