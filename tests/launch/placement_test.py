"""Processes of a job run where they should: on one machine, on hosts, in Slurm and Kubernetes."""

import json
import unittest

from monolith.launch import placement

_SLURM = {
  "SLURM_PROCID": "3",
  "SLURM_NTASKS": "5",
  "SLURM_STEP_NODELIST": "node[09-10],big",
  "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
_KUBERNETES = {
  "JOB_COMPLETION_INDEX": "2",
  "HOSTNAME": "train-model-2",
  "MONOLITH_SERVICE": "train",
}


class OnThisMachineTest(unittest.TestCase):
  def test_the_chief_is_one_of_the_workers(self):
    job = placement.on_this_machine(num_ps=2, num_workers=3)

    names = [task.name for task in job.tasks]
    self.assertEqual(names, ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"])
    self.assertEqual([task.worker_index for task in job.tasks], [0, 0, 1, 1, 2])
    self.assertEqual(
      [task.server_type for task in job.tasks], ["worker", "ps", "ps", "worker", "worker"]
    )

  def test_ports_differ_and_are_on_loopback(self):
    addresses = [task.address for task in placement.on_this_machine(20, 20).tasks]

    self.assertEqual(len(set(addresses)), 40)
    self.assertEqual({address.partition(":")[0] for address in addresses}, {"127.0.0.1"})

  def test_tf_config_is_what_discovery_reads(self):
    from monolith.native_training.service_discovery import TfConfigServiceDiscovery

    job = placement.on_this_machine(num_ps=1, num_workers=2)
    addresses = {task.name: task.address for task in job.tasks}

    discovery = TfConfigServiceDiscovery(json.loads(job.tf_config(job.tasks[-1])))

    self.assertEqual((discovery.server_type, discovery.index), ("worker", 1))
    self.assertEqual(discovery.query("ps"), {0: addresses["ps-0"]})
    self.assertEqual(discovery.query("worker"), {0: addresses["chief-0"], 1: addresses["worker-0"]})

  def test_a_chief_alone_has_no_servers(self):
    job = placement.on_this_machine(num_ps=0, num_workers=1)
    self.assertEqual(list(json.loads(job.tf_config(job.tasks[0]))["cluster"]), ["chief"])

  def test_counts_that_make_no_job_are_refused(self):
    for num_ps, num_workers, message in (
      (1, 0, "num_ps is 1 and num_workers 0, want at least 0 and 1"),
      (-1, 1, "num_ps is -1"),
      (0, 2, "2 workers share tables on servers only"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        placement.on_this_machine(num_ps, num_workers)


class OnHostsTest(unittest.TestCase):
  def test_servers_and_workers_are_dealt_out(self):
    job = placement.on_hosts(["me@a", "b"], num_ps=2, num_workers=3, port=2222)

    self.assertEqual(
      {task.name: (task.host, task.address) for task in job.tasks},
      {
        "chief-0": ("me@a", "a:2222"),
        "ps-0": ("me@a", "a:2223"),
        "ps-1": ("b", "b:2222"),
        "worker-0": ("b", "b:2223"),
        "worker-1": ("me@a", "a:2224"),
      },
    )

  def test_bad_hosts_are_refused(self):
    for hosts in ([], ["a", ""], ["a", "me@a"], ["me@"]):
      with self.subTest(hosts=hosts), self.assertRaisesRegex(ValueError, "want one or more, each"):
        placement.on_hosts(hosts, 1, 1, 2222)

  def test_addresses_of_the_new_kind_stand_in_brackets(self):
    from monolith.native_training import net_utils

    job = placement.on_hosts(["me@fd00::7", "b"], num_ps=1, num_workers=1, port=2222)

    self.assertEqual([task.host for task in job.tasks], ["me@fd00::7"] * 2)
    self.assertEqual([task.address for task in job.tasks], ["[fd00::7]:2222", "[fd00::7]:2223"])
    self.assertEqual(net_utils.split_host_and_port(job.tasks[0].address), ("fd00::7", 2222))

  def test_a_port_of_ssh_is_no_part_of_a_host(self):
    for host in ("a:22", "[fd00::7]"):
      with self.subTest(host=host), self.assertRaisesRegex(ValueError, "--port says where"):
        placement.on_hosts([host], 1, 1, 2222)

  def test_ports_end(self):
    with self.assertRaisesRegex(ValueError, "a would listen at port 65536, want 1 to 65535"):
      placement.on_hosts(["a"], 1, 1, 65535)


class SlurmTest(unittest.TestCase):
  def test_a_task_finds_itself_and_the_others(self):
    job, own = placement.own_task(_SLURM, num_ps=2, num_workers=3, port=7000)

    self.assertEqual(own.name, "worker-0")
    self.assertEqual(
      [task.address for task in job.tasks],
      ["node09:7000", "node09:7001", "node10:7000", "node10:7001", "big:7000"],
    )
    self.assertEqual(json.loads(job.tf_config(own))["task"], {"type": "worker", "index": 0})

  def test_another_number_of_tasks_is_refused(self):
    with self.assertRaisesRegex(ValueError, "3 of 5, but num_ps 2 and num_workers 4 make 6"):
      placement.own_task(_SLURM, num_ps=2, num_workers=4, port=7000)

  def test_another_distribution_is_refused(self):
    with self.assertRaisesRegex(ValueError, "want srun --distribution=block"):
      placement.own_task({**_SLURM, "SLURM_DISTRIBUTION": "cyclic"}, 2, 3, 7000)

  def test_what_does_not_fit_together_is_refused(self):
    for name, value, message in (
      ("SLURM_STEP_TASKS_PER_NODE", "5", "3 nodes, and the tasks of 1"),
      ("SLURM_STEP_TASKS_PER_NODE", "two", "want a list like"),
      ("SLURM_PROCID", "first", "SLURM_PROCID is 'first', want a number"),
      ("SLURM_STEP_NODELIST", "", "none of SLURM_STEP_NODELIST"),
    ):
      with self.subTest(name=name), self.assertRaisesRegex(ValueError, message):
        placement.own_task({**_SLURM, name: value}, 2, 3, 7000)

  def test_an_allocation_of_one_task_starts_all_processes_here(self):
    self.assertIsNone(placement.own_task({**_SLURM, "SLURM_NTASKS": "1"}, 2, 3, 7000))

  def test_lists_of_hosts(self):
    for text, hosts in (
      ("a", ["a"]),
      ("a1,b-2.c", ["a1", "b-2.c"]),
      ("n[1-2,07]", ["n1", "n2", "n07"]),
      ("n[098-101]x,m", ["n098x", "n099x", "n100x", "n101x", "m"]),
    ):
      self.assertEqual(placement.expand_hosts(text), hosts)
    for text in ("n[1-", "a,,b", "n[a]", ",", "n[1-999999999]", "a b", "n[-1]"):
      with self.subTest(text=text), self.assertRaisesRegex(ValueError, "hosts of Slurm are"):
        placement.expand_hosts(text)


class KubernetesTest(unittest.TestCase):
  def test_a_pod_finds_itself_and_the_others(self):
    job, own = placement.own_task(_KUBERNETES, num_ps=2, num_workers=1, port=2222)

    self.assertEqual(own.name, "ps-1")
    self.assertEqual(
      [task.address for task in job.tasks],
      ["train-model-0.train:2222", "train-model-1.train:2222", "train-model-2.train:2222"],
    )

  def test_a_pod_without_a_service_or_of_another_kind_is_refused(self):
    for name, value, message in (
      ("MONOLITH_SERVICE", "", "MONOLITH_SERVICE is not set: .* headless service"),
      ("HOSTNAME", "laptop", "HOSTNAME is 'laptop', want .* ends with -2"),
      ("JOB_COMPLETION_INDEX", "3", "ends with -3"),
    ):
      with self.subTest(name=name), self.assertRaisesRegex(ValueError, message):
        placement.own_task({**_KUBERNETES, name: value}, 2, 1, 2222)

  def test_elsewhere_all_processes_start_here(self):
    self.assertIsNone(placement.own_task({"HOSTNAME": "a-1"}, 2, 1, 2222))


if __name__ == "__main__":
  unittest.main()
