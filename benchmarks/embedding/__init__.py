"""Parts of benchmarks/embeddings.py."""
