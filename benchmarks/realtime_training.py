"""Speed of training from Kafka, against the same samples from a file.

  python benchmarks/realtime_training.py [--samples 200000] [--rounds 3]

The model of the realtime demo trains in one process, in turn from a topic and from a file, with
batches of 512; a broker that runs here shares the machine's cores. A training run counts from its
tenth step on.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import struct
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from ratio_table import Row, print_rows  # noqa: E402

from examples.realtime import broker, model  # noqa: E402
from idl.matrix.proto import example_pb2  # noqa: E402
from monolith.native_training import cpu_training  # noqa: E402
from monolith.native_training.data import datasets  # noqa: E402
from monolith.row_log import kafka_client  # noqa: E402

_TOPIC = "samples"
_PARTITIONS = 2
_BATCH_SIZE = 512
_WARM_UP_STEPS = 10
_WANTED = 0.8


class _FileModel(model.DemoModel):
  """The same model with a file for a topic."""

  @classmethod
  def params(cls) -> Any:
    p = super().params()
    p.define("file", "", "What to read.")
    return p

  def input_fn(self, mode: str) -> tf.data.Dataset:
    dataset = datasets.FilePBDataset(
      self.p.file, input_pb_type=datasets.PbType.EXAMPLE, has_sort_id=False
    )
    return dataset.batch(_BATCH_SIZE).map(self.parse)


class _ClockHook(tf.compat.v1.train.SessionRunHook):
  """Takes the time between the end of the first steps and that of the last."""

  def __init__(self) -> None:
    self._num_steps = 0
    self._start = self._end = 0.0

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    self._num_steps += 1
    self._end = time.perf_counter()
    if self._num_steps == _WARM_UP_STEPS:
      self._start = self._end

  @property
  def seconds_per_step(self) -> float:
    return (self._end - self._start) / (self._num_steps - _WARM_UP_STEPS)


def make_samples(count: int) -> list[bytes]:
  """Returns serialized Examples of users with few and items with many events."""
  rng = np.random.default_rng(7)
  columns = [
    rng.zipf(1.3, count) % 100_000,
    rng.zipf(1.2, count) % 10_000,
    rng.integers(20, size=count),
  ]
  labels = rng.random(count) < 0.2
  samples = []
  for i in range(count):
    example = example_pb2.Example(label=[float(labels[i])])
    example.line_id.req_time = 1_700_000_000 + i // 1000
    example.line_id.req_id = f"{i % _PARTITIONS}:{i}:p"
    example.line_id.sample_rate = 1.0
    for slot, (name, column) in enumerate(zip(("user", "item", "genre"), columns), 1):
      fid = (slot << 48) | int(column[i])
      example.named_feature.add(name=name).feature.fid_v2_list.value.append(fid)
    samples.append(example.SerializeToString())
  return samples


def _train(params: Any, steps: int) -> float:
  """Returns the seconds of a step."""
  params.name = "demo"
  params.metrics.enable_tf2_profiler_hook = False
  config = cpu_training.CpuTrainingConfig(embedding_prefetch_capacity=1, save_checkpoints_secs=3600)
  clock = _ClockHook()
  with tempfile.TemporaryDirectory() as folder:
    cpu_training.local_train_internal(params, config, folder, steps, user_hooks=[clock])
  return clock.seconds_per_step


def measure(num_samples: int = 200_000, rounds: int = 3) -> list[Row]:
  """Returns the row of training from Kafka."""
  samples = make_samples(num_samples)
  steps = num_samples // _BATCH_SIZE - 1
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "samples")
    with open(path, "wb") as f:
      for sample in samples:
        f.write(struct.pack("<Q", len(sample)) + sample)
    brokers = broker.make_broker(os.path.join(folder, "broker"))
    brokers.start()
    try:
      brokers.create_topics({_TOPIC: _PARTITIONS})
      producer = kafka_client.make_producer(
        brokers.servers, {"queue.buffering.max.messages": num_samples + 1}
      )
      for i, sample in enumerate(samples):
        producer.produce(_TOPIC, sample, partition=i % _PARTITIONS)
      producer.flush()
      settings = kafka_client.client_settings(brokers.servers)
      servers = settings.pop("bootstrap.servers")
      from_file = _FileModel.params()
      from_file.file = path
      from_kafka = model.DemoModel.params()
      stream = from_kafka.stream
      stream.servers, stream.topics = servers, [_TOPIC]
      stream.batch_size, stream.linger_millis = _BATCH_SIZE, 1000
      stream.settings = [
        f"{key}={value}".replace("False", "false") for key, value in settings.items()
      ]
      seconds: dict[str, list[float]] = {"kafka": [], "file": []}
      for i in range(rounds):
        # A group that is told where the first run has stopped would let the second begin there.
        stream.group = f"benchmark_{i}"
        seconds["kafka"].append(_train(from_kafka, steps))
        seconds["file"].append(_train(from_file, steps))
    finally:
      brokers.stop()
  kafka, file = (statistics.median(seconds[name]) for name in ("kafka", "file"))
  for name, values in seconds.items():
    rates = ", ".join(f"{_BATCH_SIZE / value:,.0f}" for value in values)
    print(f"from {name}: {rates} samples/s")
  return [
    Row("a step of training from Kafka", "the same samples from a file", kafka, file, _WANTED)
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--samples", type=int, default=200_000)
  parser.add_argument("--rounds", type=int, default=3)
  options = parser.parse_args()
  flags.FLAGS([sys.argv[0]])
  tf.compat.v1.disable_eager_execution()
  print_rows(measure(options.samples, options.rounds))


if __name__ == "__main__":
  main()
