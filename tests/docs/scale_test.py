"""The page about large tables shows what `benchmarks/cluster_size.py` reckons."""

import dataclasses
import importlib.util
import pathlib
import sys
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _load():
  spec = importlib.util.spec_from_file_location(
    "cluster_size", _ROOT / "benchmarks/cluster_size.py"
  )
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


cluster_size = _load()


class ScaleTest(unittest.TestCase):
  def test_the_page_shows_what_is_reckoned(self):
    page = (_ROOT / "docs/scale.md").read_text()

    for job in (
      cluster_size.Job(rows=1e9, servers=4, workers=8),
      cluster_size.Job(rows=10e9, servers=64, workers=64),
    ):
      for line in cluster_size.lines(job):
        self.assertIn(line, page)

  def test_what_is_too_small_slows_the_simulated_job_down(self):
    job = cluster_size.Job(servers=4, workers=8)
    alone = job.workers * job.examples
    slow_cores = dataclasses.replace(job, cores=2)
    slow_links = dataclasses.replace(job, link=4 * job.dim * job.ids / job.step)

    self.assertGreater(cluster_size.simulate(job, 50), 0.95 * alone)
    self.assertGreater(slow_cores.server_cores(), 2 * slow_cores.cores)
    self.assertLess(cluster_size.simulate(slow_cores, 50), 0.6 * alone)
    self.assertLess(cluster_size.simulate(slow_links, 50), 0.95 * alone)


if __name__ == "__main__":
  unittest.main()
