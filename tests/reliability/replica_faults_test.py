"""Promise: a killed replica of a row log fails no request with one retry, and loses no row.

Two replicas follow one log while rows are written to it. Each one that was killed must be available
again, and equal to the writer bit by bit. `tests/realtime/replica_test.py` kills one in every run.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np
import pytest
import tensorflow as tf

from monolith.row_log import partition_reader, sync_state
from tests.realtime import followed_model, table_sink
from tests.realtime.followed_model import MODEL, TOPIC
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_KILLS = 20
_WRITE_SECS = 0.2
_BROKER_AWAY_SECS = 20


class _Writer:
  """Writes rows to the log, with digests of a table that has applied the same."""

  def __init__(self, model, session):
    self._model = model
    state = sync_state.load_export(model.export)
    self._tables = table_sink.TableSink(session, state)
    self._stopped = threading.Event()
    self._rng = np.random.default_rng(1)
    self._read(state)
    self._thread = threading.Thread(target=self._run)
    self._thread.start()

  def close(self):
    self._stopped.set()
    self._thread.join()

  def _read(self, state):
    with contextlib.closing(
      partition_reader.PartitionReader(self._model.broker.servers, TOPIC, 0)
    ) as reader:
      reader.seek(state.next_offset)
      position, end = state.next_offset, reader.bounds()[1]
      while position < end:
        messages, met = reader.read(100, 1)
        for offset, message in messages:
          with contextlib.suppress(tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            self._tables.apply(message)
          position = offset + 1
        position = max(position, met)

  def _run(self):
    while not self._stopped.wait(_WRITE_SECS):
      ids = self._rng.integers(1000, size=20).tolist()
      tables = {
        name: {i: self._rng.random(dim, np.float32) for i in ids}
        for name, dim in self._model.tables.items()
      }
      (rows,) = self._model.make_batch(tables)
      self._tables.apply(rows)
      # The same batch again, now that it is known what tables are after it.
      self._model.seq -= 1
      self._model.send(*self._model.make_batch(tables, digests=self._tables.digests()))


class _Client:
  """Asks the replicas in turn; one retry on the other is allowed."""

  def __init__(self, servers):
    self._servers = servers
    self._turn = itertools.count()
    self._stopped = threading.Event()
    self.answers, self.failures = 0, []
    self._thread = threading.Thread(target=self._run)
    self._thread.start()

  def close(self):
    self._stopped.set()
    self._thread.join()

  def _run(self):
    while not self._stopped.is_set():
      turn = next(self._turn)
      try:
        try:
          followed_model.ask(self._servers[turn % 2], turn % 1000)
        except grpc.RpcError:
          followed_model.ask(self._servers[(turn + 1) % 2], turn % 1000)
        self.answers += 1
      except grpc.RpcError as error:
        self.failures.append(error)
      time.sleep(0.005)


@unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
class ReplicaFaultsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    followed_model.require_java()
    folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, folder)
    cls.model = followed_model.FollowedModel(folder)
    cls.addClassCleanup(cls.model.close)

  def setUp(self):
    self.servers = [self.model.start_server() for _ in range(2)]
    for server in self.servers:
      server.wait_until_listening().wait_until_available(MODEL)
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    with graph.as_default():
      tf.compat.v1.saved_model.load(session, ["serve"], self.model.export)
    self.addCleanup(session.close)
    writer = _Writer(self.model, session)
    self.addCleanup(writer.close)

  def wait_until_equal(self, server):
    wait_until(lambda: followed_model.get_metric(server, "monolith_sync_digest_ok") == 1)

  def test_killed_replica_comes_back_equal_and_no_request_fails(self):
    for server in self.servers:
      self.wait_until_equal(server)
    client = _Client(self.servers)
    self.addCleanup(client.close)
    seconds = []

    for kill in range(_KILLS):
      self.servers[kill % 2].kill()
      begin = time.monotonic()
      server = self.model.start_server()
      server.wait_until_listening().wait_until_available(MODEL)
      self.wait_until_equal(server)
      seconds.append(time.monotonic() - begin)
      self.servers[kill % 2] = server
      # A request that has failed at the old one may be at the other now: both would be gone to it.
      answers = client.answers
      wait_until(lambda answers=answers: client.answers >= answers + 2)

    client.close()
    self.assertEqual(client.failures, [])
    self.assertGreater(client.answers, 0)
    print(f"back and equal after {max(seconds):.1f} s at most, {client.answers} answers")

  def test_answers_while_the_broker_is_away(self):
    client = _Client(self.servers)
    self.addCleanup(client.close)

    self.model.broker.kill_broker()
    time.sleep(_BROKER_AWAY_SECS)  # the fault itself
    self.model.broker.start_broker()

    for server in self.servers:
      wait_until(
        lambda server=server: followed_model.get_metric(server, "monolith_sync_seq")
        >= self.model.seq - 2
      )
      self.wait_until_equal(server)
    client.close()
    self.assertEqual(client.failures, [])


if __name__ == "__main__":
  unittest.main()
