"""How far the fp16 model is from its reference, and whether that is within the budget."""
