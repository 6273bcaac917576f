"""The collectives of synchronous training, whatever library carries them out.

Importing this module imports no such library; the first use does, once per process:

| | backend |
|---|---|
| environment variable `MONOLITH_WITH_BYTEPS` is on | `byteps.tensorflow` |
| Horovod is installed, with its TensorFlow part | `horovod.tensorflow` |
| it is not, or what started the process says nothing to it, and there are several ranks | \
`monolith.native_training.ranks.tensorflow_engine`: TensorFlow's own collectives |
| this process is alone | one rank inside this process, no library |

`MONOLITH_RANKS_ENGINE` (`horovod` or `tensorflow`) decides between the two in the middle; `init`
logs which one it is.

Everything is an attribute of one object, `_backend`, to which the module forwards: `init`, `rank`,
`size`, `local_rank`, `local_size`, `is_initialized`, `allgather`, `allreduce`, `alltoall`,
`broadcast`, `grouped_allreduce`, `BroadcastGlobalVariablesHook`, `lib`, `enable_bps`, `is_enabled`,
`has_gpu_kernels`, `is_exchange_error` and `check_size`. Collectives are matched by name between
ranks: give each its own, the same on all of them.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import shlex
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import kernels

from monolith import _tensorflow
from monolith.native_training import env_utils
from monolith.native_training.ranks import thread_slices
from monolith.native_training.settings import rank_environment as mpi_utils

_SOURCE = pathlib.Path(__file__).resolve().parents[2] / "third_party/horovod"
INSTALL_HOROVOD = (
  f"pip install {shlex.quote(str(_SOURCE))}"
  if _SOURCE.is_dir()  # in a checkout
  else "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation "
  "--no-cache-dir --force-reinstall horovod==0.28.1 (needs cmake 3, make and a C++17 compiler)"
)

_TENSORFLOW_MODULE = "monolith.native_training.ranks.tensorflow_engine"
# As that module says it.
_EXCHANGE_FAILED = "the exchange with the other ranks failed"


class _Backend:
  """Forwards to the library, which it imports on first use."""

  def __init__(self):
    self._lock = threading.Lock()
    self._lib: Any = None

  @property
  def enable_bps(self) -> bool:
    """Whether BytePS is asked for."""
    return env_utils.get_bool("MONOLITH_WITH_BYTEPS")

  @property
  def lib(self) -> Any:
    """The library.

    Raises:
      ImportError: it is missing, and several processes want it.
    """
    if self._lib is None:
      with self._lock:
        if self._lib is None:
          self._lib = _import_byteps() if self.enable_bps else _import_engine()
    return self._lib

  def is_enabled(self) -> bool:
    """Tells whether there are ranks to talk to.

    The environment variable `MONOLITH_WITH_HOROVOD` decides. Where it is not set, an initialised
    library does, or a launcher that started several ranks: without it they would drift apart.
    """
    return env_utils.get_bool(
      "MONOLITH_WITH_HOROVOD",
      default=self.is_initialized() or (mpi_utils.read_launcher("size") or 1) > 1,
    )

  def check_size(self, wanted: int, what: str) -> None:
    """Checks that there are as many ranks as `what` asks for.

    Raises:
      AssertionError: there are not.
    """
    size = self.size()
    assert size == wanted, f"{what} is {wanted}, but there are {size} ranks" + (
      f": {self._lib.reason}" if isinstance(self._lib, _OneRank) else ""
    )

  def init(self, *args: Any, **kwargs: Any) -> None:
    """Meets the other ranks; a second call does nothing.

    Raises:
      ImportError: there are several, and no library can bring them together.
      RuntimeError: not all of them come.
    """
    was_initialized = self.is_initialized()
    # Its threads carry out the collectives, for which the op threads of all ranks wait.
    with thread_slices.prompt_threads():
      self.lib.init(*args, **kwargs)
    if not was_initialized and not isinstance(self.lib, _OneRank):
      logging.info("Rank %d of %d: %s exchanges", self.rank(), self.size(), _describe(self.lib))

  def is_exchange_error(self, error: Exception) -> bool:
    """Tells whether an error of a step says that an exchange with the other ranks has failed."""
    return isinstance(error, tf.errors.OpError) and (
      "Horovod" in str(error) or _EXCHANGE_FAILED in str(error)
    )

  def is_initialized(self) -> bool:
    """Tells whether `init` was called, here or in the library itself; imports nothing."""
    if self._lib is not None:
      return self._lib.is_initialized()
    return mpi_utils.find_initialized_backend() is not None

  def rank(self) -> int:
    return self.lib.rank()

  def size(self) -> int:
    return self.lib.size()

  def local_rank(self) -> int:
    return self.lib.local_rank()

  def local_size(self) -> int:
    return self.lib.local_size()

  def has_gpu_kernels(self) -> bool:
    """Tells whether collectives can be placed on a GPU: Horovod is often built without."""
    if isinstance(self.lib, _OneRank):
      return True
    if _name_of(self.lib) == _TENSORFLOW_MODULE:
      return False
    op = "BytepsPushPull" if self.enable_bps else "HorovodAlltoall"
    registered = kernels.get_registered_kernels_for_op(op)
    return any(kernel.device_type == "GPU" for kernel in registered.kernel)

  def allgather(self, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first dimension."""
    return self.lib.allgather(*args, **kwargs)

  def broadcast(self, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Returns the tensor of the root rank, the second argument."""
    return self.lib.broadcast(*args, **kwargs)

  def allreduce(self, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Averages a tensor over the ranks, or what the keyword `op` says."""
    return self.lib.allreduce(*args, **kwargs)

  def grouped_allreduce(self, *args: Any, **kwargs: Any) -> list[tf.Tensor]:
    """Does `allreduce` for a list of tensors at once."""
    return self.lib.grouped_allreduce(*args, **kwargs)

  def alltoall(
    self,
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
  ) -> tf.Tensor:
    """Sends rows to every rank and returns those received, by rank of the sender.

    Args:
      tensor: `[n, ...]`, rows for rank 0 first.
      splits: int32 `[ranks]`, how many rows go to each; equally many by default.
      name: the same on all ranks, and used by nothing else.

    Returns:
      `[m, ...]`, only the rows: how many came from each rank is not part of the result.
    """
    result = self.lib.alltoall(tensor, splits=splits, name=name)
    return result[0] if isinstance(result, (tuple, list)) else result

  def BroadcastGlobalVariablesHook(self, *args: Any, **kwargs: Any):  # noqa: N802
    """Returns a hook that gives all ranks the variables of the root rank, the first argument."""
    lib = self.lib
    hook = _tensorflow.find_broadcast_hook(lib) or functools.partial(_BroadcastHook, lib)
    return hook(*args, **kwargs)


class _BroadcastHook(tf.compat.v1.train.SessionRunHook):
  """Horovod's hook, which Horovod has only where TensorFlow still has `tf.estimator`."""

  def __init__(self, lib: Any, root_rank: int, device: str = ""):
    super().__init__()
    self._lib, self._root_rank, self._device = lib, root_rank, device
    self._op: tf.Operation | None = None

  def begin(self) -> None:
    if self._op is None or self._op.graph is not tf.compat.v1.get_default_graph():
      with tf.device(self._device):
        self._op = self._lib.broadcast_global_variables(self._root_rank)

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    del coord
    session.run(self._op)


def _import_byteps() -> Any:
  try:
    return importlib.import_module("byteps.tensorflow")
  except ImportError as error:
    raise ImportError(
      "MONOLITH_WITH_BYTEPS is on, but BytePS cannot be imported: unset it to use Horovod."
    ) from error


def _import_engine() -> Any:
  engine = mpi_utils.read_engine()
  is_alone = not mpi_utils.is_under_mpi() or mpi_utils.read_launcher("size") == 1
  if engine == mpi_utils.TENSORFLOW or (engine is None and mpi_utils.meets_without_library()):
    if is_alone:
      return _OneRank("nothing has started several")
    return importlib.import_module(_TENSORFLOW_MODULE)
  if not is_alone and mpi_utils.meets_without_library():
    raise ImportError(
      f"{mpi_utils.ENGINE_ENV} is {mpi_utils.HOROVOD!r}, but what has started this process says "
      "nothing to Horovod: "
      f"start ranks with horovodrun or mpirun, or leave {mpi_utils.ENGINE_ENV} out"
    )
  return _import_horovod(engine, is_alone)


def _import_horovod(engine: str | None, is_alone: bool) -> Any:
  try:
    return importlib.import_module("horovod.tensorflow")
  except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name in ("horovod", "horovod.tensorflow"):
      reason = f"Horovod is not installed: {INSTALL_HOROVOD}"
    elif "horovod.tensorflow has not been built" in str(error):
      reason = f"Horovod was built without TensorFlow: {INSTALL_HOROVOD}"
    else:
      raise  # It is there but cannot be loaded, and the user wants to know.
    if is_alone:
      return _OneRank(reason)
    if engine is None and mpi_utils.read_master() is not None:
      return importlib.import_module(_TENSORFLOW_MODULE)
    raise ImportError(
      "Synchronous training with several processes needs Horovod, or MASTER_ADDR and MASTER_PORT "
      f"where ranks meet without it. {reason}"
    ) from error


def _name_of(lib: Any) -> str:
  """Returns the name of the module; that of its class for an object in a module's place."""
  return getattr(lib, "__name__", None) or type(lib).__name__


def _describe(lib: Any) -> str:
  name = _name_of(lib)
  if name == _TENSORFLOW_MODULE:
    return "TensorFlow"
  return f"{name.split('.')[0].capitalize()} {getattr(lib, '__version__', '')}".strip()


class _Compression:
  """Horovod's `Compression`: there is no network to save."""

  none = None
  fp16 = None


class _OneRank:
  """Stands in for Horovod in a process that is alone, as far as this package uses it.

  Args:
    reason: why it is not Horovod itself.
  """

  Average = "Average"
  Sum = "Sum"
  Compression = _Compression

  def __init__(self, reason: str):
    self.reason = reason
    self._is_initialized = False

  def init(self) -> None:
    self._is_initialized = True

  def shutdown(self) -> None:
    self._is_initialized = False

  def is_initialized(self) -> bool:
    return self._is_initialized

  # There is no other rank to meet, so these work before `init` too.
  def rank(self) -> int:
    return 0

  def size(self) -> int:
    return 1

  def local_rank(self) -> int:
    return 0

  def local_size(self) -> int:
    return 1

  def allgather(self, tensor: tf.Tensor, name: str | None = None, **_: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
      raise ValueError("allgather of a scalar, want at least one dimension")
    return tf.identity(tensor, name=name)

  def broadcast(
    self, tensor: tf.Tensor, root_rank: int, name: str | None = None, **_: Any
  ) -> tf.Tensor:
    if root_rank != 0:
      raise ValueError(f"root_rank is {root_rank}, but there is only rank 0")
    return tf.identity(tensor, name=name)

  def allreduce(self, tensor: Any, name: str | None = None, **_: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
      return tf.IndexedSlices(
        tf.identity(tensor.values, name=name), tensor.indices, tensor.dense_shape
      )
    return tf.identity(tensor, name=name)

  def grouped_allreduce(self, tensors: Sequence[Any], **_: Any) -> list[Any]:
    return [self.allreduce(tensor) for tensor in tensors]

  def alltoall(
    self,
    tensor: tf.Tensor,
    splits: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    **_: Any,
  ) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    if splits is None:
      return tf.identity(tensor, name=name)
    splits = tf.convert_to_tensor(splits, tf.int32)
    with tf.control_dependencies(
      [tf.debugging.assert_equal(splits, tf.shape(tensor)[:1], "splits do not add up to the rows")]
    ):
      return tf.identity(tensor, name=name), splits

  class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook with nothing to do."""

    def __init__(self, root_rank: int, device: str = ""):
      if root_rank != 0:
        raise ValueError(f"root_rank is {root_rank}, but there is only rank 0")
      super().__init__()


_backend = _Backend()


def __getattr__(name: str) -> Any:
  if name.startswith("_"):
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(_backend, name)


def __dir__() -> list[str]:
  return sorted({*globals(), *(name for name in dir(_Backend) if not name.startswith("_"))})
