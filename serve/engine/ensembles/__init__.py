"""Ensembles: models that are made of other models, their steps."""
