"""Local copy of a model repository in object storage: a folder with whole versions, of which only changes are copied."""
