"""`halfserve doctor`: what this machine computes, and what is missing for serving."""
