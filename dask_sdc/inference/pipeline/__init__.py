"""Staged inference on a Dask cluster."""

from __future__ import annotations

from dask_sdc.inference.pipeline.arrays import ArrayPipeline
from dask_sdc.inference.pipeline.hosting import PipelineState
from dask_sdc.inference.pipeline.pipeline import Pipeline
from dask_sdc.inference.pipeline.remote import RemotePipeline
from dask_sdc.inference.pipeline.streams import Generation, States

__all__ = ["ArrayPipeline", "Generation", "Pipeline", "PipelineState", "RemotePipeline", "States"]
