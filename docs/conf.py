"""Sphinx configuration; build with ``sphinx-build -W -b html docs docs/_build``."""

from __future__ import annotations

import dask_sdc

project = "dask_sdc"
author = "dask_sdc developers"
copyright = author  # Sphinx reads this name
release = version = dask_sdc.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc", "myst_nb"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

html_theme = "alabaster"
html_theme_options = {"description": "Silent data corruption on Dask clusters: audit, attribute, heal"}

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # numpydoc sections carry the types, with shapes and units
numpydoc_show_class_members = False

# Notebooks are stored with their outputs: a cold run compiles kernels and takes more than a minute.
nb_execution_mode = "off"
