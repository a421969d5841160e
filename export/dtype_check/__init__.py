"""The dtype check: where a model leaves float16, and helpers for models that keep the dtype of their inputs."""
