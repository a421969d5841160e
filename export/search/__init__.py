"""The smallest part of a model that has to stay float32."""
