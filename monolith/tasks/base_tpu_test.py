"""`BaseTPUTest`: base class for the tests of tasks that run on TPU."""

import tensorflow as tf

from monolith.core import hyperparams, model_registry
from monolith.tpu_runner import TPURunner


class BaseTPUTest(tf.test.TestCase):
  """Runs registered tasks on CPU."""

  def runWithCPU(self, task_name: str) -> TPURunner:
    """Trains a task to its `train.max_steps`.

    Args:
      task_name: key in the model registry.

    Returns:
      The runner.
    """
    return self._run(model_registry.GetParams(task_name))

  def runMergeVectorTestOnCPU(self, task_name: str) -> TPURunner:
    """Trains a task with `merge_vector` and checks which tables were merged."""
    task_param = model_registry.GetParams(task_name)
    task_param.merge_vector = True
    runner = self._run(task_param)

    env = runner._task._env
    for slot_id, dims in env._slot_to_dims.items():
      has_bias = env.slot_id_to_feature_slot[slot_id].has_bias()
      vectors = dims[1:] if has_bias else dims
      want = ([1] if has_bias else []) + ([sum(vectors)] if vectors else [])
      self.assertEqual(env._slot_to_merged_dims[slot_id], want, f"slot {slot_id}")
    return runner

  def _run(self, task_param: hyperparams.InstantiableParams) -> TPURunner:
    runner = TPURunner(task_param)
    runner._cpu_test = True
    runner._host_call_every_n_steps = 0
    runner.run()
    return runner


if __name__ == "__main__":
  tf.test.main()
