"""Ensembles: models that consist of other models, their steps."""
