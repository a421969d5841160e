"""The digits classifier trained in float16 by other frameworks, with our autocast, policy and GradScaler in them.

`python -m examples.integrations.lightning_trainer`, `.lightning_fabric` and `.accelerate_loop` each print how well the held-out
digits are recognized, how many steps were skipped, and the scale at the end.
"""
