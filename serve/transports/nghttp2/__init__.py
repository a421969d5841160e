"""gRPC over libnghttp2: one connection's frames, its calls, and the socket that carries them.

Who owns a stream, and when:

- A call's object lies in the session's `calls` from its headers until its answer is passed on or its stream is gone. Both
  owners share these calls.
- The fast path owns a stream if it is open when the headers come, and they repeat a template byte for byte (`begin`). The
  stream is then in `granted`, and its request in `requests` until it is complete. libnghttp2 does not know it.
- libnghttp2 owns every other stream.
- A stream changes its owner once at most, from the fast path to libnghttp2, and all streams of a connection together
  (`hand_over`): before libnghttp2 reads a HEADERS frame, when a request or an answer needs what the fast path does not do, and
  for good when the fast path retires.
- A stream of the fast path ends with its answer (`answer`, `fail`); what still comes for it is counted and dropped.
- A stream of libnghttp2 ends with its event StreamClosed or StreamReset (`_stream_gone`). If the call is not answered by then,
  its client has gone.
- Both reopen the connection's receive window. Only libnghttp2 reopens a stream's, so that large requests are its own.
"""
