"""The work of training on a sequence, by its length."""

from __future__ import annotations

import math

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.manifest import HEAD, embedding, hf_manifest

SEGMENT_PARAMETERS = 4e6
"""Parameters that a token passes, forward and backward, while the kernels of one layer take a sequence of a few tokens:
220 us on a core that computes 110 GFLOP/s (an Intel Xeon)."""


def pair_cost(model: ModelConfig) -> float:
    """Work of a token's look at one other token, as a part of all else that a token costs.

    Forward and backward take 6 operations for each parameter that a token passes, and 12 for each pair of a query and a
    key and each element of all query heads together, half of which a causal kernel leaves out (Narayanan et al., arXiv
    2104.04473, appendix). A token passes some of a layer's experts; the embedding is looked up, and the output layer
    computes responses only. Linear attention has no pairs.
    """
    layers = sum(not model.is_linear(layer) for layer in range(model.num_layers))
    return pairs_share(model, layers, _passed(model))


def segment_cost(model: ModelConfig) -> float:
    """Work of one more sequence in a row beside its tokens', in that of a token: on CPU each has kernels of its own in
    each layer, which start and copy."""
    return SEGMENT_PARAMETERS * model.num_layers / _passed(model)


def _passed(model: ModelConfig) -> float:
    """Parameters of the layers that a token passes."""
    passed = 0.0
    for name, shape in hf_manifest(model):
        if name not in (embedding(model), HEAD, *model.value_head):
            share = model.experts_per_token / model.num_experts if ".experts." in name else 1.0
            passed += math.prod(shape) * share
    return passed


def pairs_share(model: ModelFacts, layers: int, passed: float) -> float:
    """Same as `pair_cost`, for so many layers with pairs and so many parameters that a token passes."""
    return layers * model.num_heads * model.head_dim / passed
