"""The two contracts where the stages meet: inference.proto (the wire) and model_config.proto (the disk)."""
