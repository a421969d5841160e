"""Mixed-precision training: autocast with policies, a gradient scaler, and a training loop.

`halfserve` exports the public names.
"""
