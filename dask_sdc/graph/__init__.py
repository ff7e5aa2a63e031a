"""Audited task graphs: data sources, what runs on a worker, layers; knows dask, not distributed."""
