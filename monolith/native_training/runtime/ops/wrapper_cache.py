"""Loads an op library as `tf.load_op_library` does, without compiling its wrappers every time.

TensorFlow generates a megabyte of Python for the ops of a library and compiles it in each process,
which takes longer than all other modules of this package together. Here the compiled wrappers are
kept where Python keeps those of other modules, under the same conditions: in `__pycache__` beside
the library, or below `PYTHONPYCACHEPREFIX`, unless `PYTHONDONTWRITEBYTECODE` is set.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import tempfile
import types

from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import _pywrap_python_op_gen

_DIGEST_SIZE = hashlib.sha256().digest_size


def load_op_library(path: str) -> types.ModuleType:
  """Loads a library; TensorFlow does so once per process.

  Args:
    path: the library.

  Returns:
    A module with a wrapper for every op.

  Raises:
    tf.errors.NotFoundError: the library cannot be loaded.
  """
  handle = pywrap_tf_session.TF_LoadLibrary(path)
  try:
    source = _pywrap_python_op_gen.GetPythonWrappers(pywrap_tf_session.TF_GetOpList(handle))
  finally:
    pywrap_tf_session.TF_DeleteLibraryHandle(handle)
  # The name that TensorFlow gives it.
  name = hashlib.sha1(source).hexdigest()
  if name in sys.modules:
    return sys.modules[name]
  module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
  exec(_compile(source, path), module.__dict__)
  # As TensorFlow does it, so that AutoGraph leaves the wrappers alone; but AutoGraph looks for it
  # in the module's name, where it is not, and warns of each wrapper that it has no source.
  module._IS_TENSORFLOW_PLUGIN = True  # type: ignore[attr-defined]
  for wrapper in vars(module).values():
    if isinstance(wrapper, types.FunctionType) and wrapper.__module__ == name:
      wrapper.autograph_info__ = {}  # type: ignore[attr-defined]
  sys.modules[name] = module
  return module


def _compile(source: bytes, library: str) -> types.CodeType:
  """Returns the compiled source, from the cache if that has just this source."""
  # `cache_from_source` wants the name of a source file.
  cache = importlib.util.cache_from_source(library + ".py") + ".wrappers"
  key = hashlib.sha256(importlib.util.MAGIC_NUMBER + source).digest()
  with contextlib.suppress(OSError), open(cache, "rb") as file:
    content = file.read()
    found, digest, code = (
      content[:_DIGEST_SIZE],
      content[_DIGEST_SIZE : 2 * _DIGEST_SIZE],
      content[2 * _DIGEST_SIZE :],
    )
    # Damaged code could crash the interpreter.
    if found == key and hashlib.sha256(code).digest() == digest:
      return marshal.loads(code)
  compiled = compile(source, f"<ops of {os.path.basename(library)}>", "exec")
  if not sys.dont_write_bytecode:
    code = marshal.dumps(compiled)
    _write(cache, key + hashlib.sha256(code).digest() + code)
  return compiled


def _write(path: str, content: bytes) -> None:
  """Writes a file in one rename; a folder that cannot be written stays as it is."""
  with contextlib.suppress(OSError):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
      with open(handle, "wb") as file:
        file.write(content)
      os.replace(temporary, path)
    except OSError:
      os.unlink(temporary)
      raise
