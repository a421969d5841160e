"""The page for people: what is served, how it does, and a form to try it."""
