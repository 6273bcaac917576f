"""One process of a training run over several hosts, for tests.

  python host_program.py train FOLDER STEPS [SECONDS_OF_A_STEP]
  python host_program.py zk FOLDER STEPS ROLE INDEX ZOOKEEPER
  python host_program.py files FOLDER STEPS ROLE INDEX
  python host_program.py export FOLDER
  python host_program.py predict FOLDER        prints how well checkpoint and export do

`train` is a server, a worker or a rank, as the environment says, and makes a file ROLE.steps after
its first step. The model learns that even ids are clicked on.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

import monolith
from monolith.keras import task as keras_task
from monolith.native_training import cpu_training, service_discovery
from monolith.native_training.runner_utils import RunnerConfig

_NUM_IDS = 100
_JOB = {"num_ps": 1, "num_workers": 2, "save_checkpoints_steps": 50}


def make_model() -> tf.keras.Model:
  """Returns the model, compiled."""
  ids = tf.keras.Input([], dtype=tf.int64, name="ids")
  rows = monolith.keras.layers.Embedding(4, "adagrad", learning_rate=0.5, name="items")(ids)
  model = tf.keras.Model(ids, tf.keras.layers.Dense(1, "sigmoid")(rows))
  model.compile(tf.keras.optimizers.Adam(0.05), "binary_crossentropy")
  return model


def read(index: int, count: int) -> tf.data.Dataset:
  """Returns endless batches; workers read the same."""
  pairs = tf.data.Dataset.range(_NUM_IDS)
  return pairs.map(lambda i: ({"ids": i}, tf.cast(i % 2 == 0, tf.float32))).batch(10).repeat()


class _Steps(tf.compat.v1.train.SessionRunHook):
  """Tells a test that there are steps, and makes them long."""

  def __init__(self, folder: pathlib.Path, pause: float):
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "rank", "index": 0})
    self._path = folder / f"{task['type']}-{task['index']}.steps"
    self._pause = pause

  def after_run(self, run_context: object, run_values: object) -> None:
    self._path.touch()
    time.sleep(self._pause)


def main(mode: str, folder: pathlib.Path, arguments: list[str]) -> None:
  model_dir, exported = str(folder / "model"), str(folder / "export")
  model = make_model()
  steps = int(arguments[0]) if arguments else 0
  if mode == "train":
    hooks = [_Steps(folder, float(arguments[1]) if len(arguments) > 1 else 0)]
    monolith.keras.train(
      model, read, model_dir, max_steps=steps, save_checkpoints_steps=50, hooks=hooks
    )
  elif mode == "zk":
    config = RunnerConfig(
      server_type=arguments[1],
      index=int(arguments[2]),
      discovery_type=service_discovery.ServiceDiscoveryType.ZK,
      zk_server=arguments[3],
      deep_insight_name="hosts",
      **_JOB,
    )
    monolith.keras.train(model, read, model_dir, max_steps=steps, config=config)
  elif mode == "files":
    task = keras_task.KerasTask(model, read, is_rank=False)
    task.p.train.max_steps = steps
    config = cpu_training.DistributedCpuTrainingConfig(
      server_type=arguments[1], index=int(arguments[2]), model_dir=model_dir, **_JOB
    )
    discovery = service_discovery.HostServiceDiscovery(str(folder / "discovery"))
    with tf.Graph().as_default():
      cpu_training.distributed_train(config, discovery, task)
  elif mode == "export":
    monolith.keras.load_trained(model, read(0, 1), model_dir)
    model.export(exported)
  else:
    ids = np.arange(_NUM_IDS)
    monolith.keras.load_trained(model, read(0, 1), model_dir)
    serve = tf.saved_model.load(exported).signatures["serving_default"]
    for name, scores in (
      ("checkpoint", model.predict(ids, verbose=0)),
      ("export", next(iter(serve(ids=tf.constant(ids)).values())).numpy()),
    ):
      right = np.mean((np.ravel(scores) > 0.5) == (ids % 2 == 0))
      print(f"{name} is right for {right:.0%}", flush=True)
  print("ended", flush=True)


if __name__ == "__main__":
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
