"""What runs beside a model.py, in a process of its own: any Python of 3.10 or newer with numpy, and without halfserve."""
