"""Python models that stand in for the C++ backends of Triton's QA. Each file is copied into a model's folder."""
