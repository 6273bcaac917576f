"""The files of `deploy/`: YAML that parses, roles that fit together, and a program that trains."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import yaml
from absl.testing import absltest

from monolith.native_training import service_discovery
from tests import free_ports

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DEPLOY = _ROOT / "deploy"


class DeployTest(absltest.TestCase):
  def test_compose_file_describes_one_cluster(self):
    compose = yaml.safe_load((_DEPLOY / "docker-compose.yml").read_text())
    processes = {k: v for k, v in compose["services"].items() if "TF_CONFIG" in str(v)}

    configs = [json.loads(p["environment"]["TF_CONFIG"]) for p in processes.values()]
    clusters = [config["cluster"] for config in configs]
    self.assertTrue(all(cluster == clusters[0] for cluster in clusters))
    for name, config in zip(processes, configs):
      # The service's name is its host.
      addr = service_discovery.TfConfigServiceDiscovery(config).addr
      self.assertEqual(addr.split(":")[0], name)
      self.assertNotIn("ports", compose["services"][name])
    self.assertLen(processes, sum(len(addrs) for addrs in clusters[0].values()))
    context = (_DEPLOY / processes["ps-0"]["build"]["context"]).resolve()
    self.assertTrue((context / processes["ps-0"]["build"]["dockerfile"]).exists())

  def test_tfjob_fits_together(self):
    claim, policy, job = yaml.safe_load_all((_DEPLOY / "tfjob.yaml").read_text())

    specs = job["spec"]["tfReplicaSpecs"]
    self.assertEqual(set(specs), {"Chief", "PS", "Worker"})
    for spec in specs.values():
      template = spec["template"]
      self.assertEqual(template["metadata"]["labels"], policy["spec"]["podSelector"]["matchLabels"])
      [container] = template["spec"]["containers"]
      self.assertEqual(container["name"], "tensorflow")
      volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
      self.assertEqual({m["name"] for m in container["volumeMounts"]}, set(volumes))
      name = volumes["model"]["persistentVolumeClaim"]["claimName"]
      self.assertEqual(name, claim["metadata"]["name"])

  def test_dockerfiles_copy_what_exists(self):
    for name in ("Dockerfile", "serving.Dockerfile"):
      lines = re.findall(r"^COPY (?!--from)(.+)$", (_DEPLOY / name).read_text(), re.MULTILINE)
      self.assertNotEmpty(lines, name)
      for line in lines:
        for source in line.split()[:-1]:
          self.assertTrue((_ROOT / source).exists(), f"{name} copies {source}")

  def test_images_are_built_without_what_was_built_here(self):
    # Gigabytes otherwise, and the libraries of another system.
    ignored = (_ROOT / ".dockerignore").read_text().splitlines()
    self.assertIn(".git", ignored)
    for pattern in (_ROOT / ".gitignore").read_text().split():
      name = pattern.strip("/")
      self.assertTrue({name, f"**/{name}"} & set(ignored), pattern)

  @absltest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "starts two processes: make soak")
  def test_program_trains_on_a_cluster(self):
    with tempfile.TemporaryDirectory() as folder:
      ports = [free_ports.get_free_port() for _ in range(2)]
      cluster = {"chief": [f"127.0.0.1:{ports[0]}"], "ps": [f"127.0.0.1:{ports[1]}"]}
      processes = [self._start(folder, cluster, role) for role in ("ps", "chief")]
      try:
        for process in reversed(processes):
          output, _ = process.communicate(timeout=300)
          self.assertEqual(process.returncode, 0, output[-3000:])
        self.assertIn("model.ckpt-30.index", os.listdir(folder))
      finally:
        for process in processes:
          process.kill()

  def _start(self, folder, cluster, role):
    config = {"cluster": cluster, "task": {"type": role, "index": 0}}
    return subprocess.Popen(
      [sys.executable, str(_DEPLOY / "train.py"), "--steps=30"],
      env={
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "MODEL_DIR": folder,
        "TF_CONFIG": json.dumps(config),
      },
      cwd=folder,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )


if __name__ == "__main__":
  absltest.main()
