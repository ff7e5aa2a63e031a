"""Timings of single calls, for asv."""
