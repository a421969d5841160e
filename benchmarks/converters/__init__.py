"""Other float16 converters besides ours, and the judge of their conversions."""
