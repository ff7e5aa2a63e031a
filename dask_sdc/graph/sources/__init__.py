"""Data sources: from user data to shards that any worker can load."""

from __future__ import annotations

from dask_sdc.graph.block import Block
from dask_sdc.graph.sources.loader import Loader, Reader
from dask_sdc.graph.sources.source import MAX_DUPLICATION, Source, make_source

__all__ = ["MAX_DUPLICATION", "Block", "Loader", "Reader", "Source", "make_source"]
