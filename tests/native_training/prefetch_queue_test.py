import threading
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.framework import kernels, test_util

from monolith.native_training import device_utils, graph_estimator, nested_tensors, prefetch_queue

tf.compat.v1.disable_eager_execution()

_Queue = prefetch_queue._GPUCompatiblePaddingFIFOQueue


class GPUCompatiblePaddingFIFOQueueTests(tf.test.TestCase):
  def testEnqueueAndDequeue(self):
    with test_util.use_gpu():
      queue = _Queue(10, tf.float32, ((),))
      elements = [10.0, 20.0, 30.0]
      enqueue_ops = [queue.enqueue((x,)) for x in elements]
      dequeued = queue.dequeue()
      constant = tf.constant(1.0)
      total = dequeued + constant

      self.assertEqual(dequeued.device, constant.device)
      for op in enqueue_ops:
        self.evaluate(op)
      self.assertEqual([self.evaluate(total) for _ in elements], [11.0, 21.0, 31.0])

  def testGPUQueueCPUTensor(self):
    with tf.device("/device:CPU:0"):
      values = [tf.constant(float(i)) for i in range(3)]
    with self.session(use_gpu=True):
      with test_util.use_gpu():
        queue = _Queue(10, tf.float32, ((),))
        enqueue_ops = [queue.enqueue(value) for value in values]
      with tf.device("/device:CPU:0"):
        dequeued = queue.dequeue()
        total = dequeued + tf.constant(1.0)

      self.assertIn("CPU", dequeued.device)
      for op in enqueue_ops:
        self.evaluate(op)
      self.assertEqual([self.evaluate(total) for _ in values], [1.0, 2.0, 3.0])

  def testMultiEnqueueAndDequeue(self):
    with test_util.use_gpu():
      queue = _Queue(10, (tf.int32, tf.float32), ((), ()))
      elements = [(5, 10.0), (10, 20.0), (15, 30.0)]
      enqueue_ops = [queue.enqueue((x, y)) for x, y in elements]
      dequeued = queue.dequeue()

      for op in enqueue_ops:
        self.evaluate(op)
      for x, y in elements:
        self.assertEqual(self.evaluate(dequeued), [x, y])

  def testIdentityHelper(self):
    with test_util.use_gpu():
      value = tf.identity(tf.constant(2))
      queue = _Queue(1, tf.int32, ((),))
      enqueue = queue.enqueue(value)
      dequeued = tf.identity(queue.dequeue())

      self.evaluate(enqueue)
      self.assertEqual(self.evaluate(dequeued), 2)

  def test_unknown_dimensions(self):
    queue = _Queue(2, tf.int32, [tf.TensorShape([None])])
    value = tf.compat.v1.placeholder(tf.int32, [None])
    enqueue, dequeued = queue.enqueue(value), queue.dequeue()

    self.assertEqual(dequeued.shape.as_list(), [None])
    with self.session() as sess:
      sess.run(enqueue, {value: [1, 2]})
      sess.run(enqueue, {value: []})
      self.assertAllEqual(sess.run(dequeued), [1, 2])
      self.assertAllEqual(sess.run(dequeued), [])

  def test_names(self):
    queue = _Queue(2, [tf.int32, tf.string], [(), ()], names=["n", "s"])
    enqueue, dequeued = queue.enqueue({"n": 1, "s": "x"}), queue.dequeue()

    with self.session() as sess:
      sess.run(enqueue)
      self.assertEqual(sess.run(dequeued), {"n": 1, "s": b"x"})

  def test_shapes_and_dtypes_must_agree(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      "Shapes must be provided for all components, but received 2 dtypes and 1 shapes.",
    ):
      _Queue(2, [tf.int32, tf.float32], [()])

  def test_many_is_not_supported(self):
    queue = _Queue(2, tf.int32, ((),))
    message = (
      "GPUCompatiblePaddingFIFOQueue does not support enqueue_many or dequeue_many, only enqueue "
      "and dequeue."
    )
    with self.assertRaisesWithLiteralMatch(NotImplementedError, message):
      queue.enqueue_many([[1, 2]])
    with self.assertRaisesWithLiteralMatch(NotImplementedError, message):
      queue.dequeue_many(2)


class FIFOQueueTest(tf.test.TestCase):
  def test_fifo_queue_data(self):
    dense = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    ragged = tf.ragged.constant([[1], [], [2, 3]])
    nested = nested_tensors.NestedTensors([dense, ragged])
    queue = prefetch_queue._FIFOQueue(nested.get_tensors())
    result = nested.get_nested_result(queue.dequeue())

    with self.session() as sess:
      sess.run(queue.enqueue_op)
      dense_value, ragged_value = sess.run(result)
    self.assertAllEqual(dense_value, [[1.0, 2.0], [3.0, 4.0]])
    self.assertEqual(ragged_value.to_list(), [[1], [], [2, 3]])

  def test_fifo_queue_capacity(self):
    value = tf.compat.v1.placeholder(tf.int32, [])
    queue = prefetch_queue._FIFOQueue([value], capacity=4)
    (dequeued,) = queue.dequeue()
    size = queue.size()

    with self.session() as sess:
      for i in range(4):
        sess.run(queue.enqueue_op, {value: i})
      self.assertEqual(sess.run(size), 4)
      options = tf.compat.v1.RunOptions(timeout_in_ms=200)
      with self.assertRaises(tf.errors.DeadlineExceededError):
        sess.run(queue.enqueue_op, {value: 4}, options=options)
      self.assertEqual([sess.run(dequeued) for _ in range(4)], [0, 1, 2, 3])

  def test_single_tensor_comes_as_a_list(self):
    dequeued = prefetch_queue._FIFOQueue([tf.zeros([2, 3])]).dequeue()

    self.assertIsInstance(dequeued, list)
    self.assertEqual(dequeued[0].shape.as_list(), [2, 3])

  def test_bad_input(self):
    for queue_class in (prefetch_queue._FIFOQueue, prefetch_queue._MultiFIFOQueue):
      for missing in (None, []):
        with self.assertRaisesWithLiteralMatch(
          ValueError, "Arguments `dense_list` should not be empty."
        ):
          queue_class(missing)
      for bad in ((tf.constant(1),), tf.constant(1), "x"):
        with self.assertRaisesWithLiteralMatch(
          TypeError, "dense_list should be a list of `tf.Tensor`s"
        ):
          queue_class(bad)

  def test_interface_is_abstract(self):
    base = prefetch_queue._QueueBase()
    for attribute in ("queue", "queues", "enqueue_op"):
      with self.assertRaises(NotImplementedError):
        getattr(base, attribute)
    with self.assertRaises(NotImplementedError):
      base.dequeue()


class MultiFIFOQueueTest(tf.test.TestCase):
  def _mixed_queue(self):
    with tf.device("/device:GPU:0"):
      gpu_tensors = [tf.constant(1.0), tf.constant([2.0, 3.0])]
    with tf.device("/device:CPU:0"):
      cpu_tensor = tf.constant("text")
    return prefetch_queue._MultiFIFOQueue(
      [gpu_tensors[0], cpu_tensor, gpu_tensors[1]], capacity=3, queue_name="q"
    )

  def test_cpu_only(self):
    queue = prefetch_queue._MultiFIFOQueue([tf.constant(1), tf.constant(2)], queue_name="q")

    self.assertLen(queue.queues, 1)
    self.assertIs(queue.queue, queue.queues[0])
    self.assertEqual(queue.queue.name, "q")
    self.assertEqual(queue.queue.queue_ref.device, "/device:CPU:0")

  def test_mixed_devices_keep_their_order(self):
    queue = self._mixed_queue()
    dequeued = queue.dequeue()
    size = queue.size()

    self.assertEqual([q.name for q in queue.queues], ["q", "q_gpu"])
    self.assertEqual([q.queue_ref.device for q in queue.queues], ["/device:CPU:0", "/device:GPU:0"])
    self.assertEqual([t.dtype for t in dequeued], [tf.float32, tf.string, tf.float32])
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    with self.session(config=config) as sess:
      sess.run(queue.enqueue_op)
      sess.run(queue.enqueue_op)
      self.assertEqual(sess.run(size), 2)
      first, second, third = sess.run(dequeued)
      self.assertEqual(sess.run(size), 1)
    self.assertEqual((first, second, third.tolist()), (1.0, b"text", [2.0, 3.0]))

  def test_mixed_devices_have_no_single_queue(self):
    with self.assertRaisesWithLiteralMatch(
      NotImplementedError,
      "When using multi-device queues, this interface is disabled."
      "Check if a tensor to be enqueued is mistakenly placed on GPU.",
    ):
      self._mixed_queue().queue  # noqa: B018

  def test_gpu_only(self):
    with tf.device("/device:GPU:0"):
      queue = prefetch_queue._MultiFIFOQueue([tf.constant(1.0)], queue_name="q")

    self.assertEqual([q.name for q in queue.queues], ["q_gpu"])
    self.assertEqual([t.dtype for t in queue.dequeue()], [tf.float32])

  def test_elements_come_out_where_the_queue_is(self):
    device_utils.enable_gpu_training()
    self.addCleanup(device_utils.disable_gpu_training)
    # This puts ops without a device on the CPU.
    with tf.Graph().as_default(), tf.compat.v1.device(device_utils.default_device_fn):
      with tf.device("/device:GPU:0"):
        on_gpu = tf.random.uniform([3])
      queue = prefetch_queue._MultiFIFOQueue([on_gpu, tf.random.uniform([2])], 1)
      devices = [tensor.device for tensor in queue.dequeue()]

    self.assertEqual(devices, ["/device:GPU:0", "/device:CPU:0"])

  def test_gpu_queue_has_a_gpu_kernel_and_keeps_static_shapes(self):
    with tf.device("/device:GPU:0"):
      tensors = [tf.constant(1.0), tf.compat.v1.placeholder(tf.float32, [None, 3])]
    queue = prefetch_queue._MultiFIFOQueue(tensors, queue_name="q")
    op = queue.queue.queue_ref.op

    devices = [k.device_type for k in kernels.get_registered_kernels_for_op(op.type).kernel]

    self.assertTrue({"GPU", "DEFAULT"} & set(devices), f"{op.type} has kernels for {devices}")
    self.assertEqual([t.shape.as_list() for t in queue.dequeue()], [[], [None, 3]])

  def test_runner_closes_all_queues(self):
    queue = self._mixed_queue()
    runner = prefetch_queue.MultiQueueRunner(queue.queues, [queue.enqueue_op])

    self.assertEqual(runner.name, "q")
    with self.assertRaisesWithLiteralMatch(
      NotImplementedError, "When using multi-device queues, this interface is disabled."
    ):
      runner.queue  # noqa: B018
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    for op in (runner.close_op, runner.cancel_op):
      with tf.compat.v1.Session(config=config) as sess:
        sess.run(queue.enqueue_op)
        sess.run(op)
        for one in queue._queues:
          with self.assertRaisesRegex(tf.errors.CancelledError, "is closed"):
            sess.run(one.enqueue_op)

  def test_queue_on_a_gpu_does_not_tell_whether_it_is_closed(self):
    queue = self._mixed_queue()
    with self.assertRaisesRegex(NotImplementedError, "q_gpu, a queue on a GPU"):
      queue.queues[1].is_closed()
    with self.session() as sess:
      self.assertFalse(sess.run(queue.queues[0].is_closed()))

  def test_runner_of_one_queue(self):
    queue = prefetch_queue._FIFOQueue([tf.constant(1)], queue_name="one")

    runner = prefetch_queue.MultiQueueRunner(queue.queue, [queue.enqueue_op])

    self.assertIs(runner.queue, queue.queue)
    self.assertEqual(runner.name, "one")

  def test_runner_without_queue_or_ops(self):
    queue = prefetch_queue._FIFOQueue([tf.constant(1)])
    for args in (([], [queue.enqueue_op]), ([queue.queue], [])):
      with self.assertRaisesRegex(ValueError, "Must provide queue and enqueue_ops"):
        prefetch_queue.MultiQueueRunner(*args)


class PrefetchTest(tf.test.TestCase):
  def test_enqueue_dicts_with_queue_return_cycles(self):
    dense = tf.compat.v1.placeholder(tf.float32, [None, 2])
    values = tf.compat.v1.placeholder(tf.int64, [None])
    splits = tf.compat.v1.placeholder(tf.int64, [None])
    ragged = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    (dense_dict, ragged_dict), queue = prefetch_queue.enqueue_dicts_with_queue_return(
      ({"dense": dense}, {"ragged": ragged}), capacity=3
    )

    def feed(i):
      return {dense: np.full([i, 2], i), values: list(range(i)), splits: [0, i, i]}

    with self.session() as sess:
      for cycle in range(3):
        for i in range(3):
          sess.run(queue.enqueue_op, feed(i + cycle))
        for i in range(3):
          out = sess.run((dense_dict, ragged_dict))
          self.assertEqual(out[0]["dense"].shape, (i + cycle, 2))
          self.assertEqual(out[1]["ragged"].to_list(), [list(range(i + cycle)), []])

  def test_enqueue_dicts_with_queue_return(self):
    variable = tf.Variable(0.5)
    tensors = {
      "tensor": tf.constant([1, 2]),
      "nested": {"text": "abc", "none": None, "ragged": tf.ragged.constant([[1], [2, 3]])},
      "pair": (None, variable),
    }

    result, queue = prefetch_queue.enqueue_dicts_with_queue_return(tensors)

    self.assertEqual(result["nested"]["text"], "abc")
    self.assertIsNone(result["nested"]["none"])
    self.assertIsNone(result["pair"][0])
    self.assertIs(result["pair"][1], variable)
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(queue.enqueue_op)
      tensor, ragged, value = sess.run(
        (result["tensor"], result["nested"]["ragged"], result["pair"][1])
      )
    self.assertAllEqual(tensor, [1, 2])
    self.assertEqual(ragged.to_list(), [[1], [2, 3]])
    self.assertEqual(value, 0.5)

  def test_enqueue_dicts_with_control_flow(self):
    v = tf.Variable(0)
    with tf.control_dependencies([v.assign_add(1)]):
      result, queue = prefetch_queue.enqueue_dicts_with_queue_return({"x": tf.constant(1)})

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(queue.enqueue_op)
      self.assertEqual(sess.run(result), {"x": 1})
      # The enqueue ran the dependency, the dequeue did not.
      self.assertEqual(sess.run(v), 1)

  def test_what_does_not_meet_the_condition_is_dropped(self):
    number = tf.compat.v1.placeholder(tf.int64, [])
    result, queue = prefetch_queue.enqueue_dicts_with_queue_return(
      {"x": number}, capacity=3, condition=number > 0
    )

    with self.session() as sess:
      for value in (0, 7, 0, 8):
        sess.run(queue.enqueue_op, {number: value})
      self.assertEqual(sess.run(queue.size()), 2)
      self.assertEqual([sess.run(result)["x"] for _ in range(2)], [7, 8])

  def test_enqueue_with_zero_capacity(self):
    tensors = {"x": tf.constant(1), "y": tf.ragged.constant([[2], []])}

    result, queue = prefetch_queue.enqueue_dicts_with_queue_return(tensors, capacity=0)

    self.assertIs(result, tensors)
    self.assertIsNone(queue)
    with self.session() as sess:
      values = sess.run(result)
    self.assertEqual(values["x"], 1)
    self.assertEqual(values["y"].to_list(), [[2], []])

  def test_estimator_prefetch(self):
    def input_fn():
      return tf.data.Dataset.range(20)

    def model_fn(features, mode, config):
      del config
      result, queue = prefetch_queue.enqueue_dicts_with_queue_return({"x": features}, capacity=3)
      return graph_estimator.EstimatorSpec(
        mode,
        predictions=tf.reshape(result["x"], [1]),
        prediction_hooks=[prefetch_queue.EnqueueHook(queue)],
      )

    estimator = graph_estimator.Estimator(model_fn, model_dir=self.get_temp_dir())

    self.assertEqual(
      [int(x[0]) for x in estimator.predict(input_fn, yield_single_examples=False)],
      list(range(20)),
    )

  def test_two_queues_in_a_row(self):
    source = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(50)).get_next()
    first, queue1 = prefetch_queue.enqueue_dicts_with_queue_return({"x": source}, capacity=2)
    second, queue2 = prefetch_queue.enqueue_dicts_with_queue_return(
      {"x": first["x"] * 10}, capacity=2
    )
    hooks = [prefetch_queue.EnqueueHook(queue1), prefetch_queue.EnqueueHook(queue2)]

    seen = []
    with tf.compat.v1.train.SingularMonitoredSession(hooks=hooks) as sess:
      while not sess.should_stop():
        seen.append(int(sess.run(second)["x"]))
    self.assertEqual(seen, [10 * i for i in range(50)])

  def test_threads_end_with_the_session(self):
    before = set(threading.enumerate())
    result, queue = prefetch_queue.enqueue_dicts_with_queue_return({"x": tf.constant(1)})
    hook = prefetch_queue.EnqueueHook(queue)

    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      self.assertEqual(sess.run(result), {"x": 1})
      self.assertTrue(all(thread.daemon for thread in hook._threads))

    for thread in hook._threads:
      thread.join(60)
    self.assertFalse([t for t in set(threading.enumerate()) - before if t in hook._threads])

  def test_error_of_the_source_reaches_the_session(self):
    two = tf.compat.v1.placeholder_with_default(2, [])
    with tf.control_dependencies([tf.debugging.assert_less(two, 1, message="bad source")]):
      source = tf.identity(two)
    result, queue = prefetch_queue.enqueue_dicts_with_queue_return({"x": source})

    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "bad source"):
      with tf.compat.v1.train.SingularMonitoredSession(
        hooks=[prefetch_queue.EnqueueHook(queue)]
      ) as sess:
        sess.run(result)

  def test_structure_without_tensors(self):
    with self.assertRaisesRegex(ValueError, "should not be empty"):
      prefetch_queue.enqueue_dicts_with_queue_return({"x": 1})


class AsyncManagerTest(tf.test.TestCase, parameterized.TestCase):
  def testBasic(self):
    mgr = prefetch_queue.AsyncFunctionMgr(is_async=True)
    x = tf.Variable(0)

    def add(value):
      return x.assign_add(value)

    op = mgr.add_async_function(add, (tf.constant(1),))

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks) as sess:
      sess.run(op)
      sess.run(op)
      self.assertEqual(sess.run(x), 1)

  def testSync(self):
    mgr = prefetch_queue.AsyncFunctionMgr(is_async=False)
    x = tf.Variable(0)

    op = mgr.add_async_function(lambda value: x.assign_add(value), (tf.constant(1),))

    self.assertEqual(mgr.hooks, [])
    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks) as sess:
      sess.run(op)
      self.assertEqual(sess.run(x), 1)

  def testEmptyInput(self):
    mgr = prefetch_queue.AsyncFunctionMgr(is_async=True)
    x = tf.Variable(0)

    op = mgr.add_async_function(lambda: x.assign_add(1))

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks) as sess:
      sess.run(op)
      sess.run(op)
      self.assertEqual(sess.run(x), 1)

  def test_values_of_the_step_before(self):
    mgr = prefetch_queue.AsyncFunctionMgr()
    seen = tf.Variable(-1)
    value = tf.compat.v1.placeholder_with_default(-5, [])
    op = mgr.add_async_function(lambda v: seen.assign(v), (value,))
    after = []

    class Reader(tf.compat.v1.train.SessionRunHook):
      def after_run(self, run_context, run_values):
        after.append(int(run_context.session.run(seen)))

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks + [Reader()]) as sess:
      for i in range(4):
        sess.run(op, {value: i})

    self.assertEqual(after, [-1, 0, 1, 2])

  def test_end_drains_the_queue(self):
    mgr = prefetch_queue.AsyncFunctionMgr()
    total = tf.Variable(0)
    value = tf.compat.v1.placeholder_with_default(0, [])
    op = mgr.add_async_function(lambda v: total.assign_add(v), (value,))
    final = []

    class Reader(tf.compat.v1.train.SessionRunHook):
      def end(self, session):
        final.append(int(session.run(total)))

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks + [Reader()]) as sess:
      for i in (1, 10, 100):
        sess.run(op, {value: i})

    self.assertEqual(final, [111])

  def test_session_that_never_ran_the_op(self):
    mgr = prefetch_queue.AsyncFunctionMgr()
    x = tf.Variable(0)
    mgr.add_async_function(lambda: x.assign_add(1))

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks) as sess:
      self.assertEqual([sess.run(x) for _ in range(3)], [0, 0, 0])

  def test_runs_that_only_read_do_not_push(self):
    mgr = prefetch_queue.AsyncFunctionMgr()
    x = tf.Variable(0)
    op = mgr.add_async_function(lambda: tf.group(x.assign_add(1)))
    train_op = {"loss": tf.constant(1.0), "train": tf.group(op)}

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks) as sess:
      sess.run(train_op)
      for i in range(3):
        # With a push in each of these the second would wait forever.
        self.assertEqual([sess.run(x), sess.run([x]), sess.run({"x": x})], [i, [i], {"x": i}])
        # Fetched by name it is still the op that fills the queue.
        sess.run(train_op["train"].name if i == 1 else train_op)

  def test_push_hook_with_a_stand_in_for_the_session(self):
    queue = prefetch_queue._MultiFIFOQueue([tf.constant(1)], 2, "queue")
    push = queue.dequeue()
    hook = prefetch_queue.AsyncPushHook(queue, push)
    context = mock.MagicMock()
    hook.begin()

    context.session.run.return_value = 0
    hook.after_run(context, None)
    self.assertIsNone(hook.before_run(context))
    context.session.run.return_value = 1
    hook.after_run(context, None)
    self.assertEqual(hook.before_run(context).fetches, push)

  def test_queue_that_a_thread_fills_is_consumed_in_every_run(self):
    source = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(1, 11)).get_next()
    element, queue = prefetch_queue.enqueue_dicts_with_queue_return({"x": source}, capacity=1)
    total = tf.Variable(0, dtype=tf.int64)
    push = tf.group(total.assign_add(element["x"]))
    constant = tf.constant(1)
    final = []

    class Reader(tf.compat.v1.train.SessionRunHook):
      def end(self, session):
        final.append(int(session.run(total)))

    hooks = [
      prefetch_queue.EnqueueHook(queue), prefetch_queue.AsyncPushHook(queue, push), Reader()
    ]  # fmt: skip
    with tf.compat.v1.train.SingularMonitoredSession(hooks=hooks) as sess:
      while not sess.should_stop():
        sess.run(constant)

    self.assertEqual(final, [55])

  def test_variables_and_kwargs(self):
    mgr = prefetch_queue.AsyncFunctionMgr()
    var = tf.Variable(10.0)

    def apply(grads_and_vars, scale, name):
      self.assertEqual(name, "update")
      return tf.group([v.assign_sub(g * scale) for g, v in grads_and_vars], name=name)

    op = mgr.add_async_function(
      apply,
      ([(tf.constant(1.0), var)],),
      {"scale": tf.constant(2.0), "name": "update"},
      queue_name="postpush_queue",
    )

    with tf.compat.v1.train.SingularMonitoredSession(hooks=mgr.hooks) as sess:
      sess.run(op)
      sess.run(op)
      self.assertEqual(sess.run(var), 8.0)
    names = [o.name for o in tf.compat.v1.get_default_graph().get_operations()]
    for name in (
      "postpush_queue", "dummy_tensor_for_async_function", "dummy_depended_op_for_async_function"
    ):  # fmt: skip
      self.assertIn(name, names)

  @parameterized.parameters(False, True)
  def test_function_of_the_last_step_is_done_as_a_whole(self, optimize_graph):
    """The end of the data cancels a step while it runs the function of the step before."""
    begins = threading.Semaphore(0)
    batches = iter([1.0, 2.0])

    def read():
      value = next(batches, None)
      if value is None:
        # Let the function begin a second time, if it can, before this ends the step for both.
        for _ in range(2):
          begins.acquire(timeout=1)
        raise StopIteration
      return np.float32(value)

    def begin():
      begins.release()
      return np.float32(0)

    first, second = tf.Variable(0.0), tf.Variable(0.0)
    batch = tf.compat.v1.py_func(read, [], tf.float32)
    batch.set_shape([])
    # Stands for a server that takes its time: it has an answer for the first batch, for the second
    # one only at the end. A wait for it can be cancelled, as one for a server can.
    answers = tf.queue.FIFOQueue(2, tf.float32, shapes=[()])
    answer = answers.enqueue(0.0)
    mgr = prefetch_queue.AsyncFunctionMgr()
    mgr.wait_for([batch])

    def push(value):
      with tf.control_dependencies([first.assign_add(value)]):
        begun = tf.compat.v1.py_func(begin, [], tf.float32)
      with tf.control_dependencies([begun]):
        return second.assign_add(value + answers.dequeue())

    op = mgr.add_async_function(push, (batch,))
    final = []

    class Answer(tf.compat.v1.train.SessionRunHook):
      def after_create_session(self, session, coord):
        session.run(answer)

      def end(self, session):
        session.run(answer)

    class Reader(tf.compat.v1.train.SessionRunHook):
      def end(self, session):
        final.extend(session.run([first, second]))

    hooks = [Answer(), *mgr.hooks, Reader()]
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimize_graph
    creator = tf.compat.v1.train.ChiefSessionCreator(config=config)
    with tf.compat.v1.train.MonitoredSession(creator, hooks=hooks) as sess:
      while not sess.should_stop():
        sess.run(op)

    self.assertEqual(final, [3.0, 3.0])

  def test_function_overrides_the_manager(self):
    for default in (True, False):
      mgr = prefetch_queue.AsyncFunctionMgr(is_async=default)
      constant = tf.constant(1)

      self.assertIs(mgr.add_async_function(lambda x: x, (constant,), is_async=False), constant)
      self.assertEmpty(mgr.hooks)
      mgr.add_async_function(lambda x: x, (constant,), is_async=True)
      self.assertLen(mgr.hooks, 1)

  def test_function_whose_arguments_depend_on_itself(self):
    mgr = prefetch_queue.AsyncFunctionMgr()
    loop = tf.identity(tf.constant(1))

    def target(value):
      out = value + 1
      # The enqueue op's inputs now need what the function computes.
      loop.op._update_input(0, out)
      return out

    with self.assertRaisesRegex(Exception, "Checking ops dependence"):
      mgr.add_async_function(target, (loop,))

  def test_function_without_result(self):
    mgr = prefetch_queue.AsyncFunctionMgr()

    with self.assertRaisesRegex(ValueError, "returned None"):
      mgr.add_async_function(lambda: None)
    self.assertEmpty(mgr.hooks)


if __name__ == "__main__":
  tf.test.main()
