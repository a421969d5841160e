"""Options of `halfserve serve`: a dataclass for each panel of its help, which declares them and makes the rooms' settings."""
