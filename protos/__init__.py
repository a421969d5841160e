"""The two formats that the stages share: inference.proto (on the wire) and model_config.proto (on disk)."""
