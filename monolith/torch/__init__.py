"""Collisionless tables as modules of PyTorch, on CPUs and GPUs.

  import torch
  import monolith.torch

  user = monolith.torch.Embedding(16)                  # no num_embeddings: rows come as ids do
  vectors = user(torch.tensor([7, -9, 2**62]))         # [3, 16]

| name | what it is |
|---|---|
| `Embedding` | ids of any shape to vectors |
| `EmbeddingBag` | bags of ids to one vector each, with the call of `torch.nn.EmbeddingBag` |
| `EmbeddingBagCollection` | the bags of many features, with the call of TorchRec's |
| `EmbeddingCollection` | the same without pooling, for sequences |
| `EmbeddingBagConfig`, `EmbeddingConfig` | one table of a collection, and its features |
| `KeyedJaggedTensor`, `KeyedTensor` | what a collection takes and gives, without TorchRec |
| `JaggedTensor` | one feature of a `KeyedJaggedTensor`, or its vectors |
| `LOCAL` | as `process_group`: every process has a table of its own |

A table with an optimizer of its own steps in `backward()`. One without follows the optimizer of
PyTorch that gets its parameter, with that one's learning rate, when that steps. No TensorFlow is
loaded.
"""

from monolith import _install

with _install.naming_extra("torch"):
  from monolith.torch.collection import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
  )
  from monolith.torch.keyed import JaggedTensor, KeyedJaggedTensor, KeyedTensor
  from monolith.torch.modules import Embedding, EmbeddingBag
  from monolith.torch.ranks import LOCAL

__all__ = [
  "LOCAL",
  "Embedding",
  "EmbeddingBag",
  "EmbeddingBagCollection",
  "EmbeddingBagConfig",
  "EmbeddingCollection",
  "EmbeddingConfig",
  "JaggedTensor",
  "KeyedJaggedTensor",
  "KeyedTensor",
]
