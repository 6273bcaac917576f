"""Small agreements between the ranks of synchronous training, on top of collectives.

None of them has a timeout. A collective that one rank gives up on stays queued in the others, and
from then on the ranks are one call apart: the next call returns the value of the one before. So an
agreement is reached, or it fails and training with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.native_training import hvd_lib

# Where an element, its features and a graph collection say whether it is the last one of its rank.
EOF_KEY = "__EofAwareTask_eof"


class Broadcast:
  """Numbers that all ranks get from rank 0; built in the default graph.

  Args:
    name: names the placeholder and, with a suffix, the collective. The same on all ranks.
    shape: the numbers' shape.
    dtype: the numbers' type.
  """

  def __init__(self, name: str, shape: Sequence[int], dtype: tf.DType):
    self.placeholder = tf.compat.v1.placeholder(dtype, shape, name=name)
    self.result = hvd_lib.broadcast(
      tf.identity(self.placeholder), 0, name=f"{self.placeholder.op.name}_broadcast"
    )

  def run(self, session: tf.compat.v1.Session, value: Any) -> np.ndarray:
    """Returns the `value` of rank 0; those of other ranks do not matter."""
    return session.run(self.result, {self.placeholder: value})


class Votes:
  """A number of every rank, seen by all of them; built in the default graph.

  Args:
    name: the collective's name, the same on all ranks.
  """

  def __init__(self, name: str):
    self._placeholder = tf.compat.v1.placeholder(tf.int64, [1], name=f"{name}_own")
    self._votes = hvd_lib.allgather(tf.identity(self._placeholder), name=name)

  def run(self, session: tf.compat.v1.Session, vote: int) -> np.ndarray:
    """Returns the votes by rank, int64 `[ranks]`."""
    return session.run(self._votes, {self._placeholder: [vote]})


def gather(name: str, value: int) -> np.ndarray:
  """Returns a number of every rank, outside any training graph.

  Args:
    name: the collective's name, used by nothing else in this process.
    value: this rank's number.
  """
  with tf.Graph().as_default(), tf.device("/device:CPU:0"):
    votes = Votes(name)
    with tf.compat.v1.Session() as session:
      return votes.run(session, value)
