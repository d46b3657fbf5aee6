"""Metrics, propensities and how they are shown. Knows nothing of Ray."""
