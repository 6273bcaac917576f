"""Collisionless tables in JAX: lookups and updates outside `jit`, and inside it by callbacks.

  import jax
  import monolith.jax

  users = monolith.jax.Embedding(16, optimizer="adagrad", learning_rate=0.1)
  params = {"users": users.init(), "dense": ...}

  def loss(params, ids, labels):
    vectors = users(params["users"], ids)      # [batch, 16]
    ...

  gradients = jax.grad(loss)(params, ids, labels)      # steps the rows

| name | what it is |
|---|---|
| `Embedding` | ids of any shape to vectors; the way back is a step of the table's optimizer |
| `Ids` | int64 ids as two halves, which JAX does not cut off |
| `pack_ids` | makes `Ids` |

Rows are in main memory, and Python copies them for each call. No TensorFlow is loaded.
"""

from monolith import _install

with _install.naming_extra("jax"):
  from monolith.jax.embedding import Embedding
  from monolith.jax.ids import Ids, pack_ids

__all__ = ["Embedding", "Ids", "pack_ids"]
