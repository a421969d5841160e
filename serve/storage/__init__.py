"""A model repository in object storage becomes a folder on this machine: whole versions, of which only changes are copied."""
