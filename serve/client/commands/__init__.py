"""`halfserve infer` and `halfserve models`."""
