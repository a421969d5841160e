"""Names of the request and response parameters that place a tensor in shared memory.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md
"""

from __future__ import annotations

REGION = "shared_memory_region"  # the registered region's name, a string
BYTE_SIZE = "shared_memory_byte_size"  # of the tensor, or the room for it
OFFSET = "shared_memory_offset"  # from the region's start, in bytes; 0 if absent
PARAMETERS = frozenset((REGION, BYTE_SIZE, OFFSET))
