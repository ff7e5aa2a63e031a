"""Makes the package's defaults part of the configuration that `gen_cluster` restores for every test."""

from __future__ import annotations

import dask_sdc.config  # noqa: F401  # before distributed.utils_test, which copies what is there
