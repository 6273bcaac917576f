"""The inputs of the demo's models; `demo_test` trains them."""

import os

import numpy as np
from absl.testing import absltest

from monolith.native_training import graph_estimator, model, native_task_context, utils
from monolith.native_training.demos import data, models

_TRAIN, _EVAL = graph_estimator.ModeKeys.TRAIN, graph_estimator.ModeKeys.EVAL


def _batches(task, mode, worker_index=0, num_workers=1):
  context = native_task_context.get()._replace(num_workers=num_workers, worker_index=worker_index)
  with native_task_context.with_ctx(context):
    return list(task.create_input_fn(mode)())


class RankingTaskTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._info = data.generate(os.path.join(utils.get_test_tmp_dir(), "ratings"), 100, 10, 10)

  def _task(self, **values):
    params = models.RankingTask.params()
    params.data_dir = self._info.folder
    params.train.per_replica_batch_size = 32
    for name, value in values.items():
      params.set(**{name: value})
    return params.instantiate()

  def test_ids_carry_slots_and_missing_genres_are_left_out(self):
    batches = _batches(self._task(), _TRAIN)

    records = np.fromfile(self._info.train_file, "<i8").reshape(-1, data.NUM_FIELDS)
    columns = {"user": [0], "movie": [1], "occupation": [2], "genre": [3, 4, 5]}
    for slot, (name, fields) in enumerate(columns.items(), 1):
      rows = [row for batch in batches for row in batch[name].to_list()]
      want = [
        [(slot << 48) + int(value) for value in record[fields] if value >= 0] for record in records
      ]
      self.assertEqual(rows, want)
    labels = np.concatenate([batch["label"] for batch in batches])
    np.testing.assert_array_equal(labels, records[:, -1])
    self.assertLen(batches, 3)  # 90 ratings

  def test_workers_share_the_training_set_but_not_the_evaluation(self):
    sizes = [
      sum(len(batch["label"]) for batch in _batches(self._task(epochs=2), _TRAIN, i, 3))
      for i in range(3)
    ]
    self.assertEqual(sizes, [60, 60, 60])
    evaluated = sum(len(batch["label"]) for batch in _batches(self._task(), _EVAL, 1, 3))
    self.assertEqual(evaluated, 10)


class FFMTaskTest(absltest.TestCase):
  def test_data_are_planted_and_the_same_each_time(self):
    task = models.FFMTask.params().set(num_examples=2000, num_eval_examples=500).instantiate()
    ids, labels, probabilities = task.generate(_TRAIN)

    self.assertEqual(ids.shape, (2000, model._NUM_SLOTS))
    self.assertGreater(data.compute_auc(labels, probabilities), 0.75)
    np.testing.assert_array_equal(task.generate(_TRAIN)[0], ids)
    self.assertLen(task.generate(_EVAL)[1], 500)

  def test_every_slot_has_ids_of_its_own(self):
    params = models.FFMTask.params().set(num_eval_examples=100)
    params.train.per_replica_batch_size = 40
    batches = _batches(params.instantiate(), _EVAL)

    self.assertEqual([len(batch["label"]) for batch in batches], [40, 40, 20])
    seen = {}
    for name in set(batches[0]) - {"label"}:
      for batch in batches:
        for row in batch[name].to_list():
          self.assertLen(row, 1)
          self.assertEqual(seen.setdefault(row[0], name), name)
    self.assertLen(set(seen.values()), model._NUM_SLOTS)


if __name__ == "__main__":
  absltest.main()
