"""Defaults of the package, kept under ``sdc`` in :mod:`dask.config`.

Importing the package registers them. A YAML file in one of Dask's configuration folders, an
environment variable such as ``DASK_SDC__AUDIT_RATE`` or :func:`dask.config.set` override them.
The values, with what each means, stand in ``sdc.yaml``; ``sdc-schema.yaml`` says what is allowed.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import dask.config
import yaml

#: The contents of ``sdc.yaml``.
defaults: dict[str, Any] = yaml.safe_load(resources.files("dask_sdc").joinpath("sdc.yaml").read_text("utf-8"))

dask.config.update_defaults(defaults)
