"""Checks that a server follows the Open Inference Protocol (KServe v2), over gRPC and REST.

`halfserve conformance HOST:PORT` asks a running server as a client would. Nothing here imports the server's code: the checks
know the protocol's messages (`halfserve.protos`), grpcio, and sockets.
"""
