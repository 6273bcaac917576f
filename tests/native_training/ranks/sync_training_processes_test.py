"""Synchronous training on several processes: they stop, save and restart together.

All jobs that need the same number of ranks are done by one start of the processes; each test looks
at what came of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from monolith.native_training import hvd_lib
from monolith.native_training.checkpoints import ranks as sync_checkpoint
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.settings import rank_environment
from tests import rank_processes, sync_trainer
from tests.sync_trainer import Job, own_id, read_rows

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TIMEOUT_SECS = 500
_ALL_QUEUES = {
  "enable_pipelined_fwda2a": True,
  "enable_pipelined_bwda2a": True,
  "enable_async_optimize": True,
  "embedding_prefetch_capacity": 2,
}
# A name of a job -> the queues it trains with; the data of one rank ends first.
_EOF_JOBS = {
  "eof_plain": {},
  "eof_prefetch": {"embedding_prefetch_capacity": 2},
  "eof_pushed": {"enable_async_optimize": True, "use_native_multi_hash_table": False},
  "eof_all": {**_ALL_QUEUES, "use_native_multi_hash_table": False},
}
_LOSS_JOBS = {
  "loss_plain": {},
  "loss_prefetch": {"embedding_prefetch_capacity": 2},
  "loss_pushed": {"enable_async_optimize": True},
  "loss_all": _ALL_QUEUES,
}
_FIRST_STEPS = 3

_folder = ""


def setUpModule():  # noqa: N802
  global _folder
  _folder = tempfile.mkdtemp()
  _train_with_one_rank("one", [_FIRST_STEPS])
  _run(2, _jobs_of_two())
  # Restarts of what two ranks have saved, on one and on three.
  shutil.copytree(_path("eof_plain"), _path("one_of_two"))
  _train_with_one_rank("one_of_two", [2])
  shutil.copytree(_path("eof_all"), _path("three_of_two"))
  shutil.copytree(_path("one"), _path("three_of_one"))
  _run(
    3,
    {
      "three_of_two": Job(_path("three_of_two"), [2, 2, 2], config=_EOF_JOBS["eof_all"]),
      "three_of_one": Job(_path("three_of_one"), [2, 2, 2]),
    },
    # Holds what Horovod's ranks have saved, if it is here.
    rank_environment.TENSORFLOW,
  )


def tearDownModule():  # noqa: N802
  shutil.rmtree(_folder, ignore_errors=True)


def _path(name: str) -> str:
  return os.path.join(_folder, name)


def _train_with_one_rank(name: str, num_elements: list[int]) -> None:
  """Does a job in this process: without a launcher it is one rank."""
  hvd_lib.init()
  result = sync_trainer.run_job(Job(_path(name), num_elements))
  assert not result["error"], result["error"]
  with open(os.path.join(_folder, f"{name}.0.json"), "w") as f:
    json.dump(result, f)


def _run(count: int, jobs: dict[str, Job], engine: str | None = None) -> None:
  for name, job in jobs.items():
    job.write(_folder, name)
  command = ["-m", "tests.sync_trainer", _folder, *jobs]
  with rank_processes.RankProcesses(count, command, engine) as ranks:
    statuses = ranks.wait(_TIMEOUT_SECS)
    assert statuses == [0] * count, ranks.report()


def _jobs_of_two() -> dict[str, Job]:
  jobs = {
    name: Job(_path(name), [3, 5] if i % 2 else [6, 4], config=config)
    for i, (name, config) in enumerate(_EOF_JOBS.items())
  }
  jobs.update(
    {
      name: Job(_path(name), [100, 100], config=config, learning_rate=0.1)
      for name, config in _LOSS_JOBS.items()
    }
  )
  shutil.copytree(_path("one"), _path("two_of_one"))
  jobs["two_of_one"] = Job(_path("two_of_one"), [2, 2])
  control = {"MONOLITH_SYNC_CONTROL_STEPS": "2"}
  jobs["control"] = Job(
    _path("control"),
    [50, 50],
    config={"save_checkpoints_steps": 1000},
    env=control,
    files={"2": ("dump_3", ""), "6": ("stop_9", ""), "7": ("dump_1", "")},
  )
  jobs["req_time"] = Job(
    _path("req_time"), [50, 50], env=control, files={"1": ("limit_req_time", "8")}
  )
  jobs["online"] = Job(
    _path("online"),
    [260, 260],
    config={"enable_realtime_training": True, "dense_only_save_checkpoints_steps": 45},
    files={"150": ("ONLINE", "")},
  )
  jobs["seconds"] = Job(
    _path("seconds"),
    [10000, 10000],
    config={"save_checkpoints_secs": 0.3},
    max_steps=150,
  )
  jobs["failed_once"] = Job(_path("failed_once"), [2, 2], fail_saves={"1": "op"})
  jobs["shared"] = Job(_path("shared"), [100, 100], learning_rate=0.1, is_shared=True)
  jobs["exported"] = Job(_path("exported"), [2, 2], export=True)
  for rank in range(2):
    os.makedirs(os.path.join(_path("unmerged"), f"index-{rank:04d}"))
  jobs["unmerged"] = Job(
    os.path.join(_path("unmerged"), "index-{rank:04d}"),
    [3, 3],
    config={"merge_sync_training_ckpt": False},
  )
  return jobs


def _result(name: str, rank: int) -> dict:
  return sync_trainer.read_result(_folder, name, rank)


def _steps(name: str) -> list[int]:
  state = tf.train.get_checkpoint_state(name)
  return [int(path.rsplit("-", 1)[1]) for path in state.all_model_checkpoint_paths]


def _ids(rows: dict) -> set[int]:
  return {row_id for _, row_id in rows}


def _vectors(rows: dict) -> dict:
  return {key: vector for key, (_, vector) in rows.items()}


class EndOfDataTest(parameterized.TestCase):
  @parameterized.parameters(*_EOF_JOBS)
  def test_all_ranks_stop_at_the_same_step(self, name):
    last = min(3, 5) if list(_EOF_JOBS).index(name) % 2 else min(6, 4)
    for rank in range(2):
      self.assertEqual(_result(name, rank)["steps"], list(range(1, last + 1)))

  @parameterized.parameters(*_EOF_JOBS)
  def test_nothing_of_these_steps_is_lost(self, name):
    prefix = tf.train.latest_checkpoint(_path(name))
    last = len(_result(name, 0)["steps"])
    self.assertEqual(os.path.basename(prefix), f"model.ckpt-{last}")
    rows = read_rows(prefix)

    for rank in range(2):
      for element in range(last):
        keys = [key for key in rows if key[1] == own_id(rank, element)]
        self.assertLen(keys, 1)
        shard, vector = rows[keys[0]]
        self.assertEqual(shard, own_id(rank, element) % 2)
        # It was updated, not only looked up.
        self.assertTrue(np.any(vector), (rank, element))

  @parameterized.parameters(*_EOF_JOBS)
  def test_dense_weights_are_the_same(self, name):
    self.assertEqual(_result(name, 0)["kernel"], _result(name, 1)["kernel"])

  def test_only_rank_zero_writes_events(self):
    events = [name for name in os.listdir(_path("eof_plain")) if "tfevents" in name]
    self.assertLen(events, 1)


class LossTest(parameterized.TestCase):
  @parameterized.parameters(*_LOSS_JOBS)
  def test_loss_falls(self, name):
    losses = np.mean([_result(name, rank)["losses"] for rank in range(2)], axis=0)
    self.assertLen(losses, 100)
    self.assertLess(np.mean(losses[-10:]), 0.5 * np.mean(losses[:10]))

  def test_columns_of_a_slot_share_rows(self):
    rows = read_rows(tf.train.latest_checkpoint(_path("shared")))

    self.assertEqual({table for table, _ in rows}, {"both"})
    for (_, row_id), (shard, _) in rows.items():
      self.assertEqual(shard, row_id % 2)
    # First of the first column, then of the second one.
    ids = _ids(rows)
    self.assertIn(own_id(1, 99), ids)
    self.assertIn(-1, ids)
    losses = np.mean([_result("shared", rank)["losses"] for rank in range(2)], axis=0)
    self.assertLess(np.mean(losses[-10:]), 0.5 * np.mean(losses[:10]))


class HooksTest(absltest.TestCase):
  def test_dump_and_stop_files(self):
    # Checked after steps 2, 4, ...: the dump of step 3 is found at 4, the stop of 9 at 10. That of
    # step 1 comes too late.
    for rank in range(2):
      self.assertEqual(_result("control", rank)["steps"], list(range(1, 11)))
    self.assertEqual(_steps(_path("control")), [4, 10])
    for step in (4, 10):
      rows = read_rows(os.path.join(_path("control"), f"model.ckpt-{step}"))
      self.assertIn(own_id(1, step - 1), _ids(rows))

  def test_request_time_limit(self):
    # The ninth element has request time 8; the next check is after step 10.
    for rank in range(2):
      self.assertEqual(_result("req_time", rank)["steps"], list(range(1, 11)))
    self.assertEqual(_steps(_path("req_time")), [10])

  def test_dense_only_saves_while_online(self):
    # The file is looked for after steps 100 and 200, and is there at the second time.
    self.assertEqual(_steps(os.path.join(_path("online"), "dense_only")), [45, 90, 200, 245])
    for rank in range(2):
      self.assertLen(_result("online", rank)["steps"], 260)

  def test_saves_by_the_clock_are_complete(self):
    steps = _steps(_path("seconds"))
    self.assertGreaterEqual(len(steps), 2)
    self.assertEqual(steps[-1], 150)
    for step in steps:
      ids = _ids(read_rows(os.path.join(_path("seconds"), f"model.ckpt-{step}")))
      for rank in range(2):
        self.assertTrue(ids.issuperset(own_id(rank, i) for i in range(step)), (step, rank))
        self.assertNotIn(own_id(rank, step), ids)


class SaveTest(absltest.TestCase):
  def test_a_save_that_failed_on_one_rank_is_done_again_by_all(self):
    prefix = tf.train.latest_checkpoint(_path("failed_once"))
    self.assertEqual(os.path.basename(prefix), "model.ckpt-2")
    ids = _ids(read_rows(prefix))
    for rank in range(2):
      self.assertContainsSubset([own_id(rank, 0), own_id(rank, 1)], ids)

  def test_each_rank_exports_its_rows_and_rank_zero_the_rest(self):
    base = os.path.join(_path("exported"), "exported_models")
    self.assertContainsSubset({"entry", "ps_0", "ps_1"}, set(os.listdir(base)))
    versions = {
      name: [v for v in os.listdir(os.path.join(base, name)) if v.isdigit()]
      for name in ("entry", "ps_0", "ps_1")
    }
    self.assertLen(versions["entry"], 1)
    self.assertEqual(versions["entry"], versions["ps_0"])
    self.assertEqual(versions["entry"], versions["ps_1"])

  def test_checkpoints_of_ranks_are_merged(self):
    folders = [os.path.join(_path("unmerged"), f"index-{rank:04d}") for rank in range(2)]
    parts = [read_rows(tf.train.latest_checkpoint(folder)) for folder in folders]
    for rank, part in enumerate(parts):
      self.assertEqual({shard for shard, _ in part.values()}, {rank})

    prefix = sync_checkpoint.merge_rank_checkpoints(folders, _path("merged"))

    self.assertEqual(prefix, tf.train.latest_checkpoint(_path("merged")))
    self.assertEqual(read_rows(prefix), {**parts[0], **parts[1]})
    self.assertCountEqual(checkpoint_slices.read(prefix), ["first", "second"])
    _train_with_one_rank("merged", [1])
    self.assertEqual(_result("merged", 0)["steps"], [4])

  def test_merging_needs_all_ranks(self):
    folders = [os.path.join(_path("unmerged"), "index-0001")]
    with self.assertRaisesRegex(ValueError, "are not those of 1 ranks"):
      sync_checkpoint.merge_rank_checkpoints(folders, _path("badly_merged"))
    with self.assertRaisesRegex(ValueError, "no step that all of"):
      sync_checkpoint.merge_rank_checkpoints([*folders, _path("empty")], _path("badly_merged"))

  def test_another_number_of_ranks_needs_a_merge(self):
    with self.assertRaisesRegex(ValueError, "2 ranks have saved .* now there are 1: merge them"):
      sync_checkpoint.prepare(
        os.path.join(_path("unmerged"), "index-0000"), num_ranks=1, rank=0, is_merged=False
      )


class RestartTest(parameterized.TestCase):
  @parameterized.parameters(
    ("two_of_one", 2, _FIRST_STEPS, 2),
    ("one_of_two", 1, 4, 2),
    ("three_of_two", 3, 3, 2),
    ("three_of_one", 3, _FIRST_STEPS, 2),
  )
  def test_goes_on_on_another_number_of_ranks(self, name, num_ranks, saved_step, more_steps):
    for rank in range(num_ranks):
      self.assertEqual(
        _result(name, rank)["steps"], list(range(saved_step + 1, saved_step + more_steps + 1))
      )
    old = read_rows(os.path.join(_path(name), f"model.ckpt-{saved_step}"))
    resharded = read_rows(os.path.join(_path(name), f"resharded.model.ckpt-{saved_step}"))
    new = read_rows(os.path.join(_path(name), f"model.ckpt-{saved_step + more_steps}"))

    # Every id, with its vector, at its home.
    self.assertEqual(_vectors(resharded), _vectors(old))
    for (_, row_id), (shard, _) in [*resharded.items(), *new.items()]:
      self.assertEqual(shard, row_id % num_ranks)
    self.assertContainsSubset(old.keys(), new.keys())
    # Rows that were not trained on since have not changed.
    kept = [key for key in old if key[1] >= sync_trainer.VOCABULARY and key[1] % 1000 >= more_steps]
    self.assertNotEmpty(kept)
    for key in kept:
      self.assertEqual(new[key][1], old[key][1])

  def test_other_slices_are_refused_before_anything_is_written(self):
    # It is that of two ranks, and would have to be resharded first.
    folder = _path("other_slices")
    shutil.copytree(_path("eof_plain"), folder)
    before = sorted(os.listdir(folder))
    hvd_lib.init()

    result = sync_trainer.run_job(Job(folder, [2], slices=[1, 3]))

    self.assertRegex(
      result["error"],
      r"^ValueError: the rows of table 'first' in the checkpoint \S+/model.ckpt-4 consist of the "
      r"slices \[4 sgd\], but the model declares \[1 sgd, 3 sgd\]",
    )
    self.assertEqual(sorted(os.listdir(folder)), before)

  def test_records_of_slices(self):
    for name in ("eof_plain/model.ckpt-4", "three_of_two/resharded.model.ckpt-3"):
      tables = checkpoint_slices.read(_path(name))
      dims = {table: [s.dim for s in slices] for table, slices in tables.items()}
      self.assertEqual(dims, {"first": [4], "second": [2]})

  def test_without_a_checkpoint_there_is_nothing_to_prepare(self):
    with tempfile.TemporaryDirectory() as empty:
      sync_checkpoint.prepare(empty, num_ranks=1, rank=0)
      self.assertEmpty(os.listdir(empty))


if __name__ == "__main__":
  absltest.main()
