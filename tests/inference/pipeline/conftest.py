"""Configuration that the clusters of these tests see."""

from __future__ import annotations

import dask_sdc.config  # noqa: F401  # before distributed.utils_test, which copies what is there
