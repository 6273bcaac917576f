"""How strings become ids: FarmHash's Fingerprint64, read as a signed 64-bit number.

The function is fixed by FarmHash: it gives the same id in every process, on every machine and in
every version, so a table that was trained today knows the strings of tomorrow. That any two among
a billion strings collide has a probability of 3 %, among ten million strings of 3 in a million.
"""

from __future__ import annotations

import tensorflow as tf


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
  # Of a vector, the op hashes each string by itself; of a matrix, it would hash each row.
  digests = tf.fingerprint(tf.reshape(values, [-1]), method="farmhash64")
  return tf.reshape(tf.bitcast(digests, tf.int64), tf.shape(values))
