"""Makes the TensorFlow of $PYTHON_BIN_PATH, and that Python itself, visible to Bazel."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

cc_library(
    name = "headers",
    # One glob: a file that two of them name would be an error. Eigen's headers have no suffix.
    hdrs = glob([
        "include/**/*.h",
        "include/**/*.hpp",
        "include/**/*.inc",
        "include/Eigen/**",
        "include/third_party/eigen3/**",
        "include/unsupported/**",
    ]),
    defines = ["_GLIBCXX_USE_CXX11_ABI=1", "EIGEN_MAX_ALIGN_BYTES=64"],
    # TensorFlow's headers include <zlib.h>, which its wheels bring.
    includes = [
        "include",
        "include/external/zlib",
    ],
)

cc_import(
    name = "framework",
    shared_library = "libtensorflow_framework.so.2",
)

py_runtime(
    name = "python3",
    interpreter_path = "%s",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":python3",
)

toolchain(
    name = "python_toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

_FIND_TENSORFLOW = (
    "import importlib.util, os; " +
    "print(os.path.dirname(importlib.util.find_spec('tensorflow').origin))"
)

def _tensorflow_configure_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH", "")
    if not python:
        fail("Set PYTHON_BIN_PATH to a Python that has TensorFlow ('make bazel-test' does it).")
    result = ctx.execute([python, "-c", _FIND_TENSORFLOW])
    if result.return_code != 0:
        fail("%s finds no TensorFlow: %s" % (python, result.stderr))
    root = result.stdout.strip()
    ctx.symlink(root + "/include", "include")
    ctx.symlink(root + "/libtensorflow_framework.so.2", "libtensorflow_framework.so.2")
    ctx.file("BUILD", _BUILD % python)

tensorflow_configure = repository_rule(
    implementation = _tensorflow_configure_impl,
    environ = ["PYTHON_BIN_PATH"],
    local = True,
)
