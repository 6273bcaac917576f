"""Every op of the Monolith library, loaded when this module is imported.

  from monolith.native_training.runtime.ops import gen_monolith_ops as ops
  ops.monolith_fused_value_rowids(splits)          # snake case, positional
  ops.MonolithFusedValueRowids(splits=splits)      # the raw op, keywords only

Raises:
  ImportError: the library is missing or was built against another TensorFlow.
"""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops_base
from monolith.native_training.runtime.ops.gen_monolith_ops_base import *  # noqa: F403

load_library = gen_monolith_ops_base.load_library


def monolith_aligned_flat_concat(
  inputs: list[tf.Tensor], scale: tf.Tensor | float = 1.0, name: str | None = None
) -> tf.Tensor:
  """Calls the generated wrapper with a default for `scale`, which an op's input cannot have."""
  return gen_monolith_ops_base.monolith_aligned_flat_concat(inputs, scale, name=name)
