"""CPU kernels over touched label rows: one pass over memory where torch would gather, compute and scatter.

Other devices take the torch formulas in `candidates` and `optimisers`, which compute the same.
Legend: T touched groups of rows, e entries (group, document), p pairs (row, document), B documents, d width.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange

# Sums over label rows are split in this many parts whatever the number of threads, so that results do not depend on it.
PARTS = 8


def use_torch_threads() -> None:
    """Give numba as many threads as torch has in this process."""
    count = torch.get_num_threads()
    numba.set_num_threads(max(1, min(count, numba.config.NUMBA_NUM_THREADS)))
    # When numba starts its threads it gives OpenMP, and so torch, as many as there are cores. Ranks that share a
    # machine would then wait for each other's: an LSTM's step took ten times as long.
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@njit(parallel=True, cache=True, nogil=True, fastmath=True)
def score_groups(
    weight: np.ndarray,  # (L_r × d)
    embeddings: np.ndarray,  # (B × d)
    row_starts: np.ndarray,  # (T,)
    row_offsets: np.ndarray,  # (T+1,) rows before each touched group
    entry_offsets: np.ndarray,  # (T+1,)
    documents: np.ndarray,  # (e,)
    pair_offsets: np.ndarray,  # (e+1,)
    scores: np.ndarray,  # (p,) out
) -> None:
    width = weight.shape[1]
    for t in prange(row_starts.shape[0]):
        for i in range(row_offsets[t + 1] - row_offsets[t]):
            row = weight[row_starts[t] + i]
            for entry in range(entry_offsets[t], entry_offsets[t + 1]):
                embedding = embeddings[documents[entry]]
                total = weight.dtype.type(0)
                for j in range(width):
                    total += row[j] * embedding[j]
                scores[pair_offsets[entry] + i] = total


@njit(parallel=True, cache=True, nogil=True, fastmath=True)
def group_gradients(
    weight: np.ndarray,  # (L_r × d)
    embeddings: np.ndarray,  # (B × d)
    row_starts: np.ndarray,  # (T,)
    row_offsets: np.ndarray,  # (T+1,) rows before each touched group
    entry_offsets: np.ndarray,  # (T+1,)
    documents: np.ndarray,  # (e,)
    pair_offsets: np.ndarray,  # (e+1,)
    derivatives: np.ndarray,  # (p,) d loss / d score
    first: int,  # touched groups [first, last) only
    last: int,
    row_gradients: np.ndarray,  # (rows of these groups × d) out
    embedding_gradients: np.ndarray,  # (PARTS × B × d) added to
) -> None:
    width = weight.shape[1]
    parts = embedding_gradients.shape[0]
    for part in prange(parts):
        begin = first + (last - first) * part // parts
        end = first + (last - first) * (part + 1) // parts
        for t in range(begin, end):
            for i in range(row_offsets[t + 1] - row_offsets[t]):
                row = weight[row_starts[t] + i]
                gradient = row_gradients[row_offsets[t] - row_offsets[first] + i]
                for j in range(width):
                    gradient[j] = 0
                for entry in range(entry_offsets[t], entry_offsets[t + 1]):
                    document = documents[entry]
                    derivative = derivatives[pair_offsets[entry] + i]
                    embedding = embeddings[document]
                    back = embedding_gradients[part, document]
                    for j in range(width):
                        gradient[j] += derivative * embedding[j]
                        back[j] += derivative * row[j]


@njit(parallel=True, cache=True, nogil=True, fastmath=True)
def adam_rows(
    weight: np.ndarray,  # (L_r × d)
    first_moment: np.ndarray,
    second_moment: np.ndarray,
    rows: np.ndarray,  # (U,) unique
    gradients: np.ndarray,  # (U × d)
    step_size: float,
    decay: float,  # the factor 1 − lr·weight_decay
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    kind = weight.dtype.type
    b1, b2, a1, a2 = kind(beta1), kind(beta2), kind(1.0 - beta1), kind(1.0 - beta2)
    size, keep, tiny = kind(step_size), kind(decay), kind(eps)
    for u in prange(rows.shape[0]):
        w, m, v, g = weight[rows[u]], first_moment[rows[u]], second_moment[rows[u]], gradients[u]
        for j in range(weight.shape[1]):
            m[j] = b1 * m[j] + a1 * g[j]
            v[j] = b2 * v[j] + a2 * g[j] * g[j]
            w[j] = keep * w[j] - size * m[j] / (np.sqrt(v[j]) + tiny)
