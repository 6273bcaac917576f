"""Tests that the metric client accepts anything and forwards metrics on request."""

import copy
import os
import unittest
from unittest import mock

from absl import logging

from monolith.native_training.metric import cli


class ClientTest(unittest.TestCase):
  def setUp(self):
    self.addCleanup(cli.set_sink, None)

  def test_every_method_accepts_anything_and_returns_none(self):
    for client in (cli.get_cli(), cli.get_cli("prefix"), cli.get_cli("a", 1, key="value")):
      self.assertIsInstance(client, cli.Client)
      self.assertIsNone(client.emit_store("name", 1.0, {"tag": "x"}))
      self.assertIsNone(client.emit_counter())
      self.assertIsNone(client.emit_timer("name", value=1, tagkv=None, unknown=2))
      self.assertIsNone(client.flush())
      self.assertIsNone(client.anything_else(1, 2, x=3))

  def test_nothing_is_logged_by_default(self):
    with mock.patch.dict(os.environ), mock.patch.object(logging, "info") as info:
      os.environ.pop("MONOLITH_METRIC_SINK", None)
      cli.get_cli("prefix").emit_store("name", 1.0)

    info.assert_not_called()

  def test_logging_sink(self):
    with mock.patch.dict(os.environ, {"MONOLITH_METRIC_SINK": "logging"}):
      with mock.patch.object(logging, "info") as info:
        cli.get_cli("prefix").emit_store("name", 1.5, {"tag": "x"})

    text = info.call_args.args[0] % info.call_args.args[1:]
    for part in ("prefix.name", "1.5", "tag"):
      self.assertIn(part, text)

  def test_registered_sink(self):
    received = []
    cli.set_sink(lambda *args: received.append(args))

    cli.get_cli("prefix").emit_timer("name", 2, {"a": "b"})
    cli.get_cli().emit_counter("plain", 1)

    self.assertEqual(
      received, [("timer", "prefix.name", 2, {"a": "b"}), ("counter", "plain", 1, None)]
    )

  def test_a_failing_sink_does_not_stop_training(self):
    cli.set_sink(mock.Mock(side_effect=RuntimeError("no connection")))

    self.assertIsNone(cli.get_cli().emit_counter("name", 1))

  def test_clients_can_be_copied(self):
    self.assertIsInstance(copy.deepcopy(cli.get_cli("prefix")), cli.Client)


if __name__ == "__main__":
  unittest.main()
