"""What `gpu_check` measures: calls of the kernels, the bytes that they have to move, and plain expressions.

Arrays are made when a case is, and dropped with it. Nothing here imports CuPy: a `Device` brings its
namespace, so that every case runs on the emulation of the tests as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dask_sdc.inference.model.cache import LayerCache
from dask_sdc.inference.model.kernels.cuda import CapturedKernels, CudaKernels
from dask_sdc.inference.model.kernels.cuda.attention import attend_chunk, attend_rows
from dask_sdc.inference.model.kernels.cuda.products import multiply
from dask_sdc.inference.model.kernels.cuda.rows import activate, normalise
from dask_sdc.inference.model.kernels.layout import LINEAR, SWIGLU, Block, Geometry, Linear, Norm
from dask_sdc.statistics import mixture_model
from dask_sdc.statistics.gaussian import components_of
from dask_sdc.statistics.kernels.cuda import Device
from dask_sdc.statistics.kernels.cuda.histogram import cuda_count
from dask_sdc.statistics.kernels.cuda.kmeans import cuda_lloyd
from dask_sdc.statistics.kernels.cuda.mixture import cuda_expectation
from dask_sdc.statistics.kernels.cuda.moments import cuda_moments
from dask_sdc.statistics.kernels.cuda.scatter import cuda_products

Array = Any


@dataclass(frozen=True)
class Case:
    """One kernel on one block.

    Parameters
    ----------
    name, group : str
        Shown in the table; targets are of groups.
    nbytes : int
        Bytes that any implementation has to read and write.
    kernel : callable
        The call of the package.
    plain : callable or None
        The same by plain expressions of the namespace, as a user would write it.
    """

    name: str
    group: str
    nbytes: int
    kernel: Callable[[], Any]
    plain: Callable[[], Any] | None = None


def cases(device: Device, size: int) -> Iterator[Case]:
    """Yield all cases, of blocks of about ``size`` bytes where bandwidth counts."""
    yield from _moments(device, size)
    yield from _histograms(device, size)
    yield from _scatters(device, size)
    yield from _clusters(device, size)
    yield from _mixtures(device, size)
    yield from _rows(device, size)
    yield from _attention(device, size)
    yield from _products(device, size)
    yield from _steps(device, size)


def samples(device: Device, size: int, features: int, dtype: str = "float32") -> Array:
    """Return a block (n, features) of about ``size`` bytes."""
    xp, rows = device.xp, max(size // features // np.dtype(dtype).itemsize, 1)
    # Uniform numbers made in place of normal ones, whose generation would take most of the time.
    x = xp.arange(rows * features, dtype=xp.int64).reshape(rows, features)
    return (((x * 1103515245 + 12345) % 65537).astype(dtype) / 16384 - 2).astype(dtype)


def _moments(device: Device, size: int) -> Iterator[Case]:
    for features, dtype in ((1, "float32"), (64, "float32"), (64, "float64"), (1027, "float32")):
        x = samples(device, size, features, dtype)

        def kernel(x: Array = x) -> Any:
            return cuda_moments(device, x, None, True, False)

        def plain(x: Array = x) -> Any:
            # In pieces of rows, as float64 copies of all of it would not fit.
            xp, rows, total = device.xp, max(len(x) // 16, 1), []
            for begin in range(0, len(x), rows):
                d = x[begin : begin + rows].astype(xp.float64)
                mean = d.mean(axis=0)
                d -= mean
                square = d * d
                total.append(
                    (mean, square.sum(axis=0), (square * d).sum(axis=0), (square * square).sum(axis=0))
                )
            return total, x.min(axis=0), x.max(axis=0)

        yield Case(f"moments {features} {dtype}", "moments", x.nbytes, kernel, plain)


def _histograms(device: Device, size: int) -> Iterator[Case]:
    for bins, spacing in ((100, "even"), (1000, "even"), (40, "uneven")):
        edges = np.linspace(-2, 2, bins + 1)
        if spacing == "uneven":
            edges = np.sign(edges) * edges**2
        x = samples(device, size, 1)
        on_device = device.xp.asarray(edges.astype(np.float32))

        def kernel(x: Array = x, edges: Array = edges) -> Any:
            return cuda_count(device, x, (edges,), None, 1)

        def plain(x: Array = x, edges: Array = on_device) -> Any:
            return device.xp.histogram(x.reshape(-1), edges)[0]

        yield Case(f"histogram {bins} {spacing}", "histogram", x.nbytes, kernel, plain)


def _scatters(device: Device, size: int) -> Iterator[Case]:
    """Against the matrix product alone, in float64, of a block that is centred already."""
    for features in (256, 1024):
        x = samples(device, size // 4, features)
        pilot, vector = np.zeros(features), np.ones(features)
        wide = x.astype(device.xp.float64)

        def kernel(x: Array = x, pilot: Array = pilot, vector: Array = vector) -> Any:
            return cuda_products(device, x, pilot, None, vector)

        def plain(wide: Array = wide) -> Any:
            return wide.T @ wide

        yield Case(f"scatter {features}", "scatter", x.nbytes, kernel, plain)


def _clusters(device: Device, size: int) -> Iterator[Case]:
    xp, (k, features) = device.xp, (16, 16)
    x = samples(device, size // 16, features)
    centres = np.random.default_rng(0).normal(size=(k, features))
    on_device = xp.asarray(centres)

    def plain() -> Any:
        wide = x.astype(xp.float64)
        distance = (on_device**2).sum(axis=1) - 2 * wide @ on_device.T
        chosen = (distance.argmin(axis=1)[:, None] == xp.arange(k)).astype(xp.float64)
        return chosen.T @ wide, chosen.sum(axis=0)

    yield Case(
        f"k-means {k} of {features}", "k-means", x.nbytes, lambda: cuda_lloyd(device, x, None, centres), plain
    )


def _mixtures(device: Device, size: int) -> Iterator[Case]:
    rng, (k, features) = np.random.default_rng(1), (16, 16)
    x = samples(device, size // 16, features)
    for kind, given in (("diag", np.ones((k, features))), ("full", [np.eye(features) + 0.2] * k)):
        means = rng.normal(size=(k, features))
        model = mixture_model(np.full(k, 1 / k), means, covariances=given, covariance_type=kind)
        components = components_of(model, kind)

        def kernel(components: Any = components) -> Any:
            return cuda_expectation(device, components, x, None)

        yield Case(
            f"E-step {kind} {k} of {features}",
            "expectation",
            x.nbytes,
            kernel,
            _plain_e(device, components, x),
        )


def _plain_e(device: Device, components: Any, x: Array) -> Callable[[], Any]:
    """Return the E-step of Gaussian components as plain expressions, in float64."""
    xp, k = device.xp, len(components.means)
    means, factors, constants = (
        xp.asarray(a) for a in (components.means, components.factors, components.constants)
    )
    diagonal = factors.ndim == 3 and factors.shape[:2] == (1, k)

    def plain() -> Any:
        wide = x.astype(xp.float64)
        if diagonal:
            z = (wide[:, None, :] - means) * factors[0]
            joint = constants - 0.5 * (z * z).sum(axis=2)
        else:
            whitened = [(wide - means[c]) @ factors[c] for c in range(k)]
            joint = xp.stack(
                [constants[c] - 0.5 * (y * y).sum(axis=1) for c, y in enumerate(whitened)], axis=1
            )
        largest = joint.max(axis=1, keepdims=True)
        size = xp.log(xp.exp(joint - largest).sum(axis=1, keepdims=True)) + largest
        r = xp.exp(joint - size)
        if diagonal:
            second = r.T @ (wide * wide)
        else:
            second = xp.stack([((wide - means[c]) * r[:, c : c + 1]).T @ (wide - means[c]) for c in range(k)])
        return size.sum(), r.sum(axis=0), r.T @ wide, second

    return plain


def _rows(device: Device, size: int) -> Iterator[Case]:
    xp, width = device.xp, 4096
    x = samples(device, size // 4, width)
    gain, none = xp.ones(width, dtype=xp.float32), xp.empty(0, dtype=xp.float32)

    def plain_norm() -> Any:
        return x / xp.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * gain

    def plain_activation() -> Any:
        gate, up = x[:, : width // 2], x[:, width // 2 :]
        return gate / (1 + xp.exp(-gate)) * up

    yield Case(
        "RMSNorm 4096", "rows", 2 * x.nbytes, lambda: normalise(device, x, gain, none, 1e-5), plain_norm
    )
    yield Case(
        "SwiGLU 2048", "rows", 3 * x.nbytes // 2, lambda: activate(device, x, none, True), plain_activation
    )


def _attention(device: Device, size: int) -> Iterator[Case]:
    heads, kv_heads, width = 32, 8, 128
    for batch in (1, 16):
        length = max(size // 4 // (batch * 2 * kv_heads * width * 4), 2)
        layer = _layer(device, batch, kv_heads, length, width)
        q = _queries(device, batch, heads, width)

        def kernel(q: Array = q, layer: LayerCache = layer, length: int = length) -> Any:
            return attend_rows(device, q, layer, 1, length - 1, 0, None)

        def plain(q: Array = q, layer: LayerCache = layer) -> Any:
            return _plain_attention(device, q, layer)

        nbytes = layer.k.nbytes + layer.v.nbytes
        yield Case(f"decode {batch} of {length}", "decode", nbytes, kernel, plain)
    steps = min(512, max(size >> 12, 16))
    length = max(size >> 20, steps)
    layer = _layer(device, 1, kv_heads, length, width)
    q = _queries(device, steps, heads, width)
    nbytes = layer.k.nbytes + layer.v.nbytes + 2 * q.nbytes
    yield Case(
        f"prefill {steps} of {length}",
        "prefill",
        nbytes,
        lambda: attend_chunk(device, q, layer, steps, length - steps, 0),
        lambda: _plain_chunk(device, q, layer),
    )


def _products(device: Device, size: int) -> Iterator[Case]:
    """Of one row and of eight, against cuBLAS with weights that are float32 already."""
    xp, width = device.xp, max(min(4096, int((size // 4) ** 0.5) // 64 * 64), 64)
    weight = samples(device, 4 * width * width, width)[:width]
    for rows in (1, 8):
        x = samples(device, 4 * rows * width, width)[:rows]

        def kernel(x: Array = x) -> Any:
            return multiply(device, x, weight)

        def plain(x: Array = x) -> Any:
            return xp.matmul(x, weight.T)

        yield Case(f"product {rows} of {width}", "products", weight.nbytes, kernel, plain)


def _steps(device: Device, size: int) -> Iterator[Case]:
    """One token through layers of bfloat16: captured, against launch by launch."""
    xp, layers, width = device.xp, 4, 64
    hidden = max(min(4096, int((size / (17 * layers)) ** 0.5) // 64 * 64), 64)
    heads = hidden // width
    kv_heads, length = max(heads // 4, 1), min(1000, max(size >> 12, 4))
    blocks = [_block(device, i, hidden, (heads + 2 * kv_heads) * width) for i in range(layers)]
    cached = [_layer(device, 1, kv_heads, length + 1, width) for _ in blocks]
    geometry = Geometry(heads, kv_heads, width, 0, width**-0.5, 1e-5)
    x = samples(device, 4 * hidden, hidden)[:1]
    turns = xp.ones((1, width // 2), dtype=xp.float32), xp.zeros((1, width // 2), dtype=xp.float32)
    captured = CapturedKernels(blocks, geometry, device)
    single = CudaKernels(blocks, geometry, device, by_row=True)
    weights = sum(w.weight.nbytes for b in blocks for w in (b.qkv, b.o, b.up, b.down))
    yield Case(
        f"token, {layers} layers of {hidden}",
        "step",
        weights + sum(layer.k.nbytes + layer.v.nbytes for layer in cached),
        lambda: captured.run(x, 1, *turns, cached, length),
        lambda: single.run(x, 1, *turns, cached, length),
    )


def _block(device: Device, number: int, hidden: int, qkv: int) -> Block:
    xp, none = device.xp, device.xp.empty(0, dtype=device.xp.float32)
    norm = Norm(xp.ones(hidden, dtype=xp.float32), none)

    def linear(outputs: int, inputs: int, activation: int = LINEAR) -> Linear:
        w = samples(device, 4 * outputs * inputs, inputs)[:outputs] / np.float32(inputs)
        return Linear((w.view(xp.uint32) >> 16).astype(xp.uint16), none, activation)

    inner = 2 * hidden
    up, down = linear(2 * inner, hidden, SWIGLU), linear(hidden, inner)
    return Block(number, norm, linear(qkv, hidden), linear(hidden, hidden), norm, up, down)


def _queries(device: Device, rows: int, heads: int, width: int) -> Array:
    return samples(device, rows * heads * width * 4, width).reshape(rows, heads, width) / np.float32(
        width**0.5
    )


def _layer(device: Device, batch: int, kv_heads: int, length: int, width: int) -> LayerCache:
    rows = samples(device, 4 * batch * kv_heads * length * width, width)
    k = rows.reshape(batch, kv_heads, length, width)
    return LayerCache(k, k / 2, None)


def _plain_attention(device: Device, q: Array, layer: LayerCache) -> Array:
    """Attend one row per sequence (B, H, W) to all keys."""
    xp, (batch, heads, width) = device.xp, q.shape
    kv_heads = layer.k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = grouped @ layer.k.transpose(0, 1, 3, 2)
    scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return (scores / scores.sum(axis=-1, keepdims=True) @ layer.v).reshape(batch, heads * width)


def _plain_chunk(device: Device, q: Array, layer: LayerCache) -> Array:
    """Attend rows (T, H, W) at the last positions to those before them."""
    xp, (steps, heads, width) = device.xp, q.shape
    kv_heads, length = layer.k.shape[1:3]
    grouped = q.reshape(steps, kv_heads, -1, width).transpose(1, 2, 0, 3)
    scores = grouped @ layer.k[0][:, None].transpose(0, 1, 3, 2)
    seen = xp.arange(length)[None, :] <= xp.arange(length - steps, length)[:, None]
    scores = xp.where(seen, scores, xp.float32(-xp.inf))
    scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = scores / scores.sum(axis=-1, keepdims=True) @ layer.v[0][:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(steps, heads * width)
