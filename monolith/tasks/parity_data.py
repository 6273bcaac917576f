"""Writes the planted data of `monolith.tasks.parity_example`.

    python -m monolith.tasks.parity_data --output_dir=<folder>

An example has a user id, an id of slot 1, which means nothing, and an id of slot 2, whose parity is
the label; a share of the labels is then flipped. A perfect model cannot know which: on examples it
has not seen its AUC is 1 minus that share (pairs of examples are ordered rightly when neither label
or, by chance, one of them was flipped: (1-q)^2 + q(1-q) = 1-q).
"""

import os

import numpy as np
import tensorflow as tf
from absl import app, flags

TRAIN_FILE = "train.tfrecord"
EVAL_FILE = "eval.tfrecord"
VOCAB_FILE = "vocab.tsv"
VOCAB_SIZES = {1: 50, 2: 20}
NUM_TRAIN_EXAMPLES = 8192
NUM_EVAL_EXAMPLES = 2048
FLIPPED_SHARE = 0.1


def write(output_dir: str, flipped_share: float = FLIPPED_SHARE, seed: int = 1) -> None:
  """Writes training examples, evaluation examples and the vocabulary.

  Args:
    output_dir: created if need be.
    flipped_share: share of the labels that are wrong, in [0, 0.5].
    seed: the random numbers' seed.
  """
  if not 0 <= flipped_share <= 0.5:
    raise ValueError(f"flipped_share is {flipped_share}, want a number from 0 to 0.5")
  tf.io.gfile.makedirs(output_dir)
  generator = np.random.RandomState(seed)
  for name, count in ((TRAIN_FILE, NUM_TRAIN_EXAMPLES), (EVAL_FILE, NUM_EVAL_EXAMPLES)):
    with tf.io.TFRecordWriter(os.path.join(output_dir, name)) as writer:
      for _ in range(count):
        writer.write(_example(generator, flipped_share).SerializeToString())
  with tf.io.gfile.GFile(os.path.join(output_dir, VOCAB_FILE), "w") as vocab:
    vocab.write("slot\tcount\n")
    for slot_id, size in VOCAB_SIZES.items():
      vocab.write(f"{slot_id}\t{size}\n")


def _example(generator: np.random.RandomState, flipped_share: float) -> tf.train.Example:
  ids = {slot_id: int(generator.randint(size)) for slot_id, size in VOCAB_SIZES.items()}
  label = ids[2] % 2
  if generator.uniform() < flipped_share:
    label = 1 - label
  example = tf.train.Example()
  for slot_id, value in ids.items():
    example.features.feature[f"slot_{slot_id}_0"].int64_list.value.append(value)
  example.features.feature["uid"].int64_list.value.append(int(generator.randint(1 << 40)))
  example.features.feature["label"].float_list.value.append(label)
  return example


def main(argv: list[str]) -> None:
  del argv
  write(flags.FLAGS.output_dir, flags.FLAGS.flipped_share)
  print(f"Wrote {TRAIN_FILE}, {EVAL_FILE} and {VOCAB_FILE} to {flags.FLAGS.output_dir}")


if __name__ == "__main__":
  flags.DEFINE_string("output_dir", None, "Where to write.", required=True)
  flags.DEFINE_float("flipped_share", FLIPPED_SHARE, "Share of the labels that are wrong.")
  app.run(main)
