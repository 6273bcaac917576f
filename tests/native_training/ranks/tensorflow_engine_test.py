"""Every kind of exchange, by Horovod and by `ranks/tensorflow_engine.py`: both give the same."""

import json
import os
import pickle
import subprocess
import sys
import tempfile

import numpy as np
import pytest

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
