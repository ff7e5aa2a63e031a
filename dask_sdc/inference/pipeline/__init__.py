"""Staged inference on a Dask cluster."""

from __future__ import annotations

from dask_sdc.inference.pipeline.pipeline import Generation, Pipeline

__all__ = ["Generation", "Pipeline"]
