"""Writes a record file of each kind and compression, to be read by every later version.

  python -m tests.native_training.data.write_golden_files

makes `golden/VERSION` beside this file. A version's files are written once, by that version.
"""

from __future__ import annotations

import gzip
import os
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

import monolith
from idl.matrix.proto import example_pb2
from tests.native_training.data.data_test_utils import (
  fid_v1,
  fid_v2,
  frame,
  make_example,
  make_instance,
)
from tests.reliability.torn_files import COMPRESSIONS

FOLDER = os.path.join(os.path.dirname(__file__), "golden")
ROWS = 3
CSV = 'user,stars,day\nann,4.5,9007199254740993\nbob,-1e2,-7\n"cy, dy",3,0\n'


def _write(folder: str, name: str, content: bytes) -> None:
  with open(os.path.join(folder, name), "xb") as file:
    file.write(content)


def _write_framed(folder: str) -> None:
  batch = example_pb2.ExampleBatch(batch_size=ROWS)
  lines = batch.named_feature_list.add(name="__LINE_ID__")
  values = batch.named_feature_list.add(name="a")
  examples, instances = [], []
  for i in range(ROWS):
    example = make_example({"a": [fid_v2(2, i)] * i}, uid=i + 1)
    examples.append(example.SerializeToString())
    instances.append(make_instance([fid_v1(3, i)] * i, uid=i + 1).SerializeToString())
    lines.feature.add().bytes_list.value.append(example.line_id.SerializeToString())
    values.feature.add().fid_v2_list.value.extend([fid_v2(2, i)] * i)
  kinds = {"example": examples, "instance": instances, "examplebatch": [batch.SerializeToString()]}
  for kind, payloads in kinds.items():
    content = b"".join(frame(payload, struct.pack("<Q", 2) + b"id") for payload in payloads)
    for compression, (compress, _) in COMPRESSIONS.items():
      _write(folder, f"{kind}.{compression}", compress(content))


def write(folder: str) -> None:
  """Writes all files into a new folder."""
  os.makedirs(folder)
  _write(folder, "rows.csv", CSV.encode())
  _write(folder, "rows.csv.gz", gzip.compress(CSV.encode(), mtime=0))
  for compression in ("NO", "GZIP", "ZLIB"):
    path = os.path.join(folder, f"records.{compression.lower()}")
    with tf.io.TFRecordWriter(path, "" if compression == "NO" else compression) as writer:
      for i in range(ROWS):
        writer.write(b"record %d" % i)
  _write_framed(folder)
  table = pa.table(
    {
      "__UID__": pa.array(range(1, ROWS + 1), pa.int64()),
      "a": pa.array([[fid_v2(2, i)] * i for i in range(ROWS)], pa.list_(pa.int64())),
    }
  )
  for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
    path = os.path.join(folder, f"{codec}.parquet")
    pq.write_table(table, path, row_group_size=2, compression=codec, write_page_checksum=True)


if __name__ == "__main__":
  write(os.path.join(FOLDER, monolith.__version__))
