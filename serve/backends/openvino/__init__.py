"""OpenVINO on the CPU: its own model files, and ONNX files.

`openvino` is imported after this package alone: at its import it reports the use to its maker over the network, by a package
of its own, if that can be imported.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # (None lets an import fail)
