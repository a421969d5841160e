"""Endpoints that take text, for models whose task says so: OpenAI's, Cohere's and text-embeddings-inference's (TEI)."""
