"""Tests of the hook that writes messages to files."""

import json
import os

import numpy as np
import tensorflow as tf

from monolith.native_training import utils
from monolith.native_training.metric import file_metric_hook, metric_hook


class FileMetricHookTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    file_metric_hook.FileMetricHook._instance = None

  def _message(self, req_time, i):
    return json.dumps(
      {
        "model_name": "model",
        "req_time": req_time,
        "userid": str(i),
        "predict": {"click": 0.5},
        "label": {"click": 1.0},
      }
    ).encode()

  def _after_run(self, hook, messages):
    run_value = tf.compat.v1.train.SessionRunValues(
      results={"deep_insight_op": messages}, options=None, run_metadata=None
    )
    hook.after_run(run_context=None, run_value=run_value)

  def test_partitions(self):
    base = os.path.join(utils.get_test_tmp_dir(), self.id())
    hook = file_metric_hook.FileMetricHook(
      worker_id=0,
      key_fn=file_metric_hook.vepfs_key_fn,
      layout_fn=file_metric_hook.vepfs_layout_fn,
      batch_size=8,
      partition_size=32,
      base_name=base,
    )
    for i in range(64):
      messages = [self._message(req_time, i) for req_time in ("20220927", "20220928")]
      self._after_run(hook, np.array(messages) if i % 2 else messages)
    self._after_run(hook, None)
    self._after_run(hook, [b"", None])
    hook.end(None)

    for req_time in ("20220927", "20220928"):
      folder = os.path.join(base, "model", req_time, "worker_0")
      self.assertEqual(sorted(os.listdir(folder)), ["part_000000.txt", "part_000001.txt"])
      lines = []
      for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name)) as f:
          part = f.read().splitlines()
        self.assertLen(part, 32)
        lines += part
      self.assertEqual(lines[3], f'{req_time};gid;3;{{"click": 0.5}};{{"click": 1.0}}')

  def test_bad_message_does_not_lose_others(self):
    base = os.path.join(utils.get_test_tmp_dir(), self.id())
    hook = file_metric_hook.FileMetricHook(worker_id=1, base_name=base)
    self._after_run(hook, [b"no json", self._message("1", 0)])
    hook.end(None)

    with open(os.path.join(base, "model", "1", "worker_1", "part_000000.txt")) as f:
      self.assertLen(f.read().splitlines(), 1)

  def test_singleton(self):
    first = file_metric_hook.FileMetricHook(worker_id=0)

    self.assertIs(file_metric_hook.FileMetricHook(worker_id=1), first)


class WriteOnlyFileAndStatTest(tf.test.TestCase):
  def test_rerun_replaces_parts(self):
    folder = os.path.join(utils.get_test_tmp_dir(), self.id())
    for text in ("old", "new"):
      file = file_metric_hook.WriteOnlyFileAndStat(folder, batch_size=2, partition_size=2)
      for _ in range(2):
        file.write(text)
      file.close()

    with open(os.path.join(folder, "part_000000.txt")) as f:
      self.assertEqual(f.read(), "new\nnew\n")
    self.assertLen(os.listdir(folder), 1)

  def test_flush_begins_a_new_part_only_if_asked(self):
    folder = os.path.join(utils.get_test_tmp_dir(), self.id())
    file = file_metric_hook.WriteOnlyFileAndStat(folder, batch_size=8, partition_size=2)

    def read(part):
      with open(os.path.join(folder, f"part_{part:06d}.txt")) as f:
        return f.read().split()

    file.write("a")
    file.write("b")
    self.assertFalse(os.path.exists(folder))  # still buffered
    file.flush(check=False)
    self.assertEqual(read(0), ["a", "b"])
    file.write("c")
    file.flush()
    self.assertEqual(read(0), ["a", "b", "c"])
    file.write("d")
    file.close()

    self.assertEqual(read(0), ["a", "b", "c"])
    self.assertEqual(read(1), ["d"])


class PublishedNamesTest(tf.test.TestCase):
  def test_metric_hook_publishes_them(self):
    for name in ("FileMetricHook", "WriteOnlyFileAndStat", "vepfs_key_fn", "vepfs_layout_fn"):
      self.assertIs(getattr(metric_hook, name), getattr(file_metric_hook, name))


if __name__ == "__main__":
  tf.test.main()
