"""The demo's model, trained by the trainer in one process and asked with Examples."""

import contextlib
import io
import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from examples.realtime import model as demo_model
from idl.matrix.proto import example_pb2
from monolith.realtime import trainer
from tests.native_training.data.mock_kafka import MockKafka

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()


def make_example(user, item, genres, label=None, sample_rate=1.0, number=0):
  example = example_pb2.Example()
  for slot, name, values in (
    (demo_model.USER_SLOT, "user", [user]),
    (demo_model.ITEM_SLOT, "item", [item]),
    (demo_model.GENRE_SLOT, "genre", genres),
  ):
    example.named_feature.add(name=name).feature.fid_v2_list.value.extend(
      (slot << 48) | value for value in values
    )
  if label is not None:
    example.label.append(label)
    example.line_id.sample_rate = sample_rate
    example.line_id.req_time = 1700000000
    example.line_id.req_id = f"0:{number}:p"
  return example.SerializeToString()


class DemoModelTest(tf.test.TestCase):
  def test_tastes_are_ids_of_their_slot_that_differ_by_user_and_genre(self):
    with self.session() as session:
      tastes = session.run(
        demo_model.cross(
          tf.ragged.constant([[1], [2], [], [1]], dtype=tf.int64),
          tf.ragged.constant([[5, 6], [5], [5], []], dtype=tf.int64),
        )
      )
    self.assertAllEqual(tastes.row_splits, [0, 2, 3, 4, 4])
    self.assertLen(set(tastes.values), 4)
    self.assertAllEqual(tastes.values >> 48, np.full(4, demo_model.TASTE_SLOT))

  def test_export_answers_as_the_samples_say(self):
    model_dir = os.path.join(self.get_temp_dir(), "model")
    # The same first rows in every run, so that all answer the same.
    self.enter_context(mock.patch.dict(os.environ, MONOLITH_TABLE_SEED="1"))
    rng = np.random.default_rng(3)
    with MockKafka() as kafka:
      kafka.create_topic("samples", 1)
      # Users like the genre of their own parity, and two thirds of what they dislike is left out.
      messages = []
      for i in range(3000):
        user, item = (int(n) for n in rng.integers(20, size=2))
        is_liked = user % 2 == item % 2
        if is_liked or i % 3 == 0:
          messages.append(make_example(user, item, [item % 2], float(is_liked), 1 / 3, i))
      kafka.send("samples", messages)
      said = io.StringIO()
      with contextlib.redirect_stderr(said):
        options = trainer.parse_arguments(
          [
            f"--kafka_servers={kafka.servers}",
            f"--model_dir={model_dir}",
            "--task=examples.realtime.model:DemoModel",
            "--batch_size=64",
            # Silence at the end, which a busy machine must not take for one in the middle.
            "--stream_timeout=5000",
          ]
        )
        trainer.run(options, trainer.make_params(options))

    self.assertIn("lag 0", said.getvalue())
    folder = os.path.join(model_dir, "exported_models", "entry")
    newest = os.path.join(folder, max(name for name in os.listdir(folder) if name.isdigit()))
    # It needs no checkpoint: its rows are its own.
    for path in tf.io.gfile.glob(os.path.join(model_dir, "model.ckpt*.assets")):
      tf.io.gfile.rmtree(path)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      meta_graph = tf.compat.v1.saved_model.load(session, ["serve"], newest)
      signature = meta_graph.signature_def["serving_default"]
      (output,) = signature.outputs.values()
      answers = session.run(
        output.name,
        {signature.inputs["examples"].name: [make_example(u, i, [i % 2]) for u, i in PAIRS]},
      )
    liked = [u % 2 == i % 2 for u, i in PAIRS]
    self.assertGreater(answers[liked].min(), 0.7)
    self.assertLess(answers[np.logical_not(liked)].max(), 0.3)


PAIRS = [(u, i) for u in range(6) for i in range(6)]

if __name__ == "__main__":
  tf.test.main()
