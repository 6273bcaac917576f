"""Tests of `page`, `processes`, `generator`, `freshness` and the table of `demo`.

Covers `options` and the figures of `stages`.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import numpy as np
import pytest

from examples.realtime.demo import parse_options
from examples.realtime.freshness import compute_auc
from examples.realtime.generator import Generator, World
from examples.realtime.options import Goal, format_goals
from examples.realtime.page import DemoPage
from examples.realtime.processes import Command, Supervisor, child_pids
from examples.realtime.stages import Trace, parse_metrics, summarize
from monolith.native_training.summary import charts
from tests.wait_until import wait_until

_SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


def _state(processes):
  return {
    "time": 0,
    "note": "measuring",
    "freshness": {"p50": 1.25, "p99": 2.5, "count": 3, "histogram": [0, 3, 1], "bin_secs": 0.25},
    "auc": {"1 s": 0.8123, "never": 0.5},
    "rates": {"impressions": 300.4},
    "split": {"join": {"p50": 0.05, "p99": 0.1}, "publish": {"p50": 0.61, "p99": 1.02}},
    "lag": {"joiner": 7, "trainer": 31, "tables_0": 2},
    "tables": {"user": {"rows": 412, "set": 9001, "deleted": 3}},
    "open_impressions": 12,
    "digests": {"replica_0": 1},
    "requests": {"made": 5, "retried": 1, "failed": 0},
    "recoveries": {"kill -9 of joiner": 2.34},
    "processes": processes,
  }


class SupervisorTest(unittest.TestCase):
  def setUp(self):
    self.folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, self.folder)

  def test_killed_process_is_dead_and_then_started_again(self):
    supervisor = Supervisor(self.folder, restart_secs=1000)
    self.addCleanup(supervisor.stop)
    first = supervisor.add(Command("sleeper", _SLEEPER)).pid

    supervisor.kill("sleeper")
    after_kill = supervisor.states()["sleeper"]["state"]
    supervisor._restart_secs = 0.3  # not before its state was read, however long that took
    wait_until(lambda: supervisor["sleeper"].pid not in (None, first))

    self.assertEqual(after_kill, "dead")
    self.assertEqual(supervisor.states()["sleeper"]["starts"], 2)

  def test_what_does_not_come_true_is_explained_by_the_log(self):
    supervisor = Supervisor(self.folder)
    self.addCleanup(supervisor.stop)
    process = supervisor.add(Command("talker", [sys.executable, "-c", "print('no disk')"]))
    wait_until(lambda: "no disk" in process.log_tail())

    with self.assertRaisesRegex(TimeoutError, "(?s)readiness took more than 0 s.*no disk"):
      supervisor.wait_for("readiness", lambda: False, 0, "talker")

  def test_children_of_a_process_are_known_while_they_live(self):
    supervisor = Supervisor(self.folder)
    self.addCleanup(supervisor.stop)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=0)"
    # The parent's parent holds the other end of the pipe.
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    wait_until(lambda: child_pids(parent.pid))

    (child,) = child_pids(parent.pid)
    parent.communicate(b"\n")

    self.assertNotEqual(child, parent.pid)
    self.assertEqual(child_pids(parent.pid), [])

  def test_variables_can_be_kept_from_a_process(self):
    supervisor = Supervisor(self.folder)
    self.addCleanup(supervisor.stop)
    code = "import os; print('HOME' in os.environ, os.environ['A'])"
    command = Command("env", [sys.executable, "-c", code], {"A": "b"}, unset=["HOME"])
    process = supervisor.add(command)

    wait_until(lambda: "False b" in process.log_tail())


class PageTest(unittest.TestCase):
  def setUp(self):
    self.folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, self.folder)
    self.supervisor = Supervisor(self.folder, restart_secs=1000)
    self.addCleanup(self.supervisor.stop)
    self.supervisor.add(Command("joiner", _SLEEPER))
    self.requests = 0
    self.page = DemoPage(self._next_state)
    self.page.start()
    self.addCleanup(self.page.stop)

  def _next_state(self):
    """Returns the state of real processes, and kills one after the first answer."""
    state = _state(self.supervisor.states())
    self.requests += 1
    if self.requests == 1:
      self.supervisor.kill("joiner")
    return state

  def test_state_and_page_are_served_without_anything_from_elsewhere(self):
    address = f"http://127.0.0.1:{self.page.port}"
    with urllib.request.urlopen(f"{address}/state.json") as answer:
      first = json.load(answer)
    with urllib.request.urlopen(f"{address}/state.json") as answer:
      second = json.load(answer)
    with urllib.request.urlopen(f"{address}/") as answer:
      html = answer.read().decode()
      policy = answer.headers["Content-Security-Policy"]
    with urllib.request.urlopen(f"{address}/plotly.js") as answer:
      script = answer.read().decode()

    self.assertEqual(first["processes"]["joiner"]["state"], "running")
    self.assertEqual(second["processes"]["joiner"]["state"], "dead")
    self.assertNotRegex(html, r"https?://|@import|<link")
    self.assertEqual(re.findall(r'src="([^"]*)"', html), ["plotly.js", "charts.js"])
    self.assertEqual(script, charts.plotly_script())
    self.assertTrue(policy.startswith("default-src 'self'"), policy)

  def test_browser_shows_a_killed_process_within_three_seconds(self):
    browser = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
    if browser is None:
      pytest.skip("needs a browser: apt-get install chromium-headless-shell")

    # The page's clock, not ours: three of its seconds, however busy the machine is.
    done = subprocess.run(
      [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
       f"--user-data-dir={self.folder}/browser", "--virtual-time-budget=3000", "--dump-dom",
       f"http://127.0.0.1:{self.page.port}/"],
      capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    text = re.sub(r"\s+", " ", done.stdout)
    self.assertGreaterEqual(self.requests, 2, done.stderr[-2000:])
    self.assertIn('<td>joiner</td><td class="dead">dead</td>', text)
    self.assertIn('<span class="big" id="p50">1.25 s</span>', text)
    self.assertIn("<td>1 s</td><td>0.812</td>", text)
    self.assertIn("equal to training", text)
    # A bar for each bucket that is not empty, and a curve with its name.
    self.assertRegex(text, r'id="histogram".*class="point".*id="auc"')
    self.assertRegex(text, r'id="auc".*class="scatterlayer mlayer"><g class="trace scatter')
    self.assertRegex(text, r'class="legendtext"[^>]*>never<')
    self.assertIn("<td>publish</td><td>0.61 s, p99 1.02 s</td>", text)
    self.assertIn("<td>user</td><td>412 rows</td><td>9001 set</td><td>3 expired</td>", text)
    for stage, lag in (("joiner", 7), ("trainer", 31), ("tables_0", 2)):
      self.assertIn(f"<td>{stage}</td><td>{lag}</td>", text)
    self.assertIn("<td>all well after kill -9 of joiner</td><td>2.3 s</td>", text)


class _Recorder:
  def __init__(self):
    self.impressions, self.actions = {}, []

  def impression(self, world, user, item, now):
    key = f"r{len(self.impressions)}"
    self.impressions[key] = (user, item, now)
    return key

  def action(self, request_id, now):
    self.actions.append((request_id, now))

  def poll(self):
    pass


class GeneratorTest(unittest.TestCase):
  def test_rate_and_clicks_follow_taste(self):
    world, recorder = World(), _Recorder()
    generator = Generator(recorder, world, rate=200, max_delay_secs=0.5, seed=1)

    for tick in range(501):
      generator.step(1_700_000_000 + tick * 0.02)

    self.assertAlmostEqual(len(recorder.impressions), 2000, delta=2)
    clicked = {key for key, _ in recorder.actions}
    self.assertEqual(len(clicked), len(recorder.actions))
    rates = {True: [], False: []}
    for key, (user, item, now) in recorder.impressions.items():
      rates[world.taste(user, now) == item % world.genres].append(key in clicked)
    self.assertGreater(np.mean(rates[True]), 0.55)
    self.assertLess(np.mean(rates[False]), 0.1)
    self.assertTrue(
      all(0 <= when - recorder.impressions[k][2] <= 0.5 for k, when in recorder.actions)
    )

  def test_every_user_has_another_taste_after_a_turn(self):
    world = World(turn_secs=60)

    for user in range(world.users):
      self.assertNotEqual(world.taste(user, 1000), world.taste(user, 1060))


class FiguresTest(unittest.TestCase):
  def test_auc_counts_pairs_in_order(self):
    labels = np.array([1, 0, 1, 0.0])

    self.assertEqual(compute_auc(labels, np.array([0.9, 0.1, 0.8, 0.2])), 1.0)
    self.assertEqual(compute_auc(labels, np.array([0.5, 0.5, 0.5, 0.5])), 0.5)
    self.assertEqual(compute_auc(labels, np.array([0.9, 0.7, 0.3, 0.1])), 0.75)

  def test_metrics_are_parsed(self):
    text = '# HELP a b\na{x="1 2"} 3.0\nb 4e3\nbad line\n'

    self.assertEqual(parse_metrics(text), {'a{x="1 2"}': 3.0, "b": 4000.0})

  def test_time_is_split_among_the_stages(self):
    trace = Trace(joined=100.1, trained=100.5, step_secs=0.1, published=101.2)

    split = trace.split(event_time=100.0, seen=101.5)

    wanted = {"join": 0.1, "queue": 0.3, "train": 0.1, "publish": 0.7, "apply": 0.3}
    self.assertEqual({k: round(v, 6) for k, v in split.items()}, wanted)
    self.assertAlmostEqual(summarize([split, split])["publish"][0], 0.7)
    self.assertIsNone(Trace(joined=100.1).split(100.0, 101.0))
    self.assertEqual(summarize([]), {})

  def test_stages_that_were_seen_late_take_no_negative_time(self):
    split = Trace(joined=100.4, trained=100.9, step_secs=2, published=100.7).split(100.0, 100.8)

    self.assertEqual(min(split.values()), 0.0)
    self.assertAlmostEqual(sum(split.values()), 0.8)

  def test_broker_is_away_as_long_as_the_faults_ask_for(self):
    self.assertEqual(parse_options([]).broker_away_secs, 5)
    self.assertEqual(parse_options(["--faults=all"]).zookeeper_away_secs, 60)
    self.assertEqual(parse_options(["--faults=7", "--broker_away_secs=1"]).broker_away_secs, 1)
    for flags in ("--faults=some", "--replicas=1", "--num_ps=-1", "--slow_syncs=x"):
      with self.assertRaises(SystemExit):
        parse_options([flags])

  def test_missed_promises_stand_out(self):
    table = format_goals(
      [Goal("median", "<= 2 s", "1.50 s", True), Goal("p99", "<= 4 s", "9 s", False)]
    )

    self.assertIn("median   <= 2 s  1.50 s    ok", table)
    self.assertIn("p99      <= 4 s  9 s       MISSED", table)


if __name__ == "__main__":
  unittest.main()
