"""Several steps at the same time: each batch is trained once, and hooks see none under way."""

import os
import threading
import time

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import cpu_training, entry, feature, graph_estimator, native_task
from monolith.native_training.driver import steps_in_flight

tf.compat.v1.disable_eager_execution()

_IDS = 5


class CountingTask(native_task.NativeTask):
  """Every example moves the row of its id, and one variable, by exactly 1."""

  NUM_BATCHES = 100

  def create_input_fn(self, mode):
    def input_fn():
      def batch(i):
        ids = tf.stack([i % _IDS, (i + 1) % _IDS])
        return {"id": tf.RaggedTensor.from_row_lengths(ids, [1, 1]), "ids": ids, "batch": i}

      return tf.data.Dataset.range(self.NUM_BATCHES).map(batch)

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name="id",
          default_vec_optimizer=entry.SgdOptimizer(1.0),
          default_vec_initializer=entry.ZerosInitializer(),
        )
      )
      column = feature.FeatureColumn(slot, "id")
      vectors = column.embedding_lookup(slot.add_feature_slice(1))
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(
          mode, predictions={"id": features["ids"], "vector": vectors}
        )
      weight = tf.compat.v1.get_variable("weight", [], initializer=tf.zeros_initializer())
      # Depends on the batch, as the gradients of models do.
      one = 1.0 + 0.0 * tf.cast(features["batch"], tf.float32)
      loss = -tf.reduce_sum(vectors) - weight * one
      embeddings = column.get_all_embeddings_concat()
      gradients = tf.gradients(loss, [embeddings, weight])
      seen = tf.compat.v1.get_variable(
        "seen", [self.NUM_BATCHES], tf.int64, tf.zeros_initializer(), use_resource=True
      )
      optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0, use_locking=True)
      train_op = tf.group(
        seen.scatter_add(tf.IndexedSlices(tf.constant(1, tf.int64), features["batch"])),
        self.ctx.apply_embedding_gradients([(gradients[0], embeddings)]),
        optimizer.apply_gradients(
          [(gradients[1], weight)], tf.compat.v1.train.get_or_create_global_step()
        ),
      )
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


class WatchHook(tf.compat.v1.train.SessionRunHook):
  """Checks between steps that none is under way; keeps the global steps it has seen."""

  def __init__(self):
    self.steps = []
    self.threads = set()

  def begin(self):
    self._fetches = [
      tf.compat.v1.train.get_global_step(),
      tf.reduce_sum(tf.compat.v1.global_variables("seen")[0]),
    ]

  def after_run(self, run_context, run_values):
    step, seen = run_context.session.run(self._fetches)
    assert step == seen, (step, seen)
    self.steps.append(int(step))
    self.threads |= {t.name for t in threading.enumerate() if t.name.startswith("step_in_flight")}


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
  def _train(self, model_dir, steps=None, **options):
    hook = WatchHook()
    estimator = cpu_training.local_train_internal(
      CountingTask.params().set(name="counting"),
      cpu_training.CpuTrainingConfig(**options),
      model_dir,
      steps=steps,
      user_hooks=[hook],
    )
    self.assertEqual([t for t in threading.enumerate() if t.name.startswith("step_in_flight")], [])
    return estimator, hook

  @parameterized.parameters(
    {},
    {"embedding_prefetch_capacity": 1, "enable_embedding_postpush": True},
    {"embedding_prefetch_capacity": 4, "enable_embedding_postpush": True, "num_ps": 1},
  )
  def test_every_batch_is_trained_once(self, **options):
    model_dir = os.path.join(self.create_tempdir().full_path, "model")

    estimator, hook = self._train(model_dir, steps_in_flight=3, **options)

    self.assertTrue(hook.threads)
    self.assertLess(len(hook.steps), CountingTask.NUM_BATCHES / 2)
    self.assertEqual(estimator.get_variable_value("global_step"), CountingTask.NUM_BATCHES)
    self.assertAllEqual(estimator.get_variable_value("seen"), np.ones([CountingTask.NUM_BATCHES]))
    self.assertEqual(estimator.get_variable_value("weight"), CountingTask.NUM_BATCHES)
    if not options.get("num_ps"):  # whose servers are gone
      predictions = estimator.predict(CountingTask.params().instantiate().create_input_fn("infer"))
      rows = {int(p["id"]): float(p["vector"][0]) for p in predictions}
      self.assertEqual(rows, {id_: 2 * CountingTask.NUM_BATCHES / _IDS for id_ in range(_IDS)})

  def test_training_ends_at_the_step_it_is_told(self):
    model_dir = os.path.join(self.create_tempdir().full_path, "model")

    estimator, first = self._train(model_dir, steps=10, steps_in_flight=4)

    self.assertEqual(first.steps[-1], 10)
    self.assertEqual(estimator.get_variable_value("global_step"), 10)
    estimator, second = self._train(model_dir, steps=13, steps_in_flight=4)
    self.assertEqual(second.steps[-1], 23)


class HookTest(tf.test.TestCase):
  def _run(self, train_op, loss, num_steps=2, **options):
    hook = steps_in_flight.StepsInFlightHook(num_steps, train_op, loss, [], **options)
    return tf.compat.v1.train.MonitoredSession(hooks=[hook])

  def test_a_loss_that_is_nan_in_another_step_stops_training(self):
    with tf.Graph().as_default():
      tf.compat.v1.train.get_or_create_global_step()
      count = tf.compat.v1.get_variable("count", [], initializer=tf.zeros_initializer())
      train_op = count.assign_add(1.0, use_locking=True)
      is_own = tf.compat.v1.placeholder_with_default(False, [])
      loss = tf.where(is_own, 0.0, float("nan"))
      with self._run(train_op, loss) as session:
        with self.assertRaises(tf.compat.v1.train.NanLossDuringTrainingError):
          session.run([train_op, loss], {is_own: True})

  def test_an_error_of_another_step_is_raised(self):
    with tf.Graph().as_default():
      tf.compat.v1.train.get_or_create_global_step()
      is_own = tf.compat.v1.placeholder_with_default(False, [])
      with tf.control_dependencies([tf.debugging.Assert(is_own, ["another step"])]):
        train_op = tf.no_op()
      with self._run(train_op, None) as session:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "another step"):
          session.run(train_op, {is_own: True})

  def test_an_error_of_another_step_beside_the_end_of_the_data_is_raised(self):
    with tf.Graph().as_default():
      tf.compat.v1.train.get_or_create_global_step()
      is_own = tf.compat.v1.placeholder_with_default(False, [])
      queue = tf.queue.FIFOQueue(1, tf.int32)
      end = queue.close()
      loss = tf.cond(
        is_own,
        lambda: tf.cast(queue.dequeue(), tf.float32),  # of a queue that has ended
        lambda: tf.constant(float("nan")),
      )
      # A session takes the end of the data for no error.
      with self.assertRaises(tf.compat.v1.train.NanLossDuringTrainingError):
        with self._run(loss.op, loss) as session:
          session.run(end)
          session.run([loss.op, loss], {is_own: True})

  def test_steps_go_on_after_a_failure_between_them(self):
    with tf.Graph().as_default():
      tf.compat.v1.train.get_or_create_global_step()
      count = tf.compat.v1.get_variable("count", [], tf.int64, tf.zeros_initializer())
      train_op = count.assign_add(1, use_locking=True).op
      saves = tf.debugging.Assert(False, ["the disk is full"])

      class SaveHook(tf.compat.v1.train.SessionRunHook):
        num_failed = 0

        def after_run(self, run_context, run_values):
          try:
            run_context.session.run(saves)
          except tf.errors.InvalidArgumentError:
            self.num_failed += 1

      hook = SaveHook()
      steps = steps_in_flight.StepsInFlightHook(3, train_op, None, [])
      with tf.compat.v1.train.MonitoredSession(hooks=[steps, hook]) as session:
        for _ in range(2):
          session.run(train_op)
        self.assertEqual(session.run(count), 6)
      self.assertEqual(hook.num_failed, 3)

  def test_runs_that_are_no_steps_stay_alone(self):
    with tf.Graph().as_default():
      tf.compat.v1.train.get_or_create_global_step()
      count = tf.compat.v1.get_variable("count", [], tf.int64, tf.zeros_initializer())
      train_op = count.assign_add(1, use_locking=True).op
      with self._run(train_op, None, num_steps=5) as session:
        session.run(train_op)
        self.assertEqual(session.run(count), 5)
        self.assertEqual(session.run(count), 5)

  def test_a_wave_that_reaches_the_last_step_is_the_last_one(self):
    for limit in ({"last_step": 4}, {"num_left": 4}):
      with self.subTest(limit=limit), tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        is_own = tf.compat.v1.placeholder_with_default(False, [])
        wait = tf.numpy_function(lambda own: time.sleep(0 if own else 0.3), [is_own], [])
        with tf.control_dependencies([wait]):
          train_op = step.assign_add(1, use_locking=True).op
        hooks = [
          steps_in_flight.StepsInFlightHook(4, train_op, None, [], **limit),
          tf.compat.v1.train.StopAtStepHook(last_step=4),
        ]
        runs = 0
        with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
          while not session.should_stop():
            session.run(train_op, {is_own: True})
            runs += 1
        self.assertEqual(runs, 1)


if __name__ == "__main__":
  tf.test.main()
