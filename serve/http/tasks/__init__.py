"""Endpoints that take text or pictures, for models whose task says so, in the forms of OpenAI, Cohere and Hugging Face."""
