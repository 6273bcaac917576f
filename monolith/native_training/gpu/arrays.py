"""Arrays of others on a GPU: where they lie, after a look at their types and shapes."""

from __future__ import annotations

from typing import Any

# Types of gradients, as the interface of arrays calls them. It has no name for bfloat16: tensors of
# PyTorch say what they are.
_GRADIENT_TYPES = {"<f4": 0, "<f2": 1, "bfloat16": 2}
# How PyTorch calls the types of arrays.
_TORCH_TYPES = {
  "<i8": "torch.int64",
  "<f4": "torch.float32",
  "<f2": "torch.float16",
  "bfloat16": "torch.bfloat16",
  "|u1": "torch.uint8",
  "|b1": "torch.bool",
}


def _is_plain_tensor(array: Any) -> bool:
  """Tells whether an array is a packed tensor of PyTorch on a GPU, that no gradient is wanted of.

  The interface of a tensor is made anew in every call, which takes longer than a launch.
  """
  return (
    type(array).__module__ == "torch"
    and array.is_cuda
    and array.is_contiguous()
    and not array.requires_grad
  )


def address_of(
  array: Any, what: str, dtype: str, shape: tuple[int, ...], *, writable: bool = False
) -> int:
  """Returns where an array lies on the device.

  Raises:
    TypeError: it is no array on a GPU, or of another type.
    ValueError: it has another shape, has gaps, or must not be written.
  """
  if _is_plain_tensor(array) and str(array.dtype) == _TORCH_TYPES[dtype] and array.shape == shape:
    return int(array.data_ptr())
  try:
    interface = array.__cuda_array_interface__
  except (AttributeError, RuntimeError) as error:
    raise TypeError(f"{what} is no array on a GPU: {type(array).__name__}") from error
  if interface["typestr"] != dtype:
    raise TypeError(f"{what} has type {interface['typestr']}, want {dtype}")
  if tuple(interface["shape"]) != shape:
    raise ValueError(f"{what} has shape {tuple(interface['shape'])}, want {shape}")
  strides = interface.get("strides")
  if strides is not None:
    packed, step = [], int(dtype[2:])
    for size in reversed(shape):
      packed.append(step)
      step *= size
    if 0 not in shape and tuple(strides) != tuple(reversed(packed)):
      raise ValueError(f"{what} has gaps: strides are {tuple(strides)}; copy it first")
  address, read_only = interface["data"]
  if writable and read_only:
    raise ValueError(f"{what} must not be written")
  return int(address)


def gradients_at(array: Any, shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns where gradients lie on the device, and the number of their type.

  Raises:
    TypeError, ValueError: as `address_of`.
  """
  if type(array).__module__ == "torch":
    found = str(array.dtype)
    wanted = next((name for name in _GRADIENT_TYPES if _TORCH_TYPES[name] == found), "<f4")
  else:
    wanted = getattr(array, "__cuda_array_interface__", {}).get("typestr", "<f4")
    wanted = wanted if wanted in _GRADIENT_TYPES else "<f4"
  return address_of(array, "gradients", wanted, shape), _GRADIENT_TYPES[wanted]


def length_of(ids: Any) -> int:
  """Returns how many ids an array has.

  Raises:
    TypeError: it is no array on a GPU.
    ValueError: it is no vector.
  """
  if _is_plain_tensor(ids) and ids.dim() == 1:
    return len(ids)
  interface = getattr(ids, "__cuda_array_interface__", None)
  if interface is None:
    raise TypeError(f"ids is no array on a GPU: {type(ids).__name__}")
  shape = tuple(interface["shape"])
  if len(shape) != 1:
    raise ValueError(f"ids has shape {shape}, want one dimension")
  return int(shape[0])
