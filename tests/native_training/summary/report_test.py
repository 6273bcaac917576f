"""`monolith_report` makes a page that stands alone, also in a browser, where there is one.

Covers `step_time`, which reads profiles, as well.
"""

from __future__ import annotations

import html.parser
import io
import os
import re
import shutil
import subprocess
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from monolith.native_training import entry, estimator, native_model
from monolith.native_training.summary import report, step_time

tf.compat.v1.disable_eager_execution()

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


class _Clicks(native_model.MonolithModel):
  def input_fn(self, mode):
    users = np.arange(64) % 16
    data = tf.data.Dataset.from_tensor_slices((users, (users % 2 == 0).astype(np.float32)))
    return data.repeat(5).batch(8).map(
      lambda user, label: {
        "user": tf.RaggedTensor.from_tensor(user[:, None]),
        "item": tf.RaggedTensor.from_tensor(user[:, None] % 3),
        "label": label,
      }
    )  # fmt: skip

  def model_fn(self, features, mode):
    optimizer = entry.AdagradOptimizer(learning_rate=0.5, initial_accumulator_value=1.0)
    vectors = self.lookup_embedding_slice(
      ["user", "item"], "vec", 4, optimizer=optimizer, out_type="add_n"
    )
    label = features["label"]
    loss, pred = native_model.get_sigmoid_loss_and_pred(
      "ctr", tf.reduce_sum(vectors, axis=1), label, None, mode=mode
    )
    dense_optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)
    return native_model.EstimatorSpec(label, pred, "ctr", loss, dense_optimizer)


class _Page(html.parser.HTMLParser):
  def __init__(self, text):
    super().__init__()
    self.tags, self.links, self.texts = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [value for name, value in attrs if name in ("src", "href")]

  def handle_data(self, data):
    self.texts.append(data)


class ReportTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._dir = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls._dir)
    conf = estimator.RunConfig(is_local=True, model_dir=cls._dir, save_summary_steps=10)
    conf = conf.to_runner_config()
    conf.profile_some_steps_from = 20
    est = estimator.Estimator(_Clicks(), conf)
    est.train_and_evaluate(eval_every=20, eval_steps=4)

  def test_tables_of_a_checkpoint(self):
    tables = report.read_tables(tf.train.latest_checkpoint(self._dir))

    self.assertEqual(
      [(t.name, t.num_rows, t.dim) for t in tables], [("user", 16, 4), ("item", 3, 4)]
    )
    self.assertLen(tables[0].norms, 16)
    self.assertTrue(all(norm > 0 for norm in tables[0].norms))
    self.assertEqual(tables[0].optimizers, "adagrad")

  def test_page(self):
    with mock.patch("sys.stdout", new_callable=io.StringIO) as out:
      self.assertEqual(report.cli([self._dir]), 0)
    path = out.getvalue().strip()
    with open(path, encoding="utf-8") as f:
      text = f.read()
    page = _Page(text)

    self.assertEqual(page.links, [])
    self.assertNotIn("http", text)
    for title in ("loss", "auc", "examples_per_second", "step_ms", "memory_mb", "user", "item"):
      self.assertIn(title, page.texts)
    # Curves of each table, the time of a step, and histograms.
    for title in ("rows admitted in the run", "rows expired in the run", "memory, MB", "● item "):
      self.assertIn(title.strip(), " ".join(page.texts))
    for part in (step_time.LOOKUP, step_time.UPDATE, step_time.BACKWARD, step_time.READING):
      self.assertIn(part, page.texts)
    self.assertNotIn("not summarised", text)
    self.assertIn("embedding_gradients", page.texts)
    # Two curves, of training and of evaluation, in the first drawings.
    self.assertGreater(page.tags.count("polyline"), page.tags.count("svg") / 2)
    self.assertGreater(page.tags.count("rect"), 5)

  def test_where_the_time_of_a_step_goes(self):
    times = step_time.read(self._dir)

    self.assertBetween(times.num_steps, 5, 12)
    self.assertGreater(times.step_ms, 0)
    self.assertContainsSubset(
      {step_time.READING, step_time.LOOKUP, step_time.UPDATE, step_time.FORWARD}, times.parts_ms
    )
    self.assertTrue(all(ms > 0 for ms in times.parts_ms.values()), times)

  def test_a_damaged_profile_is_named(self):
    folder = self.create_tempdir().full_path
    self.assertIsNone(step_time.read(folder))
    profile = os.path.join(folder, "plugins", "profile", "1", "host.xplane.pb")
    os.makedirs(os.path.dirname(profile))
    with open(profile, "wb") as f:
      f.write(b"\xff\xff")
    with self.assertRaisesRegex(ValueError, "host.xplane.pb is damaged"):
      step_time.read(folder)

  def test_a_browser_shows_it(self):
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
      self.skipTest(f"none of {_BROWSERS} is installed")
    path = report.write_report(self._dir)
    picture = os.path.join(self._dir, "page.png")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1200"]
    profile = f"--user-data-dir={os.path.join(self._dir, 'browser')}"
    url = f"file://{path}"
    subprocess.run(
      [browser, *arguments, profile, f"--screenshot={picture}", url],
      check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    with tf.io.gfile.GFile(picture, "rb") as f:
      pixels = tf.io.decode_png(f.read(), 3)
    with tf.compat.v1.Session() as session:
      pixels = session.run(pixels)
    self.assertEqual(pixels.shape, (1200, 1400, 3))
    blue = np.all(np.abs(pixels.astype(int) - [0x1F, 0x6F, 0xEB]) < 8, axis=2)
    self.assertGreater(np.count_nonzero(blue), 200, "no curve or bar in its color")
    document = subprocess.run(
      [browser, *arguments, profile, "--dump-dom", url],
      check=True, capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    # What the browser made of the page: all its parts are there, none within another.
    self.assertEqual(document.count("<h2>"), document.count("<section>"))
    for title in ("Curves of tables", "Where the time of a step goes", "Lengths of rows"):
      self.assertIn(f"<h2>{title}</h2>", document)
    self.assertNotIn("NaN", document)

  def test_curves_of_keras(self):
    with tempfile.TemporaryDirectory() as folder:
      # As `tf.keras.callbacks.TensorBoard` writes them, and `TableCurves` beside it.
      for name, tag in (("train", "epoch_auc"), ("validation", "epoch_auc"), ("", "rows/user")):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        path = os.path.join(folder, name, "events.out.tfevents.1.host.1.0.v2")
        with tf.io.TFRecordWriter(path) as writer:
          for step in range(3):
            event = tf.compat.v1.Event(step=step)
            value = event.summary.value.add(tag=tag, tensor=tf.make_tensor_proto(0.25 + step))
            value.metadata.plugin_data.plugin_name = "scalars"
            text = event.summary.value.add(tag="keras", tensor=tf.make_tensor_proto("{}"))
            text.metadata.plugin_data.plugin_name = "graph_keras_model"
            writer.write(event.SerializeToString())
      with open(report.write_report(folder), encoding="utf-8") as f:
        page = f.read()

    for text in (">auc<", "training</span>", "evaluation</span>", "user"):
      self.assertIn(text, page)
    self.assertNotIn("epoch_", page)

  def test_a_table_has_one_color_in_all_drawings(self):
    folder = self.create_tempdir().full_path
    with tf.io.TFRecordWriter(os.path.join(folder, "events.out.tfevents.1.host")) as writer:
      event = tf.compat.v1.Event(step=1)
      for i in range(10):
        # The largest of one drawing are the smallest of the other.
        event.summary.value.add(tag=f"rows/table_{i}", simple_value=i)
        event.summary.value.add(tag=f"memory_mb/table_{i}", simple_value=100 - i)
      writer.write(event.SerializeToString())

    with open(report.write_report(folder), encoding="utf-8") as f:
      found = re.findall(r"<span style='color:([^']+)'>● (table_\d)</span>", f.read())

    self.assertLen(found, 2 * 8)
    self.assertLen({name for _, name in found}, 10)
    # As many pairs as tables, and as colors.
    self.assertLen(set(found), 10)
    self.assertLen({color for color, _ in found}, 10)
    # The largest ones get the colors that are told apart best.
    self.assertEqual(dict((name, color) for color, name in found)["table_9"], "#1f6feb")

  def test_a_folder_without_a_run(self):
    folder = self.create_tempdir().full_path
    with mock.patch("sys.stderr", new_callable=io.StringIO) as errors:
      self.assertEqual(report.cli([folder]), 1)
    self.assertIn(f"{folder} has neither curves nor a checkpoint", errors.getvalue())


if __name__ == "__main__":
  tf.test.main()
