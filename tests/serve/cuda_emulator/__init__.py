"""CUDA memory between processes: on the device where there is one, and with an emulated driver everywhere."""
