"""Every kind of exchange, by Horovod and by `ranks/tensorflow_engine.py`: both give the same."""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from unittest import mock

import numpy as np
import pytest

from monolith.native_training.ranks import tensorflow_engine
from monolith.native_training.settings import rank_environment
from tests import free_ports, rank_exchanges, rank_processes

pytestmark = pytest.mark.thorough

_TIMEOUT_SECS = 600
_COMMAND = ["-m", "tests.rank_exchanges"]


def _run_by_tf_config(folder):
  """Starts ranks that nothing but TF_CONFIG brings together."""
  cluster = {"worker": [f"127.0.0.1:{free_ports.get_free_port()}" for _ in range(2)]}
  env = {n: v for n, v in os.environ.items() if n not in rank_environment.LAUNCHER_VARIABLES}
  processes = [
    subprocess.Popen(
      [sys.executable, *_COMMAND, folder],
      cwd=rank_processes.ROOT,
      env={
        **env,
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
      },
    )
    for rank in range(2)
  ]
  try:
    assert [process.wait(_TIMEOUT_SECS) for process in processes] == [0, 0]
  finally:
    for process in processes:
      process.kill()


@pytest.fixture(scope="module", params=[*rank_processes.ENGINES, "TF_CONFIG"])
def results(request):
  """Returns what each of two ranks got."""
  with tempfile.TemporaryDirectory() as folder:
    if request.param == "TF_CONFIG":
      _run_by_tf_config(folder)
    else:
      rank_processes.require_engine(request.param)
      with rank_processes.RankProcesses(2, [*_COMMAND, folder], request.param) as ranks:
        statuses = ranks.wait(_TIMEOUT_SECS)
        assert statuses == [0, 0], ranks.report()
    found = []
    for rank in range(2):
      with open(f"{folder}/{rank}.pickle", "rb") as f:
        found.append(pickle.load(f))
    assert ("horovod" in found[0]["engine"]) == (request.param == "horovod")
    return found


@contextlib.contextmanager
def _two_ranks(own_index, *listeners):
  """Says in the environment that this process is one of two ranks, at the addresses of sockets."""
  addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
  task = {"type": "worker", "index": own_index}
  env = {n: v for n, v in os.environ.items() if n not in rank_environment.LAUNCHER_VARIABLES}
  env["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
  with mock.patch.dict(os.environ, env, clear=True):
    yield


def _listener():
  return socket.create_server(("127.0.0.1", 0))


def test_an_address_that_is_taken_is_named():
  with _listener() as taken, _listener() as other, _two_ranks(0, taken, other):
    message = rf"Rank 0 cannot listen at 127.0.0.1:{taken.getsockname()[1]}, as TF_CONFIG says: .*"
    with pytest.raises(RuntimeError, match=message + "Another process may do so already"):
      tensorflow_engine.init()
  assert not tensorflow_engine.is_initialized()


def test_ranks_that_cannot_be_reached_are_named():
  """As where a firewall lets ranks meet, and stands between their servers."""
  with _listener() as silent, _listener() as own, _two_ranks(1, silent, own):
    own.close()
    message = (
      "Rank 1 of 2 does not reach the servers of all ranks, which are at "
      f"127.0.0.1:{silent.getsockname()[1]}, "
    )
    with (
      mock.patch.object(tensorflow_engine, "_HELLO_MILLISECS", 1000),
      pytest.raises(RuntimeError, match=message),
    ):
      tensorflow_engine.init()
  assert not tensorflow_engine.is_initialized()


def test_an_exchange_that_begins_when_rank_0_is_gone_fails():
  with _listener() as gone:
    address = f"127.0.0.1:{gone.getsockname()[1]}"
  engine = object.__new__(tensorflow_engine._Engine)
  engine.rank, engine._leader, engine._is_closed = 1, address, False
  engine._exchange, engine._group, engine._lock = "exchange", "group", threading.Lock()
  engine._library = mock.Mock()
  with mock.patch.object(tensorflow_engine, "_HELLO_MILLISECS", 200):
    engine._serve("sum", "allreduce_float32", 7)

  ((why,), _) = engine._library.MonolithCloseRankExchanges.call_args
  assert why.decode().startswith(tensorflow_engine.FAILED)
  assert f"the server of rank 0, at {address}, does not answer rank 1" in why.decode()


def test_places(results):
  assert [result["place"] for result in results] == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_fixed_shapes(results):
  for result in results:
    fixed = result["exchanged"]["fixed"]
    assert fixed["broadcast"].tolist() == [1, 6]
    assert fixed["broadcast_int16"].tolist() == [0, 3]
    assert fixed["broadcast_bool"] == np.True_
    for dtype, total in zip(rank_exchanges.DTYPES, fixed["sums"]):
      assert total.dtype == dtype.as_numpy_dtype
      assert total.tolist() == [3, 6]
    assert fixed["half"].tolist() == [0.75, 1.0]
    assert fixed["slices"].tolist() == [[0.5, 0.5], [1, 1], [0, 0]]
    assert [value.tolist() for value in fixed["grouped"]] == [[[1.5, 1.5], [1.5, 1.5]], 2.0, []]
    assert fixed["unnamed"] == 1.5
  means = [result["exchanged"]["fixed"]["mean"] for result in results]
  parts = [np.float32([[0.1], [0.7]]) * np.float32(rank + 0.3) for rank in range(2)]
  # To the last bit, on both ranks and by all engines.
  np.testing.assert_array_equal(means[0], (parts[0] + parts[1]) / np.float32(2))
  np.testing.assert_array_equal(means[0], means[1])


def test_shapes_that_change(results):
  for rank, result in enumerate(results):
    for call, got in enumerate(result["exchanged"]["changing"]):
      sent = [rank_exchanges.rows(sender, call) for sender in range(2)]
      parts = [
        np.split(rows, np.cumsum(rank_exchanges.SPLITS[call][sender])[:-1])[rank]
        for sender, rows in enumerate(sent)
      ]
      for dtype in ("int64", "float32"):
        np.testing.assert_array_equal(got[f"alltoall_{dtype}"], np.concatenate(parts))
        np.testing.assert_array_equal(got[f"allgather_{dtype}"], np.concatenate(sent))


def test_variables_of_rank_0(results):
  for result in results:
    values = result["exchanged"]["variables"]
    assert [np.asarray(value).tolist() for value in values] == [1.0, [[5, 6]], True]


def test_mistakes(results):
  if "mistakes" not in results[0]:
    return  # Horovod's are not ours.
  for rank, result in enumerate(results):
    errors = result["mistakes"]
    other = f"ranks [{1 - rank}] do something else than this rank, whose part is an"
    assert f"{other} allreduce of float[{2 + rank}]" in errors["shapes"]
    assert f"{other} alltoall of {'int64' if rank else 'float'}[rows]" in errors["types"]
    assert "sum of splits is 2, want rows of the tensor = 3" in errors["splits"]
    assert errors["after"] == "1.0"
  assert results[0]["mistakes"]["alone"] == "DeadlineExceededError"
