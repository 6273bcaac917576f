"""The errors of the FAQ: each is provoked, and says what the page says."""

import os
import pathlib
import re
import tempfile

import tensorflow as tf
from absl.testing import absltest

from monolith import data
from monolith.base_model import EstimatorSpec, MonolithModel, get_sigmoid_loss_and_pred
from monolith.estimator import Estimator, RunConfig
from monolith.native_training import hash_table_ops, runner_utils
from tests.keras_versions import IS_KERAS_3

_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/faq.md"
_RATINGS = {"user": data.Ids(), "stars": data.Number()}


class _Model(MonolithModel):
  """Works; a case changes what is wrong about it."""

  ids = staticmethod(lambda: tf.ragged.constant([[1], [2]], dtype=tf.int64))
  lookup = ("user",)
  change = staticmethod(lambda spec: spec)

  def input_fn(self, mode):
    features = {"user": self.ids(), "label": [0.0, 1.0]}
    return tf.data.Dataset.from_tensors(features).repeat(2)

  def model_fn(self, features, mode):
    lookup = self.lookup if isinstance(self.lookup, str) else list(self.lookup)
    vector = self.lookup_embedding_slice(lookup, "vec", 4)[0]
    logits = tf.reduce_sum(vector, 1)
    loss, pred = get_sigmoid_loss_and_pred("click", logits, features["label"], None, mode=mode)
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    return type(self).change(EstimatorSpec(features["label"], pred, "click", loss, optimizer))

  def serving_input_receiver_fn(self):
    raise NotImplementedError


def _train(is_graph=True, **attributes):
  options = {name: attributes.pop(name) for name in ("restore_ckpt",) if name in attributes}
  model = type("_Changed", (_Model,), attributes)()
  with tempfile.TemporaryDirectory() as folder:
    estimator = Estimator(model, RunConfig(is_local=True, model_dir=folder, **options))
    if not is_graph:
      return estimator.train(steps=1)
    with tf.Graph().as_default():
      estimator.train(steps=1)


def _read(text, columns=None):
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "ratings.csv")
    with open(path, "w") as f:
      f.write(text)
    list(data.csv(path, columns or _RATINGS, 10))


def _restore_another_dim():
  with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
    saved = hash_table_ops.test_hash_table(4, name_suffix="saved")
    saved = saved.assign_add(tf.constant([1], tf.int64), tf.ones([1, 4]))
    other = hash_table_ops.test_hash_table(2, name_suffix="other")
    basename = tf.constant(folder + "/table")
    with tf.compat.v1.Session() as session:
      session.run(saved.save(basename=basename).as_op())
      session.run(other.restore(basename=basename).as_op())


def _load_weights_of_another_dim(file, trained):
  """Loads weights that a Keras model of rows of 4 floats saved into one of rows of 2."""
  import monolith.keras

  def make(dim, steps):
    ids = tf.keras.Input([], dtype=tf.int64)
    vectors = monolith.keras.layers.Embedding(dim, name="rows")(ids)
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1, name="dense")(vectors[:, :1]))
    model.compile("adam", "mse")
    if steps:
      model.fit(tf.ones([4], tf.int64), tf.ones([4]), verbose=0)
    return model

  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, file)
    if file.endswith(".h5"):
      make(4, 1).save_weights(path)
      make(2, trained).load_weights(path)
    else:
      tf.train.Checkpoint(model=make(4, 1)).write(path)
      tf.train.Checkpoint(model=make(2, trained)).read(path)


def _make_two_tables():
  with tf.Graph().as_default():
    for _ in range(2):
      hash_table_ops.test_hash_table(4, name_suffix="same")


def _configure(text):
  conf = runner_utils.RunnerConfig(tf_config=text)
  conf.discovery_type = runner_utils.ServiceDiscoveryType.PRIMUS
  runner_utils.get_discovery(conf)


_PROVOKED = {
  "A file is not there": lambda: data.csv("nowhere.csv", _RATINGS, 10),
  "A column is not in the file": lambda: _read("user,stars\n", {"usr": data.Ids()}),
  "A value cannot be read": lambda: _read("user,stars\nann,3\nbob,many\n"),
  "A row has too few or too many fields": lambda: _read("user,stars\nbob,4\nann\n"),
  "An id is too large": lambda: _read(
    "user\n9223372036854775807\n9223372036854775808\n", {"user": data.Ids(hashed=False)}
  ),
  "Numbers are hashed like strings": lambda: data.hash_strings([1, 2]),
  "Boundaries are out of order": lambda: data.Buckets([10, 0]),
  "Ids are not ragged": lambda: _train(ids=staticmethod(lambda: tf.constant([1, 2], tf.int64))),
  "Ids are strings": lambda: _train(ids=staticmethod(lambda: tf.ragged.constant([["a"], ["b"]]))),
  "A feature is not in the input": lambda: _train(lookup=("usr",)),
  "A lookup of one name": lambda: _train(lookup="user"),
  "There is no optimizer for dense variables": lambda: _train(
    change=staticmethod(lambda spec: spec._replace(optimizer=None))
  ),
  "The model returns nothing": lambda: _train(change=staticmethod(lambda spec: None)),
  "A name of a param is misspelt": lambda: _Model.params().set(clip_nrm=1.0),
  "A gradient is not a number": lambda: _train(
    change=staticmethod(lambda spec: spec._replace(loss=spec.loss * float("nan")))
  ),
  "Eager mode is on": lambda: _train(is_graph=False),
  "Two tables have one name": _make_two_tables,
  "A checkpoint has rows of another length": _restore_another_dim,
  "The chosen checkpoint is not there": lambda: _train(restore_ckpt="model.ckpt-7"),
  "TF_CONFIG cannot be read": lambda: _configure("{"),
}


class FaqTest(absltest.TestCase):
  def test_every_error_says_what_the_page_says(self):
    entries = re.findall(r"^### (.*)\n\n```text\n(.*)\n```$", _PAGE.read_text(), re.MULTILINE)

    self.assertEqual([title for title, _ in entries], list(_PROVOKED))
    self.assertLen(entries, 20)
    for title, text in entries:
      with self.subTest(title):
        with self.assertRaises(Exception) as raised:
          _PROVOKED[title]()
        error = raised.exception
        name, _, message = text.partition(": ")
        self.assertEqual(type(error).__name__, name)
        pattern = ".*".join(map(re.escape, message.split("…")))
        if not isinstance(error, tf.errors.OpError):  # TensorFlow says more: in which op it was.
          pattern = rf"\A{pattern}\Z"
        self.assertRegex(str(error), re.compile(pattern, re.DOTALL))

  def test_keras_says_what_the_page_says_of_another_dim(self):
    entry = _PAGE.read_text().partition("### A checkpoint has rows")[2].partition("\n### ")[0]
    own, trained, checkpoint = re.findall(r"```text\n\w+: (.*)\n```", entry)

    for file, is_trained, text in (
      ("new.weights.h5", False, own),
      ("trained.weights.h5", True, own if IS_KERAS_3 else trained),
      ("tensorflow", True, checkpoint),
    ):
      with self.subTest(file), self.assertRaises((ValueError, tf.errors.OpError)) as raised:
        _load_weights_of_another_dim(file, is_trained)
      self.assertRegex(str(raised.exception), ".*".join(map(re.escape, text.split("…"))))


if __name__ == "__main__":
  absltest.main()
