"""`pb_utils.Tensor`: a named array, with DLPack both ways; and the datatypes as a model.py names them."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfserve.serve.backends.python_child.triton_errors import TritonModelException, phrased
from halfserve.serve.backends.python_child.wire import DTYPES, WireTensor

Array = np.ndarray[Any, Any]
DLPACK_CPU = 1
LENGTH = struct.Struct("<I")
BY_DTYPE = {dtype: name for name, dtype in DTYPES.items() if name not in {"BF16", "BYTES"}}
# Numbers and names of datatypes in a configuration, and their numpy types.
CONFIG_NUMBERS = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    13: np.object_,
}
CONFIG_NAMES: dict[str, Any] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return the elements of an array of bytes or text, each behind its length (uint32); None for an array of numbers."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OSU":
        return None
    parts: list[bytes] = []
    for element in input_tensor.ravel().tolist():
        data = bytes(element) if isinstance(element, bytes | bytearray) else str(element).encode()
        parts += (LENGTH.pack(len(data)), data)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """Return the elements that `serialize_byte_tensor` has written, as a flat array of bytes objects.

    Raises:
        ValueError: an element is cut off.
    """
    data, elements, at = bytes(encoded_tensor), [], 0
    while at < len(data):
        end = at + LENGTH.size
        if end > len(data) or (after := end + LENGTH.unpack_from(data, at)[0]) > len(data):
            raise ValueError("a BYTES tensor ends within an element")
        elements.append(data[end:after])
        at = after
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a configuration's datatype such as "TYPE_FP32".

    Raises:
        KeyError: it has none, as TYPE_BF16.
    """
    return CONFIG_NAMES[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a datatype's number in a configuration; None for an unknown one."""
    return CONFIG_NUMBERS.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the reverse of `triton_to_numpy_type`."""
    if np.dtype(data_type).kind in "OS":
        return 13
    return next((number for number, known in CONFIG_NUMBERS.items() if known == data_type), None)


class _Capsule:
    """Gives numpy a DLPack capsule, as it only takes objects that make one."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CPU, 0


class Tensor:
    """A named array on the CPU."""

    __slots__ = ("_array", "_datatype", "_is_encoded", "_name", "_shape")

    def __init__(self, name: str, numpy_array: Array) -> None:
        """Make a tensor of an array's elements, which are not copied. Text and bytes come as an array of objects or of bytes.

        Raises:
            TritonModelException: the name is empty, or no datatype stands for the array's dtype.
            TypeError: the name is no text, or there is no array.
        """
        if not isinstance(name, str) or numpy_array is None:
            raise TypeError(f"Tensor takes a name and an array, got {name!r} and {type(numpy_array).__name__}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = name
        self._array = np.asarray(numpy_array)
        self._is_encoded = False
        self._shape = tuple(self._array.shape)
        dtype = self._array.dtype
        if dtype.kind in "OSU":
            self._datatype = "BYTES"
        elif dtype.name == "bfloat16":
            self._datatype, self._array = "BF16", self._array.view(np.uint16)
        else:
            known = BY_DTYPE.get(dtype.newbyteorder("<"))
            if known is None:
                raise TritonModelException(f"tensor {name!r} has dtype {dtype}, which no datatype stands for")
            self._datatype = known

    @classmethod
    def from_wire(cls, tensor: WireTensor) -> Tensor:
        """Return a received tensor, whose array stays a view. It was checked by its sender."""
        made = cls.__new__(cls)
        made._receive(tensor)  # noqa: SLF001  (of this class)
        return made

    def _receive(self, tensor: WireTensor) -> None:
        self._name, self._datatype, self._array = tensor.name, tensor.datatype, tensor.data
        self._shape = tuple(tensor.shape)
        self._is_encoded = tensor.datatype == "BYTES"

    def to_wire(self) -> WireTensor:
        """For a message."""
        data = self._array
        if self._datatype == "BYTES":
            if not self._is_encoded:
                data = np.frombuffer(serialize_byte_tensor(data) or b"", np.uint8)
        elif self._datatype != "BF16":
            data = data.astype(DTYPES[self._datatype], copy=False)
        return WireTensor(self._name, self._datatype, self._shape, data)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the elements, not copied; BYTES as an array of bytes objects.

        Raises:
            TritonModelException: they are BF16, which numpy does not have.
        """
        if self._datatype == "BF16":
            text = f"tensor {self._name!r} is BF16, which numpy does not have; use torch.from_dlpack(tensor), or to_dlpack()"
            raise TritonModelException(phrased("BF16", text))
        if self._is_encoded:
            self._array, self._is_encoded = deserialize_bytes_tensor(self._array).reshape(self._shape), False
        return self._array

    def triton_dtype(self) -> int:
        """Return the datatype's number in a configuration: 13 is TYPE_STRING, 14 TYPE_BF16."""
        return {"BYTES": 13, "BF16": 14}.get(self._datatype) or numpy_to_triton_type(DTYPES[self._datatype]) or 0

    def shape(self) -> list[int]:
        return list(self._shape)

    def is_cpu(self) -> bool:
        """Return True: tensors travel in the memory of the CPU."""
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Return a tensor of what has `__dlpack__`, or of a DLPack capsule. Memory of a device is copied to the CPU, BF16 needs
        torch.

        Raises:
            TritonModelException: it is neither, or its memory cannot be read here.
        """
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        given = tensor
        if not hasattr(tensor, "__dlpack__"):
            if type(tensor).__name__ != "PyCapsule":
                raise TritonModelException(
                    f"tensor {name!r} is a {type(tensor).__name__}, expected an object with __dlpack__, or a DLPack capsule"
                )
            tensor = _Capsule(tensor)
        elif hasattr(tensor, "detach"):  # torch, which hands out neither memory of a graph nor of another device
            return _of_torch(name, tensor)
        try:
            return Tensor(name, np.from_dlpack(tensor))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            failure = error
        try:  # torch reads what numpy does not: BF16, and the memory of devices
            return _of_torch(name, _torch().from_dlpack(given))
        except (BufferError, RuntimeError, TypeError, ValueError, TritonModelException):
            raise TritonModelException(f"tensor {name!r} cannot be read by DLPack: {failure}") from failure

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule of the elements.

        Raises:
            TritonModelException: they are BYTES.
        """
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **asked: Any) -> Any:
        if self._datatype == "BYTES":
            raise TritonModelException(f"tensor {self._name!r} is BYTES, which DLPack does not have")
        array = self._array if self._array.flags.writeable else self._array.copy()
        if self._datatype == "BF16":
            torch = _torch()
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).__dlpack__()
        return array.__dlpack__(**{key: value for key, value in asked.items() if value is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CPU, 0


def _of_torch(name: str, tensor: Any) -> Tensor:
    """Return a tensor of torch's."""
    tensor = tensor.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        bits = tensor.view(_torch().int16).numpy().view(np.uint16)
        return Tensor.from_wire(WireTensor(name, "BF16", bits.shape, bits))
    return Tensor(name, tensor.numpy())


def _torch() -> Any:
    try:
        return importlib.import_module("torch")  # the model's own, never the server's
    except ImportError as error:
        raise TritonModelException("BF16 by DLPack needs torch, which is not installed here") from error


def to_wire(tensors: Sequence[Tensor]) -> list[WireTensor]:
    """Several tensors for one message."""
    return [tensor.to_wire() for tensor in tensors]
