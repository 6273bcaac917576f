"""Exchanges between ranks by TensorFlow's own collectives, where there is no Horovod.

The module has the functions of `horovod.tensorflow` that this package uses, and `hvd_lib` forwards
to the one or the other. TensorFlow's collectives want a session on a server, runs that have the
same number on all ranks, and one shape per instance; a training step has none of these. So a step
has an op that hands its tensors over and waits, and for every exchange, by its name, a session here
runs again and again what carries it out:

    take -> header -> gather of headers -> pack -> collective -> give
    waits for the step's op    who sends how much          ends the step's op

Steps need no special session. Exchanges of different names pass one another; those of one name are
carried out in the order of the calls, which is the same on all ranks.

Ranks find one another by `TF_CONFIG`, or at `MASTER_ADDR` and `MASTER_PORT` (`ranks.meeting`).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import tensorflow as tf
from absl import logging

from monolith.native_training.ranks import meeting
from monolith.native_training.runtime.ops import gen_monolith_ops, gen_monolith_ops_base
from monolith.native_training.settings import rank_environment

Average = "Average"
Sum = "Sum"

# The error of an exchange that the other ranks left unfinished says this.
FAILED = "the exchange with the other ranks failed"

_LEADER = "/job:worker/replica:0/task:0"
# How long ranks that begin wait for the others, and ranks that end for others to get everything.
_HELLO_MILLISECS = 120_000
_GOODBYE_MILLISECS = 5000
_END_SECS = 10.0
_MEET = "monolith_ranks_meet"
_HEADER_INSTANCE = 1
# Types that TensorFlow's collectives sum.
_SUMMED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
# A message holds less than 2 GiB.
_MAX_BROADCAST_BYTES = 256 << 20


class Compression:
  """How `allreduce` sends: as it is, or with half precision."""

  none = None
  fp16 = tf.float16


class _Engine:
  """The server of this process and the sessions that exchange.

  Args:
    rank: of this process.
    addresses: `host:port` of all ranks.
    server: of this process.
    local_rank: among the ranks of this machine.
    local_size: how many these are.
  """

  def __init__(
    self, rank: int, addresses: Sequence[str], server: Any, local_rank: int, local_size: int
  ):
    self.rank, self.size = rank, len(addresses)
    self.local_rank, self.local_size = local_rank, local_size
    self._server = server
    # A session of this process reaches its server without a connection.
    self._leader = server.target.removeprefix("grpc://") if rank == 0 else addresses[0]
    self._graph = tf.Graph()
    with self._graph.as_default(), tf.device(f"/job:worker/replica:0/task:{rank}/device:CPU:0"):
      self._exchange = tf.compat.v1.placeholder(tf.string, [])
      self._group = tf.compat.v1.placeholder(tf.int32, [])
      self._runs = self._build()
    self._library = _library()
    self._library.MonolithOpenRankExchanges(rank, self.size)
    self._lock = threading.Lock()
    self._threads: dict[str, threading.Thread] = {}
    # Keys of groups -> exchange.
    self._groups: dict[int, str] = {_key(_MEET, 31): _MEET}
    self._is_closed = False
    self._begin_numbers(_MEET)
    self.meet(_HELLO_MILLISECS)

  def serve(self, exchange: str, run: str) -> None:
    """Carries out the exchanges of a name from here on.

    Args:
      exchange: the name.
      run: what to do: a key of `_build`.
    """
    with self._lock:
      if exchange in self._threads or self._is_closed:
        return
      # Found in the same order by all ranks where two names have the same one.
      group = _key(exchange, 31)
      while group in self._groups:
        group = group % (2**31 - 1) + 1
      self._groups[group] = exchange
      thread = threading.Thread(
        target=self._serve, args=(exchange, run, group), name=f"exchange_{exchange}", daemon=True
      )
      self._threads[exchange] = thread
      if self.rank == 0:
        self._begin_numbers(exchange)
      thread.start()

  def close(self, why: str) -> None:
    """Ends all exchanges, and those who wait for them with an error."""
    with self._lock:
      if self._is_closed:
        return
      self._is_closed = True
    self._library.MonolithCloseRankExchanges(why.encode())

  def shut_down(self) -> None:
    """Leaves the other ranks, when they have got what this one has sent them."""
    if not self._is_closed:
      try:
        self.meet(_GOODBYE_MILLISECS)
      except tf.errors.OpError as error:
        logging.info("The other ranks have left already, or are far behind: %s", error.message)
    # Runs that end without having exchanged end the collectives of this process.
    self.close("this process has left the other ranks")
    # One that waits for ranks which never come is left as it is: a thread that wakes up while
    # Python ends would end the process with an error.
    deadline = time.monotonic() + _END_SECS
    for thread in self._threads.values():
      thread.join(max(0.0, deadline - time.monotonic()))

  def meet(self, timeout: int) -> None:
    """Waits until all ranks call it.

    Args:
      timeout: milliseconds.

    Raises:
      tf.errors.OpError: they do not.
    """
    with self._new_session() as session:
      feed = {self._exchange: "", self._group: _key(_MEET, 31)}
      session.run(self._runs[_MEET], feed, _run_options(_MEET, timeout))

  def _serve(self, exchange: str, run: str, group: int) -> None:
    feed = {self._exchange: exchange, self._group: group}
    options = _run_options(exchange)
    try:
      if self.rank != 0:
        self._begin_numbers(exchange)
      with self._new_session() as session:
        while not self._is_closed:
          session.run(self._runs[run], feed, options)
    except Exception as error:
      if not self._is_closed:
        self.close(self._describe(error))

  def _begin_numbers(self, exchange: str) -> None:
    """Has rank 0 choose the number of the first run of an exchange.

    A rank 0 that runs first would choose by itself, also when another rank asks at the same moment
    and gets another number. Then both would wait for ever. The other ranks see here that rank 0
    answers: TensorFlow asks one that does not for ever, whatever limit the run has.

    Raises:
      RuntimeError: rank 0 does not answer.
    """
    # A proxy would not find what is in this process.
    options = [("grpc.enable_http_proxy", 0)] if self.rank == 0 else None
    with grpc.insecure_channel(self._leader, options) as channel:
      call = channel.unary_unary("/tensorflow.WorkerService/GetStepSequence")
      try:
        request = _sequence_request(_key(exchange, 63))
        call(request, timeout=_HELLO_MILLISECS / 1000, wait_for_ready=True)
      except grpc.RpcError as error:
        raise RuntimeError(
          f"the server of rank 0, at {self._leader}, does not answer rank {self.rank}: "
          f"{error.code().name}, {error.details()}"
        ) from error

  def _new_session(self) -> tf.compat.v1.Session:
    # One session takes runs of the same ops for runs of one number, whatever their keys are.
    return tf.compat.v1.Session(
      self._server.target, graph=self._graph, config=_session_config(self.rank)
    )

  def _describe(self, error: Exception) -> str:
    """Returns what an exchange says that this error has ended."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    ranks = {
      int(task) for task in re.findall(r"remote target /job:worker/replica:0/task:(\d+)", text)
    }
    who = f"rank {min(ranks)} cannot be reached" if ranks else "a rank is gone"
    reason = text.strip().replace("\n", " ")[:500]
    return f"{FAILED}, {who}: {reason}"

  def _build(self) -> dict[str, tf.Operation]:
    """Returns the ops that carry out an exchange, by its kind."""
    common = {"group_size": self.size, "group_key": self._group, "communication_hint": "auto"}
    ordered = {**common, "ordering_token": []}
    header = gen_monolith_ops.monolith_rank_exchange_take(self._exchange)
    headers = tf.raw_ops.CollectiveGatherV2(input=header, instance_key=_HEADER_INSTANCE, **ordered)

    def pack(dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
      return gen_monolith_ops.monolith_rank_exchange_pack(self._exchange, headers, T=dtype)

    def give(words: tf.Tensor) -> tf.Operation:
      return gen_monolith_ops.monolith_rank_exchange_give(self._exchange, headers, words)

    words, instance = pack(tf.int32)
    received = tf.raw_ops.CollectiveBcastRecvV2(
      shape=tf.shape(words), T=tf.int32, instance_key=instance, **common
    )
    met = tf.raw_ops.CollectiveGatherV2(
      input=tf.zeros([1], tf.int32), instance_key=_HEADER_INSTANCE, **ordered
    )
    runs = {
      "alltoall": give(
        tf.raw_ops.CollectiveAllToAllV2(input=words, instance_key=instance, **ordered)
      ),
      "allgather": give(
        tf.raw_ops.CollectiveGatherV2(input=words, instance_key=instance, **ordered)
      ),
      "broadcast_send": give(
        tf.raw_ops.CollectiveBcastSendV2(input=words, instance_key=instance, **common)
      ),
      "broadcast_receive": give(received),
      _MEET: met.op,
    }
    for dtype in _SUMMED:
      words, instance = pack(dtype)
      runs[f"allreduce_{dtype.name}"] = give(
        tf.raw_ops.CollectiveReduceV2(
          input=words, instance_key=instance, merge_op="Add", final_op="Id", **ordered
        )
      )
    return runs


_engine: _Engine | None = None
_lock = threading.Lock()


def init() -> None:
  """Meets the other ranks; a second call does nothing.

  Raises:
    RuntimeError: the environment does not say where, or not all come.
  """
  global _engine
  with _lock:
    if _engine is not None:
      return
    cluster = rank_environment.read_worker_cluster()
    master = rank_environment.read_master()
    rank, size = (rank_environment.read_launcher(value) for value in ("rank", "size"))
    if rank is None or size is None or (master is None and cluster is None):
      raise RuntimeError(
        "Ranks without Horovod meet at MASTER_ADDR and MASTER_PORT, beside RANK and WORLD_SIZE, or "
        "by the workers of TF_CONFIG: neither is set"
      )

    def start(addresses: list[str]) -> Any:
      return tf.distribute.Server(
        {"worker": addresses}, job_name="worker", task_index=rank, config=_server_config()
      )

    if cluster is not None and master is None:
      addresses = cluster.addresses
      try:
        server = start(addresses)
      except tf.errors.OpError as error:
        raise RuntimeError(
          f"Rank {rank} cannot listen at {addresses[rank]}, as TF_CONFIG says: {error.message}. "
          "Another process may do so already, maybe one of a run that was not ended"
        ) from error
      meeting.wait_for_servers(addresses)
    else:
      host, port = master
      assembly, address = meeting.join(host, port, rank, size)
      addresses, server = meeting.start_servers(assembly, address, host, rank, start)
    hosts = [address.rsplit(":", 1)[0] for address in addresses]
    neighbours = [i for i in range(size) if hosts[i] == hosts[rank]]
    local_rank, local_size = (
      rank_environment.read_launcher(value) for value in ("local_rank", "local_size")
    )
    try:
      _engine = _Engine(
        rank,
        addresses,
        server,
        neighbours.index(rank) if local_rank is None else local_rank,
        len(neighbours) if local_size is None else local_size,
      )
    except (tf.errors.OpError, RuntimeError) as error:
      raise RuntimeError(
        f"Rank {rank} of {size} does not reach the servers of all ranks, which are at "
        f"{', '.join(addresses)}: {getattr(error, 'message', error)}. All machines have to reach "
        "these ports"
      ) from error
  atexit.register(shutdown)


def shutdown() -> None:
  """Leaves the other ranks."""
  global _engine
  with _lock:
    engine, _engine = _engine, None
  if engine is not None:
    engine.shut_down()


def is_initialized() -> bool:
  """Tells whether the ranks have met."""
  return _engine is not None


def rank() -> int:
  return _get().rank


def size() -> int:
  return _get().size


def local_rank() -> int:
  return _get().local_rank


def local_size() -> int:
  return _get().local_size


def alltoall(
  tensor: Any, splits: Any = None, name: str | None = None
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
  """Sends rows to every rank; returns those received and, with `splits`, how many from each.

  Args:
    tensor: `[n, ...]`.
    splits: int32 `[ranks]`; equally many by default.
    name: the same on all ranks.
  """
  tensor = tf.convert_to_tensor(tensor)
  if splits is None:
    each = tf.fill([size()], tf.shape(tensor)[0] // size())
    return _exchange("alltoall", [tensor], name, splits=each)[0]
  (result,), received = _exchange_with_sizes("alltoall", [tensor], name, splits=splits)
  return result, received


def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
  """Concatenates the tensors of all ranks, which may differ in the first dimension.

  Raises:
    ValueError: the tensor is a scalar.
  """
  tensor = tf.convert_to_tensor(tensor)
  if tensor.shape.rank == 0:
    raise ValueError("allgather of a scalar, want at least one dimension")
  return _exchange("allgather", [tensor], name)[0]


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
  """Returns the tensor of the root rank."""
  return _broadcast([tensor], root_rank, name)[0]


def allreduce(
  tensor: Any, name: str | None = None, op: str = Average, compression: tf.DType | None = None
) -> Any:
  """Averages or sums a tensor over the ranks; of slices, all are there afterwards.

  Args:
    tensor: a tensor, of the same shape on all ranks, or slices.
    name: the same on all ranks.
    op: `Average` or `Sum`.
    compression: of `Compression`.

  Raises:
    ValueError: an unknown `op`.
    TypeError: it cannot be summed.
  """
  if isinstance(tensor, tf.IndexedSlices):
    name = name or _auto_name("allreduce", tensor.values)
    values = allgather(tensor.values, name=f"{name}_values")
    indices = allgather(tensor.indices, name=f"{name}_indices")
    return tf.IndexedSlices(_divide(values, op), indices, tensor.dense_shape)
  return grouped_allreduce([tensor], name=name, op=op, compression=compression)[0]


def grouped_allreduce(
  tensors: Sequence[Any],
  name: str | None = None,
  op: str = Average,
  compression: tf.DType | None = None,
) -> list[Any]:
  """Does `allreduce` for a list of tensors, those of one type at once."""
  result: list[Any] = list(tensors)
  by_dtype: dict[tf.DType, list[int]] = {}
  for i, tensor in enumerate(tensors):
    if isinstance(tensor, tf.IndexedSlices):
      result[i] = allreduce(tensor, f"{name}_{i}" if name else None, op, compression)
      continue
    result[i] = tf.convert_to_tensor(tensor)
    dtype = result[i].dtype
    if compression is not None and dtype.is_floating:
      dtype = compression
    if dtype not in _SUMMED:
      raise TypeError(f"allreduce of {dtype.name}, want one of {[t.name for t in _SUMMED]}")
    by_dtype.setdefault(dtype, []).append(i)
  for dtype, positions in by_dtype.items():
    group_name = f"{name}_{dtype.name}" if name and len(by_dtype) > 1 else name
    sent = [tf.cast(result[i], dtype) for i in positions]
    for i, summed in zip(positions, _exchange("allreduce", sent, group_name)):
      result[i] = _divide(tf.cast(summed, result[i].dtype), op)
  return result


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
  """Gives all ranks the variables of one of them, when the session is there.

  Args:
    root_rank: whose they are.
    device: where the variables are assigned; by default, where they are.
  """

  def __init__(self, root_rank: int, device: str = ""):
    super().__init__()
    self._root_rank = root_rank
    self._device = device
    self._op: tf.Operation | None = None

  def begin(self) -> None:
    groups: list[list[tf.Variable]] = []
    num_bytes = _MAX_BROADCAST_BYTES
    for variable in tf.compat.v1.global_variables():
      own_bytes = (variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size
      num_bytes += own_bytes
      if num_bytes > _MAX_BROADCAST_BYTES or not variable.shape.is_fully_defined():
        groups.append([])
        num_bytes = own_bytes
      groups[-1].append(variable)
    assigned = []
    with tf.device(self._device):
      for i, variables in enumerate(groups):
        with tf.device("/device:CPU:0"):
          values = [variable.read_value() for variable in variables]
          values = _broadcast(values, self._root_rank, f"broadcast_global_variables_{i}")
        assigned += [variable.assign(value) for variable, value in zip(variables, values)]
      self._op = tf.group(*assigned)

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    session.run(self._op)


def _get() -> _Engine:
  if _engine is None:
    raise ValueError("The ranks have not met: call hvd_lib.init() first")
  return _engine


def _broadcast(tensors: Sequence[Any], root_rank: int, name: str | None) -> list[tf.Tensor]:
  if not 0 <= root_rank < size():
    raise ValueError(f"root_rank is {root_rank}, but there are {size()} ranks")
  return _exchange("broadcast", tensors, name, root=root_rank)


def _exchange(
  kind: str, tensors: Sequence[Any], name: str | None, **kwargs: Any
) -> list[tf.Tensor]:
  return _exchange_with_sizes(kind, tensors, name, **kwargs)[0]


def _exchange_with_sizes(
  kind: str, tensors: Sequence[Any], name: str | None, *, splits: Any = (), root: int = 0
) -> tuple[list[tf.Tensor], tf.Tensor]:
  """Adds the op of an exchange to the graph, and has it carried out whenever it runs."""
  engine = _get()
  tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
  for tensor in tensors:
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool):
      raise TypeError(f"{kind} of {tensor.dtype.name}, want numbers")
  name = _full_name(name or _auto_name(kind, tensors[0]))
  # Two ranks that do different things under one name must not be taken for one exchange.
  what = kind
  run = kind
  if kind == "allreduce":
    what = run = f"{kind}_{tensors[0].dtype.name}"
  elif kind == "broadcast":
    what = f"{kind}_{root}"
    run = "broadcast_send" if root == engine.rank else "broadcast_receive"
  exchange = f"{what}:{name}"
  engine.serve(exchange, run)
  return gen_monolith_ops.monolith_rank_exchange(
    tensors,
    tf.convert_to_tensor(splits, tf.int32),
    exchange=exchange,
    kind=kind,
    root=root,
    name=None if tf.executing_eagerly() else f"{name}/",
  )


def _full_name(name: str) -> str:
  """Returns the name that an op gets in this scope."""
  if tf.executing_eagerly():
    return name
  return tf.compat.v1.get_default_graph().unique_name(name)


def _auto_name(kind: str, tensor: tf.Tensor) -> str:
  if tf.executing_eagerly():
    raise ValueError(f"{kind} needs a name, the same on all ranks, in eager execution")
  return f"{kind}_{re.sub(r'[^A-Za-z0-9_.]', '_', tensor.op.name)}"


def _divide(total: tf.Tensor, op: str) -> tf.Tensor:
  if op == Sum:
    return total
  if op != Average:
    raise ValueError(f"op is {op!r}, want Average or Sum")
  if total.dtype.is_floating:
    return total / tf.cast(size(), total.dtype)
  return tf.truncatediv(total, tf.cast(size(), total.dtype))


def _key(text: str, bits: int) -> int:
  """Returns a number that is not 0 for a text, the same in all processes."""
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "little") % (2**bits - 1) + 1


def _sequence_request(graph_key: int) -> bytes:
  """Returns the message that asks for the number of the next run of a key."""
  varint, rest = bytearray(), graph_key
  while rest > 127:
    varint.append(rest & 127 | 128)
    rest >>= 7
  varint.append(rest)
  # A GetStepSequenceRequest: `graph_key`, a repeated int64, is field 1.
  return bytes([1 << 3 | 0, *varint])


def _run_options(exchange: str, timeout: int = 0) -> tf.compat.v1.RunOptions:
  # Runs of one key get the same numbers on all ranks, one after the other.
  options = tf.compat.v1.RunOptions(timeout_in_ms=timeout)
  options.experimental.collective_graph_key = _key(exchange, 63)
  return options


def _server_config() -> tf.compat.v1.ConfigProto:
  config = tf.compat.v1.ConfigProto(
    # It waits and copies, beside the threads that compute.
    device_count={"GPU": 0},
    intra_op_parallelism_threads=1,
    inter_op_parallelism_threads=2,
  )
  config.experimental.collective_group_leader = _LEADER
  return config


def _session_config(rank: int) -> tf.compat.v1.ConfigProto:
  config = tf.compat.v1.ConfigProto(device_filters=[f"/job:worker/task:{rank}"])
  config.experimental.collective_group_leader = _LEADER
  # Grappler would look at a graph in which there is nothing to gain.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return config


def _library() -> ctypes.CDLL:
  # TensorFlow must have loaded it first, or it finds no ops in it.
  library = ctypes.CDLL(gen_monolith_ops_base.LIBRARY_PATH)
  library.MonolithOpenRankExchanges.argtypes = [ctypes.c_int32, ctypes.c_int32]
  library.MonolithOpenRankExchanges.restype = None
  library.MonolithCloseRankExchanges.argtypes = [ctypes.c_char_p]
  library.MonolithCloseRankExchanges.restype = None
  return library
