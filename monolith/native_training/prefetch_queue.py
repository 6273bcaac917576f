"""Queues between the parts of a training step, so that they run at the same time.

`enqueue_dicts_with_queue_return` cuts a graph in two: the ops that compute the given tensors run
ahead in the thread of an `EnqueueHook`, and the ops that use them take them from a queue.
`AsyncFunctionMgr` does the opposite: a function of the results of this step, such as a push to
parameter servers, runs during the next one. Tensors on a GPU have a queue of their own there.
"""

import threading
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import tensorflow as tf
from tensorflow.python.client import session as client_session
from tensorflow.python.ops import data_flow_ops, gen_data_flow_ops

from monolith.native_training import device_utils, nested_tensors, utils
from monolith.native_training.graph import idle


class _GPUCompatiblePaddingFIFOQueue(data_flow_ops.QueueBase):
  """A `tf.queue.PaddingFIFOQueue` that may be placed on a GPU, element by element only."""

  def __init__(
    self,
    capacity: int,
    dtypes: Union[tf.DType, Sequence[tf.DType]],
    shapes: Sequence[Any],
    names: Optional[Sequence[str]] = None,
    shared_name: Optional[str] = None,
    name: str = "padding_fifo_queue",
  ):
    """Args:
      capacity: the number of elements that fit.
      dtypes: the types of an element's components; one alone may be given bare.
      shapes: the components' shapes, as many; `None` dimensions may differ between elements.
      names: the components' names, if elements are dicts.
      shared_name: the name under which several sessions share the queue.
      name: what to call the op.

    Raises:
      ValueError: not as many shapes as dtypes.
    """
    dtypes = data_flow_ops._as_type_list(dtypes)
    shapes = data_flow_ops._as_shape_list(shapes, dtypes, unknown_dim_allowed=True)
    names = data_flow_ops._as_name_list(names, dtypes)
    if len(dtypes) != len(shapes):
      raise ValueError(
        f"Shapes must be provided for all components, but received {len(dtypes)} dtypes and "
        f"{len(shapes)} shapes."
      )
    # TensorFlow has a GPU kernel of the plain queue alone. Given no shapes, that one takes elements
    # of different shapes too, and the base class gives dequeued tensors their static shapes.
    self._on_gpu = on_gpu = device_utils.within_placement_context_of("GPU")
    make_queue = (
      gen_data_flow_ops.fifo_queue_v2 if on_gpu else gen_data_flow_ops.padding_fifo_queue_v2
    )
    queue_ref = make_queue(
      component_types=dtypes,
      shapes=[] if on_gpu else shapes,
      capacity=capacity,
      shared_name=data_flow_ops._shared_name(shared_name),
      name=name,
    )
    super().__init__(dtypes, shapes, names, queue_ref)

  def is_closed(self, name: Optional[str] = None) -> tf.Tensor:
    """Returns whether the queue is closed.

    Raises:
      NotImplementedError: the queue is on a GPU. TensorFlow's kernel there writes its answer
        through a device pointer on the host, which ends the process.
    """
    if self._on_gpu:
      raise NotImplementedError(
        f"TensorFlow cannot tell whether {self.name}, a queue on a GPU, is closed. Ask the queue "
        "of the same elements on the CPU."
      )
    return super().is_closed(name)

  def enqueue_many(self, vals: Any, name: Optional[str] = None) -> tf.Operation:
    raise NotImplementedError(self._MANY_NOT_SUPPORTED)

  def dequeue_many(self, n: Any, name: Optional[str] = None) -> Any:
    raise NotImplementedError(self._MANY_NOT_SUPPORTED)

  _MANY_NOT_SUPPORTED = (
    "GPUCompatiblePaddingFIFOQueue does not support enqueue_many or dequeue_many, only enqueue and "
    "dequeue."
  )


class _QueueBase:
  """Declares the methods of a queue that the hooks below call."""

  @property
  def queue(self) -> data_flow_ops.QueueBase:
    raise NotImplementedError

  @property
  def queues(self) -> list[data_flow_ops.QueueBase]:
    raise NotImplementedError

  @property
  def enqueue_op(self) -> tf.Operation:
    raise NotImplementedError

  def dequeue(self, gate: Optional[tf.Tensor] = None) -> list[tf.Tensor]:
    raise NotImplementedError


class _FIFOQueue(_QueueBase):
  """A queue whose elements are lists of tensors shaped like `dense_list`.

  The queue and its dequeue ops are free of the caller's control dependencies; the enqueue op has
  them.
  """

  def __init__(
    self,
    dense_list: Optional[list[tf.Tensor]] = None,
    capacity: int = 2,
    queue_name: str = "prefetch_queue",
    condition: Optional[tf.Tensor] = None,
  ):
    """Args:
      dense_list: the tensors that `enqueue_op` puts into the queue; static shapes are kept.
      capacity: the number of elements that fit.
      queue_name: name of the queue's op.
      condition: bool scalar, without which `enqueue_op` computes the tensors and drops them.

    Raises:
      ValueError: no tensor is given.
      TypeError: `dense_list` is not a list.
    """
    dense_list = _check_dense_list(dense_list)
    with tf.init_scope():
      self._queue = _GPUCompatiblePaddingFIFOQueue(
        capacity,
        dtypes=[tensor.dtype for tensor in dense_list],
        shapes=[tensor.shape for tensor in dense_list],
        name=queue_name,
      )
    if condition is None:
      self._enqueue_op = self._queue.enqueue(dense_list)
    else:
      self._enqueue_op = tf.cond(
        condition, lambda: self._queue.enqueue(dense_list), lambda: tf.no_op()
      ).op

  @property
  def queue(self) -> data_flow_ops.QueueBase:
    return self._queue

  @property
  def queues(self) -> list[data_flow_ops.QueueBase]:
    return [self._queue]

  @property
  def enqueue_op(self) -> tf.Operation:
    return self._enqueue_op

  def dequeue(self, gate: Optional[tf.Tensor] = None) -> list[tf.Tensor]:
    """Returns the tensors of the next element; every call makes a new op.

    Args:
      gate: bool scalar, which must have been computed, or fed, before the element is taken.
    """
    with tf.init_scope():
      if gate is None:
        tensors = self._queue.dequeue()
      else:
        # A run that feeds a tensor is rid of what it is computed from, but only where it is used as
        # data: optimizers turn anything less than a choice into a control dependency.
        tensors = tf.cond(gate, self._queue.dequeue, self._queue.dequeue)
        for tensor, shape in zip(tf.nest.flatten(tensors), self._queue.shapes):
          tensor.set_shape(shape)
    return tensors if isinstance(tensors, list) else [tensors]

  def size(self) -> tf.Tensor:
    return self._queue.size()


def _check_dense_list(dense_list: Optional[list[tf.Tensor]]) -> list[tf.Tensor]:
  if dense_list is not None and not isinstance(dense_list, list):
    raise TypeError("dense_list should be a list of `tf.Tensor`s")
  if not dense_list:
    raise ValueError("Arguments `dense_list` should not be empty.")
  return dense_list


class _MultiFIFOQueue(_QueueBase):
  """One queue for the tensors on CPUs and, if there are any, one for those on GPUs.

  The queues agree only as long as every enqueue and every dequeue goes through this object.
  """

  def __init__(
    self,
    dense_list: Optional[list[tf.Tensor]] = None,
    capacity: int = 2,
    queue_name: str = "prefetch_queue",
    condition: Optional[tf.Tensor] = None,
  ):
    """Args:
      dense_list: the tensors that `enqueue_op` puts into the queues; static shapes are kept.
      capacity: the number of elements that fit.
      queue_name: name of the queue's op; the one on the GPU is called `<queue_name>_gpu`.
      condition: bool scalar, without which `enqueue_op` computes the tensors and drops them.

    Raises:
      ValueError: no tensor is given.
      TypeError: `dense_list` is not a list.
    """
    dense_list = _check_dense_list(dense_list)
    self._queues: list[_FIFOQueue] = []
    # For each queue the positions of its tensors in `dense_list`.
    self._indices: list[list[int]] = []
    self._devices: list[str] = []
    on_gpu = ["GPU" in tensor.device for tensor in dense_list]
    for gpu, device, name in (
      (False, "/device:CPU:0", queue_name),
      (True, "/device:GPU:0", queue_name + "_gpu"),
    ):
      indices = [i for i, is_on_gpu in enumerate(on_gpu) if is_on_gpu == gpu]
      if indices:
        with tf.device(device):
          self._queues.append(
            _FIFOQueue([dense_list[i] for i in indices], capacity, name, condition)
          )
        self._indices.append(indices)
        self._devices.append(device)
    self._enqueue_op = tf.group(*[queue.enqueue_op for queue in self._queues])

  @property
  def queue(self) -> data_flow_ops.QueueBase:
    if len(self._queues) > 1:
      raise NotImplementedError(
        "When using multi-device queues, this interface is disabled."
        "Check if a tensor to be enqueued is mistakenly placed on GPU."
      )
    return self._queues[0].queue

  @property
  def queues(self) -> list[data_flow_ops.QueueBase]:
    return [queue.queue for queue in self._queues]

  @property
  def enqueue_op(self) -> tf.Operation:
    return self._enqueue_op

  def dequeue(self, gate: Optional[tf.Tensor] = None) -> list[tf.Tensor]:
    """Returns the tensors of the next element in the order of `dense_list`.

    Args:
      gate: bool scalar, which must have been computed, or fed, before the element is taken.
    """
    result = [None] * sum(len(indices) for indices in self._indices)
    for queue, indices, device in zip(self._queues, self._indices, self._devices):
      # Not where a device function places other ops: the elements would be copied back and forth.
      with tf.device(device):
        tensors = queue.dequeue(gate)
      for i, tensor in zip(indices, tensors):
        result[i] = tensor
    return result

  def size(self) -> tf.Tensor:
    """Returns the number of elements in the first queue; all have as many."""
    return self._queues[0].size()


class MultiQueueRunner(tf.compat.v1.train.QueueRunner):
  """A queue runner that closes several queues together."""

  def _init_from_args(
    self,
    queue: Any = None,
    enqueue_ops: Optional[Sequence[tf.Operation]] = None,
    close_op: Optional[tf.Operation] = None,
    cancel_op: Optional[tf.Operation] = None,
    queue_closed_exception_types: Optional[Sequence[type]] = None,
  ) -> None:
    """Does what the base class does; `queue` may also be a list of queues."""
    if isinstance(queue, list):
      if close_op is None:
        close_op = tf.group(*[q.close() for q in queue])
      if cancel_op is None:
        cancel_op = tf.group(*[q.close(cancel_pending_enqueues=True) for q in queue])
    super()._init_from_args(
      queue=queue,
      enqueue_ops=enqueue_ops,
      close_op=close_op,
      cancel_op=cancel_op,
      queue_closed_exception_types=queue_closed_exception_types,
    )

  @property
  def queue(self) -> data_flow_ops.QueueBase:
    if isinstance(self._queue, list):
      raise NotImplementedError("When using multi-device queues, this interface is disabled.")
    return super().queue

  @property
  def name(self) -> str:
    """Name of the (first) queue."""
    return self._queue[0].name if isinstance(self._queue, list) else super().name


class EnqueueHook(tf.compat.v1.train.SessionRunHook):
  """Fills a queue in a daemon thread; the end of the data closes it after the last element."""

  def __init__(self, q: _QueueBase):
    self._q_runner = MultiQueueRunner(q.queues, [q.enqueue_op])
    self._threads: list[threading.Thread] = []

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._threads = self._q_runner.create_threads(session, coord=coord, start=True, daemon=True)


def enqueue_dicts_with_queue_return(
  tensors: Any,
  capacity: int = 1,
  queue_name: str = "prefetch_queue",
  condition: Optional[tf.Tensor] = None,
) -> tuple[Any, Optional[_MultiFIFOQueue]]:
  """Sends a structure of tensors through a queue.

  Args:
    tensors: anything that `nested_tensors.NestedTensors` accepts, with one tensor at least.
    capacity: the number of elements that fit; 0 means no queue.
    queue_name: name of the queue's op.
    condition: bool scalar; where it is false, nothing is put into the queue.

  Returns:
    The structure with every tensor replaced by the dequeued one, and the queue, which the caller
    has to fill, for instance with an `EnqueueHook`. With capacity 0, `tensors` itself and `None`.
  """
  if capacity == 0:
    return tensors, None
  nested = nested_tensors.NestedTensors(tensors)
  queue = _MultiFIFOQueue(nested.get_tensors(), capacity, queue_name, condition)
  with tf.init_scope():
    return nested.get_nested_result(queue.dequeue()), queue


class RunNeedsOp:
  """Returns whether a requested run of a session runs an op.

  The answer for fetches that no session can run, such as mocks in tests, is yes.
  """

  def __init__(self, op: tf.Operation):
    self._op = op
    # The answer by what the run fetches: the same few fetches come again in every step.
    self._fetches_to_answer: dict[tuple[str, ...], bool] = {}

  def __call__(self, run_context: tf.compat.v1.train.SessionRunContext) -> bool:
    elements = run_context.original_args.fetches
    if not (
      isinstance(elements, (list, tuple))
      and all(isinstance(element, (tf.Tensor, tf.Operation)) for element in elements)
    ):
      # Every step would feel how long this takes.
      with run_context.session.graph.as_default():
        try:
          elements = client_session._FetchMapper.for_fetch(elements).unique_fetches()
        except TypeError:
          return True
    key = tuple(element.name for element in elements)
    if key not in self._fetches_to_answer:
      needed = utils.get_needed_ops(
        element if isinstance(element, tf.Operation) else element.op for element in elements
      )
      self._fetches_to_answer[key] = self._op in needed
    return self._fetches_to_answer[key]


class AsyncPushHook(tf.compat.v1.train.SessionRunHook):
  """Runs ops that consume a queue along with every run of the session but the first.

  The runs themselves fill the queue, so the ops of run k work on the element of run k - 1. A run
  that adds no element (one that only reads a variable) runs without the ops: it would empty the
  queue, and after a second one the ops would wait forever. A queue that another thread fills is
  consumed in every run.
  """

  def __init__(self, queue: _MultiFIFOQueue, ops: Any, gate: Optional[tf.Tensor] = None):
    """Args:
    queue: filled by the train op.
    ops: what `session.run` accepts; takes one element from the queue.
    gate: what the ops wait for before they take it, where they run with a step; fed elsewhere.
    """
    self._queue = queue
    self._run_ops = ops
    self._without_gate = {} if gate is None else {gate: True}
    self._queue_init = False
    self._queue_size = None
    self._filled_by_runs = False
    self._fills_queue = RunNeedsOp(queue.enqueue_op)

  @property
  def run_ops(self) -> Any:
    """Returns the fetches that make a run run the ops."""
    return self._run_ops

  @property
  def is_running(self) -> bool:
    """Whether runs have left something to work on."""
    return self._queue_init

  def begin(self) -> None:
    self._queue_size = self._queue.size()
    # Before checkpoints are saved: the elements in the queue belong to them.
    idle.register(self._finish, first=True)

  def _finish(self, session: tf.compat.v1.Session) -> bool:
    """Runs the ops for the elements in the queue, as the next step may be far away."""
    self.end(session)
    self._queue_init = False
    return False

  def before_run(
    self, run_context: tf.compat.v1.train.SessionRunContext
  ) -> Optional[tf.compat.v1.train.SessionRunArgs]:
    if not self._queue_init or (self._filled_by_runs and not self._fills_queue(run_context)):
      return None
    if self._without_gate and not self._fills_queue(run_context):
      return tf.compat.v1.train.SessionRunArgs(self._run_ops, self._without_gate)
    return tf.compat.v1.train.SessionRunArgs(self._run_ops)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    # Before the first element is there, the ops would wait for it in vain.
    if not self._queue_init and run_context.session.run(self._queue_size) > 0:
      self._queue_init = True
      self._filled_by_runs = self._fills_queue(run_context)

  def end(self, session: tf.compat.v1.Session) -> None:
    while session.run(self._queue_size) > 0:
      session.run(self._run_ops, self._without_gate)


class AsyncFunctionMgr:
  """Runs functions of a step's results during the next step.

  Add `hooks` to the session after all functions were added.
  """

  def __init__(self, is_async: bool = True):
    """Args:
    is_async: whether functions are asynchronous unless they say otherwise.
    """
    self._is_async = is_async
    self._hooks: list[AsyncPushHook] = []
    self._inputs: list[tf.Tensor] = []

  @property
  def hooks(self) -> list[AsyncPushHook]:
    return self._hooks

  def wait_for(self, inputs: Sequence[tf.Tensor]) -> None:
    """Makes functions that are added later wait in each step for these tensors of the step.

    A step that meets the end of the data is cancelled with everything that runs beside it. A
    function that had started would be left half done, on some servers and not on others, and its
    arguments would be gone from the queue. One that waits has not started, and runs at the end of
    the session.
    """
    self._inputs = list(inputs)

  def add_async_function(
    self,
    target: Callable[..., Any],
    args: Optional[Sequence[Any]] = None,
    kwargs: Optional[dict[str, Any]] = None,
    is_async: Optional[bool] = None,
    queue_name: str = "async_queue",
  ) -> Any:
    """Adds a function that builds ops.

    Args:
      target: called once, with tensors that hold the arguments of the step before; returns what
        `session.run` accepts. It may use what is computed in this step only through its arguments.
      args: structures of tensors, variables and constants.
      kwargs: the same, by name.
      is_async: `None` for the default of this object.
      queue_name: name of the queue's op.

    Returns:
      The op that hands over the arguments; to be run in every step. When synchronous, what `target`
      returns.

    Raises:
      ValueError: `target` returns `None`, so that there is nothing to run.
    """
    args = tuple(args or ())
    kwargs = dict(kwargs or {})
    if not (self._is_async if is_async is None else is_async):
      return target(*args, **kwargs)

    # A queue needs a component, also when the function has no argument.
    dummy_tensor = tf.constant(0, dtype=tf.int32, name="dummy_tensor_for_async_function")
    nested = nested_tensors.NestedTensors((args + (dummy_tensor,), kwargs))
    queue = _MultiFIFOQueue(nested.get_tensors(), 1, queue_name)
    gate = None
    if self._inputs:
      with tf.control_dependencies([tensor.op for tensor in self._inputs]):
        gate = tf.compat.v1.placeholder_with_default(
          tf.identity(True), [], name="async_function_gate"
        )
    with tf.init_scope():
      args, kwargs = nested.get_nested_result(queue.dequeue(gate))
      dummy_op = tf.no_op(name="dummy_depended_op_for_async_function")
      with tf.control_dependencies([args[-1], dummy_op]):
        run_ops = target(*args[:-1], **kwargs)
    if run_ops is None:
      raise ValueError(f"the asynchronous function {target} returned None, want ops to run")
    self._hooks.append(AsyncPushHook(queue, run_ops, gate))
    # A step whose enqueue op needed the function's own ops would run them twice.
    utils.check_ops_dependence(queue.enqueue_op.name, dummy_op.name)
    return queue.enqueue_op
