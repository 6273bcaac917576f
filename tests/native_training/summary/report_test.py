"""`monolith_report` makes a page that stands alone, also in a browser, where there is one.

Covers `step_time`, which reads profiles, `run_reader`, which reads the rest, `report_summary` and
`charts` as well.
"""

from __future__ import annotations

import html
import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from monolith.native_training import entry, estimator, native_model
from monolith.native_training.summary import charts, report, run_reader, step_time

tf.compat.v1.disable_eager_execution()

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_HOSTILE = (
  "<img src=x onerror=document.title='pwned'>",
  "</script><script>document.title='pwned'</script>",
  "a & <b>b</b> 'c' \"d\" %{x} $y$ &lt;",
)


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
    self.policy = ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attrs:
      self.policy = dict(attrs)["content"]
    self.links += [value for name, value in attrs if name in ("src", "href")]

  def handle_data(self, data):
    self.texts.append(data)


def _read(path):
  with open(path, encoding="utf-8") as f:
    return f.read()


def _figures(page):
  """Returns the title of each chart in a page -> its traces."""
  found = re.findall(
    r"<figcaption><span>([^<]*)</span>.*?<script type=application/json>(.*?)</script>", page
  )
  return {html.unescape(title): json.loads(data)["traces"] for title, data in found}


def _text(document):
  """Returns a page without its scripts."""
  return re.sub("(?s)<script.*?</script>", "", document)


def _write_events(folder, steps, start=1000):
  """Writes what a training process does: when it starts, and values of steps, a second each."""
  os.makedirs(folder, exist_ok=True)
  with tf.io.TFRecordWriter(os.path.join(folder, f"events.out.tfevents.{start}.host")) as writer:
    event = tf.compat.v1.Event(wall_time=start, step=min(steps))
    event.session_log.status = tf.compat.v1.SessionLog.START
    writer.write(event.SerializeToString())
    for step, values in steps.items():
      event = tf.compat.v1.Event(wall_time=start + step, step=step)
      for tag, value in values.items():
        event.summary.value.add(tag=tag, simple_value=value)
      writer.write(event.SerializeToString())


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
    tables = run_reader.read_tables(tf.train.latest_checkpoint(self._dir))

    self.assertEqual(
      [(t.name, t.num_rows, t.dim) for t in tables], [("user", 16, 4), ("item", 3, 4)]
    )
    self.assertLen(tables[0].norms, 16)
    self.assertTrue(all(norm > 0 for norm in tables[0].norms))
    self.assertEqual(tables[0].optimizers, "adagrad")

  def test_page(self):
    with mock.patch("sys.stdout", new_callable=io.StringIO) as out:
      self.assertEqual(report.cli([self._dir]), 0)
    text = _read(out.getvalue().strip())
    page, figures = _Page(text), _figures(text)

    self.assertEqual(page.links, [])
    self.assertIn("default-src 'none'", page.policy)
    self.assertIn(charts.plotly_script(), text)
    for title in ("loss", "auc", "examples_per_second", "step_ms", "memory_mb"):
      self.assertIn(title, figures)
    # One of training and one of evaluation.
    self.assertEqual([t["name"] for t in figures["loss"]], ["training", "evaluation"])
    self.assertEqual(figures["loss"][1]["x"], [20, 40])
    # Curves of each table, the time of a step, lengths of rows, and histograms.
    for title in ("rows", "rows admitted in the run", "rows expired in the run", "memory, MB"):
      self.assertIn(title, page.texts)
    self.assertEqual({t["name"] for t in figures["rows admitted in the run"]}, {"user", "item"})
    self.assertContainsSubset(
      ["a step", step_time.LOOKUP, step_time.UPDATE, step_time.BACKWARD, step_time.READING],
      figures["the newest profile"][0]["y"],
    )
    self.assertEqual(sum(figures["user"][0]["y"]), 16)
    self.assertEqual(sum(figures["item"][0]["y"]), 3)
    self.assertNotIn("not summarised", text)
    self.assertIn("embedding_gradients", figures)

  def test_summary_of_a_run(self):
    text = _read(report.write_report(self._dir))

    found = re.findall(r"<div class=tile><b>([^<]*)</b><span>([^<]*)</span>", text)
    tiles = {name: value for value, name in found}
    self.assertEqual((tiles["step"], tiles["rows"], tiles["tables"]), ("40", "19", "2"))
    self.assertContainsSubset(
      ["duration", "training loss", "evaluation auc", "MB of memory"], tiles
    )
    self.assertRegex(tiles["duration"], r"^\d+\.\d s$|^0:\d\d:\d\d$")
    self.assertIn("The first run in this folder", text)
    checkpoint = os.path.basename(tf.train.latest_checkpoint(self._dir))
    self.assertRegex(text, rf"<td>{checkpoint}</td><td>[-0-9]+ [:0-9]+</td><td class=n>\d+\.\d MB")

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

  def _open(self, path, script=""):
    """Returns what a browser made of a page, without scripts, after `script`, and its pixels."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
      self.skipTest(f"none of {_BROWSERS} is installed")
    folder = self.create_tempdir().full_path
    text = _read(path)
    (nonce,) = set(re.findall(r"<script nonce=([-\w]+)>", text))
    script = f"addEventListener('load', () => setTimeout(() => {{{script}}}, 3000))"
    page = os.path.join(folder, "page.html")
    with open(page, "w", encoding="utf-8") as f:
      f.write(text.replace("</body>", f"<script nonce={nonce}>{script}</script></body>"))
    picture = os.path.join(folder, "page.png")
    arguments = [
      "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
      "--window-size=1400,5000", f"--user-data-dir={folder}/browser",
      # The page's clock, not ours, however busy the machine is.
      "--virtual-time-budget=10000",
    ]  # fmt: skip
    subprocess.run(
      [browser, *arguments, f"--screenshot={picture}", f"file://{page}"],
      check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    document = subprocess.run(
      [browser, *arguments, "--dump-dom", f"file://{page}"],
      check=True, capture_output=True, text=True, timeout=300,
    ).stdout  # fmt: skip
    with tf.io.gfile.GFile(picture, "rb") as f:
      pixels = tf.io.decode_png(f.read(), 3)
    with tf.compat.v1.Session() as session:
      return _text(document), session.run(pixels)

  def test_a_browser_shows_it(self):
    path = report.write_report(self._dir)

    document, pixels = self._open(
      path,
      """
      const figure = document.querySelector("figure"), chart = figure.querySelector(".chart");
      figure.querySelector("button.log").click();
      document.body.dataset.type = chart.layout.yaxis.type;
      document.body.dataset.loaded = performance.getEntriesByType("resource").length;
      document.body.dataset.overflow = document.documentElement.scrollWidth - innerWidth;
      fetch("http://127.0.0.1:1/").catch((e) => { document.body.dataset.fetched = e; });
      """,
    )

    blue = np.all(np.abs(pixels.astype(int) - [0x1F, 0x6F, 0xEB]) < 8, axis=2)
    self.assertGreater(np.count_nonzero(blue), 1000, "no curve or bar in its color")
    # The whole width is used.
    self.assertGreater(np.flatnonzero(blue.any(axis=0))[-1], 1000)
    self.assertIn('data-type="log"', document)
    self.assertIn('data-loaded="0"', document)
    self.assertLessEqual(int(re.search('data-overflow="(-?\\d+)"', document)[1]), 0)
    self.assertIn("data-fetched=", document)
    self.assertEqual(document.count("<h2>"), document.count("<section") + 2)
    # All charts are drawn, with a legend and more ticks than two.
    num_charts = _read(path).count("<div class=chart ")
    self.assertEqual(document.count('data-drawn="true"'), num_charts)
    self.assertGreater(document.count('class="legendtext"'), 10)
    self.assertGreater(document.count('class="xtick"'), 4 * num_charts)
    self.assertGreater(document.count('class="ytick"'), 3 * num_charts)
    self.assertNotIn("NaN", document)
    # None of Plotly's buttons sends anything.
    self.assertEqual(
      set(re.findall('data-title="([^"]*)"', document.lower())),
      {"download plot as a png", "zoom", "pan", "zoom in", "zoom out", "autoscale", "reset axes"},
    )

  def test_names_are_shown_as_they_are(self):
    folder = self.create_tempdir(_HOSTILE[2].replace("/", "")).full_path
    _write_events(folder, {1: {"<i>loss": 1.0, **{f"rows/{name}": 2.0 for name in _HOSTILE}}})
    path = report.write_report(folder, os.path.join(self.create_tempdir().full_path, "r.html"))

    self.assertEqual(_Page(_read(path)).tags.count("img"), 0)
    document, _ = self._open(path)

    self.assertNotIn("<title>pwned", document)
    legend = [
      html.unescape(name) for name in re.findall('class="legendtext"[^>]*>([^<]*)<', document)
    ]
    for name in _HOSTILE:
      self.assertTrue(
        any(shown[:8] == name[:8] and shown[-8:] == name[-8:] for shown in legend), name
      )
    self.assertIn("<span>&lt;i&gt;loss</span>", document)

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
      page = _read(report.write_report(folder))

    figures = _figures(page)
    self.assertEqual([t["name"] for t in figures["auc"]], ["training", "evaluation"])
    self.assertEqual(figures["auc"][0]["y"], [0.25, 1.25, 2.25])
    self.assertEqual([t["name"] for t in figures["rows"]], ["user"])
    self.assertIn('"title":{"text":"epoch"}', page)
    self.assertNotIn("epoch_", page.replace(charts.plotly_script(), ""))

  def test_a_table_has_one_color_in_all_charts_and_runs(self):
    folders = [self.create_tempdir().full_path for _ in range(2)]
    for folder in folders:
      # The largest of one chart are the smallest of the other.
      values = {f"rows/table_{i}": i for i in range(10)}
      values |= {f"memory_mb/table_{i}": 100 - i for i in range(10)}
      _write_events(folder, {1: values})

    figures = _figures(_read(report.write_report(folders[0], compared_with=folders[1:])))

    traces = figures["rows"] + figures["memory, MB"]
    self.assertLen(traces, 2 * 2 * 10)
    found = {(t["name"].partition(",")[0], t["line"]["color"]) for t in traces}
    # As many pairs as tables, and as colors.
    self.assertLen(found, 10)
    self.assertLen({color for _, color in found}, 10)
    # The largest ones get the colors that are told apart best.
    self.assertEqual(dict(found)["table_9"], "#1f6feb")
    # Runs differ in their dashes, and eight tables are drawn from the start on.
    self.assertEqual({t["line"]["dash"] for t in traces}, {"solid", "dot"})
    self.assertEqual([t["visible"] for t in traces].count("legendonly"), 2 * 2 * 2)

  def test_runs_lie_over_one_another(self):
    parents = [self.create_tempdir().full_path for _ in range(2)]
    folders = [os.path.join(parent, "model") for parent in parents]
    for i, folder in enumerate(folders):
      _write_events(folder, {step: {"loss": 2.0 - i} for step in (1, 2)})
    with mock.patch("sys.stdout", new_callable=io.StringIO) as out:
      self.assertEqual(report.cli(folders), 0)
    self.assertEqual(out.getvalue().strip(), os.path.join(folders[0], "report.html"))

    text = _read(os.path.join(folders[0], "report.html"))

    names = [os.path.join(os.path.basename(parent), "model") for parent in parents]
    loss = _figures(text)["loss"]
    self.assertEqual([t["name"] for t in loss], [f"{name}, training" for name in names])
    self.assertEqual([t["y"] for t in loss], [[2.0, 2.0], [1.0, 1.0]])
    self.assertNotEqual(loss[0]["line"]["color"], loss[1]["line"]["color"])
    self.assertIn("<td class=n>1 <span class=soft>(−1, -50.0%)</span></td>", text)

  def test_what_changed_since_the_last_run(self):
    folder = self.create_tempdir().full_path
    steps = {step: {"loss": 4.0 / step, "rows/old": 1.0} for step in (1, 2, 3, 4)}
    _write_events(folder, steps, start=1000)
    # It starts from the checkpoint of step 2.
    steps = {step: {"loss": 1.0 / step, "rows/new": 1.0} for step in (3, 5)}
    _write_events(folder, steps, start=2000)

    text = _read(report.write_report(folder))

    self.assertRegex(text, "last run, to .*this run, from ")
    self.assertIn(
      "<tr><td>training loss</td><td class=n>1</td>"
      "<td class=n>0.2 <span class=soft>(−0.8, -80.0%)</span></td></tr>",
      text,
    )
    self.assertIn("<p>New tables: new.</p>", text)
    self.assertIn("<p>Tables no longer there: old.</p>", text)
    # The lessons of the first run after that checkpoint were lost.
    (loss,) = _figures(text)["loss"]
    self.assertEqual(loss["x"], [1, 2, 3, 5])
    np.testing.assert_allclose(loss["y"], [4, 2, 1 / 3, 0.2], rtol=1e-6)

  def test_values_that_are_not_finite_are_counted(self):
    folder = self.create_tempdir().full_path
    values = {1: 1.0, 2: float("nan"), 3: float("inf"), 4: 2.0}
    _write_events(folder, {step: {"loss": value} for step, value in values.items()})

    text = _read(report.write_report(folder))

    self.assertEqual(_figures(text)["loss"][0]["y"], [1.0, None, None, 2.0])
    self.assertIn("2 values are not finite.", text)

  def test_long_curves_keep_their_peaks(self):
    values = [0.0] * 100_000
    values[54_321] = 7.0

    curve = charts.line("loss", list(range(100_000)), values, color="red")

    self.assertLess(len(curve["x"]), 3000)
    self.assertEqual((curve["x"][0], curve["x"][-1]), (0, 99_999))
    self.assertEqual(dict(zip(curve["x"], curve["y"]))[54_321], 7.0)

  def test_without_plotly_one_sentence_says_what_to_install(self):
    with mock.patch.dict(sys.modules, {"plotly": None}):
      with mock.patch("sys.stderr", new_callable=io.StringIO) as errors:
        self.assertEqual(report.cli([self._dir]), 1)

    (line,) = errors.getvalue().splitlines()
    self.assertRegex(line, r"^monolith_report: .*plotly.*: pip install '[-.a-z]*\[report\]'$")

  def test_a_folder_without_a_run(self):
    folder = self.create_tempdir().full_path
    with mock.patch("sys.stderr", new_callable=io.StringIO) as errors:
      self.assertEqual(report.cli([folder]), 1)
    self.assertIn(f"{folder} has neither curves nor a checkpoint", errors.getvalue())


if __name__ == "__main__":
  tf.test.main()
