"""The process of a model.py: any Python of 3.10 or newer with numpy, and without halfserve."""
