"""Which requests wait, which run together and when, and which are refused. Pure policy: no thread, no event loop."""
