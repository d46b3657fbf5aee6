"""Heads: what a system does with the embeddings of a batch and the labels of a rank's block. One file a system."""
