"""Dense variables and their gradients travel in one message per server and way."""

import collections

import numpy as np
import tensorflow as tf
from tensorflow.python.training import training_util

from monolith.native_training import utils
from monolith.native_training.driver import dense_parcels

tf.compat.v1.disable_eager_execution()

_WORKER = "/job:worker/task:0/device:CPU:0"
_SERVERS = ("/job:ps/task:0/device:CPU:0", "/job:ps/task:1/device:CPU:0")
_TO, _FROM = (_WORKER, _SERVERS[0]), (_SERVERS[0], _WORKER)


def _place(op):
  # TensorFlow will put these where their variables are.
  return op.inputs[0].op.device if op.type == "ReadVariableOp" else op.device


def _messages(op):
  """Returns how many tensors go from each device to each other one for an op."""
  ways = collections.defaultdict(set)
  for needed in utils.get_needed_ops([op]):
    for tensor in needed.inputs:
      way = _place(tensor.op), _place(needed)
      if way[0] != way[1] and tensor.dtype != tf.resource:
        ways[way].add(tensor.name)
  return {way: len(names) for way, names in ways.items()}


class DenseParcelsTest(tf.test.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default(), tf.device(_WORKER):
      return super().run(result)

  def make_variables(self, initial_values):
    """Returns variables, every other one on the same server."""
    variables = []
    for i, value in enumerate(initial_values):
      with tf.device(_SERVERS[i % 2]):
        variables.append(tf.compat.v1.get_variable(f"v{i}", initializer=value, use_resource=True))
    return variables

  def session(self, initialized=True):
    servers = [tf.distribute.Server.create_local_server() for _ in range(3)]
    cluster = tf.train.ClusterDef()
    for name, members in (("worker", servers[:1]), ("ps", servers[1:])):
      job = cluster.job.add(name=name)
      for i, server in enumerate(members):
        job.tasks[i] = server.target.removeprefix("grpc://")
    config = tf.compat.v1.ConfigProto(
      cluster_def=cluster, share_cluster_devices_in_session=True, allow_soft_placement=True
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    self._servers = servers  # as long as the session
    session = tf.compat.v1.Session(servers[0].target, config=config)
    self.addCleanup(session.close)
    if initialized:
      session.run(tf.compat.v1.global_variables_initializer())
    return session

  def make_model(self):
    """Returns variables, and an op that trains them."""
    random = np.random.default_rng(1)
    large, small = random.normal(size=[100, 200]), random.normal(size=[200])
    values = [large, small, small, large.T, random.normal(size=[100]), small]
    variables = self.make_variables([value.astype(np.float32) for value in values])
    hidden = tf.nn.tanh(tf.matmul(tf.ones([3, 100]), variables[0]) + variables[1] * variables[2])
    output = tf.nn.tanh(tf.matmul(hidden, variables[3]) + variables[4])
    loss = tf.reduce_sum(output * output) + tf.reduce_sum(variables[5] * variables[1])
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    return variables, optimizer.minimize(loss, var_list=variables)

  def test_one_message_each_way_and_the_same_results(self):
    results = []
    for combines in (False, True):
      with tf.Graph().as_default(), tf.device(_WORKER):
        variables, train_op = self.make_model()
        before = _messages(train_op)
        if combines:
          dense_parcels.combine(train_op)
          for way in (_TO, _FROM, (_WORKER, _SERVERS[1]), (_SERVERS[1], _WORKER)):
            self.assertGreaterEqual(before[way], 3)
            self.assertEqual(_messages(train_op)[way], 1)
        session = self.session()
        for _ in range(4):
          session.run(train_op)
        results.append(session.run(variables))
    for want, found in zip(*results):
      self.assertAllEqual(found, want)

  def test_steps_read_what_the_last_one_has_written(self):
    variables = self.make_variables([[1.0], [10.0], [2.0], [20.0]])
    loss = tf.add_n([tf.reduce_sum(variable) ** 2 for variable in variables])
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.25).minimize(loss)
    dense_parcels.combine(train_op)
    session = self.session()
    for i in range(1, 4):
      session.run(train_op)
      self.assertAllClose(session.run(variables), [[v * 0.5**i] for v in (1, 10, 2, 20)])

  def test_hooks_have_the_global_step_from_the_step_s_parcel(self):
    with tf.Graph().as_default(), tf.device(_WORKER):
      with tf.device(_SERVERS[0]):
        step = tf.compat.v1.train.create_global_step()
      told = tf.identity(step._as_graph_element(), "global_step_read")
      tf.compat.v1.add_to_collection(training_util.GLOBAL_STEP_READ_KEY, told)
      variables = self.make_variables([[1.0], [10.0], [2.0], [20.0]])
      rate = 1.0 / (2.0 + tf.cast(step, tf.float32))
      loss = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])
      train_op = tf.compat.v1.train.GradientDescentOptimizer(rate).minimize(loss, step)
      both = tf.group(train_op, told)
      self.assertEqual(_messages(both)[_FROM], 4)
      dense_parcels.combine(train_op)
      self.assertEqual(_messages(both)[_FROM], 1)
      session = self.session()
      self.assertEqual([session.run([told, train_op])[0] for _ in range(3)], [0, 1, 2])
      self.assertEqual(session.run([told, step]), [3, 3])

  def test_an_optimizer_that_waits_for_another_one_is_left_alone(self):
    variables = self.make_variables([[1.0], [10.0], [2.0], [20.0]])
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    first = optimizer.apply_gradients([(tf.constant([1.0]), variables[0])])
    with tf.control_dependencies([first]):
      gradient = variables[0].read_value() * 2.0
    train_op = optimizer.apply_gradients([(gradient, variables[2])])
    dense_parcels.combine(train_op)
    session = self.session()
    session.run(train_op)
    self.assertAllClose(session.run([variables[0], variables[2]]), [[0.5], [1.5]])

  def test_initial_values_do_not_wait_for_other_variables(self):
    variables = self.make_variables([[1.0], [10.0], [2.0], [20.0], [3.0]])
    value = variables[0].read_value()
    with tf.device(_SERVERS[0]):
      copy = tf.compat.v1.get_variable("copy", initializer=value * 3.0, use_resource=True)
    loss = tf.reduce_sum(value) + tf.add_n([tf.reduce_sum(v * v) for v in [*variables, copy]])
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(loss)
    dense_parcels.combine(train_op)
    session = self.session(initialized=False)
    for variable in [variables[0], copy, *variables[1:]]:
      session.run(variable.initializer)
    session.run(train_op)
    self.assertAllClose(session.run([variables[2], copy]), [[0.0], [0.0]])

  def test_branches_are_left_alone(self):
    variables = self.make_variables([[1.0], [10.0], [2.0], [20.0]])
    value = tf.cond(
      tf.constant(True),
      lambda: variables[0] + variables[2],
      lambda: variables[0] - variables[2],
    )
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(value))
    dense_parcels.combine(train_op)
    session = self.session()
    session.run(train_op)
    self.assertAllClose(session.run([variables[0], variables[2]]), [[0.5], [1.5]])

  def test_a_step_without_servers(self):
    variable = tf.compat.v1.get_variable("v", initializer=[1.0], use_resource=True)
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(variable))
    num_ops = len(tf.compat.v1.get_default_graph().get_operations())
    dense_parcels.combine(train_op)
    self.assertLen(tf.compat.v1.get_default_graph().get_operations(), num_ops)


if __name__ == "__main__":
  tf.test.main()
