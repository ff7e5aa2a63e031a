"""The cluster layer: plugins of scheduler and workers, and the `Auditor` that users call."""
