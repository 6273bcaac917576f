"""Tells Keras 2 from Keras 3, so that no other module has to find out which of them it is.

`keras` is the Keras that TensorFlow has: `tf.keras` of 2.15 is Keras 2, that of 2.16 and newer is
Keras 3, or Keras 2 with `TF_USE_LEGACY_KERAS=1` and the package `tf_keras`.

| | Keras 2 | Keras 3 |
|---|---|---|
| a variable | `tf.Variable` | `keras.Variable`, which has one |
| a table's gradient | `_keras_2` leads it past | optimizers hand it to `_keras_3.Rows` |
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith import _tensorflow

keras: Any = tf.keras
IS_KERAS_3: bool = _tensorflow.is_keras_3()

_INSTEAD = {
  "torch": ", or use the modules of monolith.torch with PyTorch",
  "jax": ", or use monolith.jax.Embedding with JAX",
}


def check_backend(backend: str) -> None:
  """Checks that Keras 3 runs on TensorFlow.

  Raises:
    ImportError: it does not.
  """
  if backend != "tensorflow":
    raise ImportError(
      f"monolith.keras needs the TensorFlow backend of Keras 3, and KERAS_BACKEND is {backend!r}: "
      f"set it to 'tensorflow' before keras is imported{_INSTEAD.get(backend, '')}"
    )


if IS_KERAS_3:
  check_backend(keras.backend.backend())

# The optimizers that Keras 2 had before 2.11, as a class; none with Keras 3.
LEGACY_OPTIMIZER: Any = () if IS_KERAS_3 else keras.optimizers.legacy.Optimizer


def variable_of(variable: Any) -> Any:
  """Returns the `tf.Variable` of a variable of Keras, or one of TensorFlow as it is."""
  return variable.value if IS_KERAS_3 and isinstance(variable, keras.Variable) else variable


def is_symbolic(value: Any) -> bool:
  """Tells whether a value stands for an input of a model that is being made."""
  return IS_KERAS_3 and isinstance(value, keras.KerasTensor)
