"""From a loss to a train op. The fusion is set although nothing is reduced: it must not matter."""

import os

os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"] = "one"

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  feature,
  feature_utils,
  hvd_lib,
  native_task,
  prefetch_queue,
)
from monolith.native_training.feature_utils import GradClipType
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()


class _Factory(feature.FeatureFactoryFromEmbeddings):
  """Keeps the embedding in a variable."""

  def apply_gradients(self, grads_and_vars, scale=1):
    return tf.group([var.assign_sub(grad * scale) for grad, var in grads_and_vars])


class _Case:
  """One embedding row `[1, 1, 1, 1]`, of which 3 values are used, and perhaps a variable."""

  def __init__(self, has_var=True, is_async=False):
    self.step = tf.compat.v1.train.get_or_create_global_step()
    self.emb = tf.Variable([[1.0, 1.0, 1.0, 1.0]], trainable=False, name="embedding")
    self.mgr = prefetch_queue.AsyncFunctionMgr(is_async=is_async)
    ids = {"feature": tf.RaggedTensor.from_row_splits(tf.constant([0], tf.int64), [0, 1])}
    slices = feature.create_embedding_slices(
      {"feature": self.emb}, ids, {"feature": feature.FeatureColumn.reduce_sum()},
      {"feature": [3, 1]},
    )  # fmt: skip
    factory = _Factory({"feature": self.emb}, slices)
    self.ctx = native_task.NativeContext(factory, self.mgr)
    slot = self.ctx.create_feature_slot(feature.FeatureSlotConfig(name="slot"))
    used = slot.add_feature_slice(3)
    slot.add_feature_slice(1)
    self.column = feature.FeatureColumn(slot, "feature")
    self.loss = tf.reduce_sum(self.column.embedding_lookup(used))
    if has_var:
      self.var = tf.Variable(1.0, name="dense")
      self.loss += self.var
    self.opt = tf.compat.v1.train.GradientDescentOptimizer(1.0)

  def train_op(self, **kwargs):
    return feature_utils.apply_gradients_with_var_optimizer(
      self.ctx, [self.column], self.opt, self.loss, **{"global_step": self.step, **kwargs}
    )


class _GraphTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(tf.Graph().as_default())
    # Whether there are ranks is decided by the environment, not by other tests.
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("MONOLITH_", "HOROVOD_"))}
    clean["MONOLITH_WITH_ALLREDUCE_FUSION"] = "one"
    self.enter_context(mock.patch.dict(os.environ, clean, clear=True))

  def train(self, case, train_op, runs=1, hooks=()):
    fetches = {name: getattr(case, name) for name in ("emb", "var", "step") if hasattr(case, name)}
    values = {}

    class Read(tf.compat.v1.train.SessionRunHook):
      def after_run(_, context, run_values):
        values.update(context.session.run(fetches))

    creator = tf.compat.v1.train.ChiefSessionCreator(config=gpu_placement.SOFT_PLACEMENT)
    with tf.compat.v1.train.MonitoredSession(creator, [*hooks, Read()]) as session:
      for _ in range(runs):
        session.run(train_op)
    return values


class ApplyGradientsWithVarOptimizerTest(_GraphTest):
  def test_apply_gradients_with_dense_optimizer(self):
    case = _Case()
    values = self.train(case, case.train_op(clip_norm=1.0, grads_and_vars_summary=True))
    self.assertAllClose(values["var"], 0.5)
    self.assertAllClose(values["emb"], [[0.5, 0.5, 0.5, 1.0]])
    self.assertEqual(values["step"], 1)

  def test_apply_gradients_without_dense_optimizer(self):
    case = _Case(has_var=False)
    values = self.train(case, case.train_op())
    self.assertAllClose(values["emb"], [[0.0, 0.0, 0.0, 1.0]])
    self.assertEqual(values["step"], 1)

  def test_apply_gradients_with_dense_optimizer_post_push(self):
    case = _Case(is_async=True)
    train_op = case.train_op()
    values = self.train(case, train_op, runs=3, hooks=case.mgr.hooks)
    # Before the end of the session, which pushes the rest.
    self.assertAllClose(values["var"], -1.0)
    self.assertAllClose(values["emb"], [[-2.0, -2.0, -2.0, 1.0]])

  def test_apply_gradients_with_dense_optimizer_gpu(self):
    gpu_placement.allow(self)
    hvd_lib.init()
    case = _Case()
    train_op = case.train_op(clip_norm=1.0, use_allreduce=True)
    # Clipping is deferred: no op touches the gradients before they are reduced.
    self.assertEmpty(gpu_placement.devices_of("MonolithClipByGlobalNorm"))
    self.assertEqual(gpu_placement.devices_of("GlobalL2Reduce"), {"GPU"})
    collectives = {"GPU"} if hvd_lib.has_gpu_kernels() else {"CPU"}
    self.assertEqual(gpu_placement.devices_of("HorovodAllreduce") or collectives, collectives)
    values = self.train(case, train_op)
    self.assertAllClose(values["var"], 0.5)
    self.assertAllClose(values["emb"], [[0.5, 0.5, 0.5, 1.0]])
    self.assertEqual(values["step"], 1)

  def test_the_dense_part_stays_on_the_cpu_without_permission(self):
    case = _Case()
    case.train_op(clip_norm=1.0)
    devices = {op.device for op in tf.compat.v1.get_default_graph().get_operations()}
    self.assertFalse([device for device in devices if "GPU" in device])

  def test_no_step(self):
    case = _Case()
    values = self.train(case, case.train_op(global_step=None))
    self.assertEqual(values["step"], 0)
    self.assertAllClose(values["var"], 0.0)

  def test_no_gradient(self):
    case = _Case(has_var=False)
    case.loss = tf.constant(1.0)
    values = self.train(case, case.train_op())
    self.assertAllClose(values["emb"], [[1.0, 1.0, 1.0, 1.0]])
    self.assertEqual(values["step"], 0)

  def test_unused_variable_and_column(self):
    case = _Case()
    tf.Variable(5.0, name="unused")
    case.loss = case.var
    values = self.train(case, case.train_op())
    self.assertAllClose(values["var"], 0.0)
    self.assertAllClose(values["emb"], [[1.0, 1.0, 1.0, 1.0]])
    self.assertEqual(values["step"], 1)

  @parameterized.parameters(
    # The norm of all four gradients is 2, of the sparse ones sqrt(3), of the dense one 1.
    (GradClipType.ClipByGlobalNorm, 1.0, None, 0.5, 0.5),
    (GradClipType.ClipByGlobalNorm, 4.0, None, 1.0, 1.0),
    (GradClipType.ClipByGlobalNorm, 1.0, 0.5, 0.5, 0.25),
    (GradClipType.ClipByGlobalNorm, None, 0.5, 1.0, 1.0),
    (GradClipType.ClipByDenseAndSparse, 0.5, None, 0.5, 1.0),
    (GradClipType.ClipByDenseAndSparse, 0.5, 0.5 * 3**0.5, 0.5, 0.5),
    (GradClipType.ClipByDenseAndSparse, None, 0.5, 1.0, 1.0),
    (GradClipType.ClipByValue, 0.25, None, 0.25, 0.25),
    (GradClipType.ClipByNorm, 0.5, None, 0.5, 0.5 / 3**0.5),
    (GradClipType.NoClip, 0.5, None, 1.0, 1.0),
  )
  def test_clip(self, clip_type, clip_norm, sparse_clip_norm, dense, sparse):
    case = _Case()
    train_op = case.train_op(
      clip_type=clip_type, clip_norm=clip_norm, sparse_clip_norm=sparse_clip_norm
    )
    values = self.train(case, train_op)
    self.assertAllClose(values["var"], 1.0 - dense)
    self.assertAllClose(values["emb"], [[1.0 - sparse] * 3 + [1.0]])

  def test_clip_of_zeros(self):
    case = _Case()
    case.loss = case.loss * 0.0
    values = self.train(case, case.train_op(clip_norm=1.0))
    self.assertAllClose(values["var"], 1.0)

  def test_sparse_norm_warmup(self):
    case = _Case()
    # The limit of the embeddings is 0 in step 0 and 0.5 in step 1; the norm is 2.
    train_op = case.train_op(clip_norm=1.0, sparse_norm_warmup_steps=2)
    values = self.train(case, train_op, runs=2)
    self.assertAllClose(values["var"], 0.0)
    self.assertAllClose(values["emb"], [[0.75, 0.75, 0.75, 1.0]])

  def test_dense_reduce_mean_and_weight_decay(self):
    case = _Case()
    train_op = case.train_op(dense_reduce_mean=True, batch_size=4, dense_weight_decay=0.5)
    values = self.train(case, train_op)
    self.assertAllClose(values["var"], 1.0 - (0.25 + 0.5))
    self.assertAllClose(values["emb"], [[0.0, 0.0, 0.0, 1.0]])

  def test_variable_with_its_own_optimizer(self):
    case = _Case()
    other = tf.Variable(1.0, name="other")
    other.optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.25)
    case.loss += other
    case.other = other
    train_op = case.train_op()
    with tf.compat.v1.train.MonitoredSession() as session:
      session.run(train_op)
      self.assertAllClose(session.run([case.var, other]), [0.0, 0.75])

  def test_gradient_of_slices(self):
    case = _Case(is_async=True)
    table = tf.Variable([[1.0], [1.0], [1.0]], name="table")
    case.loss += tf.reduce_sum(tf.gather(table, [0, 2, 2]))
    # Norm: 3 + 1 ones, and the slices 1, 1, 1.
    train_op = case.train_op(clip_norm=7**0.5 / 2)
    hooks = case.mgr.hooks
    with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
      session.run(train_op)
      session.run(train_op)
      self.assertAllClose(
        session._tf_sess().run(table), [[0.5], [1.0], [0.0]], rtol=1e-5, atol=1e-5
      )

  def test_user_embedding_check(self):
    for value, expected in ((1.0, 1.0), (3.0, 0.0)):
      with tf.Graph().as_default():
        case = _Case(has_var=False)
        train_op = case.train_op(
          ue_gradient_check=True, ue_fc_names=["feature"], ue_euclidean_norm_threshold=2.0,
          features={"feature": tf.constant([value])},
        )  # fmt: skip
        values = self.train(case, train_op)
        self.assertAllClose(values["emb"], [[expected] * 3 + [1.0]])

  def test_user_embedding_check_of_a_missing_feature(self):
    case = _Case()
    with self.assertRaisesRegex(KeyError, "ue_fc_names has 'feature'"):
      case.train_op(ue_gradient_check=True, ue_fc_names=["feature"])

  def test_other_optimizers_are_refused(self):
    case = _Case()
    case.opt = tf.keras.optimizers.SGD()
    with self.assertRaisesRegex(AssertionError, "want a tf.compat.v1.train.Optimizer"):
      case.train_op()

  def test_summaries(self):
    case = _Case()
    case.train_op(clip_norm=1.0, grads_and_vars_summary=True)
    merged = tf.compat.v1.summary.merge_all()
    with tf.compat.v1.train.MonitoredSession() as session:
      proto = tf.compat.v1.Summary.FromString(session.run(merged))
    values = {value.tag: value for value in proto.value}
    self.assertCountEqual(
      values,
      [
        "global_gradient_norm", "variable_gradient", "dense_grad_sizes", "dense_grad_total_size",
        "dense_grad_total_num", "trainable_variable_norm/dense_0", "trainable_variable/dense_0",
        "gradient_norm/dense_0", "gradient/dense_0", "feature_gradient",
      ],
    )  # fmt: skip
    self.assertAllClose(values["global_gradient_norm"].simple_value, 2.0)
    self.assertAllClose(values["gradient_norm/dense_0"].simple_value, 0.5)

  def test_histograms_of_samples(self):
    case = _Case()
    case.train_op(gradient_histograms=True)
    merged = tf.compat.v1.summary.merge_all()
    with tf.compat.v1.train.MonitoredSession() as session:
      proto = tf.compat.v1.Summary.FromString(session.run(merged))
    values = {value.tag: value.histo for value in proto.value}
    self.assertCountEqual(values, ["dense_gradients", "embedding_gradients"])
    self.assertGreater(values["dense_gradients"].num, 0)
    self.assertGreater(values["embedding_gradients"].num, 0)

  def test_histograms_leave_out_what_is_not_finite(self):
    feature_utils._add_histogram("gradients", [tf.constant([1.0, np.nan, np.inf, 2.0])])
    merged = tf.compat.v1.summary.merge_all()
    with tf.compat.v1.Session() as session:
      [value] = tf.compat.v1.Summary.FromString(session.run(merged)).value
    self.assertEqual(value.histo.num, 2)
    self.assertEqual(value.histo.sum, 3)

  def test_graphs_do_not_share_their_lists(self):
    case = _Case()
    case.train_op()
    self.assertLen(feature_utils.dense_opt_ops, 1)
    self.assertEmpty(feature_utils.control_ops)
    with tf.Graph().as_default():
      self.assertEmpty(feature_utils.dense_opt_ops)

  def test_allreduce_without_ranks_is_left_out(self):
    case = _Case()
    with mock.patch.object(hvd_lib, "is_enabled", return_value=False, create=True), \
        mock.patch.object(hvd_lib, "allreduce", create=True) as allreduce:  # fmt: skip
      train_op = case.train_op(use_allreduce=True, clip_norm=1.0)
      allreduce.assert_not_called()
    # The clipping is not lost with it.
    self.assertAllClose(self.train(case, train_op)["var"], 0.5)


class AllreduceTest(_GraphTest):
  """The average over one rank is its own value."""

  def setUp(self):
    super().setUp()
    hvd_lib.init()

  def reduce(self, grads, scale=1):
    with self.session() as session:
      reduced = feature_utils.allreduce_cond(grads, scale)
      self.assertLen(reduced, len(grads))
      for before, after in zip(grads, reduced):
        self.assertIs(type(after), type(before))
      values = session.run([
        tf.convert_to_tensor(g) for g in reduced if g is not None
      ])  # fmt: skip
    return values

  @parameterized.product(fusion=("one", "grouped", "none", ""), fp16=("0", "1"))
  def test_all_kinds(self, fusion, fp16):
    os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"] = fusion
    os.environ["MONOLITH_WITH_ALLREDUCE_FP16"] = fp16
    slices = tf.IndexedSlices(
      tf.constant([[1.0], [2.0]]), tf.constant([2, 2], tf.int64), tf.constant([3, 1], tf.int64)
    )
    double = tf.constant([4.0], tf.float64)
    values = self.reduce(
      [None, tf.constant([[1.0, 2.0]]), slices, None, tf.constant(3.0), double],
      scale=tf.constant(0.5),
    )
    for value, expected in zip(values, ([[0.5, 1.0]], [[0.0], [0.0], [1.5]], 1.5, [2.0])):
      self.assertAllClose(value, expected)

  def test_more_tensors_than_a_kernel_launch_takes(self):
    grads = [tf.fill([i % 3 + 1], float(i)) for i in range(2100)]
    for i, value in enumerate(self.reduce(grads)):
      self.assertAllEqual(value, np.full([i % 3 + 1], i, np.float32))

  def test_nothing_to_reduce(self):
    grads = [None, None]
    self.assertIs(feature_utils.allreduce_cond(grads), grads)

  def test_multi_is_dropped(self):
    os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"] = "multi"
    with self.assertRaisesRegex(RuntimeError, "Support for multi is dropped"):
      feature_utils.allreduce_cond([tf.constant(1.0)])

  def test_fused_allreduce_is_a_control_op(self):
    feature_utils.allreduce_cond([tf.constant(1.0), tf.constant([2.0])])
    self.assertEqual([op.type for op in feature_utils.control_ops], ["MonolithAlignedFlatConcat"])

  @parameterized.parameters(("", True), ("1", False), ("false", True))
  def test_switches(self, skip, reduces):
    os.environ["MONOLITH_WITH_HOROVOD"] = "True"
    os.environ["MONOLITH_SKIP_ALLREDUCE"] = skip
    case = _Case()
    train_op = case.train_op(use_allreduce=True, clip_norm=1.0)
    names = [op.name for op in tf.compat.v1.get_default_graph().get_operations()]
    self.assertEqual(any("hvd_ar_fuse_one" in name for name in names), reduces)
    values = self.train(case, train_op)
    self.assertAllClose(values["var"], 0.5)

  def test_deferred_clipping(self):
    """The factory and the reduction multiply by what the clipping would have done."""
    os.environ["MONOLITH_WITH_HOROVOD"] = "1"
    case = _Case()
    with mock.patch(
      "monolith.native_training.device_utils.within_placement_context_of", return_value=True
    ):
      train_op = case.train_op(use_allreduce=True, clip_norm=1.0)
    values = self.train(case, train_op)
    self.assertAllClose(values["var"], 0.5)
    self.assertAllClose(values["emb"], [[0.5, 0.5, 0.5, 1.0]])


class _Layouts:
  """Stands for the layout factory: two layouts, one of them without influence on the loss."""

  def __init__(self):
    self.layouts = [tf.Variable([1.0, 1.0, 1.0], trainable=False), tf.Variable([7.0], False)]

  def flattened_layout(self):
    return self.layouts

  def apply_gradients(self, grads_and_vars, grad_scale=1):
    return tf.group([var.assign_sub(grad * grad_scale) for grad, var in grads_and_vars])


class ApplyGradientsTest(_GraphTest):
  def setUp(self):
    super().setUp()
    self.step = tf.compat.v1.train.get_or_create_global_step()
    self.layouts = _Layouts()
    self.ctx = native_task.NativeContext(
      layout_factory=self.layouts, async_function_mgr=prefetch_queue.AsyncFunctionMgr(False)
    )
    self.opt = tf.compat.v1.train.GradientDescentOptimizer(1.0)

  def run_op(self, train_op, *fetches):
    with self.session() as session:
      session.run(tf.compat.v1.global_variables_initializer())
      session.run(train_op)
      return session.run((*fetches, self.layouts.layouts, self.step))

  @parameterized.parameters(
    (GradClipType.ClipByGlobalNorm, 1.0, 0.5, 0.5),
    (GradClipType.ClipByNorm, 0.5, 0.5, 0.5 / 3**0.5),
    (GradClipType.ClipByValue, 0.0, 1.0, 1.0),
    (GradClipType.ClipByGlobalNorm, None, 1.0, 1.0),
  )
  def test_clip(self, clip_type, clip_norm, dense, sparse):
    var = tf.Variable(1.0)
    loss = tf.reduce_sum(self.layouts.layouts[0]) + var
    train_op = feature_utils.apply_gradients(
      self.ctx, self.opt, loss, clip_type, clip_norm, global_step=self.step
    )
    value, layouts, step = self.run_op(train_op, var)
    self.assertAllClose(value, 1.0 - dense)
    self.assertAllClose(layouts[0], [1.0 - sparse] * 3)
    self.assertAllClose(layouts[1], [7.0])
    self.assertEqual(step, 1)

  def test_no_variables(self):
    loss = tf.reduce_sum(self.layouts.layouts[0])
    train_op = feature_utils.apply_gradients(self.ctx, self.opt, loss, global_step=self.step)
    layouts, step = self.run_op(train_op)
    self.assertAllClose(layouts[0], [0.0] * 3)
    self.assertEqual(step, 1)

  def test_weight_decay(self):
    var = tf.Variable(2.0)
    train_op = feature_utils.apply_gradients(
      self.ctx, self.opt, tf.reduce_sum(self.layouts.layouts[0]) + var, dense_weight_decay=0.25
    )
    value, _, step = self.run_op(train_op, var)
    self.assertAllClose(value, 2.0 - (1.0 + 0.5))
    self.assertEqual(step, 0)

  def test_unsupported(self):
    with self.assertRaisesRegex(Exception, "ClipByValue is not supported yet!"):
      feature_utils.apply_gradients(
        self.ctx, self.opt, tf.reduce_sum(self.layouts.layouts[0]), GradClipType.ClipByValue, 1.0
      )

  def test_long_form(self):
    var = tf.Variable(1.0)
    train_op = feature_utils.apply_gradients_with_var_optimizer(
      self.ctx, [], self.opt, tf.reduce_sum(self.layouts.layouts[0]) + var, clip_norm=1.0,
      global_step=self.step, is_fused_layout=True,
    )  # fmt: skip
    value, layouts, step = self.run_op(train_op, var)
    self.assertAllClose(value, 0.5)
    self.assertAllClose(layouts[0], [0.5] * 3)
    self.assertEqual(step, 1)


if __name__ == "__main__":
  tf.test.main()
