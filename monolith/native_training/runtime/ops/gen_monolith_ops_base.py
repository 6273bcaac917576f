"""Loads the op library once and holds every wrapper that TensorFlow generates for its ops.

Each op has two names here: `monolith_touched_key_set(...)` with positional arguments, and the raw
`MonolithTouchedKeySet(...)` with keyword arguments only. Use them through `gen_monolith_ops`.

The environment variable `MONOLITH_OP_LIBRARY` names another build of the library to load, such as
one with a sanitizer.

Loading it sets `TF_FORCE_GPU_ALLOW_GROWTH` to `true` unless the user has set it: TensorFlow then
takes memory of a GPU as it needs it, and tables find some, whichever session comes first.
"""

import os
import types

from monolith import _install, utils
from monolith.native_training.runtime.ops import wrapper_cache

LIBRARY_PATH = os.environ.get("MONOLITH_OP_LIBRARY") or utils.get_libops_path(
  "monolith/native_training/runtime/ops/libtfkernel_monolith_ops_for_load.so"
)


def load_library() -> types.ModuleType:
  """Loads the op library; TensorFlow does so once per process.

  Returns:
    A module with a wrapper for every op.

  Raises:
    ImportError: the library is missing or was built for another TensorFlow.
  """
  path = LIBRARY_PATH
  if not os.path.exists(path):
    raise ImportError(
      f"The op library {path} does not exist: build it with {_install.install_line()}"
    )
  _install.check_build()
  return wrapper_cache.load_op_library(path)


# The first session of a process decides for all, with a plain one for nearly all memory.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
_wrappers = load_library()
__all__ = [name for name in dir(_wrappers) if not name.startswith("_")]
globals().update({name: getattr(_wrappers, name) for name in __all__})
