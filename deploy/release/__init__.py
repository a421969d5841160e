"""What `make release` does: build, check, try and describe the files of a release."""
