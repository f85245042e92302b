"""The sampler's distribution in NumPy float64, with sorts: slow and plain."""

import numpy as np


def penalised(logits, prompt, output, presence=0.0, frequency=0.0, repetition=1.0):
    logits = np.array(logits, np.float64)
    for token in set(prompt) | set(output):
        logits[token] = (
            logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        )
    for token in set(output):
        logits[token] -= frequency * list(output).count(token) + presence
    return logits


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of one row, float64[V]; ties at a border are kept."""
    logits = np.asarray(logits, np.float64) / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[p < min_p * p.max()] = 0.0
    if 0 < top_k < p.size:
        p[p < np.sort(p)[-top_k]] = 0.0
    p /= p.sum()
    if top_p < 1.0:
        order = np.argsort(-p, kind="stable")
        reached = np.searchsorted(np.cumsum(p[order]), top_p)
        p[p < p[order[min(reached, p.size - 1)]]] = 0.0
    return p / p.sum()


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    centred = logits - logits.max(axis=-1, keepdims=True)
    return centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True))
