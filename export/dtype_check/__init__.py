"""The dtype check: where a model leaves its half-precision type, and helpers for models that keep the dtype of their inputs."""
