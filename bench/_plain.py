"""The operations of the plain formulas in each framework, and how each runs a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Arrays = dict[str, Array]
Function = Callable[[Arrays], Array]
"""A function of named arrays that returns an array, or a tuple whose first entry is the output."""


class Plain:
    """NumPy's functions, which JAX shares; the other frameworks override what they name otherwise.

    The last axis is the one that is summed, sorted and normalized; sums keep it.
    """

    name = "numpy"
    modes = ("eager",)
    dtypes = ("f32", "f64")
    directions = ("forward",)
    each = True
    """Whether a call is complete when it returns."""
    first_calls = 1
    """How many calls take longer than the later ones."""

    def __init__(self) -> None:
        self.xp = np

    # arrays

    def array(self, x: np.ndarray, dtype: str = "f32") -> Array:
        kinds = {"f32": "float32", "f64": "float64"}
        return self.xp.asarray(x, kinds[dtype] if x.dtype.kind == "f" else None)

    def normals(self, seed: int, dtype: str) -> Callable[..., Array]:
        """Return a function that draws normal numbers of a shape."""
        rng = np.random.default_rng(seed)
        return lambda *shape: self.array(np.asarray(rng.standard_normal(shape, np.float32)), dtype)

    def widen(self, x: Array) -> Array:
        """Return x in float32 if it has fewer bits."""
        return x

    def compare_arrays(self, x: Array, y: Array) -> tuple[float, float]:
        """Return ‖x − y‖ / ‖y‖, and the share of rows where it exceeds a hundredth."""
        a, b = (np.asarray(self.numbers(z), float) for z in (x, y))
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf"), 1.0
        a, b = (np.where(np.isfinite(z), z, 0.0) for z in (a, b))
        rows, sizes = (np.linalg.norm(np.atleast_1d(z), axis=-1) for z in (a - b, b))
        # Gradients that are zero in theory are not compared with each other's rounding.
        total = max(float(np.linalg.norm(sizes)), 1e-3 * max(b.size, 1) ** 0.5)
        off = float(np.linalg.norm(rows)) / total
        return off, float(np.mean(rows > 0.01 * (sizes + 1e-3)))

    def numbers(self, x: Array) -> np.ndarray:
        return np.asarray(x)

    def cast(self, x: Array, like: Array) -> Array:
        return x.astype(like.dtype)

    def settle(self) -> None:
        """Wait for the device."""

    # the formulas

    def dot(self, q: Array, k: Array) -> Array:
        return q @ k.swapaxes(-1, -2)

    def matmul(self, a: Array, b: Array) -> Array:
        return a @ b

    def sum(self, x: Array) -> Array:
        return x.sum(-1, keepdims=True)

    def max(self, x: Array) -> Array:
        return x.max(-1, keepdims=True)

    def exp(self, x: Array) -> Array:
        return self.xp.exp(x)

    def log1p(self, x: Array) -> Array:
        return self.xp.log1p(x)

    def sqrt(self, x: Array) -> Array:
        return self.xp.sqrt(x)

    def tanh(self, x: Array) -> Array:
        return self.xp.tanh(x)

    def abs(self, x: Array) -> Array:
        return self.xp.abs(x)

    def positive(self, x: Array) -> Array:
        return self.xp.maximum(x, 0)

    def where(self, condition: Array, x: Array, y: Any) -> Array:
        return self.xp.where(condition, x, y)

    def sort(self, x: Array) -> Array:
        """Return the rows in descending order."""
        return -self.xp.sort(-x, axis=-1)

    def cumsum(self, x: Array) -> Array:
        return self.xp.cumsum(x, axis=-1)

    def argmax(self, x: Array) -> Array:
        return x.argmax(-1)

    def take_along(self, x: Array, i: Array) -> Array:
        return self.xp.take_along_axis(x, i, -1)

    def take_rows(self, x: Array, i: Array) -> Array:
        """Return the rows x[…, i, :]."""
        return self.xp.take_along_axis(x, i[..., None], -2)

    def take(self, table: Array, i: Array) -> Array:
        return table[i]

    def count(self, x: Array) -> Array:
        return x.sum(-1, keepdims=True)

    def one_hot(self, i: Array, size: int, like: Array) -> Array:
        return (i[..., None] == self.xp.arange(size)).astype(like.dtype)

    def kth_largest(self, s: Array, k: int) -> Array:
        return np.partition(s, s.shape[-1] - k, -1)[..., s.shape[-1] - k, None]

    def softmax(self, s: Array) -> Array:
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def logsumexp(self, s: Array) -> Array:
        top = s.max(-1, keepdims=True)
        return np.log(np.exp(s - top).sum(-1)) + top[..., 0]

    def sigmoid(self, s: Array) -> Array:
        return 1 / (1 + np.exp(-s))

    def softplus(self, s: Array) -> Array:
        return np.logaddexp(s, 0)

    def mean_rows(self, x: Array) -> Array:
        return x.mean(-2, keepdims=True)

    def expand_rows(self, x: Array, n: int) -> Array:
        """Return the one row of x n times."""
        return self.xp.broadcast_to(x, (*x.shape[:-2], n, x.shape[-1]))

    def mean_heads(self, x: Array) -> Array:
        return x.mean(-3)

    def ones(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.xp.ones(shape, like.dtype)

    def arange(self, n: int, like: Array) -> Array:
        return self.xp.arange(n)

    def repeat_heads(self, x: Array, times: int) -> Array:
        return self.xp.repeat(x, times, -3)

    def norm(self, x: Array) -> Array:
        return self.xp.linalg.norm(x, axis=-1, keepdims=True)

    def unit(self, x: Array) -> Array:
        return x / self.norm(x)

    def square_distance(self, q: Array, k: Array) -> Array:
        square = (q * q).sum(-1)[..., :, None] + (k * k).sum(-1)[..., None, :] - 2 * self.dot(q, k)
        return self.positive(square)

    def distance(self, q: Array, k: Array) -> Array:
        return self.sqrt(self.square_distance(q, k))

    def city_distance(self, q: Array, k: Array) -> Array:
        return self.abs(q[..., :, None, :] - k[..., None, :, :]).sum(-1)

    def equal(self, q: Array, k: Array) -> Array:
        return (q[..., :, None, :] == k[..., None, :, :]).all(-1).astype(q.dtype)

    def stop(self, x: Array) -> Array:
        """Return x without gradient."""
        return x

    def dropout(self, w: Array, p: float) -> Array:
        return w * (np.random.default_rng().random(w.shape, np.float32) >= p) / w.dtype.type(1 - p)

    @property
    def seed(self) -> Any:
        """The `seed` of `attend` with dropout."""
        return None

    # running

    def forward(self, function: Function, arrays: Arrays, mode: str) -> Callable[[], Any]:
        return lambda: function(arrays)

    def both(
        self, function: Function, arrays: Arrays, leaves: list[str], along: Array, mode: str
    ) -> Callable[[], Any]:
        """Return a function that returns the gradients of Σ output · along."""
        raise NotImplementedError("NumPy has no gradients")


class PlainTorch(Plain):
    name = "torch"
    dtypes = ("f32", "bf16")
    directions = ("forward", "both")

    def __init__(self, device: str = "cpu") -> None:
        self.xp = self.torch = importlib.import_module("torch")
        self.device, self.each = device, device == "cpu"
        self._kinds = {"f32": self.torch.float32, "bf16": self.torch.bfloat16}

    def array(self, x: np.ndarray, dtype: str = "f32") -> Array:
        kind = self._kinds[dtype] if x.dtype.kind == "f" else None
        return self.torch.as_tensor(x).to(device=self.device, dtype=kind)

    def normals(self, seed: int, dtype: str) -> Callable[..., Array]:
        make = self.torch.Generator(device=self.device).manual_seed(seed)
        kind = self._kinds[dtype]

        def draw(*shape: int) -> Array:
            return self.torch.randn(shape, generator=make, device=self.device).to(kind)

        return draw

    def compare_arrays(self, x: Array, y: Array) -> tuple[float, float]:
        if x.shape != y.shape:
            return float("inf"), 1.0
        x, y = x.detach().float(), y.detach().float()
        if not self.torch.equal(x.isfinite(), y.isfinite()):
            return float("inf"), 1.0
        x, y = (self.torch.nan_to_num(z, 0.0, 0.0, 0.0) for z in (x, y))
        norm = self.torch.linalg.vector_norm
        rows, sizes = (norm(self.torch.atleast_1d(z), dim=-1) for z in (x - y, y))
        off = float(norm(rows)) / max(float(norm(sizes)), 1e-3 * max(y.numel(), 1) ** 0.5)
        return off, float((rows > 0.01 * (sizes + 1e-3)).float().mean())

    def widen(self, x: Array) -> Array:
        return x.detach().float() if x.is_floating_point() else x

    def numbers(self, x: Array) -> np.ndarray:
        return x.detach().float().cpu().numpy()

    def cast(self, x: Array, like: Array) -> Array:
        return x.to(like.dtype)

    def settle(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def dot(self, q: Array, k: Array) -> Array:
        return q @ k.mT

    def max(self, x: Array) -> Array:
        return x.amax(-1, keepdim=True)

    def positive(self, x: Array) -> Array:
        return x.clamp(min=0)

    def sort(self, x: Array) -> Array:
        return x.sort(-1, descending=True).values

    def take_along(self, x: Array, i: Array) -> Array:
        return x.gather(-1, i)

    def take_rows(self, x: Array, i: Array) -> Array:
        return self.torch.take_along_dim(x, i[..., None], -2)

    def one_hot(self, i: Array, size: int, like: Array) -> Array:
        return self.torch.nn.functional.one_hot(i, size).to(like.dtype)

    def kth_largest(self, s: Array, k: int) -> Array:
        return s.topk(k, sorted=True).values[..., -1:]

    def softmax(self, s: Array) -> Array:
        return self.torch.softmax(s, -1)

    def logsumexp(self, s: Array) -> Array:
        return self.torch.logsumexp(s, -1)

    def sigmoid(self, s: Array) -> Array:
        return self.torch.sigmoid(s)

    def softplus(self, s: Array) -> Array:
        return self.torch.nn.functional.softplus(s)

    def expand_rows(self, x: Array, n: int) -> Array:
        return x.expand(*x.shape[:-2], n, x.shape[-1])

    def ones(self, shape: tuple[int, ...], like: Array) -> Array:
        return like.new_ones(shape)

    def arange(self, n: int, like: Array) -> Array:
        return self.torch.arange(n, device=like.device)

    def repeat_heads(self, x: Array, times: int) -> Array:
        return x.repeat_interleave(times, -3)

    def unit(self, x: Array) -> Array:
        return self.torch.nn.functional.normalize(x, dim=-1)

    def distance(self, q: Array, k: Array) -> Array:
        if q.dtype == self.torch.bfloat16:  # of which cdist has none
            return super().distance(q, k)
        return self.torch.cdist(q, k)

    def city_distance(self, q: Array, k: Array) -> Array:
        if q.is_cuda:  # the gradient of cdist with p=1 accesses illegal memory for many pairs
            return super().city_distance(q, k)
        if q.dtype == self.torch.bfloat16:
            return self.torch.cdist(q.float(), k.float(), p=1).to(q.dtype)
        return self.torch.cdist(q, k, p=1)

    def equal(self, q: Array, k: Array) -> Array:
        return (q[..., :, None, :] == k[..., None, :, :]).all(-1).to(q.dtype)

    def stop(self, x: Array) -> Array:
        return x.detach()

    def dropout(self, w: Array, p: float) -> Array:
        return self.torch.nn.functional.dropout(w, p)

    def both(
        self, function: Function, arrays: Arrays, leaves: list[str], along: Array, mode: str
    ) -> Callable[[], Any]:
        arrays = {**arrays, **{x: arrays[x].detach().requires_grad_() for x in leaves}}
        inputs = [arrays[x] for x in leaves]

        def run() -> Any:
            out = function(arrays)
            out = out[0] if isinstance(out, tuple) else out
            return self.torch.autograd.grad(
                out, inputs, along, allow_unused=True, materialize_grads=True
            )

        return run


class PlainJax(Plain):
    name = "jax"
    modes = ("eager", "jit")
    dtypes = ("f32",)
    directions = ("forward", "both")

    def __init__(self) -> None:
        self.jax = importlib.import_module("jax")
        self.xp = self.jax.numpy

    def kth_largest(self, s: Array, k: int) -> Array:
        return self.jax.lax.top_k(s, k)[0][..., -1:]

    def softmax(self, s: Array) -> Array:
        return self.jax.nn.softmax(s, -1)

    def logsumexp(self, s: Array) -> Array:
        return self.jax.nn.logsumexp(s, -1)

    def sigmoid(self, s: Array) -> Array:
        return self.jax.nn.sigmoid(s)

    def softplus(self, s: Array) -> Array:
        return self.jax.nn.softplus(s)

    def one_hot(self, i: Array, size: int, like: Array) -> Array:
        return self.jax.nn.one_hot(i, size, dtype=like.dtype)

    def distance(self, q: Array, k: Array) -> Array:
        square = self.square_distance(q, k)  # sqrt has no derivative at 0
        near = square > 0
        return self.where(near, self.sqrt(self.where(near, square, 1.0)), 0.0)

    def stop(self, x: Array) -> Array:
        return self.jax.lax.stop_gradient(x)

    @property
    def seed(self) -> Any:
        return self.jax.random.key(7)

    def dropout(self, w: Array, p: float) -> Array:
        kept = self.jax.random.bernoulli(self.jax.random.key(7), 1 - p, w.shape)
        return self.where(kept, w / (1 - p), 0.0)

    def forward(self, function: Function, arrays: Arrays, mode: str) -> Callable[[], Any]:
        run = self.jax.jit(function) if mode == "jit" else function
        return lambda: self.jax.block_until_ready(run(arrays))

    def both(
        self, function: Function, arrays: Arrays, leaves: list[str], along: Array, mode: str
    ) -> Callable[[], Any]:
        rest = {name: x for name, x in arrays.items() if name not in leaves}
        inputs = {name: arrays[name] for name in leaves}

        def total(inputs: Arrays, rest: Arrays) -> Any:
            out = function({**rest, **inputs})
            return ((out[0] if isinstance(out, tuple) else out) * along).sum()

        gradient = self.jax.grad(total)
        run = self.jax.jit(gradient) if mode == "jit" else gradient

        def call() -> Any:
            found = self.jax.block_until_ready(run(inputs, rest))
            return [found[name] for name in leaves]

        return call


class PlainTensorFlow(Plain):
    name = "tensorflow"
    modes = ("eager", "jit")
    """The second is `tf.function`."""
    first_calls = 2  # the second one traces the plan
    dtypes = ("f32",)
    directions = ("forward", "both")

    def __init__(self) -> None:
        self.xp = self.tf = importlib.import_module("tensorflow")

    def array(self, x: np.ndarray, dtype: str = "f32") -> Array:
        return self.tf.constant(x.astype("float32") if x.dtype.kind == "f" else x)

    def numbers(self, x: Array) -> np.ndarray:
        return self.tf.convert_to_tensor(x).numpy()

    def cast(self, x: Array, like: Array) -> Array:
        return self.tf.cast(x, like.dtype)

    def dot(self, q: Array, k: Array) -> Array:
        return self.tf.matmul(q, k, transpose_b=True)

    def sum(self, x: Array) -> Array:
        return self.tf.reduce_sum(x, -1, keepdims=True)

    def max(self, x: Array) -> Array:
        return self.tf.reduce_max(x, -1, keepdims=True)

    def log1p(self, x: Array) -> Array:
        return self.tf.math.log1p(x)

    def positive(self, x: Array) -> Array:
        return self.tf.nn.relu(x)

    def sort(self, x: Array) -> Array:
        return self.tf.sort(x, direction="DESCENDING")

    def cumsum(self, x: Array) -> Array:
        return self.tf.cumsum(x, -1)

    def argmax(self, x: Array) -> Array:
        return self.tf.argmax(x, -1)

    def take_along(self, x: Array, i: Array) -> Array:
        return self.tf.gather(x, i, axis=-1, batch_dims=len(x.shape) - 1)

    def take_rows(self, x: Array, i: Array) -> Array:
        return self.tf.gather(x, i, axis=-2, batch_dims=len(x.shape) - 2)

    def take(self, table: Array, i: Array) -> Array:
        return self.tf.gather(table, i)

    def count(self, x: Array) -> Array:
        return self.tf.reduce_sum(self.tf.cast(x, "int32"), -1, keepdims=True)

    def one_hot(self, i: Array, size: int, like: Array) -> Array:
        return self.tf.one_hot(i, size, dtype=like.dtype)

    def kth_largest(self, s: Array, k: int) -> Array:
        return self.tf.math.top_k(s, k).values[..., -1:]

    def softmax(self, s: Array) -> Array:
        return self.tf.nn.softmax(s)

    def logsumexp(self, s: Array) -> Array:
        return self.tf.reduce_logsumexp(s, -1)

    def sigmoid(self, s: Array) -> Array:
        return self.tf.sigmoid(s)

    def softplus(self, s: Array) -> Array:
        return self.tf.nn.softplus(s)

    def mean_rows(self, x: Array) -> Array:
        return self.tf.reduce_mean(x, -2, keepdims=True)

    def expand_rows(self, x: Array, n: int) -> Array:
        return self.tf.repeat(x, n, -2)

    def mean_heads(self, x: Array) -> Array:
        return self.tf.reduce_mean(x, -3)

    def ones(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.tf.ones(shape, like.dtype)

    def arange(self, n: int, like: Array) -> Array:
        return self.tf.range(n)

    def repeat_heads(self, x: Array, times: int) -> Array:
        return self.tf.repeat(x, times, -3)

    def norm(self, x: Array) -> Array:
        return self.tf.norm(x, axis=-1, keepdims=True)

    def square_distance(self, q: Array, k: Array) -> Array:
        q2, k2 = self.sum(q * q), self.sum(k * k)
        return self.positive(q2 + self.tf.linalg.matrix_transpose(k2) - 2 * self.dot(q, k))

    distance = PlainJax.distance

    def city_distance(self, q: Array, k: Array) -> Array:
        return self.tf.reduce_sum(self.abs(q[..., :, None, :] - k[..., None, :, :]), -1)

    def equal(self, q: Array, k: Array) -> Array:
        same = self.tf.equal(q[..., :, None, :], k[..., None, :, :])
        return self.tf.cast(self.tf.reduce_all(same, -1), q.dtype)

    def stop(self, x: Array) -> Array:
        return self.tf.stop_gradient(x)

    def dropout(self, w: Array, p: float) -> Array:
        return self.tf.nn.dropout(w, p)

    def forward(self, function: Function, arrays: Arrays, mode: str) -> Callable[[], Any]:
        run = self.tf.function(function) if mode == "jit" else function
        return lambda: run(arrays)

    def both(
        self, function: Function, arrays: Arrays, leaves: list[str], along: Array, mode: str
    ) -> Callable[[], Any]:
        tf = self.tf

        def gradient(arrays: Arrays) -> Any:
            inputs = [arrays[name] for name in leaves]
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                out = function(arrays)
                out = out[0] if isinstance(out, tuple) else out
                total = tf.reduce_sum(out * along)
            return tape.gradient(total, inputs, unconnected_gradients="zero")

        run = tf.function(gradient) if mode == "jit" else gradient
        return lambda: run(arrays)


def load_plain(framework: str, device: str = "cpu") -> Plain:
    if framework == "torch":
        return PlainTorch(device)
    kinds = {"numpy": Plain, "jax": PlainJax, "tensorflow": PlainTensorFlow}
    return kinds[framework]()


def sparsemax(o: Plain, s: Array) -> Array:
    """max(0, s − t), with the threshold t from the sorted row."""
    ordered = o.sort(s)
    rank = o.cast(o.arange(s.shape[-1], s) + 1, s)
    t = (o.cumsum(ordered) - 1) / rank
    size = o.count(ordered > t)
    return o.positive(s - o.take_along(t, size - 1))


def entmax15(o: Plain, s: Array) -> Array:
    """max(0, s/2 − t)², with the threshold t from prefix means and variances of the sorted row."""
    s = (s - o.max(s)) / 2
    ordered = o.sort(s)
    rank = o.cast(o.arange(s.shape[-1], s) + 1, s)
    mean = o.cumsum(ordered) / rank
    spread = rank * (o.cumsum(ordered**2) / rank - mean**2)
    # sqrt has no derivative at 0; these entries are not among the chosen thresholds.
    inside = (1 - spread) / rank
    root = o.sqrt(o.where(inside > 0, inside, 1.0))
    t = mean - o.where(inside > 0, root, 0.0)
    size = o.count(t <= ordered)
    return o.positive(s - o.take_along(t, size - 1)) ** 2


def entmax(o: Plain, s: Array, alpha: Any, steps: int = 30) -> Array:
    """max(0, (α−1)s − t)^(1/(α−1)) by bisection; one Newton step gives t its gradient."""
    power = 1 / (alpha - 1)
    s = (s - o.max(s)) * (alpha - 1)

    def weigh(t: Array) -> Array:
        inside = s - t
        return o.where(inside > 0, o.where(inside > 0, inside, 1.0) ** power, 0.0)

    fixed, low, width = o.stop(s), o.stop(o.max(s)) - 1, 1.0
    for _ in range(steps):
        width /= 2
        inside = o.positive(fixed - low - width)
        low = o.where(o.sum(inside**power) >= 1, low + width, low)
    slope = o.sum(power * o.positive(fixed - low) ** (power - 1))
    t = low + (o.sum(weigh(low)) - 1) / o.stop(slope)
    return weigh(t)
