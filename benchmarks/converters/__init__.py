"""Other float16 converters beside ours, and the judge of what each makes of a model."""
