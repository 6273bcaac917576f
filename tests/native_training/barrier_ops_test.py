"""The barrier: placed by one thread, waited for by another."""

import threading
from unittest import mock

import tensorflow as tf
from tensorflow.python.training import monitored_session

from monolith.native_training import barrier_ops

tf.compat.v1.disable_eager_execution()


def _init(session: tf.compat.v1.Session) -> None:
  session.run(
    [tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()]
  )


class BarrierOpsTest(tf.test.TestCase):
  def test_basic(self):
    barrier_op = barrier_ops.BarrierOp(2)
    with self.session() as session:
      _init(session)
      self.assertTrue(barrier_op.is_barrier_removed(session))
      self.assertFalse(barrier_op.is_barrier_placed(session))
      self.assertTrue(barrier_op.is_none_blocked(session))

      barrier_op.place_barrier(session)

      self.assertTrue(barrier_op.is_barrier_placed(session))
      self.assertTrue(session.run(barrier_op.barrier_placed_tensor))
      self.assertEqual(barrier_op.get_blocked_indices(session), [0])
      self.assertEqual(barrier_op.get_unblocked_indices(session), [1])
      self.assertFalse(barrier_op.is_all_blocked(session))
      self.assertFalse(barrier_op.is_none_blocked(session))
      with self.assertRaises(barrier_ops.BarrierAlreadyPlacedError):
        barrier_op.place_barrier(session)

      barrier_op.remove_barrier(session)
      barrier_op.remove_barrier(session)

      self.assertTrue(barrier_op.is_barrier_removed(session))
      self.assertEqual(barrier_op.capacity, 2)

  def test_barrier_hook_blocked(self):
    calls = []
    called_by_worker = threading.Event()

    def callback(action, session):
      self.assertIsNotNone(session)
      calls.append((action, threading.current_thread().name))
      if threading.current_thread().name == "worker":
        called_by_worker.set()

    barrier_op = barrier_ops.BarrierOp(2, wait_seconds=0.05, barrier_callbacks=[callback])
    hook = barrier_ops.BarrierHook(1, barrier_op)
    global_step = tf.compat.v1.train.get_or_create_global_step()
    train_op = tf.compat.v1.assign_add(global_step, 1)

    with self.session() as session:
      _init(session)
      barrier_op.place_barrier(session, action="save")
      hooked = monitored_session._HookedSession(session, [hook])
      # Threads have default graphs of their own.
      graph = tf.compat.v1.get_default_graph()

      def train():
        with graph.as_default():
          for _ in range(5):
            hooked.run(train_op)

      worker = threading.Thread(target=train, name="worker")
      worker.start()
      self.assertTrue(called_by_worker.wait(60))
      self.assertTrue(barrier_op.is_all_blocked(session))
      self.assertEqual(session.run(global_step), 1)
      self.assertEqual(calls, [("save", threading.current_thread().name), ("save", "worker")])

      barrier_op.remove_barrier(session)
      worker.join(60)

      self.assertFalse(worker.is_alive())
      self.assertEqual(session.run(global_step), 5)
      self.assertTrue(barrier_op.is_none_blocked(session))

  def test_the_chief_never_waits(self):
    barrier_op = barrier_ops.BarrierOp(2)
    global_step = tf.compat.v1.train.get_or_create_global_step()
    train_op = tf.compat.v1.assign_add(global_step, 1)
    with self.session() as session:
      _init(session)
      barrier_op.place_barrier(session)
      hook = barrier_ops.BarrierHook(0, barrier_op)
      hooked = monitored_session._HookedSession(session, [hook])

      for _ in range(3):
        hooked.run(train_op)

      self.assertEqual(session.run(global_step), 3)
      self.assertIsNone(hook.before_run(mock.Mock()))  # nor asks, which would be a message

  def test_methods_work_on_a_finalized_graph(self):
    barrier_op = barrier_ops.BarrierOp(3, wait_seconds=0.01)
    with self.session() as session:
      _init(session)
      tf.compat.v1.get_default_graph().finalize()

      barrier_op.place_barrier(session, "x")
      barrier_op.remove_barrier(session)
      barrier_op.wait_until_barrier_removed(session, 2)

      self.assertEqual(barrier_op.get_unblocked_indices(session), [0, 1, 2])

  def test_index_out_of_range(self):
    barrier_op = barrier_ops.BarrierOp(2)
    with self.session() as session:
      _init(session)
      for index in (-1, 0, 2):
        message = rf"Index \[{index}\] must be non-negative and less than capacity \[2\]\. "
        with self.assertRaisesRegex(ValueError, message):
          barrier_op.wait_until_barrier_removed(session, index)

  def test_collections_and_names(self):
    keys = tf.compat.v1.GraphKeys
    for is_chief, collection, other in (
      (True, keys.LOCAL_VARIABLES, keys.GLOBAL_VARIABLES),
      (False, keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES),
    ):
      with tf.Graph().as_default():
        barrier_op = barrier_ops.BarrierOp(4, is_chief=is_chief, name_prefix="some")

        names = [v.op.name for v in tf.compat.v1.get_collection(collection)]
        self.assertEqual(names, ["barrier_var", "barrier_op_action"])
        self.assertEmpty(tf.compat.v1.get_collection(other))
        self.assertEmpty(tf.compat.v1.trainable_variables())
        self.assertStartsWith(barrier_op.barrier_placed_tensor.op.name, "some_barrier_op/")

  def test_ref_variables(self):
    with tf.compat.v1.variable_scope(tf.compat.v1.get_variable_scope(), use_resource=False):
      barrier_op = barrier_ops.BarrierOp(2, wait_seconds=0.01)
    with self.session() as session:
      _init(session)
      barrier_op.place_barrier(session, "a")
      self.assertTrue(barrier_op.is_barrier_placed(session))
      barrier_op.remove_barrier(session)
      barrier_op.wait_until_barrier_removed(session, 1)
      self.assertTrue(barrier_op.is_none_blocked(session))

  def test_only_one_of_many_threads_places_the_barrier(self):
    barrier_op = barrier_ops.BarrierOp(2)
    placed, refused = [], []
    with self.session() as session:
      _init(session)

      def place():
        try:
          barrier_op.place_barrier(session)
          placed.append(1)
        except barrier_ops.BarrierAlreadyPlacedError:
          refused.append(1)

      threads = [threading.Thread(target=place) for _ in range(8)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()

    self.assertEqual((len(placed), len(refused)), (1, 7))

  def test_chief_and_worker_processes_share_the_barrier(self):
    server = tf.distribute.Server.create_local_server()
    with tf.Graph().as_default() as chief_graph:
      chief_op = barrier_ops.BarrierOp(2, is_chief=True)
      chief_init = tf.compat.v1.local_variables_initializer()
    actions = []
    with tf.Graph().as_default() as worker_graph:
      worker_op = barrier_ops.BarrierOp(
        2,
        is_chief=False,
        wait_seconds=0.05,
        barrier_callbacks=[lambda action, session: actions.append(action)],
      )
      # A restarted worker runs this: it must not reset what the chief wrote.
      worker_init = tf.compat.v1.local_variables_initializer()

    with tf.compat.v1.Session(server.target, graph=chief_graph) as chief:
      with tf.compat.v1.Session(server.target, graph=worker_graph) as worker:
        chief.run(chief_init)
        chief_op.place_barrier(chief, "stop")
        worker.run(worker_init)
        thread = threading.Thread(target=worker_op.wait_until_barrier_removed, args=(worker, 1))
        thread.start()
        while not chief_op.is_all_blocked(chief):
          self.assertTrue(thread.is_alive())
        chief_op.remove_barrier(chief)
        thread.join(60)

        self.assertFalse(thread.is_alive())
        self.assertEqual(actions, ["stop"])
        self.assertTrue(chief_op.is_none_blocked(chief))


if __name__ == "__main__":
  tf.test.main()
