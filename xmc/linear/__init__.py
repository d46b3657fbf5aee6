"""The sparse one-vs-all ranker and the linear label tree: solver, negatives, pruned weights, scoring. No Ray here."""
