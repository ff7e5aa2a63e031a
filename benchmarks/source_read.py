"""How fast shards of an uncompressed local Zarr array reach a kernel: raw reader, Zarr, and a memory map.

The file is in the page cache. Each contestant goes over all chunks once; the map is copied into one
buffer that is reused, as the raw reader does, and so is the bound of what copying can reach.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import zarr
from _bench import Bench, interleave, main

from dask_sdc.graph.sources import Loader, make_source
from dask_sdc.graph.sources.raw import RawPart
from dask_sdc.graph.sources.stored import ZarrPart

COLUMNS = 16
CHUNK = 2**24 // (8 * COLUMNS)  # rows of 16 MiB


def read(loader: Loader) -> None:
    """Load all shards of a batch."""
    for _ in loader.blocks():
        pass


def read_map(path: Path, n: int, scratch: np.ndarray) -> None:
    """Copy a flat file through a memory map, chunk by chunk."""
    mapped = np.memmap(path, dtype="f8", mode="r", shape=(n, COLUMNS))
    for start in range(0, n, CHUNK):
        rows = mapped[start : start + CHUNK]
        scratch[: len(rows)] = rows


def measure(bench: Bench) -> None:
    """Time the three."""
    n = 500_000 if bench.quick else 4_000_000
    data = np.random.default_rng(0).normal(size=(n, COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        array = zarr.create_array(
            f"{folder}/data.zarr", shape=data.shape, chunks=(CHUNK, COLUMNS), dtype="f8", compressors=None
        )
        array[:] = data
        data.tofile(f"{folder}/flat")
        source = make_source(array)
        raw = source.batch(range(source.n_shards))
        (part,) = raw.parts
        if not isinstance(part, RawPart):
            raise TypeError(f"expected the raw reader, got {type(part).__name__}")
        ordinary = replace(raw, parts=(ZarrPart("x", array, part.bounds),))
        scratch = np.empty((CHUNK, COLUMNS))
        times = interleave(
            {
                "raw": lambda: read(raw),
                "zarr": lambda: read(ordinary),
                "map": lambda: read_map(Path(folder, "flat"), n, scratch),
            },
            rounds=5 if bench.quick else 15,
        )
    for name in ("raw", "zarr", "map"):
        bench.figure(f"{name}_GB_per_s", data.nbytes / times.median(name) / 1e9)
    bench.figure("raw_over_zarr_speed", times.ratio("zarr", "raw"))
    bench.figure("raw_over_map_speed", times.ratio("map", "raw"))


if __name__ == "__main__":
    main("source_read", measure, __doc__)
