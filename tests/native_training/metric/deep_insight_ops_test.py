"""Deep insight messages: what they say, when they are made, where they go."""

import json
import os
import socket
import time

import numpy as np
import tensorflow as tf

from monolith.native_training import logging_ops
from monolith.native_training.metric import deep_insight_ops

tf.compat.v1.disable_eager_execution()


def _read_records(path: str) -> list:
  return [json.loads(record) for record in tf.compat.v1.io.tf_record_iterator(path)]


def _wait_for_records(path: str, count: int) -> list:
  """Reads the records once there are `count`: the client writes from its own thread."""
  deadline = time.monotonic() + 60
  while True:
    try:
      records = _read_records(path)
    except tf.errors.DataLossError:  # half a record
      records = []
    if len(records) >= count or time.monotonic() > deadline:
      return records
    time.sleep(0.01)


def _write(client, **kwargs):
  arguments = {
    "uids": tf.constant([1, 2], tf.int64),
    "req_times": tf.constant([100, 200], tf.int64),
    "labels": [1.0, 0.0],
    "preds": [0.1, 0.25],
    "sample_rates": [1.0, 0.5],
    "model_name": "model",
  }
  arguments.update(kwargs)
  return deep_insight_ops.write_deep_insight(client, **arguments)


def _write_v2(client, extra=(), **kwargs):
  extra = [("uid", tf.constant([1, 2], tf.int64)), *extra]
  arguments = {
    "req_times": tf.constant([100, 200], tf.int64),
    "labels": [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]],
    "preds": [[0.5, 0.25], [0.75, 1.0], [0.0, 2.0]],
    "sample_rates": tf.ones([3, 2]),
    "extra_fields_keys": [key for key, _ in extra],
    "extra_fields_values": [value for _, value in extra],
    "model_name": "model",
    "targets": ["ctr", "cvr", "dwell"],
  }
  arguments.update(kwargs)
  return deep_insight_ops.write_deep_insight_v2(client, **arguments)


class DeepInsightOpsTest(tf.test.TestCase):
  def test_messages_are_empty_unless_asked_for(self):
    client = deep_insight_ops.deep_insight_client()
    msgs, msgs_v2 = _write(client), _write_v2(client)

    with self.session() as session:
      self.assertAllEqual(session.run(msgs), [b"", b""])
      self.assertAllEqual(session.run(msgs_v2), [b"", b""])
    self.assertEqual(msgs.shape.as_list(), [2])
    self.assertEqual(msgs_v2.shape.as_list(), [2])

  def test_messages(self):
    client = deep_insight_ops.deep_insight_client(is_fake=True)

    with self.session() as session:
      msgs = session.run(_write(client, return_msgs=True))

    self.assertEqual(
      [json.loads(msg) for msg in msgs],
      [
        {
          "model_name": "model",
          "req_time": 100,
          "uid": 1,
          "predict": {"ctr_head": 0.1},
          "label": {"ctr_head": 1.0},
          "sample_rate": {"ctr_head": 1.0},
        },
        {
          "model_name": "model",
          "req_time": 200,
          "uid": 2,
          "predict": {"ctr_head": 0.25},
          "label": {"ctr_head": 0.0},
          "sample_rate": {"ctr_head": 0.5},
        },
      ],
    )

  def test_messages_v2(self):
    client = deep_insight_ops.deep_insight_client(is_fake=True)
    extra = [
      ("gid", tf.constant([2**63 - 1, -(2**63)], tf.int64)),
      ("price", tf.constant([0.5, 1e-30])),
      ("city", tf.constant([b'a"\\\n', b"\xe4\xbd\xa0\xff"])),
      ("ignored", tf.constant([True, False])),
    ]

    with self.session() as session:
      msgs = session.run(_write_v2(client, extra, return_msgs=True))

    first, second = (json.loads(msg) for msg in msgs)
    self.assertEqual(first["predict"], {"ctr": 0.5, "cvr": 0.75, "dwell": 0.0})
    self.assertEqual(second["label"], {"ctr": 0.0, "cvr": 1.0, "dwell": 0.0})
    self.assertEqual((first["uid"], first["req_time"]), (1, 100))
    self.assertEqual((first["gid"], second["gid"]), (2**63 - 1, -(2**63)))
    self.assertEqual(np.float32(second["price"]), np.float32(1e-30))
    self.assertEqual((first["city"], second["city"]), ('a"\\\n', "你\ufffd"))
    self.assertNotIn("ignored", first)

  def test_floats_survive_and_nan_is_null(self):
    preds = np.array([0.1, np.nan, np.inf, 3.4e38, 1e-37, 16777217.0], dtype=np.float32)
    size = len(preds)
    client = deep_insight_ops.deep_insight_client()
    msgs = _write(
      client,
      uids=tf.zeros([size], tf.int64),
      req_times=tf.zeros([size], tf.int64),
      labels=tf.zeros([size, 1]),
      preds=preds,
      sample_rates=tf.ones([size]),
      target="t",
      return_msgs=True,
    )

    with self.session() as session:
      values = [json.loads(msg)["predict"]["t"] for msg in session.run(msgs)]

    self.assertIsNone(values[1])
    self.assertIsNone(values[2])
    finite = [0, 3, 4, 5]
    self.assertAllEqual(np.array([values[i] for i in finite], np.float32), preds[finite])

  def test_fields_of_the_message_win_over_extra_fields(self):
    client = deep_insight_ops.deep_insight_client()
    extra = [("req_time", tf.constant([7, 7], tf.int64)), ("x", tf.constant([1.0, 1.0]))]
    extra.append(("x", tf.constant([2.0, 2.0])))

    with self.session() as session:
      msg = session.run(_write_v2(client, extra, return_msgs=True))[0]

    self.assertEqual(msg.count(b'"req_time"'), 1)
    self.assertEqual(json.loads(msg)["req_time"], 100)
    self.assertEqual(json.loads(msg)["x"], 1.0)

  def test_dump_file(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "a", "b", "dump")
    client = deep_insight_ops.deep_insight_client(dump_filename=path)
    msgs = _write(client)

    with self.session() as session:
      for _ in range(3):
        self.assertAllEqual(session.run(msgs), [b"", b""])
      records = _wait_for_records(path, 6)

    self.assertEqual([record["uid"] for record in records], [1, 2] * 3)

  def test_more_messages_than_the_queue_holds(self):
    size = 20000
    path = os.path.join(os.environ["TEST_TMPDIR"], "large")
    client = deep_insight_ops.deep_insight_client(dump_filename=path)
    msgs = _write(
      client,
      uids=tf.range(size, dtype=tf.int64),
      req_times=tf.zeros([size], tf.int64),
      labels=tf.zeros([size]),
      preds=tf.zeros([size]),
      sample_rates=tf.zeros([size]),
    )
    # Destroying the client writes what is queued and closes the file.
    with tf.control_dependencies([msgs]):
      destroy = tf.raw_ops.DestroyResourceOp(resource=client, ignore_lookup_error=False)

    with self.session() as session:
      session.run(destroy)

    self.assertEqual([record["uid"] for record in _read_records(path)], list(range(size)))

  def test_a_dump_file_that_cannot_be_written(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "file")
    with open(path, "w"):
      pass
    client = deep_insight_ops.deep_insight_client(dump_filename=path + "/below")
    with self.session() as session, self.assertRaises(tf.errors.OpError):
      session.run(_write(client))

  def test_a_full_disk_surfaces(self):
    if not os.path.exists("/dev/full"):
      self.skipTest("no /dev/full")
    msgs = _write(deep_insight_ops.deep_insight_client(dump_filename="/dev/full"))
    deadline = time.monotonic() + 60
    with self.session() as session, self.assertRaises(tf.errors.OpError):
      # The thread that writes reports to the next caller.
      while time.monotonic() < deadline:
        session.run(msgs)

  def test_metrics_counter(self):
    received = []
    logging_ops.set_metric_sink(lambda *args: received.append(args))
    self.addCleanup(logging_ops.set_metric_sink, None)
    client = deep_insight_ops.deep_insight_client(enable_metrics_counter=True)

    with self.session() as session:
      session.run(_write(client, return_msgs=True))

    self.assertEqual(received, [("deep_insight.messages", 2.0, "model_name=model")])

  def test_empty_batch(self):
    client = deep_insight_ops.deep_insight_client()
    empty_int, empty_float = tf.zeros([0], tf.int64), tf.zeros([0])
    msgs = _write(
      client,
      uids=empty_int,
      req_times=empty_int,
      labels=empty_float,
      preds=empty_float,
      sample_rates=empty_float,
      return_msgs=True,
    )
    with self.session() as session:
      self.assertEqual(session.run(msgs).shape, (0,))

  def test_container_is_the_host_by_default(self):
    client = deep_insight_ops.deep_insight_client()
    named = deep_insight_ops.deep_insight_client(container="other")

    self.assertEqual(deep_insight_ops._HOSTNAME, socket.gethostname())
    self.assertRegex(client.op.get_attr("container").decode(), r"^[A-Za-z0-9./-]+$")
    self.assertEqual(named.op.get_attr("container"), b"other")

  def test_bad_input(self):
    client = deep_insight_ops.deep_insight_client()
    ids = tf.constant([1, 2], tf.int64)
    two = tf.constant([1.0, 2.0])
    cases = [
      ("size of labels is 3, want size of uids = 2", lambda: _write(client, labels=[1.0] * 3)),
      ("sample_ratio is -1", lambda: _write(client, sample_ratio=-1.0)),
      ("labels has shape", lambda: _write_v2(client, labels=tf.ones([2, 2]))),
      (
        "length of extra_fields_keys is 2, want .* = 1",
        lambda: _write_v2(client, extra_fields_keys=["uid", "a"]),
      ),
      ("has no 'uid'", lambda: _write_v2(client, extra_fields_keys=["id"])),
      ("'uid' is float, want int64", lambda: _write_v2(client, extra_fields_values=[two])),
      ("'x' has shape", lambda: _write_v2(client, [("x", tf.constant([1, 2, 3]))])),
    ]
    for message, build in cases:
      with self.session() as session:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          session.run(build())
    with self.assertRaises(ValueError):
      _write(client, uids=tf.reshape(ids, [2, 1]))


if __name__ == "__main__":
  tf.test.main()
