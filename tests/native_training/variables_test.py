import tensorflow as tf
from tensorflow.core.protobuf import cluster_pb2

from monolith.native_training import variables

tf.compat.v1.disable_eager_execution()


def _create_ps_cluster(num_ps: int):
  """Starts servers and returns them with a session config that calls them `/job:ps/task:<i>`."""
  servers = [tf.distribute.Server.create_local_server() for _ in range(num_ps)]
  cluster = cluster_pb2.ClusterDef()
  job = cluster.job.add(name="ps")
  for i, server in enumerate(servers):
    job.tasks[i] = server.target[len("grpc://") :]
  return servers, tf.compat.v1.ConfigProto(cluster_def=cluster)


class CachedVariableTest(tf.test.TestCase):
  def _init(self, sess):
    sess.run(tf.compat.v1.global_variables_initializer())
    sess.run(tf.compat.v1.local_variables_initializer())

  def _create_variable(self, initial_value=5.0):
    with tf.variable_creator_scope(variables.cached_variable_creator):
      with tf.device("/job:ps/task:1"):
        return tf.Variable(initial_value)

  def testBasic(self):
    servers, config = _create_ps_cluster(2)
    with tf.compat.v1.Session(servers[0].target, config=config) as sess:
      var = self._create_variable()
      cached = var * 1.0
      add = var.assign_add(2.0)
      fetch = variables.fetch_all_cached_variables()
      assign = variables.assign_all_cached_variables()
      self._init(sess)

      self.assertEqual(sess.run(cached), 5.0)
      sess.run(add)
      self.assertEqual(sess.run(cached), 5.0)
      self.assertEqual(sess.run(var), 7.0)

      sess.run(fetch)
      self.assertEqual(sess.run(cached), 5.0)
      sess.run(assign)
      self.assertEqual(sess.run(cached), 7.0)

  def testHook(self):
    servers, config = _create_ps_cluster(2)
    var = self._create_variable()
    var_cached = var * 1.0
    sub = tf.compat.v1.assign_sub(var, 1.0)
    hook = variables.FetchAllCachedVariablesHook()
    scaffold = tf.compat.v1.train.Scaffold()

    with tf.compat.v1.train.SingularMonitoredSession(
      hooks=[hook], scaffold=scaffold, master=servers[0].target, config=config
    ) as sess:
      self.assertEqual(sess.run(var_cached), 5.0)
      sess.run(sub)
      # The fetch of that run may have read the value before or after it.
      sess.run(var_cached)
      self.assertEqual(sess.run(var_cached), 4.0)

  def testGradient(self):
    servers, config = _create_ps_cluster(2)
    var = self._create_variable()
    loss = tf.identity(var)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    train_op = optimizer.minimize(loss)
    cached = var * 1.0

    with tf.compat.v1.Session(servers[0].target, config=config) as sess:
      self._init(sess)
      sess.run(train_op)

      self.assertEqual(sess.run(var), 4.0)
      self.assertEqual(sess.run(cached), 5.0)

  def test_first_run_reads_the_remote_value(self):
    servers, config = _create_ps_cluster(2)
    # Every initialisation of this variable, also that of its copies, draws another value.
    var = self._create_variable(tf.random.uniform([1000]))
    cached = var * 1.0
    hook = variables.FetchAllCachedVariablesHook()

    with tf.compat.v1.train.SingularMonitoredSession(
      hooks=[hook], master=servers[0].target, config=config
    ) as sess:
      self.assertAllEqual(*sess.run([cached, var]))

  def test_new_session_fetches_first(self):
    hook = variables.FetchAllCachedVariablesHook()
    hook._first_run = False

    hook.after_create_session(None, None)

    self.assertTrue(hook._first_run)

  def test_local_variable_has_no_cache(self):
    with tf.variable_creator_scope(variables.cached_variable_creator):
      var = tf.Variable(1.0)

    self.assertIsNone(var._cached_value)
    self.assertEmpty(tf.compat.v1.get_collection(variables._CACHED_VARIABLES))
    self.assertEmpty(tf.compat.v1.local_variables())
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run([variables.fetch_all_cached_variables(), variables.assign_all_cached_variables()])

  def test_optimizer_slots_have_no_cache(self):
    with tf.variable_creator_scope(variables.cached_variable_creator):
      with tf.device("/job:ps/task:0"):
        var = tf.Variable([1.0, 2.0])
      tf.compat.v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(var))

    cached = tf.compat.v1.get_collection(variables._CACHED_VARIABLES)
    self.assertEqual([v.name for v in cached], [var.name])

  def test_copies_are_local_variables(self):
    var = self._create_variable()

    copies = tf.compat.v1.local_variables()

    self.assertLen(copies, 2)
    for copy in copies:
      self.assertEqual(copy.device, "")
      self.assertEqual((copy.shape, copy.dtype), (var.shape, var.dtype))
      self.assertFalse(copy.trainable)
    self.assertNotIn(copies[0].name, [v.name for v in tf.compat.v1.global_variables()])

  def test_graphs_do_not_share_caches(self):
    with tf.Graph().as_default():
      self._create_variable()
      self.assertLen(variables._get_meta().var_id_to_assoc, 1)
    with tf.Graph().as_default():
      self.assertEmpty(variables._get_meta().var_id_to_assoc)

  def test_ref_variable_is_refused(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError, "Only ResourceVariable is supported. Do you disable V2 behavior or use strategy?"
    ):
      with tf.variable_creator_scope(variables.cached_variable_creator):
        tf.compat.v1.Variable(1.0, use_resource=False)

  def test_variable_with_a_cache_is_refused(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError, "The variable has already been cached. Consider about removing cache_device."
    ):
      with tf.device("/job:ps/task:1"):
        # The outer scope meets a variable that the inner one has cached.
        with tf.variable_creator_scope(variables.cached_variable_creator):
          with tf.variable_creator_scope(variables.cached_variable_creator):
            tf.Variable(1.0)

  def test_op_names(self):
    self.assertEqual(
      variables._get_valid_op_name("/job:ps/task:1/device:CPU:0"), "_job_ps_task_1_device_CPU_0"
    )
    self._create_variable()

    variables.fetch_all_cached_variables()
    assign = variables.assign_all_cached_variables()

    names = [op.name for op in tf.compat.v1.get_default_graph().get_operations()]
    self.assertTrue(any(name.startswith("fetch_from__job_ps_task_1") for name in names))
    self.assertIn("assign_cached_var", names)
    self.assertEqual(assign.name, "assign_all_cached_variables")


if __name__ == "__main__":
  tf.test.main()
