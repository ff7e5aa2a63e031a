"""Datasets of many samples, some of which cannot be had: made on a cluster, written to Zarr, proved."""

from __future__ import annotations

from dask_sdc.dataset.api import GeneratedDataset, generate_dataset
from dask_sdc.dataset.outputs import Output
from dask_sdc.dataset.reading import batches, open_dataset, verify_dataset
from dask_sdc.dataset.report import DatasetReport
from dask_sdc.dataset.staged import GeneratedIds, HiddenStates

__all__ = [
    "DatasetReport",
    "GeneratedDataset",
    "GeneratedIds",
    "HiddenStates",
    "Output",
    "batches",
    "generate_dataset",
    "open_dataset",
    "verify_dataset",
]
