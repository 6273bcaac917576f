"""Base class of models that train on a stream of Examples and serve requests with Examples.

class Clicks(stream_model.StreamModel):
  def parse(self, samples):
    return parsers.parse_examples(samples, ["user", "item"], ["label"], [1])

  def model_fn(self, features, mode):
    ...

python -m monolith.realtime.trainer --task=my_module:Clicks --kafka_servers=... --topic=...
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from monolith.core import hyperparams
from monolith.native_training import graph_estimator, native_model
from monolith.native_training.data import kafka_dataset

EXAMPLES = "examples"


def define_stream(params: hyperparams.Params) -> None:
  """Defines the params that the trainer fills in: which samples to read, and how."""
  params.define("stream", hyperparams.Params(), "What to read.")
  stream = params.stream
  stream.define("servers", "", "Comma-separated host:port of Kafka brokers.")
  stream.define("topics", [], "Topics of samples.")
  stream.define("group", "", "The consumer group that is told the positions.")
  stream.define("batch_size", 512, "Most samples of a step.")
  stream.define("linger_millis", 20, "How long a batch may wait for more samples.")
  stream.define("dedup_messages", 131072, "Among how many messages to look for a repeated id.")
  stream.define("settings", [], "key=value settings of the Kafka client.")
  stream.define("stream_timeout", -1, "End after this many milliseconds without data; -1: never.")


def read_stream(
  stream: hyperparams.Params, parse: Callable[[tf.Tensor], dict[str, Any]]
) -> tf.data.Dataset:
  """Returns batches of features, with the positions after them.

  Args:
    stream: the params that `define_stream` defined.
    parse: takes samples, [batch], and returns features.
  """
  dataset = kafka_dataset.KafkaDataset(
    list(stream.topics),
    stream.group,
    stream.servers,
    variant_type="example",
    has_header=False,
    filter_empty=True,
    offsets="checkpoint",
    poll_batch_size=stream.batch_size,
    linger_millis=stream.linger_millis,
    dedup_messages=stream.dedup_messages,
    stream_timeout=stream.stream_timeout,
    configuration=[
      "auto.offset.reset=earliest",
      "fetch.wait.max.ms=50",
      "fetch.error.backoff.ms=50",
      *stream.settings,
    ],
  )
  return dataset.map_batches(parse)


class StreamModel(native_model.MonolithModel):
  """A `MonolithModel` whose input is a Kafka topic of serialized Examples.

  Positions in the topic are part of checkpoints. The trainer fills in the params `stream`, which
  say what to read.
  """

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    define_stream(p)
    return p

  @abc.abstractmethod
  def parse(self, samples: tf.Tensor) -> dict[str, Any]:
    """Returns the features of a batch, in training and in serving.

    Args:
      samples: [batch], variants or serialized Examples; without any in a silent stream.
    """

  def input_fn(self, mode: str) -> tf.data.Dataset:
    """Returns batches of features, with their positions."""
    return read_stream(self.p.stream, self.parse)

  def serving_input_receiver_fn(self) -> graph_estimator.ServingInputReceiver:
    """Returns an input of serialized Examples."""
    examples = tf.compat.v1.placeholder(tf.string, [None], name=EXAMPLES)
    return graph_estimator.ServingInputReceiver(self.parse(examples), {EXAMPLES: examples})
