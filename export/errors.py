"""What can go wrong in this stage for reasons that are the user's to mend."""


class ExportError(Exception):
    """A model, an input, a file or a setting that this stage cannot work with; the text is one line and says what to do."""
