"""Makes ids of strings: FarmHash's `Fingerprint64` of the bytes, modulo `2**63 - 1`.

The function is fixed by FarmHash: it gives the same id in every process, on every machine and in
every version, so a table that was trained today knows the strings of tomorrow. That any two among
a billion strings share an id has a probability of 5 %, among ten million of 5 in a million. The
layers of `monolith.keras` hash strings in the same way.
"""

from __future__ import annotations

import tensorflow as tf

_HASH_RANGE = 2**63 - 1


def hash_strings(values: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
  """Returns the ids of strings.

  Args:
    values: strings of any shape, dense or ragged.

  Returns:
    int64 of the same shape.

  Raises:
    TypeError: the values are no strings.
  """
  if isinstance(values, tf.RaggedTensor):
    return values.with_flat_values(hash_strings(values.flat_values))
  values = tf.convert_to_tensor(values)
  if values.dtype != tf.string:
    raise TypeError(f"values are {values.dtype.name}, want strings: numbers are ids already")
  return tf.strings.to_hash_bucket_fast(values, _HASH_RANGE)
