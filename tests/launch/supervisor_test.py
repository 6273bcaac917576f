"""`python -m monolith.launch` with real processes: what it starts, starts again, and ends with.

Tests `launch/supervisor.py` and `launch/__main__.py`.
"""

import io
import json
import os
import pathlib
import pty
import select
import shlex
import signal
import subprocess
import sys
import textwrap
import unittest
from unittest import mock

from monolith.launch import __main__ as launch_main
from monolith.launch import placement, supervisor
from tests import ssh_server
from tests.wait_until import wait_until

_SECONDS = 60
_ROLE = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role = "{type}-{index}".format(**config["task"])
folder = pathlib.Path(sys.argv[1])
(folder / f"{role}.started").open("a").write(f"{os.getpid()}\\n")
print(role, "is here", flush=True)
def wait_for(name):
  while not (folder / name).exists():
    time.sleep(0.02)
"""


class LaunchTest(unittest.TestCase):
  def setUp(self):
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.logs = self.folder / "logs"
    self.environment = {
      name: value
      for name, value in os.environ.items()
      if not name.startswith(("SLURM_", "JOB_COMPLETION"))
    }

  def _start(self, body: str, *options: str, arguments=(), **popen) -> subprocess.Popen:
    script = self.folder / "role.py"
    script.write_text(_ROLE + textwrap.dedent(body))
    command = [sys.executable, "-m", "monolith.launch", f"--log_dir={self.logs}", *options]
    process = subprocess.Popen(
      [*command, str(script), str(self.folder), *arguments],
      env=self.environment,
      **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **popen},
    )
    self.addCleanup(process.kill)
    return process

  def _run(self, body: str, *options: str, arguments=()) -> "tuple[int, str]":
    process = self._start(body, *options, arguments=arguments)
    output, _ = process.communicate(timeout=_SECONDS)
    return process.returncode, output

  def _title(self, role: str) -> str:
    """Returns what messages call a process."""
    return role

  def _pids(self, role: str) -> "list[int]":
    path = self.folder / f"{role}.started"
    return [int(line) for line in path.read_text().split()] if path.exists() else []

  def test_all_processes_run_and_the_chief_decides_the_status(self):
    status, output = self._run(
      """
      (folder / role).touch()
      for name in ("chief-0", "ps-0", "ps-1", "worker-0"):
        wait_for(name)
      """,
      "--num_ps=2",
      "--num_workers=2",
    )

    self.assertEqual(status, 0, output)
    self.assertIn("4 of 4 processes here", output)
    for role in ("chief-0", "ps-0", "ps-1", "worker-0"):
      self.assertEqual(len(self._pids(role)), 1)
      # Over ssh, the files of a login shell may write something before.
      self.assertEqual((self.logs / f"{role}.log").read_text().splitlines()[-1], f"{role} is here")

  def test_flags_of_a_program_say_who_it_is(self):
    status, output = self._run(
      "(folder / role).write_text(' '.join(sys.argv[2:]))",
      "--num_ps=1",
      "--num_workers=2",
      arguments=["--{server_type}={index}", "{num_ps}/{num_workers}", "{tf_config}", "{other}"],
    )

    self.assertEqual(status, 0, output)
    kind, counts, *config = (self.folder / "chief-0").read_text().split(" ", 2)
    self.assertEqual((kind, counts), ("--worker=0", "1/2"))
    self.assertEqual(json.loads(config[0].rpartition(" ")[0])["task"]["type"], "chief")
    self.assertTrue(config[0].endswith(" {other}"))

  def test_a_process_that_dies_is_started_again(self):
    status, output = self._run(
      """
      if role == "ps-0" and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
      if role == "ps-0":
        (folder / "again").touch()
      wait_for("again")
      """
    )

    self.assertEqual(status, 0, output)
    self.assertEqual(len(self._pids("ps-0")), 2)
    self.assertEqual(len(self._pids("chief-0")), 1)
    self.assertIn(f"{self._title('ps-0')} ended with status 137; ", output)
    self.assertIn(f"{self._title('ps-0')} starts again in 1 s (1 of 3 within an hour)", output)

  def test_one_that_dies_too_often_ends_the_job_with_its_status_and_log(self):
    status, output = self._run(
      """
      if role == "ps-0":
        print("the disk is full", flush=True)
        sys.exit(7)
      def save(*_):
        (folder / "saved").touch()
        sys.exit(15)
      signal.signal(signal.SIGTERM, save)
      (folder / "ready").touch()
      while True:
        signal.pause()
      """,
      "--max_restarts=1",
    )

    self.assertEqual(status, 7, output)
    self.assertEqual(len(self._pids("ps-0")), 2)
    self.assertIn("  the disk is full", output)
    # The chief may have ended before it could do anything.
    self.assertTrue((self.folder / "saved").exists() or not (self.folder / "ready").exists())
    self._assert_all_gone()

  def test_a_signal_goes_to_the_chief_first(self):
    for number in (signal.SIGINT, signal.SIGTERM):
      with self.subTest(number=number):
        for path in self.folder.glob("*.*"):
          path.unlink() if path.is_file() else None
        process = self._start(
          """
          def end(number, _):
            (folder / f"{role}.ended").write_text(
              f"{number} {(folder / 'chief-0.ended').exists()}")
            sys.exit(number)
          for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
          (folder / f"{role}.ready").touch()
          while True:
            signal.pause()
          """
        )
        wait_until(lambda: len(list(self.folder.glob("*.ready"))) == 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=_SECONDS)

        self.assertEqual(process.returncode, number, output)
        self.assertEqual((self.folder / "chief-0.ended").read_text(), f"{int(number)} False")
        self.assertEqual((self.folder / "ps-0.ended").read_text(), "15 True")

  def test_a_second_signal_ends_everything_at_once(self):
    process = self._start(
      """
      signal.signal(signal.SIGTERM, lambda *_: (folder / f"{role}.told").touch())
      (folder / f"{role}.ready").touch()
      while True:
        time.sleep(0.02)
      """
    )
    wait_until(lambda: len(list(self.folder.glob("*.ready"))) == 2)
    process.terminate()
    wait_until((self.folder / "chief-0.told").exists)
    process.terminate()
    process.communicate(timeout=_SECONDS)

    self.assertNotEqual(process.returncode, 0)
    self._assert_all_gone()

  def test_a_chief_saves_though_nobody_reads_what_the_launcher_prints(self):
    # As after Ctrl-C in `python -m monolith.launch ... | tee`, which ends `tee` first.
    process = self._start(
      """
      def end(number, _):
        time.sleep(0.5)
        (folder / f"{role}.ended").touch()
        sys.exit(number)
      signal.signal(signal.SIGINT, end)
      (folder / f"{role}.ready").touch()
      while True:
        signal.pause()
      """
    )
    wait_until(lambda: len(list(self.folder.glob("*.ready"))) == 2)
    process.stdout.close()
    process.send_signal(signal.SIGINT)

    self.assertEqual(process.wait(_SECONDS), signal.SIGINT)
    self.assertTrue((self.folder / "chief-0.ended").exists())
    self._assert_all_gone()

  def test_logs_that_somebody_deletes_do_not_end_the_job(self):
    status, output = self._run(
      f"""
      import shutil
      if role == "ps-0" and not (folder / "died").exists():
        wait_for("chief-0.started")
        (folder / "died").touch()
        shutil.rmtree({str(self.folder / "logs")!r})
        sys.exit(7)
      if role == "ps-0":
        (folder / "again").touch()
      wait_for("again")
      """
    )

    self.assertEqual(status, 0, output)
    self.assertEqual((self.logs / "ps-0.log").read_text().splitlines()[-1], "ps-0 is here")

  def test_what_does_not_end_after_the_chief_is_named_and_ended(self):
    status, output = self._run(
      """
      if role == "worker-0":
        (folder / "late").touch()
        signal.pause()
      if role == "chief-0":
        wait_for("late")
      """,
      "--num_workers=2",
      "--grace_seconds=0.5",
    )

    self.assertEqual(status, 0, output)
    title = self._title("worker-0")
    self.assertIn(f"still there 0.5 s after the chief has ended: {title}", output)
    self._assert_all_gone()

  def test_a_launcher_that_is_killed_leaves_nothing_behind(self):
    process = self._start('(folder / f"{role}.ready").touch()\nsignal.pause()')
    wait_until(lambda: len(list(self.folder.glob("*.ready"))) == 2)
    process.kill()
    process.wait()
    self._assert_all_gone()

  def _assert_all_gone(self):
    for path in self.folder.glob("*.started"):
      for pid in path.read_text().split():
        wait_until(lambda pid=pid: not _is_running(pid), 30)

  def test_follow_shows_every_line_with_its_process(self):
    status, output = self._run("print('one\\ntwo')", "--follow")

    self.assertEqual(status, 0, output)
    for line in ("[chief-0] one", "[chief-0] two", "[ps-0] two"):
      self.assertIn(line, output.splitlines())

  def test_a_line_without_an_end_does_not_stop_the_progress(self):
    status, output = self._run(
      """
      if role == "chief-0":
        print("x" * (3 << 20), end="\\r", flush=True)
        print("\\nstep 7", flush=True)
      """,
      "--follow",
    )

    self.assertEqual(status, 0, output[-1000:])
    self.assertIn("[chief-0] step 7", [line[:100] for line in output.splitlines()])

  def test_a_terminal_shows_one_line_of_progress(self):
    controller, terminal = pty.openpty()
    self.addCleanup(os.close, controller)
    process = self._start(
      """
      if role == "chief-0":
        print("step 5 \\x1b[2Jloss 0.5", flush=True)
      wait_for("seen")
      """,
      stdout=terminal,
      stderr=terminal,
    )
    os.close(terminal)
    seen = b""
    while b"loss 0.5" not in seen:
      self.assertTrue(select.select([controller], [], [], _SECONDS)[0], seen)
      seen += os.read(controller, 65536)
    (self.folder / "seen").touch()

    self.assertIn(b"servers 1/1, workers 1/1 | chief-0: step 5  [2Jloss 0.5", seen)
    self.assertEqual(process.wait(_SECONDS), 0)

  def test_slurm_starts_one_process_in_each_task(self):
    self.environment.update(
      SLURM_PROCID="1",
      SLURM_NTASKS="2",
      SLURM_STEP_NODELIST="node[1-2]",
      SLURM_STEP_TASKS_PER_NODE="1(x2)",
    )
    status, output = self._run("(folder / role).write_text(os.environ['TF_CONFIG'])")

    self.assertEqual(status, 0, output)
    config = json.loads((self.folder / "ps-0").read_text())
    self.assertEqual(config["cluster"], {"chief": ["node1:2222"], "ps": ["node2:2222"]})
    self.assertEqual([path.name for path in self.logs.iterdir()], ["ps-0.log"])

  def test_bad_command_lines_are_one_sentence(self):
    for arguments, message in (
      ([], "there is no program to start"),
      (["/nowhere.py"], "there is no script '/nowhere.py'"),
      (["--num_workers=0", __file__], "num_ps is 1 and num_workers 0, want at least 0 and 1"),
      (["--hosts=a,a", __file__], "hosts are ['a', 'a'], want one or more, each once"),
      (["--grace_seconds=nan", __file__], "must not be negative"),
      (["--hosts=a", "--ssh=/no/ssh -v", __file__], "--ssh is '/no/ssh -v', want a program"),
      (["--hosts=a", "--ssh='", __file__], "No closing quotation"),
      ([f"--log_dir={__file__}/x", __file__], "which cannot be made: Not a directory"),
    ):
      with self.subTest(arguments=arguments):
        done = subprocess.run(
          [sys.executable, "-m", "monolith.launch", *arguments], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn(message, done.stderr.splitlines()[-1])

  def test_it_loads_no_tensorflow(self):
    program = "import sys, monolith.launch.__main__; print('tensorflow' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    self.assertEqual(printed.stdout.strip(), "False", printed.stderr)


class ProcessTest(unittest.TestCase):
  """One process, and its log."""

  def setUp(self):
    self.process = supervisor._Process(
      placement.Task("ps", 0, "a:1", host="a"), pathlib.Path(os.environ["TEST_TMPDIR"])
    )

  def test_a_connection_that_breaks_while_a_signal_is_sent(self):
    self.process.start(["sh", "-c", "exec <&-; echo closed; sleep 0.5; exit 3"], dict(os.environ))
    wait_until(lambda: self.process.new_lines() == ["closed"])
    self.process.send(signal.SIGTERM)
    wait_until(self.process.has_ended)

    self.assertEqual(self.process.status, 3)

  def test_the_end_of_a_log(self):
    with self.process.log.open("w") as log:
      log.write("x" * (1 << 20) + "\n")
      log.writelines(f"{i}\n" for i in range(100))

    self.assertEqual(self.process.last_lines(), [str(i) for i in range(80, 100)])
    self.process.log.write_text("only\none")
    self.assertEqual(self.process.last_lines(), ["only", "one"])
    self.process.log.unlink()
    self.assertEqual(self.process.last_lines(), [])

  def test_a_log_that_is_begun_anew_is_read_from_its_start(self):
    self.process.log.write_text("one\ntwo\n")
    self.assertEqual(self.process.new_lines(), ["one", "two"])
    self.process.log.write_text("new\n")
    self.assertEqual(self.process.new_lines(), ["new"])


class RestartsTest(unittest.TestCase):
  def test_failures_of_the_last_hour_count(self):
    job = placement.on_this_machine(0, 1)
    options = supervisor.Options(("false",), pathlib.Path(os.environ["TEST_TMPDIR"]))
    screen = io.StringIO()
    own = supervisor.Supervisor(job, job.tasks, options, screen)
    (process,) = own._processes
    for minute in (90, 100, 155, 156):
      with mock.patch.object(supervisor.time, "monotonic", lambda now=60 * minute: now):
        own._start_those_due()
        process.running.wait()
        own._look_at_those_that_ended()
        own._show(last=True)
        process.start_at = 0.0

    counts = [line.split(" starts ")[1] for line in screen.getvalue().splitlines() if "(" in line]
    self.assertEqual(counts, [
      "again in 1 s (1 of 3 within an hour)",
      "again in 2 s (2 of 3 within an hour)",
      "again in 2 s (2 of 3 within an hour)",
      "again in 4 s (3 of 3 within an hour)",
    ])  # fmt: skip
    self.assertIn("started again 3 |", screen.getvalue())


class SshTest(LaunchTest):
  """Hosts, which are this machine by two names, through a started sshd."""

  def setUp(self):
    super().setUp()
    ssh_server.require()
    server = ssh_server.SshServer(self.folder / "ssh")
    self.addCleanup(server.stop)
    self.ssh = server.command

  def _start(self, body: str, *options: str, **kwargs) -> subprocess.Popen:
    if self._takes_hosts(body):
      options = ("--hosts=127.0.0.1,localhost", f"--ssh={self.ssh}", *options)
    return super()._start(body, *options, **kwargs)

  def _title(self, role: str) -> str:
    return f"{role} on {'localhost' if role == 'worker-0' else '127.0.0.1'}"

  def test_a_host_that_cannot_be_reached_is_named(self):
    self.ssh = self.ssh.replace(" -p ", " -p 1 -p ")  # of two, ssh takes the first
    status, output = self._run("pass", "--max_restarts=0", "--grace_seconds=0")

    self.assertEqual(status, 255, output)
    self.assertRegex(output, "on 127.0.0.1 ended with status 255, as ssh does where it cannot")

  def test_ssh_does_not_wait_for_ever(self):
    # The words of the test's ssh begin with those of the default, of which ssh takes the first.
    known = subprocess.run(
      [*supervisor.SSH, "-G", "-F", "/dev/null", "host"], capture_output=True, text=True, check=True
    ).stdout.splitlines()

    self.assertIn("connecttimeout 10", known)
    self.assertIn("serveraliveinterval 10", known)
    self.assertIn("serveralivecountmax 4", known)
    default = launch_main.make_parser().parse_args(["program"]).ssh
    self.assertEqual(tuple(shlex.split(default)), supervisor.SSH)

  def _takes_hosts(self, body: str) -> bool:
    # Slurm has chosen its hosts, and a name of this machine is not loopback there.
    return "SLURM_PROCID" not in self.environment


def _is_running(pid: str) -> bool:
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
  except (FileNotFoundError, ProcessLookupError):
    return False


if __name__ == "__main__":
  unittest.main()
