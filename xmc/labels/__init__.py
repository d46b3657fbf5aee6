"""The label space: label matrix, label features, clusters, tree, partition, hierarchy, neighbours. No models here."""
