"""A user's code, as mypy and pyright see it: what comes out, and what is refused.

Nothing here runs. Each `type: ignore` stands on a mistake that both checkers must find.
"""

from dataclasses import dataclass
from typing import Any, assert_type

import jax
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import qkv
from qkv import Answer, Database, masks, nn, scores, weightings
from qkv.database import encoders
from qkv.keras import Attention as KerasAttention

Floats = NDArray[np.float64]


def arrays(x: Floats, y: NDArray[np.float32], t: Tensor, j: jax.Array) -> None:
    """The array that comes in is the array that goes out."""
    assert_type(qkv.attend(x, x, x), Floats)
    assert_type(qkv.attend(y, y, y), NDArray[np.float32])
    assert_type(qkv.attend(t, t, t), Tensor)
    assert_type(qkv.attend(j, j, j), jax.Array)
    assert_type(qkv.weights(x, x), Floats)
    assert_type(qkv.weights(t, t, score="gaussian"), Tensor)
    assert_type(qkv.scaled_dot_product_attention(t, t, t, is_causal=True), Tensor)
    assert_type(qkv.scaled_dot_product_attention(j, j, j), jax.Array)


def lists(t: Tensor) -> None:
    """Lists become arrays like the other arguments, or NumPy's."""
    assert_type(qkv.attend([[1.0]], t, [[2.0]]), Tensor)
    assert_type(qkv.attend([[1.0]], [[1.0]], [[2.0]]), np.ndarray[Any, Any])
    assert_type(qkv.weights([[1]], [[1]]), np.ndarray[Any, Any])
    qkv.attend("query", t, t)  # type: ignore[call-overload]
    qkv.weights(t, 3.0)  # type: ignore[arg-type]


def parameters(p: torch.nn.Parameter, t: Tensor) -> None:
    assert_type(qkv.attend(p, t, t), Tensor)


def returned(t: Tensor, x: Floats, flag: bool) -> None:
    """Additional results are returned together with the output."""
    assert_type(qkv.attend(t, t, t, return_lse=True), tuple[Tensor, Tensor])
    assert_type(qkv.attend(t, t, t, return_weights=True), tuple[Tensor, Tensor])
    assert_type(qkv.attend(t, t, t, return_weights="mean"), tuple[Tensor, Tensor])
    assert_type(
        qkv.attend(x, x, x, return_lse=True, return_weights=True), tuple[Floats, Floats, Floats]
    )
    assert_type(qkv.attend(t, t, t, return_lse=False), Tensor)
    out, lse = qkv.attend(t, t, t, return_lse=True, mask="causal")
    assert_type(out, Tensor)
    assert_type(lse, Tensor)
    result = qkv.attend(t, t, t, return_lse=flag)
    assert not isinstance(result, Tensor)
    assert_type(result[0], Tensor)
    qkv.attend(t, t, t, return_weights="heads")  # type: ignore[call-overload]


def names(t: Tensor) -> None:
    """A name that is spelled wrongly is found, wherever it goes."""
    qkv.attend(t, t, t, score="gaussian", weighting="entmax15", mask="causal", engine="dense")
    qkv.attend(t, t, t, score="gausian")  # type: ignore[call-overload]
    qkv.attend(t, t, t, score="additive")  # type: ignore[call-overload]  # it has parameters
    qkv.attend(t, t, t, score=scores.Gaussian)  # type: ignore[arg-type]  # it is not built
    qkv.attend(t, t, t, weighting="soft")  # type: ignore[call-overload]
    qkv.attend(t, t, t, weighting="topk")  # type: ignore[call-overload]
    qkv.attend(t, t, t, mask="casual")  # type: ignore[call-overload]
    qkv.attend(t, t, t, engine="flash")  # type: ignore[call-overload]
    qkv.attend(t, t, t, scor="dot")  # type: ignore[call-overload]
    qkv.weights(t, t, score="gausian")  # type: ignore[arg-type]
    qkv.explain(t, t, t, weighting="soft")  # type: ignore[arg-type]
    nn.Attention("gausian")  # type: ignore[arg-type]
    nn.MultiHeadAttention(8, 2, weighting="entmax")  # type: ignore[arg-type]
    nn.TransformerBlock(8, 2, weighting="entmax")  # type: ignore[arg-type]
    nn.TransformerEncoder(2, 8, 2, score="gausian")  # type: ignore[arg-type]
    nn.TransformerEncoder(2, 8, 2, dim_feedfoward=16)  # type: ignore[call-arg]
    KerasAttention("gausian")  # type: ignore[arg-type]


def objects(t: Tensor, live: Tensor) -> None:
    """Scores, weightings and masks are objects too, and a score may be a function."""

    def mine(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    assert_type(qkv.attend(t, t, t, score=scores.Gaussian(0.5)), Tensor)
    assert_type(qkv.attend(t, t, t, score=mine, weighting=weightings.TopK(8)), Tensor)
    assert_type(qkv.attend(t, t, t, mask=masks.causal & masks.window(3)), Tensor)
    assert_type(qkv.attend(t, t, t, mask=live), Tensor)
    assert_type(str(qkv.explain(t, t, t)), str)


@scores.register("mine")
@dataclass(frozen=True)
class Mine(scores.Score):
    scale: float = 1.0

    def __call__(self, query: Any, key: Any) -> Any:
        return self.scale * query @ key.mT


def names_of_ones_own(t: Tensor, name: str) -> None:
    """A name that no checker can know goes through `resolve`, and so does a variable."""
    assert_type(Mine(2.0).scale, float)
    assert_type(qkv.attend(t, t, t, score=Mine()), Tensor)
    assert_type(qkv.attend(t, t, t, score=scores.resolve("mine")), Tensor)
    assert_type(qkv.attend(t, t, t, weighting=weightings.resolve(name)), Tensor)
    Database({"a": 1}, encoder=encoders.resolve("module:function"))
    qkv.attend(t, t, t, score="mine")  # type: ignore[call-overload]
    qkv.attend(t, t, t, score=name)  # type: ignore[call-overload]


def databases(x: Floats, t: Tensor) -> None:
    """A database knows the types of its keys and values where they are there to see."""
    majors = Database({"Ann": "art", "Bo": "law"})
    assert_type(majors, Database[str, str])
    assert_type(majors["Bo"], str)
    assert_type(majors.get("Bo"), str | None)
    assert_type(majors.get_all("Bo"), list[str])
    assert_type(list(majors), list[str])
    assert_type(Database([(3.1, 70.5), (3.9, 95.0)])[3.1], float)
    assert_type(Database(["a", "b"], [1, 2])["a"], int)
    assert_type(majors.ask("Bob"), Answer)
    assert_type(majors.ask(["Bob", "Anne"]), list[Answer])
    assert_type(majors.ask("Bob", score="gaussian", weighting="hard", top=3), Answer)
    assert_type(majors.at(1), Database[str, str])
    assert_type(majors.info()["rows"], int)
    assert_type(majors.ask("Bob").rows[0].weight, float)
    majors["Cy"] = "physics"
    majors["Cy"] = 3  # type: ignore[assignment]
    majors[3]  # type: ignore[index]
    majors.ask("Bob", score="gausian")  # type: ignore[call-overload]
    majors.ask("Bob", tops=3)  # type: ignore[call-overload]
    majors.info()["row"]  # type: ignore[typeddict-item]
    Database({"a": 1}, encoder="letters")  # type: ignore[arg-type]
    vectors = Database(x, x)
    assert_type(vectors, Database[Any, Any])
    assert_type(vectors.attend(x), Floats)
    assert_type(vectors.attend(t), Tensor)
    assert_type(vectors.attend([1.0, 2.0]), np.ndarray)
    assert_type(qkv.open("books.qkv"), Database[Any, Any])


def served(x: Floats) -> None:
    """A server's database gives what one of this process gives."""
    client = qkv.Client("http://127.0.0.1:8000", token="…", timeout=5.0)
    assert_type(client.databases(), list[str])
    assert_type(client.ask("books", "dune"), Answer)
    assert_type(client.ask("books", ["dune", "maus"]), list[Answer])
    assert_type(client["books"].ask("dune", score="gaussian", top=3), Answer)
    assert_type(client.attend("vectors", x), np.ndarray)
    assert_type(client.remove("books", "dune"), int)
    assert_type(client.info("books")["rows"], int)
    assert_type(client["books"].at(1).count("year < 1900"), int)
    client.ask("books", "dune", score="gausian")  # type: ignore[call-overload]
    client.ask("books", "dune", tops=3)  # type: ignore[call-overload]
    client.info("books")["row"]  # type: ignore[typeddict-item]


def layers(t: Tensor, x: Floats) -> None:
    """A layer gives what its `forward` gives."""
    assert_type(nn.Attention("gaussian")(t, t, t), Tensor)
    assert_type(nn.Attention()(t, t, t, need_weights=True), tuple[Tensor, Tensor])
    assert_type(nn.SelfAttention(8)(t), Tensor)
    assert_type(nn.SelfAttention(8)(t, masks.causal, need_weights=True), tuple[Tensor, Tensor])
    heads = nn.MultiHeadAttention(8, 2, score="additive", rotary=True)
    assert_type(heads(t, t, t, mask="causal"), tuple[Tensor, Tensor | None])
    assert_type(nn.MultiHeadAttention(8, 2, score=nn.GaussianScore)(t, t, t)[0], Tensor)
    assert_type(nn.TransformerBlock(8, 2, weighting="entmax15")(t, is_causal=True), Tensor)
    assert_type(nn.TransformerEncoder(2, 8, 2, dim_feedforward=16)(t), Tensor)
    assert_type(nn.TransformerDecoder(2, 8, 2, score=nn.AdditiveScore)(t, t), Tensor)
    assert_type(nn.Transformer(8, 2)(t, t), Tensor)
    assert_type(nn.FeedForward(8)(t), Tensor)
    assert_type(nn.Rotary(8)(t), Tensor)
    assert_type(nn.SqueezeExcitation(8)(t), Tensor)
    assert_type(nn.KernelRegression(t, t)(t), Tensor)
    assert_type(nn.AdditiveScore(8, 8)(t, t), Tensor)
    assert_type(nn.BahdanauDecoder(10, 4, 8, 6)(t, t), tuple[Tensor, Tensor, Tensor])
    heads(t, t)  # type: ignore[call-arg]
    nn.SelfAttention(8)(x)  # type: ignore[call-overload]
    nn.TransformerBlock(8, 2)(t, causal=True)  # type: ignore[arg-type]
    KerasAttention(score="additive", weighting="entmax15")
