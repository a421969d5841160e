"""Names of the request and response parameters that place a tensor in shared memory.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md
"""

from __future__ import annotations

REGION = "shared_memory_region"  # name of the registered region, a string
BYTE_SIZE = "shared_memory_byte_size"  # size of the tensor, or of the space for it, in bytes
OFFSET = "shared_memory_offset"  # offset from the region's start in bytes; 0 if absent
PARAMETERS = frozenset((REGION, BYTE_SIZE, OFFSET))
