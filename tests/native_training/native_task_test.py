"""`NativeTask` and its context."""

from __future__ import annotations

from unittest import mock

from absl.testing import absltest

from monolith.native_training import feature, native_task, prefetch_queue
from monolith.native_training.graph import export_context


class _Task(native_task.NativeTask):
  def create_input_fn(self, mode):
    return None

  def create_model_fn(self):
    return None


class NativeContextTest(absltest.TestCase):
  def test_both_factories(self):
    with self.assertRaisesRegex(
      ValueError, "Cannot set feature_factory and layout_factory in the same time"
    ):
      native_task.NativeContext(feature_factory=mock.Mock(), layout_factory=mock.Mock())

  def test_feature_factory(self):
    factory = mock.Mock()
    ctx = native_task.NativeContext(feature_factory=factory)
    config = feature.FeatureSlotConfig(name="s")

    ctx.create_feature_slot(config)
    ctx.apply_embedding_gradients(["pair"], 2)

    factory.create_feature_slot.assert_called_once_with(config)
    factory.apply_gradients.assert_called_once_with(["pair"], scale=2)

  def test_layout_factory_wins(self):
    layout_factory, feature_factory = mock.Mock(), mock.Mock()
    ctx = native_task.NativeContext(layout_factory=layout_factory)
    ctx.feature_factory = feature_factory

    ctx.create_feature_slot(feature.FeatureSlotConfig(name="s"))
    ctx.apply_embedding_gradients(["pair"])
    ctx.apply_embedding_gradients(["pair"], 2.0)

    feature_factory.create_feature_slot.assert_not_called()
    self.assertEqual(
      layout_factory.apply_gradients.call_args_list,
      [mock.call(["pair"]), mock.call(["pair"], grad_scale=2.0)],
    )

  def test_add_async_function(self):
    ctx = native_task.NativeContext(
      async_function_mgr=prefetch_queue.AsyncFunctionMgr(is_async=False)
    )

    result = ctx.add_async_function(lambda a, b: a + b, (1,), {"b": 2})

    self.assertEqual(result, 3)


class NativeTaskTest(absltest.TestCase):
  def test_params(self):
    p = _Task.params()

    self.assertEqual(p.mode, "train")
    self.assertEqual(p.metrics.deep_insight_target, "ctr_head")
    self.assertEqual(p.metrics.deep_insight_sample_ratio, 0.01)
    self.assertTrue(p.metrics.enable_throughput_hook)
    self.assertEqual(p.train.max_pending_seconds_for_barrier, 30)
    self.assertEqual(p.train.slow_start_steps, 0)
    self.assertEqual(p.train.label_key, "label")
    self.assertEqual(p.serving.export_mode, export_context.ExportMode.DISTRIBUTED)
    self.assertTrue(p.serving.shared_embedding)

  def test_instantiate_keeps_the_params_object(self):
    p = _Task.params()

    task = p.instantiate()

    self.assertIsInstance(task, _Task)
    self.assertIs(task.p, p)
    self.assertIsInstance(task.ctx, native_task.NativeContext)
    self.assertIsNone(task.create_serving_input_receiver_fn())


if __name__ == "__main__":
  absltest.main()
