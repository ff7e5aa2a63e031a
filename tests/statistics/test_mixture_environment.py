"""What a worker derives from a model must not depend on its processor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Weights and means whose mean is rounded one way or the other, as products are fused or not.
PROGRAM = """
import numpy as np
from dask_sdc.statistics.gaussian import grand_mean
rng = np.random.default_rng(5)
for k, d in ((3, 3), (7, 40), (16, 129)):
    weights = rng.dirichlet(np.ones(k))
    means = 1e9 + rng.normal(size=(k, d))
    print(grand_mean({"weights": weights, "means": means}).tobytes().hex())
"""


def printed(**environment: str) -> str:
    command, whole = [sys.executable, "-c", PROGRAM], os.environ | environment
    run = subprocess.run(command, env=whole, capture_output=True, text=True, check=True)
    return run.stdout


@pytest.mark.parametrize(
    "environment",
    [
        {"OPENBLAS_CORETYPE": "Nehalem"},
        {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"},
    ],
    ids=["old BLAS", "no vectors"],
)
def test_the_centre_of_tied_scatters_has_the_same_bits_everywhere(environment: dict[str, str]) -> None:
    assert len(printed()) > 1000
    assert printed() == printed(**environment)
