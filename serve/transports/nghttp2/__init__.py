"""gRPC over libnghttp2: one connection's wire, its session with the client's calls, and their fast path.

Who owns a stream, and when, is in docs/explanation/design.md.
"""
