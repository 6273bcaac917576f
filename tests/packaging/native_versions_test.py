"""One build for every TensorFlow: the table of versions, who may ask for one, and what is refused.

Tests `monolith/_install.py`, too; `tensorflow_versions_test.py` has the Python of the package.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from monolith import _install

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CPP_HEADERS = {
  "monolith/native_training/runtime/ops/support/tensorflow_versions.h",
  "monolith/serving/native/base/tensorflow_versions.h",
}
_CPP_QUESTION = re.compile(
  r"__has_include|TF_(MAJOR|MINOR)_VERSION|\bTENSORFLOW_VERSION|\b(GOOGLE_)?PROTOBUF_VERSION"
  r"|ABSL_LTS_RELEASE"
)


def _load(name):
  folder = str(_ROOT / "tools")
  if folder not in sys.path:
    sys.path.insert(0, folder)
  spec = importlib.util.spec_from_file_location(name, _ROOT / f"tools/{name}.py")
  module = importlib.util.module_from_spec(spec)
  sys.modules.setdefault(name, module)
  spec.loader.exec_module(module)
  return module


versions = _load("tensorflow_versions")


class VersionsTest(unittest.TestCase):
  def test_default_of_each_python(self):
    with mock.patch.dict(os.environ, {versions.VARIABLE: ""}):
      for python in ((3, minor) for minor in range(9, 14)):
        chosen = versions.choose(python=python).minor
        self.assertEqual(chosen, "2.15" if python == (3, 9) else list(versions.VERSIONS)[-1])

  def test_make_takes_the_python_at_hand_unless_it_lacks_the_version(self):
    with tempfile.TemporaryDirectory() as folder:
      # That of 3.13 is one of a version manager which does not have it.
      for name, version in (("3", "3.11.7"), ("3.12", "3.12.1"), ("3.13", ""), ("3.14", "3.14.0")):
        python = pathlib.Path(folder, f"python{name}")
        python.write_text(f"#!/bin/sh\n[ -n '{version}' ] && echo Python {version}\n")
        python.chmod(0o755)
      with mock.patch.dict(os.environ, {"PATH": folder, versions.VARIABLE: ""}):
        for wanted in ("", "2.15", "2.18", "2.21"):
          self.assertEqual(versions.find_python(wanted), "python3")
        pathlib.Path(folder, "python3").write_text("#!/bin/sh\necho Python 3.14.0\n")
        for wanted in ("", "2.18", "2.21"):
          self.assertEqual(versions.find_python(wanted), "python3.12")
        self.assertEqual(versions.find_python("2.15"), "python3")  # what it lacks is said later

  def test_what_is_wanted_or_one_sentence(self):
    self.assertEqual(versions.choose("2.18", (3, 12)).release, "2.18.1")
    with mock.patch.dict(os.environ, {versions.VARIABLE: "2.20"}):
      self.assertEqual(versions.choose(python=(3, 11)).minor, "2.20")
    for wanted, python, message in (
      ("2.15", (3, 13), "TensorFlow 2.15 needs Python 3.9 to 3.11, but this is Python 3.13"),
      ("2.14", (3, 11), "builds against TensorFlow 2.15 to 2.21, found 2.14"),
      ("", (3, 14), "Monolith needs Python 3.9 to 3.13"),
      ("", (3, 8), "Monolith needs Python 3.9 to 3.13"),
    ):
      with self.assertRaisesRegex(versions.SetupError, message) as raised:
        versions.choose(wanted, python)
      self.assertNotIn("\n", str(raised.exception))

  def test_what_is_installed_is_built_for(self):
    with tempfile.TemporaryDirectory() as folder:
      self.assertIsNone(versions.installed([folder]))
      info = pathlib.Path(folder, "tensorflow_cpu-2.19.1.dist-info")
      info.mkdir()
      (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 2.19.1")

      self.assertEqual(versions.installed([folder]).minor, "2.19")

  def test_set_up_says_it_before_anything_else(self):
    with tempfile.TemporaryDirectory() as folder:
      tool = _ROOT / "tools/tensorflow_versions.py"
      python = pathlib.Path(folder, "python3.14")
      program = (
        "import runpy, sys; sys.version_info = (3, 14, 0); "
        f"runpy.run_path('{tool}', run_name='__main__')"
      )
      python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
      python.chmod(0o755)
      process = subprocess.run(
        ["bash", str(_ROOT / "tools/setup_environment.sh"), "test-all"],
        env={**os.environ, "PYTHON": str(python), "VENV": f"{folder}/environment"},
        capture_output=True,
        text=True,
      )
      self.assertFalse(os.path.exists(f"{folder}/environment"))

    self.assertNotEqual(process.returncode, 0)
    self.assertEqual(process.stdout, "")
    self.assertRegex(process.stderr, r"^error: Monolith needs Python 3.9 to 3.13, but .*\n$")

  def test_make_and_pip_say_it_alike(self):
    backend = "import build_backend; build_backend.get_requires_for_build_wheel()"
    for command in (["make", "TENSORFLOW=2.14", "build"], [sys.executable, "-c", backend]):
      process = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, versions.VARIABLE: "2.14", "PYTHONPATH": str(_ROOT / "tools")},
        capture_output=True,
        text=True,
      )
      # Beside it, make says which rule failed, and setuptools may announce what it will drop.
      said = [line for line in process.stderr.splitlines() if line.startswith("error")]
      self.assertEqual(said, [f"error: {self._unsupported('2.14')}"], process.stderr)
      self.assertNotEqual(process.returncode, 0)
    self.assertFalse((_ROOT / ".venv-tf2.14").exists())

  def test_the_remedy_fits_the_python(self):
    for python, release in (((3, 9), "2.15.1"), ((3, 13), "2.21.0"), ((3, 14), "2.21.0")):
      with mock.patch.object(versions.sys, "version_info", (*python, 0)):
        self.assertIn(f"pip install 'tensorflow=={release}'", self._unsupported("2.14"))

  def _unsupported(self, release):
    with self.assertRaisesRegex(versions.SetupError, "pip install 'tensorflow==") as raised:
      versions.find_version(release)
    return str(raised.exception)


class RequirementsTest(unittest.TestCase):
  def test_each_version_has_its_own(self):
    requirements = _load("requirements")
    for version in versions.VERSIONS.values():
      build, runtime = requirements.build(version), requirements.runtime(version)
      self.assertIn(f"tensorflow=={version.release}", build)
      self.assertIn(version.protoc_package, build)
      self.assertIn(f"tensorflow>={version.release},<{version.after}", runtime)
      self.assertIn(version.protobuf, runtime)
      keras_2 = f"tf-keras>={version.minor},<{version.after}"
      self.assertEqual(keras_2 in runtime, version.minor != "2.15")
      self.assertEqual("keras>=3.10" in runtime, version.minor != "2.15")
      serving = requirements.extras(version)["serving"]
      self.assertIn(f"tensorflow-serving-api>={version.minor},<{version.after}", serving)


class WhoAsksTest(unittest.TestCase):
  def test_one_header_of_each_side_asks(self):
    asking = set()
    for folder in ("monolith/native_training/runtime", "monolith/serving/native"):
      for path in (_ROOT / folder).rglob("*"):
        if path.suffix in (".cc", ".cu", ".h") and _CPP_QUESTION.search(path.read_text("utf-8")):
          asking.add(path.relative_to(_ROOT).as_posix())

    self.assertEqual(asking, _CPP_HEADERS)

  def test_build_tools_ask_the_table(self):
    tools = [*(_ROOT / "tools").glob("*.py"), _ROOT / "setup.py"]
    tools.append(_ROOT / "third_party/horovod/horovod_backend.py")
    for path in tools:
      if path.stem != "tensorflow_versions":
        # A version in a comparison, or of a requirement.
        found = re.findall(r'.*(?:[=<>]=? *"2\.|tensorflow[=<>]=?\d).*', path.read_text("utf-8"))
        self.assertEqual(found, [], path.name)


class StubsTest(unittest.TestCase):
  def test_stubs_call_servicers_in_all_four_ways(self):
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto(name="p/echo-it.proto", package="p")
    outer = file.message_type.add(name="Outer")
    outer.nested_type.add(name="Inner")
    service = file.service.add(name="Echo")
    for i, name in enumerate(("One", "Out", "In", "Both")):
      service.method.add(
        name=name,
        input_type=".p.Outer",
        output_type=".p.Outer.Inner",
        server_streaming=i in (1, 3),
        client_streaming=i in (2, 3),
      )
    text = _load("grpc_stubs").generate(descriptor_pb2.FileDescriptorSet(file=[file]))

    self.assertIn("from p import echo_it_pb2 as p_dot_echo__it__pb2\n", text)
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
      self.assertEqual(text.count(f"channel.{kind}("), 1)
      self.assertEqual(text.count(f"grpc.{kind}_rpc_method_handler("), 1)
      self.assertEqual(text.count(f"grpc.experimental.{kind}("), 1)
    self.assertIn("response_deserializer=p_dot_echo__it__pb2.Outer.Inner.FromString", text)
    compile(text, "echo_it_pb2_grpc.py", "exec")


class UncompiledTest(unittest.TestCase):
  def test_generated_modules_are_missed_in_one_sentence(self):
    for statement in ("import monolith.made_pb2", "from monolith import made_pb2"):
      with self.assertRaisesRegex(
        ModuleNotFoundError, r"^here needs TensorFlow, .* module monolith\.made_pb2\): pip install"
      ):
        with _install.naming_tensorflow("here"):
          exec(statement)

  def test_other_errors_stay_as_they_are(self):
    with self.assertRaisesRegex(ImportError, "^cannot import name 'made' from 'monolith'"):
      with _install.naming_tensorflow("here"):
        exec("from monolith import made")


class CheckBuildTest(unittest.TestCase):
  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._package = pathlib.Path(folder.name, "monolith")
    self._info = self._package / _install._BUILD_INFO
    self._info.parent.mkdir(parents=True)

  def _built_for(self, tensorflow, protobuf="protobuf>=3.20.3,<8", supported=""):
    self._info.write_text(
      f'"""By the build."""\n\nTENSORFLOW_VERSION = "{tensorflow}"\nPROTOBUF = "{protobuf}"\n'
      f'SUPPORTED = "{supported}"\n'
    )

  def _check(self):
    _install.check_build(self._package)

  def test_another_patch_release_will_do(self):
    self._check()  # nothing was built
    minor = ".".join(_install._tensorflow_version().split(".")[:2])
    self._built_for(f"{minor}.77")
    self._check()

  def test_another_tensorflow_is_one_sentence(self):
    self._built_for("2.99.1")
    with self.assertRaisesRegex(ImportError, r"compiled for TensorFlow 2\.99\.1, but .*pip inst"):
      self._check()
    (self._package.parent / "pyproject.toml").touch()
    with self.assertRaisesRegex(ImportError, r"compile it for this one with .*native_build\.py"):
      self._check()

  def test_an_unsupported_tensorflow_is_not_to_be_compiled_for(self):
    self._built_for("2.99.1", supported="2.98 2.99")
    (self._package.parent / "pyproject.toml").touch()
    with self.assertRaisesRegex(
      ImportError, r"and Monolith works with 2\.98 to 2\.99: pip install tensorflow==2\.99\.1$"
    ):
      self._check()

  def test_another_protobuf_is_one_sentence(self):
    for version in versions.VERSIONS.values():
      # The first and the last release that fit, and one on either side.
      oldest, newest = re.fullmatch(r"protobuf>=([\d.]+),<(\d+)", version.protobuf).groups()
      self._built_for(_install._tensorflow_version(), version.protobuf)
      for release, fits in (
        (oldest, True),
        (f"{int(newest) - 1}.99.9", True),
        ("3.20.2", False),
        (f"{newest}.0.0", False),
      ):
        with self.subTest(tensorflow=version.minor, protobuf=release):
          with mock.patch.object(_install, "_version_of", side_effect=self._with_protobuf(release)):
            if fits:
              self._check()
              continue
            with self.assertRaisesRegex(
              ImportError, rf"has protobuf {release}: pip install '{version.protobuf}'$"
            ):
              self._check()

  def _with_protobuf(self, release):
    real = _install._version_of
    return lambda name: release if name == "protobuf" else real(name)

  def test_limits_of_protobuf_are_within_those_of_tensorflow(self):
    required = [r for r in importlib.metadata.requires("tensorflow") if r.startswith("protobuf")]
    here = versions.installed()
    for operator, bound in re.findall(r"(>=|<)([\d.]+)", required[0]):
      ours = re.search(rf"{operator}([\d.]+)", here.protobuf)[1]
      order = [_install._numbers(bound), _install._numbers(ours)]
      self.assertLessEqual(*(order if operator == ">=" else order[::-1]), (operator, required))


if __name__ == "__main__":
  unittest.main()
